"""The measured timeline of a training step beside the simulated one: ``train --timeline FILE``.

A transport is told before each action of its rank's list (``Transport.reach``); `Marked` notes the
time there, so an action lasts until the next one begins, receives until their message is there:

    list      RECV_F0     F0            SEND_F0  RECV_B0 ...
    marks    ^           ^             ^        ^

On a CPU a mark is the host's clock; on a GPU an event in the current stream, read when the step is
over, so nothing waits on the way. Ranks have no common clock: each rank's times begin with its
list, which all enter together within what a step's first collectives leave between them.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from warpweave.model.engine import Engine
from warpweave.parallel.collectives import start_all_gather
from warpweave.parallel.schedule.actions import RECEIVES, Action, Schedule
from warpweave.parallel.schedule.ordering import begun_before
from warpweave.parallel.simulate import Cell, Timeline, simulate
from warpweave.plan.timeline import write_timeline


class Marked:
    """A transport that notes when each action of this process's rank begins, and the list's end."""

    def __init__(self, transport: Any, device: torch.device) -> None:
        self.transport, self._device = transport, device
        self._marks: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.transport, name)

    def reach(self, rank: int, index: int) -> None:
        """Note the time, then what the transport does there."""
        self._mark()
        self.transport.reach(rank, index)

    def drive(self, programs: dict[int, Any]) -> None:
        """Run the coroutines, and note the end."""
        self.transport.drive(programs)
        self._mark()

    def _mark(self) -> None:
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The marks in seconds from the first one on; on a GPU waits for the last."""
        first, last = self._marks[0], self._marks[-1]
        if self._device.type == "cuda":
            last.synchronize()
            return [first.elapsed_time(mark) / 1e3 for mark in self._marks]
        return [mark - first for mark in self._marks]


@contextmanager
def recording(engine: Engine, path: Path | None, due: bool = True) -> Iterator[None]:
    """Record the engine's step within; the world's rank 0 writes it beside the simulated one.

    Collective over the pipeline ranks. Nothing is recorded without a path, or when it is not `due`.
    """
    if path is None or not due:
        yield
        return
    passes = engine.passes
    marked = Marked(passes.transport, engine.device)
    passes.transport = marked  # type: ignore[assignment]
    try:
        yield
    finally:
        passes.transport = marked.transport
    group = engine.mesh.group("pp")
    every = _gather(marked.seconds(), passes.lists, engine.device, group)
    if group is None or dist.get_rank() == 0:
        write_timeline(path, panels(passes.lists, every))


def _gather(
    marks: list[float], lists: Schedule, device: torch.device, group: dist.ProcessGroup | None
) -> list[list[float]]:
    """The marks of all pipeline ranks, with zeros behind those of the shorter lists."""
    most = max(map(len, lists)) + 1
    padded = torch.zeros(1, most, dtype=torch.float64, device=device)
    padded[0, : len(marks)] = torch.tensor(marks, dtype=torch.float64)
    return start_all_gather(padded, group).wait().tolist()


def panels(lists: Schedule, marks: Sequence[Sequence[float]]) -> dict[str, Timeline]:
    """The simulated and the measured timeline of a step, in seconds.

    Args:
        lists: the schedule as it ran.
        marks: per rank, when each of its actions began, and its end; what follows is not read.

    The simulation takes for an action the median of the measured ones of its op and stage, and
    nothing for a message: what it has less than the measured one is waiting and unevenness.
    """
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    cells = []
    for actions, times in zip(lists, marks, strict=True):
        row = tuple(map(Cell, actions, times, times[1:]))
        for action, start, end in row:
            taken[action.op, action.stage].append(end - start)
        cells.append(row)

    def cost(action: Action) -> float:
        if action.op in RECEIVES:
            return 0.0
        return median(taken[action.op, action.stage])

    simulated = simulate(lists, cost, before=begun_before(lists))
    measured = replace(simulated, cells=tuple(cells))
    return {"simulated, with the measured times of actions": simulated, "measured": measured}
