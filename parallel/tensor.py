"""Tensor parallelism: linear layers, embedding and loss with weights cut over the ranks of a group.

Column-parallel cuts a weight's output features, row-parallel its input features; one after the
other they need one sum over the ranks in each direction (Shoeybi et al. 2019, arXiv:1909.08053).
With sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198) the activations between such
pairs are cut along their tokens, and each all-reduce becomes a reduce-scatter here and an
all-gather there. The vocabulary's embedding and loss are cut along the vocabulary.

Types are those of ``collectives``: R replicated with a partial gradient, I invariant, S(d) sharded,
P partial. R ranks in the group; T tokens (any leading dims where sequence parallelism is off), K
input and N output features, V the vocabulary padded to a multiple of R. ``group=None`` is an axis
of size 1.

Sums over ranks are re-associated, everything else is exact: with one rank less, the same numbers.
In bf16 and fp16 the terms of such a sum are fp32 (the GEMM's accumulators), rounded once after the
sum. Gradients of weights are made in ``weight.grad_dtype``: fp32 if the parameter says so. They go
through ``wgrad``, so that a pipeline schedule can have them made later; the collectives that they
need are then called at that time, and every rank of the group must make them in the same order. The
Functions keep the parameters themselves besides what they save: a saved tensor may come back as a
copy (checkpointing detaches it), which knows no grad_dtype and whose .grad nobody reads.

Under autocast the linear layers compute in its dtype; weights stay as they are. ``torch.compile``
traces them with group=None only, as torch's own ops: a compiled backward defers no weight gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from warpweave.kernels.cross_entropy import cross_entropy_bwd, cross_entropy_fwd, token_losses
from warpweave.kernels.dispatch import once_differentiable
from warpweave.kernels.gemm import gemm
from warpweave.kernels.linear import Settled, bias_gradient, grad_dtype, rows, weight_gradient
from warpweave.kernels.wgrad import wgrad
from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    group_size,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    sum_dtype,
)

# ---------------------------------------------------------------- products


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[..., K] weight[N, K]^T + bias[N]."""
    return gemm(rows(x), weight.t(), bias).view(*x.shape[:-1], weight.shape[0])


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
            return _linear(whole, weight.to(dtype), bias if bias is None else bias.to(dtype))

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
        return F.linear(x, weight, bias)
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
                return _linear(x, w, bias if bias is None else bias.to(dtype))
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
        return F.linear(x, weight, bias)
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


# ---------------------------------------------------------------- vocab-parallel embedding


class _VocabParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, group, vocab_size, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.parameter = weight
        ctx.save_for_backward(ids)
        torch._assert_async(
            ((ids >= 0) & (ids < vocab_size)).all(),
            f"vocab_parallel_embedding: an id lies outside [0, {vocab_size})",
        )
        if group is None:
            return F.embedding(ids, weight)
        local, elsewhere = _local_ids(ids, weight.shape[0], group)
        y = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        # One term of each sum is not zero, so that the sum is exact in any dtype.
        sums = start_reduce_scatter if sequence_parallel else start_all_reduce_
        return sums(y, group).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (ids,), weight = ctx.saved_tensors, ctx.parameter
        group, gathers = ctx.group, ctx.sequence_parallel

        def addends() -> tuple[torch.Tensor, torch.Tensor]:
            whole = start_all_gather(dy, group).wait() if gathers else dy
            local = ids
            if group is not None:
                local, elsewhere = _local_ids(ids, weight.shape[0], group)
                whole = whole.masked_fill(elsewhere.unsqueeze(-1), 0)
            return local.reshape(-1), rows(whole).to(sum_dtype(dy.dtype))

        def weight_gradient() -> torch.Tensor:
            local, terms = addends()
            # torch's own kernel sorts the ids where index_add_ would add atomically in any order
            dw = torch.ops.aten.embedding_dense_backward(terms, local, weight.shape[0], -1, False)
            return dw.to(grad_dtype(weight))

        def into(buffer: torch.Tensor, add: bool) -> None:
            local, terms = addends()
            if not add:
                buffer.zero_()
            if buffer.is_cuda:  # likewise: this one sorts
                buffer.index_put_((local,), terms.to(buffer.dtype), accumulate=True)
            else:  # and on a CPU that one adds atomically, while this one takes row after row
                buffer.index_add_(0, local, terms.to(buffer.dtype))

        return None, wgrad(weight, weight_gradient, into), None, None, None

    @staticmethod
    def spmd_typecheck(*, ids, weight, group, sequence_parallel):
        from spmd_types import I, P, S, rules

        y = rules.einsum("...,ve->...e", ids, weight)  # a one-hot product: v is contracted
        if group is not None and sequence_parallel:
            y = rules.reduce_scatter(y, group, src=P, dst=S(0))
        elif group is not None:
            y = rules.all_reduce(y, group, src=P, dst=I)
        return y


