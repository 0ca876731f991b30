"""DualPipe-V (DeepSeek 2025, after DualPipe, arXiv:2412.19437): a pipeline folded into a V.

Forwards and backwards are computed in pairs, each hiding the messages of the other. Rank r of p
holds stages r and 2 p - 1 - r. F, I and W are one step long (`Timeline.draw`); ``&`` marks a cell
of two. Two ranks, first part:

    0F0  0F1  0F2  3F0  3I0  3W0  3F1  0F3& 3B1  -    .    3F2& 0B0  -    0F4& 3B2  -    3F3& 0B1
    .    1F0  2F0  1F1  2F1  1F2  2B0  -    2F2& 1B0  -    1F3& 2B1  -    2F3& 1B1  -    1F4& 2B2
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, count_up, need


def dualpipe_v(p: int, m: int) -> Schedule:
    """DualPipe-V, for m >= 2 p micro-batches.

    At most (p-1)(F&B + B - 3W) of a rank's time is idle, where B and W are those of one stage (a
    rank has two) and F&B is that of a cell. Ranks hold the activations of p + 1/2 micro-batches.
    The pattern is the eight steps of DeepSeek's program: F0; F0 F1; I1 W1 F1; the cells of the
    steady part; cells without new F0; B1 B0, the second half of them I alone; W I0; W.
    """
    need("DualPipe-V", p, m)
    lists = []
    for r in range(p):
        left = p - 1 - r
        steady = "F0&B1 F1&B0 " * (m - 2 * p + r + 1)
        ending = ("B1 B0 " * (r + 1)).split()
        if r == p - 1:  # not a cell at first: F and B would each wait for the other's input
            steady = steady.replace("&", " ", 1)
        for at in range(r + 1, 2 * r + 2):
            ending[at] = ending[at].replace("B", "I")
        pattern = (
            "F0 " * 2 * left + "F0 F1 " * (r + 1) + "I1 W1 F1 " * left + steady
            + "B1 F1&B0 " * left + " ".join(ending) + " W I0" * left + " W" * (r + 1)
        )  # fmt: skip
        lists.append(count_up(pattern, (r, 2 * p - 1 - r), m))
    return lists


SCHEDULES = (ScheduleFamily("dualpipe-v", lambda p, m, c: dualpipe_v(p, m), 2, lambda p: 2 * p),)
