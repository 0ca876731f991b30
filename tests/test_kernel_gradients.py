"""Gradients of kernel operands and addends: as wide as requested, for any view of a leaf, immediate
or deferred. In 16 bits every result is a float32 result, rounded once."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial

import pytest
import torch
from close import assert_all_close
from op_cases import CASES

from warpweave.kernels import reference
from warpweave.kernels.cases import Case, cases
from warpweave.kernels.gemm.local import weight_gradient
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.runtime.wgrad import (
    WeightGradients,
    accumulate,
    bias_gradient,
    collect,
    grad_dtype,
    rows,
    waits,
    wgrad,
    wgrad_buffer,
)

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])

# ---------------------------------------------------------------- rounded once

T, E = 37, 66
ONCE = {  # ops with one result
    "rms_norm": Case("rms_norm", [(T, E), (E,)], rms_norm, reference.rms_norm),
    "layer_norm": Case("layer_norm", [(T, E), (E,), (E,)], layer_norm, reference.layer_norm),
}
NAMES = "activation", "dropout", "rope", "cross entropy"
ONCE |= {c.name: c for c in cases(torch.device("cpu"), T) if c.name.startswith(NAMES)}


def assert_rounded_once(found: torch.Tensor, truth: torch.Tensor, what: str) -> None:
    """Assert that it is the correct float32 result rounded to its dtype, up to a
    few units of the largest."""
    half = torch.finfo(found.dtype).eps / 2
    bound = 1.01 * half * truth.abs() + 2**-20 * truth.abs().max()
    assert ((found.double() - truth).abs() <= bound).all(), what


@IMPLS
@pytest.mark.parametrize("name", ONCE)
def test_what_is_made_of_16_bits_is_rounded_once_both_ways(name, impl) -> None:
    _, shapes, ours, truth, _ = ONCE[name]
    for dtype in (BF16, torch.float16):
        leaves = [torch.randn(s).to(dtype).requires_grad_() for s in shapes]
        for p in leaves[1:]:
            p.grad_dtype = F32
        exact = [t.detach().double().requires_grad_() for t in leaves]
        y, right = ours(*leaves, impl=impl), truth(*exact)
        dy = torch.randn_like(y)
        assert_rounded_once(y, right.detach(), f"{name} in {dtype}")
        found = torch.autograd.grad(y, leaves, dy)
        assert [g.dtype for g in found] == [dtype, *[F32] * (len(shapes) - 1)]
        for n, (a, b) in enumerate(zip(found, torch.autograd.grad(right, exact, dy.double()))):
            assert_rounded_once(a, b, f"gradient {n} of {name} in {dtype}")


def _at_once(p: torch.Tensor, dw: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a tensor whose gradient cannot be deferred."""
    buffer, add, gradient = wgrad_buffer(p, p.grad_dtype)
    buffer.copy_(dw.view(p.shape) + (buffer.double() if add else 0))
    return gradient


def test_gradients_of_parameters_are_sums_in_float32() -> None:
    """Uses whole numbers whose sums do not fit in 16 bits."""
    dy, x = (torch.randint(-100, 201, (5, 60, n)).to(BF16) for n in (6, 4))
    for wanted in (F32, BF16):
        weight, bias = (torch.zeros(s, dtype=BF16, requires_grad=True) for s in ((3, 2, 4), (3, 2)))
        truth = torch.einsum("btn,btk->nk", dy.double(), x.double()), dy.double().sum((0, 1))
        for p, right, make in (
            (weight, truth[0], lambda p: weight_gradient(p, lambda: (dy, x))),
            (bias, truth[1], lambda p: bias_gradient(p, dy)),
            (weight, truth[0], lambda p, dw=truth[0]: _at_once(p, dw)),
        ):
            p.grad_dtype, right = wanted, right.view(p.shape).to(wanted)
            assert torch.equal(make(p), right)
            for context in (collect, accumulate):
                for home in (None, torch.full(p.shape, float("nan"), dtype=wanted)):
                    store = WeightGradients({} if home is None else {p: home})
                    for times in (1, 2):
                        with context(store):
                            left = make(p)
                        if left is not None:  # nothing collects it, so autograd does
                            assert (context, home) == (accumulate, None)
                            assert torch.equal(left, right)
                            break
                        store.run()
                        assert len(store) == 0
                        assert p.grad.dtype == wanted
                        assert home is None or p.grad is home
                        assert torch.equal(p.grad, (times * right.double()).to(wanted))
                    store.run()  # what was written is discarded
                    assert p.grad is None or left is not None or torch.equal(p.grad, 2 * right)
                    p.grad = None


@pytest.mark.parametrize("context", [collect, accumulate])
def test_weight_gradients_are_collected_only_within_the_block(context):
    weight, dw = torch.zeros(2, requires_grad=True), torch.ones(2)
    store = WeightGradients({weight: torch.zeros(2)})
    with suppress(KeyError), context(store):
        assert wgrad(weight, lambda: dw) is None
        assert waits(weight) == (context is collect)
        assert not waits(weight * 2)  # the gradient of a computed tensor is returned at once
        assert not torch.autograd.is_multithreading_enabled()
        raise KeyError
    assert wgrad(weight, lambda: dw) is dw
    assert not waits(weight)
    assert torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize("inner", [collect, accumulate])
