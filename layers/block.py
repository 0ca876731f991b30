"""The transformer block: pre-norm attention and MLP on a residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpweave.kernels.dropout import dropout
from warpweave.layers.attention import Attention
from warpweave.layers.context import TokenContext
from warpweave.layers.mlp import MLP
from warpweave.layers.norm import LayerNorm, RMSNorm
from warpweave.parallel.context import Strategy
from warpweave.parallel.mesh import ConnectedMesh


class TransformerBlock(nn.Module):
    """``x = x + attention(norm(x)); x = x + mlp(norm(x))``.

    Args:
        embed_dim, num_heads, hidden_dim: E, H and F.
        num_kv_heads: KV heads, by default num_heads.
        norm: "layer" or "rms"; norm_eps its epsilon.
        activation: "gelu" or "swiglu".
        bias: linear layers and LayerNorm have biases.
        causal, rope_theta, strategy: as ``Attention``.
        dropout: probability on both branches, keyed by global token ids (needs a context).
        site: number of the first of the block's two dropout sites.
        selective: recompute the MLP's hidden activations (norm, up projection, activation) in the
            backward pass instead of keeping them.
        device, dtype, mesh, sequence_parallel, impl: as ``Attention``.
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
        activation: str = "gelu",
        bias: bool = True,
        causal: bool = True,
        rope_theta: float | None = None,
        dropout: float = 0.0,
        site: int = 1,
        selective: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mesh: ConnectedMesh | None = None,
        sequence_parallel: bool = False,
        strategy: Strategy = "auto",
        out_init: float = 0.02,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        self.dropout, self.site, self.selective, self.impl = dropout, site, selective, impl
        where = {
            "device": device,
            "dtype": dtype,
            "mesh": mesh,
            "sequence_parallel": sequence_parallel,
            "impl": impl,
        }

        def make_norm() -> nn.Module:
            if norm == "rms":
                return RMSNorm(embed_dim, norm_eps, **where)
            if norm == "layer":
                return LayerNorm(embed_dim, norm_eps, bias=bias, **where)
            raise ValueError(f"norm must be 'layer' or 'rms', got {norm!r}")

        self.attention_norm = make_norm()
        self.attention = Attention(
            embed_dim,
            num_heads,
            bias=bias,
            num_kv_heads=num_kv_heads,
            causal=causal,
            rope_theta=rope_theta,
            strategy=strategy,
            out_init=out_init,
            **where,
        )
        self.mlp_norm = make_norm()
        self.mlp = MLP(embed_dim, hidden_dim, activation, bias, out_init=out_init, **where)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> Tensor:
        """x[B, S, E] -> y[B, S, E]; with `context`, x[T, E] or x[T/tp, E] -> the same shape."""
        a = self._drop(self.attention(self.attention_norm(x), context), self.site, context)
        if self.selective and torch.is_grad_enabled():
            # Nothing random runs inside: dropout is keyed, so there is no generator to restore.
            hidden, x = checkpoint(
                self._hidden, a, x, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden, x = self._hidden(a, x)
        return x + self._drop(self.mlp.down(hidden), self.site + 1, context)

    def _hidden(self, a: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden activations of the MLP, the residual stream after attention)."""
        h, x = self.mlp_norm(a, residual=x)
        return self.mlp.hidden(h), x

    def _drop(self, branch: Tensor, site: int, context: TokenContext | None) -> Tensor:
        if self.dropout == 0.0 or not self.training:
            return branch
        if context is None or context.token_ids is None:
            raise ValueError(
                f"dropout = {self.dropout} is keyed by global token ids: "
                "context.token_ids is missing"
            )
        return dropout(
            branch,
            self.dropout,
            seed=context.seed,
            site=site,
            tokens=context.token_ids,
            impl=self.impl,
        )
