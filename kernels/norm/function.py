"""RMSNorm and LayerNorm, fused with the bias, dropout and residual add before them.

    s = residual + dropout(x + x_bias)           terms are optional; returned as next residual
    RMSNorm    y = s * rstd * w                  rstd = 1 / sqrt(mean(s^2) + eps)
    LayerNorm  y = (s - mean) * rstd * w + b     rstd = 1 / sqrt(mean((s - mean)^2) + eps)

x, residual, y, s: [..., E]; w, b, x_bias: [E]; mean, rstd, tokens: [...]. Statistics are over dim
-1, so any sharding of the other dims (x[T/tp, E] of sequence parallelism) is exact; dw, db and
dx_bias are then partial sums over that axis. `x_bias` is the bias of the preceding linear layer,
which leaves it out. The mask is that of `dropout.dropout`, keyed by global token and column.

Backward, with n = (s - mean) * rstd and g = dy * w:

    dresidual = ds + rstd * (g - n * mean(g * n) [- mean(g) in LayerNorm])
    dx = dresidual * mask / (1 - p)              dx_bias = sum_rows(dx)
    dw = sum_rows(dy * n)                        db = sum_rows(dy)

s (kept anyway, as the residual stream), w, and rstd and mean per row are saved for backward. n is
recomputed, because reading s costs as much as reading a saved n, and needs no extra memory. The
mask is recomputed from `tokens`.

Dtypes: y has `out_dtype` (by default that of x). s has the wider dtype of x and residual, so a
float32 stream under bfloat16 layers stays float32. Kernels compute in float32 (float64 if s is) and
cast at the store. s is rounded to its dtype before it is normalized, so forward and backward see
the same s. dw, db and dx_bias are deterministic and summed in float32: every program adds its own
rows in order, and torch adds the partial sums, without atomics.

Traffic: forward reads x and residual and writes s and y. Backward reads dy, s and ds and writes dx
(and dresidual if it differs from dx). Each moves once. Rows too long for the registers (E > 16384
forward; E > 8192 backward, 4096 with both biases) are read twice in blocks, the second time from
the cache if it holds the rows in flight. There is no largest E. The kernels are in `forward` and
`backward`, the torch path in `torch_path`.

Sources: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467); the fused
chain follows Dao's layer_norm in flash-attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warpweave.kernels.dropout import Drop, join_drop, split_drop
from warpweave.kernels.norm.backward import launch_backward
from warpweave.kernels.norm.forward import launch_forward
from warpweave.kernels.norm.shared import NormOptions, Terms, WantedGradients, check_norm
from warpweave.kernels.norm.torch_path import (
    cast,
    norm_bwd_cpu,
    norm_fwd_cpu,
    residual_sum,
)
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.beside import beside_dtensors, whole_features
from warpweave.kernels.runtime.dispatch import (
    choose,
    once_differentiable,
    refuse_tangents,
)
from warpweave.kernels.runtime.dtypes import FLOATS
from warpweave.kernels.runtime.op import operator
from warpweave.kernels.runtime.wgrad import grad_dtype

# ---------------------------------------------------------------- registration


def _empty(x: torch.Tensor) -> torch.Tensor:
    """A placeholder for absent outputs: an operator's outputs cannot be None or its inputs."""
    return x.new_empty(0)


def _norm_fake(x, weight, bias, residual, x_bias, drop, options):
    terms = Terms(residual, x_bias, drop)
    s = x.new_empty(x.shape, dtype=terms.dtype(x))
    rstd = x.new_empty(x.shape[:-1], dtype=compute_dtype(s))
    if terms.absent:
        s = _empty(x)
    y = x.new_empty(x.shape, dtype=options.out_dtype)
    return y, s, torch.empty_like(rstd) if options.layer else _empty(rstd), rstd


def _norm_sharding(x, weight, bias, residual, x_bias, drop, options) -> str:
    alone = Terms(residual, x_bias, drop).absent
    s, mean = "whole" if alone else "..._", "..." if options.layer else "whole"
    return f"..._, _, _, ..._, _, , ... -> ..._, {s}, {mean}, ..."


