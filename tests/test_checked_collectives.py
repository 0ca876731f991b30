"""Collectives that differ between ranks are rejected on all of them, before they are issued."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretend_nccl import run_nccl
from ranks import run_ranks
from thread_store import Store
from threads import run_threads

from warpweave.parallel.checked import CheckedCollectives, CollectiveMismatch
from warpweave.parallel.collectives import all_gather_into, start_all_to_all, start_exchange
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.messages import Hop, run_on_group

MESH = Mesh(dp=2, tp=2)
NAMES = [MESH.describe(rank) for rank in range(4)]
X = torch.ones(3)


def _alike(rank: int, mesh: Any) -> None:
    """Call collectives of every kind that training uses."""
    for group in (mesh.group("tp"), mesh.group("dp"), mesh.group("world")):
        size = dist.get_world_size(group)
        dist.all_reduce(torch.ones(2, 3), group=group)
        out = [torch.empty(3) for _ in range(size)]
        dist.all_gather(out, X * rank, group=group)
        dist.broadcast(torch.ones(2), group=group, group_src=1)
        works = [dist.all_reduce(torch.ones(n), group=group, async_op=True) for n in (3, 5)]
        [work.wait() for work in works]
        me, right, left = (dist.get_rank(group) + n for n in (0, 1, size - 1))
        start_exchange(X * me, torch.empty(3), right % size, left % size, group).wait()
        sent = [1 + (me + to) % 2 for to in range(size)]
        got = [1 + (at + me) % 2 for at in range(size)]
        buffer = torch.empty(sum(got))
        start_all_to_all(torch.ones(sum(sent)), buffer, sent, got, group).wait()
        dist.barrier(group)


def _shape(rank: int, mesh: Any) -> None:
    dist.all_reduce(torch.ones(3 + (rank == 2)), group=mesh.group("world"))


def _dtype(rank: int, mesh: Any) -> None:
    x = torch.ones(3, dtype=torch.bfloat16 if rank == 1 else torch.float32)
    dist.all_reduce(x, group=mesh.group("tp"))


def _operation(rank: int, mesh: Any) -> None:
    if rank == 3:
        dist.broadcast(torch.ones(3), group=mesh.group("dp"), group_src=0)
    dist.all_reduce(torch.ones(3), group=mesh.group("dp"))


def _root(rank: int, mesh: Any) -> None:
    dist.broadcast(torch.ones(3), group=mesh.group("tp"), group_src=int(rank == 1))


def _skipped(rank: int, mesh: Any) -> None:
    """Skip one collective on rank 1 and continue with the next, of all ranks, while 0 waits."""
    for group in ("tp", "world"):
        if (rank, group) != (1, "tp"):
            dist.all_reduce(torch.ones(3), group=mesh.group(group))


def _parts(rank: int, mesh: Any) -> None:
    sent = [2, 2 + (rank == 0)]
    start_all_to_all(torch.ones(sum(sent)), torch.empty(4), sent, [2, 2], mesh.group("tp")).wait()


FAULTS: dict[str, tuple[Callable[[int, Any], None], dict[int, str]]] = {
    "shape": (_shape, dict.fromkeys(range(4),
        f"ranks 0, 1, 3 call all_reduce of float32[3], {NAMES[2]} calls all_reduce of float32[4]")),
    "dtype": (_dtype, dict.fromkeys((0, 1), f"{NAMES[0]} calls all_reduce of float32[3], "
        f"{NAMES[1]} calls all_reduce of bfloat16[3]")),
    "operation": (_operation, dict.fromkeys((1, 3), f"{NAMES[1]} calls all_reduce of float32[3], "
        f"{NAMES[3]} calls broadcast of 0 of float32[3]")),
    "root": (_root, dict.fromkeys((0, 1), f"{NAMES[0]} calls broadcast of 0 of float32[3], "
        f"{NAMES[1]} calls broadcast of 1 of float32[3]")),
    "skipped": (_skipped, {}),
    "parts": (_parts, dict.fromkeys((0, 1),
        f"all_to_all: {NAMES[0]} sends 3 elements to {NAMES[1]}, which expects 2")),
}  # fmt: skip


def _said(rank: int, store: Any, fn: Callable[[int, Any], None], timeout: float = 60.0) -> str:
    """Return the error of `fn` on this rank with checked collectives."""
    mesh = MESH.connect(timeout=timedelta(seconds=60))
    checked = CheckedCollectives(store, MESH, rank, timeout, torch.device("cpu"))
    try:
        with checked:
            fn(rank, mesh)
    except CollectiveMismatch as error:
        return str(error)
    return ""


@pytest.mark.parametrize("run", [run_threads, run_nccl])
def test_what_ranks_call_alike_is_let_through(run):
    store = Store()
    assert run(4, _said, store, _alike) == [""] * 4
    left = [key for key in store.values if not key.startswith("at/")]
    assert len(left) == 3 * 4  # the last entry of each member of each group, and no messages


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_call_different_collectives_are_all_told_which(fault):
    """The error comes before anything is issued: these threads, like gloo,
    end at the first mismatch."""
    fn, words = FAULTS[fault]
    found = run_threads(4, _said, Store(), fn)
    if words:
        assert {rank: said for rank, said in enumerate(found) if said} == words
        return
    # Two ranks wait where the others never arrive. The first to look reports it, and all report
    # that.
    assert len({*found}) == 1
    pair, world = "all_reduce of float32[3] among ranks 0, 1", "among ranks 0, 1, 2, 3"
    assert found[0] in (
        f"{NAMES[0]} calls {pair}, {NAMES[1]} all_reduce of float32[3] {world}",
        f"{NAMES[1]} calls all_reduce of float32[3] {world}, {NAMES[0]} {pair}",
    )


def test_slow_rank_last_seen_at_an_earlier_collective_is_waited_for(monkeypatch):
    monkeypatch.setattr("warpweave.parallel.checked._LOOK", 1e-3)
    store, seen = Store(), []

    def slow(rank: int, mesh: Any) -> None:
        """Delay rank 0 at the first collective until rank 1 has looked for it, and vice versa at
        the second."""
        for late, group in enumerate(("tp", "world")):
            if rank == late:
                store.wait([f"at/{1 - late}"], timedelta(seconds=60))
                seen.append(store.get(f"at/{1 - late}").decode())
            dist.all_reduce(X.clone(), group=mesh.group(group))

    assert run_threads(4, _said, store, slow) == [""] * 4
    assert ["[0, 1]" in seen[0], "[0, 1, 2, 3]" in seen[1]] == [True, True]


def _message(rank: int, store: Any) -> None:
    mesh, me = Mesh(tp=2), rank
    group = mesh.connect().group("tp")
    with CheckedCollectives(store, mesh, rank, 60.0, torch.device("cpu")):
        start_exchange(torch.ones(3 + me), torch.empty(3), 1 - me, 1 - me, group).wait()


def test_mismatched_send_and_receive_raise_before_the_second_is_issued():
    words = r"rank 1 \(tp=1\) sends float32\[4\], rank 0 \(tp=0\) receives float32\[3\]"
    with pytest.raises(CollectiveMismatch, match=words):
        run_threads(2, _message, Store())


class _Product(torch.autograd.Function):
    """A product whose gradient is summed over ranks, like that of a sharded layer."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        dist.all_reduce(dy := dy.clone())
        return dy


