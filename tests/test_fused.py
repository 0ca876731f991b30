"""Layers whose data moves within their products, again and again over one workspace: both halves of
a block equal plain torch on ranks that cut the tokens, with the same bits on every repeat."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from close import relative_error
from ranks import run_ranks
from sharded import draw, part

from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.rope import apply_rope, rope_table
from warpweave.parallel.collectives import reduce_from
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import row_parallel_linear
from warpweave.parallel.tensor.mlp import parallel_mlp
from warpweave.parallel.tensor.qkv import parallel_qkv_rope

ROUNDS = 8
E, D, G, ROWS = 11, 6, 2, 5  # odd sizes; 5 tokens on each rank
DTYPES = (torch.float64, torch.float32, torch.float16)


def _mlp(x, up, down, up_bias, down_bias, drop=None, **ranks):
    if ranks:
        return parallel_mlp(
            x, up, down, up_bias, down_bias, activation="swiglu", residual=x, drop=drop,
            impl="triton", **ranks,
        )  # fmt: skip
    gate, value = (F.linear(x, up[:, i], up_bias[:, i]) for i in (0, 1))
    y = F.linear(F.silu(gate) * value, down, down_bias)
    return x + dropout(y, drop, impl="torch")


def _attention(x, qkv, out, qkv_bias, out_bias, drop=None, **ranks):
    tokens = len(x) * (dist.get_world_size() if ranks else 1)
    cos, sin = rope_table(torch.arange(tokens), D, dtype=torch.float64)
    if x.dtype != torch.float64:
        cos, sin = cos.float(), sin.float()
    if ranks:
        options = {"shape": (1, tokens), "impl": "triton"}
        q, k, v = parallel_qkv_rope(x, qkv, qkv_bias, cos, sin, **options, **ranks)
    else:
        z = torch.einsum("te,kgde->tkgd", x, qkv) + qkv_bias
        q, k, v = z[None, :, :, :G].flatten(2, 3), z[None, :, :, G], z[None, :, :, G + 1]
        q, k = (apply_rope(t, cos, sin, impl="torch") for t in (q, k))
    k, v = (t.repeat_interleave(G, 2) for t in (k, v))
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    o = o.transpose(1, 2).flatten(2)[0]
    return row_parallel_linear(o, out, out_bias, **ranks) if ranks else F.linear(o, out, out_bias)


def _problem(half, world: int, seed: int) -> tuple[list[torch.Tensor], list[int | None]]:
    """x and the four parameters in float64, and the dim of each that is cut over the ranks."""
    width = 3 * world
    shapes = {
        _mlp: [(width, 2, E), (E, width), (width, 2), (E,)],
        _attention: [(world, G + 2, D, E), (E, world * G * D), (world, G + 2, D), (E,)],
    }[half]
    drawn = [draw(seed + i, *shape) / 2 for i, shape in enumerate([(world * ROWS, E), *shapes])]
    return drawn, [0, 0, 1, 0, None]


def _results(half, tensors, dy, **options) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    y = half(*leaves, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _rounds(rank: int, half) -> None:
    world, kept = dist.get_world_size(), {}
    ranks = {"group": dist.group.WORLD, "sequence_parallel": True, "overlap": "fused"}
    ranks["workspace"] = Workspace(dist.group.WORLD)
    tokens = torch.arange(world * ROWS) + 2**33
    for i in range(ROUNDS):
        seed, dtype = i % (ROUNDS // 2), DTYPES[i % (ROUNDS // 2) % 3]
        whole, cuts = _problem(half, world, 10 * seed)
        dy = draw(10 * seed + 9, *whole[0].shape)
        drop = Drop(0.2, seed, 1, tokens)
        truth = _results(half, whole, dy, drop=drop)
        low, low_dy = [t.to(dtype) for t in whole], dy.to(dtype)
        mine = [part(t, cut) for t, cut in zip(low, cuts)]
        drop = drop._replace(tokens=part(tokens, 0))
        found = _results(half, mine, part(low_dy, 0), drop=drop, **ranks)
        again = kept.setdefault(seed, found)
        assert all(torch.equal(a, b) for a, b in zip(found, again)), "other bits on a repeat"
        # documented: the bias gradient of each rank's own tokens, the caller sums
        found = [*found[:-1], reduce_from(found[-1].double(), dist.group.WORLD)]
        if dtype == torch.float16:
            plain = _results(half, low, low_dy, drop=drop._replace(tokens=tokens))
        for j, (t, right, cut) in enumerate(zip(found, truth, [0, *cuts], strict=True)):
            error = relative_error(t, part(right, cut))
            if dtype == torch.float16:
                bound = 2 * relative_error(plain[j], right) + torch.finfo(dtype).eps
            else:
                bound = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
            assert error <= bound, (i, j, dtype, error, bound)


@pytest.mark.parametrize("half", [_mlp, _attention])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_halves_of_a_block_equal_plain_torch_round_after_round(world, half):
    run_ranks(world, _rounds, half)
