"""RMSNorm and LayerNorm with the residual add fused in, and RMSNorm of features that are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from warpweave.kernels.dropout import Drop
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import check_impl
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.parallel.shard import Cut, ParamRecord
from warpweave.parallel.tensor import cut_rms_norm


class _Norm(nn.Module):
    """The parameters of all norms: whole on every tensor rank, unless they have `cuts`."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        mesh: ConnectedMesh | None,
        sequence_parallel: bool,
        impl: str | None,
        offset: bool = False,
        cuts: tuple[Cut, ...] = (),
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
        self.offset, self._cuts = offset, cuts
        self.records: dict[str, ParamRecord] = {}
        self.weight = self._parameter("weight", "zeros" if offset else "ones", device, dtype)
        self.register_parameter("bias", None)

    def _parameter(
        self, name: str, init: str, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Parameter:
        record = self.records[name] = ParamRecord(
            name, self.normalized_shape, self._cuts, self._partial, init=init, decay=False
        )
        fill = torch.ones if init == "ones" else torch.zeros
        return nn.Parameter(fill(record.local_shape, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Weight 1 (0 with an offset) and bias 0."""
        nn.init.constant_(self.weight, 0.0 if self.offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        shown = ", offset=True" if self.offset else ""
        return f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}{shown}"

    def _factors(self) -> Tensor:
        """What the normalised features are multiplied by."""
        if not self.offset:
            return self.weight
        return 1.0 + self.weight.to(compute_dtype(self.weight))  # bf16 has no 1.001


class RMSNorm(_Norm):
    """``nn.RMSNorm`` over the last dim (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        normalized_shape, eps, device, dtype: as ``nn.RMSNorm`` over one dim; eps is 1e-6.
        offset: the factors are 1 + weight, which begins at 0 (Gemma).
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
        offset: bool = False,
        mesh: ConnectedMesh | None = None,
        sequence_parallel: bool = False,
        impl: str | None = None,
    ) -> None:
        over = mesh, sequence_parallel, impl
        super().__init__(normalized_shape, eps, device, dtype, *over, offset)

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
        return rms_norm(x, self._factors(), self.eps, **terms, impl=self.impl)


class ColumnParallelRMSNorm(_Norm):
    """RMSNorm over features that are cut over the tensor axis, as a column-parallel layer leaves
    them: weight[E/tp], and one sum of squares over all of them.

    With more than one rank it is composed of torch's operations, with an all-reduce of one number
    per token in the forward and in the backward.

    Args:
        num_features: E, of all ranks together, which the tensor axis divides.
        eps, device, dtype, offset, mesh, impl: as ``RMSNorm``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        offset: bool = False,
        mesh: ConnectedMesh | None = None,
        impl: str | None = None,
    ) -> None:
        connected_mesh = connected(mesh)
        cuts = (Cut("tp", 0, connected_mesh.size("tp")),)
        super().__init__(num_features, eps, device, dtype, mesh, False, impl, offset, cuts)
        self.num_features = num_features
        self.group = connected_mesh.group("tp")

    def forward(self, x: Tensor) -> Tensor:
        """x[..., E/tp] -> y[..., E/tp] = x / sqrt(mean of all E squares + eps) * weight."""
        if self.group is None:
            return cast(Tensor, rms_norm(x, self._factors(), self.eps, impl=self.impl))
        return cut_rms_norm(x, self._factors(), self.eps, group=self.group)


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


def make_norm(
    kind: str, embed_dim: int, eps: float, *, bias: bool = True, **where: Any
) -> RMSNorm | LayerNorm:
    """The norm that a model names: "layer", "rms", or "rms1p", whose factors are 1 + weight.

    `bias` is of a LayerNorm; `where` as for both classes. Raises ValueError for another name.
    """
    if kind == "layer":
        return LayerNorm(embed_dim, eps, bias=bias, **where)
    if kind in ("rms", "rms1p"):
        return RMSNorm(embed_dim, eps, offset=kind == "rms1p", **where)
    raise ValueError(f"norm must be 'layer', 'rms' or 'rms1p', got {kind!r}")
