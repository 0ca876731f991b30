"""What the tensors of an attention call must be: asked once, where the call comes in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import check_written, choose
from warpweave.kernels.runtime.dtypes import FLOATS
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM


def heads_per_kv_head(heads: int, kv_heads: int) -> int:
    """How many query heads each KV head serves; ValueError unless they divide evenly."""
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} query heads do not divide by {kv_heads} KV heads")
    return heads // kv_heads


def check_are_tensors(q: object, k: object, v: object) -> None:
    """Raise ValueError on what is no tensor: torch's own message is a schema."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {x!r}")


def check_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
) -> None:
    """Raise ValueError on shapes, heads, head dims, dtypes or devices that do not fit together."""
    check_are_tensors(q, k, v)
    choose("torch", q, k, v, sinks)  # one device; beside meta tensors nothing would run
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got shape {tuple(x.shape)}")
    (B, _, Hq, D), Hkv = q.shape, k.shape[2]
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"k and v must have one shape [{B}, Sk, Hkv, {D}] for q {tuple(q.shape)}, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    heads_per_kv_head(Hq, Hkv)
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in 1..{MAX_HEAD_DIM}, got {D}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in FLOATS:
        raise ValueError(
            f"q, k, v must have one floating dtype of at least 16 bits, got {q.dtype}, {k.dtype}, "
            f"{v.dtype}"
        )
    if sinks is not None and (sinks.shape != q.shape[2:3] or not sinks.is_floating_point()):
        raise ValueError(
            f"sinks must be floating of shape ({Hq},), got {sinks.dtype} {tuple(sinks.shape)}"
        )


def check_dtype(name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError on a dtype that attention does not compute in."""
    if dtype is not None and dtype not in FLOATS:
        raise ValueError(f"{name} must be a floating dtype of at least 16 bits, got {dtype}")


# ---------------------------------------------------------------- halves


def check_row_sums(
    q: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    o: torch.Tensor | None,
) -> None:
    """Raise ValueError unless do and o are shaped like q and lse and delta [B, Hq, Sq]."""
    choose("torch", q, do, lse, delta, o)
    for name, x in (("do", do), ("o", o)):
        if x is not None and x.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(x.shape)}")
    B, S, H, _ = q.shape
    for name, x in (("lse", lse), ("delta", delta)):
        if x is not None and (x.shape != (B, H, S) or x.dtype != compute_dtype(q)):
            raise ValueError(
                f"{name} must be {compute_dtype(q)} of shape {(B, H, S)}, "
                f"got {x.dtype} {tuple(x.shape)}"
            )
    if delta is None and o is None:
        raise ValueError("attention_bwd needs delta or o, got neither")


def check_carried(
    q: torch.Tensor,
    sinks: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    into: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Raise ValueError unless `into` is None or an (o, lse) of q's rows that can go on in place."""
    if into is None:
        return
    if isinstance(into, torch.Tensor) or len(into) != 2:
        raise ValueError(f"into must be (o, lse), got {type(into).__name__} of {len(into)}")
    if sinks is not None or out_dtype is not None:
        raise ValueError("with into, start lse from the sinks instead, and give no out_dtype")
    o, lse = into
    choose("torch", q, o, lse)
    _check_into("o", o, q)
    B, S, H, _ = q.shape
    if lse.shape != (B, H, S) or lse.dtype != compute_dtype(q) or not lse.is_contiguous():
        raise ValueError(
            f"lse to add to must be contiguous {compute_dtype(q)} of shape {(B, H, S)}, "
            f"got {lse.dtype} {tuple(lse.shape)} of strides {lse.stride()}"
        )


def check_carried_gradients(
    into: Sequence[torch.Tensor | None], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Raise ValueError unless each of `into` = (dq, dk, dv) is None or can be added to."""
    if (into[1] is None) != (into[2] is None):
        raise ValueError("into must have both dk and dv or neither")
    choose("torch", q, *into)
    for name, x, like in zip(("dq", "dk", "dv"), into, (q, k, v)):
        if x is not None:
            _check_into(name, x, like)


def _check_into(name: str, into: torch.Tensor, like: torch.Tensor) -> None:
    """Raise ValueError unless `into`, which a kernel adds to, has the shape of `like`, the dtype to
    compute in and stride 1 in the last dim."""
    dtype = compute_dtype(like)
    check_written(name, into)
    fits = into.shape == like.shape and into.dtype == dtype
    if not fits or (into.numel() and into.stride(-1) != 1) or into.requires_grad:
        raise ValueError(
            f"{name} to add to must be {dtype} of shape {tuple(like.shape)} with stride 1 in the "
            f"last dim and no gradient, got {into.dtype} {tuple(into.shape)} of strides "
            f"{into.stride()}"
        )
