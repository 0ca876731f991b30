"""RMSNorm and LayerNorm with all that stands between a linear layer and its successor fused in.

    s = residual + dropout(x + x_bias)           each term optional; returned: the next residual
    RMSNorm    y = s * rstd * w                  rstd = 1 / sqrt(mean(s^2) + eps)
    LayerNorm  y = (s - mean) * rstd * w + b     rstd = 1 / sqrt(mean((s - mean)^2) + eps)

x, residual, y, s: [..., E]; w, b, x_bias: [E]; mean, rstd, tokens: [...]. Statistics are over dim
-1, so any sharding of the other dims (x[T/tp, E] of sequence parallelism) is exact; dw, db and
dx_bias are then partial over that axis. `x_bias` is the bias that the layer before left out of its
product; the mask is `dropout.dropout`'s, a function of the global token and the column.

Backward, with n = (s - mean) * rstd and g = dy * w:

    dresidual = ds + rstd * (g - n * mean(g * n) [- mean(g) in LayerNorm])
    dx = dresidual * mask / (1 - p)              dx_bias = sum_rows(dx)
    dw = sum_rows(dy * n)                        db = sum_rows(dy)

Saved for backward: s (which the network keeps anyway as its residual stream), w, and per row rstd
and mean: n is recomputed, because re-reading s costs what reading a saved n would, and saves its
memory; the mask is drawn again from `tokens`.

Dtypes: y has `out_dtype` (by default that of x), s the wider of those of x and residual, so a
float32 stream under bfloat16 layers stays float32. Computed in float32 (float64 if s is), cast at
the store; s is rounded to its dtype before it is normalised, so forward and backward see the same
s. dw, db and dx_bias are deterministic and summed in float32: every program adds the rows it owns
in order and the partial sums are added by torch, without atomics.

Traffic: forward reads x and residual and writes s and y, backward reads dy, s and ds and writes dx
(and dresidual where it differs from dx), each once. Rows too long for the registers (E > 16384
forward; E > 8192 backward, 4096 with both biases) are read in blocks twice, the second time from
the cache if it holds the rows in flight; there is no largest E. The kernels are in `forward`
and `backward`, the torch path in `torch_path`.

Sources: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467); the fused
chain: Dao's layer_norm of flash-attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warpweave.kernels.dropout import Drop, check_drop, make_drop
from warpweave.kernels.norm.backward import norm_bwd
from warpweave.kernels.norm.checks import check_tensors, stream_dtype
from warpweave.kernels.norm.forward import norm_fwd
from warpweave.kernels.norm.torch_path import (
    cast,
    norm_bwd_cpu,
    norm_fwd_cpu,
    norm_sum,
    whole_features,
)
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import (
    choose,
    once_differentiable,
    refuse_tangents,
)
from warpweave.kernels.runtime.wgrad import grad_dtype

# ---------------------------------------------------------------- registration

# Flags and dtypes are int: DTensor caches rules and outputs by tensors and ints, and both depend on
# them.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _empty(x: torch.Tensor) -> torch.Tensor:
    """An operator's outputs cannot be None and cannot be its inputs: this stands for absent
    ones."""
    return x.new_empty(0)


@torch.library.custom_op("warpweave::norm_fwd", mutates_args=())
def _norm_fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    x_bias: torch.Tensor | None,
    tokens: torch.Tensor | None,
    eps: float,
    layer: int,
    dropout: float,
    seed: int,
    site: int,
    out_dtype: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, s, mean, rstd = norm_fwd(
        x, weight, bias, eps, layer=bool(layer), residual=residual, x_bias=x_bias,
        drop=make_drop(dropout, seed, site, tokens), out_dtype=_DTYPES[out_dtype], impl="triton",
    )  # fmt: skip
    return y, _empty(s) if s is x else s, mean if layer else _empty(rstd), rstd


@_norm_fwd_op.register_fake
def _(
    x, weight, bias, residual, x_bias, tokens, eps, layer, dropout, seed, site, out_dtype
):  # fmt: skip
    s = x.new_empty(x.shape, dtype=stream_dtype(x, residual))
    rstd = x.new_empty(x.shape[:-1], dtype=compute_dtype(s))
    if residual is None and x_bias is None and tokens is None:
        s = _empty(x)
    y = x.new_empty(x.shape, dtype=_DTYPES[out_dtype])
    return y, s, torch.empty_like(rstd) if layer else _empty(rstd), rstd


@torch.library.custom_op("warpweave::norm_bwd", mutates_args=())
def _norm_bwd_op(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    tokens: torch.Tensor | None,
    bias: int,
    x_bias: int,
    dropout: float,
    seed: int,
    site: int,
    x_dtype: int,
    residual_dtype: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    found = norm_bwd(
        dy, s, weight, mean, rstd, ds=ds, bias=bool(bias), x_bias=bool(x_bias),
        drop=make_drop(dropout, seed, site, tokens), x_dtype=_DTYPES[x_dtype],
        residual_dtype=None if residual_dtype < 0 else _DTYPES[residual_dtype], impl="triton",
    )  # fmt: skip
    dx, dresidual, dx_bias, dw, db = found
    if dresidual is None or dresidual is dx:
        dresidual = _empty(dx)
    return dx, dresidual, dx_bias if x_bias else _empty(rstd), dw, db if bias else _empty(dw)


@_norm_bwd_op.register_fake
def _(
    dy, ds, s, weight, mean, rstd, tokens, bias, x_bias, dropout, seed, site, x_dtype,
    residual_dtype,
):  # fmt: skip
    dx, dw = s.new_empty(s.shape, dtype=_DTYPES[x_dtype]), rstd.new_empty(weight.shape)
    dresidual = _empty(dx)
    if residual_dtype >= 0 and (tokens is not None or residual_dtype != x_dtype):
        dresidual = s.new_empty(s.shape, dtype=_DTYPES[residual_dtype])
    dx_bias = torch.empty_like(dw) if x_bias else _empty(rstd)
    return dx, dresidual, dx_bias, dw, torch.empty_like(dw) if bias else _empty(dw)


def _save(ctx, inputs, output) -> None:
    x, weight, bias, residual, x_bias, tokens, _, layer, *ctx.draw, _ = inputs
    _, s, mean, rstd = output
    ctx.layer, ctx.x_dtype = layer, x.dtype
    # The sums over tokens go to the parameters as wide as they are wanted.
    ctx.wanted = [None if p is None else grad_dtype(p) for p in (weight, bias, x_bias)]
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.unchanged = residual is None and x_bias is None and tokens is None
    ctx.set_materialize_grads(False)
    saved = x if ctx.unchanged else s
    ctx.save_for_backward(saved, weight, mean if layer else None, rstd, tokens)


def _backward(ctx, dy, ds, dmean, drstd):
    s, weight, mean, rstd, tokens = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(s)
    if ctx.unchanged:
        ds = None  # the gradient of a stand-in
    to_residual = -1 if ctx.residual_dtype is None else _DTYPES.index(ctx.residual_dtype)
    _, bias, x_bias = (wanted is not None for wanted in ctx.wanted)
    dx, dresidual, dx_bias, *sums = _norm_bwd_op(
        dy, ds, s, weight, mean, rstd, tokens, bias, x_bias, *ctx.draw,
        _DTYPES.index(ctx.x_dtype), to_residual,
    )  # fmt: skip
    dw, db, dx_bias = (
        None if wanted is None else total.to(wanted)
        for total, wanted in zip((*sums, dx_bias), ctx.wanted, strict=True)
    )
    if ctx.residual_dtype is None:
        dresidual = None
    elif tokens is None and ctx.residual_dtype == ctx.x_dtype:
        dresidual = dx
    return dx, dw, db, dresidual, dx_bias, *[None] * 7


_norm_fwd_op.register_autograd(_backward, setup_context=_save)


class _Norm(torch.autograd.Function):
    """The torch path of both norms. RMSNorm takes half the time of differentiating torch's own on a
    CPU; of LayerNorm it is the way to sums over tokens that are not rounded to 16 bits."""

    @staticmethod
    def forward(ctx, s, weight, bias, eps, layer, out_dtype=None):
        y, mean, rstd = norm_fwd_cpu(s, weight, bias, eps, layer, out_dtype or s.dtype)
        ctx.save_for_backward(s, weight, mean, rstd, bias)
        ctx.wanted = [None if p is None else grad_dtype(p) for p in (weight, bias)]
        return y

    @staticmethod
    @once_differentiable  # rstd is saved as a constant: a second derivative would be wrong
    def backward(ctx, dy):
        s, weight, mean, rstd, _ = ctx.saved_tensors
        of_weight, of_bias = ctx.wanted
        dx, _, _, dw, db = norm_bwd_cpu(
            dy, s, weight, mean, rstd, bias=of_bias is not None, x_dtype=s.dtype
        )
        return dx, cast(dw, of_weight), None if db is None else cast(db, of_bias), *[None] * 3

    @staticmethod
    def spmd_typecheck(*, s, weight, bias):
        from spmd_types import rules

        y = rules.einsum("..._,_->..._", s, weight)  # rows may be cut, E not
        return y if bias is None else rules.einsum("..._,_->..._", y, bias)


# ---------------------------------------------------------------- public


def _norm(x, weight, bias, eps, residual, x_bias, drop, out_dtype, layer, impl):
    """Both norms: y, or (y, s) if anything that makes s was given."""
    impl = choose(impl, x, weight, bias, residual, x_bias, getattr(drop, "tokens", None))
    check_tensors(x, weight, bias, residual, x_bias, eps)
    alone = residual is None and x_bias is None and drop is None
    drop = check_drop(drop, x.shape[:-1])
    dtype = out_dtype or x.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"out_dtype must be one of {_DTYPES}, got {dtype}")
    if impl == "torch":
        s = whole_features(norm_sum(x, x_bias, drop, residual))
        weight, bias = whole_features(weight), bias if bias is None else whole_features(bias)
        wide = compute_dtype(s)
        if layer and (weight.dtype == wide or torch.compiler.is_compiling()):
            b = None if bias is None else bias.to(wide)
            y = F.layer_norm(s.to(wide), weight.shape, weight.to(wide), b, eps).to(dtype)
        else:
            y = _Norm.apply(s, weight, bias, eps, layer, dtype)
    else:
        refuse_tangents("layer_norm" if layer else "rms_norm", x, weight, bias, residual, x_bias)
        *draw, tokens = drop or (0.0, 0, 0, None)
        y, s, _, _ = _norm_fwd_op(
            x, weight, bias, residual, x_bias, tokens, eps, layer, *draw, _DTYPES.index(dtype)
        )
        if residual is None and x_bias is None and drop is None:
            s = x
    return y if alone else (y, s)


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

    x[..., E]: any sharding but of E, along which a DTensor is gathered (`cut_rms_norm` of
    ``warpweave.parallel.tensor`` sends a number per row instead). With `residual` (like x, possibly
    of another float dtype), `x_bias`[E] or `drop` it returns (y, s), gradients flowing through
    both; else y alone.

    Args:
        drop: the key of `dropout.dropout`, with the same mask; its tokens are the global indices of
            the rows of x. With p = 0 nothing is dropped.
        out_dtype: dtype of y, by default that of x; s has the wider one of x and
            residual.

    Raises ValueError on a weight of None, on shapes, dtypes or numbers that do not fit, or if
    `impl` cannot run (`dispatch.choose`). Zhang, Sennrich 2019 (arXiv:1910.07467).
    """
    return _norm(
        x, weight, None, eps, residual, x_bias, drop, out_dtype, False, impl
    )  # fmt: skip


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
    """LayerNorm by weight[E] and bias[E]; the rest as `rms_norm`. Ba et al. 2016."""
    return _norm(
        x, weight, bias, eps, residual, x_bias, drop, out_dtype, True, impl
    )  # fmt: skip
