"""Calls of each kernel family, paired with the same calls of `reference`, at odd shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

RANKS = 3  # virtual ranks on one device


class Case(NamedTuple):
    """`ours` (called with an additional impl) and `truth`, on float tensors of these shapes."""

    name: str
    shapes: list[tuple[int, ...]]
    ours: Callable[..., Any]
    truth: Callable[..., Any]
    differentiable: bool = True


def cases(device: torch.device, T: int) -> list[Case]:
    """Return one or more cases of each family, with T rows."""
    return [*_pointwise(device, T), *_products(device, T), *_attention_cases(device, T),
            *_losses(device, T), *_overlap(T // RANKS)]  # fmt: skip


def _pointwise(device: torch.device, T: int) -> Iterator[Case]:
    E = 2 * T + 1
    for name, ours, truth in (
        ("rms_norm", rms_norm, reference.rms_norm),
        ("layer_norm", layer_norm, reference.layer_norm),
    ):
        yield Case(
            name, [(T, E), (E,), (T, E)],
            lambda x, w, r, impl, f=ours: f(x, w, residual=r, impl=impl),
            lambda x, w, r, f=truth: f(x, w, residual=r),
        )  # fmt: skip
    for name in ACTIVATIONS:
        ours, truth = (partial(f, activation=name) for f in (activate, reference.activate))
        yield Case(f"activation {name}", [(T, 2 * E)], ours, truth)
    p, *key = drop = Drop(0.3, 5, 1, torch.arange(T, device=device) + 2**32)
    named = dict(zip(("seed", "site", "tokens"), key))
    ours, truth = partial(dropout, drop=drop), partial(reference.dropout, p=p, **named)
    yield Case("dropout", [(T, E)], ours, truth)
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.1}

    def state(grad: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
        """Weights and moments, in at least 32 bits."""
        wide = reference.compute_dtype(grad)
        return tuple(x.to(wide, copy=True) for x in (of[0], of[1], of[2].abs()))

    def update(grad: Tensor, *of: Tensor, impl: str) -> tuple[Tensor, ...]:
        master, m, v = state(grad, *of)
        step = torch.tensor(6.0, device=device)
        adamw_step(master, grad, m, v, step=step, **rates, impl=impl)
        return master, m, v

    def updated(grad: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
        master, m, v = state(grad, *of)
        return reference.adamw_step(master, grad, m, v, step=7, **rates)

    yield Case("adamw", [(T * E,)] * 4, update, updated, False)


def _products(device: torch.device, T: int) -> Iterator[Case]:
    K, N, heads, D = 2 * T + 1, T + 6, 2, 10
    yield Case("gemm", [(T, K), (K, N), (N,)], gemm, reference.fused_gemm, False)
    yield Case(
        "gemm with an epilogue", [(T, K), (K, N), (N,), (T, N)],
        lambda *of, impl: fused_gemm(*of[:3], activation="gelu", residual=of[3], impl=impl)[0],
        lambda *of: reference.fused_gemm(*of[:3], activation="gelu", residual=of[3]), False,
    )  # fmt: skip
    for name, units in (("swiglu", (N, 2)), ("gelu", (N,))):
        ours, truth = (partial(f, activation=name) for f in (mlp, reference.mlp))
        yield Case(f"mlp {name}", [(T, K), (*units, K), (K, N)], ours, truth)
    cos, sin = rope_table(torch.arange(T, device=device), D)
    table = {"cos": cos, "sin": sin}
    shapes = [(1, T, K), (heads, 4, D, K), (heads, 4, D)]
    ours, truth = (partial(f, **table) for f in (qkv_rope, reference.qkv_rope))
    yield Case("qkv and rope", shapes, ours, truth)
    ours, truth = (partial(f, **table) for f in (apply_rope, reference.apply_rope))
    yield Case("rope", [(1, T, heads, D)], ours, truth)


def _attention_cases(device: torch.device, T: int) -> Iterator[Case]:
    documents = torch.tensor([0, T // 3, T // 3, T], device=device)
    options: dict[str, tuple[int, dict[str, Any]]] = {
        "causal": (64, {}),
        "of documents, with a window": (40, {"documents": documents, "window": T // 4}),
        "softcap, dropout, all to all": (59, {"softcap": 5.0, "dropout": 0.2, "causal": False}),
    }
    for name, (D, more) in options.items():
        shapes = [(1, T, 2, D), (1, T, 1, D), (1, T, 1, D)]
        ours = partial(attention, return_lse=True, **more)
        yield Case(f"attention {name}", shapes, ours, partial(reference.attention, **more))


def _losses(device: torch.device, T: int) -> Iterator[Case]:
    V, E = 4 * T + 3, T + 4
    labels = torch.arange(T, device=device) * 5 % V
    labels[::4] = -100
    options = {"labels": labels, "label_smoothing": 0.1, "z_loss": 0.01}
    for name, shapes, ours, truth in (
        ("cross entropy", [(T, V)], cross_entropy, reference.cross_entropy),
        ("linear cross entropy", [(T, E), (V, E)], linear_cross_entropy,
         reference.linear_cross_entropy),
    ):  # fmt: skip
        ours, truth = partial(ours, reduction="none", **options), partial(truth, **options)
        yield Case(name, shapes, ours, truth)


def _overlap(M: int) -> Iterator[Case]:
    """Products fused with communication, on virtual ranks of one device: a[rank], the same b."""

    def on_ranks(steps: Callable[..., Any], a: Tensor, b: Tensor) -> tuple[Any, ...]:
        size = 8 * (a.numel() + RANKS * M * b.shape[1])
        memories = local_memory(RANKS, slots=4 * M, capacity=size, device=a.device)
        found = run_local([steps(x, b, memory, Epilogue()) for x, memory in zip(a, memories)])
        return tuple(y[0] if isinstance(y, tuple) else y for y in found)

    def product(a: Tensor, b: Tensor) -> Tensor:
        """a[rank] b in the dtype that an op accumulates in."""
        wide = reference.compute_dtype(a)
        return a.to(wide) @ b.to(wide)

    K, N = 5 * M, 3 * M + 1
    for name, rows, steps, truth in (
        ("all-gather -> gemm", M, all_gather_gemm_steps, lambda y: (y.flatten(0, 1),) * RANKS),
        ("gemm -> reduce-scatter", RANKS * M, gemm_reduce_scatter_steps,
         lambda y: y.sum(0).chunk(RANKS)),
        ("gemm -> all-reduce", RANKS * M, gemm_all_reduce_steps, lambda y: (y.sum(0),) * RANKS),
    ):  # fmt: skip
        yield Case(
            name, [(RANKS, rows, K), (K, N)],
            lambda a, b, impl, steps=steps: on_ranks(steps, a, b),
            lambda a, b, truth=truth: tuple(y.to(a.dtype) for y in truth(product(a, b))), False,
        )  # fmt: skip
