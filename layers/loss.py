"""The language modeling loss, from logits or from the head's input; tp shards the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpweave.kernels.runtime.dispatch import check_impl
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.place import Place
from warpweave.parallel.collectives import Pending
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.tensor.linear_loss import vocab_parallel_linear_cross_entropy
from warpweave.parallel.tensor.loss import vocab_parallel_cross_entropy


class VocabParallelCrossEntropy(nn.Module):
    """The loss of a head of your own: a sum of token losses divided by a known normalizer.

    The normalizer is the number of valid tokens in the global batch, over all micro-batches, data
    ranks and context ranks. Their losses and gradients are therefore summed, never averaged.

    Args:
        vocab_size: logical vocabulary size; padding columns of the logits are ignored.
        label_smoothing: uniform over the whole vocabulary.
        z_loss: coefficient c of the term c lse^2.
        mesh: the connected mesh; None is one device.
        impl: "triton", "torch" or None, as for the kernels.

    Examples:
        >>> loss, labels = VocabParallelCrossEntropy(256), torch.arange(16)
        >>> loss(torch.randn(16, 256), labels, normaliser=16).shape
        torch.Size([])
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        mesh: ConnectedMesh | None = None,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.label_smoothing, self.z_loss = vocab_size, label_smoothing, z_loss
        self.mesh, self.impl = connected(mesh), check_impl(impl)

    def forward(self, logits: Tensor, labels: Tensor, normaliser: Tensor | float) -> Tensor:
        """logits[T, ceil(V/tp)], labels int64[T] (-100: no loss) -> loss, 0-dim, fp32 or fp64."""
        losses = vocab_parallel_cross_entropy(
            logits,
            labels,
            group=self.mesh.group("tp"),
            vocab_size=self.vocab_size,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            impl=self.impl,
        )
        return torch.sum(losses) / normaliser


class VocabParallelLinearCrossEntropy(nn.Module):
    """Head and loss in one function, which never holds all logits at once.

    It has no parameters: the head's weight, which may be tied to the embedding, is an argument.

    Args:
        vocab_size: logical vocabulary size; padding rows of the weight are ignored.
        label_smoothing, z_loss: as for ``kernels.cross_entropy``.
        recompute: recompute the logits in the backward; None chooses by device, see
            ``kernels.linear_cross_entropy``.
        softcap: the logits are softcap * tanh(logits / softcap); None is no softcap.
        mesh: the connected mesh; None is one device.
        sequence_parallel: the input is x[T/tp, E], tokens sharded over the tensor axis.
        overlap: as for ``ColumnParallelLinear``.
        impl: "triton", "torch" or None, as for the kernels.
        place: a `Place`, instead of these four options.

    Examples:
        >>> loss, head = VocabParallelLinearCrossEntropy(256), torch.randn(256, 64)
        >>> loss(torch.randn(16, 64), head, torch.arange(16), normaliser=16).shape
        torch.Size([])
    """

    @fields_as_keywords(unused=("device", "dtype", "strategy", "recompute"), place=Place)
    def __init__(
        self,
        vocab_size: int,
        *,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        recompute: bool | None = None,
        softcap: float | None = None,
        place: Place,
    ) -> None:
        super().__init__()
        self.vocab_size, self.label_smoothing, self.z_loss = vocab_size, label_smoothing, z_loss
        self.recompute, self.softcap = recompute, softcap
        self.overlap, self.impl, self.mesh = place.overlap, place.impl, connected(place.mesh)
        self.sequence_parallel = place.sequence_parallel

    def forward(
        self, x: Tensor, weight: Tensor, labels: Tensor, normaliser: Tensor | Pending | float
    ) -> Tensor:
        """x[..., E], weight[ceil(V/tp), E], labels int64[...] (-100: no loss) -> loss.

        With sequence parallelism, x[T/tp, ..., E] for labels int64[T, ...]. The loss is 0-dim, fp32
        or fp64: the sum of the token losses divided by `normaliser`, as in
        `VocabParallelCrossEntropy`. A pending normaliser is waited for after the sum is computed.
        """
        total = vocab_parallel_linear_cross_entropy(
            x,
            weight,
            labels,
            group=self.mesh.group("tp"),
            vocab_size=self.vocab_size,
            sequence_parallel=self.sequence_parallel,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            recompute=self.recompute,
            softcap=self.softcap,
            overlap=self.overlap,
            workspace=self.mesh.workspace("tp"),
            impl=self.impl,
        )
        return total / (normaliser.wait() if isinstance(normaliser, Pending) else normaliser)
