"""Zero-bubble schedules (Qi et al. 2023, arXiv:2401.10241): split backwards that fill the bubble.

The backward has two parts, I and W, and the bubble is filled with W.

F, I and W are one step long (`Timeline.draw`). Four ranks and seven micro-batches:

    ZB-H1: the memory of 1F1B
    F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 I4 W4 I5 W5 I6 W6
    .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 I5 W4 I6 W5 W6
    .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 I6 W4 W5 W6
    .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 W4 W5 W6

    ZB-H2: no rank waits between its first and its last action
    F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
    .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
    .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
    .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Schedule
from warpweave.parallel.schedule.families.interleaved import interleaved
from warpweave.parallel.schedule.family import ScheduleFamily
from warpweave.parallel.schedule.passes import split_backward


def zb_h1(p: int, m: int, c: int) -> Schedule:
    """ZB-H1: 1F1B with B split into I and W, and each W of rank r delayed by r backwards. With
    c > 1 stages per rank, interleaved 1F1B (torch's ScheduleInterleavedZeroBubble).

    With c = 1 the bubble is (p-1)(F+I-W), and every rank holds the activations of min(m, p)
    micro-batches.
    """
    return split_backward(interleaved(p, m, c, ahead=1), lag=range(p))


def zb_h2(p: int, m: int) -> Schedule:
    """ZB-H2: p - 1 - r more warm-up forwards than ZB-H1 on rank r, each W delayed by 2 r backwards.

    For m >= 2 p - 1 a rank's own bubble is (p-1)(F+I-2W), which is 0 if F = I = W. Each rank holds
    the activations of 2 p - 1 micro-batches. Rank r begins r F after rank 0 and ends r F later.
    """
    return split_backward(interleaved(p, m, 1), lag=range(0, 2 * p, 2))


SCHEDULES = (
    ScheduleFamily("zb-h1", zb_h1, chunks=None),
    ScheduleFamily("zb-h2", lambda p, m, c: zb_h2(p, m)),
)
