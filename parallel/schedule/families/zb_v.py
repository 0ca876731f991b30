"""ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): zero bubble on a pipeline folded into a V.

Rank r of p holds stages r and 2 p - 1 - r. The first and the last stage are therefore on rank 0,
and the turn, on rank p - 1, needs no message. F, I and W are one step long (`Timeline.draw`). Three
ranks, first part:

    0F0 0F1 0F2 0F3 0F4 5F0 5I0 5W0 5F1 5I1 5W1 5F2 5I2 5W2 0F5 0I0 0W0 5F3 5I3 5W3 0I1 0W1 5F4
    .   1F0 1F1 1F2 4F0 1F3 4F1 4I0 4W0 4F2 4I1 4W1 1F4 1I0 1W0 4F3 4I2 4W2 1F5 1I1 1W1 4F4 4I3
    .   .   2F0 3F0 2F1 3F1 2F2 3F2 3I0 3W0 2F3 2I0 2W0 3F3 3I1 3W1 2F4 2I1 2W1 3F4 3I2 3W2 2F5
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, count_up, need


def zb_v(p: int, m: int) -> Schedule:
    """ZB-V: zero bubble like ZB-H2 with the memory of 1F1B, for twice the messages.

    If F = I = W and m >= 2 p - 1, no rank waits between its first and its last action, and rank r
    begins r F of a stage after rank 0. Every rank holds the activations of p micro-batches. For a
    smaller m the lists are those of 2 p - 1 micro-batches without the later ones.
    """
    need("ZB-V", p, m)
    n, lists = max(m, 2 * p - 1), []
    for r in range(p):
        whole = n - 2 * p + r + 1  # rounds with all six actions, until no F0 is left
        pattern = (
            "F0 " * (2 * (p - r) - 1) + "F1 F0 " * r + "F1 I1 W1 " * (p - r)
            + "F0 I0 W0 F1 I1 W1 " * whole + "I0 W0 F1 I1 W1 " * (p - r - 1)
            + "I0 I1 " * r + "I0 W0 " * (p - r) + "W1 " * r + "W0 " * r
        )  # fmt: skip
        lists.append(count_up(pattern, (r, 2 * p - 1 - r), m))
    return lists


SCHEDULES = (ScheduleFamily("zb-v", lambda p, m, c: zb_v(p, m), chunks=2),)
