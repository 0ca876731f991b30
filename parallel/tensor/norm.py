"""RMSNorm of features that are sharded over the tensor ranks.

It all-reduces one number per token, never the features. It is for models that normalize all heads
of a query or key together, while each rank holds only some of them. Types and conventions are those
of ``tensor``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.reference import compute_dtype
from warpweave.parallel.collectives import copy_to, group_size, reduce_from


def cut_rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    group: dist.ProcessGroup | None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """RMSNorm over the last dim, which is sharded over the group.

    Forward:         s[T]{I} = all-reduce(sum over features of x[T, N/R]{S(-1)}^2)
                     y[T, N/R]{S(-1)} = x weight / sqrt(s / N + eps)
    Input gradient:  dx = local + 2 x all-reduce(ds[T]), one number per token
    Weight gradient: dweight[N/R]{S(0)}, no collective, exact

    `x` and `weight` are this rank's shards, x[..., N/R] and weight[N/R]. `out_dtype` is the dtype
    of y, by default that of x. Raises ValueError if the weight does not have the width of x.
    """
    if weight.shape != x.shape[-1:]:
        wanted = f"expected weight[{x.shape[-1]}] for x{[*x.shape]}"
        raise ValueError(f"cut_rms_norm: {wanted}, got weight{[*weight.shape]}")
    wide = x.to(compute_dtype(x))
    # Every rank's features depend on the sum, and the sum on every rank's.
    squares = reduce_from(wide.square().sum(-1, keepdim=True), group)
    mean = copy_to(squares, group) / (x.shape[-1] * group_size(group))
    y = wide * torch.rsqrt(mean + eps) * weight.to(wide.dtype)
    return y.to(x.dtype if out_dtype is None else out_dtype)
