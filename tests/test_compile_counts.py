"""How often torch.compile compiles an op whose seeds, positions and lengths change: at most twice.

The first compilation takes every number for a constant; the first that changes makes it a symbol,
and with that it must be done, whatever comes. A row of `CASES` is an op and its arguments for n:
lengths, positions, seeds and sites all depend on it. A new op is a new row. Triton likewise: no
kernel is compiled for what is another at every step.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
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

E, F, V, D = 8, 12, 40, 4
ONE, UP, GATED, DOWN = torch.rand(E), torch.rand(F, E), torch.rand(F, 2, E), torch.rand(E, F)
HEAD, QKV = torch.rand(V, E), torch.rand(1, 3, D, E)
RATES = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


class Case(NamedTuple):
    """op(*arguments(n), **options(n)); `differentiable` names the impls whose gradients exist."""

    op: Callable[..., Any]
    arguments: Callable[[int], tuple[Any, ...]]
    options: Callable[[int], dict[str, Any]] = lambda n: {}
    differentiable: tuple[str, ...] = ("torch", "triton")


def _x(n: int) -> torch.Tensor:
    return torch.rand(n, E)


def _drop(n: int) -> Drop:
    """Of a dropout at another place of another step, of other tokens."""
    return Drop(0.25, seed=10**6 + n, site=5 + n, tokens=torch.arange(n) + 100 * n)


def _heads(n: int, heads: int) -> torch.Tensor:
    return torch.rand(2, n, heads, D)


def _table(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(torch.arange(n) + 10 * n, D)


def _labels(n: int) -> torch.Tensor:
    return torch.arange(n) % V


def _everything(n: int) -> dict[str, Any]:
    return {"residual": _x(n), "x_bias": ONE, "drop": _drop(n)}


def _added(n: int) -> dict[str, Any]:
    return {"residual": _x(n), "drop": _drop(n)}


def _epilogue(n: int) -> dict[str, Any]:
    return {"activation": "gelu", "save_z": True, "drop": _drop(n), "residual": torch.rand(n, F)}


CASES = {
    "rms_norm": Case(rms_norm, lambda n: (_x(n), ONE)),
    "rms_norm, all": Case(rms_norm, lambda n: (_x(n), ONE), _everything),
    "layer_norm": Case(layer_norm, lambda n: (_x(n), ONE, ONE)),
    "layer_norm, all": Case(layer_norm, lambda n: (_x(n), ONE, ONE), _everything),
    "apply_rope": Case(apply_rope, lambda n: (_heads(n, 3), *_table(n))),
    "apply_rope_qk": Case(apply_rope_qk, lambda n: (_heads(n, 3), _heads(n, 1), *_table(n))),
    "qkv_rope": Case(
        qkv_rope,
        lambda n: (torch.rand(2, n, E), QKV, None, *_table(n)),
    ),
    "activate": Case(activate, lambda n: (_x(n), "gelu")),
    "activate, gated": Case(activate, lambda n: (_x(n), "swiglu")),
    "gelu_mlp": Case(gelu_mlp, lambda n: (_x(n), UP, DOWN), _added),
    "swiglu_mlp": Case(swiglu_mlp, lambda n: (_x(n), GATED, DOWN), _added),
    "gemm": Case(gemm, lambda n: (_x(n), DOWN), differentiable=("torch",)),
    "gemm_into": Case(
        gemm_into, lambda n: (_x(n), DOWN, torch.rand(n, F), True), differentiable=()
    ),
    "fused_gemm": Case(fused_gemm, lambda n: (_x(n), DOWN), _epilogue, differentiable=()),
    "dropout": Case(dropout, lambda n: (_x(n), _drop(n))),
    "cross_entropy": Case(cross_entropy, lambda n: (torch.rand(n, V), _labels(n))),
    "linear_cross_entropy": Case(linear_cross_entropy, lambda n: (_x(n), HEAD, _labels(n))),
    "linear_cross_entropy, recomputed": Case(
        linear_cross_entropy,
        lambda n: (_x(n), HEAD, _labels(n)),
        lambda n: {"recompute": True, "label_smoothing": 0.1},
    ),
    "sum_of_squares": Case(sum_of_squares, lambda n: (torch.rand(n),), differentiable=()),
    "adamw_step": Case(
        adamw_step,
        lambda n: tuple(torch.rand(n) for _ in range(4)),
        lambda n: {"step": torch.tensor(float(n)), **RATES},
        differentiable=(),
    ),
    "adamw_step, all": Case(
        adamw_step,
        lambda n: tuple(torch.rand(n) for _ in range(4)),
        lambda n: {
            "step": torch.tensor(float(n)),
            **RATES,
            "param": torch.rand(n).bfloat16(),
            "grad_scale": torch.tensor(1.0 / n),
            "skip": torch.tensor(0.0),
        },
        differentiable=(),
    ),
}

IMPLS = ("torch", "triton")
SIZES = (3, 5, 9, 17, 33, 41)  # past every power of two, where blocks may become larger
FORWARD = [(name, impl, False) for name in CASES for impl in IMPLS]
BACKWARD = [(name, impl, True) for name, case in CASES.items() for impl in case.differentiable]


# Dynamo itself instantiates autograd.Function when it traces one, and torch warns about that.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(("name", "impl", "gradients"), FORWARD + BACKWARD)
def test_two_compilations_are_enough_whatever_comes(name, impl, gradients):
    op, arguments, options, _ = CASES[name]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(op, fullgraph=True, backend=counter)
    for n in SIZES:
        x, *more = arguments(n)
        y = compiled(x.requires_grad_(gradients), *more, **options(n), impl=impl)
        if gradients:
            sum(t.sum() for t in (y if isinstance(y, tuple) else (y,))).backward()
            assert x.grad.isfinite().all()
    assert counter.frame_count <= 2


def _jitted() -> Iterator[tuple[str, ast.FunctionDef, ast.expr]]:
    """(module, function, decorator) of every kernel that is launched."""
    for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        source = Path(importlib.import_module(found.name).__file__).read_text()
        for node in ast.walk(ast.parse(source)):
            for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if node.name.endswith("_kernel") and ast.unparse(decorator).startswith(
                    "triton.jit"
                ):
                    yield found.name, node, decorator


def test_no_kernel_is_compiled_for_a_seed_or_a_rank():
    """Triton compiles anew for a number that is 1, or divisible by 16, or needs 64 bits."""
    with_a_seed = 0
    for module, function, decorator in _jitted():
        runtime = {a.arg for a in function.args.args if a.annotation is None}
        changing = runtime & {"seed", "site", "rank", "signature", "step", "epoch"}
        written = next((k.value for k in getattr(decorator, "keywords", ())), ast.List([]))
        listed = eval(ast.unparse(written), vars(importlib.import_module(module)))
        assert changing <= {*listed}, f"{module}.{function.name} is compiled anew for {changing}"
        with_a_seed += bool(changing)
    assert with_a_seed >= 14
