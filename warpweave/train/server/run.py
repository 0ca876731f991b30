"""``warpweave train --server``: start the servers and workers, and restart servers that die.

    this process       keeps the store, watches the others
    server 0 .. K-1    if a signal kills one, all restart from the newest checkpoint
    worker 0 .. N-1    if one is killed, the servers are notified and continue without it

torch's launcher cannot start them, because it ends every rank when one dies.
"""

from __future__ import annotations

import json
import signal
import time
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from warpweave.checkpoint import CheckpointError, latest
from warpweave.cli.messages import one_line, say
from warpweave.launch.devices import BACKENDS, gpu_count, share_cores
from warpweave.launch.interrupt import STOPS
from warpweave.launch.processes import Forked, Processes, end, environment, leave, told_ranks
from warpweave.launch.supervise import keep_store, kept_store, supervise
from warpweave.parallel.server.link import check_loopback
from warpweave.parallel.server.server import start_generation, tell
from warpweave.parallel.server.shard import spread
from warpweave.parallel.server.worker import LostError
from warpweave.train.options import CHECKPOINTS, TrainConfig
from warpweave.train.server.roles import ServedModel, serve, work

_AGAIN = 5  # restarts of the servers before the run fails
_GRACE = 5.0  # seconds that workers have to end after a signal, once the servers have saved
_REFUSED = (ValueError, CheckpointError, OSError)
_FAILED = (LostError, TimeoutError, FloatingPointError, dist.DistError)


def run(config: TrainConfig, processes: Processes | None = None) -> None:
    """Start the servers and workers, in `processes` if they are prepared, and supervise them until
    the run ends (`supervise` says how it exits). Raises ValueError before anything is started if
    the options cannot work."""
    device = _device(config)
    served = ServedModel(config, device)
    spread(served.records, config.server)
    check_loopback("127.0.0.1")
    dp, per_step = config.mesh.dp, config.plan.microbatches * config.batch
    say(
        f"servers: {config.server}, workers: {dp} ({device}), staleness {config.staleness}; "
        f"{per_step} sequences per worker per step"
    )
    backend = BACKENDS[device]  # of the workers' devices; tensors travel over gloo
    with environment(**told_ranks(backend)):
        Servers(config, device, Processes.of(_rank, backend, processes)).run()


def _device(config: TrainConfig) -> str:
    """ "cuda" if there is a GPU for each worker and the CPU was not requested, else "cpu"."""
    gpus, workers = gpu_count(), config.mesh.dp
    if config.device == "cuda" and gpus < workers:
        raise ValueError(f"{workers} workers need one GPU each, but this process sees {gpus}")
    return "cuda" if config.device != "cpu" and gpus >= workers else "cpu"


class Servers:
    """The servers and workers of a run."""

    def __init__(self, config: TrainConfig, device: str, processes: Processes) -> None:
        self.config, self.device, self.store = config, device, keep_store()
        self.processes = processes
        self.servers: list[BaseProcess | Forked] = []
        self.workers: dict[int, BaseProcess | Forked] = {}
        self._killed = 0  # how often servers were killed
        self._told = False  # the servers know of a signal

    def run(self) -> None:
        """Supervise the processes until the run ends."""
        supervise(self.processes, self.start, self.watch)

    def start(self) -> None:
        """Start all servers and workers."""
        found = self.config.resume == "auto" and latest(self.config.out / CHECKPOINTS)
        self._start_servers(self.config.resume is True or bool(found))
        for number in range(self.config.mesh.dp):
            self.workers[number] = self._start("worker", number)

    def _start(self, role: str, number: int, *more: Any) -> BaseProcess | Forked:
        given = (role, number, self.config, self.device, self.store.port, *more)
        return self.processes.start(_rank, *given)

    def _start_servers(self, resume: bool) -> None:
        workers = list(self.workers) or list(range(self.config.mesh.dp))
        numbers = range(self.config.server)
        self.servers = [self._start("server", k, workers, resume) for k in numbers]

    def watch(self, stop: int | None) -> int | None:
        """Handle what has happened since the last call. Return the exit code when server 0 is done,
        or that of an unrecoverable error."""
        if stop is not None and not self._told:
            self._told = True
            tell(self.store, "stop")
        codes = [server.exitcode for server in self.servers]
        if codes[0] == 0:
            return self._finish(stop)
        if failed := [c for c in codes if c is not None and c > 0]:
            return failed[0]
        if any(c is not None and c < 0 for c in codes):
            self._killed += 1
            if self._killed > _AGAIN:
                say(f"servers were killed {self._killed} times; giving up")
                return 1
            self._restart()
        for number, process in list(self.workers.items()):
            if process.exitcode:  # a worker that is done may end
                del self.workers[number]
                tell(self.store, "lost", worker=number)
        if not self.workers:
            say("no workers are left")
            return 1
        return None

    def _finish(self, stop: int | None) -> int:
        """Print the result and wait for the others. Return the exit code.

        After a signal the wait is short: a worker that still looks for restarted servers has
        nothing to lose, and `supervise` kills it."""
        if self.store.check(["result"]):
            print(self.store.get("result").decode(), flush=True)
        until = time.monotonic() + (self.config.timeout if stop is None else _GRACE)
        for process in (*self.servers, *self.workers.values()):
            process.join(max(0.0, until - time.monotonic()))
        return 0

    def _restart(self) -> None:
        """Restart all servers from the newest checkpoint; workers reconnect by themselves."""
        end(self.servers)
        step = latest(self.config.out / CHECKPOINTS)
        self._told = False  # the new ones do not know
        say(f"a server was killed; restarting all servers from {step or 'the beginning'}")
        start_generation(self.store)
        self._start_servers(step is not None)


def _rank(role: str, number: int, config: TrainConfig, device: str, port: int, *more: Any) -> None:
    """Run one server or worker; the entry point of its process."""
    name = f"{role} {number}"
    for stop in STOPS:  # the parent process decides when to stop
        signal.signal(stop, signal.SIG_IGN)
    share_cores(config.server + config.mesh.dp)
    store = kept_store(port, config.timeout)
    try:
        if role == "server":
            result = serve(config, store, number, more[0], resume=more[1])
            if number == 0:
                store.set("result", json.dumps(result))
        else:
            work(config, store, number, torch.device(device, number if device == "cuda" else None))
    except (*_REFUSED, *_FAILED) as error:
        say(f"{name}: {one_line(error)}")
        leave(1 if isinstance(error, _FAILED) else 2)  # a TimeoutError is an OSError
    leave(0)
