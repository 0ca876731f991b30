"""Ranks that are threads of this process: eight of them cost less than two processes.

``run_threads(4, fn, *args)`` replaces `ranks.run_ranks`: it calls ``fn(rank, *args)`` on four
threads, each with a default process group, its own random numbers, and meshes that connect.
``on_threads(4, fn, *args)`` calls ``fn(group, *args)`` with the group of all ranks, and `on_mesh`
gives each rank of a mesh its `ConnectedMesh`. All return the results in rank order. Only the parts
of torch.distributed that code over groups uses are available, on the CPU.

The ranks take turns: one runs until it waits for another. So each rank has its own state of torch's
random numbers, as in processes, and a patch that a rank undoes before it waits is invisible to the
others. A patch that is held over a collective applies to all ranks; make it outside.

Errors that a network would accept silently raise here: ranks of one group that begin different
collectives, or the same one with different shapes or dtypes; results that are read before they are
waited for, because nothing arrives earlier; and ranks that all wait for each other. Sums are made
in rank order and in the dtype of the terms, as a network makes them.

Kernels that wait for other ranks would hang here; use `run_ranks` for them.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from observed import observe
from torch.distributed import device_mesh

from warpweave.parallel import collectives
from warpweave.parallel.data import ordered, parameters, reduce, unit, zero
from warpweave.parallel.mesh import Mesh


class _StoppedError(BaseException):
    """Another rank failed."""


class Turns:
    """A lock that lets one rank run at a time, until it waits."""

    def __init__(self, ranks: int) -> None:
        self.turn, self.left = threading.Condition(), set(range(ranks))
        self.waits: dict[int, tuple[str, Callable[[], bool]]] = {}
        self.over = False

    def wait(self, rank: int, what: str, ready: Callable[[], bool]) -> None:
        """Let the others run until `ready`."""
        if ready():
            return
        numbers = torch.get_rng_state()
        self.waits[rank] = what, ready
        try:
            self.check()
            self.turn.wait_for(lambda: ready() or self.over)
        finally:
            del self.waits[rank]
            torch.set_rng_state(numbers)
        if not ready():
            raise _StoppedError

    def check(self) -> None:
        """Raise if no rank can continue."""
        if self.over or not self.waits or self.waits.keys() != self.left:
            return
        if not any(ready() for _, ready in self.waits.values()):
            waits = ", ".join(f"rank {r} for {what}" for r, (what, _) in sorted(self.waits.items()))
            raise RuntimeError(f"all ranks that are left wait: {waits}")

    def end(self, rank: int, failed: bool) -> None:
        self.left.discard(rank)
        self.over |= failed
        self.turn.notify_all()


@dataclass
class _Collective:
    """A collective of a group in flight: the inputs of the ranks, then its result."""

    begun: tuple[Any, ...]
    given: dict[int, Any] = field(default_factory=dict)
    taken: int = 0
    result: Any = None


@dataclass
class Shared:
    """State that the ranks of one group share."""

    members: tuple[int, ...]  # ranks of the world
    turns: Turns
    flights: dict[int, _Collective] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    sent: dict[tuple[int, int, int], torch.Tensor] = field(default_factory=dict)  # src, dst, number
    sums: list[torch.dtype] = field(default_factory=list)  # of all sums, in rank 0's order
    splits: list[dict[int, tuple[int, ...]]] = field(default_factory=list)  # of NCCL's groups
    pairs: dict[tuple[int, int], Shared] = field(default_factory=dict)


class Group:
    """A process group, seen from `rank`, in which messages are as fast as in gloo: inputs are read
    at once, and a received tensor is in place when it is waited for."""

    backend = "threads"
    options: Any = None  # the torch options with which it was made

    def __init__(self, shared: Shared, rank: int) -> None:
        self.shared, self.rank, self.ranks = shared, rank, len(shared.members)
        self._begun = 0
        self._sends: dict[int, Iterator[int]] = defaultdict(itertools.count)  # numbers, by peer
        self._receives: dict[int, Iterator[int]] = defaultdict(itertools.count)

    def split(self, members: Sequence[int]) -> None:
        """Note that this rank will make a group of `members`, perhaps without it. Nobody waits."""

    @property
    def sums(self) -> list[torch.dtype]:
        """Return the dtypes of all sums so far."""
        return self.shared.sums

    def begin(
        self, begun: tuple[Any, ...], given: list[torch.Tensor], out: list[torch.Tensor],
        make: Callable[[list[Any]], Any], take: Callable[[Any], object],
    ) -> Callable[[], object]:  # fmt: skip
        """Take part in a collective of all ranks with these inputs and outputs.

        Returns a function that waits for ``take(make(every rank's inputs))``. The result of `make`
        is one object for all ranks.
        """
        flight = self._join(begun)
        flight.given[self.rank] = [x.detach().clone() for x in given]
        if len(flight.given) == self.ranks:
            flight.result = make([flight.given[rank] for rank in range(self.ranks)])
            self.shared.turns.turn.notify_all()

        def finish() -> None:
            self._wait(f"{begun[0]} of {self.shared.members}", lambda: self._full(flight))
            take(flight.result)

        return finish

    def _join(self, begun: tuple[Any, ...]) -> _Collective:
        """Return this rank's next collective."""
        flight = self.shared.flights.setdefault(self._begun, _Collective(begun))
        self._begun += 1
        assert flight.begun == begun, (
            f"the ranks of a group begin different collectives: {flight.begun}, on rank "
            f"{self.rank} {begun}"
        )
        flight.taken += 1
        if flight.taken == self.ranks:
            del self.shared.flights[self._begun - 1]
        return flight

    def _full(self, flight: _Collective) -> bool:
        return len(flight.given) == self.ranks

    def send(self, x: torch.Tensor, peer: int) -> Callable[[], object]:
        """Send a copy."""
        self.shared.sent[self.rank, peer, next(self._sends[peer])] = x.detach().clone()
        self.shared.turns.turn.notify_all()
        return lambda: None

    def receive(self, x: torch.Tensor, peer: int) -> Callable[[], object]:
        """Return a function that waits for the next message of `peer`."""
        end, sent = (peer, self.rank, next(self._receives[peer])), self.shared.sent

        def finish() -> None:
            self._wait(f"a message of {self.shared.members[peer]}", lambda: end in sent)
            deliver(sent.pop(end), x)

        return finish

    def batch(self, ends: Sequence[tuple[bool, torch.Tensor, int]]) -> list[Callable[[], object]]:
        """Send and receive several messages at once: (True to send, the tensor, the peer) each."""
        return [self.send(x, peer) if sent else self.receive(x, peer) for sent, x, peer in ends]

    def _wait(self, what: str, ready: Callable[[], bool]) -> None:
        self.shared.turns.wait(self.shared.members[self.rank], what, ready)


def deliver(message: torch.Tensor, x: torch.Tensor) -> None:
    """Put a message where it is received."""
    assert (message.shape, message.dtype) == (x.shape, x.dtype), "sent and received differ"
    x.detach().copy_(message)


class _World:
    """All ranks, and the groups that they make."""

    def __init__(self, ranks: int, kind: type[Group]) -> None:
        self.turns, self.kind = Turns(ranks), kind
        self.shared: dict[tuple[Any, ...], Shared] = {}

    def group(self, name: tuple[Any, ...], members: Sequence[int], rank: int) -> Group:
        members = tuple(members)
        shared = self.shared.setdefault((*name, members), Shared(members, self.turns))
        at = members.index(rank)
        return shared.groups.setdefault(at, self.kind(shared, at))


class _Here(threading.local):
    """The position of this thread."""

    rank: int | None = None
    world: _World
    group: Group  # of all ranks
    made: Any  # numbers for the groups that it makes, in an order that is the same on all ranks


_here = _Here()


class _Axes:
    """The part of torch's DeviceMesh that makes groups."""

    def __init__(self, number: int, sizes: dict[str, int], along: tuple[str, ...]) -> None:
        self._number, self._sizes, self._along = number, sizes, along
        self.device_type = "cpu"

    def __getitem__(self, along: str | tuple[str, ...]) -> _Axes:
        return _Axes(self._number, self._sizes, (along,) if isinstance(along, str) else along)

    def get_group(self, axis: str | None = None) -> Group:
        along = self._along if axis is None else (axis,)
        at = _coordinates(_here.rank, self._sizes)
        every = ((r, _coordinates(r, self._sizes)) for r in range(math.prod(self._sizes.values())))
        members = [r for r, there in every if all(there[a] == at[a] for a in at if a not in along)]
        return _here.world.group((self._number, along), members, _here.rank)


def _coordinates(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    at = {}
    for axis, size in reversed(sizes.items()):
        rank, at[axis] = divmod(rank, size)
    return at


def _init_device_mesh(device_type, shape, *, mesh_dim_names, backend_override):
    sizes = dict(zip(mesh_dim_names, shape, strict=True))
    axes = _Axes(next(_here.made), sizes, mesh_dim_names)
    for axis in sizes:
        group = axes.get_group(axis)
        _here.group.split(group.shared.members)
        group.options = backend_override.get(axis)
    return axes


def _subgroups(ranks_per_subgroup, timeout=None, pg_options=None):
    every = [_new_group(m, timeout, pg_options=pg_options) for m in ranks_per_subgroup]
    return next((group for group in every if group is not None), None), every


class _Groups(type):
    @property
    def WORLD(cls) -> Group | None:
        return None if _here.rank is None else _here.group


class _Group(metaclass=_Groups):
    """torch's `distributed.group`."""


class _Message(NamedTuple):
    """torch's P2POp, which looks up its group."""

    op: Callable[..., _Work]
    tensor: torch.Tensor
    group: Group
    group_peer: int


class _Work:
    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True


def _collective(op, x, out, make, take, group, async_op) -> _Work | bool:
    """Run the collective `op` on input `x` and output `out`: ``take(make(every x))`` when it is
    waited for."""
    assert x.is_contiguous(), "gloo and NCCL take contiguous tensors"

    def make_of(every: list[list[torch.Tensor]]) -> Any:
        return make([x for (x,) in every])

    begun = op, tuple(x.shape), x.dtype
    observe(_of(group), op, x)
    work = _Work(_of(group).begin(begun, [x], out, make_of, take))
    return work if async_op else work.wait()


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total


def _all_reduce(x, op=dist.ReduceOp.SUM, group=None, async_op=False):
    group = _of(group)
    if op == dist.ReduceOp.SUM:
        _note_sum(x, group)
        name, make = "all_reduce", _sum
    else:
        pick = {dist.ReduceOp.MIN: torch.amin, dist.ReduceOp.MAX: torch.amax}[op]
        name, make = f"all_reduce {op}", lambda terms: pick(torch.stack(terms), 0)
    return _collective(name, x, [x], make, x.detach().copy_, group, async_op)


def _note_sum(x: torch.Tensor, group: Group) -> None:
    if group.rank == 0:
        group.sums.append(x.dtype)


def _all_gather_into(out, x, group=None, async_op=False):
    def take(whole: torch.Tensor) -> None:
        out.detach().copy_(whole.view(out.shape))

    return _collective("all_gather", x, [out], torch.cat, take, group, async_op)


def _all_gather(out, x, group=None, async_op=False):
    def take(parts: list[torch.Tensor]) -> None:
        for mine, theirs in zip(out, parts, strict=True):
            mine.copy_(theirs)

    return _collective("all_gather", x, out, list, take, group, async_op)


def _reduce_scatter_into(out, x, group=None, async_op=False):
    group = _of(group)
    _note_sum(x, group)
    assert x.numel() == group.ranks * out.numel(), (x.shape, out.shape)

    def take(total: torch.Tensor) -> None:
        mine = total.view(-1).narrow(0, group.rank * out.numel(), out.numel())
        out.detach().copy_(mine.view(out.shape))

    return _collective("reduce_scatter", x, [out], _sum, take, group, async_op)


def _broadcast(x, src=None, group=None, async_op=False, group_src=None):
    source, take = _peer(_of(group), src, group_src), x.detach().copy_
    what = f"broadcast of {source}"
    return _collective(what, x, [x], lambda given: given[source], take, group, async_op)


def _barrier(group=None, async_op=False):
    return _collective("barrier", torch.empty(0), [], list, list, group, async_op)


def _all_to_all(recv, send, recv_sizes, send_sizes, group=None, async_op=False):
    group = _of(group)

    def take(every: list[list[torch.Tensor]]) -> None:
        parts = [theirs[group.rank] for theirs in every]
        assert [len(part) for part in parts] == recv_sizes, "sent and received differ"
        recv.detach().copy_(torch.cat(parts))

    observe(group, "all_to_all", send, sizes=(send_sizes, recv_sizes))
    begun, given = ("all_to_all", send.dtype), [*send.split(send_sizes)]
    work = _Work(group.begin(begun, given, [recv], list, take))
    return work if async_op else work.wait()


def _peer(group: Group, rank: int | None, in_group: int | None) -> int:
    return group.shared.members.index(rank) if in_group is None else in_group


def _isend(x, dst=None, group=None, tag=0, group_dst=None):
    group = _of(group)
    assert x.is_contiguous(), "gloo and NCCL take contiguous tensors"
    return _Work(group.send(x, observe(group, "send", x, _peer(group, dst, group_dst))))


def _irecv(x, src=None, group=None, tag=0, group_src=None):
    group = _of(group)
    return _Work(group.receive(x, observe(group, "recv", x, _peer(group, src, group_src))))


def _batch(messages: Sequence[_Message]) -> list[_Work]:
    ends = [(op is _isend, x, peer) for op, x, _, peer in messages]
    for sent, x, peer in ends:
        observe(messages[0].group, "send" if sent else "recv", x, peer)
    return [_Work(finish) for finish in messages[0].group.batch(ends)]


def _new_group(ranks, timeout=None, backend=None, pg_options=None, use_local_synchronization=False):
    if use_local_synchronization and _here.rank not in ranks:
        return None
    assert pg_options is None or pg_options._timeout == timeout, "torch warns of two time-outs"
    number = next(_here.made)
    _here.group.split(ranks)
    if _here.rank not in ranks:
        return None
    group = _here.world.group((number,), ranks, _here.rank)
    group.options = pg_options
    return group


def _of(group: Group | None) -> Group:
    return _here.group if group is None else group


_PRETENDED = {
    "is_initialized": lambda: _here.rank is not None,
    "group": _Group,
    "get_rank": lambda group=None: _of(group).rank,
    "get_world_size": lambda group=None: _of(group).ranks,
    "get_process_group_ranks": lambda group=None: [*_of(group).shared.members],
    "get_backend": lambda group=None: "threads",
    "get_backend_config": lambda group=None: _here.world.kind.backend,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "barrier": _barrier,
    "all_to_all_single": _all_to_all,
    "new_subgroups_by_enumeration": _subgroups,
    "new_group": _new_group,
    "P2POp": _Message,
    "isend": _isend,
    "irecv": _irecv,
    "send": lambda *args, **options: _isend(*args, **options).wait(),
    "recv": lambda *args, **options: _irecv(*args, **options).wait(),
    "batch_isend_irecv": _batch,
}
_BY_NAME = {"all_gather_into": _all_gather_into, "reduce_scatter_into": _reduce_scatter_into}


def on_threads(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn(group, *args)`` on every rank."""
    return run_threads(ranks, lambda rank: fn(_here.group, *args))


def on_mesh(mesh: Mesh, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``fn(connected, *args)`` on every rank of `mesh`, connected."""
    return run_threads(mesh.world, lambda rank: fn(mesh.connect(), *args))


def run_threads(
    ranks: int, fn: Callable[..., Any], *args: Any, kind: type[Group] = Group
) -> list[Any]:
    """Call ``fn(rank, *args)`` on every rank, with groups of class `kind`. Raise the error of the
    first rank that fails by itself."""
    world, results, errors = _World(ranks, kind), [None] * ranks, {}

    def run(rank: int) -> None:
        _here.world, _here.rank, _here.made = world, rank, itertools.count()
        _here.group = world.group(("world",), range(ranks), rank)
        with world.turns.turn:
            torch.manual_seed(0)
            try:
                results[rank] = fn(rank, *args)
            except BaseException as error:
                errors[rank] = error
            world.turns.end(rank, rank in errors)
            try:
                world.turns.check()
            except RuntimeError as error:
                errors[rank] = error
                world.turns.end(rank, True)

    numbers = torch.get_rng_state()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(dist, **_PRETENDED))
        patches.enter_context(mock.patch.object(dist, "set_timeout", create=True))  # torch >= 2.14
        patches.enter_context(mock.patch.object(device_mesh, "init_device_mesh", _init_device_mesh))
        for module in (collectives, ordered, parameters, reduce, unit, zero):
            for name in _BY_NAME.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, _BY_NAME[name]))
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    torch.set_rng_state(numbers)
    alone = [e for e in errors.values() if not isinstance(e, _StoppedError)]
    for error in alone or errors.values():
        raise error
    return results