def _hops(rank: int, ranks: int) -> Any:
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    yield Hop(torch.ones(3 + rank), torch.empty(3), right, left)
    yield None


def _on_gloo(rank: int, folder: str) -> list[str]:
    """Return the errors on this rank for calls that torch's dispatcher sees:
    forward, backward, a thread."""
    store = dist.FileStore(f"{folder}/store", 2)
    mesh, said = Mesh(tp=2), []
    checked = CheckedCollectives(store, mesh, rank, 60.0, torch.device("cpu"))
    x = torch.ones(3, requires_grad=True)
    group = mesh.connect().group("tp")
    with checked:
        whole = torch.empty(6)
        all_gather_into(whole, torch.ones(3) * rank, group=group)
        assert whole.tolist() == [0, 0, 0, 1, 1, 1]
        _alike(rank, SimpleNamespace(group=lambda axis: group))
        _Product.apply(x).sum().backward()
    assert x.grad.tolist() == [2, 2, 2]
    faults = (
        lambda: dist.all_reduce(torch.ones(3, dtype=[torch.half, torch.float][rank]), group=group),
        lambda: _Product.apply(torch.ones(3 + rank, requires_grad=True)).sum().backward(),
        lambda: dist.broadcast(torch.ones(3), group=group, group_src=rank),
        lambda: run_on_group(_hops(rank, 2), group),
    )
    for number, fault in enumerate(faults):
        again = dist.PrefixStore(str(number), store)
        try:
            with CheckedCollectives(again, mesh, rank, 60.0, torch.device("cpu")):
                fault()
        except (CollectiveMismatch, RuntimeError) as error:
            said.append(str(error))
    return said


def test_every_gloo_collective_is_seen_in_torch_dispatch_before_it_is_issued(tmp_path):
    (first, second) = run_ranks(2, _on_gloo, str(tmp_path))
    one, other = "rank 0 (tp=0)", "rank 1 (tp=1)"
    words = [
        f"{one} calls all_reduce of float16[3], {other} calls all_reduce of float32[3]",
        f"{one} calls all_reduce of float32[3], {other} calls all_reduce of float32[4]",
        f"{one} calls broadcast of float32[3] from rank 0, "
        f"{other} calls broadcast of float32[3] from rank 1",
    ]
    assert first[:3] == second[:3] == words
    message = f"{other} sends float32[4], {one} receives float32[3]"
    assert message in (first[3], second[3])