def _norm_bwd_fake(dy, ds, s, weight, mean, rstd, drop, wanted):
    dx, dw = s.new_empty(s.shape, dtype=wanted.x_dtype), rstd.new_empty(weight.shape)
    apart = wanted.apart(drop)
    dresidual = _empty(dx) if apart is None else s.new_empty(s.shape, dtype=apart)
    dx_bias, db = (
        torch.empty_like(dw) if each else _empty(rstd) for each in (wanted.x_bias, wanted.bias)
    )
    return dx, dresidual, dx_bias, dw, db


def _norm_bwd_sharding(dy, ds, s, weight, mean, rstd, drop, wanted) -> str:
    dresidual = "whole" if wanted.apart(drop) is None else "..._"
    dx_bias, db = ("_" if each else "whole" for each in (wanted.x_bias, wanted.bias))
    return f"..._, ..._, ..._, _, ..., ..., , ... -> ..._, {dresidual}, {dx_bias}, _, {db}"


def _save_norm(ctx, inputs, output) -> None:
    x, weight, bias, residual, x_bias, drop, options = inputs
    _, s, mean, rstd = output
    # The sums over tokens are returned in the parameters' grad_dtype.
    ctx.dtypes = [None if p is None else grad_dtype(p) for p in (weight, bias, x_bias)]
    residual_dtype = None if residual is None else residual.dtype
    ctx.wanted = WantedGradients(bias is not None, x_bias is not None, x.dtype, residual_dtype)
    ctx.unchanged = Terms(residual, x_bias, drop).absent
    ctx.set_materialize_grads(False)
    ctx.drop, of_drop = split_drop(drop)
    saved = x if ctx.unchanged else s
    ctx.save_for_backward(saved, weight, mean if options.layer else None, rstd, *of_drop)


def _norm_backward(ctx, dy, ds, dmean, drstd):
    s, weight, mean, rstd, *of_drop = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(s)
    if ctx.unchanged:
        ds = None  # the gradient of a placeholder
    drop = join_drop(ctx.drop, *of_drop)
    dx, dresidual, dx_bias, *sums = norm_bwd_op(dy, ds, s, weight, mean, rstd, drop, ctx.wanted)
    dw, db, dx_bias = (
        None if dtype is None else total.to(dtype)
        for total, dtype in zip((*sums, dx_bias), ctx.dtypes, strict=True)
    )
    if ctx.wanted.residual_dtype is None:
        dresidual = None
    elif ctx.wanted.apart(drop) is None:
        dresidual = dx
    return dx, dw, db, dresidual, dx_bias


@operator(
    "norm_fwd",
    _norm_fake,
    records=(Drop, NormOptions),
    gradient=(_save_norm, _norm_backward),
    sharding=_norm_sharding,
)
def norm_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    x_bias: torch.Tensor | None,
    drop: Drop | None,
    options: NormOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, s (unless it is x), mean, and rstd."""
    terms = Terms(residual, x_bias, drop)
    y, s, mean, rstd = launch_forward(x, weight, bias, terms, options)
    return y, _empty(s) if s is x else s, _empty(rstd) if mean is None else mean, rstd


@operator("norm_bwd", _norm_bwd_fake, records=(Drop, WantedGradients), sharding=_norm_bwd_sharding)
def norm_bwd_op(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    drop: Drop | None,
    wanted: WantedGradients,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, dresidual (unless it is dx), and the sums over tokens dx_bias, dw and db."""
    dx, dresidual, *sums = launch_backward(dy, s, weight, mean, rstd, wanted, ds, drop)
    dx_bias, dw, db = (_empty(rstd) if total is None else total for total in sums)
    return dx, _empty(dx) if dresidual is None else dresidual, dx_bias, dw, db