@pytest.mark.parametrize("outer", [collect, accumulate])
def test_after_a_block_within_another_gradients_go_to_the_outer_one_again(outer, inner) -> None:
    weight, dw = torch.zeros(2, requires_grad=True), torch.ones(2)
    first, second = (WeightGradients({weight: torch.zeros(2)}) for _ in "ab")
    with outer(first):
        with suppress(KeyError), inner(second):
            raise KeyError
        assert waits(weight) == (outer is collect)
        assert not torch.autograd.is_multithreading_enabled()
        assert wgrad(weight, lambda: dw) is None
    assert (len(first), len(second)) == (int(outer is collect), 0)
    first.run()
    assert weight.grad is first.buffers[weight]
    assert torch.equal(weight.grad, dw)


def test_tokens_without_features_are_as_many() -> None:
    assert rows(torch.zeros(2, 3, 0)).shape == (6, 0)
    x, up, down, bias = torch.ones(2, 3), torch.ones(0, 3), torch.ones(3, 0), torch.arange(3.0)
    leaves = [t.requires_grad_() for t in (x, up, down, bias)]
    y = mlp(*leaves[:3], None, bias, activation="gelu")
    assert torch.equal(y, bias.expand(2, 3))
    y.sum().backward()
    assert [[*t.grad.shape] for t in leaves] == [[*t.shape] for t in leaves]
    assert torch.equal(bias.grad, torch.full((3,), 2.0))
    assert not x.grad.any()


# ---------------------------------------------------------------- of any view, at any time

VIEWS = {  # a leaf for a weight w, and the way back
    "itself": (lambda w: w, lambda p: p),
    "flat": (lambda w: w.flatten(), None),
    "turned": (lambda w: w.transpose(0, 1), lambda p: p.transpose(0, 1)),
    "turned, matrix": (lambda w: w.flatten(1).t(), None),
    "last first": (lambda w: w.movedim(-1, 0), lambda p: p.movedim(0, -1)),
    "a part": (lambda w: torch.cat((w, w)), lambda p: p[len(p) // 2 :]),
    "every second": (lambda w: w.repeat_interleave(2, -1), lambda p: p[..., ::2]),
    "twice a view": (lambda w: w.flatten(), None),
    "computed": (lambda w: w / 2, lambda p: p * 2),
}


def _back(name: str, p: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    if name == "turned, matrix":
        return p.t().view(shape)
    if name == "twice a view":
        return p.view(shape[0], -1).view(shape)
    way = VIEWS[name][1]
    return p.view(shape) if way is None else way(p)


@pytest.mark.parametrize(
    "op", [n for n, case in CASES.items() if len(case.shapes) > 1 and case.differentiable]
)
def test_gradients_reach_the_leaf_of_any_view_of_a_parameter_now_or_later(op) -> None:
    _, (first, *shapes), ours, truth, _ = CASES[op]
    ours, x = partial(ours, impl="torch"), torch.randn(first, dtype=F64)
    for name in VIEWS:
        if any(len(s) < 2 for s in shapes) and "turned" in name:
            views = [name if len(s) > 1 else "itself" for s in shapes]
        else:
            views = [name] * len(shapes)
        given = [VIEWS[v][0](torch.randn(s, dtype=F64)) for v, s in zip(views, shapes)]
        pairs = []
        for run, contexts in ((truth, (None,)), (ours, (None, collect, accumulate))):
            for context in contexts:
                leaves = [p.clone().requires_grad_() for p in given]
                store = WeightGradients({p: torch.full_like(p, float("nan")) for p in leaves})
                sizes = map(torch.Size, shapes)
                y = run(x, *(_back(v, p, s) for v, p, s in zip(views, leaves, sizes)))
                y = y if isinstance(y, tuple) else (y,)
                with context(store) if context else nullcontext():
                    sum((t.sin()).sum() for t in y).backward()
                store.run()
                pairs.append([p.grad for p in leaves])
        for found in pairs[1:]:
            assert_all_close(found, pairs[0], 1e-12)


def test_deferred_gradients_are_computed_in_order_and_written_into_buffers() -> None:
    made, first, other = [], *(torch.zeros(2, requires_grad=True) for _ in "ab")
    store = WeightGradients({other: torch.full((2,), float("nan"))})

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.full((2,), float(len(made)))

    def into(name: str, buffer: torch.Tensor, add: bool) -> None:
        made.append(f"{name} {'added' if add else 'written'}")
        buffer.copy_(len(made) + (buffer if add else 0))

    with collect(store):
        for weight, name in ((first, "a"), (other, "b"), (first, "c"), (other, "d")):
            given = partial(make, name), partial(into, name) if weight is other else None
            assert wgrad(weight, *given) is None
    assert (made, len(store)) == ([], 4)
    store.run()
    assert made == ["a", "b written", "c", "d added"]
    assert first.grad.tolist() == [4.0, 4.0]
    assert other.grad.tolist() == [6.0, 6.0]


def test_gradient_has_the_grad_dtype_of_its_parameter_or_else_its_dtype() -> None:
    for own in (F64, F32, BF16):
        p = torch.zeros(3, dtype=own, requires_grad=True)
        assert grad_dtype(p) == own
        assert grad_dtype(p * 2) == own
        for wanted in (F32, BF16, None):
            p.grad_dtype = wanted
            assert grad_dtype(p) == (wanted or own)
    weight, bias = (torch.randn(s).to(BF16).requires_grad_() for s in ((6, 4), (6,)))
    dy, x = torch.randn(5, 6).to(BF16), torch.randn(5, 4).to(BF16)
    weight.grad_dtype = bias.grad_dtype = None
    assert weight_gradient(weight, lambda: (dy, x)).dtype == BF16
    assert bias_gradient(bias, dy).dtype == BF16
