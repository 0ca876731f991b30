"""Passes: pure functions from lists to lists that add what a schedule leaves out."""

from __future__ import annotations

from collections.abc import Callable

from warpweave.parallel.schedule.actions import (
    FINISHES,
    READS,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    TIE,
    UNSHARD,
    UPDATE,
    WHOLE,
    Action,
    B,
    F,
    I,
    Schedule,
    W,
    lowered,
    placement,
    tied_stages,
)


def split_backward(lists: Schedule, *, lag: int = 0) -> Schedule:
    """Every B becomes an I and a W, the W `lag` backwards later; those left stand at the end."""
    if lag < 0:
        raise ValueError(f"lag must be >= 0, got {lag}")
    result = []
    for actions in lists:
        owed: dict[int, list[Action]] = {}
        out = []
        for action in actions:
            if action.op != B:
                out.append(action)
                continue
            queue = owed.setdefault(action.stage, [])
            queue.append(action._replace(op=W))
            out.append(action._replace(op=I))
            if len(queue) > lag:
                out.append(queue.pop(0))
        result.append(out + [a for queue in owed.values() for a in queue])
    return result


def send_first(lists: Schedule) -> Schedule:
    """Every B whose gradient another rank waits for becomes an I and a W, between which it leaves.

    Each hop of the gradients through the pipeline then takes an I instead of a B: with p stages on
    p ranks (p-1) W less of idle time, the first step towards zero bubbles (arXiv:2401.10241).
    Between I and W a stage holds the operands of one micro-batch's weight gradients; as stage 0,
    which holds the most activations, has nobody to send to, 1F1B's largest rank does not grow.
    """
    rank_of = placement(lists)
    if lowered(lists):
        raise ValueError("send_first: the lists hold sends and receives already")

    def parts(action: Action) -> list[Action]:
        s = action.stage
        if action.op != B or s == 0 or rank_of[s - 1] == rank_of[s]:
            return [action]
        return [action._replace(op=I), action._replace(op=W)]

    return [[part for action in actions for part in parts(action)] for actions in lists]


def with_comm(lists: Schedule) -> Schedule:
    """Adds a send after each F, B or I that another rank waits for, and a receive where it waits.

    Sends do not block, so a send stands where its data exists and a receive where it is consumed;
    transports post receives earlier. Activations and gradients travel on links of their own, on
    which the order of receives is the order of sends in every known schedule; `validate` checks
    yours.
    """
    rank_of = placement(lists)
    if lowered(lists):
        raise ValueError("with_comm: the lists hold sends and receives already")
    result = []
    for actions in lists:
        out = []
        for action in actions:
            s, i = action.stage, action.mb
            ahead = s + 1 < len(rank_of) and rank_of[s + 1] != rank_of[s]
            behind = s > 0 and rank_of[s - 1] != rank_of[s]
            if action.op == F:
                out += [Action(RECV_F, s, i)] * behind + [action] + [Action(SEND_F, s, i)] * ahead
            elif action.op in (B, I):
                out += [Action(RECV_B, s, i)] * ahead + [action] + [Action(SEND_B, s, i)] * behind
            else:
                out.append(action)
        result.append(out)
    return result


def with_reduce(lists: Schedule, *, each: bool = False) -> Schedule:
    """Adds the sum over data ranks (ZeRO-0 to 3) after the last B or W of each stage.

    With `each`, after every B or W: whole gradients are then held for no longer than a micro-batch
    (ZeRO-2 inside a pipeline), for m times the traffic.
    """
    return [
        _insert(actions, REDUCE, lambda a, last: a.op in FINISHES and (each or last), FINISHES)
        for actions in lists
    ]


def with_unshard(lists: Schedule, *, window: int | None = None) -> Schedule:
    """Adds ZeRO-3's gathers: UNSHARD before a stage's parameters are read, RESHARD after.

    `window=None` keeps a stage gathered from its first use to its last (one gather per step); ``k
    >= 1`` keeps at most k stages per rank, dropping the one needed furthest in the future; 0
    gathers for each F, B and I (2m gathers per stage, the least memory). W reads no parameters
    and needs no gather.
    """
    if window is not None and window < 0:
        raise ValueError(f"window must be None or >= 0 stages, got {window}")
    result = []
    for actions in lists:
        reads = [a.stage if a.op in READS else None for a in actions]
        out, resident = [], []
        for index, action in enumerate(actions):
            if action.op not in READS:
                out.append(action)
                continue
            if action.stage not in resident:
                if window and len(resident) == window:
                    furthest = max(resident, key=lambda s: reads.index(s, index))
                    resident.remove(furthest)
                    out.append(Action(RESHARD, furthest))
                resident.append(action.stage)
                out.append(Action(UNSHARD, action.stage))
            out.append(action)
            if window == 0 or action.stage not in reads[index + 1 :]:
                resident.remove(action.stage)
                out.append(Action(RESHARD, action.stage))
        result.append(out)
    return result


def with_tie(lists: Schedule) -> Schedule:
    """Adds the sum of the tied weight's gradient over first and last stage, at their lists' ends.

    Comes after `with_reduce` and before `with_update`. One stage alone shares the parameter and
    needs none; first and last stage on one rank get a single local TIE.
    """
    rank_of = placement(lists)
    _refuse_action(lists, UPDATE, "with_tie")
    if len(rank_of) == 1:
        return [list(actions) for actions in lists]
    tied = tied_stages(rank_of)
    return [
        list(actions) + [Action(TIE, s) for s in tied if rank_of[s] == rank]
        for rank, actions in enumerate(lists)
    ]


def with_update(lists: Schedule) -> Schedule:
    """Adds each stage's optimizer step, which makes version 1, at the end of its rank's list."""
    _refuse_action(lists, UPDATE, "with_update")
    rank_of = placement(lists)
    return [
        list(actions) + [Action(UPDATE, s, WHOLE, 1) for s, r in enumerate(rank_of) if r == rank]
        for rank, actions in enumerate(lists)
    ]


def _refuse_action(lists: Schedule, op: str, name: str) -> None:
    for rank, actions in enumerate(lists):
        if any(a.op == op for a in actions):
            raise ValueError(f"{name}: rank {rank} has {op} already, add it before")


def _insert(
    actions: list[Action], op: str, wanted: Callable[[Action, bool], bool], ops: tuple[str, ...]
) -> list[Action]:
    """`actions` with `op` after those `wanted`, which is told if it is the last of `ops`."""
    last = {a.stage: index for index, a in enumerate(actions) if a.op in ops}
    out = []
    for index, action in enumerate(actions):
        out.append(action)
        if wanted(action, last.get(action.stage) == index):
            out.append(Action(op, action.stage))
    return out
