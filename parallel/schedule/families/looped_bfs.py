"""Breadth-first pipeline (Lamy-Poirier 2022, arXiv:2211.05953): GPipe with several stages per rank.

All micro-batches pass through one stage of a rank before its next stage. Two ranks with two stages
each, F one and B two steps long (`Timeline.draw`), first part:

    0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 .   .   .   2B0 -   2B1 -   2B2 -   2B3 -   0B0 -   0B1 -
    .   1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 -   3B1 -   3B2 -   3B3 -   1B0 -   1B1 -   1B2 -
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, B, F, Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, need


def looped_bfs(p: int, m: int, c: int) -> Schedule:
    """Breadth-first: p * c stages on p ranks; rank r holds stages r, r + p, ..., r + (c-1) p.

    The bubble is that of interleaved 1F1B, (p-1)(F+B)/c, and every rank holds the activations of m
    micro-batches. A stage's parameters are read without interruption, so ZeRO 3 gathers them only
    twice. torch has the same lists, but its backward goes from the last micro-batch to the first.
    Here it starts with the first, so gradients are summed in the same order as in every other
    schedule.
    """
    need("breadth-first", p, m)
    return [
        [Action(F, k * p + r, i) for k in range(c) for i in range(m)]
        + [Action(B, k * p + r, i) for k in reversed(range(c)) for i in range(m)]
        for r in range(p)
    ]


SCHEDULES = (ScheduleFamily("looped-bfs", looped_bfs, chunks=None),)
