"""Kernels given plain tensors next to DTensors. A plain parameter counts as replicated, in a
declared model every plain tensor does, and anything else is rejected by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from close import assert_close_f64
from every_rank import every_rank
from ranks import run_ranks
from torch import Tensor, nn

from warpweave.kernels.attention import attention
from warpweave.kernels.cross_entropy import cross_entropy, linear_cross_entropy
from warpweave.kernels.dropout import Drop
from warpweave.kernels.mlp import gelu_mlp, mlp, swiglu_mlp
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.rope import apply_rope, apply_rope_qk


def _draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def _dropped(x: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return rms_norm(x, weight, drop=Drop(0.5, 3, 1, tokens))[0]  # a plain tensor in a record


X, HEADS, LABELS = _draw(4, 6, 8), _draw(2, 6, 4, 8), torch.tensor([3, 1, -100, 0, 9, 2])
TABLE, _IDS = _draw(6, 4), torch.arange(24).view(4, 6) % 11 - 1
# name -> the operator, its activation, and the other tensors, which are plain
ROWS: dict[str, tuple[Callable[..., Any], Tensor, tuple[Tensor, ...]]] = {
    "rms_norm": (rms_norm, X, (_draw(8),)),
    "rms_norm with dropout": (_dropped, X, (_draw(8), torch.arange(24).view(4, 6))),
    "layer_norm": (layer_norm, X, (_draw(8), _draw(1, 8)[0])),
    "gelu_mlp": (gelu_mlp, X, (_draw(12, 8), _draw(8, 12))),
    "swiglu_mlp": (swiglu_mlp, X, (_draw(12, 2, 8), _draw(8, 12))),
    "attention": (
        lambda q, sinks: attention(q, q, q, sinks=sinks, causal=False), HEADS, (_draw(4),)
    ),
    "cross_entropy": (cross_entropy, _draw(6, 10), (LABELS,)),
    "linear_cross_entropy": (
        partial(linear_cross_entropy, ignore_index=-1), X, (_draw(10, 8), _IDS)
    ),
    "linear_cross_entropy of each": (
        partial(linear_cross_entropy, ignore_index=-1, reduction="none"), X, (_draw(10, 8), _IDS)
    ),
    "linear_cross_entropy of odd tokens": (
        partial(linear_cross_entropy, reduction="sum"), X[:3, 0], (_draw(10, 8), LABELS[3:])
    ),
    "apply_rope": (apply_rope, HEADS, (TABLE, TABLE.cos())),
    "apply_rope_qk": (lambda x, *t: apply_rope_qk(x, x, *t)[1], HEADS, (TABLE, TABLE.cos())),
}  # fmt: skip
# name -> a call with x as a DTensor, and the message that rejects it
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "x": (lambda x: rms_norm(X, x[0, 0]),
          "rms_norm got a plain tensor for x together with a DTensor; pass x as a DTensor"),
    "residual": (lambda x: layer_norm(x, _draw(8), residual=X),
                 "layer_norm got a plain tensor for residual together"),
    "mlp": (lambda x: mlp(X, x[0, :, :], _draw(8, 6), activation="gelu"),
            "mlp got a plain tensor for x together"),
    "keys": (lambda x: attention(x[None], X[None], X[None]),
             "attention got a plain tensor for k together"),
    "logits": (lambda x: cross_entropy(X[0], x[0, :, 0].long()),
               "cross_entropy got a plain tensor for logits together"),
    "hidden states": (lambda x: linear_cross_entropy(X, x[0], _IDS),
                      "linear_cross_entropy got a plain tensor for x together"),
}  # fmt: skip


class _Calls(nn.Module):
    def __init__(self, operator: Callable[..., Any]) -> None:
        super().__init__()
        self.operator = operator

    def forward(self, *given: Tensor) -> Any:
        return self.operator(*given)


def _leaf(x: Tensor, name: str, first: bool) -> Tensor:
    return (
        x.detach().clone().requires_grad_(x.is_floating_point() and (first or "rope" not in name))
    )


@every_rank(2, run_ranks)
def test_plain_parameters_next_to_dtensors_are_replicated_or_refused(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from warpweave.layers.sharding.declare import shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("a",))
    for name, (operator, x, others) in ROWS.items():
        plain = [_leaf(t, name, i == 0) for i, t in enumerate((x, *others))]
        expected = operator(*plain)
        expected.square().sum().backward()
        for d in range(x.ndim):
            for declared in (False, True):
                ours = [_leaf(t, name, False) for t in (x, *others)]
                ours[0] = _leaf(distribute_tensor(x, mesh, [Shard(d)]), name, True)
                run = shard(_Calls(operator), {}, mesh) if declared else operator
                found = run(*ours)
                found.square().sum().backward()
                assert_close_f64(found.full_tensor().detach(), expected.detach(), 1e-12)
                assert_close_f64(ours[0].grad.full_tensor(), plain[0].grad, 1e-12)
                for t, truth in zip(ours[1:], plain[1:], strict=True):
                    if truth.grad is not None:
                        assert_close_f64(t.grad, truth.grad, 1e-12)
    x = distribute_tensor(X, mesh, [Shard(0)])
    for call, words in REFUSED.values():
        with pytest.raises(ValueError, match=re.escape(words)):
            call(x)
    weight = distribute_tensor(_draw(8), mesh, [Shard(0)])  # in a declared model, also a plain x
    found = shard(_Calls(rms_norm), {}, mesh)(X, weight)
    assert_close_f64(found.full_tensor(), rms_norm(X, _draw(8)), 1e-13)
