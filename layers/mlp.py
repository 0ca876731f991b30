"""The feed-forward half of a transformer block, its hidden units cut over the tensor axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from warpweave.kernels.activation import gelu, swiglu
from warpweave.layers.linear import ColumnParallelLinear, RowParallelLinear
from warpweave.parallel.mesh import ConnectedMesh, connected


class MLP(nn.Module):
    """``down(act(up(x)))`` with GELU or SwiGLU (Shazeer 2020, arXiv:2002.05202).

    ``up.weight`` is (F, E) for gelu and (F, 2, E) flattened to (2F, E) for swiglu: rows gate, up,
    gate, up, ... so that a plain cut of the rows gives every tensor rank matching pairs.

    Args:
        embed_dim, hidden_dim: E and F.
        activation: "gelu" (tanh approximation) or "swiglu".
        bias: both layers have one.
        device, dtype, mesh, sequence_parallel: as ``ColumnParallelLinear``.
        out_init: standard deviation of a keyed initialisation of the down projection.
        impl: "triton", "torch" or None, as for the kernels.

    Raises:
        ValueError: unknown activation, or the tensor axis does not divide hidden_dim.
    """

    def __init__(
        self,
        embed_dim: int,
        hidden_dim: int,
        activation: str = "gelu",
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: ConnectedMesh | None = None,
        sequence_parallel: bool = False,
        out_init: float = 0.02,
        impl: str | None = None,
    ) -> None:
        super().__init__()
        if activation not in ("gelu", "swiglu"):
            raise ValueError(f"activation must be 'gelu' or 'swiglu', got {activation!r}")
        tp = connected(mesh).size("tp")
        if hidden_dim % tp:
            raise ValueError(
                f"hidden_dim = {hidden_dim} does not divide by the tensor axis tp = {tp}"
            )
        self.activation, self.impl = activation, impl
        self.up = ColumnParallelLinear(
            embed_dim,
            2 * hidden_dim if activation == "swiglu" else hidden_dim,
            bias,
            device,
            dtype,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
        )
        self.down = RowParallelLinear(
            hidden_dim,
            embed_dim,
            bias,
            device,
            dtype,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            init=out_init,
        )

    def hidden(self, x: Tensor) -> Tensor:
        """x[..., E] -> act(up(x))[..., F/tp]."""
        h = self.up(x)
        return swiglu(h, impl=self.impl) if self.activation == "swiglu" else gelu(h, impl=self.impl)

    def forward(self, x: Tensor) -> Tensor:
        """x[..., E] -> y[..., E] (rows cut over the tensor axis with sequence parallelism)."""
        return self.down(self.hidden(x))
