"""Launch the ranks of a mesh on this machine: start, watch, and restart them."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from warpweave.cli.messages import say
from warpweave.launch.blame import End, rank_at_fault, recorded
from warpweave.launch.heartbeat import SILENCE
from warpweave.launch.processes import DUMPS, Processes, environment, leave, told_ranks
from warpweave.launch.session import AGENTS_STORE, ATTEMPT
from warpweave.launch.supervise import REFUSED, keep_store, kept_store, supervise
from warpweave.parallel.mesh import Mesh

# Seconds that the others have to end after a rank failed; on NCCL they first write the flight
# recorder's files and abort communicators. Zero after a death or a verdict, which is sufficient.
_LINGER = {"gloo": SILENCE + 1.0, "nccl": 30.0}


def launch(
    entry: Callable[..., Any],
    args: tuple,
    mesh: Mesh,
    *,
    backend: str = "gloo",
    max_restarts: int = 0,
    processes: Processes | None = None,
) -> Any:
    """Run ``entry(*args, port)`` on every rank of `mesh` on this machine. Return rank 0's result.

    `port` is the port of the ranks' store in this process, for `join`. `entry` must be importable
    (a module-level function), and its result must be JSON. `backend` is the one that the ranks will
    `join` with. After a failure, but not after a refusal (exit code 2), all ranks are restarted up
    to `max_restarts` times. `processes` runs the ranks if it was prepared earlier, on gloo. Must be
    called from the main thread.

    Exits with a rank's exit code (1 if the rank died) if a rank fails, and with `Stopped` after a
    signal. No rank outlives this call.
    """
    folder = tempfile.mkdtemp(prefix="warpweave-") if backend == "nccl" else None
    sys.stdout.flush()
    try:
        with environment(**told_ranks(backend, folder)):
            started = Processes.of(entry, backend, processes)
            ranks = _Ranks(entry, args, mesh, backend, max_restarts, started)
            supervise(started, ranks.start, ranks.watch)
    finally:
        if folder and not os.listdir(folder):  # no flight recorder has written to it
            os.rmdir(folder)
    return json.loads(ranks.store.get("result/0"))


@dataclass
class _Ranks:
    """The ranks of a launch with these arguments; `store` is theirs in the current attempt."""

    entry: Callable[..., Any]
    args: tuple
    mesh: Mesh
    backend: str
    max_restarts: int
    processes: Processes

    def __post_init__(self) -> None:
        self._kept, self._began, self._attempt = keep_store(), time.time(), -1

    def start(self) -> None:
        """Start the next attempt."""
        self._attempt += 1
        self.store = dist.PrefixStore(f"attempt_{self._attempt}", self._kept)
        given = self.mesh.world, self._kept.port, self._attempt, self.entry, self.args
        for rank in range(self.mesh.world):
            self.processes.start(_rank_process, rank, *given)
        self._running = dict(enumerate(self.processes.started))
        self._failed: list[End] = []  # in the order in which they ended
        self._deadline = math.inf  # of the others, after a failure

    def watch(self, stop: int | None) -> int | None:
        """Note which ranks have ended, and kill those that outlive a failure. After the last one,
        start the next attempt, or return the exit code."""
        codes = {r: p.exitcode for r, p in self._running.items() if p.exitcode is not None}
        for rank in sorted(codes, key=codes.__getitem__):  # if simultaneous, killed ranks first
            del self._running[rank]
            if codes[rank] or not self.store.check([f"result/{rank}"]):  # without a result it died
                self._fails(End(rank, codes[rank]))
        if time.monotonic() >= self._deadline:
            for process in self._running.values():
                process.kill()
        if self._running:
            return None
        return self._restart(stop) if self._failed else 0

    def _fails(self, end: End) -> None:
        """Note the failure of a rank, and limit the time that the others have to end."""
        self._failed.append(end)
        speaks = end.code > 0 or (end.aborted and self.backend == "nccl")
        linger = _LINGER[self.backend] if speaks and not self.store.check(["verdict"]) else 0.0
        self._deadline = min(self._deadline, time.monotonic() + linger)

    def _restart(self, stop: int | None) -> int | None:
        """Report the failure of an attempt, and start the next one. Return the exit code if there
        is none, 0 if a rank was killed after a signal."""
        self.processes.end()
        code = self._failed[0].code
        if stop is not None and code <= 0:
            return 0
        prefix = os.environ[DUMPS] if self.backend == "nccl" else None
        dumps = recorded(prefix, self.mesh.world, self._began)
        if (line := rank_at_fault(self._failed, self.mesh, self.store, dumps)) is not None:
            say(line)
        if self._attempt == self.max_restarts or code == REFUSED or stop is not None:
            return max(code, 1)
        say(f"restarting all ranks (restart {self._attempt + 1} of {self.max_restarts})")
        self.start()
        return None


def _rank_process(
    rank: int, world: int, port: int, attempt: int, entry: Callable[..., Any], args: tuple
) -> None:
    """Run one rank in this process, with the environment variables that torchrun would set."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {AGENTS_STORE: "True", ATTEMPT: str(attempt)}
    result = json.dumps(entry(*args, port))
    dist.PrefixStore(f"attempt_{attempt}", kept_store(port)).set(f"result/{rank}", result)
    leave(0)
