"""Column- and row-parallel linear layers (Shoeybi et al. 2019, arXiv:1909.08053), with and without
sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198).

    two ranks; W[N, K] is sharded by rows (column-parallel) or by columns (row-parallel)

    column-parallel                           row-parallel
    rank 0   x[T, K]  W0[N/2, K]  y0[T, N/2]  rank 0  x0[T, K/2]  W0[N, K/2]  y = x0 W0^T + x1 W1^T
    rank 1   x[T, K]  W1[N/2, K]  y1[T, N/2]  rank 1  x1[T, K/2]  W1[N, K/2]  by all-reduce

Types and conventions are those of ``tensor``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.gemm.local import linear, weight_gradient
from warpweave.kernels.overlap.gathering import Gathering, multiply
from warpweave.kernels.runtime.dispatch import once_differentiable
from warpweave.kernels.runtime.dtypes import no_autocast, operand_dtype
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.ranks import tensor_ranks


def _arriving_linear(
    x: torch.Tensor | Gathering, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear` of x[..., K]. A `Gathering` is gathered within the product's kernel."""
    if isinstance(x, torch.Tensor):
        return linear(x, weight, bias)
    y, _ = multiply(x, weight.t(), bias)
    return y.view(*x.shape[:-1], len(weight))


# ---------------------------------------------------------------- column-parallel linear


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype, ranks):
        ctx.ranks, ctx.x_dtype, ctx.leaves = ranks, x.dtype, (weight, bias)
        with no_autocast(x):
            x = x.to(dtype)
            # Save only the shard (1/R of the memory), and gather it again in the backward.
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            w, b = (t if t is None else t.to(dtype) for t in (weight, bias))
            return ranks.column_product(x, lambda x, _: _arriving_linear(x, w, b))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with no_autocast(dy):
            dx, dw, db = ctx.ranks.column_gradients(
                dy, x, weight.to(dy.dtype), ctx.leaves, ctx.needs_input_grad[:3]
            )
            dx = None if dx is None else dx.to(ctx.x_dtype)
        return dx, dw, db, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, ranks):
        from spmd_types import rules

        y = rules.einsum("...k,nk->...n", ranks.column_input_type(x), weight)
        return y if bias is None else rules.einsum("...n,n->...n", y, bias)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Column-parallel linear layer: rank r computes output features [r N/R, (r+1) N/R).

    Forward:         y[T, N/R]{S(-1)} = x[T, K]{I} W[N/R, K]{S(0)}^T + b[N/R]{S(0)}, no collective
    Input gradient:  dx[T, K]{I}      = all-reduce(dy[T, N/R] W[N/R, K])
    Weight gradient: dW[N/R, K]{S(0)} = dy^T x, no collective, exact
    Bias gradient:   db[N/R]{S(0)}    = sum over tokens of dy, no collective, exact

    With sequence_parallel the input is x[T/R, K]{S(0)} and

    Forward:         y[T, N/R]{S(-1)} = all-gather(x) W^T + b; only the shard of x is saved
    Input gradient:  dx[T/R, K]{S(0)} = reduce-scatter(dy[T, N/R] W)
    Weight gradient: dW[N/R, K]{S(0)} = dy^T all-gather(x), exact
    Bias gradient:   as above

    Args:
        x: x[..., K] replicated, or x[T/R, ..., K] with sequence_parallel.
        weight: weight[N/R, K], rows [r N/R, (r+1) N/R) of W on rank r; the leaf parameter.
        bias: bias[N/R] or None; the leaf parameter.
        group: the R tensor ranks; None for a single rank.
        sequence_parallel: x has its tokens sharded over the group along dim 0.
        overlap: "none", "bulk", "chunked" or "fused", with equal results; see ``ranks``. In the
            backward of all except "none", the all-gather of x is hidden behind the GEMM of dx, and
            the reduction of dx behind the GEMM of dW.
        workspace: symmetric memory of the group, for "fused".

    Returns y[..., N/R] in the dtype of `x` or of autocast. Raises ValueError if shapes or dtypes do
    not match.
    """
    dtype = _check_linear("column_parallel_linear", x, weight, bias, group)
    ranks = tensor_ranks(group, sequence_parallel, overlap, workspace, x=x)
    return _ColumnParallelLinear.apply(x, weight, bias, dtype, ranks)


# ---------------------------------------------------------------- row-parallel linear


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype, ranks):
        ctx.ranks, ctx.x_dtype, ctx.leaves = ranks, x.dtype, (weight, bias)
        with no_autocast(x):
            x = x.to(dtype)
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            return ranks.row_product(x, weight.to(dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, weight), (leaf, bias), needs = ctx.saved_tensors, ctx.leaves, ctx.needs_input_grad

        def input_gradient(dy: torch.Tensor | Gathering, first: int) -> torch.Tensor | None:
            if not needs[0]:
                return None
            return _arriving_linear(dy, w.t(), None).to(ctx.x_dtype)

        with no_autocast(dy):
            w = weight.to(dy.dtype)
            dx, whole, db = ctx.ranks.row_gradients(dy, bias if needs[2] else None, input_gradient)
            dw = weight_gradient(leaf, lambda: (whole, x)) if needs[1] else None
        return dx, dw, db, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, ranks):
        from spmd_types import rules

        y = ranks.row_output_type(rules.einsum("...k,nk->...n", x, weight))
        return y if bias is None else rules.einsum("...n,n->...n", y, bias)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """Row-parallel linear layer: rank r holds input features [r K/R, (r+1) K/R), and the products
    of all ranks are summed.

    Forward:         y[T, N]{I}        = all-reduce(x[T, K/R]{S(-1)} W[N, K/R]{S(1)}^T) + b[N]{I}
    Input gradient:  dx[T, K/R]{S(-1)} = dy[T, N]{I} W, no collective, exact
    Weight gradient: dW[N, K/R]{S(1)}  = dy^T x, no collective, exact
    Bias gradient:   db[N]{I}          = sum over tokens of dy, no collective, equal on every rank

    With sequence_parallel the output is y[T/R, N]{S(0)} and

    Forward:         y[T/R, N]{S(0)}   = reduce-scatter(x W^T) + b[N]{R}
    Input gradient:  dx[T, K/R]{S(-1)} = all-gather(dy[T/R, N]) W
    Weight gradient: dW[N, K/R]{S(1)}  = all-gather(dy)^T x; the gathered dy is used for both
    Bias gradient:   db[N]{P}          = sum over this rank's own tokens of dy: a partial sum, which
                                         the caller sums over the group with its other gradients

    Args:
        x: x[..., K/R], input features [r K/R, (r+1) K/R) on rank r.
        weight: weight[N, K/R], columns [r K/R, (r+1) K/R) of W on rank r; the leaf parameter.
        bias: bias[N], the same on every rank, or None; the leaf parameter.
        group, overlap, workspace: as for `column_parallel_linear`.
        sequence_parallel: shard the output's tokens over the group along dim 0.

    Returns y[..., N], or y[T/R, ..., N] with sequence_parallel, in the dtype of `x` or of autocast.
    Raises ValueError if shapes or dtypes do not match, or T is not divisible by R with
    sequence_parallel.
    """
    dtype = _check_linear("row_parallel_linear", x, weight, bias, group)
    if sequence_parallel and x.shape[0] % group_size(group):
        raise ValueError(
            f"row_parallel_linear on rank {group_rank(group)}: {x.shape[0]} tokens (dim 0 of x) "
            f"are not divisible by the {group_size(group)} tensor-parallel ranks"
        )
    ranks = tensor_ranks(group, sequence_parallel, overlap, workspace, x=x)
    return _RowParallelLinear.apply(x, weight, bias, dtype, ranks)


def _check_linear(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> torch.dtype:
    """Return the dtype to compute in. Raise ValueError if shapes or dtypes do not match."""
    name = f"{name} on rank {group_rank(group)}"
    if (x.dim() < 2 and group is not None) or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: x must be [..., K] (with at least two dims if there is a group) and weight "
            f"must be [N, K], got x{[*x.shape]} and weight{[*weight.shape]}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name}: expected bias{[*weight.shape[:1]]} for weight{[*weight.shape]}, got "
            f"bias{[*bias.shape]}"
        )
    return operand_dtype(name, x, {"weight": weight, "bias": bias})
