"""GPipe (arXiv:1811.06965): all forwards, then all backwards, and a flush.

One line per rank, one column per time step; F is one and B two steps long; ``.`` is idle
(`Timeline.draw`):

    F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -
    .  F0 F1 F2 F3 .  .  .  .  .  .  B0 -  B1 -  B2 -  B3 -  .  .
    .  .  F0 F1 F2 F3 .  .  .  B0 -  B1 -  B2 -  B3 -  .  .  .  .
    .  .  .  F0 F1 F2 F3 B0 -  B1 -  B2 -  B3 -  .  .  .  .  .  .
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, B, F, Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, need


def gpipe(p: int, m: int) -> Schedule:
    """GPipe: all forwards, then all backwards, of `m` micro-batches in `p` stages on `p` ranks.

    The bubble is (p-1)(F+B), compared with the ideal time m(F+B). Every rank holds the activations
    of m micro-batches.

    Examples:
        >>> from warpweave.parallel.simulate import simulate
        >>> print(simulate(gpipe(2, 3), {"F": 1, "B": 2}).draw())
        F0 F1 F2 .  .  .  B0 -  B1 -  B2 -
        .  F0 F1 F2 B0 -  B1 -  B2 -  .  .
    """
    need("GPipe", p, m)
    return [
        [Action(F, s, i) for i in range(m)] + [Action(B, s, i) for i in range(m)] for s in range(p)
    ]


SCHEDULES = (ScheduleFamily("gpipe", lambda p, m, c: gpipe(p, m)),)
