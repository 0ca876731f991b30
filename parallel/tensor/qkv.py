"""Queries, keys and values of this rank's heads: a column-parallel product that ends in the rotary
embedding.

The product, its bias, the cut into heads and the rotation are one kernel (`kernels.qkv`), and so is
the way back. The collectives are those of a column-parallel linear layer; types and conventions are
those of ``tensor``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.gemm.gradients import Settled, leaf_of, rows, settled_dtype
from warpweave.kernels.qkv import QKV, by_head, check_qkv, qkv_bwd, qkv_fwd, qkv_rope
from warpweave.kernels.runtime.dispatch import choose, once_differentiable
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.tensor.linear import column_gradients, column_input_type, whole_tokens


class _ParallelQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, weight, bias, cos, sin, group, sequence_parallel, overlap, shape, heads, dtype, impl
    ):
        ctx.cut, ctx.shape, ctx.impl = (group, sequence_parallel, overlap), shape, impl
        ctx.parameters, ctx.x_dtype = (weight, bias), x.dtype
        with Settled(x):
            x = x.to(dtype)
            # The shard is kept and gathered again in the backward: 1/R of the memory.
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, cos, sin)
            whole = whole_tokens(x, group, sequence_parallel).unflatten(0, shape)
            found = qkv_fwd(
                whole, *by_head(weight, bias, heads, dtype), cos, sin, impl=impl
            )  # fmt: skip
            return tuple(t.flatten(0, 1) for t in found)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        x, weight, cos, sin = ctx.saved_tensors
        group, sequence_parallel, overlap = ctx.cut
        with Settled(dq):
            dq, dk, dv = (t.unflatten(0, ctx.shape) for t in (dq, dk, dv))
            dz = qkv_bwd(dq, dk, dv, cos, sin, impl=ctx.impl)
            dx, dw, db = column_gradients(
                dz, x, rows(weight), ctx.parameters, group,
                sequence_parallel=sequence_parallel, overlap=overlap,
                needs=ctx.needs_input_grad[:3],
            )  # fmt: skip
            dx = None if dx is None else dx.to(ctx.x_dtype)
        return dx, dw, db, *[None] * 9

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, cos, sin, group, sequence_parallel, shape):
        from spmd_types import rules

        # The weight is cut in whole groups of heads; each output has its share of them.
        x = column_input_type(x, group, sequence_parallel)
        z = rules.einsum(f"t_,n{'_' * (weight.dim() - 1)}->tn", x, weight)
        if bias is not None:
            z = rules.einsum(f"tn,n{'_' * (bias.dim() - 1)}->tn", z, bias)
        q = k = v = rules.einsum("tn->tn_", z)
        if cos is not None:
            s = "t" if shape[0] == 1 else "_"  # rows of one sample are those of the table
            q = k = rules.einsum(f"tn_,{s}_,{s}_->tn_", q, cos, sin)
        return q, k, v


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
    overlap: bool = True,
    impl: str | None = None,
) -> QKV:
    """q, k and v of the heads that this rank holds, rotated.

    Forward:         z[T, N/R]{S(-1)} = x[T, E]{I} W[N/R, E]{S(0)}^T + b[N/R]{S(0)}, no collective
                     q, k = rope(z of their rows), v = z of its rows, heads {S(2)}
    Input gradient:  dx[T, E]{I} = all-reduce(dz W), dz = rope^-1(dq), rope^-1(dk), dv
    Weight gradient: dW[N/R, E]{S(0)} = dz^T x, no collective, exact; db = sum over tokens of dz

    With sequence_parallel the input is x[T/R, E]{S(0)}, gathered in the forward and for dW in the
    backward, and dx[T/R, E]{S(0)} = reduce-scatter(dz W).

    Args:
        x: x[T, E] replicated, or x[T/R, E] with sequence_parallel; T = B S, sample by sample.
        weight: weight[Hkv/R, G + 2, D, E], N/R rows, see `kernels.qkv`; a leaf or a view of one.
        bias: [Hkv/R, G + 2, D] or None; a leaf or a view of one.
        cos, sin: [S, D/2] of `rope_table`, of these positions; or None to rotate nothing.
        shape: (B, S).
        group: the R tensor ranks; None for one.
        sequence_parallel: tokens of x are cut over the group along dim 0.
        overlap: as for `column_parallel_linear`.
        impl: "triton", "torch" or None to choose by device.

    Returns:
        q[B, S, Hq/R, D], k and v[B, S, Hkv/R, D], in the dtype of `x` or of autocast.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    name = f"parallel_qkv_rope on rank {group_rank(group)}"
    cut = group if sequence_parallel else None
    if x.ndim != 2 or len(x) * group_size(cut) != shape[0] * shape[1]:
        raise ValueError(
            f"{name}: x must hold the tokens of [B, S] = {[*shape]}, one or 1/R of them, got "
            f"{[*x.shape]} on {group_size(cut)} ranks"
        )
    if group is None:
        return qkv_rope(x.view(*shape, x.shape[1]), weight, bias, cos, sin, impl=impl)
    chosen = choose(impl, x, weight, bias, cos, sin)
    check_qkv((*shape, x.shape[1]), weight, bias, cos, sin, name)
    dtype = settled_dtype(name, x, {"weight": weight, "bias": bias})
    leaves, heads = (leaf_of(weight), leaf_of(bias)), tuple(weight.shape[1:3])
    found = _ParallelQKV.apply(
        x, *leaves, cos, sin, group, sequence_parallel, overlap, shape, heads, dtype, chosen
    )
    # the length as -1: sizes as such would not do for typechecking a sequence that is cut
    B, S = shape
    q, k, v = (t.unflatten(0, (B, -1 if B else S)) for t in found)
    return q, k, v
