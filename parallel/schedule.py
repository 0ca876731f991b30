"""Pipeline schedules as data: one list of actions per rank, run, simulated and validated as it is.

A schedule is ``list[list[Action]]``: ``lists[r]`` is what rank `r` does, in order. Nothing else
knows the schedule, so a drawing, a cost or a proof of a list is one of what runs. Synchronous
gradients only need the *generators* here (`gpipe`, `one_f_one_b`); naive model parallelism is
``gpipe(p, 1)`` and gradient accumulation is ``gpipe(1, m)``. *Passes* are pure functions from
lists to lists that add what a schedule leaves out: sends and receives, ZeRO's gathers and
reductions, tied weights, the update.

===========  ===================================================================================
``F``        forward of one micro-batch through one stage
``B``        whole backward; the same as ``I`` and ``W`` in one
``I``        backward of the input only (what the previous stage waits for)
``W``        backward of the weights that ``I`` left behind (zero-bubble, arXiv:2401.10241)
``SEND_F``   the stage's output leaves;         ``RECV_F``  the stage's input arrives
``SEND_B``   the input's gradient leaves;       ``RECV_B``  the output's gradient arrives
``UNSHARD``  parameters gathered (ZeRO-3);      ``RESHARD`` gathered parameters dropped
``REDUCE``   gradients summed over data ranks; ``TIE``     first and last stage's shared weight
``UPDATE``   the optimizer step; its `ver` is the version of the weights that it produces
===========  ===================================================================================

Where a stage lives is read off the lists (`placement`), so V-shaped and looped placements need
nothing new. `Action.ver` is the version of the weights that an ``F`` reads; synchronous schedules
read version 0 all through a step. Sources: GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush,
arXiv:2006.09503).

Standard library only. Every error is a ``ValueError`` of one line with the numbers in it.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

F, B, I, W = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE, TIE, UPDATE = "UNSHARD", "RESHARD", "REDUCE", "TIE", "UPDATE"

COMPUTE = (F, B, I, W)
SENDS, RECEIVES = (SEND_F, SEND_B), (RECV_F, RECV_B)
WHOLE = -1  # the micro-batch of an action that concerns the stage and no micro-batch

_READS = (F, B, I)  # need the parameters; W multiplies only what I left behind
_FINISHES = (B, W)  # complete a micro-batch's gradient
_MATCHING = {SEND_F: RECV_F, SEND_B: RECV_B, RECV_F: SEND_F, RECV_B: SEND_B}
_AFTER = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}  # the peer's stage, seen from ours


class Action(NamedTuple):
    """What a rank does: `op` on `stage` for micro-batch `mb`, with weights of version `ver`."""

    op: str
    stage: int
    mb: int = WHOLE
    ver: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}"
        text += str(self.mb) if self.mb != WHOLE else ""
        return text + (f"@{self.ver}" if self.ver else "")


Schedule = list[list[Action]]


class Link(NamedTuple):
    """A one-way, first-in-first-out connection for one kind of payload: F, B or TIE."""

    kind: str
    src: int
    dst: int


# --------------------------------------------------------------------------------------- generators


def gpipe(p: int, m: int) -> Schedule:
    """All forwards, then all backwards: `p` stages on `p` ranks, `m` micro-batches.

    Idle time over the ideal m(F+B) is (p-1)(F+B); m micro-batches of activations live on every
    rank.
    """
    _need("GPipe", p, m)
    return [
        [Action(F, s, i) for i in range(m)] + [Action(B, s, i) for i in range(m)] for s in range(p)
    ]


def one_f_one_b(p: int, m: int) -> Schedule:
    """One forward, one backward in turn after min(m, p-1-s) warm-up forwards on stage s.

    As idle as GPipe, but stage s holds min(m, p-s) micro-batches of activations. Any m >= 1 will
    do.
    """
    _need("1F1B", p, m)
    lists = []
    for s in range(p):
        warm = min(m, p - 1 - s)
        forwards = [Action(F, s, i) for i in range(m)]
        backwards = [Action(B, s, i) for i in range(m)]
        steady = [a for pair in zip(forwards[warm:], backwards) for a in pair]
        lists.append(forwards[:warm] + steady + backwards[m - warm :])
    return lists


def _need(name: str, p: int, m: int) -> None:
    if p < 1 or m < 1:
        raise ValueError(f"{name} needs p >= 1 stages and m >= 1 micro-batches, got p={p} m={m}")


# ------------------------------------------------------------------------- what an action waits for


def deps(action: Action, stages: int, rank_of: Sequence[int] | None = None) -> tuple[Action, ...]:
    """The events that must have happened before `action`, out of `stages` stages.

    This is the only place that knows the data flow of a pipeline. Events are actions of version
    0; a
    ``B`` makes the events ``I`` and ``W`` happen (`gives`). With `rank_of` (the rank of each stage)
    the answer is for lowered lists, where neighbours on different ranks meet in SEND and RECV;
    without it a compute action waits for its neighbour's compute action.
    """
    op, s, i, ver = action
    if op == F:
        earlier = [Action(UPDATE, s, WHOLE, ver)] if ver else []
        if s > 0:
            apart = rank_of is not None and rank_of[s - 1] != rank_of[s]
            earlier.append(Action(RECV_F, s, i) if apart else Action(F, s - 1, i))
        return tuple(earlier)
    if op in (B, I):
        if s == stages - 1:
            return (Action(F, s, i),)
        apart = rank_of is not None and rank_of[s + 1] != rank_of[s]
        return (Action(F, s, i), Action(RECV_B, s, i) if apart else Action(I, s + 1, i))
    if op in (W, SEND_B):
        return (Action(I, s, i),)
    if op == SEND_F:
        return (Action(F, s, i),)
    if op in RECEIVES:
        return (Action(_MATCHING[op], s + _AFTER[op], i),)
    if op in (UNSHARD, RESHARD, REDUCE, TIE, UPDATE):
        return ()  # their place in the list says it all
    raise ValueError(f"unknown op {op!r} of stage {s} micro-batch {i}")


def gives(action: Action) -> tuple[Action, ...]:
    """The events that `action` makes happen: itself without its version, and I and W for a B."""
    op, s, i, _ = action
    if op == UPDATE:
        return (action,)
    if op == B:
        return (Action(I, s, i), Action(W, s, i))
    return (Action(op, s, i),)


def placement(lists: Schedule) -> list[int]:
    """The rank of each stage. Raises when a stage is on two ranks or a number is left out."""
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} is on ranks {rank_of[action.stage]} and {rank}"
                )
    if sorted(rank_of) != list(range(len(rank_of))) or not rank_of:
        raise ValueError(f"stages must be 0 to {len(rank_of) - 1}, found {sorted(rank_of)}")
    return [rank_of[s] for s in range(len(rank_of))]


def lowered(lists: Schedule) -> bool:
    """Whether the lists say how data moves between ranks (they have been through `with_comm`)."""
    return any(a.op in SENDS or a.op in RECEIVES for actions in lists for a in actions)


def link(action: Action, rank_of: Sequence[int]) -> Link:
    """The connection that a SEND or RECV uses; both ends name the same one."""
    own, peer = rank_of[action.stage], rank_of[action.stage + _AFTER[action.op]]
    kind = F if action.op in (SEND_F, RECV_F) else B
    return Link(kind, own, peer) if action.op in SENDS else Link(kind, peer, own)


def tied_stages(rank_of: Sequence[int]) -> tuple[int, ...]:
    """The stages that get a TIE: first and last, or only the first where both are on one rank."""
    last = len(rank_of) - 1
    return (0, last) if rank_of[0] != rank_of[last] else (0,)


def links(lists: Schedule) -> list[Link]:
    """Every connection that the lists use, sorted; a TIE uses one each way."""
    rank_of = placement(lists)
    crossing = (a for actions in lists for a in actions if a.op in SENDS or a.op in RECEIVES)
    found = {link(a, rank_of) for a in crossing}
    ends = [rank_of[s] for s in tied_stages(rank_of)]
    if len(ends) == 2 and any(a.op == TIE for actions in lists for a in actions):
        found |= {Link(TIE, *ends), Link(TIE, *reversed(ends))}
    return sorted(found)


def order(lists: Schedule, *, rendezvous: bool = False) -> list[tuple[int, int]]:
    """Positions (rank, index) in an order in which all lists can run to their ends.

    A receive waits for its send, the two TIEs wait for each other, and with `rendezvous` a send
    also waits until its receiver has arrived (blocking sends, under which 1F1B deadlocks and
    GPipe does not). Raises with what each rank waits for when there is no such order.
    """
    rank_of = placement(lists)
    places = rank_of if lowered(lists) else None
    at, done, result = [0] * len(lists), set(), []

    def head(rank: int) -> Action | None:
        return lists[rank][at[rank]] if at[rank] < len(lists[rank]) else None

    def unmet(action: Action) -> list[Action]:
        return [d for d in deps(action, len(rank_of), places) if d not in done]

    def meets(action: Action) -> Action | None:
        if action.op == TIE and len(tied_stages(rank_of)) == 2:
            return action._replace(stage=len(rank_of) - 1 - action.stage)
        if rendezvous and action.op in SENDS:
            return Action(_MATCHING[action.op], action.stage + _AFTER[action.op], action.mb)
        return None

    def go(rank: int, action: Action) -> None:
        result.append((rank, at[rank]))
        at[rank] += 1
        done.update(gives(action))

    moved = True
    while moved:
        moved = False
        for rank in range(len(lists)):
            while (action := head(rank)) is not None and not unmet(action):
                peer = meets(action)
                if peer is not None and head(rank_of[peer.stage]) != peer:
                    break
                go(rank, action)
                if peer is not None:
                    go(rank_of[peer.stage], peer)
                moved = True
    stuck = [
        f"rank {rank} at {action} waits for "
        + (" and ".join(map(str, unmet(action))) or str(meets(action)))
        for rank in range(len(lists))
        if (action := head(rank)) is not None
    ]
    if stuck:
        raise ValueError(f"deadlock{' under rendezvous' * rendezvous}: {'; '.join(stuck)}")
    return result


def acknowledged(lists: Schedule) -> dict[Action, list[Action]]:
    """For each receive of a lowered schedule, the sends of its rank that arrived by then for sure.

    A message tells what its sender had received before it, so a send buffer can be freed without
    asking the network, which matters because gloo's ``is_completed`` stays false until one waits.
    Vector clocks over `order`: clock[r][q] counts the actions of rank q known on rank r to have
    finished. Sends that no later message answers are missing; they end with the step.
    """
    rank_of = placement(lists)
    position = {a: i for actions in lists for i, a in enumerate(actions) if a.op in RECEIVES}
    clock = [[0] * len(lists) for _ in lists]
    at_send: dict[Action, list[int]] = {}
    pending: list[list[tuple[Action, int, int]]] = [[] for _ in lists]
    result: dict[Action, list[Action]] = {}
    for rank, index in order(lists):
        action = lists[rank][index]
        if action.op in SENDS:
            at_send[action] = list(clock[rank])
            receive = Action(_MATCHING[action.op], action.stage + _AFTER[action.op], action.mb)
            pending[rank].append((action, rank_of[receive.stage], position[receive]))
        elif action.op in RECEIVES:
            (sent,) = deps(action, len(rank_of), rank_of)
            clock[rank] = [max(pair) for pair in zip(clock[rank], at_send[sent])]
            result[action] = [send for send, q, at in pending[rank] if clock[rank][q] > at]
            pending[rank] = [entry for entry in pending[rank] if clock[rank][entry[1]] <= entry[2]]
        clock[rank][rank] = index + 1
    return result


# ------------------------------------------------------------------------------------------- passes


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

    With `each`, after every B or W: gradients then never live whole for longer than a micro-batch
    (ZeRO-2 inside a pipeline), for m times the traffic.
    """
    return [
        _insert(actions, REDUCE, lambda a, last: a.op in _FINISHES and (each or last), _FINISHES)
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
        reads = [a.stage if a.op in _READS else None for a in actions]
        out, resident = [], []
        for index, action in enumerate(actions):
            if action.op not in _READS:
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
    _refuse(lists, UPDATE, "with_tie")
    if len(rank_of) == 1:
        return [list(actions) for actions in lists]
    tied = tied_stages(rank_of)
    return [
        list(actions) + [Action(TIE, s) for s in tied if rank_of[s] == rank]
        for rank, actions in enumerate(lists)
    ]


def with_update(lists: Schedule) -> Schedule:
    """Adds each stage's optimizer step, which makes version 1, at the end of its rank's list."""
    _refuse(lists, UPDATE, "with_update")
    rank_of = placement(lists)
    return [
        list(actions) + [Action(UPDATE, s, WHOLE, 1) for s, r in enumerate(rank_of) if r == rank]
        for rank, actions in enumerate(lists)
    ]


def _refuse(lists: Schedule, op: str, name: str) -> None:
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


# --------------------------------------------------------------------------------------- validation


def validate(
    lists: Schedule,
    *,
    microbatches: int | None = None,
    staleness: int = 0,
    in_flight: int | None = None,
    rendezvous: bool = False,
) -> None:
    """Raise ``ValueError`` in one line unless the schedule is complete, consistent and can finish.

    * every stage on one rank; every (stage, micro-batch) has one F and either one B or one I and
      one W, for the same number of micro-batches (`microbatches`, when given) on every stage;
    * backward runs on the version that its F read, that version exists by then, each UPDATE makes
      the next one from gradients at most `staleness` versions old, no W is owed at it and no
      gradient is left behind after the last; all stages make the same number of updates;
    * after `with_comm`: every crossing has one send and one receive, in the same order on each
      link;
    * where there is any REDUCE, all gradients pass through one before TIE, UPDATE or the end;
      where there is any UNSHARD, parameters are gathered when read, gathered once and dropped;
      where there is a TIE, both ends have it, after REDUCE and before UPDATE;
    * at most `in_flight` micro-batches, when given, are between F and W on any stage;
    * no deadlock (`order`), with blocking sends too when `rendezvous`.
    """
    rank_of = placement(lists)
    per_stage: list[list[Action]] = [[] for _ in rank_of]
    for action in (a for actions in lists for a in actions):
        per_stage[action.stage].append(action)
    ops = {a.op for actions in lists for a in actions}
    for s, actions in enumerate(per_stage):
        if microbatches is None:
            microbatches = 1 + max(a.mb for own in per_stage for a in own)
        _check_compute(s, actions, microbatches, len(rank_of))
        _check_versions(s, actions, staleness)
        if REDUCE in ops:
            _check_collected(s, actions, REDUCE, (TIE, UPDATE), "are not reduced before")
        if UNSHARD in ops or RESHARD in ops:
            _check_gathered(s, actions)
        if in_flight is not None:
            _check_in_flight(s, actions, in_flight)
    if TIE in ops:
        _check_tied(lists, rank_of)
    updates = [sum(a.op == UPDATE for a in actions) for actions in per_stage]
    if len(set(updates)) > 1:
        raise ValueError(f"stages 0 to {len(rank_of) - 1} make {updates} updates, must be equal")
    if lowered(lists):
        _check_links(lists, rank_of, microbatches or 0)
    order(lists)
    if rendezvous:
        order(lists, rendezvous=True)


def _check_compute(s: int, actions: list[Action], m: int, stages: int) -> None:
    for i in range(m):
        f, b, inp, w = (sum(a.op == op and a.mb == i for a in actions) for op in COMPUTE)
        if f != 1 or (b, inp, w) not in ((1, 0, 0), (0, 1, 1)):
            raise ValueError(
                f"stage {s} micro-batch {i} has {f} F, {b} B, {inp} I and {w} W: "
                "needs one F and either one B or one I and one W"
            )
    for a in actions:
        if a.op in COMPUTE + SENDS + RECEIVES and not 0 <= a.mb < m:
            raise ValueError(f"{a}: micro-batch {a.mb} is not one of {m}")
        if a.op not in COMPUTE + SENDS + RECEIVES and a.mb != WHOLE:
            raise ValueError(f"{a}: {a.op} concerns a whole stage, its micro-batch must be {WHOLE}")
    read = {a.mb: a.ver for a in actions if a.op == F}
    for a in actions:
        if a.op in (B, I, W) and a.ver != read[a.mb]:
            raise ValueError(f"{a} runs on version {a.ver}, its F read version {read[a.mb]}")
    done: set[Action] = set()
    for a in actions:
        for d in deps(a, stages) if a.op in COMPUTE else ():
            if d.stage == s and d.op != UPDATE and d not in done:
                raise ValueError(f"{a} comes before {d}")
        done.update(gives(a))


def _check_versions(s: int, actions: list[Action], staleness: int) -> None:
    newest, owed, gradients = 0, set(), []
    for a in actions:
        if a.op == F and a.ver > newest:
            raise ValueError(f"{a} reads version {a.ver}, but the newest there is is {newest}")
        if a.op == I:
            owed.add(a.mb)
        if a.op in _FINISHES:
            owed.discard(a.mb)
            gradients.append(a)
        if a.op == UPDATE:
            if a.ver != newest + 1:
                raise ValueError(f"{a} produces version {a.ver} after version {newest}")
            if owed:
                raise ValueError(
                    f"{a} while W is owed for micro-batches {sorted(owed)} of stage {s}"
                )
            if not gradients:
                raise ValueError(f"{a} has no gradient to apply")
            oldest = min(gradients, key=lambda g: g.ver)
            if newest - oldest.ver > staleness:
                raise ValueError(
                    f"{a} applies the gradient of {oldest}, {newest - oldest.ver} versions old, "
                    f"allowed {staleness}"
                )
            newest, gradients = a.ver, []
    if newest and gradients:
        raise ValueError(f"stage {s}: the gradient of {gradients[0]} comes after the last UPDATE")


def _check_collected(
    s: int, actions: list[Action], op: str, before: tuple[str, ...], words: str
) -> None:
    waiting: list[Action] = []
    for a in [*actions, Action("the end", s)]:
        if a.op in _FINISHES:
            waiting.append(a)
        if a.op == op:
            waiting = []
        if waiting and a.op in (*before, "the end"):
            raise ValueError(
                f"stage {s}: gradients of {' '.join(map(str, waiting))} {words} {a.op}"
            )


def _check_gathered(s: int, actions: list[Action]) -> None:
    gathered = False
    for a in actions:
        if a.op in _READS and not gathered:
            raise ValueError(f"{a} reads parameters that are not gathered")
        if a.op in (UPDATE, UNSHARD) and gathered:
            raise ValueError(f"{a} while the parameters of stage {s} are gathered")
        if a.op == RESHARD and not gathered:
            raise ValueError(f"{a} while the parameters of stage {s} are not gathered")
        gathered = {UNSHARD: True, RESHARD: False}.get(a.op, gathered)
    if gathered:
        raise ValueError(f"stage {s} is left gathered at the end, RESHARD is missing")


def _check_in_flight(s: int, actions: list[Action], allowed: int) -> None:
    live = 0
    for a in actions:
        live += (a.op == F) - (a.op in _FINISHES)
        if live > allowed:
            raise ValueError(
                f"{a} makes {live} micro-batches in flight on stage {s}, allowed {allowed}"
            )


def _check_tied(lists: Schedule, rank_of: list[int]) -> None:
    ends = {0, len(rank_of) - 1}
    for a in (a for actions in lists for a in actions if a.op == TIE):
        if a.stage not in tied_stages(rank_of):
            raise ValueError(f"{a}: only stages {list(tied_stages(rank_of))} have a TIE here")
    for s in tied_stages(rank_of):
        own = [a for a in lists[rank_of[s]] if a.stage in ends]
        _check_collected(s, own, TIE, (UPDATE,), "are not tied before")


def _check_links(lists: Schedule, rank_of: list[int], m: int) -> None:
    count: dict[Action, int] = {}
    sent: dict[Link, list[Action]] = {}
    received: dict[Link, list[Action]] = {}
    for a in (a for actions in lists for a in actions if a.op in SENDS + RECEIVES):
        count[a] = count.get(a, 0) + 1
        peer = a.stage + _AFTER[a.op]
        if not 0 <= peer < len(rank_of) or rank_of[peer] == rank_of[a.stage]:
            raise ValueError(f"{a} crosses from stage {a.stage} to {peer}, where no other rank is")
        if a.op in SENDS:
            sent.setdefault(link(a, rank_of), []).append(a)
        else:
            send = Action(_MATCHING[a.op], peer, a.mb)
            received.setdefault(link(a, rank_of), []).append(send)
    for s in range(len(rank_of) - 1):
        if rank_of[s] == rank_of[s + 1]:
            continue
        for i in range(m):
            for a in (Action(SEND_F, s, i), Action(SEND_B, s + 1, i)):
                for end in (a, Action(_MATCHING[a.op], a.stage + _AFTER[a.op], i)):
                    if count.get(end, 0) != 1:
                        raise ValueError(f"{end} occurs {count.get(end, 0)} times, needs 1")
    for channel, sends in sent.items():
        for place, (a, b) in enumerate(zip(sends, received[channel])):
            if a != b:
                raise ValueError(
                    f"link {channel.kind} from rank {channel.src} to {channel.dst}: "
                    f"message {place} is sent as {a} and received as {b}"
                )


# --------------------------------------------------------------------------------------------- text

_TORCH_NAME = {REDUCE: "REDUCE_GRAD"}
_OUR_NAME = {theirs: ours for ours, theirs in _TORCH_NAME.items()}
_PATTERN = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)(?:@(\d+))?")