class _TorchNorm(torch.autograd.Function):
    """The torch path of both norms.

    For RMSNorm on a CPU it is twice as fast as differentiating torch's own. For LayerNorm it keeps
    the sums over tokens from being rounded to 16 bits.
    """

    @staticmethod
    def forward(ctx, s, weight, bias, options):
        y, mean, rstd = norm_fwd_cpu(s, weight, bias, options)
        ctx.save_for_backward(s, weight, mean, rstd, bias)
        ctx.dtypes = [None if p is None else grad_dtype(p) for p in (weight, bias)]
        return y

    @staticmethod
    @once_differentiable  # rstd is saved as a constant: a second derivative would be wrong
    def backward(ctx, dy):
        s, weight, mean, rstd, _ = ctx.saved_tensors
        of_weight, of_bias = ctx.dtypes
        wanted = WantedGradients(of_bias is not None, False, s.dtype, None)
        dx, _, _, dw, db = norm_bwd_cpu(dy, s, weight, mean, rstd, wanted)
        return dx, cast(dw, of_weight), None if db is None else cast(db, of_bias), None

    @staticmethod
    def spmd_typecheck(*, s, weight, bias):
        from spmd_types import rules

        y = rules.einsum("..._,_->..._", s, weight)  # rows may be sharded, E may not
        return y if bias is None else rules.einsum("..._,_->..._", y, bias)


# ---------------------------------------------------------------- public


def _either_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    terms: Terms,
    layer: bool,
    eps: float,
    out_dtype: torch.dtype | None,
    impl: str | None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Either norm: y, or (y, s) if any term of s other than x was given."""
    impl, alone = choose(impl, x, weight, bias, *terms.tensors), terms.absent
    terms = check_norm(x, weight, bias, terms, eps)
    dtype = out_dtype or x.dtype
    options = NormOptions(layer, eps, dtype)
    if dtype not in FLOATS:
        raise ValueError(f"out_dtype must be one of {FLOATS}, got {dtype}")
    if impl == "torch":
        s = whole_features(residual_sum(x, terms))
        weight, bias = whole_features(weight), bias if bias is None else whole_features(bias)
        wide = compute_dtype(s)
        if layer and (weight.dtype == wide or torch.compiler.is_compiling()):
            b = None if bias is None else bias.to(wide)
            y = F.layer_norm(s.to(wide), weight.shape, weight.to(wide), b, eps).to(dtype)
        else:
            y = _TorchNorm.apply(s, weight, bias, options)
    else:
        name = "layer_norm" if layer else "rms_norm"
        refuse_tangents(name, x, weight, bias, terms.residual, terms.x_bias)
        y, s, _, _ = norm_op(x, weight, bias, *terms, options)
        s = x if terms.absent else s
    return y if alone else (y, s)


@beside_dtensors("x", "residual")
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    drop: Drop | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of s = residual + dropout(x + x_bias) by weight[E]; differentiable.

    x[..., E] may have any sharding except of E, along which a DTensor is gathered (`cut_rms_norm`
    of ``warpweave.parallel.tensor`` sends one number per row instead). With `residual` (shaped like
    x, possibly of another float dtype), `x_bias`[E] or `drop`, it returns (y, s), and gradients
    flow through both. Otherwise it returns y alone.

    Args:
        drop: the key of `dropout.dropout`, with the same mask; its tokens are the global indices of
            the rows of x. With p = 0 nothing is dropped.
        out_dtype: dtype of y, by default that of x; s has the wider dtype of x and residual.

    Raises ValueError if weight is None, if shapes, dtypes or numbers do not fit, or if `impl`
    cannot run (`dispatch.choose`). Zhang, Sennrich 2019 (arXiv:1910.07467).

    Examples:
        >>> x, weight = torch.randn(2, 16, 64), torch.ones(64)
        >>> rms_norm(x, weight).shape
        torch.Size([2, 16, 64])
        >>> y, s = rms_norm(x, weight, residual=x)  # y = norm(s), s = x + residual
    """
    terms = Terms(residual, x_bias, drop)
    return _either_norm(x, weight, None, terms, False, eps, out_dtype, impl)


@beside_dtensors("x", "residual")
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    drop: Drop | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm by weight[E] and bias[E]; otherwise like `rms_norm`. Ba et al. 2016.

    Examples:
        >>> layer_norm(torch.randn(2, 16, 64), torch.ones(64), torch.zeros(64)).shape
        torch.Size([2, 16, 64])
    """
    terms = Terms(residual, x_bias, drop)
    return _either_norm(x, weight, bias, terms, True, eps, out_dtype, impl)
