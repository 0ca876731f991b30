"""Inputs and the comparison with the reference that the tests of attention share."""

import torch
from close import assert_close_f64
from torch import Tensor

from warpweave.kernels import attention_tiles, reference, tiles
from warpweave.kernels.attention import attention

F64 = torch.float64
ZIGZAG = ((10, 20), (70, 17))  # 37 rows
STRIPED = ((2, 37, 4),)


def draw(B=1, Sq=37, Sk=37, Hq=2, Hkv=1, D=16, dtype=F64) -> list[Tensor]:
    """q, k and v that require gradients."""
    shapes = ((B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, D))
    return [torch.randn(s, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def tiles_of(monkeypatch, arch: int) -> None:
    """From here on the tiles are those of a device of capability `arch`."""
    for module in (tiles, attention_tiles):
        monkeypatch.setattr(module, "INTERPRET", False)
        monkeypatch.setattr(module, "capability", lambda device: arch)


def with_grads(fn, qkv, do, dlse=None, *, sinks=None, **options) -> tuple[Tensor, ...]:
    """(o, lse, dq, dk, dv[, dsinks]) of sum(o do) + sum(lse dlse over rows that see a key)."""
    more = {} if sinks is None else {"sinks": sinks}
    o, lse = fn(*qkv, **options, **more)
    loss = (o * do).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0.0) * dlse).sum()
    return o, lse, *torch.autograd.grad(loss, [*qkv, *more.values()])


def check(impl, sizes, with_dlse=True, **options) -> tuple[Tensor, ...]:
    """Assert that outputs and gradients are the reference's; return them."""
    qkv = draw(**sizes)
    do, dlse = torch.randn_like(qkv[0]), None
    if with_dlse:
        dlse = torch.randn(do.shape[0], do.shape[2], do.shape[1], dtype=F64)
    want = with_grads(reference.attention, qkv, do, dlse, **options)
    got = with_grads(attention, qkv, do, dlse, **options, return_lse=True, impl=impl)
    for g, w in zip(got, want, strict=True):
        assert not g.isnan().any()
        assert_close_f64(g, w, 1e-12)
    return got
