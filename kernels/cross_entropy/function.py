"""Cross entropy without a copy of the logits.

    loss = lse - (1 - s) * z_t - (s / V) * sum_j z_j + c * lse^2        lse = log(sum_j exp(z_j))

for a row z of V logits with label t, label smoothing s and z-loss c. How forward and backward are
computed, and on a shard of the vocabulary, is in `halves`; saved for backward are the
logits, which exist anyway, and lse. `linear_cross_entropy`, which has no logits, has a file of its
own.

A label that is neither in [0, vocab_size) nor `ignore_index` raises ValueError on CPU tensors. On a
GPU looking would make the host wait: there that row's loss and gradient are NaN, never just wrong.
"""

from __future__ import annotations

import torch

from warpweave.kernels.cross_entropy.halves import (
    check_logits,
    check_options,
    cross_entropy_bwd,
    cross_entropy_fwd,
    token_losses,
)
from warpweave.kernels.cross_entropy.linear import linear_cross_entropy
from warpweave.kernels.runtime.dispatch import choose, once_differentiable

__all__ = [
    "cross_entropy",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "linear_cross_entropy",
    "token_losses",
]


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, vocab_size, ignore_index, label_smoothing, impl, z_loss=0.0):
        lse, target, total = cross_entropy_fwd(
            logits,
            labels,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            want_sum=label_smoothing != 0.0,
            impl=impl,
        )
        ctx.save_for_backward(logits, labels, lse)
        ctx.options = {
            "vocab_size": vocab_size,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "z_loss": z_loss,
        }
        ctx.impl = impl
        return token_losses(lse, target, total, labels, **ctx.options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dloss):
        dlogits = cross_entropy_bwd(dloss, *ctx.saved_tensors, **ctx.options, impl=ctx.impl)
        return dlogits, None, None, None, None, None, None

    @staticmethod
    def spmd_typecheck(*, logits, labels):
        from spmd_types import rules

        return rules.einsum("n_,n->n", logits, labels)  # vocabulary whole


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

    Every token that is not ignored also loses `z_loss` * lse^2, inside the mean.

    reduction: "mean" over the labels that are not `ignore_index` (0 if there are none; torch gives
    NaN), "sum", or "none" for losses[N]. The result is fp32, fp64 for fp64 logits. Columns from
    `vocab_size` on are padding. Raises ValueError on wrong shapes, dtypes, options and, on CPU
    tensors, labels outside the vocabulary.
    """
    check_options(reduction, label_smoothing, z_loss)
    impl = choose(impl, logits, labels)
    size = check_logits(logits, labels, 0, vocab_size)
    if size > logits.shape[1]:
        raise ValueError(f"vocab_size must be at most the {logits.shape[1]} columns, got {size}")
    options = size, ignore_index, label_smoothing, impl, z_loss
    losses = _CrossEntropy.apply(logits, labels, *options)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (labels != ignore_index).sum().clamp(min=1)
