"""Self-attention with heads sharded over the tensor axis and tokens over the context axis.

    eight heads on cp = 2, tp = 2; s0 and s1 are the rows of the two cp ranks

    rank (cp, tp)   qkv (column-parallel)   attention (context-parallel)   out (row-parallel)
    (0, 0)          heads 0-3 of s0         s0 to all keys, heads 0-3      y of s0, summed over tp
    (0, 1)          heads 4-7 of s0         s0 to all keys, heads 4-7      y of s0, summed over tp
    (1, 0)          heads 0-3 of s1         s1 to all keys, heads 0-3      y of s1, summed over tp
    (1, 1)          heads 4-7 of s1         s1 to all keys, heads 4-7      y of s1, summed over tp

With sequence parallelism, the tokens of a cp rank are sharded over tp before qkv and after out.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from warpweave.kernels.attention import attention
from warpweave.kernels.attention.options import AttentionOptions, check_numbers, heads_per_kv_head
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.rope import apply_rope_qk, rope_table
from warpweave.layers.context import TokenContext
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divides, fusable
from warpweave.layers.norm import ColumnParallelRMSNorm, RMSNorm
from warpweave.layers.place import Place
from warpweave.layers.style import AttentionStyle, HeadStyle
from warpweave.parallel.context import Links, context_attention
from warpweave.parallel.context.explain import StrategyCost, explain
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.mesh import connected
from warpweave.parallel.shard import Cut, ParamRecord
from warpweave.parallel.tensor.qkv import parallel_qkv_rope


class Attention(nn.Module):
    """Multi-head or grouped-query self-attention: qkv projection, rotary embedding, attention,
    output projection.

    ``qkv.weight`` has shape ((heads + 2 * kv_heads) * head_dim, E), grouped by KV head. Each group
    has the rows of its query heads, then of its key, then of its value. Sharding the rows evenly
    therefore gives every tensor rank whole groups. Projection and rotary embedding are one Function
    (``parallel.tensor.qkv``), unless ``qkv`` has been replaced, wrapped or hooked.

    Args:
        embed_dim, num_heads: as for ``nn.MultiheadAttention``; there is no dropout of the attention
            probabilities.
        style, place: `AttentionStyle` and `Place`, or their fields as keywords: num_kv_heads,
            window, rope_theta, mesh and so on. The QK norms are always RMSNorms; of `norm` they use
            only "rms1p", which makes their factors 1 + weight.
        out_init: standard deviation of a keyed initialization of the output projection.

    Raises:
        ValueError: embed_dim is not divisible by heads (and head_size is not given), heads by KV
            heads, or KV heads by tp; a rotary embedding is used with an odd head size; or window,
            softcap, strategy or impl is invalid.

    Examples:
        >>> attention = Attention(64, 8, num_kv_heads=2, rope_theta=10000.0)
        >>> attention(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    @fields_as_keywords(
        unused=("norm_place", "norm_bias", "recompute"), style=AttentionStyle, place=Place
    )
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        style: AttentionStyle,
        place: Place,
        out_init: float = 0.02,
    ) -> None:
        super().__init__()
        kv_heads = num_heads if style.num_kv_heads is None else style.num_kv_heads
        self.mesh = connected(place.mesh)
        tp = self.mesh.size("tp")
        if num_heads < 1 or kv_heads < 1:
            raise ValueError(
                f"need at least one head and one KV head, got {num_heads} and {kv_heads}"
            )
        if style.head_size is None and embed_dim % num_heads:
            raise ValueError(f"embed_dim ({embed_dim}) is not divisible by num_heads ({num_heads})")
        self.num_heads, self.style = num_heads, style
        self.strategy, self.impl = place.strategy, place.impl
        self._cut_tokens = place.sequence_parallel and tp > 1
        self.head_dim = embed_dim // num_heads if style.head_size is None else style.head_size
        if self.head_dim < 1:
            raise ValueError(f"head_size must be at least 1, got {self.head_dim}")
        self.group = heads_per_kv_head(num_heads, kv_heads)
        check_divides("num_kv_heads", kv_heads, tp)
        if style.rope_theta is not None and self.head_dim % 2:
            raise ValueError(f"rope needs an even head size, got {self.head_dim}")
        check_numbers(AttentionOptions(**self._mask))
        qkv_bias = style.bias if style.qkv_bias is None else style.qkv_bias
        qkv_features = kv_heads * (self.group + 2) * self.head_dim
        each = (self.group * self.head_dim, self.head_dim, self.head_dim)
        self.qkv = ColumnParallelLinear(
            embed_dim, qkv_features, qkv_bias, matrices=each, place=place
        )
        size = num_heads * self.head_dim
        self.out = RowParallelLinear(size, embed_dim, style.bias, init=out_init, place=place)
        self.q_norm = self._head_norm(num_heads, place)
        self.k_norm = self._head_norm(kv_heads, place)
        self.records: dict[str, ParamRecord] = {}
        self.register_parameter("sinks", None)
        if style.sinks:
            cuts = (Cut("tp", 0, tp),)
            record = ParamRecord("sinks", (num_heads,), cuts, init="zeros", decay=False)
            zeros = torch.zeros(record.local_shape, device=place.device, dtype=place.dtype)
            self.records["sinks"], self.sinks = record, nn.Parameter(zeros)

    def _head_norm(self, heads: int, place: Place) -> RMSNorm | ColumnParallelRMSNorm | None:
        """QK norm per query (or key) head, or over all of them; None if the style has none."""
        style = self.style
        if not style.qk_norm:
            return None
        like: dict[str, Any] = {"offset": style.norm == "rms1p", "place": place}
        if style.qk_norm_whole:
            return ColumnParallelRMSNorm(heads * self.head_dim, style.norm_eps, **like)
        # Each tensor rank normalizes its own heads, so the weight's gradient is a partial sum.
        return RMSNorm(self.head_dim, style.norm_eps, sequence_parallel=True, **like)

    @property
    def _mask(self) -> dict[str, Any]:
        """Keyword arguments of `attention` that concern the scores and the mask."""
        style = self.style
        return {
            "causal": style.causal,
            "window": style.window,
            "scale": style.attention_scale,
            "softcap": style.softcap,
            "impl": self.impl,
        }

    def reset_parameters(self) -> None:
        """Set the sinks to 0. The projections have their own `reset_parameters`."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def context_costs(self, layout: SequenceLayout, batch: int) -> tuple[StrategyCost, ...]:
        """Costs of the context-parallel strategies, and the choice of "auto"; see `explain`."""
        sizes, strategy = self.mesh.sizes, self.strategy
        heads = self.num_heads // sizes.tp
        return explain(
            layout, heads=heads, kv_heads=heads // self.group, head_dim=self.head_dim, batch=batch,
            itemsize=self.qkv.weight.itemsize, causal=self.style.causal, window=self.style.window,
            ulysses=sizes.ulysses if sizes.ulysses > 1 else None,
            links=strategy if isinstance(strategy, Links) else None,
        )  # fmt: skip

    def forward(
        self, x: Tensor, context: TokenContext | None = None, *, add_bias: bool = True
    ) -> Tensor:
        """x[B, S, E] -> y[B, S, E]; with `context`, x[T, E] or x[T/tp, E] -> the same shape.

        Without `context`, the sequence is whole and starts at position 0. Without `add_bias`, the
        caller must add ``out.bias``.

        Raises:
            ValueError: `context` is None, and x has no batch dim or its tokens are sharded; or the
                context has no table for the rotary embedding.
        """
        if context is None and self._cut_tokens:
            raise ValueError(
                "with sequence_parallel, attention expects x[T/tp, E] and a context (TokenContext) "
                f"that gives the number of samples, got x{[*x.shape]} without a context"
            )
        if context is None and x.dim() != 3:
            raise ValueError(f"without a context, attention expects x[B, S, E], got {[*x.shape]}")
        q, k, v = self._heads(x, context)
        documents = None if context is None else context.documents
        layout = None if context is None else context.layout
        masked = self._mask | {"documents": documents, "sinks": self.sinks}
        whole = layout is None or (layout.parts == 1 and layout.local_len == q.shape[1])
        if context is not None and context.cache is not None:
            runs = ((context.cache.start, q.shape[1]),)
            k, v = context.cache.extend(self, k, v)
            o = attention(q, k, v, q_runs=runs, **masked)
        elif self.mesh.sizes.cp == 1 and whole:
            o = attention(q, k, v, **masked)
        else:  # also refuses a layout that does not fit
            o = context_attention(
                q, k, v, layout=layout or SequenceLayout(q.shape[1], 1), group=self.mesh.context,
                strategy=self.strategy, buffers=self.mesh.buffers, **masked,
            )  # fmt: skip
        o = o.flatten(2)
        o = o if context is None else o.flatten(0, 1)
        return self.out(o) if add_bias else self.out(o, add_bias=False)

    def _heads(self, x: Tensor, context: TokenContext | None) -> tuple[Tensor, Tensor, Tensor]:
        """q[B, S, H/tp, D], k and v[B, S, Hkv/tp, D] of this rank's heads, rotated."""
        if not fusable(self.qkv, ColumnParallelLinear):
            return self._composed(x, context)
        tp = self.mesh.size("tp") if self.qkv.sequence_parallel else 1
        if context is None:
            shape, x = (x.shape[0], x.shape[1]), x.flatten(0, 1)
        else:
            shape = _samples(context, len(x) * tp)
        rope = self._rope(shape[1], x, context)
        cos, sin = rope if rope is not None and self.q_norm is None else (None, None)
        weight, bias = (
            t if t is None else t.unflatten(0, (-1, self.group + 2, self.head_dim))
            for t in (self.qkv.weight, self.qkv.bias)
        )
        q, k, v = parallel_qkv_rope(
            x, weight, bias, cos, sin, shape=shape, impl=self.impl, **self.qkv.over_ranks
        )
        if self.q_norm is not None:
            q, k = self._turned(q, k, rope)
        return q, k, v

    def _composed(self, x: Tensor, context: TokenContext | None) -> tuple[Tensor, Tensor, Tensor]:
        """Like `_heads`, but call ``qkv`` and then the rotary embedding."""
        qkv = self.qkv(x)
        if context is not None:
            qkv = qkv.unflatten(0, _samples(context, len(qkv)))
        qkv = qkv.unflatten(-1, (-1, self.group + 2, self.head_dim))
        # The backward of one split writes the gradient once; three slices would add three buffers.
        q, k, v = qkv.split((self.group, 1, 1), dim=3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        q, k = self._turned(q, k, self._rope(q.shape[1], q, context))
        return q, k, v

    def _turned(
        self, q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Projected queries and keys after QK norm and rotary embedding."""
        if self.q_norm is not None:
            if self.style.qk_norm_whole:
                q, k = (
                    norm(x.flatten(-2)).unflatten(-1, (-1, self.head_dim))
                    for norm, x in ((self.q_norm, q), (self.k_norm, k))
                )
            else:
                q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = apply_rope_qk(q, k, *rope, impl=self.impl)
        return q, k

    def _rope(
        self, length: int, x: Tensor, context: TokenContext | None
    ) -> tuple[Tensor, Tensor] | None:
        theta, scaling = self.style.rope_theta, self.style.rope_scaling
        if theta is None:
            return None
        if context is not None:
            if context.rope is None:
                raise ValueError(
                    "this attention layer has a rotary embedding, but context.rope is None"
                )
            local = self.style.window is not None and context.local_rope is not None
            return context.local_rope if local else context.rope
        positions, wide = torch.arange(length, device=x.device), compute_dtype(x)
        return rope_table(positions, self.head_dim, theta=theta, scaling=scaling, dtype=wide)

    def extra_repr(self) -> str:
        style = self.style
        shown = ["causal", "window", "softcap", "sinks", "rope_theta"]
        for field in fields(HeadStyle):
            if field.name not in shown and getattr(style, field.name) != field.default:
                shown.append(field.name)
        return (
            f"embed_dim={self.qkv.in_features}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_heads // self.group}, "
            + ", ".join(f"{name}={getattr(style, name)}" for name in shown)
        )


def _samples(context: TokenContext, tokens: int) -> tuple[int, int]:
    """The number of samples among these tokens, and their length."""
    if context.batch:
        return context.batch, tokens // context.batch
    return 0, context.layout.local_len if context.layout is not None else 0
