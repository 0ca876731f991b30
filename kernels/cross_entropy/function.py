"""Cross entropy without a copy of the logits: the autograd Function and the op.

`vocabulary` has the formula and the treatment of invalid labels; `forward` and `backward` compute
it. The logits, which exist anyway, and lse are saved for backward.
"""

from __future__ import annotations

import torch

from warpweave.kernels.cross_entropy.backward import cross_entropy_bwd_op
from warpweave.kernels.cross_entropy.forward import cross_entropy_fwd_op
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary, check_logits, check_options
from warpweave.kernels.gemm.local import LOCAL
from warpweave.kernels.runtime.beside import beside_dtensors
from warpweave.kernels.runtime.dispatch import choose, once_differentiable, refuse_tangents


class CrossEntropy(torch.autograd.Function):
    """losses[N] for checked logits[N, V/tp]."""

    @staticmethod
    def forward(ctx, logits, labels, vocabulary, ranks):
        refuse_tangents("cross_entropy", logits)  # a compiler skips the Function's own check
        ctx.vocabulary = vocabulary._replace(start=ranks.first_column(logits.shape[1]))
        want_sum = vocabulary.label_smoothing != 0.0
        parts = cross_entropy_fwd_op(logits, labels, ctx.vocabulary, want_sum)
        stats = ranks.merge(torch.stack(parts[: 2 + want_sum]))
        ctx.save_for_backward(logits, labels, stats[0].clone())  # not all of the stats
        return vocabulary.losses(stats, labels)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        return cross_entropy_bwd_op(dloss, *ctx.saved_tensors, ctx.vocabulary), *[None] * 3

    @staticmethod
    def spmd_typecheck(*, logits, labels, ranks):
        return ranks.loss_type("nv,n->n", logits, labels)


@beside_dtensors("logits")
def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    impl: str | None = None,
) -> torch.Tensor:
    """Cross entropy of logits[N, V] and labels int64[N]; differentiable in the logits.

    `z_loss` * lse^2 is added to the loss of every token that is not ignored, before the mean.

    reduction: "mean" over the labels that are not `ignore_index` (0 if there are none; torch gives
    NaN), "sum", or "none" for losses[N]. The result is fp32, or fp64 for fp64 logits. Columns from
    `vocab_size` on are padding. Raises ValueError for wrong shapes, dtypes or options and, on CPU
    tensors, for labels outside the vocabulary.

    Examples:
        >>> logits, labels = torch.randn(16, 256), torch.arange(16)
        >>> labels[:4] = -100  # these tokens have no loss
        >>> cross_entropy(logits, labels, z_loss=1e-4).shape
        torch.Size([])
    """
    check_options(reduction, label_smoothing, z_loss)
    impl = choose(impl, logits, labels)
    size = check_logits(logits, labels, 0, vocab_size)
    if size > logits.shape[1]:
        raise ValueError(
            f"vocab_size must be at most {logits.shape[1]}, the number of columns of logits, got "
            f"{size}"
        )
    vocabulary = Vocabulary(0, size, ignore_index, label_smoothing, z_loss, impl)
    losses = CrossEntropy.apply(logits, labels, vocabulary, LOCAL)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != ignore_index).sum().clamp(min=1)
