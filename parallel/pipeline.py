"""The executor: runs a schedule's lists on stages, in one process or over torch.distributed.

`execute` walks each rank's list as a coroutine that stops where it must wait for a message;
nothing here knows any schedule. A transport drives the coroutines: `InProcess` runs all ranks in
turn in this process (for proofs, debuggers and Triton's interpreter), `Distributed` runs this
process's rank over a pipeline group. Same code, same order of operations, so the same bits.

Messages carry no tags, as on NCCL: they are told apart by their place on a link, one link per
payload (activation, gradient), source and destination. `validate` has compared the orders of both
ends. Shapes and dtypes are fixed by the stages and compared once; no message describes itself.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from warpweave.kernels.wgrad import WeightGradients, collect
from warpweave.parallel.schedule import (
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE,
    RESHARD,
    SEND_B,
    SEND_F,
    SENDS,
    TIE,
    UNSHARD,
    UPDATE,
    WHOLE,
    Action,
    B,
    F,
    I,
    Link,
    Schedule,
    W,
    acknowledged,
    deps,
    gives,
    link,
    links,
    lowered,
    placement,
    tied_stages,
    to_csv,
    validate,
)

Like = tuple[Sequence[int], torch.dtype, torch.device]


class Stage(Protocol):
    """What a pipeline stage must offer. `x`, `y`, `dx`, `dy` are plain data without a graph."""

    def input_like(self, mb: int) -> Like:
        """(shape, dtype, device) of the x that `forward` takes; not asked of stage 0."""

    def forward(self, mb: int, x: Tensor | None) -> Tensor | None:
        """Output of micro-batch `mb`. Stage 0 has its own input (x None), the last returns None."""

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """All gradients of `mb`, added to the parameters'; returns dx (stage 0: None)."""

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """As `backward`, with weight gradients left for `backward_weight` (`kernels.wgrad`)."""

    def backward_weight(self, mb: int) -> None:
        """The weight gradients that `backward_input` left, added to the parameters'."""

    def unshard(self) -> None:
        """Gather the parameters (ZeRO-3)."""

    def reshard(self) -> None:
        """Drop the gathered parameters."""

    def reduce(self) -> None:
        """Sum the gradients so far over the ranks that hold this stage."""

    def tie(self) -> Tensor | None:
        """The shared weight's gradient, to which the other end's is added in place.

        None when the stage has summed the two by itself.
        """

    def update(self) -> None:
        """The optimizer step."""


class Receive(NamedTuple):
    """What a coroutine yields: it waits for the next message on `link`, which is for `action`."""

    link: Link
    action: Action
    like: Like


