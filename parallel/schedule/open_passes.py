"""Runs cut into passes that are left open: micro-batches in flight continue in the next pass.

An asynchronous schedule (PipeDream, arXiv:1806.03377) has no flush, so there is no point at which
every micro-batch that has begun has also ended. Its list for a whole run is a schedule like any
other, with micro-batches and versions numbered from 0, and `validate` checks it as a whole.
`cut_into_passes` cuts it after every few updates, for a trainer that does something in between. Two
ranks, an update after each micro-batch, cut after two (UPDATE as U):

    rank 0   0F0 0F1 0B0 0U1 0F2 0B1 0U2  |  0F3@1 0B2 0U3 0F4@2 0B3@1 0U4  |  ...
    rank 1   1F0 1B0 1U1 1F1@1 1B1@1 1U2  |  1F2@2 1B2@2 1U3 1F3@3 1B3@3 1U4  |  ...

At the cut, rank 0 has begun micro-batch 2; it ends it after the cut. A message ends in the pass in
which it begins: `with_comm` lets rank 1 receive the input of 2 before the cut, and use it after.
From the second pass on, passes differ only in their numbers, which `renumbered` removes, so one
transport serves all of them. A run without an end then needs only two lists (`leave_open`): `fill`
begins the micro-batches that are in flight at any cut, either at the start or after a checkpoint,
and `steady` continues from there:

    fill     rank 0   0F0@-1 0SEND_F0
             rank 1   1RECV_F0
    steady   rank 0   0F1 0SEND_F1 0RECV_B0 0B0@-1 0U1 0F2@1 0SEND_F2 0RECV_B1 0B1 0U2
             rank 1   1F0 1B0 1SEND_B0 1U1 1RECV_F1 1F1@1 1B1@1 1SEND_B1 1U2 1RECV_F2
"""

from __future__ import annotations

from dataclasses import dataclass

from warpweave.parallel.schedule.actions import (
    COMPUTE,
    FINISHES,
    MESSAGES,
    RECEIVES,
    UPDATE,
    WHOLE,
    Action,
    F,
    Schedule,
    gives,
    lowered,
    other_end,
    placement,
)
from warpweave.parallel.schedule.ordering import begun_before, order
from warpweave.parallel.schedule.passes import with_comm
from warpweave.parallel.schedule.validation import check_links, validate


