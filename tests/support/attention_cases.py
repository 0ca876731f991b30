"""Inputs of the attention tests and their comparison with the reference."""

import math

import torch
from close import assert_close_f64
from torch import Tensor

from warpweave.kernels import reference
from warpweave.kernels.attention import attention, launch
from warpweave.kernels.runtime import tiles

F64 = torch.float64
ZIGZAG = ((10, 20), (70, 17))  # 37 rows
STRIPED = ((2, 37, 4),)


def draw(B=1, Sq=37, Sk=37, Hq=2, Hkv=1, D=16, dtype=F64) -> list[Tensor]:
    """Draw q, k and v that require gradients."""
    shapes = ((B, Sq, Hq, D), (B, Sk, Hkv, D), (B, Sk, Hkv, D))
    return [torch.randn(s, dtype=F64).to(dtype).requires_grad_() for s in shapes]


def tiles_of(monkeypatch, arch: int) -> None:
    """Use the tiles of a device of capability `arch` from now on."""
    monkeypatch.setattr(tiles, "INTERPRET", False)
    for module in (tiles, launch):
        monkeypatch.setattr(module, "capability", lambda device: arch)


def with_grads(fn, qkv, do, dlse=None, *, sinks=None, **options) -> tuple[Tensor, ...]:
    """Return (o, lse, dq, dk, dv[, dsinks]) of sum(o do) + sum(lse dlse over rows with a key)."""
    more = {} if sinks is None else {"sinks": sinks}
    o, lse = fn(*qkv, **options, **more)
    loss = (o * do).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse.isneginf(), 0.0) * dlse).sum()
    return o, lse, *torch.autograd.grad(loss, [*qkv, *more.values()])


def rounding_bounds(qkv, do, *, softcap=None, sinks=None, **mask) -> list[Tensor]:
    """Bound the error of causal (o, lse, dq, dk, dv[, dsinks]) against the float64 reference, per
    element.

    The bounds follow from float64 and the dtype alone, for any kernel on any machine. To first
    order, with w and u half an ulp of float32 and of the dtype: the error of a score is w times the
    size of its products and the root of their number (Higham and Mary 2019, SIAM J. Sci. Comput.
    41). The error of its weight is that plus the error of lse. p, ds and the results are rounded to
    the dtype. A value that underflows in float32 may be 0.
    """
    q, k, v, do = (x.detach().double().transpose(1, 2) for x in (*qkv, do))
    (*_, S, D), group, scale = q.shape, q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    u, single = torch.finfo(qkv[0].dtype).eps / 2, torch.finfo(torch.float32)
    w, least = single.eps / 2, single.tiny
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s, off = scale * q @ k.mT, scale * q.abs() @ k.abs().mT
    capped = s if softcap is None else softcap * (s / softcap).tanh()
    slope = 1 if softcap is None else 1 - (capped / softcap) ** 2
    off = w * (math.sqrt(D) * off + s.abs() + 2)
    seen = reference.visible(torch.arange(S), torch.arange(S), causal=True, **mask)
    logits = s = capped.masked_fill(~seen, -math.inf)
    if sinks is not None:
        sink = sinks.detach().double()[:, None, None].expand(*s.shape[:3], 1)
        logits = torch.cat((s, sink), -1)
    lse = logits.logsumexp(-1, keepdim=True)
    p = (s - lse).exp()
    off_lse = (p * off).sum(-1, keepdim=True) + w * (lse.abs() + 2)
    off_p = p * (off + off_lse + u) + least
    o = p @ v
    off_o = off_p @ v.abs() + u * o.abs()
    dp, delta = do @ v.mT, (o * do).sum(-1, keepdim=True)
    off_delta = (off_o * do.abs()).sum(-1, keepdim=True)
    ds = scale * slope * p * (dp - delta)
    off_ds = ds.abs() * (off + off_lse + u)
    off_ds += scale * p * (w * math.sqrt(D) * do.abs() @ v.abs().mT + off_delta) + least
    dkdv = (ds.mT @ q, off_ds.mT @ q.abs()), (p.mT @ do, off_p.mT @ do.abs())
    results = [
        (o, off_o),
        (ds @ k, off_ds @ k.abs()),
        # the heads of a group may be rounded one by one
        *((x.abs(), off + u * x.abs()) for x, off in dkdv),
    ]
    found = [off + u * x.abs() for x, off in results]
    found[2:] = [x.unflatten(1, (-1, group)).sum(2) for x in found[2:]]
    o, *rest = (x.transpose(1, 2) for x in found)
    bounds = [o, off_lse.squeeze(-1) + u, *rest]
    if sinks is not None:
        share = (sink - lse).exp()
        dsinks = share * ((off_lse + u) * delta.abs() + off_delta)
        bounds.append(dsinks.sum((0, 2, 3)) + u * (share * delta).sum((0, 2, 3)).abs())
    return bounds


def assert_within(actual: Tensor, truth: Tensor, bound: Tensor) -> None:
    """Assert |actual - truth| <= bound, element by element."""
    excess = ((actual.double() - truth).abs() / bound).max().item()
    assert excess <= 1, f"{excess:.2f} times the rounding bound"


def check_roundings(impl, low, do, *, sinks=None, **options) -> tuple[tuple, tuple, list[Tensor]]:
    """Assert that results err no more than their roundings; return them, the truth and bounds."""
    exact = [x.detach().double().requires_grad_() for x in low]
    wide = None if sinks is None else sinks.detach().double().requires_grad_()
    truth = with_grads(reference.attention, exact, do.double(), sinks=wide, **options)
    got = with_grads(attention, low, do, sinks=sinks, **options, return_lse=True, impl=impl)
    bounds = rounding_bounds(low, do, sinks=sinks, **options)
    for i, (g, t, bound) in enumerate(zip(got, truth, bounds, strict=True)):
        assert g.dtype == (torch.float32 if i == 1 else low[0].dtype)
        assert_within(g, t, bound)
    return got, truth, bounds


def check(impl, sizes, with_dlse=True, **options) -> tuple[Tensor, ...]:
    """Assert that outputs and gradients equal the reference, and return them."""
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
