"""1F1B (PipeDream-Flush, arXiv:2006.09503): alternating forwards and backwards, and a flush.

Four ranks and four micro-batches, F one and B two steps long (`Timeline.draw`):

    F0 F1 F2 F3 .  .  .  .  .  .  B0 -  .  B1 -  .  B2 -  .  B3 -
    .  F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  .  B2 -  .  B3 -  .  .
    .  .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  .  B3 -  .  .  .  .
    .  .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  .  .  .  .  .  .
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, B, F, Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, need


def one_f_one_b(p: int, m: int) -> Schedule:
    """1F1B: min(m, p-1-s) warm-up forwards on stage s, then alternating forwards and backwards.

    The bubble is that of GPipe, but stage s holds the activations of only min(m, p-s)
    micro-batches. Any m >= 1 is allowed.

    Examples:
        >>> from warpweave.parallel.simulate import simulate
        >>> print(simulate(one_f_one_b(2, 3), {"F": 1, "B": 2}).draw())
        F0 F1 .  .  B0 -  F2 B1 -  .  B2 -
        .  F0 B0 -  F1 B1 -  F2 B2 -  .  .
    """
    need("1F1B", p, m)
    lists = []
    for s in range(p):
        warm = min(m, p - 1 - s)
        forwards = [Action(F, s, i) for i in range(m)]
        backwards = [Action(B, s, i) for i in range(m)]
        steady = [a for pair in zip(forwards[warm:], backwards) for a in pair]
        lists.append(forwards[:warm] + steady + backwards[m - warm :])
    return lists


SCHEDULES = (ScheduleFamily("1f1b", lambda p, m, c: one_f_one_b(p, m)),)
