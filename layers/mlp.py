"""The MLP of a transformer block, its hidden units sharded over the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpweave.kernels.activation import activate, find_activation
from warpweave.kernels.dropout import Drop, dropout
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear, fusable
from warpweave.layers.place import Place
from warpweave.layers.style import MLPStyle
from warpweave.parallel.mesh import connected
from warpweave.parallel.tensor.mlp import parallel_mlp


class MLP(nn.Module):
    """``down(act(up(x)))``, gated or not (Shazeer 2020, arXiv:2002.05202).

    ``up.weight`` is (F, E), or for a gated activation (F, 2, E) flattened to (2F, E): rows gate,
    up, gate, up, ... so that sharding the rows evenly gives every tensor rank matching pairs. Both
    layers are one Function (``tensor.mlp``), or are called one after the other if one of them has
    been replaced, wrapped or hooked.

    Args:
        embed_dim, hidden_dim: E and F.
        style, place: `MLPStyle` and `Place`, or fields of theirs by keyword: activation, "gelu"
            (tanh approximation), "gelu_erf", "relu2", "swiglu" or "geglu", and bias, of both
            layers; device, dtype, mesh, recompute and so on.
        out_init: standard deviation of a keyed initialisation of the down projection.

    Raises:
        ValueError: unknown activation, recompute or impl, or the tensor axis does not divide
            hidden_dim.
    """

    @fields_as_keywords(
        "activation", "bias", "device", "dtype", unused=("strategy",), style=MLPStyle, place=Place
    )
    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        *,
        style: MLPStyle,
        place: Place,
        out_init: float = 0.02,
    ) -> None:
        super().__init__()
        gated = find_activation(style.activation).gated
        tp = connected(place.mesh).size("tp")
        if hidden_dim % tp:
            raise ValueError(
                f"hidden_dim = {hidden_dim} does not divide by the tensor axis tp = {tp}"
            )
        self.activation, self.recompute, self.impl = style.activation, place.recompute, place.impl
        each = (1, 1) if gated else (1,)
        self.up = ColumnParallelLinear(
            embed_dim, len(each) * hidden_dim, style.bias, matrices=each, place=place
        )
        self.down = RowParallelLinear(hidden_dim, embed_dim, style.bias, init=out_init, place=place)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, drop: Drop | None = None
    ) -> Tensor:
        """x[..., E] -> y[..., E] (x[T/tp, E] -> y[T/tp, E] with sequence parallelism).

        With `residual` and `drop` (the key of a dropout, see ``kernels.dropout``), both like y, it
        is residual + dropout(y).
        """
        if not (fusable(self.up, ColumnParallelLinear) and fusable(self.down, RowParallelLinear)):
            return self._composed(x, residual, drop)
        up, up_bias = self.up.weight, self.up.bias
        if find_activation(self.activation).gated:  # rows gate, up, gate, up, ...
            up = up.unflatten(0, (-1, 2))
            up_bias = None if up_bias is None else up_bias.unflatten(0, (-1, 2))
        return parallel_mlp(
            x,
            up,
            self.down.weight,
            up_bias,
            self.down.bias,
            activation=self.activation,
            residual=residual,
            drop=drop,
            recompute=self.recompute,
            impl=self.impl,
            **self.up.over_ranks,
        )

    def _composed(self, x: Tensor, residual: Tensor | None, drop: Drop | None) -> Tensor:
        """The same by calling ``up``, the activation and ``down``."""

        def hidden(x: Tensor) -> Tensor:
            return activate(self.up(x), self.activation, impl=self.impl)

        recomputes = self.recompute in ("activation", "up") and torch.is_grad_enabled()
        y = self.down(checkpoint(hidden, x, use_reentrant=False) if recomputes else hidden(x))
        if drop is not None:
            y = dropout(y, drop, impl=self.impl)
        return y if residual is None else residual + y
