"""Cross entropy of logits whose columns, the vocabulary, are cut over the tensor axis."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from warpweave.kernels.cross_entropy.function import CrossEntropy
from warpweave.kernels.cross_entropy.in_forward import (
    Here,
    Pieces,
    linear_cross_entropy_fwd_bwd,
)
from warpweave.kernels.cross_entropy.local import LOCAL_VOCABULARY, LocalVocabulary
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.runtime.dispatch import choose
from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    group_size,
    start_all_gather,
    sum_dtype,
)
from warpweave.parallel.tensor.chunked import ChunkedRanks
from warpweave.parallel.tensor.embedding import check_vocabulary
from warpweave.parallel.tensor.fused import FusedRanks
from warpweave.parallel.tensor.overlap import Kinds, tensor_ranks
from warpweave.parallel.tensor.ranks import TensorRanks


class VocabularyRanks(TensorRanks, LocalVocabulary):
    """The ranks of a group that hold columns of the vocabulary each."""

    def own(self, vocabulary: Vocabulary, width: int) -> Vocabulary:
        return vocabulary._replace(start=group_rank(self.group) * width)

    def merge(self, stats: torch.Tensor) -> torch.Tensor:
        """By one all-gather, merged on every rank in the same order."""
        every = start_all_gather(stats.unsqueeze(0), self.group).wait()
        return torch.cat((every[:, 0].logsumexp(0)[None], every[:, 1:].sum(0)))

    def term_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return sum_dtype(dtype)

    def sum(self, dx: torch.Tensor) -> torch.Tensor:
        return self.start_sum(dx).wait()

    def fwd_bwd(
        self, x: torch.Tensor, *tokens: Any, **wanted: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.gather(x)
        losses, dx, dw = linear_cross_entropy_fwd_bwd(x, *tokens, merge=self.merge, **wanted)
        return losses, dx if wanted["dx_dtype"] is None else self.sum(dx), dw

    def loss_type(self, equation: str, *operands: Any) -> Any:
        from spmd_types import I, P, rules

        # exp-sum, target logit and sum of logits are each a sum over v
        return rules.all_reduce(rules.einsum(equation, *operands), self.group, src=P, dst=I)


class _InPieces(VocabularyRanks, Pieces):
    """Where the forward makes the gradients, x comes and dx goes in pieces: those of all ranks'
    tokens on which all ranks work at a time, as they tell each other of every row."""

    @property
    def parts(self) -> int:
        return group_size(self.group) if self.sequence_parallel else 1

    def fwd_bwd(
        self, *tokens: Any, **wanted: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return linear_cross_entropy_fwd_bwd(*tokens, merge=self.merge, pieces=self, **wanted)


class ChunkedVocabulary(ChunkedRanks, _InPieces):
    """As many pieces as ranks, at least: one is on its way while another is multiplied."""

    @property
    def fewest(self) -> int:
        return group_size(self.group)

    def start_gather(self, x: torch.Tensor) -> Pending | Here:
        return start_all_gather(x, self.group) if self.sequence_parallel else Here(x)


class FusedVocabulary(FusedRanks, _InPieces):
    """A piece is gathered within the product of its first columns."""

    def start_gather(self, x: torch.Tensor) -> Here:
        return Here(Gathering(x, self.workspace) if self.sequence_parallel else x)


KINDS = Kinds(LOCAL_VOCABULARY, VocabularyRanks, ChunkedVocabulary, FusedVocabulary)


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
    check_vocabulary(name, "logits columns", logits.shape[1], group, vocab_size, padded_vocab_size)
    impl = choose(impl, logits, labels)
    vocabulary = Vocabulary(0, vocab_size, ignore_index, label_smoothing, z_loss, impl)
    return CrossEntropy.apply(logits, labels, vocabulary, tensor_ranks(group, False, kinds=KINDS))
