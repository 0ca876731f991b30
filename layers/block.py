"""The transformer block: attention and MLP on a residual stream, with norms before or after."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from warpweave.kernels.dropout import Drop, dropout
from warpweave.layers.attention import Attention
from warpweave.layers.context import TokenContext
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.linear import RowParallelLinear, fusable
from warpweave.layers.mlp import MLP
from warpweave.layers.norm import make_norm
from warpweave.layers.place import Place
from warpweave.layers.style import BlockStyle


class TransformerBlock(nn.Module):
    """``x = x + attention(norm(x)); x = x + mlp(norm(x))``, or with norms after both.

    Args:
        embed_dim, num_heads, hidden_dim: E, H and F.
        style, place: `BlockStyle` and `Place`, or their fields as keywords: norm, activation,
            num_kv_heads, rope_theta, dropout, mesh and so on. norm_place "pre" is
            ``x + attention(norm(x))``, "post" is ``x + norm(attention(x))`` (OLMo 2), and
            "sandwich" is both (Gemma 2); likewise for the MLP.
        site: number of the first of the block's two dropout sites.
        out_init: standard deviation of a keyed initialization of both output projections.

    Examples:
        >>> block = TransformerBlock(64, 8, 256, norm="rms", activation="swiglu")
        >>> block(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
    """

    @fields_as_keywords(style=BlockStyle, place=Place)
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int,
        *,
        style: BlockStyle,
        place: Place,
        site: int = 1,
        out_init: float = 0.02,
    ) -> None:
        super().__init__()
        where = style.norm_place
        if where not in ("pre", "sandwich", "post"):
            raise ValueError(f"norm_place must be 'pre', 'sandwich' or 'post', got {where!r}")
        self.dropout, self.site, self.impl = style.dropout, site, place.impl

        def norm_if(*places: str) -> nn.Module | None:
            return make_norm(style, embed_dim, place) if where in places else None

        same: dict[str, Any] = {"style": style, "place": place, "out_init": out_init}
        self.attention_norm = norm_if("pre", "sandwich")
        self.attention = Attention(embed_dim, num_heads, **same)
        self.attention_post_norm = norm_if("post", "sandwich")
        self.mlp_norm = norm_if("pre", "sandwich")
        self.mlp = MLP(embed_dim, hidden_dim, **same)
        self.mlp_post_norm = norm_if("post", "sandwich")

    def forward(self, x: Tensor, context: TokenContext | None = None) -> Tensor:
        """x[B, S, E] -> y[B, S, E]; with `context`, x[T, E] or x[T/tp, E] -> the same shape."""
        if self.mlp_post_norm is not None:
            return self._with_post_norms(x, context)
        # The next norm's kernel adds attention's bias, unless attention must add it itself.
        out = self.attention.out
        fuses = fusable(self.attention, Attention) and fusable(out, RowParallelLinear)
        a = self.attention(self.attention_norm(x), context, add_bias=not fuses)
        h, x = self.mlp_norm(
            a, residual=x, x_bias=out.bias if fuses else None, drop=self._drop(self.site, context)
        )
        return self.mlp(h, residual=x, drop=self._drop(self.site + 1, context))

    def _with_post_norms(self, x: Tensor, context: TokenContext | None) -> Tensor:
        h = x if self.attention_norm is None else self.attention_norm(x)
        a = self.attention_post_norm(self.attention(h, context))
        drop = self._drop(self.site, context)
        if self.mlp_norm is None:
            h = x = self._add(x, a, drop)
        else:
            h, x = self.mlp_norm(a, residual=x, drop=drop)
        return self._add(x, self.mlp_post_norm(self.mlp(h)), self._drop(self.site + 1, context))

    def _add(self, x: Tensor, y: Tensor, drop: Drop | None) -> Tensor:
        """x + dropout(y)."""
        return x + (y if drop is None else dropout(y, drop, impl=self.impl))

    def _drop(self, site: int, context: TokenContext | None) -> Drop | None:
        """The dropout key of a branch; None without dropout."""
        if self.dropout == 0.0 or not self.training:
            return None
        if context is None or context.token_ids is None:
            raise ValueError(
                f"dropout = {self.dropout} needs global token ids, but context.token_ids is "
                "missing; pass a TokenContext with token_ids"
            )
        return Drop(self.dropout, context.seed, site, context.token_ids)
