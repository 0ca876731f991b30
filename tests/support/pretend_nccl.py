"""Process groups that decide *when* operations run, as NCCL does, on ranks that are threads
(`threads`).

gloo is forgiving: a sent tensor is copied at once, a posted receive is memory, and nobody waits for
the host. On NCCL an operation is a kernel on a stream of its communicator. So here

* operations on one communicator of a rank run in the order in which they were begun, and an
operation runs only when it is the next on all its ranks. A send needs its receive, and a batch is
one operation. There is no order between communicators;
* inputs are read as late as possible, and outputs are NaN until they are waited for. A rank that
meanwhile writes to an input or touches an output gets an error with both places;
* freeing memory of an operation in flight is an error;
* groups are communicators split off from that of all ranks. The host waits in the split until every
rank arrives, a member or not. With `lazily`, they are made at their first use, where the host waits
until their members arrive (a message outside a batch then has a communicator of two ranks);
* the memory of messages is not reused (record_stream) until the host has waited for its device,
because the host may be ahead by any number of operations: `most_held` bytes;
* a host that waits for its device waits for everything that its rank has begun. It does so when a
number is read (``.item()``), at `torch.cuda.synchronize`, and, depending on `drains`, when an
operator runs for the first time (its kernel is loaded), at every operator, or at random ones (an
allocator under pressure). If all ranks wait, that is a deadlock, as it would be on GPUs;
* no wait raises. If a wait can never end, as when a peer has failed, the rank ends (`AbortedError`,
as NCCL's watchdog would do), and no `except` of the code under test sees it.

``run_nccl(4, fn, *args, drains="first")`` is `threads.run_threads` with these rules. It cannot
model the room that kernels need on a GPU's processors (`processors` can), nor the number of its
queues.
"""

from __future__ import annotations

import itertools
import random
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
from threads import Group, Shared, deliver, run_threads
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

Drains = Literal["never", "first", "always"] | float  # a float is the share of operators
_ROOT = str(Path(__file__).resolve().parents[2])
_here = threading.local()  # .device: that of this rank


def run_nccl(
    ranks: int, fn: Callable[..., Any], *args: Any, drains: Drains = "first", seed: int = 0,
    lazily: bool = False,
) -> list[Any]:  # fmt: skip
    """Run ``fn(rank, *args)`` on every rank with groups like NCCL's. Return
    the results in rank order."""

    def run(rank: int) -> Any:
        _here.device = _Device(rank, drains, random.Random(f"{seed} {rank}"))
        with _here.device:
            result = fn(rank, *args)
            _here.device.drain("the end")
            return result

    nccl = SimpleNamespace(Options=_Options)
    options = mock.patch.object(dist, "ProcessGroupNCCL", nccl, create=True)
    with options, mock.patch.object(torch.cuda, "synchronize", _synchronize):
        return run_threads(ranks, run, kind=LazyGroup if lazily else NcclGroup)


def most_held() -> int:
    """Return the most bytes that this rank's messages have held at once so far."""
    return _here.device.most_held


def _synchronize(device: Any = None) -> None:
    _here.device.drain("synchronize")


def loaded_beside_messages() -> set[str]:
    """Return the operators that this rank ran for the first time while messages were in flight."""
    return _here.device.loaded


def _where() -> str:
    """Return the innermost line of our code."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename.startswith(_ROOT) and "/tests/support/" not in frame.filename:
            return f"{Path(frame.filename).relative_to(_ROOT)}:{frame.lineno}"
    return "?"


# ---------------------------------------------------------------- operations under way


class AbortedError(BaseException):
    """The process of this rank ends."""


@dataclass
class _Span:
    """The bytes of a tensor."""

    storage: int
    start: int
    stop: int

    @classmethod
    def of(cls, x: torch.Tensor) -> _Span:
        last = sum((n - 1) * step for n, step in zip(x.shape, x.stride())) if x.numel() else -1
        start = x.storage_offset() * x.element_size()
        stop = start + (last + 1) * x.element_size()
        return cls(x.untyped_storage()._cdata, start, stop)

    def meets(self, other: _Span) -> bool:
        return self.storage == other.storage and self.start < other.stop and other.start < self.stop


@dataclass(eq=False)
class _Operation:
    """An operation that a rank has begun: a collective (of a flight), or a batch of messages."""

    name: str
    rank: int  # in the group
    where: str
    given: list[torch.Tensor]
    out: list[torch.Tensor]
    flight: Any = None
    messages: list[_End] = field(default_factory=list)
    done: bool = False
    reads: list[_Span] = field(init=False)
    writes: list[_Span] = field(init=False)

    def __post_init__(self) -> None:
        self.reads, self.writes = [_Span.of(x) for x in self.given], [_Span.of(x) for x in self.out]

    def check_memory(self) -> None:
        for x, span in zip((*self.given, *self.out), (*self.reads, *self.writes), strict=True):
            assert x.untyped_storage().size() >= span.stop, (
                f"{self.name} begun at {self.where}: its memory was given back under way"
            )


@dataclass(eq=False)
class _End:
    """One end of a message."""

    sends: bool
    peer: int
    x: torch.Tensor
    arrived: torch.Tensor | None = None
    done: bool = False


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    return _Span.of(x).meets(_Span.of(y))


def _but(y: torch.Tensor, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `y` without the part that is gathered into it in place, which is
    unchanged and may be read."""
    for x in given:
        if _meet(x, y) and x.numel() < y.numel():
            flat, first = y.view(-1), x.storage_offset() - y.storage_offset()
            parts = flat[:first], flat[first + x.numel() :]
            return [part for part in parts if part.numel()]
    return [y]


