"""Each kernel family against what `kernels.reference` says that it computes, at odd shapes.

The truth is the reference in float64; a limit is set by the reference in the same dtype (`check`).
Where an op has gradients they are compared, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from warpweave.doctor.check import Check, Measured, within_budget, worst
from warpweave.dtypes import DTYPES
from warpweave.kernels import reference
from warpweave.kernels.activation import ACTIVATIONS, activate
from warpweave.kernels.adamw import adamw_step
from warpweave.kernels.attention import attention
from warpweave.kernels.cross_entropy import cross_entropy
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import fused_gemm, gemm
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.linear_cross_entropy import linear_cross_entropy
from warpweave.kernels.mlp import mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.overlap.function import (
    all_gather_gemm_steps,
    gemm_all_reduce_steps,
    gemm_reduce_scatter_steps,
    run_local,
)
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.kernels.qkv import qkv_rope
from warpweave.kernels.rope import apply_rope, rope_table

RANKS = 3  # virtual ones, on one device


class Case(NamedTuple):
    """`ours` (which takes an impl, too) and `truth` of tensors of these shapes."""

    name: str
    shapes: list[tuple[int, ...]]
    ours: Callable[..., Any]
    truth: Callable[..., Any]
    differentiable: bool = True


def checks(device: torch.device, dtypes: tuple[str, ...], impl: str = "triton") -> Iterator[Check]:
    """Every family in each of `dtypes` on `device`; on a CPU the shapes are tiny."""
    tokens = 515 if device.type == "cuda" else 21
    for dtype in dtypes:
        for case in cases(device, tokens):
            run = partial(_measure, case, DTYPES[dtype], device, impl)
            yield Check(f"{case.name}, {dtype}", "kernels/reference.py in fp64", run)


def cases(device: torch.device, tokens: int) -> list[Case]:
    """One or two cases of each family, of `tokens` rows."""
    return [
        *_pointwise(device, tokens),
        *_products(device, tokens),
        *_attention(device, tokens),
        *_losses(device, tokens),
        *_overlap(tokens // RANKS),
    ]


def _pointwise(device: torch.device, T: int) -> Iterator[Case]:
    E = 2 * T + 1
    drop = Drop(0.3, 5, 1, torch.arange(T, device=device) + 2**32)
    key = {"seed": drop.seed, "site": drop.site, "tokens": drop.tokens}
    for name, ours, truth in (
        ("rms_norm", rms_norm, reference.rms_norm),
        ("layer_norm", layer_norm, reference.layer_norm),
    ):
        yield Case(
            name,
            [(T, E), (E,), (T, E)],
            lambda x, w, r, impl, f=ours: f(x, w, residual=r, impl=impl),
            lambda x, w, r, f=truth: f(x, w, residual=r),
        )
    for name in ACTIVATIONS:
        yield Case(
            f"activation {name}",
            [(T, 2 * E)],
            lambda x, impl, name=name: activate(x, name, impl=impl),
            partial(reference.activate, activation=name),
        )
    yield Case(
        "dropout",
        [(T, E)],
        lambda x, impl: dropout(x, drop, impl=impl),
        lambda x: reference.dropout(x, drop.p, **key),
    )
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}

    def update(master, grad, m, v, impl):
        state, step = [t.float() for t in (master, m, v.abs())], torch.tensor(6.0, device=device)
        adamw_step(state[0], grad, *state[1:], step=step, **rates, impl=impl)
        return tuple(state)

    def updated(master, grad, m, v):
        wide = reference.compute_dtype(master)
        state = (master.to(wide), grad, m.to(wide), v.abs().to(wide))
        return reference.adamw_step(*state, step=7, **rates)

    yield Case("adamw", [(T * E,)] * 4, update, updated, False)


def _products(device: torch.device, T: int) -> Iterator[Case]:
    K, N, heads, D = 2 * T + 1, T + 6, 2, 10
    yield Case(
        "gemm", [(T, K), (K, N), (N,)], gemm, lambda a, b, c: reference.fused_gemm(a, b, c), False
    )
    yield Case(
        "gemm with an epilogue",
        [(T, K), (K, N), (N,), (T, N)],
        lambda a, b, c, r, impl: fused_gemm(a, b, c, activation="gelu", residual=r, impl=impl)[0],
        lambda a, b, c, r: reference.fused_gemm(a, b, c, activation="gelu", residual=r),
        False,
    )
    for name, units in (("swiglu", (N, 2)), ("gelu", (N,))):
        yield Case(
            f"mlp {name}",
            [(T, K), (*units, K), (K, N)],
            partial(mlp, activation=name),
            partial(reference.mlp, activation=name),
        )
    cos, sin = rope_table(torch.arange(T, device=device), D)
    yield Case(
        "qkv and rope",
        [(1, T, K), (heads, 4, D, K), (heads, 4, D)],
        lambda x, w, b, impl: qkv_rope(x, w, b, cos, sin, impl=impl),
        lambda x, w, b: reference.qkv_rope(x, w, b, cos, sin),
    )
    yield Case(
        "rope",
        [(1, T, heads, D)],
        lambda x, impl: apply_rope(x, cos, sin, impl=impl),
        lambda x: reference.apply_rope(x, cos, sin),
    )


def _attention(device: torch.device, T: int) -> Iterator[Case]:
    documents = torch.tensor([0, T // 3, T // 3, T], device=device)
    for name, D, options in (
        ("causal", 64, {}),
        ("of documents, with a window", 40, {"documents": documents, "window": T // 4}),
        ("softcap, dropout, all to all", 59, {"softcap": 5.0, "dropout": 0.2, "causal": False}),
    ):
        shapes = [(1, T, 2, D), (1, T, 1, D), (1, T, 1, D)]
        ours = partial(attention, return_lse=True, **options)
        yield Case(f"attention {name}", shapes, ours, partial(reference.attention, **options))


def _losses(device: torch.device, T: int) -> Iterator[Case]:
    V, E = 4 * T + 3, T + 4
    labels = torch.arange(T, device=device) * 5 % V
    labels[::4] = -100
    options = {"label_smoothing": 0.1, "z_loss": 0.01}
    ours = {"reduction": "none", **options}
    yield Case(
        "cross entropy",
        [(T, V)],
        lambda z, impl: cross_entropy(z, labels, impl=impl, **ours),
        lambda z: reference.cross_entropy(z, labels, **options),
    )
    yield Case(
        "linear cross entropy",
        [(T, E), (V, E)],
        lambda x, w, impl: linear_cross_entropy(x, w, labels, impl=impl, **ours),
        lambda x, w: reference.linear_cross_entropy(x, w, labels, **options),
    )


def _overlap(M: int) -> Iterator[Case]:
    """Products that hold their messages, of virtual ranks on one device: a[rank], the same b."""

    def on_ranks(steps, a, b) -> list[Any]:
        size = a.numel() * 8 + RANKS * M * b.shape[1] * 8
        memories = local_memory(RANKS, slots=4 * M, capacity=size, device=a.device)
        return run_local([steps(x, b, memory, Epilogue()) for x, memory in zip(a, memories)])

    def gathered(a, b, impl):
        return tuple(y for y, *_ in on_ranks(all_gather_gemm_steps, a, b))

    def summed(steps, a, b, impl):
        return tuple(on_ranks(steps, a, b))

    K, N = 5 * M, 3 * M + 1
    few, many = [(RANKS, M, K), (K, N)], [(RANKS, RANKS * M, K), (K, N)]
    yield Case(
        "all-gather -> gemm", few, gathered, lambda a, b: (a.flatten(0, 1) @ b,) * RANKS, False
    )
    yield Case(
        "gemm -> reduce-scatter",
        many,
        partial(summed, gemm_reduce_scatter_steps),
        lambda a, b: _sum_of_products(a, b).chunk(RANKS),
        False,
    )
    yield Case(
        "gemm -> all-reduce",
        many,
        partial(summed, gemm_all_reduce_steps),
        lambda a, b: (_sum_of_products(a, b),) * RANKS,
        False,
    )


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """sum over ranks of a[rank] b, accumulated as wide as an op is (`compute_dtype`)."""
    wide = reference.compute_dtype(a)
    return (a.to(wide) @ b.to(wide)).sum(0).to(a.dtype)


def _measure(case: Case, dtype: torch.dtype, device: torch.device, impl: str) -> Measured:
    """The worst of a case's outputs and gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...] | torch.Size) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) / 2

    inputs = [draw(shape).to(device, dtype) for shape in case.shapes]
    cotangents: list[Tensor] = []

    def outputs(function: Callable[..., Any], tensors: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(case.differentiable) for x in tensors]
        found = function(*leaves)
        found = list(found) if isinstance(found, tuple) else [found]
        if not case.differentiable:
            return found
        if not cotangents:
            cotangents.extend(draw(x.shape).to(device) for x in found)
        given = [dy.to(x.dtype) for x, dy in zip(found, cotangents, strict=True)]
        return [x.detach() for x in found] + list(torch.autograd.grad(found, leaves, given))

    truth = outputs(case.truth, [x.double() for x in inputs])
    plain, ours = outputs(case.truth, inputs), outputs(partial(case.ours, impl=impl), inputs)
    count = len(truth) - (len(inputs) if case.differentiable else 0)
    names = [f"output {i + 1}" for i in range(count)]
    names += [f"gradient {i + 1}" for i in range(len(truth) - count)]
    found = zip(ours, plain, truth, strict=True)
    return worst({name: within_budget(*of) for name, of in zip(names, found, strict=True)})
