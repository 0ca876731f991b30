"""Tensor-parallel q, k and v projection with rotary embedding: heads are sharded over the ranks.

One kernel computes a column-parallel product, its bias, the split into heads and the rotation
(`kernels.qkv`); another computes the backward. The collectives are those of a column-parallel
linear layer; types and conventions are those of ``tensor``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.qkv import qkv_rope
from warpweave.kernels.qkv.kernels import QKV
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.ranks import tensor_ranks


def parallel_qkv_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    shape: tuple[int, int],
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
    impl: str | None = None,
) -> QKV:
    """q, k and v of this rank's heads, with rotary embedding of q and k.

    Forward:         z[T, N/R]{S(-1)} = x[T, E]{I} W[N/R, E]{S(0)}^T + b[N/R]{S(0)}, no collective
                     q, k = rope(z of their rows), v = z of its rows, heads {S(2)}
    Input gradient:  dx[T, E]{I} = all-reduce(dz W), dz = rope^-1(dq), rope^-1(dk), dv
    Weight gradient: dW[N/R, E]{S(0)} = dz^T x, no collective, exact; db = sum over tokens of dz

    With sequence_parallel the input is x[T/R, E]{S(0)}. It is gathered in the forward and, for dW,
    in the backward, and dx[T/R, E]{S(0)} = reduce-scatter(dz W).

    Args:
        x: x[T, E] replicated, or x[T/R, E] with sequence_parallel; T = B S, sample by sample.
        weight: weight[Hkv/R, G + 2, D, E], N/R rows; see `kernels.qkv`. A leaf parameter or a view.
        bias: [Hkv/R, G + 2, D] or None; a leaf parameter or a view.
        cos, sin: [S, D/2] from `rope_table` for these positions; None for no rotation.
        shape: (B, S).
        group, sequence_parallel, overlap, workspace: as for `column_parallel_linear`.
        impl: "triton", "torch" or None to choose by device.

    Returns q[B, S, Hq/R, D], k and v[B, S, Hkv/R, D], in the dtype of `x` or of autocast. Raises
    ValueError if shapes or dtypes do not match.
    """
    cut = group if sequence_parallel else None
    if x.ndim != 2 or len(x) * group_size(cut) != shape[0] * shape[1]:
        raise ValueError(
            f"parallel_qkv_rope on rank {group_rank(group)}: expected x[B*S/R, E] with [B, S] = "
            f"{[*shape]} and R = {group_size(cut)} (the number of ranks that the tokens are split "
            f"over), got x{[*x.shape]}"
        )
    if group is None:
        return qkv_rope(x.view(*shape, x.shape[1]), weight, bias, cos, sin, impl=impl)
    ranks = tensor_ranks(group, sequence_parallel, overlap, workspace, x=x, impl=impl)
    return qkv_rope(x, weight, bias, cos, sin, impl=impl, shape=shape, ranks=ranks)
