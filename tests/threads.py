"""Ranks that are threads of this process: eight of them cost less than two processes.

``on_threads(8, fn, *args)`` calls ``fn(group, *args)`` on eight threads, each of which has a
`Group` of its own in the place of a process group, and returns the results in rank order; `on_mesh`
gives each rank of a mesh its `ConnectedMesh`. Only what code over groups asks of torch.distributed
is there, on the CPU.

What the network would take without a word is an error here: ranks of one group that begin another
collective than each other, or the same of another shape or dtype. Sums are made in rank order and
in the dtype of the terms, as a network makes them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from queue import Empty, Queue
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from warpweave.parallel import collectives
from warpweave.parallel.data import parameters, reduce, zero
from warpweave.parallel.mesh import AXES, PRODUCTS, ConnectedMesh, Mesh

SECONDS = 60.0  # until a rank that waits for another gives up


@dataclass
class _Shared:
    """What the ranks of one group have in common."""

    ranks: int
    slots: list[Any] = field(init=False)
    met: threading.Barrier = field(init=False)
    boxes: dict[tuple[int, int], Queue] = field(default_factory=lambda: defaultdict(Queue))
    sums: list[torch.dtype] = field(default_factory=list)  # of every sum, as rank 0 began it

    def __post_init__(self) -> None:
        self.slots, self.met = [None] * self.ranks, threading.Barrier(self.ranks, timeout=SECONDS)


class Group:
    """A process group, seen from `rank`."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self.shared, self.rank, self.ranks = shared, rank, shared.ranks

    @property
    def sums(self) -> list[torch.dtype]:
        """The dtypes of all sums so far."""
        return self.shared.sums

    def all(self, op: str, x: torch.Tensor) -> list[torch.Tensor]:
        """x of every rank, which all take part in the same."""
        self.shared.slots[self.rank] = op, x.shape, x.dtype, x.detach().clone()
        self.shared.met.wait()
        every = list(self.shared.slots)
        self.shared.met.wait()
        begun = {entry[:3] for entry in every}
        assert len(begun) == 1, f"the ranks of a group begin different collectives: {begun}"
        return [entry[3] for entry in every]

    def sum(self, op: str, x: torch.Tensor) -> torch.Tensor:
        first, *others = self.all(op, x)
        if self.rank == 0:
            self.sums.append(x.dtype)
        total = first.clone()
        for other in others:
            total += other
        return total


class _Message(NamedTuple):
    """torch's P2POp, which looks its group up."""

    op: str
    tensor: torch.Tensor
    group: Group
    group_peer: int


class _Work:
    def __init__(self, finish: Callable[[], object] = lambda: None) -> None:
        self._finish = finish

    def wait(self) -> bool:
        self._finish()
        return True


def _all_reduce(x, op=dist.ReduceOp.SUM, group=None, async_op=False):
    if op == dist.ReduceOp.SUM:
        total = group.sum("all_reduce", x)
    else:
        pick = {dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.MAX: torch.maximum}[op]
        total, *others = group.all(f"all_reduce {op}", x)
        for other in others:
            total = pick(total, other)
    x.detach().copy_(total)
    return _Work() if async_op else None


def _all_gather_into(out, x, group=None, async_op=False):
    out.detach().copy_(torch.cat(group.all("all_gather", x)).view(out.shape))
    return _Work() if async_op else None


def _all_gather(out, x, group=None, async_op=False):
    for mine, theirs in zip(out, group.all("all_gather", x), strict=True):
        mine.copy_(theirs)
    return _Work() if async_op else None


def _reduce_scatter_into(out, x, group=None, async_op=False):
    out.detach().copy_(group.sum("reduce_scatter", x).chunk(group.ranks)[group.rank])
    return _Work() if async_op else None


def _all_to_all(recv, send, recv_sizes, send_sizes, group=None, async_op=False):
    """Parts of a message differ in size, so each travels by itself."""
    for peer, part in enumerate(send.split(send_sizes)):
        group.shared.boxes[group.rank, peer].put(part.clone())

    def finish() -> None:
        for peer, part in enumerate(recv.split(recv_sizes)):
            _arrive(part, group, peer)

    return _Work(finish)


def _batch(messages: Sequence[_Message]) -> list[_Work]:
    works = []
    for op, x, group, peer in messages:
        if op == "isend":
            group.shared.boxes[group.rank, peer].put(x.detach().clone())
            works.append(_Work())
        else:
            works.append(_Work(lambda x=x, group=group, peer=peer: _arrive(x, group, peer)))
    return works


def _arrive(x: torch.Tensor, group: Group, peer: int) -> None:
    try:
        sent = group.shared.boxes[peer, group.rank].get(timeout=SECONDS)
    except Empty:
        raise RuntimeError(f"nothing arrived from rank {peer}") from None
    assert (sent.shape, sent.dtype) == (x.shape, x.dtype), "sent and received differ"
    x.detach().copy_(sent)


_PRETENDED = {
    "get_rank": lambda group: group.rank,
    "get_world_size": lambda group: group.ranks,
    "get_backend_config": lambda group: "threads",
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all_single": _all_to_all,
    "P2POp": _Message,
    "isend": "isend",
    "irecv": "irecv",
    "batch_isend_irecv": _batch,
}
_BY_NAME = {"all_gather_into": _all_gather_into, "reduce_scatter_into": _reduce_scatter_into}


def on_threads(ranks: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(group, *args)`` on every rank; the error of the first rank that fails by itself."""
    shared = _Shared(ranks)
    return _run([Group(shared, rank) for rank in range(ranks)], [shared], fn, args)


def on_mesh(mesh: Mesh, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """``fn(connected, *args)`` on every rank of `mesh`."""
    shared: dict[tuple[Any, ...], _Shared] = {}

    def connected(rank: int) -> ConnectedMesh:
        at = mesh.coordinates(rank)
        mine = ConnectedMesh(mesh, rank, {}, None)
        for axis in (*AXES, *PRODUCTS):
            others = (*(at[other] for other in AXES if other not in mine.factors(axis)),)
            here = shared.setdefault((axis, *others), _Shared(mesh.size(axis)))
            mine.groups[axis] = Group(here, mine.index(axis)) if here.ranks > 1 else None
        ring, place = divmod(at.pop("cp"), mesh.ulysses)
        for axis, size, index, lane in (
            ("ring", mesh.cp // mesh.ulysses, ring, place),
            ("ulysses", mesh.ulysses, place, ring),
        ):
            here = shared.setdefault((axis, lane, *at.values()), _Shared(size))
            mine.groups[axis] = Group(here, index) if size > 1 else None
        return mine

    ranks = [connected(rank) for rank in range(mesh.world)]
    return _run(ranks, [*shared.values()], fn, args)


def _run(ranks: list[Any], shared: list[_Shared], fn: Callable[..., Any], args: tuple) -> list[Any]:
    results, errors = [None] * len(ranks), {}

    def run(at: int) -> None:
        try:
            results[at] = fn(ranks[at], *args)
        except BaseException as error:
            errors[at] = error
            for group in shared:
                group.met.abort()

    with ExitStack() as patches:
        patches.enter_context(mock.patch.multiple(dist, **_PRETENDED))
        for module in (collectives, parameters, reduce, zero):
            for name in _BY_NAME.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, _BY_NAME[name]))
        threads = [threading.Thread(target=run, args=(at,)) for at in range(len(ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    alone = [e for e in errors.values() if not isinstance(e, threading.BrokenBarrierError)]
    for error in alone or errors.values():
        raise error
    return results
