"""The collectives and their types equal their algebra on 1 to 4 ranks, forward and backward."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import assert_close_f64
from every_rank import every_rank
from ranks import run_ranks
from refused import check
from rules import rulecheck
from sharded import beside_replicas, world
from spmd_types import I, P, R, S
from spmd_types.rulecheck import RuleCheckError
from threads import on_threads, run_threads

from warpweave.parallel import collectives as c

SHAPE = (12, 5, 24)  # dims 0 and 2 are divisible by 1, 2, 3, 4; dim 1 only by 1


def _tensor(seed: int, shape: tuple[int, ...] = SHAPE, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def _slice(x: torch.Tensor, rank: int, ranks: int, dim: int) -> torch.Tensor:
    return x.chunk(ranks, dim)[rank]


def _run(fn, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    before = x.detach().clone()
    y = fn(x)
    y.backward(dy)
    assert torch.equal(x.detach(), before), "the collective wrote over its input"
    return y.detach(), x.grad


def _all_pairs(rank: int) -> None:
    """Compare every pair with the sums and slices in its docstring, on equal draws everywhere."""
    group, rank, ranks = world()
    terms = [_tensor(10 + r) for r in range(ranks)]  # each rank's own contribution
    total = sum(terms)
    for dim in (0, 2, -1):
        shared, dshared = _tensor(1), _tensor(2)
        own, down = _slice(shared, rank, ranks, dim), _slice(dshared, rank, ranks, dim)

        y, dx = _run(lambda x, d=dim: c.scatter(x, group, d), shared, down)
        assert torch.equal(y, own)
        assert torch.equal(dx, dshared)

        y, dx = _run(lambda x, d=dim: c.gather(x, group, d), own, dshared)
        assert torch.equal(y, shared)
        assert torch.equal(dx, down)

        y, dx = _run(lambda x, d=dim: c.all_gather(x, group, d), own, terms[rank])
        assert torch.equal(y, shared)
        assert_close_f64(dx, _slice(total, rank, ranks, dim), 1e-14)

        y, dx = _run(lambda x, d=dim: c.reduce_scatter(x, group, d), terms[rank], down)
        assert_close_f64(y, _slice(total, rank, ranks, dim), 1e-14)
        assert torch.equal(dx, dshared)

    y, dx = _run(lambda x: c.copy_to(x, group), _tensor(1), terms[rank])
    assert torch.equal(y, _tensor(1))
    assert_close_f64(dx, total, 1e-14)
    y, dx = _run(lambda x: c.reduce_from(x, group), terms[rank], _tensor(2))
    assert_close_f64(y, total, 1e-14)
    assert torch.equal(dx, _tensor(2))

    # strided inputs
    strided = _tensor(10 + rank, (24, 12)).T
    expected = sum(_tensor(10 + r, (24, 12)).T for r in range(ranks))
    assert_close_f64(c.reduce_from(strided, group), expected, 1e-14)
    assert_close_f64(c.reduce_scatter(strided, group), _slice(expected, rank, ranks, 0), 1e-14)

    # a second derivative would omit the collective
    for function in (c.copy_to, c.reduce_from, c.scatter, c.gather, c.all_gather, c.reduce_scatter):
        x = _tensor(1).requires_grad_()
        (dx,) = torch.autograd.grad(function(x, group).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="does not support second derivatives"):
            torch.autograd.grad(dx.sum() + (x * x).sum(), x)

    x = _tensor(1)
    if ranks > 1:
        words = rf"rank {rank} of {ranks}: dim 1 .* \(12, 5, 24\)"
        check(lambda: c.scatter(x, group, 1), words)
        check(lambda: c.reduce_scatter(x, group, 1), "not divisible")
        check(lambda: c.start_all_reduce_(x.movedim(0, 1), group), "contiguous")
    check(lambda: c.all_gather(x, group, 3), "dim 3 does not exist")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pairs_equal_their_algebra(ranks: int) -> None:
    run_ranks(ranks, _all_pairs)


def test_the_group_need_not_be_the_world() -> None:
    run_ranks(4, beside_replicas, _all_pairs)


def test_without_a_group_nothing_happens() -> None:
    x = _tensor(1)
    for function in (c.copy_to, c.reduce_from, c.scatter, c.gather, c.all_gather, c.reduce_scatter):
        assert function(x, None) is x
    for start in (c.start_all_reduce_, c.start_all_gather, c.start_reduce_scatter):
        assert start(x, None).wait() is x
    assert all(c.own_slice(x, None, dim) is x for dim in (0, 1, -1))
    assert (c.group_size(None), c.group_rank(None)) == (1, 0)


@every_rank(2, on_threads)
def test_dims_are_counted_from_either_end_and_there_are_no_others(group) -> None:
    """Try every existing dim, and the two just outside, for each function with a dim."""
    x = torch.zeros(2, 4, 6)
    functions = (c.scatter, c.gather, c.all_gather, c.reduce_scatter, c.own_slice)
    for function in (*functions, c.start_all_gather, c.start_reduce_scatter):
        for dim in (3, -4):
            words = rf"^dim {dim} does not exist in a tensor of shape \(2, 4, 6\)$"
            with pytest.raises(ValueError, match=words):
                function(x, group, dim)
        found = [function(x, group, dim) for dim in range(-3, 3)]
        found = [y.wait() if isinstance(y, c.Pending) else y for y in found]
        times = 2 if "gather" in function.__name__ else 0.5
        shapes = [[int(n * times) if at == dim else n for at, n in enumerate(x.shape)]
                  for dim in range(3)]  # fmt: skip
        assert [[*y.shape] for y in found] == 2 * shapes
        if function is not c.own_slice and function is not c.scatter:
            assert all(y.is_contiguous() for y in found)
    with pytest.raises(ValueError, match="dim 3 does not exist"):
        c.own_slice(x, None, 3)


@every_rank(3, on_threads)  # the sum of two terms in 16 bits is rounded once as well
def test_sums_both_ways_are_of_32_bits_at_least_and_come_back_in_their_dtype(group) -> None:
    """Terms of 16 bits are summed in 32 and rounded once; the result has their dtype."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        terms = [_tensor(r, (6, 2), dtype) * 100 ** (1 - r) for r in range(ranks)]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        whole = terms[0].to(wide)
        for term in terms[1:]:
            whole = whole + term.to(wide)
        whole = whole.to(dtype)
        half = _slice(whole, rank, ranks, 0)
        x = torch.zeros(6, 2, dtype=dtype, requires_grad=True)
        y = torch.zeros(6 // ranks, 2, dtype=dtype, requires_grad=True)
        c.copy_to(x, group).backward(terms[rank])
        c.all_gather(y, group).backward(terms[rank])
        found = (
            c.reduce_from(terms[rank], group), c.reduce_scatter(terms[rank], group), x.grad, y.grad
        )  # fmt: skip
        assert {x.dtype for x in found} == {dtype}
        assert all(map(torch.equal, found, (whole, half, whole, half))), dtype
    given = torch.ones(3).bfloat16()
    assert c.start_all_reduce_(given, group).wait() is given, "in place, in the dtype it has"


def test_a_collective_is_waited_for_once() -> None:
    waits = mock.Mock()
    pending = c.Pending(waits, lambda: 5)
    assert [pending.wait(), pending.wait()] == [5, 5]
    assert waits.wait.call_count == 1


def _ends(group) -> tuple[list[bool], list[list[float]]]:
    """Send one way, the other way, both ways and not at all; several in
    one batch, to several ranks."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    right, left, into = (rank + 1) % ranks, (rank - 1) % ranks, torch.zeros(1)
    x = torch.full((1,), float(rank))
    odd, gave = rank % 2, []
    found = c.start_exchange(x if odd else None, None if odd else into, right, left, group).wait()
    gave.append(found is (None if odd else into))
    other = torch.zeros(1)
    gave.append(c.start_exchange(x, other, right, left, group).wait() is other)
    gave.append(c.start_exchange(None, None, right, left, group).wait() is None)
    turns = [(turn, peer) for turn in range(2) for peer in range(ranks) if peer != rank]
    sends = [(x + 10 * turn, peer) for turn, peer in turns]
    receives = [(torch.zeros(1), peer) for _, peer in turns]
    gave.append(c.start_batch(sends, receives, group).wait() is receives)
    return gave, [into.tolist(), other.tolist(), [float(part) for part, _ in receives]]


def test_messages_between_two_ranks_arrive_in_the_order_sent() -> None:
    for rank, (gave, found) in enumerate(on_threads(4, _ends)):
        assert gave == [True] * 4
        one, both, parts = found
        assert (one, both) == ([0.0 if rank % 2 else (rank - 1) % 4.0], [(rank - 1) % 4.0])
        assert parts == [10 * turn + peer for turn in range(2) for peer in range(4) if peer != rank]


def test_a_message_that_fails_names_all_peers_once() -> None:
    def fails() -> None:
        raise RuntimeError("Connection closed by peer\nand more lines")

    def batch(group) -> str:
        x = torch.zeros(1)
        broken = [SimpleNamespace(wait=fails)]
        with mock.patch.object(dist, "batch_isend_irecv", return_value=broken):
            pending = c.start_batch([(x, 2), (x, 0)], [(x, 3), (x, 2)], group)
        with pytest.raises(RuntimeError) as said:
            pending.wait()
        return str(said.value)

    def beside(rank: int) -> str:  # ranks are numbered in the group, not in the world
        group = dist.new_group([1, 2, 3, 4])
        return batch(group) if rank == 2 else ""

    words = "rank 1 of 4: a message to or from ranks [0, 2, 3] failed: Connection closed by peer"
    assert on_threads(4, lambda g: batch(g) if dist.get_rank(g) == 1 else "")[1] == words
    assert run_threads(5, beside)[2] == words


# function, its dim, the only input type that its rule accepts
CASES = [
    (c._CopyTo, (), I), (c._ReduceFrom, (), P), (c._Scatter, (0,), I), (c._Scatter, (2,), I),
    (c._Gather, (0,), S(0)), (c._Gather, (2,), S(2)), (c._AllGather, (0,), S(0)),
    (c._AllGather, (2,), S(2)), (c._ReduceScatter, (0,), P), (c._ReduceScatter, (2,), P),
]  # fmt: skip


@pytest.mark.parametrize(("function", "dim", "accepted"), CASES)
def test_typing_rules_hold_numerically(function, dim, accepted) -> None:
    """The rule accepts one of R, S(0), S(2), P and I, and derives a correct output type from it."""
    report = rulecheck(function, (_tensor(3, (4, 3, 6)), "tp", *dim))
    checked = [placement["x"]["tp"] for placement in report.checked]
    # rulecheck runs without gradients, for which R and I are one type
    assert checked == ([R, I] if accepted is I else [accepted])
    assert len(checked) + len(report.rejected) == 5


def test_every_function_has_a_rule() -> None:
    classes = (f for _, f in inspect.getmembers(c, inspect.isclass))
    functions = {f for f in classes if issubclass(f, torch.autograd.Function)}
    assert functions == {function for function, _, _ in CASES}
    assert all(hasattr(f, "spmd_typecheck") for f in functions)


class _ForgetsToReduce(c._ReduceFrom):
    """Fault: a missing all-reduce."""

    @staticmethod
    def forward(ctx, x, group):
        return x.clone()


class _GathersTheWrongDim(c._AllGather):
    """Fault: it gathers along dim 0 what the rule calls sharded along dim 2."""

    @staticmethod
    def forward(ctx, x, group, dim):
        return c.start_all_gather(x, group, 0).wait()


@pytest.mark.parametrize(("fault", "dim"), [(_ForgetsToReduce, ()), (_GathersTheWrongDim, (2,))])
def test_planted_faults_break_the_rule(fault, dim) -> None:
    with pytest.raises(RuleCheckError, match=r"differ|shape"):
        rulecheck(fault, (_tensor(3, (4, 4, 4)), "tp", *dim))