def _local_ids(
    ids: torch.Tensor, rows: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's row for each id (0 where another rank has it), and where another rank has it."""
    local = ids - dist.get_rank(group) * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


def vocab_parallel_embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    sequence_parallel: bool = False,
    padded_vocab_size: int | None = None,
) -> torch.Tensor:
    """Rows of an embedding table whose rows are cut over the group.

    Forward:         y[T, E]{I} = all-reduce(onehot(ids)[T, V/R] W[V/R, E]{S(0)}): each rank gives
                     the rows that it holds and zeros for the others; exact, one term is not zero
    Weight gradient: dW[V/R, E]{S(0)} = onehot(ids)^T dy[T, E]{I}, no collective; summed in a fixed
                     order in fp32, so deterministic

    With sequence_parallel the output is y[T/R, E]{S(0)} and

    Forward:         y = reduce-scatter(onehot(ids) W), exact
    Weight gradient: dW = onehot(ids)^T all-gather(dy[T/R, E])

    Args:
        ids: int64[...], the same on every rank of the group; 1-D with sequence_parallel.
        weight: weight[V/R, E], rows [r V/R, (r+1) V/R) of the table on rank r; the leaf parameter.
        group: the R tensor ranks; None for one.
        vocab_size: ids lie in [0, vocab_size); rows past it are padding and never looked up.
        sequence_parallel: cut the output's tokens over the group along dim 0.
        padded_vocab_size: V; None is `vocab_size` rounded up to a multiple of R.

    Returns:
        y[..., E], or y[T/R, E] with sequence_parallel, in the dtype of `weight`.

    Raises:
        ValueError: the shard does not have V/R rows, or R does not divide the tokens.
        RuntimeError: an id lies outside the vocabulary (on CUDA a device-side assertion).
    """
    name = f"vocab_parallel_embedding on rank {group_rank(group)}"
    _check_vocabulary(name, "rows", weight.shape[0], group, vocab_size, padded_vocab_size)
    if sequence_parallel and (ids.dim() != 1 or ids.shape[0] % group_size(group)):
        raise ValueError(
            f"{name}: sequence parallelism needs ids[T] with T divisible by the "
            f"{group_size(group)} tensor ranks, got ids{tuple(ids.shape)}"
        )
    if group is None and torch.compiler.is_compiling():
        return F.embedding(ids, weight)
    return _VocabParallelEmbedding.apply(ids, weight, group, vocab_size, sequence_parallel)


