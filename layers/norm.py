"""RMSNorm and LayerNorm, fused with the residual add, and RMSNorm over sharded features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from warpweave.kernels.dropout import Drop
from warpweave.kernels.norm import layer_norm, rms_norm
from warpweave.kernels.reference import compute_dtype
from warpweave.layers.keywords import fields_as_keywords
from warpweave.layers.place import Place
from warpweave.layers.style import NormStyle
from warpweave.parallel.mesh import connected
from warpweave.parallel.shard import Cut, ParamRecord
from warpweave.parallel.tensor.norm import cut_rms_norm

_UNUSED = ("overlap", "strategy", "recompute")  # fields of `Place` that a norm does not use


class _Norm(nn.Module):
    """Base class of the norms. Parameters are replicated over tp unless `cuts` shards them."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        place: Place,
        offset: bool = False,
        cuts: tuple[Cut, ...] = (),
    ) -> None:
        super().__init__()
        mesh = connected(place.mesh)
        whole = isinstance(normalized_shape, int)
        shape = (normalized_shape,) if whole else tuple(normalized_shape)
        if len(shape) != 1:
            raise ValueError(f"normalized_shape must have exactly one dim, got {shape}")
        self.normalized_shape, self.eps, self.impl = shape, eps, place.impl
        # With sequence parallelism each tensor rank normalizes its own tokens, so the gradients of
        # weight and bias are partial sums.
        others = place.sequence_parallel and not cuts and mesh.size("tp") > 1
        self._partial = ("tp",) if others else ()
        self.offset, self._cuts = offset, cuts
        self.records: dict[str, ParamRecord] = {}
        self.weight = self._parameter("weight", "zeros" if offset else "ones", place)
        self.register_parameter("bias", None)

    def _parameter(self, name: str, init: str, place: Place) -> nn.Parameter:
        record = self.records[name] = ParamRecord(
            name, self.normalized_shape, self._cuts, self._partial, init=init, decay=False
        )
        fill = torch.ones if init == "ones" else torch.zeros
        return nn.Parameter(fill(record.local_shape, device=place.device, dtype=place.dtype))

    def reset_parameters(self) -> None:
        """Set the weight to 1 (0 with an offset) and the bias to 0."""
        nn.init.constant_(self.weight, 0.0 if self.offset else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        shown = ", offset=True" if self.offset else ""
        return f"{self.normalized_shape}, eps={self.eps}, bias={self.bias is not None}{shown}"

    def _factors(self) -> Tensor:
        """The factors that multiply the normalized features."""
        if not self.offset:
            return self.weight
        return 1.0 + self.weight.to(compute_dtype(self.weight))  # 1 + w would round to 1 in bf16


class RMSNorm(_Norm):
    """``nn.RMSNorm`` over the last dim (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        normalized_shape, eps, device, dtype: as for ``nn.RMSNorm`` over one dim; eps defaults to
            1e-6.
        offset: the factors are 1 + weight, and weight starts at 0 (Gemma).
        mesh, sequence_parallel: pass them if tensor ranks hold different tokens, or different heads
            for a per-head norm. The gradients are then partial sums.
        impl: "triton", "torch" or None, as for the kernels.
        place: a `Place`, instead of these options, device and dtype.

    Examples:
        >>> norm, x = RMSNorm(64), torch.randn(2, 16, 64)
        >>> norm(x).shape
        torch.Size([2, 16, 64])
        >>> y, s = norm(x, residual=torch.randn(2, 16, 64))  # y = norm(s), s = x + residual
    """

    @fields_as_keywords(unused=_UNUSED, place=Place)
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        *,
        place: Place,
        offset: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, place, offset)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        x_bias: Tensor | None = None,
        drop: Drop | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x[..., E] -> norm(x)[..., E]; with any other argument, (norm(s), s) where
        s = residual + dropout(x + x_bias), in one kernel."""
        terms = {"residual": residual, "x_bias": x_bias, "drop": drop}
        return rms_norm(x, self._factors(), self.eps, **terms, impl=self.impl)


class ColumnParallelRMSNorm(_Norm):
    """RMSNorm over features sharded over the tensor axis, as a column-parallel layer returns them.

    weight[E/tp]; the mean square is over all E features. With more than one rank it is composed of
    torch operations, with an all-reduce of one number per token in both forward and backward.

    Args:
        num_features: E, over all ranks; must be divisible by the tensor axis.
        eps, device, dtype, offset, mesh, impl, place: as for ``RMSNorm``.
    """

    @fields_as_keywords(unused=("sequence_parallel", *_UNUSED), place=Place)
    def __init__(
        self, num_features: int, eps: float = 1e-6, *, place: Place, offset: bool = False
    ) -> None:
        mesh = connected(place.mesh)
        super().__init__(num_features, eps, place, offset, (Cut("tp", 0, mesh.size("tp")),))
        self.num_features, self.group = num_features, mesh.group("tp")

    def forward(self, x: Tensor) -> Tensor:
        """x[..., E/tp] -> y[..., E/tp] = x / sqrt(mean of all E squares + eps) * weight."""
        if self.group is None:
            return cast(Tensor, rms_norm(x, self._factors(), self.eps, impl=self.impl))
        return cut_rms_norm(x, self._factors(), self.eps, group=self.group)


class LayerNorm(_Norm):
    """``nn.LayerNorm`` over the last dim (Ba et al. 2016, arXiv:1607.06450).

    Args:
        normalized_shape, eps, device, dtype: as for ``nn.LayerNorm`` over one dim.
        bias: add a bias.
        mesh, sequence_parallel, impl, place: as for `RMSNorm`.

    Examples:
        >>> norm, x = LayerNorm(64), torch.randn(2, 16, 64)
        >>> norm(x).shape
        torch.Size([2, 16, 64])
        >>> y, s = norm(x, residual=torch.randn(2, 16, 64))  # y = norm(s), s = x + residual
    """

    @fields_as_keywords(unused=_UNUSED, place=Place)
    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        *,
        place: Place,
        bias: bool = True,
    ) -> None:
        super().__init__(normalized_shape, eps, place)
        if bias:
            self.bias = self._parameter("bias", "zeros", place)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        x_bias: Tensor | None = None,
        drop: Drop | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x[..., E] -> norm(x)[..., E]; with any other argument, (norm(s), s) where
        s = residual + dropout(x + x_bias), in one kernel."""
        terms = {"residual": residual, "x_bias": x_bias, "drop": drop}
        return layer_norm(x, self.weight, self.bias, self.eps, **terms, impl=self.impl)


def make_norm(style: NormStyle, embed_dim: int, place: Place) -> RMSNorm | LayerNorm:
    """The norm over embed_dim features that a style names; ValueError for an unknown name."""
    if style.norm == "layer":
        bias = style.bias if style.norm_bias is None else style.norm_bias
        return LayerNorm(embed_dim, style.norm_eps, bias=bias, place=place)
    if style.norm in ("rms", "rms1p"):
        return RMSNorm(embed_dim, style.norm_eps, offset=style.norm == "rms1p", place=place)
    raise ValueError(f"norm must be 'layer', 'rms' or 'rms1p', got {style.norm!r}")
