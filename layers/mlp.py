"""The MLP of a transformer block; hidden units are sharded over the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from warpweave.kernels.activation import activate, find_activation
from warpweave.kernels.dropout import Drop, dropout
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear, check_divides, fusable
from warpweave.layers.place import Place
from warpweave.layers.style import MLPStyle
from warpweave.parallel.mesh import connected
from warpweave.parallel.tensor.mlp import parallel_mlp


class MLP(nn.Module):
    """``down(act(up(x)))``, gated or not (Shazeer 2020, arXiv:2002.05202).

    ``up.weight`` is (F, E), or for a gated activation (F, 2, E) flattened to (2F, E). Its rows are
    then gate, up, gate, up, ..., so sharding them evenly gives every tensor rank matching pairs.
    Both layers run as one Function (``tensor.mlp``). If one of them has been replaced, wrapped or
    hooked, they are called one after the other.

    Args:
        embed_dim, hidden_dim: E and F.
        style, place: `MLPStyle` and `Place`, or their fields as keywords: activation ("gelu", the
            tanh approximation, "gelu_erf", "relu2", "swiglu" or "geglu"), bias (of both layers),
            device, dtype, mesh, recompute and so on.
        out_init: standard deviation of a keyed initialization of the down projection.

    Raises:
        ValueError: activation, recompute or impl is unknown, or hidden_dim is not divisible by the
            tensor axis.

    Examples:
        >>> MLP(64, 256, "swiglu", bias=False)(torch.randn(2, 16, 64)).shape
        torch.Size([2, 16, 64])
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
        each = (1, 1) if find_activation(style.activation).gated else (1,)
        check_divides("hidden_dim", hidden_dim, connected(place.mesh).size("tp"))
        self.activation, self.recompute, self.impl = style.activation, place.recompute, place.impl
        self.up = ColumnParallelLinear(
            embed_dim, len(each) * hidden_dim, style.bias, matrices=each, place=place
        )
        self.down = RowParallelLinear(hidden_dim, embed_dim, style.bias, init=out_init, place=place)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, drop: Drop | None = None
    ) -> Tensor:
        """x[..., E] -> y[..., E] (x[T/tp, E] -> y[T/tp, E] with sequence parallelism).

        With `residual`, shaped like y, and `drop` (the dropout's key, see ``kernels.dropout``), the
        result is residual + dropout(y).
        """
        if not (fusable(self.up, ColumnParallelLinear) and fusable(self.down, RowParallelLinear)):
            return self._composed(x, residual, drop)
        up, up_bias = self.up.weight, self.up.bias
        if find_activation(self.activation).gated:  # rows gate, up, gate, up, ...
            up = up.unflatten(0, (-1, 2))
            up_bias = None if up_bias is None else up_bias.unflatten(0, (-1, 2))
        return parallel_mlp(
            x, up, self.down.weight, up_bias, self.down.bias, activation=self.activation,
            residual=residual, drop=drop, recompute=self.recompute, impl=self.impl,
            **self.up.over_ranks,
        )  # fmt: skip

    def _composed(self, x: Tensor, residual: Tensor | None, drop: Drop | None) -> Tensor:
        """Like `forward`, but call ``up``, the activation and ``down``."""

        def hidden(x: Tensor) -> Tensor:
            return activate(self.up(x), self.activation, impl=self.impl)

        recomputes = self.recompute in ("activation", "up") and torch.is_grad_enabled()
        y = self.down(checkpoint(hidden, x, use_reentrant=False) if recomputes else hidden(x))
        if drop is not None:
            y = dropout(y, drop, impl=self.impl)
        return y if residual is None else residual + y
