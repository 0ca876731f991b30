"""Vocabulary-parallel cross entropy (Shoeybi et al. 2019, arXiv:1909.08053).

The columns of the logits, the vocabulary, are sharded over the tensor axis.

    four ranks, per token
    rank r   from its V/4 columns: lse_r = log sum exp z, the label's logit if it has that column,
             and with label smoothing the sum of z
    all      one all-gather of these 2 or 3 numbers (Megatron: three all-reduces)
    all      lse = logsumexp over r of lse_r, loss = lse - z[label], the same on every rank
    rank r   backward: dz = dloss (exp(z - lse) - onehot(label)) of its columns, no collective
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.cross_entropy.function import CrossEntropy
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary, check_logits
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.collectives import group_rank
from warpweave.parallel.tensor.embedding import check_vocabulary
from warpweave.parallel.tensor.ranks import tensor_ranks


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
    """Cross entropy of each token over logits whose vocabulary is sharded over the group.

    With e = label_smoothing, c = z_loss and sums over the global vocabulary, for each token

    Forward:        loss[T]{I} = lse - (1 - e) z[label] - e/vocab_size sum_v z[v] + c lse^2 with the
                    log-sum-exp, the label's logit and (for e > 0) the sum of this rank's columns;
                    one all-gather of these numbers, merged on every rank in the same order
    Input gradient: dz[T, V/R]{S(1)} = dloss (softmax(z) (1 + 2 c lse) - (1 - e) onehot(label) -
                    e/vocab_size), no collective; zero in padding columns and for ignored tokens

    Args:
        logits: logits[T, V/R], columns [r V/R, (r+1) V/R) on rank r. Columns from `vocab_size` on
            are padding and are ignored.
        labels: int64[T], the same on every rank of the group.
        group: the R tensor ranks; None for a single rank.
        vocab_size: size of the vocabulary without padding.
        ignore_index: tokens with this label have loss zero and no gradient.
        label_smoothing: e, in [0, 1).
        z_loss: c, not negative.
        padded_vocab_size: V; None means `vocab_size` rounded up to a multiple of R.
        impl: "triton", "torch" or None to choose by device.

    Returns losses[T] in fp32 (fp64 for fp64), bitwise equal on every rank of the group. The caller
    divides their sum by the global number of valid tokens. Raises ValueError if shapes or options
    do not match, or, for CPU tensors, if a label is neither in the vocabulary nor `ignore_index`
    (on a GPU its loss is NaN).
    """
    name = f"vocab_parallel_cross_entropy on rank {group_rank(group)}"
    if logits.dim() != 2 or labels.shape != logits.shape[:1]:
        given = f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        raise ValueError(f"{name}: expected logits[T, V/R] and labels[T], got {given}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"{name}: label_smoothing must be in [0, 1), got {label_smoothing}")
    if not z_loss >= 0:
        raise ValueError(f"{name}: z_loss must not be negative, got {z_loss}")
    check_vocabulary(name, "logits columns", logits.shape[1], group, vocab_size, padded_vocab_size)
    impl = choose(impl, logits, labels)
    check_logits(logits, labels, group_rank(group) * logits.shape[1], vocab_size)
    vocabulary = Vocabulary(0, vocab_size, ignore_index, label_smoothing, z_loss, impl)
    return CrossEntropy.apply(logits, labels, vocabulary, tensor_ranks(group, False))
