"""Merge two attention results over disjoint sets of keys into the result over their union.

    lse = log(exp(lse_a) + exp(lse_b))        w = exp(lse_b) / (exp(lse_a) + exp(lse_b))
    o   = (1 - w) o_a + w o_b

Attention over keys A and attention over keys B, each with the logarithm of its normalizer,
determine attention over A and B (Milakov & Gimelshein 2018, arXiv:1805.02867; Liu et al. 2023,
arXiv:2310.01889 for the ring). The weight is ``sigmoid(lse_b - lse_a)``, which cannot overflow. A
side that saw no key has lse = -inf and o = 0: it gets weight exactly 0 and the other side exactly
1. Two such sides merge into one (the sigmoid alone would be NaN there).

Partials stay float32 (float64 for float64): if they were merged in bfloat16, the error would grow
with the number of parts. Merging is associative and commutative up to rounding. No custom kernel is
needed, because `torch.lerp` is already one pass over the outputs. Not differentiable: the backward
of blockwise attention runs each block with the merged (o, lse), see `attention_bwd`.
"""

from __future__ import annotations

import torch

from warpweave.kernels.runtime.dispatch import no_graph


@no_graph
def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (o, lse) over the union of the keys of a and b.

    o_a, o_b [B, S, H, D] and lse_a, lse_b [B, H, S] (natural logarithm), all float32 or all
    float64. Raises ValueError on other shapes, dtypes or devices.

    Examples:
        >>> from warpweave.kernels.attention import attention_fwd
        >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
        >>> near, far = ((k[:, half], v[:, half]) for half in (slice(8, 16), slice(0, 8)))
        >>> parts = [attention_fwd(q, *half, causal=False) for half in (near, far)]
        >>> o, lse = merge(*parts[0], *parts[1])
        >>> torch.allclose(o, attention_fwd(q, k, v, causal=False)[0], atol=1e-5)
        True
    """
    _check_parts(o_a, lse_a, o_b, lse_b)
    return torch.lerp(o_a, o_b, _weight(lse_a, lse_b)), torch.logaddexp(lse_a, lse_b)


@no_graph
def merge_(
    o: torch.Tensor, lse: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge` in place: o and lse, which may be views of some rows, become the merged result.

    o = 0 and lse = -inf is the neutral element, so a ring can start from it. Returns (o, lse).
    """
    _check_parts(o, lse, o_b, lse_b)
    o.lerp_(o_b, _weight(lse, lse_b))
    lse.copy_(torch.logaddexp(lse, lse_b))
    return o, lse


def _weight(lse_a: torch.Tensor, lse_b: torch.Tensor) -> torch.Tensor:
    """The weight of side b, as [B, S, H, 1]."""
    weight = torch.sigmoid(lse_b - lse_a).masked_fill_(lse_b == -float("inf"), 0.0)
    return weight.transpose(1, 2).unsqueeze(-1)


def _check_parts(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> None:
    if o_a.ndim != 4 or o_b.shape != o_a.shape:
        raise ValueError(
            "o_a and o_b must have the same shape [B, S, H, D], "
            f"got {tuple(o_a.shape)} and {tuple(o_b.shape)}"
        )
    B, S, H, _ = o_a.shape
    if lse_a.shape != (B, H, S) or lse_b.shape != (B, H, S):
        raise ValueError(
            f"lse_a and lse_b must have the shape [B, H, S] = {(B, H, S)}, "
            f"got {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    dtypes = {x.dtype for x in (o_a, lse_a, o_b, lse_b)}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            "merge needs float32 or float64 partials, all of the same dtype, "
            f"got {sorted(map(str, dtypes))}"
        )
    devices = {x.device for x in (o_a, lse_a, o_b, lse_b)}
    if len(devices) > 1:
        raise ValueError(f"merge needs all tensors on one device, got {sorted(map(str, devices))}")
