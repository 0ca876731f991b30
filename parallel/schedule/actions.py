"""Pipeline schedules as data: one list of actions per rank.

Executor, simulator and validator read the same lists. A schedule is ``list[list[Action]]``:
``lists[r]`` is what rank `r` does, in order. 1F1B for two ranks and two micro-batches, without and
with messages (the number before an operation is its stage, the number after it is its micro-batch):

    rank 0   0F0 0F1 0B0 0B1         0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1
    rank 1   1F0 1B0 1F1 1B1         1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1

A *generator* (`gpipe`, `one_f_one_b`, `interleaved`) creates the lists of F and B. Naive model
parallelism is ``gpipe(p, 1)`` and gradient accumulation is ``gpipe(1, m)``. *Passes* are pure
functions from lists to lists that add what a generator leaves out: sends and receives, ZeRO's
reductions, the sum of tied weights' gradients, the optimizer step.

===========  ===================================================================================
``F``        forward of one micro-batch through one stage
``B``        whole backward: ``I`` and ``W`` in one
``I``        backward for the input's gradient only, which the previous stage waits for
``W``        backward for the weights' gradients, after its ``I`` (zero-bubble, arXiv:2401.10241)
``SEND_F``   send the stage's output;           ``RECV_F``  receive the stage's input
``SEND_B``   send the input's gradient;         ``RECV_B``  receive the output's gradient
``REDUCE``   sum gradients over data ranks;     ``TIE``     sum the gradients of a tied weight
``UPDATE``   the optimizer step; its `ver` is the version of the weights that it produces
===========  ===================================================================================

A *cell* is an ``F`` and a ``B`` of different micro-batches that a rank computes together, so the
messages of each are hidden under the products of the other (DualPipe, arXiv:2412.19437). The F is
`joined` to the B that follows it: ``0F3& 7B1``, or ``(0F3;7B1)OVERLAP_F_B`` in torch. A cell begins
when both can begin, and its results are available when both have ended.

The rank of each stage follows from the lists (`placement`), so looped and V-shaped placements need
no other data. `Action.ver` is the version of the weights that an ``F`` reads; everything in a step
of a synchronous schedule reads version 0. Sources: GPipe (arXiv:1811.06965), 1F1B (PipeDream-Flush,
arXiv:2006.09503).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

F, B, I, W = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
REDUCE, TIE, UPDATE = "REDUCE", "TIE", "UPDATE"

COMPUTE = (F, B, I, W)
SENDS, RECEIVES = (SEND_F, SEND_B), (RECV_F, RECV_B)
MESSAGES = SENDS + RECEIVES
WHOLE = -1  # the micro-batch of an action that concerns a whole stage

FINISHES = (B, W)  # these complete a micro-batch's gradient
MATCHING = {SEND_F: RECV_F, SEND_B: RECV_B, RECV_F: SEND_F, RECV_B: SEND_B}
AFTER = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}  # the peer's stage minus this one


class Action(NamedTuple):
    """One entry of a rank's list: `op` on `stage` for micro-batch `mb`, with weights of version
    `ver`. If `joined`, it forms a cell with the next entry.

    Examples:
        >>> print(Action("F", stage=2, mb=0))
        2F0
    """

    op: str
    stage: int
    mb: int = WHOLE
    ver: int = 0
    joined: bool = False

    def __str__(self) -> str:
        text = f"{self.stage}{self.op}"
        text += str(self.mb) if self.mb != WHOLE else ""
        return text + (f"@{self.ver}" if self.ver else "") + "&" * self.joined


Schedule = list[list[Action]]


class Link(NamedTuple):
    """A one-way, first-in-first-out connection for one kind of payload: F, B or TIE."""

    kind: str
    src: int
    dst: int


def deps(action: Action, stages: int, rank_of: Sequence[int] | None = None) -> tuple[Action, ...]:
    """The events that `action` depends on, in a pipeline of `stages` stages.

    This is the only place that knows the data flow of a pipeline:

        F of stage s          F of stage s-1
        B or I of stage s     F of stage s and I of stage s+1
        W of stage s          I of stage s

    Events are actions of version 0; a ``B`` is the events ``I`` and ``W`` (`gives`). With `rank_of`
    (the rank of each stage), the result is for lowered lists: an F or B waits for its RECV if the
    other stage is on another rank, and a RECV waits for its SEND.
    """
    op, s, i, ver, _ = action
    if op == F:
        earlier = [Action(UPDATE, s, WHOLE, ver)] if ver else []
        if s > 0:
            remote = rank_of is not None and rank_of[s - 1] != rank_of[s]
            earlier.append(Action(RECV_F, s, i) if remote else Action(F, s - 1, i))
        return tuple(earlier)
    if op in (B, I):
        if s == stages - 1:
            return (Action(F, s, i),)
        remote = rank_of is not None and rank_of[s + 1] != rank_of[s]
        return (Action(F, s, i), Action(RECV_B, s, i) if remote else Action(I, s + 1, i))
    if op in (W, SEND_B):
        return (Action(I, s, i),)
    if op == SEND_F:
        return (Action(F, s, i),)
    if op in RECEIVES:
        return (other_end(action),)
    if op in (REDUCE, TIE, UPDATE):
        return ()  # ordered only by their position in the list
    raise ValueError(f"unknown op {op!r} of stage {s} micro-batch {i}")


def other_end(action: Action) -> Action:
    """The RECV of a SEND, or the SEND of a RECV."""
    return Action(MATCHING[action.op], action.stage + AFTER[action.op], action.mb)


def gives(action: Action) -> tuple[Action, ...]:
    """The events that `action` completes: itself without its version, and I and W for a B."""
    op, s, i, ver, joined = action
    if op == B:
        return (Action(I, s, i), Action(W, s, i))
    return (Action(op, s, i) if (ver or joined) and op != UPDATE else action,)


def cells(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Split a rank's list into units: an action each, or a cell of two."""
    first: tuple[Action, ...] = ()
    for action in actions:
        if action.joined and not first:
            first = (action,)
        else:
            yield (*first, action)
            first = ()
    if first:
        yield first


