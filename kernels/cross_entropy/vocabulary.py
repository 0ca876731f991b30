"""The formula of cross entropy, and the columns of the vocabulary that a shard holds.

For a row z of logits with label t, over the vocabulary of V columns, and with label smoothing s and
z-loss c:

    lse = log(sum_j exp(z_j))        loss = lse - (1 - s) * z_t - (s / V) * sum_j z_j + c * lse^2
    dz_j = dloss * (exp(z_j - lse) * (1 + 2 c lse) - (1 - s) * [j = t] - s / V)

The z-loss keeps the softmax's normalizer near 1, so that low-precision logits do not drift
(Chowdhery et al. 2022, arXiv:2204.02311, with c = 1e-4).

On CPU tensors, a label that is neither in [0, V) nor `ignore_index` raises ValueError. On a GPU
this check would need a host sync, so the loss and the gradient of such a row are NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Vocabulary(NamedTuple):
    """The part of the vocabulary that logits[N, V/tp] or weight[V/tp, E] hold, and the options.

    Attributes:
        start: the index of their first column in the whole vocabulary.
        size: of the whole vocabulary; columns from there on are padding: not in the softmax or the
            smoothing, gradient 0.
        ignore_index, label_smoothing, z_loss, impl: as for `cross_entropy`.
    """

    start: int
    size: int
    ignore_index: int = -100
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    impl: str = "torch"

    def columns(self, width: int) -> int:
        """The number of the `width` columns that are not padding."""
        return max(0, min(width, self.size - self.start))

    def outside(self, labels: torch.Tensor) -> torch.Tensor:
        """bool[N]: true for invalid labels, which are neither in the vocabulary nor ignored."""
        return (labels != self.ignore_index) & ((labels < 0) | (labels >= self.size))

    def check_labels(self, labels: torch.Tensor) -> None:
        """Raise ValueError for invalid labels on a CPU."""
        if labels.device.type == "cpu" and (wrong := self.outside(labels)).any():
            first = labels[wrong][0].item()
            raise ValueError(
                f"labels must be in [0, {self.size}) or {self.ignore_index}, got {first}"
            )

    def losses(self, stats: Sequence[torch.Tensor | None], labels: torch.Tensor) -> torch.Tensor:
        """`token_losses` of lse[N], target[N] and, with smoothing, logit_sum[N]."""
        return token_losses(
            stats[0],
            stats[1],
            stats[2] if self.label_smoothing != 0.0 else None,
            labels,
            vocab_size=self.size,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
        )


def token_losses(
    lse: torch.Tensor,
    target: torch.Tensor,
    logit_sum: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """losses[N] from lse[N], target[N], logit_sum[N] of the whole vocabulary; 0 in ignored rows."""
    losses = lse - (1.0 - label_smoothing) * target
    if label_smoothing != 0.0:
        losses = losses - (label_smoothing / vocab_size) * logit_sum
    if z_loss != 0.0:
        losses = losses + z_loss * lse.square()
    return losses.masked_fill_(labels == ignore_index, 0.0)


def check_options(reduction: str, label_smoothing: float, z_loss: float) -> None:
    """Raise ValueError for an invalid option."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if not 0.0 <= z_loss < float("inf"):
        raise ValueError(f"z_loss must be finite and not negative, got {z_loss}")


def check_logits(logits, labels, vocab_start: int, vocab_size: int | None) -> int:
    """Return the vocabulary's size, or raise ValueError if shapes, dtypes or sizes do not fit."""
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ValueError(
            f"need logits[N, V] and labels[N], got {[*logits.shape]} and {[*labels.shape]}"
        )
    if labels.dtype != torch.int64 or not logits.dtype.is_floating_point:
        raise ValueError(
            f"labels must be int64 and logits must have a float dtype, got {labels.dtype} and "
            f"{logits.dtype}"
        )
    size = vocab_start + logits.shape[1] if vocab_size is None else vocab_size
    if vocab_start < 0 or size < 1:
        raise ValueError(f"need vocab_start >= 0, vocab_size >= 1, got {vocab_start}, {size}")
    return size