class _Options:
    """The part of torch's `ProcessGroupNCCL.Options` that is used."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config, self._timeout = SimpleNamespace(max_ctas=32), None


class NcclGroup(Group):
    """A communicator, seen from `rank`."""

    backend = "cpu:nccl"
    options = _Options()

    def __init__(self, shared: Shared, rank: int) -> None:
        super().__init__(shared, rank)
        self.queue: deque[_Operation] = deque()  # begun but not run
        self.unsettled: deque[_Operation] = deque()  # begun but not known to be over
        self._splits = itertools.count()

    # ------------------------------------------------------------ calls of ranks

    def split(self, members):
        """Split all ranks, as ncclCommSplit does: ranks that name the same
        members get a communicator."""
        number, all_splits = next(self._splits), self.shared.splits
        if number == len(all_splits):
            all_splits.append({})
        split, mine = all_splits[number], tuple(members)
        split[self.rank] = mine
        self.shared.turns.turn.notify_all()
        self._wait(f"the communicator of {mine}", lambda: len(split) == self.ranks)
        found = [split[r] for r in mine] if self.rank in mine else []
        assert all(f == mine for f in found), f"ranks of one group make different ones: {found}"

    def begin(self, begun, given, out, make, take):
        flight = self._join(begun)
        with _disable_current_modes():
            filled = [part for y in out for part in _but(y, given)]
            # A tensor that is both read and written is read at once.
            own = [x.clone() if any(_meet(x, y) for y in filled) else x for x in given]
            operation = _Operation(begun[0], self.rank, _where(), own, filled, flight)
            flight.given[self.rank] = operation
            flight.make = make
        return self._start(operation, lambda: take(flight.result))

    def batch(self, ends):
        ends = [_End(sent, peer, x) for sent, x, peer in ends]
        given, out = [m.x for m in ends if m.sends], [m.x for m in ends if not m.sends]
        _here.device.hold(m.x for m in ends)
        name = " and ".join(f"{'send to' if m.sends else 'receive of'} {m.peer}" for m in ends)
        with _disable_current_modes():
            operation = _Operation(name, self.rank, _where(), given, out, messages=ends)

        def take() -> None:
            for message in ends:
                if not message.sends:
                    deliver(message.arrived, message.x)

        finish = self._start(operation, take)
        return [finish, *(lambda: None for _ in ends[1:])]

    def send(self, x, peer):
        (finish,) = self.batch([(True, x, peer)])
        return finish

    def receive(self, x, peer):
        (finish,) = self.batch([(False, x, peer)])
        return finish

    def _start(self, operation: _Operation, take: Callable[[], object]) -> Callable[[], object]:
        device = _here.device
        with _disable_current_modes():
            for x in operation.given:
                device.check(operation.name, x, written=False, but=self)
            for x in operation.out:
                device.check(operation.name, x, written=True, but=self)
                x.detach().fill_(torch.nan if x.is_floating_point() else 0x7F)
        device.groups[self] = None
        self.queue.append(operation)
        self.unsettled.append(operation)

        def finish() -> None:
            self._wait(f"{operation.name} of {self.shared.members}", lambda: self.runs(operation))
            with _disable_current_modes():
                operation.check_memory()
                take()
            while operation in self.unsettled:  # and every operation before it
                self.unsettled.popleft()

        return finish

    def _wait(self, what, ready):
        try:
            super()._wait(what, ready)
        except RuntimeError as error:
            raise AbortedError(str(error)) from None

    # ------------------------------------------------------------ the device

    def runs(self, operation: _Operation) -> bool:
        """Run the operations that can run, until `operation` has run."""
        with _disable_current_modes():
            while not operation.done and self._advance():
                pass
        return operation.done

    def _advance(self) -> bool:
        """Run the next operation of this communicator's ranks; return False if none can run."""
        heads = {r: g.queue[0] for r, g in self.shared.groups.items() if g.queue}
        moved = False
        for rank, head in heads.items():
            if head.done:
                continue
            if head.flight is not None:
                everybody = [heads.get(r) for r in range(self.ranks)]
                if all(h is not None and h.flight is head.flight for h in everybody):
                    self._run(head.flight, everybody)
                    moved = True
                continue
            for message in head.messages:
                there = heads.get(message.peer)
                if message.done or not message.sends or there is None:
                    continue
                fits = (m for m in there.messages if m.peer == rank and not m.sends and not m.done)
                if (end := next(fits, None)) is not None:
                    head.check_memory()
                    end.arrived, end.done, message.done = message.x.detach().clone(), True, True
                    moved = True
        for head in heads.values():
            head.done |= bool(head.messages) and all(m.done for m in head.messages)
            if head.done:
                self.shared.groups[head.rank].queue.popleft()
                moved = True
        if moved:
            self.shared.turns.turn.notify_all()
        return moved

    def _run(self, flight: Any, every: list[_Operation]) -> None:
        for operation in every:
            operation.check_memory()
            operation.done = True
        flight.result = flight.make([[x.detach().clone() for x in o.given] for o in every])


