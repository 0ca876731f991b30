"""Batch normalization over the batch of all data ranks (Ioffe & Szegedy 2015, arXiv:1502.03167).

Count, mean and M2 of each rank's part are merged as in Chan et al. (1979).

    four ranks; rank r has n_r values of a channel (maybe none), their mean m_r, and M_r, the sum of
    their squared deviations from m_r
    rank   sends           every rank has
    0      [n0, m0, M0]    n = n0 + n1 + n2 + n3
    1      [n1, m1, M1]    m = (n0 m0 + n1 m1 + n2 m2 + n3 m3) / n
    2      [n2, m2, M2]    M = M0 + M1 + M2 + M3
    3      [n3, m3, M3]        + n0 (m0 - m)^2 + n1 (m1 - m)^2 + n2 (m2 - m)^2 + n3 (m3 - m)^2

No sum of squares is subtracted from another, so a large mean costs no digits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.kernels.reference import compute_dtype
from warpweave.parallel.collectives import all_gather

_again: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def recomputing() -> Iterator[None]:
    """Return a context in which a forward pass runs once more, only for its activations."""
    token = _again.set(True)
    try:
        yield
    finally:
        _again.reset(token)


def is_recomputing() -> bool:
    """Return True if this forward pass has run before: within `recomputing`, or within a backward
    pass, where ``torch.utils.checkpoint`` repeats it."""
    return _again.get() or torch._C._current_graph_task_id() != -1


class Moments(NamedTuple):
    """Statistics of each channel over all ranks: the number of values n (0-dim), mean[C], and
    M2[C], the sum of squared deviations. fp32, or fp64 for fp64."""

    n: Tensor
    mean: Tensor
    m2: Tensor


def sync_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Moments]:
    """(x - mean) / sqrt(M2 / n + eps) * weight + bias, with the moments of all ranks' samples.

    Forward:   all-gather of [2 C + 1] of each rank; y{S(0)}, re-associated.
    Gradient:  reduce-scatter of the same size; dx{S(0)}. dweight{P} and dbias{P} are those of this
               rank's samples only; they are summed with all other gradients.

    Every rank takes part in both directions, even if it has no sample. If there is only one value
    in total, M2 is 0. n is exact to 2^24 in fp32.

    Args:
        x: x[N, C, ...], this rank's samples; N differs between ranks and may be 0.
        weight, bias: [C], replicated, or None.
        eps: added to the variance.
        group: the ranks; None for a single rank.

    Returns:
        (y, the moments without a gradient).

    Raises:
        ValueError: x has no channel dim, or weight or bias does not have one element per channel.
    """
    channels = x.shape[1] if x.ndim > 1 else 0
    for name, p in (("weight", weight), ("bias", bias)):
        if x.ndim < 2 or (p is not None and tuple(p.shape) != (channels,)):
            found = "" if p is None else f" and {name}{[*p.shape]}"
            raise ValueError(
                f"sync_batch_norm: expected x[N, C, ...] and {name}[C], got x{[*x.shape]}{found}"
            )
    wide, along = x.to(compute_dtype(x)), [0, *range(2, x.ndim)]
    n = x.numel() // channels if channels else 0

    def spread(of: Tensor) -> Tensor:
        return of.view(-1, *[1] * (x.ndim - 2))

    mean = wide.sum(along) / max(n, 1)
    m2 = (wide - spread(mean)).square().sum(along)
    own = torch.cat([wide.new_full((1,), n), mean, m2])
    counts, means, m2s = all_gather(own[None], group).split((1, channels, channels), 1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count.clamp(min=1)
    m2 = (m2s + counts * (means - mean).square()).sum(0)
    factor = torch.rsqrt(m2 / count.clamp(min=1) + eps)
    if weight is not None:
        factor = factor * weight.to(wide.dtype)
    y = (wide - spread(mean)) * spread(factor)
    if bias is not None:
        y = y + spread(bias.to(wide.dtype))
    return y.to(x.dtype), Moments(*(t.detach() for t in (count, mean, m2)))