class Transport(Protocol):
    """Moves tensors between the ranks of a schedule, and runs those that live in this process."""

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """The ranks that this process runs."""

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Called before each run; raises when lists or stages do not fit."""

    def like(self, stage: int, mb: int) -> Like:
        """What stage `stage` takes as input for `mb`; stages of other ranks included."""

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Hand over a message without blocking; nobody may write to the tensor afterwards."""

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Run the coroutines (rank -> coroutine) to their ends."""


def execute(lists: Schedule, stages: Mapping[int, Stage], transport: Transport) -> None:
    """Run one pass of a schedule.

    Args:
        lists: all ranks' actions, lowered by ``with_comm`` when there are several ranks.
        stages: stage index -> stage, for the stages of the ranks that run in this process.
        transport: `InProcess` or `Distributed`.

    Gradients are accumulated in the order of the list's B and W, ascending micro-batches in all
    known schedules, so they equal plain accumulation on one device bit for bit. Divide nothing by
    the number of micro-batches: the loss is normalised once, where it is computed.

    Raises:
        ValueError: a list asks for what the stages do not hold, or a message has the wrong shape.
        RuntimeError: an action comes before what it needs, a weight gradient is still owed at
        UPDATE or at the end, data is left over, or no rank can go on (all in one line, naming
        ranks). The stages' state is undefined then.
    """
    transport.open(lists, stages)
    ranks = transport.ranks(lists)
    transport.drive({rank: _run(rank, lists, stages, transport) for rank in ranks})


def _run(
    rank: int, lists: Schedule, stages: Mapping[int, Stage], transport: Transport
) -> Generator[Receive, Tensor, None]:
    """One rank's list, as a coroutine that yields what it must wait for."""
    rank_of = placement(lists)
    last = len(rank_of) - 1
    done: set[Action] = set()
    owed: set[tuple[int, int]] = set()  # (stage, micro-batch) between I and W
    held: dict[tuple[str, int, int], Tensor] = {}  # (F, s, i): input of F; (B, s, i): dy of B or I

    def keep(kind: str, stage: int, mb: int, value: Tensor | None, action: Action) -> None:
        if value is None:
            raise RuntimeError(f"rank {rank}: {action} returned None, stage {stage} waits for data")
        held[kind, stage, mb] = value.detach()

    for action in lists[rank]:
        op, s, i, ver = action
        for needed in deps(action, len(rank_of), rank_of):
            if rank_of[needed.stage] == rank and needed not in done:
                raise RuntimeError(f"rank {rank}: {action} comes before {needed}")
        if i != WHOLE and done.intersection(gives(action)):
            raise RuntimeError(f"rank {rank}: {action} occurs twice")
        if ver and op != UPDATE:
            raise ValueError(
                f"rank {rank}: {action} reads weights of version {ver}, stages hold one"
            )
        stage = stages[s]
        if op == F:
            y = stage.forward(i, held.pop((F, s, i)) if s > 0 else None)
            if s < last:
                keep(F, s + 1, i, y, action)
        elif op in (B, I):
            run = stage.backward if op == B else stage.backward_input
            dx = run(i, held.pop((B, s, i)) if s < last else None)
            if s > 0:
                keep(B, s - 1, i, dx, action)
            if op == I:
                owed.add((s, i))
        elif op == W:
            stage.backward_weight(i)
            owed.remove((s, i))
        elif op in SENDS:
            kind, peer = (F, s + 1) if op == SEND_F else (B, s - 1)
            transport.send(link(action, rank_of), action, held.pop((kind, peer, i)))
        elif op == RECV_F:
            held[F, s, i] = yield Receive(link(action, rank_of), action, transport.like(s, i))
        elif op == RECV_B:
            held[B, s, i] = yield Receive(link(action, rank_of), action, transport.like(s + 1, i))
        elif op == TIE:
            yield from _tie(action, rank_of, stages, transport)
        else:
            if op == UPDATE and any(stage_ == s for stage_, _ in owed):
                late = sorted(mb for stage_, mb in owed if stage_ == s)
                raise RuntimeError(
                    f"rank {rank}: {action} while W is owed for micro-batches {late}"
                )
            _whole(stage, op)
        done.update(gives(action))
    if owed:
        raise RuntimeError(
            f"rank {rank}: the list ends while W is owed for (stage, mb) {sorted(owed)}"
        )
    if held:
        raise RuntimeError(
            f"rank {rank}: the list ends with unused (kind, stage, mb) {sorted(held)}"
        )


def _whole(stage: Stage, op: str) -> None:
    if op == UNSHARD:
        stage.unshard()
    elif op == RESHARD:
        stage.reshard()
    elif op == REDUCE:
        stage.reduce()
    else:
        stage.update()


def _tie(
    action: Action, rank_of: list[int], stages: Mapping[int, Stage], transport: Transport
) -> Generator[Receive, Tensor, None]:
    """Add the other end's gradient: a + b on one end and b + a on the other, the same bits."""
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


def _check_like(action: Action, tensor: Tensor, like: Like) -> None:
    shape, dtype = tuple(like[0]), like[1]
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        raise ValueError(
            f"{action}: got shape {tuple(tensor.shape)} {tensor.dtype}, agreed were {shape} {dtype}"
        )


def _check_stages(lists: Schedule, stages: Mapping[int, Stage], ranks: Sequence[int]) -> None:
    wanted = {a.stage for rank in ranks for a in lists[rank]}
    if not wanted <= set(stages):
        raise ValueError(f"ranks {list(ranks)} run stages {sorted(wanted)}, got {sorted(stages)}")
    if len(set(placement(lists))) > 1 and not lowered(lists):
        raise ValueError(
            f"{len(lists)} ranks and no SEND or RECV: pass the lists through with_comm"
        )


# ------------------------------------------------------------------------- all ranks in a process


