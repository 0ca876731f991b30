"""The collectives equal their algebra on 1 to 4 ranks, both ways, and so do their types."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.distributed as dist
from close import assert_close_f64, relative_error
from ranks import run_ranks
from rules import rulecheck
from spmd_types import I, P, R, S
from spmd_types.rulecheck import RuleCheckError

from warpweave.parallel import collectives as c

SHAPE = (12, 5, 24)  # dims 0 and 2 divide by 1, 2, 3, 4; dim 1 by none but 1


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
    """Every pair against the sums and slices its docstring states, drawn alike on all ranks."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
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

    # strided inputs, and sums of 16-bit terms rounded once
    strided = _tensor(10 + rank, (24, 12)).T
    expected = sum(_tensor(10 + r, (24, 12)).T for r in range(ranks))
    assert_close_f64(c.reduce_from(strided, group), expected, 1e-14)
    assert_close_f64(c.reduce_scatter(strided, group), _slice(expected, rank, ranks, 0), 1e-14)
    for dtype in (torch.bfloat16, torch.float16):
        terms = [_tensor(10 + r, dtype=dtype) for r in range(ranks)]
        exact = sum(t.float() for t in terms).to(
            dtype
        )  # at most 4 terms: every fp32 order agrees here
        assert (
            relative_error(c.reduce_from(terms[rank], group), exact) <= torch.finfo(dtype).eps / 4
        )
        assert c.reduce_from(terms[rank], group).dtype == dtype
        own = _slice(exact, rank, ranks, 0)
        assert (
            relative_error(c.reduce_scatter(terms[rank], group), own) <= torch.finfo(dtype).eps / 4
        )

    # a second derivative would leave the collective out
    for function in (c.copy_to, c.reduce_from, c.scatter, c.gather, c.all_gather, c.reduce_scatter):
        x = _tensor(1).requires_grad_()
        (dx,) = torch.autograd.grad(function(x, group).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(dx.sum() + (x * x).sum(), x)

    if ranks > 1:
        with pytest.raises(ValueError, match=rf"rank {rank} of {ranks}: dim 1 .* \(12, 5, 24\)"):
            c.scatter(_tensor(1), group, 1)
        with pytest.raises(ValueError, match="not divisible"):
            c.reduce_scatter(_tensor(1), group, 1)
        with pytest.raises(ValueError, match="contiguous"):
            c.start_all_reduce_(_tensor(1).movedim(0, 1), group)
    with pytest.raises(ValueError, match="dim 3 does not exist"):
        c.all_gather(_tensor(1), group, 3)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_pairs_equal_their_algebra(ranks: int) -> None:
    run_ranks(ranks, _all_pairs)


def test_without_a_group_nothing_happens() -> None:
    x = _tensor(1)
    for function in (c.copy_to, c.reduce_from, c.scatter, c.gather, c.all_gather, c.reduce_scatter):
        assert function(x, None) is x
    for start in (c.start_all_reduce_, c.start_all_gather, c.start_reduce_scatter):
        assert start(x, None).wait() is x
    assert (c.group_size(None), c.group_rank(None)) == (1, 0)


# Function, its dim, the one input type that its rule accepts
CASES = [
    (c._CopyTo, (), I),
    (c._ReduceFrom, (), P),
    (c._Scatter, (0,), I),
    (c._Scatter, (2,), I),
    (c._Gather, (0,), S(0)),
    (c._Gather, (2,), S(2)),
    (c._AllGather, (0,), S(0)),
    (c._AllGather, (2,), S(2)),
    (c._ReduceScatter, (0,), P),
    (c._ReduceScatter, (2,), P),
]


@pytest.mark.parametrize(("function", "dim", "accepted"), CASES)
def test_typing_rules_hold_numerically(function, dim, accepted) -> None:
    """Of R, S(0), S(2), P and I the rule accepts one, and derives a true output type from it."""
    report = rulecheck(function, (_tensor(3, (4, 3, 6)), "tp", *dim))
    checked = [placement["x"]["tp"] for placement in report.checked]
    # rulecheck runs without gradients, where R and I are one type
    assert checked == ([R, I] if accepted is I else [accepted])
    assert len(checked) + len(report.rejected) == 5


def test_every_function_has_a_rule() -> None:
    functions = {
        f
        for _, f in inspect.getmembers(c, inspect.isclass)
        if issubclass(f, torch.autograd.Function)
    }
    assert functions == {function for function, _, _ in CASES}
    assert all(hasattr(f, "spmd_typecheck") for f in functions)


class _ForgetsToReduce(c._ReduceFrom):
    """Fault: a missing all-reduce."""

    @staticmethod
    def forward(ctx, x, group):
        return x.clone()


class _GathersTheWrongDim(c._AllGather):
    """Fault: gathers along dim 0 what the rule calls sharded along dim 2."""

    @staticmethod
    def forward(ctx, x, group, dim):
        return c.start_all_gather(x, group, 0).wait()


@pytest.mark.parametrize(("fault", "dim"), [(_ForgetsToReduce, ()), (_GathersTheWrongDim, (2,))])
def test_planted_faults_break_the_rule(fault, dim) -> None:
    with pytest.raises(RuleCheckError, match=r"differ|shape"):
        rulecheck(fault, (_tensor(3, (4, 4, 4)), "tp", *dim))