def cut_into_passes(lists: Schedule, each: int) -> list[Schedule]:
    """Cut a run into passes. In each list, a pass ends when its stages have finished `each` more
    micro-batches and the actions of whole stages that follow directly (REDUCE, UPDATE).

    Raises:
        ValueError: the number of micro-batches is not divisible by `each`, the lists already have
            messages, a pass needs an event of a later pass, or a pass has no action of some stage.

    Examples:
        >>> from warpweave.parallel.schedule import one_f_one_b
        >>> len(cut_into_passes(one_f_one_b(2, 8), each=4))
        2
    """
    if lowered(lists):
        raise ValueError("cut_into_passes: the lists already have sends and receives")
    count = 1 + max(a.mb for actions in lists for a in actions)
    if each < 1 or count % each:
        raise ValueError(f"{count} micro-batches are not divisible by {each} per pass")
    passes: list[Schedule] = [[[] for _ in lists] for _ in range(count // each)]
    for rank, actions in enumerate(lists):
        stages, finished, at = len({a.stage for a in actions}), 0, 0
        for action in actions:
            full = finished == (at + 1) * each * stages
            if full and action.mb != WHOLE and at + 1 < len(passes):
                at += 1
            passes[at][rank].append(action)
            finished += action.op in FINISHES
    made: set[Action] = set()
    for at, one in enumerate(passes):
        if idle := {a.stage for row in lists for a in row} - {a.stage for row in one for a in row}:
            raise ValueError(f"pass {at} would have no action of stages {sorted(idle)}")
        if early := begun_before(one) - made:
            raise ValueError(f"pass {at} would need {min(early)} from a later pass")
        made.update(event for row in one for a in row for event in gives(a))
    return passes


def renumbered(lists: Schedule, microbatches: int, versions: int = 0) -> Schedule:
    """The lists with `microbatches` and `versions` subtracted from their numbers.

    Examples:
        >>> from warpweave.parallel.schedule import cut_into_passes, gpipe
        >>> second = cut_into_passes(gpipe(1, 4), each=2)[1]
        >>> print(*renumbered(second, microbatches=2)[0])
        0B0 0B1
    """

    def moved(a: Action) -> Action:
        return a._replace(
            mb=a.mb if a.mb == WHOLE else a.mb - microbatches,
            ver=a.ver - versions if a.op in (*COMPUTE, UPDATE) else a.ver,
        )

    return [[moved(a) for a in actions] for actions in lists]


@dataclass(frozen=True)
class OpenRun:
    """An asynchronous run without an end, as two passes with messages.

    In each pass, micro-batch 0 is the next one and version 0 the newest one when the pass begins.

    Attributes:
        fill: begins the micro-batches that are in flight between two passes.
        steady: every later pass.
        microbatches, updates: number per pass, on every stage.
        ahead: number of passes by which the first stage's forwards are ahead, rounded up.
        staleness: for each stage, the number of updates by which the weights of a gradient are
            older than those that it is applied to. Versions -`staleness` to -1, before the first,
            are version 0.
    """

    fill: Schedule
    steady: Schedule
    microbatches: int
    updates: int
    ahead: int
    staleness: tuple[int, ...]


def leave_open(lists: Schedule, each: int) -> OpenRun:
    """Return the asynchronous run that `lists` begin, in passes of `each` micro-batches. Raise
    ValueError if they are not valid, or no two consecutive passes of them are the same."""
    stale = staleness(lists)
    validate(with_comm(lists), staleness=max(stale))
    passes = cut_into_passes(lists, each)
    updates = sum(a.op == UPDATE and a.stage == 0 for row in passes[0] for a in row)
    same = [renumbered(one, k * each, k * updates) for k, one in enumerate(passes)]
    steady = next((k for k in range(len(same) - 1) if same[k] == same[k + 1]), None)
    if steady is None:
        raise ValueError(
            f"none of the {len(passes)} passes ({each} micro-batches each) is the same as the "
            "next one"
        )
    begun = [
        [a for one in passes[:steady] for a in one[rank] if a.op == F and a.mb >= steady * each]
        for rank in range(len(lists))
    ]
    fill = renumbered(begun, steady * each, steady * updates)
    ahead = -(-max((a.mb + 1 for row in fill for a in row), default=0) // each)
    filled, again = (with_comm(one, placement(lists)) for one in (fill, same[steady]))
    for one in (filled, again)[not ahead :]:
        validate_pass(one)
    return OpenRun(filled, again, each, updates, ahead, stale)


def staleness(lists: Schedule) -> tuple[int, ...]:
    """For each stage, the number of updates by which a gradient's weights are older than those it
    changes. The stage keeps as many older versions as well as the newest."""
    every = [a for actions in lists for a in actions]
    found = []
    for s in sorted({a.stage for a in every}):
        newest = most = 0
        for a in (a for a in every if a.stage == s):
            if a.op in FINISHES:
                most = max(most, newest - a.ver)
            elif a.op == UPDATE:
                newest = a.ver
        found.append(most)
    return tuple(found)


def validate_pass(lists: Schedule) -> None:
    """Raise ValueError, in one line, unless a pass of a valid run can be executed by itself.

    No action may occur twice, and every message must have one send and one receive, in the same
    order on each link. The pass must be free of deadlock, given the events that happened before
    (`begun_before`). Whether those did happen is checked only at run time.

    Examples:
        >>> from warpweave.parallel.schedule import cut_into_passes, one_f_one_b, with_comm
        >>> for lists in cut_into_passes(one_f_one_b(2, 8), each=4):
        ...     validate_pass(with_comm(lists))
    """
    seen: set[Action] = set()
    for a in (a._replace(ver=0) for actions in lists for a in actions if a.mb != WHOLE):
        if a in seen:
            raise ValueError(f"{a} occurs twice in a pass")
        seen.add(a)
    sends = {other_end(a) if a.op in RECEIVES else a for a in seen if a.op in MESSAGES}
    check_links(lists, sorted(sends))
    order(lists, begun_before(lists))