class InProcess:
    """All ranks in this process, taking turns: a rank runs until it waits, then the next one does.

    Messages are copied, so that stages cannot share memory by accident. Deadlocks and messages in
    the wrong order are found while running, without `validate`.
    """

    def __init__(self) -> None:
        self._boxes: dict[Link, deque[tuple[Action, Tensor]]] = {}
        self._stages: Mapping[int, Stage] = {}

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """All of them."""
        return range(len(lists))

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Empties the mailboxes. Raises ``ValueError`` when a stage is missing."""
        _check_stages(lists, stages, self.ranks(lists))
        self._stages, self._boxes = stages, {}

    def like(self, stage: int, mb: int) -> Like:
        """Asks the stage itself."""
        return self._stages[stage].input_like(mb)

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Puts a copy into the link's mailbox."""
        self._boxes.setdefault(link, deque()).append((action, tensor.clone()))

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Takes turns until all are done; raises ``RuntimeError`` when none can move."""
        waiting: dict[int, Receive | None] = dict.fromkeys(programs)
        while waiting:
            moved = False
            for rank in list(waiting):
                while rank in waiting and (
                    (want := waiting[rank]) is None or self._boxes.get(want.link)
                ):
                    moved = True
                    try:
                        message = None if want is None else self._take(want)
                        waiting[rank] = programs[rank].send(message)  # type: ignore[arg-type]
                    except StopIteration:
                        del waiting[rank]
            if not moved:
                stuck = "; ".join(
                    f"rank {rank} waits for {want.action} from rank {want.link.src}"
                    for rank, want in waiting.items()
                    if want is not None
                )
                raise RuntimeError(f"deadlock: {stuck}")
        left = [str(action) for box in self._boxes.values() for action, _ in box]
        if left:
            raise RuntimeError(f"sent and never received: {' '.join(left)}")

    def _take(self, want: Receive) -> Tensor:
        sent, tensor = self._boxes[want.link].popleft()
        matches = want.action if want.action.op == TIE else _send_of(want.action)
        if sent != matches:
            raise RuntimeError(
                f"link {want.link.kind} from rank {want.link.src} to {want.link.dst}: "
                f"{want.action} finds {sent}"
            )
        _check_like(want.action, tensor, want.like)
        return tensor


def _send_of(receive: Action) -> Action:
    _, s, i, _ = receive
    return Action(SEND_F, s - 1, i) if receive.op == RECV_F else Action(SEND_B, s + 1, i)


# --------------------------------------------------------------------------- one rank per process

# A dtype travels as its place in this list.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_DIMS = 8


class _Posted(NamedTuple):
    action: Action
    work: dist.Work
    buffer: Tensor


class Distributed:
    """This process is one rank of the pipeline group; messages travel by torch.distributed P2P.

    * A communicator is a set of links of which no two touch the same rank, so a receive that was
      posted early never holds up a send behind it (NCCL runs what is on one communicator in order).
      Straight pipelines need four, as many as they have kinds of links at a rank.
    * Of each link one receive is always posted ahead of need, in the order of the list.
    * Sends are asynchronous. A sent tensor is kept until a later message proves its arrival
      (`schedule.acknowledged`), so no rank ever blocks on a send before the end.
    * Every wait ends after `timeout`, with an error that names rank, action and peer. On NCCL the
      wait is the stream's, and torch's watchdog keeps the time.

    Args:
        lists: the schedule, validated here; `execute` accepts no other.
        group: the pipeline group, whose rank r runs ``lists[r]``; None for a single rank.
        device: where receive buffers live; the group's backend must take it.
        timeout: seconds.

    Building one is collective over `group`, and its members must have built the same number of
    process groups before (torch derives the new groups' names from that number). After an error,
    throw it away.

    Raises:
        ValueError: the schedule is not valid, or has not as many ranks as the group, or the ranks
        hold different schedules.
    """

    def __init__(
        self,
        lists: Schedule,
        group: ProcessGroup | None,
        *,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
    ) -> None:
        validate(lists)
        size = 1 if group is None else group.size()
        if size != len(lists):
            raise ValueError(f"the schedule has {len(lists)} ranks, the pipeline group {size}")
        self.rank = 0 if group is None else group.rank()
        self._lists, self._group, self._timeout = lists, group, timeout
        self._device = torch.device(device)
        self._arrived = acknowledged(lists)
        self._table: dict[tuple[int, int], Like] | None = None
        self._communicators = self._connect()
        self._expected: dict[Link, list[Receive]] = {}
        self._posted: dict[Link, _Posted] = {}
        self._sending: dict[Action, tuple[Link, dist.Work, Tensor]] = {}

    def _connect(self) -> dict[Link, ProcessGroup]:
        """One communicator per matching of links; every link is greeted once."""
        if self._group is None:
            return {}
        mine = zlib.crc32(to_csv(self._lists).encode())
        sums = torch.tensor([mine, -mine], dtype=torch.int64, device=self._device)
        dist.all_reduce(sums, dist.ReduceOp.MAX, self._group)
        if sums[0] != -sums[1]:
            raise ValueError(
                f"the ranks of the pipeline group hold different schedules, checksum {mine}"
            )
        matchings: list[list[Link]] = []
        for wire in links(self._lists):
            touched = {wire.src, wire.dst}
            fits = (m for m in matchings if all(touched.isdisjoint({w.src, w.dst}) for w in m))
            matching = next(fits, None)
            if matching is None:
                matchings.append([wire])
            else:
                matching.append(wire)
        ranks = dist.get_process_group_ranks(self._group)
        result: dict[Link, ProcessGroup] = {}
        for matching in matchings:
            communicator = dist.new_group(
                ranks,
                timeout=timedelta(seconds=self._timeout),
                use_local_synchronization=True,
            )
            result.update(dict.fromkeys(matching, communicator))
        # NCCL connects a pair at its first message and blocks until the peer joins in: one order
        # for all ranks, once, rather than a deadlock in the first step.
        greeting = torch.zeros(1, device=self._device)
        for wire in sorted(result):
            if wire.src == self.rank:
                dist.send(greeting, group_dst=wire.dst, group=result[wire])
            elif wire.dst == self.rank:
                dist.recv(greeting, group_src=wire.src, group=result[wire])
        return result

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """The one rank that this process is."""
        return (self.rank,)

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """The first time, collective: all ranks learn what each stage takes as input."""
        if lists is not self._lists and lists != self._lists:
            raise ValueError(f"rank {self.rank}: this transport was built for another schedule")
        _check_stages(lists, stages, self.ranks(lists))
        if self._table is None:
            self._table = self._agree(lists, stages)
        self._expected = {}
        rank_of = placement(lists)
        for a in lists[self.rank]:
            if a.op in RECEIVES:
                like = self.like(a.stage + (a.op == RECV_B), a.mb)
                wire = link(a, rank_of)
                self._expected.setdefault(wire, []).append(Receive(wire, a, like))
        for queue in self._expected.values():
            queue.reverse()  # the next one is popped from the end

    def _agree(self, lists: Schedule, stages: Mapping[int, Stage]) -> dict[tuple[int, int], Like]:
        rank_of = placement(lists)
        m = 1 + max(a.mb for actions in lists for a in actions)
        words = torch.zeros(len(rank_of), m, 2 + _DIMS, dtype=torch.int64)
        for s in range(1, len(rank_of)):
            for i in range(m) if rank_of[s] == self.rank else ():
                shape, dtype, _ = stages[s].input_like(i)
                if len(shape) > _DIMS or dtype not in _DTYPES:
                    raise ValueError(
                        f"rank {self.rank}: input of stage {s} is {tuple(shape)} {dtype}, "
                        f"allowed are {_DIMS} dims and {_DTYPES}"
                    )
                words[s, i, : 2 + len(shape)] = torch.tensor(
                    [_DTYPES.index(dtype), len(shape), *shape], dtype=torch.int64
                )
        if self._group is not None:
            words = words.to(self._device)
            dist.all_reduce(words, group=self._group)
        table: dict[tuple[int, int], Like] = {}
        for s, row in enumerate(words.tolist()):
            for i, (dtype, dims, *shape) in enumerate(row):
                table[s, i] = (tuple(shape[:dims]), _DTYPES[dtype], self._device)
        return table

    def like(self, stage: int, mb: int) -> Like:
        """Reads the table that the ranks agreed on."""
        assert self._table is not None
        return self._table[stage, mb]

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Starts an isend, and keeps the tensor until it has arrived."""
        if action.op in SENDS:
            stage = action.stage + (action.op == SEND_F)
            _check_like(action, tensor, self.like(stage, action.mb))
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group_dst=link.dst, group=self._communicators[link])
        assert work is not None
        self._sending[action] = (link, work, tensor)

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Runs this rank's list; ends when all that it sent has arrived."""
        program = programs[self.rank]
        for queue in self._expected.values():
            self._post(queue.pop())
        message: Tensor | None = None
        while True:
            try:
                want = program.send(message)  # type: ignore[arg-type]
            except StopIteration:
                break
            message = self._take(want)
        for action in list(self._sending):
            self._arrive(action)

    def _post(self, want: Receive) -> None:
        shape, dtype, device = want.like
        buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
        work = dist.irecv(buffer, group_src=want.link.src, group=self._communicators[want.link])
        assert work is not None
        self._posted[want.link] = _Posted(want.action, work, buffer)

    def _take(self, want: Receive) -> Tensor:
        if want.link not in self._posted:  # a TIE, whose shape only its stage knows
            self._post(want)
        posted = self._posted.pop(want.link)
        if posted.action != want.action:
            raise RuntimeError(f"rank {self.rank}: {want.action} finds {posted.action} posted")
        if self._expected.get(want.link):
            self._post(self._expected[want.link].pop())
        self._wait(posted.work, f"{want.action} from rank {want.link.src}")
        for action in self._arrived.get(want.action, ()):
            self._arrive(action)
        return posted.buffer

    def _arrive(self, action: Action) -> None:
        link, work, _ = self._sending.pop(action)
        self._wait(work, f"{action} to rank {link.dst}")

    def _wait(self, work: dist.Work, words: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise RuntimeError(
                f"rank {self.rank}: {words} failed within {self._timeout} s: {first}"
            ) from error


# -------------------------------------------------------------------------- any module as a stage


class ModuleStage:
    """Any ``nn.Module`` as a stage, with whole parameters: the plain case, for users and proofs.

    Args:
        module: x -> y, with floating-point x and y.
        inputs: mb -> input; on the first stage, and only there.
        like: (shape, dtype, device) of x; on all but the first.
        loss: (mb, y) -> scalar, already normalised; on the last stage, and only there.
        tied: the parameter that first and last stage share, where there is a TIE.
        optimizer: stepped, and its gradients cleared, at UPDATE.
        group: the ranks over which REDUCE sums gradients; None is one.

    Gradients are in the parameters' ``.grad``; `losses` maps mb to the detached loss of the last
    run.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        inputs: Callable[[int], Tensor] | None = None,
        like: Like | None = None,
        loss: Callable[[int, Tensor], Tensor] | None = None,
        tied: nn.Parameter | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if (inputs is None) == (like is None):
            raise ValueError("a stage has either inputs (the first one) or like (the others)")
        self.module, self.tied, self.optimizer, self.group = module, tied, optimizer, group
        self.losses: dict[int, Tensor] = {}
        self._inputs, self._like, self._loss = inputs, like, loss
        # The graph's end and not y itself is kept: y's memory is free as soon as it has been sent.
        self._graphs: dict[int, tuple[Tensor | None, GradientEdge | None]] = {}
        self._owed: dict[int, WeightGradients] = {}

    def input_like(self, mb: int) -> Like:
        """The `like` that was given."""
        if self._like is None:
            raise ValueError("the first stage receives nothing")
        return self._like

    def forward(self, mb: int, x: Tensor | None) -> Tensor | None:
        """Runs the module; the last stage keeps its loss in `losses`."""
        if x is not None:
            x = x.detach().requires_grad_()
        y = self.module(self._inputs(mb) if self._inputs is not None else x)
        if self._loss is not None:
            y = self._loss(mb, y)
            self.losses[mb] = y.detach()
        self._graphs[mb] = (x, get_gradient_edge(y) if y.requires_grad else None)
        return y.detach() if self._loss is None else None

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Autograd through the module's graph of `mb`."""
        x, edge = self._graphs.pop(mb)
        if edge is not None:
            torch.autograd.backward((edge,), None if dy is None else (dy,))
        return None if x is None else x.grad

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """The same under `collect`: what Functions defer waits for `backward_weight`."""
        store = self._owed[mb] = WeightGradients()
        with collect(store):
            return self.backward(mb, dy)

    def backward_weight(self, mb: int) -> None:
        """Runs what was deferred."""
        self._owed.pop(mb).run()

    def unshard(self) -> None:
        """Nothing: the parameters are whole."""

    def reshard(self) -> None:
        """Nothing."""

    def reduce(self) -> None:
        """All-reduce of every gradient, SUM."""
        if self.group is not None:
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad, group=self.group)

    def tie(self) -> Tensor | None:
        """The tied parameter's gradient."""
        return None if self.tied is None else self.tied.grad

    def update(self) -> None:
        """Optimizer step; clears the gradients."""
        if self.optimizer is None:
            raise ValueError("UPDATE on a stage without an optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
