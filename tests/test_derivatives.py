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
from typing import Any

import pytest
import torch
from close import assert_close_f64
from op_cases import CASES
from torch.autograd import forward_ad

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
    _, shapes, ours, truth, _ = CASES[name]
    run = functools.partial(ours, impl=impl)
    ways = [*itertools.product((False, True), (1, 2))]
    ways = ways if impl == "torch" else ways[::3]  # the interpreter is slow
    for wanted, (deep, power) in itertools.product(range(len(shapes)), ways):
        leaves = [t.requires_grad_() for t in _inputs(shapes, torch.float64)]
        how = leaves, wanted, deep, power
        refusal = "not support second derivatives|no autograd formula|is not differentiable"
        got = _unless_refused(lambda how=how: _second(run, *how), refusal)
        if got is not None:
            assert_close_f64(got, _second(truth, *how), 1e-9)


Inputs = list[torch.Tensor]


def _of_input(function: Callable[..., Any], inputs: Inputs, i: int, x: torch.Tensor):
    return _total(function(*inputs[:i], x, *inputs[i + 1 :]))


def _by_jvp(function: Callable[..., Any], inputs: Inputs, tangent: torch.Tensor, i: int):
    one = functools.partial(_of_input, function, inputs, i)
    return torch.func.jvp(one, (inputs[i],), (tangent,))[1]


def _by_dual(function: Callable[..., Any], inputs: Inputs, tangent: torch.Tensor, i: int):
    with forward_ad.dual_level():
        y = _of_input(function, inputs, i, forward_ad.make_dual(inputs[i], tangent))
        found = forward_ad.unpack_dual(y).tangent
        return torch.zeros(()) if found is None else found


@IMPLS
@pytest.mark.parametrize("forward", [_by_jvp, _by_dual])
@pytest.mark.parametrize("name", CASES)
def test_forward_mode_is_right_or_refused(name, forward, impl):
    _, shapes, ours, truth, _ = CASES[name]
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
    [("cross entropy", "torch"), ("cross entropy", "triton"), ("dropout", "torch"),
     ("dropout", "triton"), ("activation gelu", "triton"), ("rms_norm", "triton")],
)  # fmt: skip
def test_forward_mode_is_right_or_refused_while_a_compiler_traces(name, impl):
    """Tracing runs a Function's and an operator's forward, and asks neither for a tangent."""
    _, shapes, ours, truth, _ = CASES[name]
    (x, *rest), (tangent, *_) = (_inputs(shapes, torch.float64) for _ in range(2))
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def along(x):
        return _by_jvp(functools.partial(ours, impl=impl), [x, *rest], tangent, 0)

    got = _unless_refused(lambda: along(x), "no forward-mode|setup_context")
    if got is not None:
        assert_close_f64(got, _by_jvp(truth, [x, *rest], tangent, 0), 1e-9)
