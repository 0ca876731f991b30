"""V-Half and V-Min (Qi et al. 2024, arXiv:2405.15362): pipelines with controllable memory.

A *building block* is the work of one micro-batch on all ranks; the schedule repeats it every six
steps. Rank r of p holds stages r and 2 p - 1 - r. A micro-batch passes through the ranks four
times: down with F0, up with F1, down with I1, up with I0. Each time, it begins on the next rank a
fixed *offset* of steps later. A rank holds activations from F to W (the *lifespan*), so small
offsets need little memory. F, I and W are one step long (`Timeline.draw`). Three ranks, first part
of V-Min:

    0F0 .   .   .   .   5F0 0F1 5I0 5W0 .   .   5F1 0F2 0I0 5I1 5W1 0W0 5F2 0F3 0I1 5I2 5W2 0W1
    .   1F0 .   .   4F0 .   .   1F1 4I0 .   4F1 4W0 1I0 1F2 1W0 4I1 4F2 4W1 1I1 1F3 1W1 4I2 4F3
    .   .   2F0 3F0 .   .   .   .   2F1 3F1 3I0 2I0 3W0 2W0 2F2 3F2 3I1 2I1 3W1 2W1 2F3 3F3 3I2
"""

from __future__ import annotations

from warpweave.parallel.schedule.actions import Action, Schedule
from warpweave.parallel.schedule.family import ScheduleFamily, need

_EACH = 6  # steps that a rank needs for F, I and W of both of its stages


def building_block(p: int, offsets: tuple[int, int, int, int]) -> list[dict[str, int]]:
    """The time of each action of a micro-batch, ``"F0"``, ..., ``"W1"``, on each rank.

    `offsets` are those of F0, F1, I1 and I0. Each of the four begins at the first step at which no
    rank is busy with another action of this block or of its repetitions. Each W takes the first
    free step after its I.
    """
    block: list[dict[str, int]] = [{} for _ in range(p)]
    for name, offset in zip(("F0", "F1", "I1", "I0"), offsets):
        down = name in ("F0", "I1")
        hops = [offset * (r if down else p - 1 - r) for r in range(p)]
        before = [max(times.values(), default=-1) for times in block]
        first = before[0 if down else -1] + 1
        start = next(
            t for t in range(first, first + _EACH)
            if all((t + hop - x) % _EACH for hop, own in zip(hops, block) for x in own.values())
        )  # fmt: skip
        for hop, times in zip(hops, block):
            times[name] = start + hop
    for times in block:
        for name in ("W1", "W0"):
            taken = {t % _EACH for t in times.values()}
            after = times[name.replace("W", "I")] + 1
            times[name] = next(t for t in range(after, after + _EACH) if t % _EACH not in taken)
    return block


def repeated(p: int, m: int, offsets: tuple[int, int, int, int]) -> Schedule:
    """The lists of `m` micro-batches, from their building block."""
    need("a building block", p, m)
    lists = []
    for r, times in enumerate(building_block(p, offsets)):
        stages = r, 2 * p - 1 - r
        timed = sorted(
            (t + _EACH * i, Action(name[0], stages[int(name[1])], i))
            for name, t in times.items()
            for i in range(m)
        )
        lists.append([action for _, action in timed])
    return lists


def v_half(p: int, m: int) -> Schedule:
    """V-Half: holds activations of at most (p+3)/2 micro-batches, with half the bubble of 1F1B (if
    F = I = W, as p grows)."""
    return repeated(p, m, (2, 1, 2, 1))


def v_min(p: int, m: int) -> Schedule:
    """V-Min: holds activations of at most (p+4)/3 micro-batches, with two thirds of the bubble of
    1F1B (if F = I = W)."""
    return repeated(p, m, (1, 1, 1, 1))


SCHEDULES = (
    ScheduleFamily("v-half", lambda p, m, c: v_half(p, m), chunks=2),
    ScheduleFamily("v-min", lambda p, m, c: v_min(p, m), chunks=2),
)
