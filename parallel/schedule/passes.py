"""Passes: pure functions from lists to lists that complete a schedule of F and B.

They add its messages, ZeRO's collectives, the tie of first and last stage, and the optimizer step.

    1F1B on two ranks, one micro-batch, ZeRO-1, tied embedding
    generator     rank 0   0F0 0B0
                  rank 1   1F0 1B0
    with_reduce   rank 0   0F0 0B0 0REDUCE
                  rank 1   1F0 1B0 1REDUCE
    with_tie      rank 0   0F0 0B0 0REDUCE 0TIE
                  rank 1   1F0 1B0 1REDUCE 1TIE
    with_update   rank 0   0F0 0B0 0REDUCE 0TIE 0UPDATE@1
                  rank 1   1F0 1B0 1REDUCE 1TIE 1UPDATE@1
    with_comm     rank 0   0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE 0TIE 0UPDATE@1
                  rank 1   1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE 1TIE 1UPDATE@1
"""

from __future__ import annotations

from collections.abc import Sequence

from warpweave.parallel.schedule.actions import (
    FINISHES,
    RECV_B,
    RECV_F,
    REDUCE,
    SEND_B,
    SEND_F,
    TIE,
    UPDATE,
    WHOLE,
    Action,
    B,
    F,
    I,
    Schedule,
    W,
    cells,
    gives,
    lowered,
    placement,
    tied_stages,
)


def split_backward(lists: Schedule, *, lag: int | Sequence[int] = 0) -> Schedule:
    """Split every B into I and W (zero-bubble, arXiv:2401.10241), each W delayed by `lag` backwards
    of its rank (one number, or one for each rank). The remaining W come last.

    Examples:
        >>> from warpweave.parallel.schedule import gpipe
        >>> print(*split_backward(gpipe(1, 2))[0])
        0F0 0F1 0I0 0W0 0I1 0W1
    """
    lags = [lag] * len(lists) if isinstance(lag, int) else lag
    if min(lags, default=0) < 0:
        raise ValueError(f"lag must be >= 0, got {lag}")
    result = []
    for actions, late in zip(lists, lags, strict=True):
        owed: list[Action] = []
        out = []
        for action in actions:
            if action.op != B:
                out.append(action._replace(joined=False))
                continue
            owed.append(action._replace(op=W))
            out.append(action._replace(op=I))
            if len(owed) > late:
                out.append(owed.pop(0))
        result.append(out + owed)
    return result


def send_first(lists: Schedule) -> Schedule:
    """Split every B whose input gradient another rank waits for into I and W, so that the gradient
    is sent in between ("early gradients").

        1F1B, F, I and W one time step each
        F0 F1 F2 F3 .  .  .  B0 -  .  B1 -  .  B2 -  .  B3 -
        .  F0 F1 F2 .  .  I0 W0 F3 I1 W1 .  I2 W2 .  I3 W3 .
        .  .  F0 F1 .  I0 W0 F2 I1 W1 F3 I2 W2 .  I3 W3 .  .
        .  .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 .  .  .

    Gradients pass through an I instead of a B on p-1 stages, so the bubble is (p-1) W smaller. This
    is the first step towards zero bubble (arXiv:2401.10241). Between I and W a stage holds the
    operands of one micro-batch's weight gradients. Stage 0 of 1F1B holds the most activations and
    has no previous stage to send to, so the peak memory over ranks does not grow. The B of a cell
    is not split.
    """
    rank_of = placement(lists)
    if lowered(lists):
        raise ValueError("send_first: the lists already have sends and receives")

    def parts(cell: tuple[Action, ...]) -> tuple[Action, ...]:
        action, s = cell[0], cell[0].stage
        if len(cell) == 2 or action.op != B or s == 0 or rank_of[s - 1] == rank_of[s]:
            return cell
        return action._replace(op=I), action._replace(op=W)

    return [[part for cell in cells(actions) for part in parts(cell)] for actions in lists]


