"""Asynchronous 1F1B without flushes: PipeDream (arXiv:1806.03377) and PipeDream-2BW
(arXiv:2006.09503).

PipeDream has weight stashing, optionally with vertical sync. Every stage runs 1F1B over the
micro-batches of the whole run, and its own optimizer steps as soon as a gradient is complete. No
rank is therefore idle except at the two ends of the run. A micro-batch's backward uses the version
of the weights that its forward read (weight stashing).

    PipeDream, three ranks; F is one and B two steps long, an update (U) follows each B
    F0 F1 F2 .  .  .  .  B0 -  F3 B1 -  F4 B2 -  F5 B3 -  ...
    .  F0 F1 .  .  B0 -  F2 B1 -  F3 B2 -  F4 B3 -  ...
    .  .  F0 B0 -  F1 B1 -  F2 B2 -  F3 B3 -  ...

    version of its stage's weights that the forward of micro-batch i reads; U makes i + 1
    i                      0  1  2  3  4  5  6     delay at U   versions kept
    rank 0                 0  0  0  1  2  3  4     2            3
    rank 1                 0  0  1  2  3  4  5     1            2
    rank 2                 0  1  2  3  4  5  6     0            1
    any, vertical sync     0  0  0  1  2  3  4     2            3
    any, 2BW, m = 3        0  0  0  0  0  0  1     1            2  (U after 2, 5, 8, ...)

Let w_s(t) be the weights of stage s after t updates, f_i the loss of micro-batch i, and p the
number of stages. Then:

    PipeDream        w_s(t+1) = rule(w_s(t), grad_s f_t(w_0(t-p+1), ..., w_(p-1)(t)))
    vertical sync    w_s(t+1) = rule(w_s(t), grad_s f_t(w_0(t-p+1), ..., w_(p-1)(t-p+1)))
    2BW              w_s(t+1) = rule(w_s(t), grad_s sum of f_i over i in [t m, t m + m) at w(t-1))

where weights before w(0) are w(0). 2BW keeps two versions ("double-buffered") and needs m >= p.
"""

from __future__ import annotations

from collections.abc import Callable

from warpweave.parallel.schedule.actions import UPDATE, WHOLE, Action, B, Schedule
from warpweave.parallel.schedule.families.one_f_one_b import one_f_one_b
from warpweave.parallel.schedule.family import ScheduleFamily, need


def pipedream(p: int, n: int, *, vertical: bool = False) -> Schedule:
    """PipeDream for a whole run of `n` micro-batches, with an UPDATE after each B.

    The forward of micro-batch i on stage s reads the newest version, max(0, i - (p-1-s)). With
    vertical sync it reads max(0, i - (p-1)) on all stages, so a micro-batch sees one version of the
    model.
    """
    return _without_flush(p, n, 1, lambda s, i: max(0, i - (p - 1 if vertical else p - 1 - s)))


def pipedream_2bw(p: int, m: int, steps: int) -> Schedule:
    """PipeDream-2BW for a run of `steps` updates, each from gradients of `m` >= p micro-batches.

    The forwards of update t read version max(0, t - 1) on all stages.
    """
    if m < p:
        raise ValueError(f"PipeDream-2BW needs m >= p micro-batches per update, got m={m} p={p}")
    return _without_flush(p, m * steps, m, lambda s, i: max(0, i // m - 1))


def _without_flush(p: int, n: int, each: int, version: Callable[[int, int], int]) -> Schedule:
    """1F1B of `n` micro-batches, where micro-batch i reads ``version(s, i)`` on stage s, with an
    UPDATE after every `each` backwards."""
    need("PipeDream", p, n)
    lists: Schedule = [[] for _ in range(p)]
    for s, actions in enumerate(one_f_one_b(p, n)):
        for a in actions:
            lists[s].append(a._replace(ver=version(s, a.mb)))
            if a.op == B and (a.mb + 1) % each == 0:
                lists[s].append(Action(UPDATE, s, WHOLE, (a.mb + 1) // each))
    return lists


def _steps_to_repeat(p: int, m: int) -> int:
    """Steps of a run in which two in the middle are the same (`open_passes.leave_open`)."""
    return 2 * -(-(p - 1) // m) + 3


# Their lists are for a run of a few steps. A longer run repeats the step in the middle forever.
SCHEDULES = (
    ScheduleFamily(
        "pipedream", lambda p, m, c: pipedream(p, m * _steps_to_repeat(p, m)), asynchronous=True
    ),
    ScheduleFamily(
        "pipedream-vs",
        lambda p, m, c: pipedream(p, m * _steps_to_repeat(p, m), vertical=True),
        asynchronous=True,
    ),
    ScheduleFamily(
        "pipedream-2bw",
        lambda p, m, c: pipedream_2bw(p, m, _steps_to_repeat(p, m)),
        least=lambda p: p,
        asynchronous=True,
    ),
)