def to_csv(lists: Schedule) -> str:
    """One row per rank, one cell per action, in the form that torch's pipelining runtime reads.

    ``"2F0"`` is stage, op, micro-batch. TIE, UPDATE and the suffix ``@version`` are ours alone, so
    add them after an exchange with torch.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in lists:
        writer.writerow([str(a._replace(op=_TORCH_NAME.get(a.op, a.op))) for a in actions])
    return text.getvalue()


def from_csv(text: str) -> Schedule:
    """The inverse of `to_csv`; empty cells (torch's idle slots) are skipped."""
    return [list(_parse_row(row)) for row in csv.reader(io.StringIO(text))]


def _parse_row(row: list[str]) -> Iterator[Action]:
    for cell in (cell.strip() for cell in row):
        if not cell:
            continue
        found = _PATTERN.fullmatch(cell)
        op = _OUR_NAME.get(found[2], found[2]) if found else ""
        if found is None or op not in (
            *COMPUTE, *SENDS, *RECEIVES, UNSHARD, RESHARD, REDUCE, TIE, UPDATE,
        ):  # fmt: skip
            raise ValueError(f"cell {cell!r} is not [stage][op][micro-batch][@version], as in 2F0")
        yield Action(op, int(found[1]), int(found[3] or WHOLE), int(found[4] or 0))