def cell_at(actions: Sequence[Action], index: int) -> Sequence[Action]:
    """The unit that begins at `index`."""
    return actions[index : index + 1 + actions[index].joined]


def held_activations(
    actions: Sequence[Action], of: Callable[[int], int] = lambda stage: 1
) -> list[int]:
    """The number of activations that a rank holds after each action of its list.

    Each F adds one (or ``of(stage)``) until its B or W. Almost nothing is freed between I and W.
    """
    steps = (((a.op == F) - (a.op in FINISHES)) * of(a.stage) for a in actions)
    return list(accumulate(steps))


def placement(lists: Schedule) -> list[int]:
    """The rank of each stage. Raise ValueError if one is on two ranks, or they are not 0 to n-1."""
    rank_of: dict[int, int] = {}
    for rank, actions in enumerate(lists):
        for action in actions:
            if rank_of.setdefault(action.stage, rank) != rank:
                both = f"{rank_of[action.stage]} and {rank}"
                raise ValueError(f"stage {action.stage} must be on one rank, got ranks {both}")
    if sorted(rank_of) != list(range(len(rank_of))) or not rank_of:
        raise ValueError(
            f"stages must be numbered 0, 1, 2, ... without gaps, got {sorted(rank_of)}"
        )
    return [rank_of[s] for s in range(len(rank_of))]


def lowered(lists: Schedule) -> bool:
    """Return True if the lists contain sends and receives (`with_comm` has been applied)."""
    return any(a.op in MESSAGES for actions in lists for a in actions)


def link(action: Action, rank_of: Sequence[int]) -> Link:
    """The connection that a SEND or RECV uses, the same for both ends."""
    own, peer = rank_of[action.stage], rank_of[action.stage + AFTER[action.op]]
    kind = F if action.op in (SEND_F, RECV_F) else B
    return Link(kind, own, peer) if action.op in SENDS else Link(kind, peer, own)


def tied_stages(rank_of: Sequence[int]) -> tuple[int, ...]:
    """The stages that have a TIE: first and last, or only the first if both are on one rank."""
    last = len(rank_of) - 1
    return (0, last) if rank_of[0] != rank_of[last] else (0,)


def links(lists: Schedule) -> list[Link]:
    """All connections that the lists use, sorted. A TIE uses one in each direction."""
    rank_of = placement(lists)
    found = {link(a, rank_of) for actions in lists for a in actions if a.op in MESSAGES}
    ends = [rank_of[s] for s in tied_stages(rank_of)]
    if len(ends) == 2 and any(a.op == TIE for actions in lists for a in actions):
        found |= {Link(TIE, *ends), Link(TIE, *reversed(ends))}
    return sorted(found)
