"""Ops under torch.compile(fullgraph=True): equal results, forward and backward, and at most two
compilations while seeds, positions and lengths change.

The first compilation treats every number as a constant. The first call with a different number
makes it a symbol, and no later call may compile again. A row of `CASES` is an op and its arguments
for n: lengths, positions, seeds and sites all depend on it. A new op is a new row. Triton is held
to the same: no kernel is compiled for values that differ at every step.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from close import relative_error
from torch._dynamo.testing import CompileCounterWithBackend

from warpweave import kernels
from warpweave.kernels.activation import activate
from warpweave.kernels.adamw import adamw_step, sum_of_squares
from warpweave.kernels.cross_entropy import cross_entropy
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import fused_gemm, gemm, gemm_into
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy
from warpweave.kernels.mlp import gelu_mlp, swiglu_mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.qkv import qkv_rope
from warpweave.kernels.rope import apply_rope, apply_rope_qk, rope_table
from warpweave.kernels.runtime.dispatch import RUNTIME

E, F, V, D = 8, 12, 40, 4
F64 = torch.float64


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=F64)


ONE, UP, GATED, DOWN = _rand(E), _rand(F, E), _rand(F, 2, E), _rand(E, F)
HEAD, QKV = _rand(V, E), _rand(1, 3, D, E)
RATES = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class Case(NamedTuple):
    """A call op(*arguments(n), **options(n)).

    The first `leaves` arguments have gradients, with the impls `differentiable`. Compiled results
    and gradients may differ by `rtol`; without it they must be bitwise equal.
    """

    op: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    options: Callable[[int], dict[str, Any]] = lambda n: {}
    leaves: int = 1
    differentiable: tuple[str, ...] = ("torch", "triton")
    rtol: float = 0.0


def _x(n: int) -> torch.Tensor:
    return _rand(n, E)


def _drop(n: int) -> Drop:
    """Return the dropout of another site, step and set of tokens."""
    return Drop(0.25, seed=10**6 + n, site=5 + n, tokens=torch.arange(n) + 100 * n)


def _heads(n: int, heads: int) -> torch.Tensor:
    return _rand(2, n, heads, D)


def _table(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(torch.arange(n) + 10 * n, D, dtype=F64)


def _labels(n: int) -> torch.Tensor:
    return torch.arange(n) % V


def _everything(n: int) -> dict[str, Any]:
    return {"residual": _x(n), "x_bias": ONE, "drop": _drop(n)}


def _added(n: int) -> dict[str, Any]:
    return {"residual": _x(n), "drop": _drop(n)}


def _epilogue(n: int) -> dict[str, Any]:
    return {"activation": "gelu", "save_z": True, "drop": _drop(n), "residual": _rand(n, F)}


def _chain(x: torch.Tensor, impl: str) -> torch.Tensor:
    for name in ("gelu_erf", "relu2", "geglu"):  # the others are those of both MLPs
        x = activate(x, name, impl=impl)
    return x


def _residual_itself(x: torch.Tensor, *weights: torch.Tensor, **options: Any) -> torch.Tensor:
    return gelu_mlp(x, *weights, residual=x, **options)


def _single(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Run in float32, whose products have a separate operator on a CPU."""
    return tuple(t.detach().float() for t in tensors)


def _state(n: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.rand(n) for _ in range(4))


NONE: tuple[str, ...] = ()
CASES = {
    "rms_norm": Case(rms_norm, lambda n: (_x(n), ONE), leaves=2),
    "layer_norm, all": Case(layer_norm, lambda n: (_x(n), ONE, ONE), _everything, 3),
    "apply_rope": Case(apply_rope, lambda n: (_heads(n, 3), *_table(n)), differentiable=("triton",),
                       rtol=1e-15),
    "apply_rope_qk": Case(partial(apply_rope_qk, interleaved=True),
                          lambda n: (_heads(n, 3), _heads(n, 1), *_table(n)), leaves=2,
                          differentiable=("torch",), rtol=1e-15),
    "qkv_rope": Case(qkv_rope, lambda n: (_rand(2, n, E), QKV, None, *_table(n)), leaves=2,
                     rtol=1e-13),
    "activate": Case(_chain, lambda n: (_x(n),), rtol=1e-13),
    "gelu_mlp": Case(_residual_itself, lambda n: _single(_x(n), UP, DOWN),
                     lambda n: {"drop": _drop(n)}, 3, rtol=1e-6),
    "swiglu_mlp": Case(swiglu_mlp, lambda n: (_x(n), GATED, DOWN), _added, 3, ("triton",),
                       rtol=1e-13),
    "swiglu_mlp, recomputed": Case(partial(swiglu_mlp, recompute="up"),
                                   lambda n: (_x(n), GATED, DOWN), _added, leaves=3,
                                   differentiable=("torch",), rtol=1e-13),
    "gemm": Case(gemm, lambda n: _single(_x(n), DOWN), leaves=2, differentiable=("torch",),
                 rtol=1e-6),
    "gemm_into": Case(gemm_into, lambda n: (_x(n), DOWN, _rand(n, F), True), differentiable=NONE),
    "fused_gemm": Case(fused_gemm, lambda n: (_x(n), DOWN), _epilogue, differentiable=NONE),
    "dropout": Case(dropout, lambda n: (_x(n), _drop(n))),
    "cross_entropy": Case(partial(cross_entropy, label_smoothing=0.1, z_loss=0.01),
                          lambda n: (_rand(n, V), _labels(n)), rtol=1e-13),
    "linear_cross_entropy": Case(partial(linear_cross_entropy, label_smoothing=0.1, z_loss=0.01),
                                 lambda n: (*_single(_x(n), HEAD), _labels(n)), leaves=2,
                                 rtol=1e-6),
    "linear_cross_entropy, recomputed": Case(
        partial(linear_cross_entropy, label_smoothing=0.1, z_loss=0.01, reduction="none"),
        lambda n: (_x(n), HEAD, _labels(n)), lambda n: {"recompute": True}, leaves=2, rtol=1e-13,
    ),
    "sum_of_squares": Case(sum_of_squares, lambda n: (torch.rand(n),), differentiable=NONE),
    "adamw_step": Case(adamw_step, _state, lambda n: {"step": torch.tensor(float(n)), **RATES},
                       differentiable=NONE),
    "adamw_step, all": Case(adamw_step, _state, lambda n: {
        "step": torch.tensor(float(n)), **RATES, "param": torch.rand(n).bfloat16(),
        "grad_scale": torch.tensor(1.0 / n), "skip": torch.tensor(0.0),
    }, differentiable=NONE),
}  # fmt: skip

