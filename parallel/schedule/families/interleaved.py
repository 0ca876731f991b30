"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): 1F1B with several stages per rank.

Two ranks with two stages each (the stage is before the operation), F one and B two steps long,
first part (`Timeline.draw`):

    0F0 0F1 2F0 2F1 0F2 .   2B0 -   0F3 2B1 -   2F2 0B0 -   2F3 0B1 -   .   2B2 -   .   2B3 -
    .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1F2 1B0 -   1F3 1B1 -   3F2 3B2 -   3F3 3B3 -   1B2 -
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, B, F, Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, need


def interleaved(p: int, m: int, c: int, ahead: int = 2) -> Schedule:
    """Interleaved 1F1B: p * c stages on p ranks; rank r holds stages r, r + p, ..., r + (c-1) p.

    Micro-batches pass in groups of p: on each rank, a whole group passes through one of its stages
    before the next stage. If m is not divisible by p, groups have p to 2p - 1 micro-batches, as
    even as possible. The bubble is c times smaller than that of 1F1B, at the cost of c times the
    messages and up to 1 + (p-1)/(p c) times the activations on rank 0.

    Rank r warms up with `ahead` (p-1-r) + (c-1) p forwards if m is divisible by p. `ahead` is 2, as
    in Megatron-LM; if it is 1 and c = 1, the lists are those of 1F1B.

    Examples:
        >>> from warpweave.parallel.simulate import simulate
        >>> print(simulate(interleaved(2, 2, 2), {"F": 1, "B": 2}).draw())
        0F0 0F1 2F0 2F1 .   .   2B0 -   .   2B1 -   0B0 -   0B1 -
        .   1F0 1F1 3F0 3B0 -   3F1 3B1 -   1B0 -   1B1 -   .   .
    """
    need("interleaved 1F1B", p, m)
    if c < 1:
        raise ValueError(f"interleaved 1F1B needs c >= 1 stages per rank, got c={c}")
    rounds = max(1, m // p)
    groups = [range(m * i // rounds, m * (i + 1) // rounds) for i in range(rounds)]
    forwards = [(k, i) for group in groups for k in range(c) for i in group]
    backwards = [(k, i) for group in groups for k in reversed(range(c)) for i in group]
    lists = []
    for r in range(p):
        warm = min(m * c, ahead * (p - 1 - r) + (c - 1) * max(map(len, groups)))
        f = [Action(F, k * p + r, i) for k, i in forwards]
        b = [Action(B, k * p + r, i) for k, i in backwards]
        steady = [a for pair in zip(f[warm:], b) for a in pair]
        lists.append(f[:warm] + steady + b[m * c - warm :])
    return lists


SCHEDULES = (ScheduleFamily("interleaved", interleaved, chunks=None),)
