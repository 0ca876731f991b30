"""The language-model head's loss over logits that are cut over the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.tensor import vocab_parallel_cross_entropy


class VocabParallelCrossEntropy(nn.Module):
    """Sum of token losses divided by a normaliser that the caller knows beforehand.

    The normaliser is the number of valid tokens of the whole global batch, over all micro-batches,
    data and context ranks. Losses and gradients of all of them are then simply summed.

    Args:
        vocab_size: logical vocabulary; padding columns of the logits take no part.
        label_smoothing: uniform over the whole vocabulary.
        mesh: the connected mesh; None is one device.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        label_smoothing: float = 0.0,
        mesh: ConnectedMesh | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.label_smoothing = vocab_size, label_smoothing
        self.mesh = connected(mesh)

    def forward(self, logits: Tensor, labels: Tensor, normaliser: Tensor | float) -> Tensor:
        """logits[T, ceil(V/tp)], labels int64[T] (-100: no loss) -> loss, 0-dim, fp32 or fp64."""
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            group=self.mesh.group("tp"),
            vocab_size=self.vocab_size,
            label_smoothing=self.label_smoothing,
        )
        return torch.sum(losses) / normaliser
