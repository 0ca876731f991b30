"""The torch path of both norms, made for CPUs and correct on every device. See `function`.

On a CPU, a training step calls these often and on few rows, so the number of operators matters as
much as the bytes. LayerNorm is torch's own in both directions. RMSNorm's forward is seven
operators, four of them on one number per row. Its backward is torch's fused LayerNorm backward with
mean 0, which also subtracts mean(g), so that is added back.
"""

from __future__ import annotations

import torch

from warpweave.kernels.dropout import Drop, dropout, dropped
from warpweave.kernels.norm.shared import NormOptions, Terms, WantedGradients
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dtypes import no_autocast
from warpweave.kernels.runtime.wgrad import bias_gradient


class _AddBias(torch.autograd.Function):
    """x[..., E] + x_bias[E]; the bias gradient is that of a linear layer, see `runtime.wgrad`."""

    @staticmethod
    def forward(ctx, x, x_bias):
        ctx.parameter = x_bias
        return (x + x_bias).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        return dy, bias_gradient(ctx.parameter, dy) if ctx.needs_input_grad[1] else None

    @staticmethod
    def spmd_typecheck(*, x, x_bias):
        from spmd_types import rules

        return rules.einsum("..._,_->..._", x, x_bias)


def residual_sum(x: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Return s, differentiable; x itself if nothing is added or dropped."""
    s, (residual, x_bias, drop) = x, terms
    if x_bias is not None:
        compiling = torch.compiler.is_compiling()
        s = (x + x_bias).to(x.dtype) if compiling else _AddBias.apply(x, x_bias)
    if drop is not None:
        s = dropout(s, drop, impl="torch")
    return s if residual is None else s + residual


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x.to(dtype), without the microsecond that a cast to the same dtype takes."""
    return x if x.dtype == dtype else x.to(dtype)


def norm_fwd_cpu(
    s: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: NormOptions,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """y, mean[..., 1] (None for RMSNorm) and rstd[..., 1] of checked s, weight and bias."""
    layer, eps, out_dtype = options
    wide, E = compute_dtype(s), s.shape[-1]
    sw = cast(s, wide)
    if layer:
        b = None if bias is None else cast(bias, wide)
        y, mean, rstd = torch.native_layer_norm(sw, (E,), cast(weight, wide), b, eps)
        return cast(y, out_dtype), mean, rstd
    length = torch.linalg.vector_norm(sw, dim=-1, keepdim=True)
    rstd = length.square_().div_(E).add_(eps).rsqrt_()
    return cast((sw * rstd).mul_(weight), out_dtype), None, rstd


def norm_bwd_cpu(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    wanted: WantedGradients,
    ds: torch.Tensor | None = None,
    drop: Drop | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """dx, dresidual, dx_bias, dw and db of checked tensors.

    Absent results are None, and so is a dresidual that is dx. mean and rstd are [..., 1].
    """
    E, wide, bias, apart = s.shape[-1], rstd.dtype, wanted.bias, wanted.apart(drop)
    dyw, w = cast(dy, wide), cast(weight, wide)
    dx, dw, db = torch.ops.aten.native_layer_norm_backward.default(
        dyw, cast(s, wide), (E,), torch.zeros_like(rstd) if mean is None else mean, rstd,
        w, w if bias else None, (True, True, bias),
    )  # fmt: skip
    if mean is None:
        with no_autocast(s):  # which would cast this product
            level = torch.matmul(dyw, w).unsqueeze(-1)
        dx.add_(level.mul_(rstd), alpha=1 / E)
    if ds is not None:
        dx.add_(ds)
    # A copy: dx may be of this dtype, and is about to change.
    dresidual = None if apart is None else dx.to(apart, copy=True)
    if drop is not None:
        mask = dropped(drop._replace(tokens=drop.tokens.reshape(-1)), E)
        dx.mul_(1 / (1 - drop.p)).masked_fill_(mask.view(s.shape), 0)
    dx_bias = dx.reshape(-1, E).sum(0) if wanted.x_bias else None
    dx = cast(dx, wanted.x_dtype)
    return dx, dresidual, dx_bias, dw, db if bias else None
