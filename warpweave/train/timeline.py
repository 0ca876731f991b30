"""Measured and simulated timelines of a training step: ``train --timeline FILE``.

The executor calls `Marks` before each action of a rank's list. An action lasts until the next one
begins, and a receive until its message is there:

    list      RECV_F0     F0            SEND_F0  RECV_B0 ...
    marks    ^           ^             ^        ^

On a CPU a mark is a reading of the host's clock. On a GPU it is an event in the current stream,
read after the step, so nothing waits in between. Ranks have no common clock: each rank's times
start with its list, which all ranks enter together, up to the skew that the step's first
collectives leave.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
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


class Marks:
    """The times at which the actions of this rank begin, and at which its list ends: the
    `on_action` of a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []

    def __call__(self, rank: int, index: int) -> None:
        """Record the time."""
        if self._device.type == "cuda":
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """The marks in seconds since the first one; on a GPU, waits for the last."""
        first, last = self._marks[0], self._marks[-1]
        if self._device.type == "cuda":
            last.synchronize()
            return [first.elapsed_time(mark) / 1e3 for mark in self._marks]
        return [mark - first for mark in self._marks]


def write_measured(engine: Engine, marks: Marks, path: Path) -> None:
    """Write a step's timeline, with the simulated one, on world rank 0. Collective over the
    pipeline ranks."""
    lists, group, own = engine.passes.lists, engine.mesh.group("pp"), marks.seconds()
    # Lists differ in length, but an all-gather needs rows of one length.
    padded = torch.zeros(1, max(map(len, lists)) + 1, dtype=torch.float64, device=engine.device)
    padded[0, : len(own)] = torch.tensor(own, dtype=torch.float64)
    every = start_all_gather(padded, group).wait().tolist()
    if group is None or dist.get_rank() == 0:
        write_timeline(path, panels(lists, every))


def panels(lists: Schedule, marks: Sequence[Sequence[float]]) -> dict[str, Timeline]:
    """Simulated and measured timelines of a step, in seconds.

    `lists` is the schedule as it ran. `marks` has, per rank, the start of each action and the end
    of the list, and perhaps more, which is not read. The simulation gives each action the median
    measured time of its op and stage, and zero time to messages. The difference from the measured
    timeline is waiting and variation.
    """
    taken: dict[tuple[str, int], list[float]] = defaultdict(list)
    cells = []
    for actions, times in zip(lists, marks, strict=True):
        row = tuple(map(Cell, actions, times, times[1:]))
        for action, start, end in row:
            taken[action.op, action.stage].append(end - start)
        cells.append(row)

    def cost(action: Action) -> float:
        return 0.0 if action.op in RECEIVES else median(taken[action.op, action.stage])

    simulated = simulate(lists, cost, before=begun_before(lists))
    measured = replace(simulated, cells=tuple(cells))
    return {"simulated, with the measured times of actions": simulated, "measured": measured}
