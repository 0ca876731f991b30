"""The executor: runs a schedule's lists on stages, in one process or over torch.distributed.

Each rank's list runs as a coroutine that yields when it must wait for a message; the executor does
not depend on the schedule. A transport drives the coroutines. `InProcess` runs all ranks in turn in
this process (for proofs, debuggers and Triton's interpreter). `Distributed` runs this process's
rank over a pipeline group. Both run the same operations in the same order, so results are bitwise
equal.

    rank 1 of four, 1F1B; each line is an action and its effect
    RECV_F 0   -> yields until the activation of micro-batch 0 has been received from rank 0
    F 0        -> stage.forward
    SEND_F 0   -> starts the send of the activation to rank 2
    RECV_B 0   -> yields until its gradient has been received from rank 2
    B 0        -> stage.backward
    SEND_B 0   -> starts the send of the input's gradient to rank 0

Messages have no tags, as on NCCL. They are identified by their order on a `Link`, which `validate`
has checked. Shapes and dtypes are fixed by the stages and compared once, not sent with messages.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from warpweave.parallel.pipeline.interface import OnAction, Receive, Stage, Transport
from warpweave.parallel.schedule.actions import (
    RECEIVES,
    RECV_F,
    REDUCE,
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
    link,
    placement,
    tied_stages,
)


@dataclass
class _RankState:
    """The progress and data of one rank; keys are numbered as in the list that it is in."""

    done: set[Action] = field(default_factory=set)
    owed: set[tuple[int, int]] = field(default_factory=set)  # (stage, micro-batch) between I and W
    # (F, s, i): input of F; (B, s, i): dy of B or I
    held: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)  # stage -> version made by last UPDATE

    def under_way(self) -> set[tuple[int, int]]:
        """The (stage, micro-batch) pairs that have begun and not ended."""
        ended = {(a.stage, a.mb) for a in self.done if a.op == W}
        return {(a.stage, a.mb) for a in self.done if a.mb != WHOLE} - ended

    def shifted(self, mbs: int, versions: int) -> _RankState:
        """Return the same state with `mbs` and `versions` added to its numbers. Events that nothing
        can wait for are dropped: those of micro-batches that have ended on all of its stages."""
        open_ = {i for _, i in self.under_way()}
        return _RankState(
            {a._replace(mb=a.mb + mbs) for a in self.done if a.mb in open_},
            {(s, i + mbs) for s, i in self.owed},
            {(kind, s, i + mbs): data for (kind, s, i), data in self.held.items()},
            {s: version + versions for s, version in self.newest.items()},
        )


class InFlight:
    """The state between the passes of a run that are left open (`schedule.open_passes`):
    activations, weight gradients that are owed, versions of the weights.

    A pass's micro-batch 0 and version 0 are the run's `microbatches` and `versions`. Both begin at
    0, and `advance` increases them.

    Examples:
        >>> from warpweave.parallel.pipeline import InProcess, ModuleStage, execute
        >>> from warpweave.parallel.schedule import cut_into_passes, one_f_one_b, renumbered
        >>> x, state = torch.randn(4, 8, 16), InFlight()
        >>> loss = lambda mb, y: y.mean()
        >>> stage = ModuleStage(nn.Linear(16, 16), inputs=x.__getitem__, loss=loss)
        >>> for lists in cut_into_passes(one_f_one_b(1, 4), each=2):
        ...     execute(renumbered(lists, state.microbatches), {0: stage}, InProcess(), state)
        ...     state.advance(2)
        >>> state.check_ended()
    """

    def __init__(self) -> None:
        self.microbatches = self.versions = 0
        self.ranks: dict[int, _RankState] = {}

    def advance(self, microbatches: int, versions: int = 0) -> None:
        """Begin the next pass this many micro-batches and versions after the last one."""
        self.microbatches += microbatches
        self.versions += versions

    def check_ended(self) -> None:
        """Raise RuntimeError, in one line, unless every micro-batch that has begun has ended."""
        for rank, state in sorted(self.ranks.items()):
            if left := sorted(state.under_way()):
                raise RuntimeError(
                    f"rank {rank}: the run ends with unfinished (stage, micro-batch) pairs: {left}"
                )


def execute(
    lists: Schedule,
    stages: Mapping[int, Stage],
    transport: Transport,
    in_flight: InFlight | None = None,
    on_action: OnAction | None = None,
) -> None:
    """Run one pass of a schedule.

    Args:
        lists: all ranks' actions, lowered by ``with_comm`` if there are several ranks.
        stages: stage index -> stage, for the stages of the ranks that run in this process.
        transport: `InProcess` or `Distributed`.
        in_flight: leaves the pass open. Work that is unfinished at its end continues in the next
            call with the same record. Stages then see the run's numbers of micro-batches and
            versions.
        on_action: called as ``on_action(rank, index)`` before each action of the lists that run in
            this process, and with the list's length when all have ended and all messages arrived.

    Gradients are accumulated in the order of the list's B and W, which is ascending micro-batches
    in all known schedules. They are therefore bitwise equal to gradient accumulation on one device.
    They are not divided by the number of micro-batches: the loss is normalized where it is
    computed.

    Raises:
        ValueError: a list needs a stage that is not given, or a message has the wrong shape.
        RuntimeError: an action comes before what it depends on, a W is missing at UPDATE or at the
            end, data is left over, or no rank can proceed. The error is one line that names ranks;
            the state of the stages is then undefined.

    Examples:
        >>> from warpweave.parallel.pipeline import InProcess, ModuleStage
        >>> from warpweave.parallel.schedule import gpipe
        >>> module, inputs = nn.Linear(16, 16), torch.randn(4, 8, 16)
        >>> loss = lambda mb, y: y.square().mean() / 4
        >>> stage = ModuleStage(module, inputs=inputs.__getitem__, loss=loss)
        >>> execute(gpipe(1, 4), {0: stage}, InProcess())
        >>> module.weight.grad.shape
        torch.Size([16, 16])
    """
    transport.open(lists, stages)
    run = InFlight() if in_flight is None else in_flight
    if not run.ranks:
        for stage in stages.values():
            stage.start()
    first = run.microbatches, run.versions
    before = {rank: run.ranks.get(rank, _RankState()) for rank in transport.ranks(lists)}
    states = {rank: state.shifted(-first[0], -first[1]) for rank, state in before.items()}

    def program(rank: int, state: _RankState) -> Generator[Receive, Tensor, None]:
        yield from _run_rank(rank, lists, stages, transport, state, first, on_action)
        if in_flight is None:
            _check_closed(rank, state)

    transport.drive({rank: program(rank, state) for rank, state in states.items()})
    if on_action is not None:
        for rank in states:
            on_action(rank, len(lists[rank]))
    if in_flight is not None:
        run.ranks |= {rank: state.shifted(*first) for rank, state in states.items()}


def _check_closed(rank: int, state: _RankState) -> None:
    if state.owed:
        pairs = f"(stage, micro-batch) pairs: {sorted(state.owed)}"
        raise RuntimeError(f"rank {rank}: no W follows the I of these {pairs}")
    if state.held:
        left = f"data of these (kind, stage, micro-batch) triples: {sorted(state.held)}"
        raise RuntimeError(f"rank {rank}: the action list ends with unused {left}")


def _run_rank(
    rank: int,
    lists: Schedule,
    stages: Mapping[int, Stage],
    transport: Transport,
    state: _RankState,
    first: tuple[int, int],
    on_action: OnAction | None,
) -> Generator[Receive, Tensor, None]:
    """Run one rank's list as a coroutine that yields the messages it waits for; changes `state`.

    `first` is the pair of run numbers of the list's micro-batch 0 and version 0.
    """
    rank_of = placement(lists)
    last = len(rank_of) - 1
    owed, held = state.owed, state.held

    def keep(kind: str, stage: int, mb: int, value: Tensor | None, action: Action) -> None:
        if value is None:
            raise RuntimeError(
                f"rank {rank}: {action} returned None, but stage {stage} waits for data"
            )
        held[kind, stage, mb] = value.detach()

    for index, action in enumerate(lists[rank]):
        op, s, i, ver, _ = action
        if on_action is not None:
            on_action(rank, index)
        transport.reach(rank, index)
        _check_turn(rank, action, state, rank_of)
        stage, mb = stages[s], i + first[0]
        if op == F:
            y = stage.forward(mb, held.pop((F, s, i)) if s > 0 else None, ver + first[1])
            if s < last:
                keep(F, s + 1, i, y, action)
        elif op in (B, I):
            run = stage.backward if op == B else stage.backward_input
            dx = run(mb, held.pop((B, s, i)) if s < last else None)
            if s > 0:
                keep(B, s - 1, i, dx, action)
            if op == I:
                owed.add((s, i))
        elif op == W:
            stage.backward_weight(mb)
            owed.remove((s, i))
        elif op in SENDS:
            kind, peer = (F, s + 1) if op == SEND_F else (B, s - 1)
            transport.send(link(action, rank_of), action, held.pop((kind, peer, i)))
        elif op in RECEIVES:
            kind, like = (F, (s, i)) if op == RECV_F else (B, (s + 1, i))
            held[kind, s, i] = yield Receive(link(action, rank_of), action, transport.like(*like))
        elif op == TIE:
            yield from _tie(action, rank_of, stages, transport)
        elif op == REDUCE:
            stage.reduce()
        else:
            if late := sorted(mb for stage_, mb in owed if stage_ == s):
                raise RuntimeError(
                    f"rank {rank}: {action} must come after the W of micro-batches {late}"
                )
            stage.update()
            state.newest[s] = ver
        state.done.update(gives(action))


def _check_turn(rank: int, action: Action, state: _RankState, rank_of: list[int]) -> None:
    """Raise RuntimeError unless all that `action` depends on is done, as far as this rank knows,
    and `action` itself is not."""
    for needed in deps(action, len(rank_of), rank_of):
        if needed.op == UPDATE:
            met = needed.ver <= state.newest.get(action.stage, 0)
        else:
            met = rank_of[needed.stage] != rank or needed in state.done
        if not met:
            raise RuntimeError(f"rank {rank}: {action} comes before {needed}, on which it depends")
    if action.mb != WHOLE and state.done.intersection(gives(action)):
        raise RuntimeError(f"rank {rank}: {action} occurs twice")


def _tie(
    action: Action, rank_of: list[int], stages: Mapping[int, Stage], transport: Transport
) -> Generator[Receive, Tensor, None]:
    """Exchange and add the tied weight's gradient: a + b on one end and b + a on the other, which
    are bitwise equal.

        stage 0 (embedding)   gradient a   --a-->   a + b
        last stage (head)     gradient b   --b-->   b + a
    """
    own = stages[action.stage].tie()
    if len(tied_stages(rank_of)) == 1:
        other = stages[len(rank_of) - 1].tie()
        if own is not None and other is not None:
            other.copy_(own.add_(other))
        return
    if own is None:
        return
    peer = len(rank_of) - 1 - action.stage
    here, there = rank_of[action.stage], rank_of[peer]
    transport.send(Link(TIE, here, there), action, own.clone())
    like = (tuple(own.shape), own.dtype, own.device)
    own.add_((yield Receive(Link(TIE, there, here), action._replace(stage=peer), like)))
