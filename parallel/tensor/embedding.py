"""Vocabulary-parallel embedding (Shoeybi et al. 2019, arXiv:1909.08053).

The table's rows are sharded over the tensor axis.

    four ranks, V = 8; ids [5, 0, 3]; rank r holds rows 2r and 2r+1 of W
    rank 0   [0,  W0, 0 ]
    rank 1   [0,  0,  W3]       y = their sum [W5, W0, W3], by all-reduce;
    rank 2   [W5, 0,  0 ]       with sequence parallelism by reduce-scatter, T/4 tokens each
    rank 3   [0,  0,  0 ]
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

from warpweave.kernels.runtime.dispatch import once_differentiable
from warpweave.kernels.runtime.dtypes import check_integers
from warpweave.kernels.runtime.wgrad import grad_dtype, rows, wgrad
from warpweave.parallel.collectives import (
    group_rank,
    group_size,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter,
    sum_dtype,
)


class _VocabParallelEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, weight, group, vocab_size, sequence_parallel):
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.parameter = weight
        ctx.save_for_backward(ids)
        torch._assert_async(
            ((ids >= 0) & (ids < vocab_size)).all(),
            f"vocab_parallel_embedding: an id is outside [0, {vocab_size})",
        )
        if group is None:
            return F.embedding(ids, weight)
        local, elsewhere = _local_ids(ids, weight.shape[0], group)
        y = F.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0)
        # At most one term of each sum is non-zero, so the sum is exact in any dtype.
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
            # torch's kernel sorts the ids; index_add_ on CUDA adds atomically, in any order
            dw = torch.ops.aten.embedding_dense_backward(terms, local, weight.shape[0], -1, False)
            return dw.to(grad_dtype(weight))

        def into(buffer: torch.Tensor, add: bool) -> None:
            local, terms = addends()
            if not add:
                buffer.zero_()
            if buffer.is_cuda:  # deterministic, because it sorts the ids
                buffer.index_put_((local,), terms.to(buffer.dtype), accumulate=True)
            else:  # on a CPU index_put_ adds atomically, but index_add_ goes row by row
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
    """For each id, its row in this rank's shard (0 if it is another rank's), and a mask of the ids
    of other ranks."""
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
    """Embedding lookup in a table whose rows are sharded over the group.

    Forward:         y[T, E]{I} = all-reduce(onehot(ids)[T, V/R] W[V/R, E]{S(0)}): each rank
                     contributes its rows, and zeros for other ranks' rows; exact
    Weight gradient: dW[V/R, E]{S(0)} = onehot(ids)^T dy[T, E]{I}, no collective; summed in a fixed
                     order in fp32, so deterministic

    With sequence_parallel the output is y[T/R, E]{S(0)} and

    Forward:         y = reduce-scatter(onehot(ids) W), exact
    Weight gradient: dW = onehot(ids)^T all-gather(dy[T/R, E])

    Args:
        ids: int64 or int32 [...], the same on every rank of the group; 1-D with sequence_parallel.
        weight: weight[V/R, E], rows [r V/R, (r+1) V/R) of the table on rank r; the leaf parameter.
        group, sequence_parallel: as for `row_parallel_linear`.
        vocab_size: ids are in [0, vocab_size); rows past it are padding and never looked up.
        padded_vocab_size: V; None means `vocab_size` rounded up to a multiple of R.

    Returns y[..., E], or y[T/R, E] with sequence_parallel, in the dtype of `weight`. Raises
    ValueError if ids are not integers, the shard does not have V/R rows, or the tokens are not
    divisible by R, and RuntimeError (on CUDA a device-side assertion) if an id is outside the
    vocabulary.
    """
    name = f"vocab_parallel_embedding on rank {group_rank(group)}"
    check_integers("ids", ids)
    check_vocabulary(name, "rows", weight.shape[0], group, vocab_size, padded_vocab_size)
    if sequence_parallel and (ids.dim() != 1 or ids.shape[0] % group_size(group)):
        raise ValueError(
            f"{name}: sequence parallelism needs ids[T] with T divisible by the "
            f"{group_size(group)} tensor-parallel ranks, got ids{[*ids.shape]}"
        )
    if group is None and torch.compiler.is_compiling():
        return F.embedding(ids, weight)
    return _VocabParallelEmbedding.apply(ids, weight, group, vocab_size, sequence_parallel)


def check_vocabulary(
    name: str,
    what: str,
    local: int,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    padded: int | None,
) -> None:
    """Raise ValueError unless `local` rows or columns are this rank's share of the vocabulary."""
    ranks = group_size(group)
    if padded is None:
        padded = -(-vocab_size // ranks) * ranks
    if local * ranks != padded or not 1 <= vocab_size <= padded:
        raise ValueError(
            f"{name}: {local} {what} on each of {ranks} tensor-parallel ranks must add up to the "
            f"padded vocabulary of {padded}, and vocab_size must be in [1, {padded}], got "
            f"{vocab_size}; pass this rank's shard only"
        )
