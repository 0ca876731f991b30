"""Our operators on DTensors: for every rule of `kernels/sharding.py`, outputs and gradients of two
ranks equal those of whole tensors, and the outputs have the rule's placement."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import torch
from close import assert_close_f64
from ranks import run_ranks
from torch import Tensor

from warpweave.kernels import activation, dropout, rope
from warpweave.kernels.attention import function as attention
from warpweave.kernels.attention import visible
from warpweave.kernels.cross_entropy import function as cross_entropy
from warpweave.kernels.norm import function as norm


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def cases() -> dict[str, tuple[Callable, list, list, list]]:
    """Return name -> (function, its arguments, the sharded dim of each or None, the outputs')."""
    tokens = torch.arange(6) * 7
    rows = torch.arange(24).view(4, 6) * 5
    x, w, b, r = draw(4, 6, 5), draw(5), draw(5), draw(4, 6, 5)
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 2, 8), draw(2, 3, 2, 8)
    each, sinks = torch.tensor([[0, 1, 3], [0, 3, 3]]), draw(4)
    apart, table = torch.stack((each, each.flip(0)), 1), visible.packed(each, 3).table
    cos, sin = draw(4, 4), draw(4, 4)
    z, labels = draw(6, 7), torch.tensor([0, 6, -100, 3, 2, 1])

    def rms(x, w, r=None):
        return norm.rms_norm(x, w, residual=r, impl="triton")

    def plain_rms(x, w, r=None):
        return norm.rms_norm(x, w, residual=r, impl="torch")

    def plain_layer(x, w, b=None):
        return norm.layer_norm(x, w, b, impl="torch")

    def layer(x, w, b=None, r=None):
        return norm.layer_norm(x, w, b, residual=r, impl="triton")

    def attend(q, k, v):
        return attention.attention(q, k, v, return_lse=True, impl="torch")

    def attend_only(q, k, v):
        return attention.attention(q, k, v, impl="torch")

    def attend_packed(q, k, v, documents, sinks, dropout=0.0):
        given = {"documents": documents, "sinks": sinks, "dropout": dropout}
        return attention.attention(q, k, v, window=3, **given, impl="torch")

    def attend_table(q, k, v, boundaries, table):
        documents = visible.Packed(boundaries, table)
        return attention.attention(q, k, v, documents=documents, return_lse=True, impl="triton")

    def rotate(x, cos, sin):
        return rope.apply_rope(x, cos.detach(), sin.detach(), impl="triton")

    def rotate_pair(q, k, cos, sin):
        table = cos.detach(), sin.detach()
        return rope.apply_rope_qk(q, k, *table, interleaved=True, impl="triton")

    def chain(x, w, b, r, x_bias, rows):
        drop = dropout.Drop(0.5, 3, 1, rows)
        return norm.layer_norm(x, w, b, residual=r, x_bias=x_bias, drop=drop, impl="triton")

    def drop(x, tokens, impl="triton"):
        return dropout.dropout(x, dropout.Drop(0.5, 3, 1, tokens), impl=impl)

    def loss(z, labels, smoothing=0.0):
        how = {"label_smoothing": smoothing, "reduction": "none", "impl": "torch"}
        return cross_entropy.cross_entropy(z, labels, **how)

    t = draw(2, 4, 2, 8)
    return {
        "rms_norm rows": (rms, [x, w], [0, None], [0]),
        "rms_norm dim 1, residual": (rms, [x, w, r], [1, None, 1], [1, 1]),
        "layer_norm rows": (layer, [x, w, b], [0, None, None], [0]),
        "layer_norm dim 1, no bias, residual": (
            lambda x, w, r: layer(x, w, None, r), [x, w, r], [1, None, 1], [1, 1],
        ),
        "norm whole": (layer, [x, w, b, r], [None] * 4, [None, None]),
        "attention batch": (attend, [q, k, v], [0, 0, 0], [0, 0]),
        "attention heads": (attend, [q, k, v], [2, 2, 2], [2, 1]),
        "attention heads, no lse": (attend_only, [q, k, v], [2, 2, 2], [2]),
        "attention batch, documents, sinks": (attend_packed, [q, k, v, each, sinks],
                                              [0, 0, 0, 0, None], [0]),
        "attention batch, shared documents": (attend_packed, [q, k, v, each[0], sinks],
                                              [0, 0, 0, None, None], [0]),
        "attention heads, documents, sinks": (attend_packed, [q, k, v, each, sinks],
                                              [2, 2, 2, None, 0], [2]),
        "attention batch, keys apart": (attend_packed, [q, k, v, apart, sinks],
                                        [0, 0, 0, 0, None], [0]),
        "attention batch, a table": (attend_table, [q, k, v, each, table], [0, 0, 0, 0, 0], [0, 0]),
        "attention batch, a table of all": (
            attend_table, [q, k, v, each[0], table[:1]], [0, 0, 0, None, None], [0, 0],
        ),
        "attention with dropout": (
            lambda *a: attend_packed(*a, 0.5), [q, k, v, each, sinks], [2, 2, 2, None, 0], [None],
        ),
        "attention batch with dropout": (
            lambda *a: attend_packed(*a, 0.5), [q, k, v, each, sinks], [0, 0, 0, 0, None], [None],
        ),
        "rope batch": (rotate, [t, cos, sin], [0, None, None], [0]),
        "rope sequence": (rotate, [t, cos, sin], [1, 0, 0], [1]),
        "rope heads": (rotate, [t, cos, sin], [2, None, None], [2]),
        "rope pair heads": (rotate_pair, [t, t + 1, cos, sin], [2, 2, None, None], [2, 2]),
        "rope pair sequence": (rotate_pair, [t, t + 1, cos, sin], [1, 1, 0, 0], [1, 1]),
        "norm chain": (chain, [x, w, b, r, w + 1, rows], [1, None, None, 1, None, 1], [1, 1]),
        "norm chain, float32": (
            lambda *a: chain(a[0].float(), *a[1:]), [x, w, b, r, w, rows],
            [0, None, None, 0, None, 0], [0, 0],
        ),
        "norm of a float32 x beside a wider stream": (
            lambda x, w, r: rms(x.float(), w, r), [x, w, r], [0, None, 0], [0, 0],
        ),
        "norm after a bias alone": (
            lambda x, w, b: norm.rms_norm(x, w, x_bias=b, impl="triton"), [x, w, b],
            [1, None, None], [1, 1],
        ),
        "norm after dropout alone": (
            lambda x, w, rows: norm.layer_norm(
                x, w, drop=dropout.Drop(0.5, 3, 1, rows), impl="triton"
            ), [x, w, rows], [1, None, 1], [1, 1],
        ),
        "rms_norm features": (rms, [x, w], [2, None], [None]),
        "rms_norm features, torch": (plain_rms, [x, w], [2, None], [None]),
        "rms_norm features and weight, torch": (plain_rms, [x, w, r], [2, 0, 2], [None, None]),
        "rms_norm rows, torch": (plain_rms, [x, w, r], [0, None, 0], [0, 0]),
        "layer_norm features, torch": (plain_layer, [x, w, b], [2, 0, 0], [None]),
        "gelu last": (lambda x: activation.activate(x, "gelu", impl="triton"), [r.mT], [2], [2]),
        "swiglu rows": (lambda x: activation.activate(x, "swiglu", impl="triton"), [t], [0], [0]),
        "swiglu pairs": (lambda x: activation.activate(x, "swiglu", impl="triton"), [t], [3], [3]),
        "dropout tokens": (drop, [z, tokens], [0, 0], [0]),
        "dropout tokens, torch": (lambda *a: drop(*a, impl="torch"), [z, tokens], [0, 0], [0]),
        "cross_entropy rows": (loss, [z, labels], [0, 0], [0]),
        "cross_entropy rows, smoothing": (lambda *a: loss(*a, 0.1), [z, labels], [0, 0], [0]),
    }  # fmt: skip


