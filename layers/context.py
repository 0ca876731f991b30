"""What layers need to know about the tokens of an activation: positions, documents, dropout keys,
the KV cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from warpweave.kernels.attention.visible import Packed
from warpweave.parallel.layout import SequenceLayout


@dataclass
class KVCache:
    """The KV cache of decoding: keys and values of the earlier tokens, of every attention layer.

    Attributes:
        capacity: the largest number of tokens of a sequence.
        start: tokens that all layers have seen; the caller advances it after each forward.
    """

    capacity: int
    start: int = 0
    _kept: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def extend(self, layer: Hashable, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v[B, n, Hkv/tp, D] of positions start to start + n; returns K and V of all
        positions up to there, as views.

        Raises ``ValueError`` if they do not fit.
        """
        end = self.start + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} tokens, got {end}")
        if layer not in self._kept:
            shape = (len(k), self.capacity, *k.shape[2:])
            self._kept[layer] = (k.new_empty(shape), v.new_empty(shape))
        for kept, new in zip(self._kept[layer], (k, v)):
            kept[:, self.start : end] = new
        keys, values = (kept[:, :end] for kept in self._kept[layer])
        return keys, values


@dataclass(frozen=True)
class TokenContext:
    """The tokens of the rows of an activation x[T, E].

    Attributes:
        batch: number of samples B; after gathering over the tensor axis, T = B * S/cp.
        layout: which positions each rank of the context axis holds; None is the whole sequence.
        rope: (cos, sin), each [S/cp, D/2], of this rank's positions; None without rotary embedding.
        local_rope: the table for layers with a window, if it differs; None is `rope`.
        seed: dropout key of this step.
        token_ids: int64, one per row of the residual stream (T, or T/tp with sequence
            parallelism): the token's index in the global batch, by which dropout is keyed.
        documents: int32 or int64 [n + 1] or [B, n + 1], boundaries of packed documents from 0 to S;
            attention is within a document; None is one document. `Packed` ones have the table that
            every layer would else make of them.
        cache: the KV cache of earlier tokens; the positions of these tokens begin at
            ``cache.start``. On one context rank, without gradients.

    Two packed documents, of 10 and 6 tokens, each with positions from 0::

        positions = torch.cat((torch.arange(10), torch.arange(6)))
        context = TokenContext(
            batch=1, rope=rope_table(positions, head_dim), documents=torch.tensor([0, 10, 16])
        )
        y = block(x, context)  # x[16, E]
    """

    batch: int
    layout: SequenceLayout | None = None
    rope: tuple[Tensor, Tensor] | None = None
    seed: int = 0
    token_ids: Tensor | None = None
    documents: Tensor | Packed | None = None
    cache: KVCache | None = None
    local_rope: tuple[Tensor, Tensor] | None = None
