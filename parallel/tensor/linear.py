"""Column- and row-parallel linear products; types and numbers as the room's `__init__` says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from warpweave.kernels.gemm import gemm
from warpweave.kernels.gemm.gradients import Settled, bias_gradient, linear, rows, weight_gradient
from warpweave.kernels.runtime.dispatch import once_differentiable
from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    group_size,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    sum_dtype,
)


def _landed(pending: Pending, overlap: bool) -> Pending:
    """The blocking twin: with overlap=False, wait before anything else is launched."""
    if not overlap:
        pending.wait()
    return pending


# ---------------------------------------------------------------- column-parallel linear


def whole_tokens(
    x: torch.Tensor, group: dist.ProcessGroup | None, sequence_parallel: bool
) -> torch.Tensor:
    """x[T, K] for a column-parallel product: gathered from x[T/R, K] with sequence_parallel."""
    return start_all_gather(x, group).wait() if sequence_parallel else x


def column_gradients(
    dz: torch.Tensor,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    parameters: tuple[torch.Tensor, torch.Tensor | None],
    group: dist.ProcessGroup | None,
    *,
    sequence_parallel: bool,
    overlap: bool,
    needs: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The wanted (dx, dW, db) of z = x W^T + b, for every Function that starts with this product.

    Args:
        dz: dz[..., N/R], of all tokens.
        x: x[..., K], or this rank's tokens of it with sequence_parallel; None if dW is not wanted.
        weight: weight[N/R, K]; `parameters` are the leaves of weight and bias.
        group, sequence_parallel, overlap: as for `column_parallel_linear`.
        needs: whether dx, dW and db are wanted.

    Returns:
        dx like x, in the dtype of dz (of its sum with a group: fp32); dW and db may have gone
        elsewhere (`wgrad`).
    """
    leaf, bias = parameters
    gathers = sequence_parallel and group is not None
    sums = start_reduce_scatter if gathers else start_all_reduce_

    def start_input_gradient() -> Pending:
        terms = sum_dtype(dz.dtype) if group is not None else dz.dtype
        partial = gemm(rows(dz), weight.to(dz.dtype), out_dtype=terms)
        return _landed(sums(partial.view(*dz.shape[:-1], weight.shape[1]), group), overlap)

    # Popped when it runs: a weight gradient that is deferred then keeps no dx alive.
    todo = [start_input_gradient] if needs[0] else []
    flying: list[Pending] = []

    def operands() -> tuple[torch.Tensor, torch.Tensor]:
        whole = _landed(start_all_gather(x, group), overlap) if gathers else None
        if todo:
            flying.append(todo.pop()())  # the GEMM of dx hides the gather of x,
        return dz, x if whole is None else whole.wait()  # that of dW the sum of dx

    dw = weight_gradient(leaf, operands) if needs[1] else None
    if todo:
        flying.append(todo.pop()())
    db = bias_gradient(bias, dz) if needs[2] else None
    return flying.pop().wait() if flying else None, dw, db


def column_input_type(x: Any, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Any:
    """The type of x in the product, of which `column_gradients` sums dx: for typing rules."""
    from spmd_types import I, R, S, rules

    if group is None:
        return x
    if sequence_parallel:
        return rules.all_gather(x, group, src=S(0), dst=R)
    return rules.convert(x, group, src=I, dst=R)


class _ColumnParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel, overlap, dtype):
        ctx.group, ctx.sequence_parallel, ctx.overlap = group, sequence_parallel, overlap
        ctx.x_dtype, ctx.parameters = x.dtype, (weight, bias)
        with Settled(x):
            x = x.to(dtype)
            # The shard is kept and gathered again in the backward: 1/R of the memory.
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            whole = whole_tokens(x, group, sequence_parallel)
            return linear(whole, weight, bias, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        with Settled(dy):
            dx, dw, db = column_gradients(
                dy,
                x,
                weight,
                ctx.parameters,
                ctx.group,
                sequence_parallel=ctx.sequence_parallel,
                overlap=ctx.overlap,
                needs=ctx.needs_input_grad[:3],
            )
            dx = None if dx is None else dx.to(ctx.x_dtype)
        return dx, dw, db, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, group, sequence_parallel):
        from spmd_types import rules

        x = column_input_type(x, group, sequence_parallel)
        y = rules.einsum("...k,nk->...n", x, weight)
        return y if bias is None else rules.einsum("...n,n->...n", y, bias)