def check(rank: int, broken: bool = False) -> list[str]:
    """Run every case; return the names of those that failed, with the error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from warpweave.kernels import sharding

    chosen = cases()
    if broken:  # dims that must be whole, sharded as if each rank could compute its part alone
        sharding.rope_op.sharding = "___d, _d, _d -> ___d"
        sharding.attention_op.sharding = "_s__, _s__, _s__, _, _, , _ -> _s__, __s"
        rotate, rope_args, *_ = chosen["rope heads"]
        attend, qkv, *_ = chosen["attention heads"]
        chosen = {
            "rope head_dim": (rotate, rope_args, [3, 1, 1], [3]),
            "attention sequence": (attend, qkv, [1, 1, 1], [1, 2]),
        }
    sharding.register_shardings()
    mesh = init_device_mesh("cpu", (2,))

    def where(dim: int | None):
        return [Replicate()] if dim is None else [Shard(dim)]

    wrong = []
    for name, (function, args, dims, out_dims) in chosen.items():
        whole = [a.clone().requires_grad_(a.is_floating_point()) for a in args]
        parts = [
            distribute_tensor(a, mesh, where(d)).requires_grad_(a.is_floating_point())
            for a, d in zip(args, dims, strict=True)
        ]
        try:
            expected, actual = function(*whole), function(*parts)
            if isinstance(expected, Tensor):
                expected, actual = (expected,), (actual,)
            placed = [list(y.placements) for y in actual]
            assert placed == [where(d) for d in out_dims], placed
            grads = [torch.randn_like(y) for y in expected]
            torch.autograd.backward(expected, grads)
            of = [distribute_tensor(g, mesh, where(d)) for g, d in zip(grads, out_dims)]
            torch.autograd.backward(actual, of)
            for y, truth in zip(actual, expected, strict=True):
                assert_close_f64(y.full_tensor().detach(), truth.detach(), 1e-12)
            for a, truth in zip(parts, whole, strict=True):
                if truth.grad is not None:
                    assert_close_f64(a.grad.full_tensor(), truth.grad, 1e-12)
        except (AssertionError, RuntimeError, ValueError) as error:
            wrong.append(f"{name}: {type(error).__name__} {error}"[:500])
    return wrong


def test_every_rule_describes_what_the_operator_computes() -> None:
    for wrong in run_ranks(2, check):
        assert wrong == []


def test_a_wrong_rule_is_seen() -> None:
    for wrong in run_ranks(2, check, True):
        assert len(wrong) == 2
        assert all("relative error" in line for line in wrong), wrong


def test_dtensor_and_the_type_checker_are_not_imported_without_need() -> None:
    code = (
        "import sys, warpweave.model.gpt, warpweave.model.engine; "
        "assert not {'torch.distributed.tensor', 'spmd_types'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=800)
