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

from collections.abc import Sequence
from typing import NamedTuple

F, B, I, W = "F", "B", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
UNSHARD, RESHARD, REDUCE, TIE, UPDATE = "UNSHARD", "RESHARD", "REDUCE", "TIE", "UPDATE"

COMPUTE = (F, B, I, W)
SENDS, RECEIVES = (SEND_F, SEND_B), (RECV_F, RECV_B)
WHOLE = -1  # the micro-batch of an action that concerns the stage and no micro-batch

READS = (F, B, I)  # need the parameters; W multiplies only what I left behind
FINISHES = (B, W)  # complete a micro-batch's gradient
MATCHING = {SEND_F: RECV_F, SEND_B: RECV_B, RECV_F: SEND_F, RECV_B: SEND_B}
AFTER = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}  # the peer's stage, seen from ours


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
        return (Action(MATCHING[op], s + AFTER[op], i),)
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
    own, peer = rank_of[action.stage], rank_of[action.stage + AFTER[action.op]]
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