def with_comm(lists: Schedule, rank_of: Sequence[int] | None = None) -> Schedule:
    """Add a send after each F, B or I (or cell) that another rank waits for, and a receive where
    that rank needs it.

    Sends do not block, so a send directly follows the action that computes its data. A receive
    directly precedes the action that uses it; transports post receives earlier. On each link,
    receives must be in the order of sends, which `validate` checks. In a pass that is left open
    (`open_passes`), data that only a later pass uses is received at the end, and data that an
    earlier pass received is not received again. Pass `rank_of`, the rank of each stage, if some
    stage has no action in the pass.

    Examples:
        >>> from warpweave.parallel.schedule import gpipe
        >>> print(*with_comm(gpipe(2, 1))[0])
        0F0 0SEND_F0 0RECV_B0 0B0
    """
    rank_of = placement(lists) if rank_of is None else rank_of
    if lowered(lists):
        raise ValueError("with_comm: the lists already have sends and receives")
    made = {event for actions in lists for a in actions for event in gives(a)}
    result: Schedule = [[] for _ in lists]
    left: Schedule = [[] for _ in lists]  # receives whose data a later pass uses
    for actions, out in zip(lists, result):
        for cell in cells(actions):
            sends = []
            for action in cell:
                s, i = action.stage, action.mb
                ahead = s + 1 < len(rank_of) and rank_of[s + 1] != rank_of[s]
                behind = s > 0 and rank_of[s - 1] != rank_of[s]
                if action.op == F:
                    out += [Action(RECV_F, s, i)] * (behind and Action(F, s - 1, i) in made)
                    sends += [Action(SEND_F, s, i)] * ahead
                    if ahead and Action(F, s + 1, i) not in made:
                        left[rank_of[s + 1]].append(Action(RECV_F, s + 1, i))
                elif action.op in (B, I):
                    out += [Action(RECV_B, s, i)] * (ahead and Action(I, s + 1, i) in made)
                    sends += [Action(SEND_B, s, i)] * behind
                    if behind and Action(I, s - 1, i) not in made:
                        left[rank_of[s - 1]].append(Action(RECV_B, s - 1, i))
            out += [*cell, *sends]
    return [out + receives for out, receives in zip(result, left)]


def with_reduce(lists: Schedule, *, each: bool = False) -> Schedule:
    """Add the sum of gradients over data ranks (ZeRO-0 to 3) after the last B or W of each stage.
    If the lists have UPDATEs, add it after the last one before each UPDATE.

    With `each`, add it after every B or W. A stage then holds unreduced gradients of only one
    micro-batch at a time (ZeRO-2 with a pipeline), for m times the traffic.
    """
    result = []
    for actions in lists:
        latest: dict[int, int] = {}  # stage -> index of its latest B or W since its last UPDATE
        last = set()
        for index, a in enumerate(actions):
            if a.op == UPDATE and a.stage in latest:
                last.add(latest.pop(a.stage))
            elif a.op in FINISHES:
                latest[a.stage] = index
        last.update(latest.values())
        out: list[Action] = []
        for index, a in enumerate(actions):
            out.append(a)
            if index in last or (each and a.op in FINISHES):
                out.append(Action(REDUCE, a.stage))
        result.append(out)
    return result


def with_tie(lists: Schedule) -> Schedule:
    """Add the sum of the tied weight's gradients (embedding and head) over the first and last
    stage, at the end of their lists.

    Apply it after `with_reduce` and before `with_update`. A single stage has the parameter only
    once and needs no TIE. If the first and last stage are on one rank, they get one local TIE.
    """
    rank_of = placement(lists)
    tied = tied_stages(rank_of) if len(rank_of) > 1 else ()
    return _with_last(lists, [Action(TIE, s) for s in tied], "with_tie")


def with_update(lists: Schedule) -> Schedule:
    """Add each stage's optimizer step, which produces version 1, at the end of its rank's list."""
    stages = range(len(placement(lists)))
    return _with_last(lists, [Action(UPDATE, s, WHOLE, 1) for s in stages], "with_update")


def _with_last(lists: Schedule, added: Sequence[Action], name: str) -> Schedule:
    """Append each action to the list of its stage's rank, which must not have an UPDATE yet."""
    rank_of = placement(lists)
    for rank, actions in enumerate(lists):
        if any(a.op == UPDATE for a in actions):
            raise ValueError(f"{name}: rank {rank} already has {UPDATE}; pass lists without it")
    own = ([a for a in added if rank_of[a.stage] == rank] for rank in range(len(lists)))
    return [[*actions, *last] for actions, last in zip(lists, own)]