def column_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> torch.Tensor:
    """Linear layer that makes this rank's slice of the output features.

    Forward:         y[T, N/R]{S(-1)} = x[T, K]{I} W[N/R, K]{S(0)}^T + b[N/R]{S(0)}, no collective
    Input gradient:  dx[T, K]{I}      = all-reduce(dy[T, N/R] W[N/R, K])
    Weight gradient: dW[N/R, K]{S(0)} = dy^T x, no collective, exact
    Bias gradient:   db[N/R]{S(0)}    = sum over tokens of dy, no collective, exact

    With sequence_parallel the input is x[T/R, K]{S(0)} and

    Forward:         y[T, N/R]{S(-1)} = all-gather(x) W^T + b; the shard of x is kept, not the whole
    Input gradient:  dx[T/R, K]{S(0)} = reduce-scatter(dy[T, N/R] W)
    Weight gradient: dW[N/R, K]{S(0)} = dy^T all-gather(x), exact
    Bias gradient:   as above

    Args:
        x: x[..., K] replicated, or x[T/R, ..., K] with sequence_parallel.
        weight: weight[N/R, K], rows [r N/R, (r+1) N/R) of the whole on rank r; the leaf parameter.
        bias: bias[N/R] or None; the leaf parameter.
        group: the R tensor ranks; None for one.
        sequence_parallel: tokens of x are cut over the group along dim 0.
        overlap: in the backward, the gather of x runs under the GEMM of dx and the sum of dx under
            the GEMM of dW; False waits for each collective at once, with equal results.

    Returns:
        y[..., N/R], in the dtype of `x` or of autocast.

    Raises:
        ValueError: shapes or dtypes of x, weight and bias do not fit.
    """
    dtype = _check_linear("column_parallel_linear", x, weight, bias, group)
    if group is None and torch.compiler.is_compiling():
        return linear(x, weight, bias, dtype)
    return _ColumnParallelLinear.apply(x, weight, bias, group, sequence_parallel, overlap, dtype)


# ---------------------------------------------------------------- row-parallel linear


def row_sum(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup,
    sequence_parallel: bool,
) -> torch.Tensor:
    """y = sum over ranks of x[..., K/R] W[N, K/R]^T, + b, in the dtype of x; its terms are fp32."""
    partial = gemm(rows(x), weight.t(), out_dtype=sum_dtype(x.dtype))
    sums = start_reduce_scatter if sequence_parallel else start_all_reduce_
    y = sums(partial.view(*x.shape[:-1], len(weight)), group).wait()
    if bias is not None:
        y += bias  # after the sum: once, not once per rank
    return y.to(x.dtype)


def row_output_type(y: Any, group: dist.ProcessGroup | None, sequence_parallel: bool) -> Any:
    """The type of `row_sum` before its bias, from that of a rank's own term: for typing rules."""
    from spmd_types import I, P, S, rules

    if group is None:
        return y
    if sequence_parallel:
        return rules.reduce_scatter(y, group, src=P, dst=S(0))
    return rules.all_reduce(y, group, src=P, dst=I)


