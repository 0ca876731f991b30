"""The head of a language model fused with its loss, with the vocabulary sharded over tensor ranks.

A linear layer, whose output features are the vocabulary, and the cross entropy of its logits.

    four ranks, z = x W^T, W[V, E] sharded by rows: rank r has the logits of V/4 words
    rank r   for each block of its columns: z[T, block]; from it, per token, max and sum of exp and
             the label's logit (with label smoothing also the sum of z); then discards the block
    all      one all-gather of these 2 or 3 numbers per token, merged into lse and loss
    rank r   backward: z[T, block] again, dz, dW[block] += dz^T x, dx{P} += dz W
    all      all-reduce (sequence parallel: reduce-scatter) of dx

Neither forward nor backward holds the logits [T, V/R]. The gradients may also be computed in the
forward (``recompute=False``); `kernels.cross_entropy.linear` describes both orders of work and
their costs. Types and conventions are those of ``tensor``; E is the number of features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from warpweave.kernels.cross_entropy.linear import check_linear_cross_entropy, head_loss
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary, check_options
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.embedding import check_vocabulary
from warpweave.parallel.tensor.linear import column_parallel_linear
from warpweave.parallel.tensor.loss import vocab_parallel_cross_entropy
from warpweave.parallel.tensor.ranks import tensor_ranks
from warpweave.parallel.words import CAPPED


def vocab_parallel_linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    group: dist.ProcessGroup | None,
    vocab_size: int,
    sequence_parallel: bool = False,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
    recompute: bool | None = None,
    softcap: float | None = None,
    padded_vocab_size: int | None = None,
    overlap: str = "bulk",
    workspace: Workspace | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """Cross entropy of the logits x weight^T, whose vocabulary is sharded over the group.

    With z[T, V/R] = x[T, E] W[V/R, E]^T and dz = dloss (softmax(z) (1 + 2 c lse) - (1 - e)
    onehot(label) - e/vocab_size), computed and discarded block by block,

    Forward:         loss[T]{I} = lse - (1 - e) z[label] - e/vocab_size sum_v z[v] + c lse^2 by one
                     all-gather of log-sum-exp, label's logit and (for e > 0) sum of each rank's
                     columns: 2 or 3 numbers per token and rank. "sum" adds the losses.
    Input gradient:  dx[T, E]{I} = all-reduce(dz[T, V/R] W), its terms in fp32
    Weight gradient: dW[V/R, E]{S(0)} = dz^T x, no collective; exact

    With sequence_parallel the input is x[T/R, E]{S(0)}. x is gathered in the forward (and in the
    backward, if the logits are recomputed), and

    Input gradient:  dx[T/R, E]{S(0)} = reduce-scatter(dz W)

    With recompute=False the gradients and their collectives are computed in the forward, with one
    all-gather of statistics per slice of rows; the backward has no collective. A deferred weight
    gradient is then only added later. With recompute=True it is computed with dx, never deferred.

    overlap="chunked" multiplies one rank's tokens while the next rank's are received. With
    recompute=False it multiplies some tokens of every rank at a time, and reduces their dx during
    the products of the next. "fused" gathers x within the product with the first block of columns.
    The backward of recompute=True always gathers x and reduces dx as a whole, because in chunks it
    would read and write all of dW once per chunk.

    Args:
        x: x[..., E] replicated, or x[T/R, ..., E] with sequence_parallel.
        weight: weight[V/R, E], rows [r V/R, (r+1) V/R) of W on rank r; the leaf parameter.
        labels: int64[...] or int64[T, ...], the same on every rank of the group.
        group: the R tensor ranks; None for a single rank.
        vocab_size: size of the vocabulary without padding; padding rows get gradient 0.
        sequence_parallel: x has its tokens sharded over the group along dim 0.
        ignore_index: tokens with this label have loss zero and no gradient.
        label_smoothing, z_loss: e in [0, 1] and c >= 0.
        reduction: "sum" returns a 0-dim loss, "none" returns losses with the shape of `labels`.
        recompute: as for `linear_cross_entropy`; None means False for CPU tensors and "sum".
        softcap: use the logits softcap * tanh(z / softcap). They are computed for some rows of each
            rank at a time (`CAPPED`), and the backward recomputes them. None means no softcap.
        padded_vocab_size: V; None means `vocab_size` rounded up to a multiple of R.
        overlap, workspace: as for `column_parallel_linear`.
        impl: as for `linear_cross_entropy`.

    Returns:
        The loss in fp32 (fp64 for fp64), bitwise equal on every rank of the group. The caller
        divides the sum by the global number of valid tokens.

    Raises:
        ValueError: the weight does not have V/R rows, other shapes, dtypes or options do not match,
            or, for CPU tensors, a label is neither in the vocabulary nor `ignore_index` (on a GPU
            the loss of such a token is NaN).
    """
    name = f"vocab_parallel_linear_cross_entropy on rank {group_rank(group)}"
    check_options(reduction, label_smoothing, z_loss)
    if reduction == "mean":
        raise ValueError(
            f'{name}: reduction must be "sum" or "none", because no rank has all tokens; '
            f"got {reduction!r}"
        )
    check_vocabulary(name, "weight rows", len(weight), group, vocab_size, padded_vocab_size)
    parts = group_size(group) if sequence_parallel else 1
    dtype = check_linear_cross_entropy(name, x, weight, labels, parts=parts)
    impl = choose(impl, x, weight, labels)
    if softcap is not None:
        if not softcap > 0:
            raise ValueError(f"{name}: softcap must be positive or None, got {softcap}")

        def losses(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            where = {"sequence_parallel": sequence_parallel, "overlap": overlap}
            z = column_parallel_linear(x, weight, group=group, workspace=workspace, **where)
            return vocab_parallel_cross_entropy(
                softcap * torch.tanh(z.to(compute_dtype(z)) / softcap),
                labels,
                group=group,
                vocab_size=vocab_size,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                padded_vocab_size=padded_vocab_size,
                impl=impl,
            )

        each = _by_rows(losses, x, weight, labels, parts)
        return each.sum() if reduction == "sum" else each
    vocabulary = Vocabulary(0, vocab_size, ignore_index, label_smoothing, z_loss, impl)
    ranks = tensor_ranks(group, sequence_parallel, overlap, workspace, x=x, impl=impl)
    if group is not None and overlap in ("chunked", "fused"):
        vocabulary.check_labels(labels)  # raise before the first message, not between two
    return head_loss(x, weight, labels, vocabulary, dtype, reduction, recompute, ranks)


def _by_rows(
    losses: Callable[..., torch.Tensor],
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    parts: int,
) -> torch.Tensor:
    """Compute losses(x, weight, labels) for some rows of every rank at a time, each under
    activation checkpointing.

    The arguments are x[T/parts, ..., E] and labels[T, ...]; `losses` gathers the ranks' rows in
    rank order.
    """
    again = {"use_reentrant": False, "preserve_rng_state": False}
    rows, most = x.flatten(0, -2), max(1, min(CAPPED[0], CAPPED[1] // len(weight)))
    if len(rows) <= most:
        return checkpoint(losses, rows, weight, labels.flatten(), **again).view(labels.shape)
    found = [
        checkpoint(losses, some, weight, of.flatten(), **again).unflatten(0, (parts, -1))
        for some, of in zip(rows.split(most), labels.reshape(parts, -1).split(most, 1))
    ]
    return torch.cat(found, 1).reshape(labels.shape)
