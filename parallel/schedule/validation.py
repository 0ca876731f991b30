"""Validation: a schedule must be complete, consistent and free of deadlock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import zip_longest

from warpweave.parallel.schedule.actions import (
    AFTER,
    COMPUTE,
    FINISHES,
    MESSAGES,
    REDUCE,
    SEND_B,
    SEND_F,
    SENDS,
    TIE,
    UPDATE,
    WHOLE,
    Action,
    B,
    F,
    I,
    Link,
    Schedule,
    W,
    deps,
    gives,
    held_activations,
    link,
    lowered,
    other_end,
    placement,
    tied_stages,
)
from warpweave.parallel.schedule.ordering import order


def validate(
    lists: Schedule,
    *,
    microbatches: int | None = None,
    staleness: int = 0,
    activations: int | None = None,
) -> None:
    """Raise ValueError, in one line, unless the schedule is complete, consistent and deadlock-free.

    * Each stage is on one rank. A cell is an F and a B of different micro-batches. Each (stage,
      micro-batch) has one F and either one B or one I and one W, for the same number of
      micro-batches (`microbatches`, if given) on every stage.
    * A backward uses the version that its F read, and an F reads a version that exists. Each UPDATE
      produces the next version from gradients at most `staleness` versions old; no W is missing
      before it, and no gradient comes after the last. All stages have the same number of UPDATEs.
    * After `with_comm`, every activation or gradient that crosses ranks has one send and one
      receive, in the same order on each link.
    * If there is any REDUCE, every gradient is reduced before TIE, UPDATE or the end. If there is a
      TIE, both ends have it, after REDUCE and before UPDATE.
    * No rank holds more than `activations`, if given: one from each F to its B or W.
    * There is no deadlock (`order`).

    The error names the rank, the position in its list and the action.

    Examples:
        >>> from warpweave.parallel.schedule import gpipe
        >>> validate(gpipe(2, 4), microbatches=4)
    """
    try:
        _validate(lists, microbatches, staleness, activations)
    except _WrongError as error:
        every = ((rank, at, a) for rank, row in enumerate(lists) for at, a in enumerate(row))
        rank, at = next((rank, at) for rank, at, action in every if action is error.action)
        raise ValueError(f"rank {rank} position {at}: {error}") from None
    order(lists)


def _validate(
    lists: Schedule, microbatches: int | None, staleness: int, activations: int | None
) -> None:
    rank_of = placement(lists)
    for actions in lists:
        _check_cells(actions)
        if activations is not None:
            _check_activations(actions, activations)
    per_stage: list[list[Action]] = [[] for _ in rank_of]
    for action in (a for actions in lists for a in actions):
        per_stage[action.stage].append(action)
    ops = {a.op for actions in lists for a in actions}
    for s, actions in enumerate(per_stage):
        if microbatches is None:
            microbatches = 1 + max(a.mb for own in per_stage for a in own)
        _check_compute(s, actions, microbatches, rank_of)
        _check_versions(s, actions, staleness)
        if REDUCE in ops:
            _check_collected(s, actions, REDUCE, (TIE, UPDATE), "have no REDUCE before")
    if TIE in ops:
        _check_tied(lists, rank_of)
    updates = [sum(a.op == UPDATE for a in actions) for actions in per_stage]
    if len(set(updates)) > 1:
        raise ValueError(
            f"stages 0 to {len(rank_of) - 1} must have the same number of updates, got {updates}"
        )
    if lowered(lists):
        crossings = [s for s in range(len(rank_of) - 1) if rank_of[s] != rank_of[s + 1]]
        ends = [(Action(SEND_F, s, 0), Action(SEND_B, s + 1, 0)) for s in crossings]
        mbs = range(microbatches or 0)
        check_links(lists, [a._replace(mb=i) for pair in ends for i in mbs for a in pair])


class _WrongError(Exception):
    """An error about one action of the lists."""

    def __init__(self, action: Action, text: str) -> None:
        super().__init__(f"{action}{text}")
        self.action = action


def _check_cells(actions: list[Action]) -> None:
    for a, after in zip_longest(actions, actions[1:]):
        if a.joined and (a.op != F or after is None or after.op != B or after.mb == a.mb):
            pair = "an F and a B of different micro-batches to form an overlapped pair"
            raise _WrongError(a, f" and {after} must be {pair}")


def _check_activations(actions: list[Action], most: int) -> None:
    for a, held in zip(actions, held_activations(actions)):
        if held > most:
            many = f"{held} activations; at most {most} are allowed"
            raise _WrongError(a, f" makes its rank hold {many}")


def _check_compute(s: int, actions: list[Action], m: int, rank_of: list[int]) -> None:
    times = Counter((a.op, a.mb) for a in actions)
    for i in range(m):
        f, b, inp, w = (times[op, i] for op in COMPUTE)
        if f != 1 or (b, inp, w) not in ((1, 0, 0), (0, 1, 1)):
            raise ValueError(
                f"rank {rank_of[s]}: stage {s} micro-batch {i} has {f} F, {b} B, {inp} I and {w} "
                "W; expected F once, and either B once or I and W once each"
            )
    for a in actions:
        if a.op in COMPUTE + MESSAGES and not 0 <= a.mb < m:
            raise _WrongError(a, f": expected a micro-batch from 0 to {m - 1}, got {a.mb}")
        if a.op not in COMPUTE + MESSAGES and a.mb != WHOLE:
            raise _WrongError(
                a, f": {a.op} applies to a whole stage, so it must not have a micro-batch number"
            )
    read = {a.mb: a.ver for a in actions if a.op == F}
    for a in actions:
        if a.op in (B, I, W) and a.ver != read[a.mb]:
            what = f"version {a.ver} of the weights, but the F of the same micro-batch read version"
            raise _WrongError(a, f" uses {what} {read[a.mb]}")
    done: set[Action] = set()
    for a in actions:
        for d in deps(a, len(rank_of)) if a.op in COMPUTE else ():
            if d.stage == s and d.op != UPDATE and d not in done:
                raise _WrongError(a, f" comes before {d}, on which it depends")
        done.update(gives(a))


def _check_versions(s: int, actions: list[Action], staleness: int) -> None:
    newest, owed, gradients = 0, set(), []
    for a in actions:
        if a.op == F and a.ver > newest:
            raise _WrongError(a, f" reads version {a.ver}, but the newest version is {newest}")
        if a.op == I:
            owed.add(a.mb)
        if a.op in FINISHES:
            owed.discard(a.mb)
            gradients.append(a)
        if a.op == UPDATE:
            if a.ver != newest + 1:
                follows = f"version {a.ver} of the weights right after version {newest}"
                raise _WrongError(a, f" produces {follows}; versions must increase by 1")
            if owed:
                raise _WrongError(
                    a, f" must come after the W of micro-batches {sorted(owed)} of stage {s}"
                )
            if not gradients:
                raise _WrongError(a, " has no gradient to apply")
            oldest = min(gradients, key=lambda g: g.ver)
            age = newest - oldest.ver
            if age > staleness:
                old = f"{age} weight version{'s' if age > 1 else ''} old"
                what = f" applies the gradient of {oldest}, which is {old}"
                raise _WrongError(a, f"{what}; the limit (staleness) is {staleness}")
            newest, gradients = a.ver, []
    if newest and gradients:
        raise ValueError(f"stage {s}: the gradient of {gradients[0]} comes after the last UPDATE")


def _check_collected(
    s: int, actions: list[Action], op: str, before: tuple[str, ...], words: str
) -> None:
    waiting: list[Action] = []
    for a in [*actions, Action("the end", s)]:
        if a.op in FINISHES:
            waiting.append(a)
        if a.op == op:
            waiting = []
        if waiting and a.op in (*before, "the end"):
            raise ValueError(
                f"stage {s}: the gradients of {' '.join(map(str, waiting))} {words} {a.op}"
            )


def _check_tied(lists: Schedule, rank_of: list[int]) -> None:
    ends = {0, len(rank_of) - 1}
    for a in (a for actions in lists for a in actions if a.op == TIE):
        if a.stage not in tied_stages(rank_of):
            raise _WrongError(a, f": a TIE is allowed only on stages {list(tied_stages(rank_of))}")
    for s in tied_stages(rank_of):
        own = [a for a in lists[rank_of[s]] if a.stage in ends]
        _check_collected(s, own, TIE, (UPDATE,), "have no TIE before")


def check_links(lists: Schedule, expected: Iterable[Action]) -> None:
    """Raise ValueError unless each send in `expected` and its receive occur once, in the same order
    on each link."""
    rank_of = placement(lists)
    messages = [a for actions in lists for a in actions if a.op in MESSAGES]
    count = Counter(messages)
    sent: dict[Link, list[Action]] = defaultdict(list)
    received: dict[Link, list[Action]] = defaultdict(list)
    for a in messages:
        peer = a.stage + AFTER[a.op]
        if not 0 <= peer < len(rank_of) or rank_of[peer] == rank_of[a.stage]:
            raise ValueError(
                f"{a} connects stages {a.stage} and {peer}, which must both exist and be on "
                "different ranks"
            )
        if a.op in SENDS:
            sent[link(a, rank_of)].append(a)
        else:
            received[link(a, rank_of)].append(other_end(a))
    for a in expected:
        for end in (a, other_end(a)):
            if count[end] != 1:
                raise ValueError(f"{end} must occur once, but occurs {count[end]} times")
    for channel, sends in sent.items():
        for place, (a, b) in enumerate(zip(sends, received[channel])):
            if a != b:
                raise ValueError(
                    f"link {channel.kind} from rank {channel.src} to {channel.dst}: "
                    f"message {place} is sent by {a}, but the receiver expects the message of {b}"
                )
