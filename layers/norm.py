"""RMSNorm and LayerNorm with the residual add fused in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from warpweave.kernels.dropout import Drop
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.runtime.dispatch import check_impl
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.shard import ParamRecord


class _Norm(nn.Module):
    """The parameters of both norms: whole on every tensor rank."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        mesh: ConnectedMesh | None,
        sequence_parallel: bool,
        impl: str | None,
    ) -> None:
        super().__init__()
        mesh = connected(mesh)
        whole = isinstance(normalized_shape, int)
        shape = (normalized_shape,) if whole else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"normalized_shape must be one dim, got {shape}")
        self.normalized_shape, self.eps, self.impl = shape, eps, check_impl(impl)
        # With sequence parallelism each tensor rank normalises its own tokens, so that the
        # gradients of weight and bias are partial sums.
        self._partial = ("tp",) if sequence_parallel and mesh.size("tp") > 1 else ()
        self.records: dict[str, ParamRecord] = {}
        self.weight = self._parameter("weight", "ones", device, dtype)
        self.register_parameter("bias", None)

    def _parameter(
        self, name: str, init: str, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Parameter:
        self.records[name] = ParamRecord(
            name, self.normalized_shape, partial=self._partial, init=init, decay=False
        )
        fill = torch.ones if init == "ones" else torch.zeros
        return nn.Parameter(fill(self.normalized_shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Weight 1 and bias 0."""
        nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(_Norm):
    """``nn.RMSNorm`` over the last dim (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        normalized_shape, eps, device, dtype: as ``nn.RMSNorm`` over one dim; eps is 1e-6.
        mesh, sequence_parallel: set when tensor ranks hold different tokens, or other heads of a
            norm over each head: the gradients are then partial sums.
        impl: "triton", "torch" or None, as for the kernels.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        mesh: ConnectedMesh | None = None,
        sequence_parallel: bool = False,
        impl: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, device, dtype, mesh, sequence_parallel, impl)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        x_bias: Tensor | None = None,
        drop: Drop | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x[..., E] -> norm(x)[..., E]; with any of the others, (norm(s), s) where
        s = residual + dropout(x + x_bias), in one kernel."""
        terms = {"residual": residual, "x_bias": x_bias, "drop": drop}
        return rms_norm(x, self.weight, self.eps, **terms, impl=self.impl)


class LayerNorm(_Norm):
    """``nn.LayerNorm`` over the last dim (Ba et al. 2016, arXiv:1607.06450).

    Args:
        normalized_shape, eps, device, dtype: as ``nn.LayerNorm`` over one dim.
        bias: add a bias.
        mesh, sequence_parallel: set when tensor ranks hold different tokens, or other heads of a
            norm over each head: the gradients are then partial sums.
        impl: "triton", "torch" or None, as for the kernels.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        bias: bool = True,
        mesh: ConnectedMesh | None = None,
        sequence_parallel: bool = False,
        impl: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, device, dtype, mesh, sequence_parallel, impl)
        if bias:
            self.bias = self._parameter("bias", "zeros", device, dtype)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        x_bias: Tensor | None = None,
        drop: Drop | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x[..., E] -> norm(x)[..., E]; with any of the others, (norm(s), s) where
        s = residual + dropout(x + x_bias), in one kernel."""
        terms = {"residual": residual, "x_bias": x_bias, "drop": drop}
        return layer_norm(x, self.weight, self.bias, self.eps, **terms, impl=self.impl)
