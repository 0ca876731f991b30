"""The transformer block: attention and MLP on a residual stream, with norms before or after."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpweave.kernels.dropout import Drop, dropout
from warpweave.layers.attention import Attention, HeadStyle
from warpweave.layers.context import TokenContext
from warpweave.layers.fusable import fusable
from warpweave.layers.linear import RowParallelLinear
from warpweave.layers.mlp import MLP
from warpweave.layers.norm import make_norm
from warpweave.parallel.context import Links, Strategy
from warpweave.parallel.mesh import ConnectedMesh


class TransformerBlock(nn.Module):
    """``x = x + attention(norm(x)); x = x + mlp(norm(x))``, or with norms after both.

    Args:
        embed_dim, num_heads, hidden_dim: E, H and F.
        num_kv_heads: KV heads, by default num_heads.
        norm: "layer", "rms", or "rms1p" with factors 1 + weight; norm_eps its epsilon.
        norm_place: "pre", before attention and MLP; "post", of what they give, before it is added
            to the stream, ``x + norm(attention(x))`` (OLMo 2); "sandwich", both (Gemma 2).
        activation, recompute: as ``MLP``.
        bias: linear layers and LayerNorm have biases.
        causal, window, softcap, sinks, rope_theta, style, strategy: as ``Attention``.
        dropout: probability on both branches, keyed by global token ids (needs a context).
        site: number of the first of the block's two dropout sites.
        device, dtype, mesh, sequence_parallel, overlap, impl: as ``Attention``.
        out_init: standard deviation of a keyed initialisation of both output projections.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        hidden_dim: int,
        *,
        num_kv_heads: int | None = None,
        norm: str = "layer",
        norm_eps: float = 1e-5,
        norm_place: str = "pre",
        activation: str = "gelu",
        bias: bool = True,
        causal: bool = True,
        window: int | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        rope_theta: float | None = None,
        style: HeadStyle = HeadStyle(),
        dropout: float = 0.0,
        site: int = 1,
        recompute: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mesh: ConnectedMesh | None = None,
        sequence_parallel: bool = False,
        overlap: str = "bulk",
        strategy: Strategy | Links = "auto",
        out_init: float = 0.02,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        if norm_place not in ("pre", "sandwich", "post"):
            raise ValueError(f"norm_place must be 'pre', 'sandwich' or 'post', got {norm_place!r}")
        self.dropout, self.site, self.impl = dropout, site, impl
        where = {
            "device": device,
            "dtype": dtype,
            "mesh": mesh,
            "sequence_parallel": sequence_parallel,
            "impl": impl,
        }

        def norm_if(place: str) -> nn.Module | None:
            if norm_place not in (place, "sandwich"):
                return None
            return make_norm(norm, embed_dim, norm_eps, bias=bias, **where)

        self.attention_norm = norm_if("pre")
        self.attention = Attention(
            embed_dim,
            num_heads,
            bias=bias,
            num_kv_heads=num_kv_heads,
            causal=causal,
            window=window,
            softcap=softcap,
            sinks=sinks,
            rope_theta=rope_theta,
            style=style,
            strategy=strategy,
            out_init=out_init,
            overlap=overlap,
            **where,
        )
        self.attention_post_norm = norm_if("post")
        self.mlp_norm = norm_if("pre")
        self.mlp = MLP(
            embed_dim,
            hidden_dim,
            activation,
            bias,
            out_init=out_init,
            recompute=recompute,
            overlap=overlap,
            **where,
        )
        self.mlp_post_norm = norm_if("post")

    def forward(self, x: Tensor, context: TokenContext | None = None) -> Tensor:
        """x[B, S, E] -> y[B, S, E]; with `context`, x[T, E] or x[T/tp, E] -> the same shape."""
        if self.mlp_post_norm is not None:
            return self._with_post_norms(x, context)
        # The norm adds attention's bias in passing, if nothing keeps it from being read here.
        out = self.attention.out
        fuses = fusable(self.attention, Attention) and fusable(out, RowParallelLinear)
        a = self.attention(self.attention_norm(x), context, add_bias=not fuses)
        h, x = self.mlp_norm(
            a,
            residual=x,
            x_bias=out.bias if fuses else None,
            drop=self._drop(self.site, context),
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
        """The key of a branch's dropout, or None if there is none."""
        if self.dropout == 0.0 or not self.training:
            return None
        if context is None or context.token_ids is None:
            raise ValueError(
                f"dropout = {self.dropout} is keyed by global token ids: "
                "context.token_ids is missing"
            )
        return Drop(self.dropout, context.seed, site, context.token_ids)
