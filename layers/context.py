"""Facts about the tokens of an activation: positions, documents, dropout keys, the KV cache."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from torch import Tensor

from warpweave.kernels.attention.visible import Packed
from warpweave.parallel.layout import SequenceLayout


@dataclass
class KVCache:
    """KV cache for decoding: every attention layer's keys and values of the earlier tokens.

    Attributes:
        capacity: the maximum number of tokens of a sequence.
        start: number of tokens that all layers have seen; the caller advances it after each
            forward.

    Examples:
        >>> from warpweave import Attention, TokenContext
        >>> attention, cache = Attention(64, 8).eval(), KVCache(capacity=32)
        >>> with torch.no_grad():
        ...     y = attention(torch.randn(10, 64), TokenContext(batch=1, cache=cache))
        >>> cache.start += 10  # the next tokens see these 10
    """

    capacity: int
    start: int = 0
    _kept: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def extend(self, layer: Hashable, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k and v[B, n, Hkv/tp, D] at positions start to start + n. Returns K and V of all
        positions up to start + n, as views. Raises ``ValueError`` if the new tokens do not fit."""
        end = self.start + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"the KV cache holds at most {self.capacity} tokens, got {end}")
        if layer not in self._kept:
            shape = (len(k), self.capacity, *k.shape[2:])
            self._kept[layer] = (k.new_empty(shape), v.new_empty(shape))
        for kept, new in zip(self._kept[layer], (k, v)):
            kept[:, self.start : end] = new
        keys, values = (kept[:, :end] for kept in self._kept[layer])
        return keys, values


@dataclass(frozen=True)
class TokenContext:
    """The tokens that the rows of an activation x[T, E] belong to.

    Attributes:
        batch: number of samples B; after gathering over the tensor axis, T = B * S/cp.
        layout: the positions that each rank of the context axis holds; None means the whole
            sequence.
        rope: (cos, sin), each [S/cp, D/2], of this rank's positions; None without rotary embedding.
        local_rope: the table for layers with a window, if it is a different one; None means `rope`.
        seed: dropout key of this step: a number or a 0-dim int64 tensor, as for `Drop`.
        token_ids: int64, one per row of the residual stream (T, or T/tp with sequence
            parallelism): the token's index in the global batch, which keys dropout.
        documents: int32 or int64 [n + 1] or [B, n + 1], boundaries of packed documents from 0 to S;
            a token attends only within its own document. None means one document. Pass `Packed` to
            compute the documents' table once instead of once per layer.
        cache: the KV cache of earlier tokens; the positions of these tokens begin at
            ``cache.start``. Only with one context rank and without gradients.

    Examples:
        >>> from warpweave import TransformerBlock
        >>> from warpweave.kernels.rope import rope_table
        >>> block = TransformerBlock(64, 8, 256, rope_theta=10000.0)
        >>> positions = torch.cat((torch.arange(10), torch.arange(6)))  # two packed documents
        >>> ends, rope = torch.tensor([0, 10, 16]), rope_table(positions, 8)
        >>> block(torch.randn(16, 64), TokenContext(batch=1, rope=rope, documents=ends)).shape
        torch.Size([16, 64])
    """

    batch: int
    layout: SequenceLayout | None = None
    rope: tuple[Tensor, Tensor] | None = None
    seed: int | Tensor = 0
    token_ids: Tensor | None = None
    documents: Tensor | Packed | None = None
    cache: KVCache | None = None
    local_rope: tuple[Tensor, Tensor] | None = None