class LazyGroup(NcclGroup):
    """A group whose communicator is made at its first use."""

    used = False

    def split(self, members):
        pass

    def send(self, x, peer):
        return self._pair(peer).batch([(True, x, int(peer > self.rank))])[0]

    def receive(self, x, peer):
        return self._pair(peer).batch([(False, x, int(peer > self.rank))])[0]

    def _pair(self, peer: int) -> LazyGroup:
        ends = min(self.rank, peer), max(self.rank, peer)
        members = tuple(self.shared.members[end] for end in ends)
        pair = self.shared.pairs.setdefault(ends, Shared(members, self.shared.turns))
        at = int(self.rank > peer)
        return pair.groups.setdefault(at, LazyGroup(pair, at))

    def _start(self, operation, take):
        if not self.used:
            self.used = True
            super().split(range(self.ranks))
        return super()._start(operation, take)


# ---------------------------------------------------------------- a rank's device


class _Device(TorchDispatchMode):
    """A mode that sees every operator of a rank: the tensors it touches,
    and whether the host waits."""

    def __init__(self, rank: int, drains: Drains, chance: random.Random) -> None:
        super().__init__()
        self.rank, self.drains, self.chance = rank, drains, chance
        self.groups: dict[NcclGroup, None] = {}  # on which it has begun an operation, in order
        self.seen: Counter[str] = Counter()
        self.loaded: set[str] = set()  # operators whose first run was during a message
        self.held: dict[int, torch.UntypedStorage] = {}  # of messages
        self.most_held = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(func)
        if not func.is_view and not name.startswith(
            ("aten.detach", "aten.empty", "aten.new_empty")
        ):
            self._check_access(func, args, kwargs)
            if self._waits(name):
                self.drain(name)
        return func(*args, **kwargs)

    def _waits(self, name: str) -> bool:
        self.seen[name] += 1
        if self.seen[name] == 1 and any(o.messages for g in self.groups for o in g.queue):
            self.loaded.add(name)
        if "_local_scalar_dense" in name or self.drains == "always":
            return True
        if isinstance(self.drains, float):
            return self.chance.random() < self.drains
        return self.drains == "first" and self.seen[name] == 1

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note that messages read and write these tensors."""
        self.held |= {(s := x.untyped_storage())._cdata: s for x in tensors}
        self.most_held = max(self.most_held, sum(s.nbytes() for s in self.held.values()))

    def drain(self, what: str) -> None:
        """Wait for everything that this rank has begun."""
        for group in list(self.groups):
            while group.queue:
                last = group.queue[-1]
                text = f"the device at {what} with {last.name} of {group.shared.members} under way"
                group._wait(text, lambda last=last, group=group: group.runs(last))
        self.held.clear()

    def _check_access(self, func, args, kwargs) -> None:
        if not any(group.unsettled for group in self.groups):
            return
        given = list(zip(func._schema.arguments, args))
        given += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in given:
            written = argument.alias_info is not None and argument.alias_info.is_write
            for x in tree_leaves(value):
                if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                    self.check(str(func), x, written=written)

    def check(self, what: str, x: torch.Tensor, *, written: bool, but: object = None) -> None:
        """Raise if an operation in flight reads or fills memory that `what` is about to write or
        read.

        Operations on the communicator `but` are ignored: they run before it.
        """
        span, verb = _Span.of(x), "writes to" if written else "reads"
        others = (group for group in self.groups if group is not but)
        for operation in (o for group in others for o in group.unsettled):
            spans = (*operation.writes, *(operation.reads if written else ()))
            assert not any(span.meets(s) for s in spans), (
                f"rank {self.rank}: {what} at {_where()} {verb} what {operation.name}, begun at "
                f"{operation.where}, has under way"
            )
