"""Derivatives beyond the gradient are correct or rejected, never missing some of their terms.

For every differentiable op there are two tests. One is a second derivative with other paths to the
same inputs: torch continues along them if one path ends at a node without gradient. The other is
forward mode, where torch treats an operator without a rule as a constant.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from close import assert_close_f64
from torch.autograd import forward_ad

from warpweave.kernels import reference
from warpweave.kernels.activation import activate
from warpweave.kernels.cross_entropy import cross_entropy
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import fused_gemm, gemm
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy
from warpweave.kernels.mlp import gelu_mlp, mlp, swiglu_mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.qkv import qkv_rope
from warpweave.kernels.rope import apply_rope, apply_rope_qk, rope_table

T, E, F, V, D = 5, 8, 6, 11, 4
LABELS = torch.arange(T) * 3 % V
TABLE = rope_table(torch.arange(T), D, dtype=torch.float64)
KEY = {"seed": 7, "site": 1, "tokens": torch.arange(T)}
DROP = Drop(0.25, **KEY)


class Case(NamedTuple):
    """A case: `ours` and `truth` of tensors of these shapes; ours also accepts an impl."""

    ours: Callable[..., Any]
    truth: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]


def _kept() -> torch.Tensor:
    return reference.dropout(torch.ones(T, E), 0.25, **KEY) > 0


CASES = {
    "rms_norm": Case(rms_norm, reference.rms_norm, ((T, E), (E,))),
    "rms_norm, all": Case(
        lambda x, w, r, b, **how: rms_norm(x, w, residual=r, x_bias=b, drop=DROP, **how),
        lambda x, w, r, b: reference.rms_norm(
            x, w, residual=r, x_bias=b, dropout=0.25, keep=_kept()
        ),
        ((T, E), (E,), (T, E), (E,)),
    ),
    "layer_norm": Case(layer_norm, reference.layer_norm, ((T, E), (E,), (E,))),
    "apply_rope": Case(
        lambda x, impl: apply_rope(x, *TABLE, impl=impl),
        lambda x: reference.apply_rope(x, *TABLE),
        ((2, T, 3, D),),
    ),
    "apply_rope_qk": Case(
        lambda q, k, impl: apply_rope_qk(q, k, *TABLE, impl=impl),
        lambda q, k: tuple(reference.apply_rope(t, *TABLE) for t in (q, k)),
        ((2, T, 3, D), (2, T, 1, D)),
    ),
    "qkv_rope": Case(
        lambda x, w, b, impl: qkv_rope(x, w, b, *TABLE, impl=impl),
        lambda x, w, b: reference.qkv_rope(x, w, b, *TABLE),
        ((2, T, E), (2, 4, D, E), (2, 4, D)),
    ),
    **{
        f"activate {name}": Case(
            lambda x, impl, name=name: activate(x, name, impl=impl),
            lambda x, name=name: reference.activate(x, name),
            ((T, E),),
        )
        for name in ("gelu", "relu2", "swiglu")
    },
    "gelu_mlp": Case(
        lambda x, up, down, b, c, impl: gelu_mlp(x, up, down, b, c, impl=impl),
        lambda x, up, down, b, c: reference.mlp(x, up, down, b, c, activation="gelu"),
        ((T, E), (F, E), (E, F), (F,), (E,)),
    ),
    "swiglu_mlp": Case(
        lambda x, up, down, r, impl: swiglu_mlp(x, up, down, residual=r, drop=DROP, impl=impl),
        lambda x, up, down, r: reference.mlp(
            x, up, down, activation="swiglu", residual=r, drop=DROP
        ),
        ((T, E), (F, 2, E), (E, F), (T, E)),
    ),
    "mlp, up recomputed": Case(
        lambda x, up, down, impl: mlp(x, up, down, activation="geglu", recompute="up", impl=impl),
        lambda x, up, down: reference.mlp(x, up, down, activation="geglu"),
        ((T, E), (F, 2, E), (E, F)),
    ),
    "gemm": Case(gemm, lambda a, b, c: a @ b + c, ((T, E), (E, F), (F,))),
    "fused_gemm": Case(
        lambda a, b, impl: fused_gemm(a, b, activation="gelu", impl=impl)[0],
        lambda a, b: reference.fused_gemm(a, b, activation="gelu"),
        ((T, E), (E, F)),
    ),
    "dropout": Case(
        lambda x, impl: dropout(x, DROP, impl=impl),
        lambda x: reference.dropout(x, 0.25, **KEY),
        ((T, E),),
    ),
    "cross_entropy": Case(
        lambda z, impl: cross_entropy(z, LABELS, z_loss=0.1, impl=impl),
        lambda z: reference.cross_entropy(z, LABELS, z_loss=0.1),
        ((T, V),),
    ),
    **{
        f"linear_cross_entropy, {'recomputed' if recompute else 'in forward'}": Case(
            lambda x, w, impl, recompute=recompute: linear_cross_entropy(
                x, w, LABELS, recompute=recompute, impl=impl
            ),
            lambda x, w: reference.linear_cross_entropy(x, w, LABELS),
            ((T, E), (V, E)),
        )
        for recompute in (False, True)
    },
}
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def _inputs(shapes, dtype) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def _total(y: Any, power: int = 2) -> torch.Tensor:
    """Return a scalar; with the second power the incoming gradients depend on y as well."""
    return sum(t.pow(power).sum() for t in (y if isinstance(y, tuple) else (y,)))


def _second(
    function: Callable[..., Any], leaves: list[torch.Tensor], wanted: int, deep: bool, power: int
) -> torch.Tensor:
    """Return the gradient to one leaf of a penalty on its first gradient, with other paths to the
    leaf.

    With `deep` the op gets the results of other operators on the leaves.
    """
    given = [leaf * 1.5 for leaf in leaves] if deep else leaves
    total = _total(function(*given), power)
    (gradient,) = torch.autograd.grad(total, leaves[wanted], create_graph=True)
    other = leaves[wanted].pow(4).sum()
    return torch.autograd.grad(gradient.square().sum() + other, leaves[wanted])[0]


def _unless_refused(run: Callable[[], torch.Tensor], refusal: str) -> torch.Tensor | None:
    try:
        return run()
    except (RuntimeError, ValueError) as error:
        if not re.search(refusal, str(error)):
            raise
        return None


@IMPLS
@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_right_or_refused(name, impl):
    ours, truth, shapes = CASES[name]
    run = functools.partial(ours, impl=impl)
    ways = [*itertools.product((False, True), (1, 2))]
    ways = ways if impl == "torch" else ways[::3]  # the interpreter is slow
    for wanted, (deep, power) in itertools.product(range(len(shapes)), ways):
        leaves = [t.requires_grad_() for t in _inputs(shapes, torch.float64)]
        how = leaves, wanted, deep, power
        refusal = "no second derivative|no autograd formula|has no gradient"
        got = _unless_refused(lambda how=how: _second(run, *how), refusal)
        if got is not None:
            assert_close_f64(got, _second(truth, *how), 1e-9)


def _by_jvp(
    function: Callable[..., Any], inputs: list[torch.Tensor], tangent: torch.Tensor, i: int
) -> torch.Tensor:
    def one(x: torch.Tensor) -> torch.Tensor:
        return _total(function(*inputs[:i], x, *inputs[i + 1 :]))

    return torch.func.jvp(one, (inputs[i],), (tangent,))[1]


def _by_dual(
    function: Callable[..., Any], inputs: list[torch.Tensor], tangent: torch.Tensor, i: int
) -> torch.Tensor:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(inputs[i], tangent)
        found = forward_ad.unpack_dual(_total(function(*inputs[:i], x, *inputs[i + 1 :]))).tangent
        return torch.zeros(()) if found is None else found


@IMPLS
@pytest.mark.parametrize("forward", [_by_jvp, _by_dual])
@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_right_or_refused(name, forward, impl):
    ours, truth, shapes = CASES[name]
    run = functools.partial(ours, impl=impl)
    both = (torch.float64, 1e-9), (torch.float32, 1e-4)  # they use different libraries
    for dtype, tolerance in both if impl == "torch" else both[:1]:
        inputs, tangents = _inputs(shapes, dtype), _inputs(shapes, dtype)
        wide = [t.double() for t in inputs]
        for i, tangent in enumerate(tangents):
            how = inputs, tangent, i
            refusal = "forward.mode|setup_context"
            got = _unless_refused(lambda how=how: forward(run, *how), refusal)
            if got is not None:
                assert_close_f64(got, _by_jvp(truth, wide, tangent.double(), i), tolerance)


@pytest.mark.parametrize(
    ("name", "impl"),
    [("cross_entropy", "torch"), ("cross_entropy", "triton"), ("dropout", "torch"),
     ("dropout", "triton"), ("activate gelu", "triton"), ("rms_norm", "triton")],
)  # fmt: skip
def test_forward_mode_is_right_or_refused_while_a_compiler_traces(name, impl):
    """Tracing runs a Function's and an operator's forward, and asks neither for a tangent."""
    ours, truth, shapes = CASES[name]
    (x, *rest), (tangent, *_) = (_inputs(shapes, torch.float64) for _ in range(2))
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def along(x):
        return _by_jvp(functools.partial(ours, impl=impl), [x, *rest], tangent, 0)

    got = _unless_refused(lambda: along(x), "no forward-mode|setup_context")
    if got is not None:
        assert_close_f64(got, _by_jvp(truth, [x, *rest], tangent, 0), 1e-9)