def _check_vocabulary(
    name: str,
    what: str,
    local: int,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    padded: int | None,
) -> None:
    ranks = group_size(group)
    if padded is None:
        padded = -(-vocab_size // ranks) * ranks
    if local * ranks != padded or padded < vocab_size:
        raise ValueError(
            f"{name}: {local} {what} on each of {ranks} tensor ranks are not the {padded} of the "
            f"padded vocabulary (vocab_size {vocab_size}); a rank takes its shard, not the whole"
        )


# ---------------------------------------------------------------- vocab-parallel cross entropy


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, logits, labels, group, vocab_size, ignore_index, label_smoothing, impl, z_loss=0.0
    ):
        where = {
            "vocab_start": group_rank(group) * logits.shape[1],
            "vocab_size": vocab_size,
            "ignore_index": ignore_index,
            "impl": impl,
        }
        ctx.where = where
        ctx.loss = {"label_smoothing": label_smoothing, "z_loss": z_loss}
        lse, target, total = cross_entropy_fwd(
            logits, labels, want_sum=label_smoothing > 0, **where
        )
        if group is not None:
            mine = [part for part in (lse, target, total) if part is not None]
            every = start_all_gather(torch.stack(mine).unsqueeze(0), group).wait()
            lse, target = every[:, 0].logsumexp(0), every[:, 1].sum(0)
            total = every[:, 2].sum(0) if total is not None else None
        ctx.save_for_backward(logits, labels, lse)
        return token_losses(
            lse,
            target,
            total,
            labels,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            **ctx.loss,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, dlosses):
        logits, labels, lse = ctx.saved_tensors
        dlogits = cross_entropy_bwd(dlosses, logits, labels, lse, **ctx.loss, **ctx.where)
        return dlogits, None, None, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, logits, labels, group):
        from spmd_types import I, P, rules

        # exp-sum, target logit and sum of logits are each a sum over v
        losses = rules.einsum("tv,t->t", logits, labels)
        return losses if group is None else rules.all_reduce(losses, group, src=P, dst=I)


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    padded_vocab_size: int | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Cross entropy of each token over logits whose columns are cut over the group.

    With e = label_smoothing, c = z_loss and sums over the global vocabulary of `vocab_size`, per
    token

    Forward:        loss[T]{I} = lse - (1 - e) z[label] - e/vocab_size sum_v z[v] + c lse^2 with the
                    log-sum-exp, the label's logit and (for e > 0) the sum of this rank's columns;
                    one all-gather of these numbers, merged on every rank in the same order
    Input gradient: dz[T, V/R]{S(1)} = dloss (softmax(z) (1 + 2 c lse) - (1 - e) onehot(label) -
                    e/vocab_size), no collective; zero in padding columns and for ignored tokens

    Args:
        logits: logits[T, V/R], columns [r V/R, (r+1) V/R) on rank r. Columns from `vocab_size` on
            are padding and take no part.
        labels: int64[T], the same on every rank of the group.
        group: the R tensor ranks; None for one.
        vocab_size: size of the vocabulary without padding.
        ignore_index: tokens with this label have loss zero and no gradient.
        label_smoothing: e, in [0, 1).
        z_loss: c, not negative.
        padded_vocab_size: V; None is `vocab_size` rounded up to a multiple of R.
        impl: "triton", "torch" or None to choose by device.

    Returns:
        losses[T] in fp32 (fp64 for fp64), bit-equal on every rank of the group. Their sum over all
        tokens is to be divided by the global number of valid tokens.

    Raises:
        ValueError: the logits do not have V/R columns (gathered logits, for example), labels are
            not int64[T], label_smoothing lies outside [0, 1), z_loss is negative or, for CPU
            tensors, a label is neither in the vocabulary nor `ignore_index` (on a GPU its loss is
            NaN).
    """
    name = f"vocab_parallel_cross_entropy on rank {group_rank(group)}"
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"{name}: needs logits[T, V/R] and labels[T], got {tuple(logits.shape)} and "
            f"{tuple(labels.shape)}"
        )
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{name}: label_smoothing must lie in [0, 1), got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{name}: z_loss must not be negative, got {z_loss}")
    _check_vocabulary(name, "logits columns", logits.shape[1], group, vocab_size, padded_vocab_size)
    return _VocabParallelCrossEntropy.apply(
        logits, labels, group, vocab_size, ignore_index, label_smoothing, impl, z_loss
    )