class _RowParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, sequence_parallel, overlap, dtype):
        ctx.group, ctx.sequence_parallel, ctx.overlap = group, sequence_parallel, overlap
        ctx.x_dtype, ctx.parameters = x.dtype, (weight, bias)
        with Settled(x):
            x, w = x.to(dtype), weight.to(dtype)
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
            if group is None:
                return linear(x, w, bias, dtype)
            return row_sum(x, w, bias, group, sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        leaf, bias = ctx.parameters
        gathers = ctx.sequence_parallel and ctx.group is not None
        dx = dw = db = None
        with Settled(dy):
            gathering = start_all_gather(dy, ctx.group) if gathers else None
            if gathering is not None:
                _landed(gathering, ctx.overlap)
            if ctx.needs_input_grad[2]:  # of this rank's own tokens, while the others' arrive
                db = bias_gradient(bias, dy)
            whole = dy if gathering is None else gathering.wait()
            if ctx.needs_input_grad[0]:
                dx = gemm(rows(whole), weight.to(dy.dtype))
                dx = dx.view(*whole.shape[:-1], weight.shape[1]).to(ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                dw = weight_gradient(leaf, lambda: (whole, x))
        return dx, dw, db, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, group, sequence_parallel):
        from spmd_types import rules

        y = row_output_type(rules.einsum("...k,nk->...n", x, weight), group, sequence_parallel)
        return y if bias is None else rules.einsum("...n,n->...n", y, bias)


def row_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    overlap: bool = True,
) -> torch.Tensor:
    """Linear layer over this rank's slice of the input features; the ranks' results are summed.

    Forward:         y[T, N]{I}        = all-reduce(x[T, K/R]{S(-1)} W[N, K/R]{S(1)}^T) + b[N]{I}
    Input gradient:  dx[T, K/R]{S(-1)} = dy[T, N]{I} W, no collective, exact
    Weight gradient: dW[N, K/R]{S(1)}  = dy^T x, no collective, exact
    Bias gradient:   db[N]{I}          = sum over tokens of dy, no collective, equal on every rank

    With sequence_parallel the output is y[T/R, N]{S(0)} and

    Forward:         y[T/R, N]{S(0)}   = reduce-scatter(x W^T) + b[N]{R}
    Input gradient:  dx[T, K/R]{S(-1)} = all-gather(dy[T/R, N]) W
    Weight gradient: dW[N, K/R]{S(1)}  = all-gather(dy)^T x; the gathered dy serves both
    Bias gradient:   db[N]{P}          = sum over this rank's own tokens of dy: a partial sum, which
                                         the caller sums over the group with its other gradients

    Args:
        x: x[..., K/R], the slice of features that belongs to the weight's.
        weight: weight[N, K/R], columns [r K/R, (r+1) K/R) of the whole on rank r; a leaf.
        bias: bias[N], whole on every rank, or None; a leaf.
        group: the R tensor ranks; None for one.
        sequence_parallel: cut the output's tokens over the group along dim 0.
        overlap: in the backward, the gather of dy runs under the bias gradient; False waits for it
            at once, with equal results.

    Returns:
        y[..., N], or y[T/R, ..., N] with sequence_parallel, in the dtype of `x` or of autocast.

    Raises:
        ValueError: shapes or dtypes do not fit, or R does not divide the T to be cut.
    """
    dtype = _check_linear("row_parallel_linear", x, weight, bias, group)
    if group is None and torch.compiler.is_compiling():
        return linear(x, weight, bias, dtype)
    if sequence_parallel and group is not None and x.shape[0] % group_size(group):
        raise ValueError(
            f"row_parallel_linear on rank {group_rank(group)}: {x.shape[0]} tokens (dim 0 of x) "
            f"are not divisible by the {group_size(group)} tensor ranks"
        )
    return _RowParallelLinear.apply(x, weight, bias, group, sequence_parallel, overlap, dtype)


def _check_linear(
    name: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> torch.dtype:
    """The dtype to compute in, or ValueError."""
    if (x.dim() < 2 and group is not None) or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name} on rank {group_rank(group)}: x{tuple(x.shape)} and weight{tuple(weight.shape)}"
            " do not fit: the last dim of x (of two at least) must be dim 1 of the weight"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{name} on rank {group_rank(group)}: bias{tuple(bias.shape)} does not fit "
            f"weight{tuple(weight.shape)}"
        )
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        dtypes = f"x {x.dtype}, weight {weight.dtype}, bias {None if bias is None else bias.dtype}"
        raise ValueError(f"{name} on rank {group_rank(group)}: dtypes differ: {dtypes}")
    return x.dtype
