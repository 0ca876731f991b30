"""``warpweave train --server``: start the servers and workers, and restart servers that die.

    this process       keeps the store, watches the others
    server 0 .. K-1    if a signal kills one, all restart from the newest checkpoint
    worker 0 .. N-1    if one is killed, the servers are notified and continue without it

torch's launcher cannot start them, because it ends every rank when one dies.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist

from warpweave.checkpoint import CheckpointError, latest
from warpweave.cli.messages import one_line, say
from warpweave.launch.devices import gpu_count, share_cores
from warpweave.launch.interrupt import STOPS, Interrupt
from warpweave.launch.processes import Forked, Processes, end, environment, leave, told_ranks
from warpweave.launch.session import keep_store
from warpweave.parallel.server.link import check_loopback
from warpweave.parallel.server.server import start_generation, tell
from warpweave.parallel.server.shard import spread
from warpweave.parallel.server.worker import LostError
from warpweave.train.options import CHECKPOINTS, TrainConfig
from warpweave.train.server.roles import ServedModel, serve, work

_AGAIN = 5  # restarts of the servers before the run fails
_REFUSED = (ValueError, CheckpointError, OSError)
_FAILED = (LostError, TimeoutError, FloatingPointError, dist.DistError)


def run_servers(config: TrainConfig, processes: Processes | None = None) -> int:
    """Run the command, in `processes` if they are prepared. Return the exit code, 128 + number for
    an interrupt.

    Raises:
        ValueError: the options cannot work; raised before anything is started.
    """
    device = _device(config)
    served = ServedModel(config, device)
    spread(served.records, config.server)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    check_loopback("127.0.0.1")
    dp, per_step = config.mesh.dp, config.plan.microbatches * config.batch
    say(
        f"{config.server} servers and {dp} workers ({device}), staleness {config.staleness}; "
        f"{per_step} sequences per worker and step"
    )
    with environment(**told_ranks("gloo", "")):
        started = Processes.of(_rank, "gloo" if device == "cpu" else "nccl", processes)
    return _Watch(config, device, started).run()


def _device(config: TrainConfig) -> str:
    """ "cuda" if there is a GPU for each worker and the CPU was not requested, else "cpu"."""
    gpus, workers = gpu_count(), config.mesh.dp
    if config.device == "cuda" and gpus < workers:
        raise ValueError(f"{workers} workers need one GPU each, but this process sees {gpus}")
    return "cuda" if config.device != "cpu" and gpus >= workers else "cpu"


class _Watch:
    """The processes of a run."""

    def __init__(self, config: TrainConfig, device: str, processes: Processes) -> None:
        self.config, self.device, self.store = config, device, keep_store()
        self.processes = processes
        self.interrupt = Interrupt()
        self.servers: list[BaseProcess | Forked] = []
        self.workers: dict[int, BaseProcess | Forked] = {}

    def run(self) -> int:
        with self.interrupt, self.processes:
            try:
                found = self.config.resume == "auto" and latest(self.config.out / CHECKPOINTS)
                self._start_servers(self.config.resume is True or bool(found))
                for number in range(self.config.mesh.dp):
                    self.workers[number] = self._start("worker", number)
                code = self._watch()
            except KeyboardInterrupt:
                say("stopped at once, without saving")
                code = 0
        if code == 0 and self.store.check(["result"]):
            print(self.store.get("result").decode(), flush=True)
        return 128 + self.interrupt.number if code == 0 and self.interrupt.number else code

    def _start(self, role: str, number: int, *more: Any) -> BaseProcess | Forked:
        given = (role, number, self.config, self.device, self.store.port, *more)
        return self.processes.start(_rank, *given)

    def _start_servers(self, resume: bool) -> None:
        workers = list(self.workers) or list(range(self.config.mesh.dp))
        self.servers = [
            self._start("server", k, workers, resume) for k in range(self.config.server)
        ]

    def _watch(self) -> int:
        """Watch until server 0 is done. Return its exit code, or that of an unrecoverable error."""
        again, told = 0, False
        while (code := self.servers[0].exitcode) != 0:
            time.sleep(0.05)
            if self.interrupt.number and not told:
                told = True
                tell(self.store, "stop")
            codes = [server.exitcode for server in self.servers]
            if failed := [c for c in codes if c is not None and c > 0]:
                return failed[0]
            if any(c is not None and c < 0 for c in codes):
                again += 1
                if again > _AGAIN:
                    say(f"servers were killed {again} times; giving up")
                    return 1
                self._restart()
            self._miss_workers()
            if not self.workers:
                say("no workers are left")
                return 1
        for process in (*self.servers, *self.workers.values()):
            process.join(self.config.timeout)
        return code

    def _restart(self) -> None:
        """Restart all servers from the newest checkpoint; workers reconnect by themselves."""
        end(self.servers)
        step = latest(self.config.out / CHECKPOINTS)
        say(f"a server was killed; restarting all servers from {step or 'the beginning'}")
        start_generation(self.store)
        self._start_servers(step is not None)

    def _miss_workers(self) -> None:
        """Tell the servers about workers that failed; workers that are done may end."""
        for number, process in list(self.workers.items()):
            if process.exitcode:
                del self.workers[number]
                tell(self.store, "lost", worker=number)


def _rank(role: str, number: int, config: TrainConfig, device: str, port: int, *more: Any) -> None:
    """Run one server or worker; the entry point of its process."""
    name = f"{role} {number}"
    for stop in STOPS:  # the parent process decides when to stop
        signal.signal(stop, signal.SIG_IGN)
    share_cores(config.server + config.mesh.dp)
    wait = timedelta(seconds=config.timeout)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
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