SIZES = (3, 5, 9, 17, 33, 41)  # past every power of two, where blocks may become larger
# Ops without gradients. The forward pass of the others is compiled with their backward.
FORWARD = [
    (name, impl, False)
    for name, case in CASES.items()
    for impl in ("torch", "triton")
    if impl not in case.differentiable
]
BACKWARD = [(name, impl, True) for name, case in CASES.items() for impl in case.differentiable]


class _Backend:
    """A backend: `aot_eager` for a graph with symbols, `eager` for that of constants, which would
    cost as much again and show nothing new. Both are counted."""

    def __init__(self) -> None:
        self.symbolic, self.constant = map(CompileCounterWithBackend, ("aot_eager", "eager"))

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        symbols = any(isinstance(x, torch.SymInt) for x in inputs)
        return (self.symbolic if symbols else self.constant)(graph, inputs)


def _computed(op: Callable[..., Any], case: Case, n: int, leaves: int) -> list[torch.Tensor]:
    """Return results, gradients of the leaves, and the contents of the arguments afterwards."""
    torch.manual_seed(n)
    given, options = case.arguments(n), case.options(n)
    for x in given[: case.leaves]:
        x.requires_grad_(leaves > 0)
    y = op(*given, **options)
    results = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
    loss = sum((t * t).sum() for t in results) if leaves else None
    gradients = torch.autograd.grad(loss, given[:leaves]) if leaves else ()
    held = [t for t in (*given, *options.values()) if isinstance(t, torch.Tensor)]
    return [t.detach() for t in (*results, *gradients, *held)]


@pytest.mark.parametrize(("name", "impl", "gradients"), FORWARD + BACKWARD)
def test_two_compilations_are_enough_and_change_no_number(name, impl, gradients):
    case = CASES[name]
    torch._dynamo.reset()
    counter, op = _Backend(), partial(case.op, impl=impl)
    compiled, leaves = torch.compile(op, fullgraph=True, backend=counter), gradients * case.leaves
    for n in SIZES:
        found = _computed(compiled, case, n, leaves)
        if n in (SIZES[0], SIZES[-1]):  # one for each compilation
            for a, b in zip(found, _computed(op, case, n, leaves), strict=True):
                assert torch.equal(a, b) if case.rtol == 0 else relative_error(a, b) <= case.rtol
    assert counter.symbolic.frame_count <= 1
    assert counter.constant.frame_count <= 1


@pytest.mark.parametrize(
    ("name", "gradients"), [(name, g) for name, impl, g in FORWARD + BACKWARD if impl == "torch"]
)
def test_two_layers_of_an_op_compile_with_dynamic_shapes(name, gradients):
    """From the first call every number is a symbol, including a float that a module of ours holds.

    Only the torch path is traced: a Triton kernel is one node of the graph.
    """
    case = CASES[name]
    torch._dynamo.reset()
    op, n = partial(case.op, impl="torch"), SIZES[1]

    def twice(given: Any, options: Any, more: Any, other: Any) -> tuple[Any, Any]:
        return op(*given, **options), op(*more, **other)

    found = []
    for run in (torch.compile(twice, fullgraph=True, dynamic=True, backend="eager"), twice):
        torch.manual_seed(n)
        calls = [case.arguments(n), case.options(n), case.arguments(n), case.options(n)]
        for given in calls[::2]:
            for x in given[: case.leaves]:
                x.requires_grad_(gradients)
        found.append([t for y in run(*calls) for t in (y if isinstance(y, tuple) else (y,))])
    for a, b in zip(*found, strict=True):
        if b is not None:
            assert torch.equal(a, b) if case.rtol == 0 else relative_error(a, b) <= case.rtol


def _jitted() -> Iterator[tuple[str, ast.FunctionDef, ast.expr]]:
    """Return (module, function, decorator) of every kernel that is launched."""
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        source = Path(importlib.import_module(found.name).__file__).read_text()
        for node in ast.walk(ast.parse(source)):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if node.name.endswith("_kernel") and ast.unparse(decorator).startswith(
                    "triton.jit"
                ):
                    yield found.name, node, decorator


def test_no_kernel_is_compiled_for_a_seed_or_a_rank():
    """Triton compiles again for an integer that is 1, is divisible by 16, or needs 64 bits."""
    words = {"seed", "site", "sample", "head0", "rank", "signature", "step", "epoch", "window"}
    with_a_seed = 0
    for module, function, decorator in _jitted():
        given = {a.arg for a in function.args.args if a.annotation is None}
        if changing := given & words:
            where = f"{module}.{function.name} is compiled anew for {changing}"
            assert ast.unparse(decorator) == "triton.jit(do_not_specialize=RUNTIME)", where
            assert changing <= {*RUNTIME}, where
            with_a_seed += 1
    assert with_a_seed >= 14
