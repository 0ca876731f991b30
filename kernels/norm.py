"""RMSNorm and LayerNorm with the residual addition fused in.

    s = x + residual                             s = x without one; returned: the next residual
    RMSNorm    y = s * rstd * w                  rstd = 1 / sqrt(mean(s^2) + eps)
    LayerNorm  y = (s - mean) * rstd * w + b     rstd = 1 / sqrt(mean((s - mean)^2) + eps)

x, residual, y, s: [..., E]; w, b: [E]; mean, rstd: [rows]. Statistics are over dim -1, so any
sharding of the other dims (x[T/tp, E] of sequence parallelism) is exact; dw and db are then partial
over that axis.

Backward, with n = (s - mean) * rstd and g = dy * w:

    dx = dresidual = ds + rstd * (g - n * mean(g * n) [- mean(g) in LayerNorm])
    dw = sum_rows(dy * n)                        db = sum_rows(dy)

Saved for backward: s (which the network keeps anyway as its residual stream), w, and per row rstd
and mean: n is recomputed, because re-reading s costs what reading a saved n would, and saves its
memory.

Computed in float32 (float64 for float64 inputs), cast at the store; s is rounded to its dtype
before it is normalised, so forward and backward see the same s. dw and db are deterministic: every
program adds the rows it owns in order and the partial sums are added by torch, without atomics.

Sources: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467).
Limits: the Triton path holds a row in registers, and the backward one also its share
of dw and db, so E <= 8192.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from warpweave.kernels.dispatch import choose, processors, tl, triton
from warpweave.kernels.numeric import to_dtype, upcast
from warpweave.kernels.reference import compute_dtype

MAX_WIDTH = 8192


# ---------------------------------------------------------------- forward


@triton.jit
def _norm_fwd_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    stride_x,
    stride_residual,
    E: tl.constexpr,
    EPS: tl.constexpr,
    LAYER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # 1. One tile of whole rows.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_E)[None, :]
    live = (row[:, None] < rows) & (col < E)
    s = upcast(tl.load(x_ptr + row[:, None] * stride_x + col, live, 0.0))

    # 2. Add the residual, and go on with what is stored.
    if residual_ptr is not None:
        s += upcast(tl.load(residual_ptr + row[:, None] * stride_residual + col, live, 0.0))
        stored = to_dtype(s, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row[:, None] * E + col, stored, live)
        s = upcast(stored)

    # 3. Statistics of each row.
    if LAYER:
        mean = tl.sum(s, 1) / E
        tl.store(mean_ptr + row, mean, row < rows)
        s = tl.where(live, s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(s * s, 1) / E + EPS)
    tl.store(rstd_ptr + row, rstd, row < rows)

    # 4. Normalise, scale, shift.
    y = s * rstd[:, None] * upcast(tl.load(weight_ptr + col, col < E, 0.0))
    if bias_ptr is not None:
        y += upcast(tl.load(bias_ptr + col, col < E, 0.0))
    tl.store(y_ptr + row[:, None] * E + col, to_dtype(y, y_ptr.dtype.element_ty), live)


def _tile(E: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_E and num_warps: 16 elements per thread, several rows per program if rows are
    short."""
    block = triton.next_power_of_2(E)
    rows = max(1, 2048 // block)
    return rows, block, max(4, rows * block // 512)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, E] with contiguous rows: a view where strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _check(x, weight, bias, residual, impl: str) -> None:
    if x.ndim == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [E] of x[..., E], got {[*weight.shape]}, x {[*x.shape]}")
    if bias is not None and bias.shape != weight.shape:
        raise ValueError(f"bias must be like weight {[*weight.shape]}, got {[*bias.shape]}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must be like x {[*x.shape]}, got {[*residual.shape]}")
    if impl == "triton" and not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise ValueError(
            f'impl="triton" needs 1 <= E <= {MAX_WIDTH}, got {x.shape[-1]}: pass impl="torch"'
        )


def _norm_fwd(x, weight, bias, eps: float, residual, layer: bool, impl: str | None):
    """(y, s, mean or None, rstd) for both norms."""
    impl = choose(impl, x, weight, bias, residual)
    _check(x, weight, bias, residual, impl)
    E, wide = x.shape[-1], compute_dtype(x)
    if impl == "torch":
        s = x if residual is None else x + residual
        sw = s.to(wide)
        if layer:
            b = None if bias is None else bias.to(wide)
            y, mean, rstd = torch.native_layer_norm(sw, (E,), weight.to(wide), b, eps)
            return y.to(x.dtype), s, mean.squeeze(-1), rstd.squeeze(-1)
        norm = torch.linalg.vector_norm(sw, dim=-1, keepdim=True)
        rstd = norm.square_().div_(E).add_(eps).rsqrt_()
        return (sw * rstd).mul_(weight).to(x.dtype), s, None, rstd.squeeze(-1)

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    s = x
    if residual is not None:
        s = torch.empty_like(y, dtype=torch.promote_types(x.dtype, residual.dtype))
    rstd = torch.empty(x.shape[:-1], dtype=wide, device=x.device)
    mean = torch.empty_like(rstd) if layer else None
    if rstd.numel():
        x2, r2 = _rows(x), None if residual is None else _rows(residual)
        rows, block, warps = _tile(E)
        with torch.cuda.device_of(x):
            _norm_fwd_kernel[(triton.cdiv(len(x2), rows),)](
                x2,
                r2,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                y,
                None if residual is None else s,
                mean,
                rstd,
                len(x2),
                x2.stride(0),
                0 if r2 is None else r2.stride(0),
                E,
                eps,
                layer,
                rows,
                block,
                num_warps=warps,
            )
    return y, s, mean, rstd


def rms_norm_fwd(x, weight, eps: float = 1e-6, *, residual=None, impl: str | None = None):
    """(y, s, rstd): the forward half of `rms_norm`; rstd[...] fp32 (fp64); s is x itself without
    residual."""
    y, s, _, rstd = _norm_fwd(x, weight, None, eps, residual, False, impl)
    return y, s, rstd


def layer_norm_fwd(x, weight, bias, eps: float = 1e-5, *, residual=None, impl: str | None = None):
    """(y, s, mean, rstd): the forward half of `layer_norm`, as `rms_norm_fwd`."""
    return _norm_fwd(x, weight, bias, eps, residual, True, impl)


# ---------------------------------------------------------------- backward


@triton.jit
def _norm_bwd_kernel(
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    rows,
    stride_dy,
    stride_ds,
    stride_s,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # 1. This program owns tiles pid, pid + programs, ...; its share of dw and db is in registers.
    col = tl.arange(0, BLOCK_E)[None, :]
    weight = upcast(tl.load(weight_ptr + col, col < E, 0.0))
    dw = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.arange(0, ROWS).to(tl.int64) + tile * ROWS
        live = (row[:, None] < rows) & (col < E)

        # 2. The normalised row, again.
        n = upcast(tl.load(s_ptr + row[:, None] * stride_s + col, live, 0.0))
        rstd = tl.load(rstd_ptr + row, row < rows, 0.0)[:, None]
        if mean_ptr is not None:
            n = tl.where(live, n - tl.load(mean_ptr + row, row < rows, 0.0)[:, None], 0.0)
        n *= rstd

        # 3. Parameter gradients.
        g = upcast(tl.load(dy_ptr + row[:, None] * stride_dy + col, live, 0.0))
        dw += g * n
        if db_ptr is not None:
            db += g

        # 4. Input gradient.
        g *= weight
        dx = g - n * (tl.sum(g * n, 1) / E)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(g, 1) / E)[:, None]
        dx *= rstd
        if ds_ptr is not None:
            dx += upcast(tl.load(ds_ptr + row[:, None] * stride_ds + col, live, 0.0))
        tl.store(dx_ptr + row[:, None] * E + col, to_dtype(dx, dx_ptr.dtype.element_ty), live)

    # 5. One partial sum per program; torch adds them.
    out = tl.program_id(0).to(tl.int64) * E + tl.arange(0, BLOCK_E)
    inside = tl.arange(0, BLOCK_E) < E
    tl.store(dw_ptr + out, tl.sum(dw, 0), inside)
    if db_ptr is not None:
        tl.store(db_ptr + out, tl.sum(db, 0), inside)


def _norm_bwd(dy, s, weight, mean, rstd, ds, bias: bool, impl: str | None):
    """(dx in s's dtype, dw, db or None) for both norms."""
    impl = choose(impl, dy, s, weight, mean, rstd, ds)
    _check(s, weight, None, dy, impl)
    E, wide = s.shape[-1], rstd.dtype
    if rstd.numel() == 0:
        dw = torch.zeros_like(weight)
        return torch.empty_like(s), dw, torch.zeros_like(dw) if bias else None
    dy2, s2, r2 = _rows(dy), _rows(s), rstd.reshape(-1)
    if impl == "torch":
        # torch's fused LayerNorm backward with mean 0 is RMSNorm's, but for subtracting g's mean.
        dy2, w = dy2.to(wide), weight.to(wide)
        dx, dw, db = torch.ops.aten.native_layer_norm_backward(
            dy2,
            s2.to(wide),
            (E,),
            torch.zeros_like(r2).unsqueeze(1) if mean is None else mean.reshape(-1, 1),
            r2.unsqueeze(1),
            w,
            w if bias else None,
            (True, True, bias),
        )
        if mean is None:
            dx.add_((torch.mv(dy2, w) * (r2 / E)).unsqueeze(1))
        if ds is not None:
            dx.add_(_rows(ds))
        dx = dx.to(s.dtype)
    else:
        ds2 = None if ds is None else _rows(ds)
        rows, block, warps = _tile(E)
        tiles = triton.cdiv(len(s2), rows)
        programs = min(tiles, 16 // warps * processors(s.device))  # all resident at 128 registers
        dx = torch.empty(s.shape, dtype=s.dtype, device=s.device)
        partial = torch.empty(1 + bias, programs, E, dtype=wide, device=s.device)
        with torch.cuda.device_of(s):
            _norm_bwd_kernel[(programs,)](
                dy2,
                ds2,
                s2,
                weight.contiguous(),
                mean,
                r2,
                dx,
                partial[0],
                partial[1] if bias else None,
                len(s2),
                dy2.stride(0),
                0 if ds2 is None else ds2.stride(0),
                s2.stride(0),
                E,
                rows,
                block,
                num_warps=warps,
            )
        dw = partial[0].sum(0)  # two sums: outputs of an operator may not share storage
        db = partial[1].sum(0) if bias else None
    return dx.view(s.shape), dw.to(weight.dtype), db.to(weight.dtype) if bias else None


def rms_norm_bwd(dy, s, weight, rstd, *, ds=None, impl: str | None = None):
    """(dx, dw): the backward half of `rms_norm`; ds is the gradient of the returned sum, if it has
    one.

    dx, in the dtype of s, is the gradient of x and of the residual alike.
    """
    dx, dw, _ = _norm_bwd(dy, s, weight, None, rstd, ds, False, impl)
    return dx, dw


def layer_norm_bwd(
    dy, s, weight, mean, rstd, *, ds=None, bias: bool = True, impl: str | None = None
):
    """(dx, dw, db or None): the backward half of `layer_norm`, as `rms_norm_bwd`."""
    return _norm_bwd(dy, s, weight, mean, rstd, ds, bias, impl)


# ---------------------------------------------------------------- registration


def _empty(x: torch.Tensor) -> torch.Tensor:
    """An operator's outputs cannot be None and cannot be its inputs: this stands for absent
    ones."""
    return x.new_empty(0)


# Flags are int: DTensor caches rules and shapes by tensors and ints, and both depend on the flags.
@torch.library.custom_op("warpweave::norm_fwd", mutates_args=())
def _norm_fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    y, s, mean, rstd = _norm_fwd(x, weight, bias, eps, residual, bool(layer), "triton")
    return y, _empty(x) if residual is None else s, mean if layer else _empty(rstd), rstd


@_norm_fwd_op.register_fake
def _(x, weight, bias, residual, eps, layer):
    y = x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=compute_dtype(x))
    s = _empty(x)
    if residual is not None:
        s = y.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    return y, s, torch.empty_like(rstd) if layer else _empty(rstd), rstd


@torch.library.custom_op("warpweave::norm_bwd", mutates_args=())
def _norm_bwd_op(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    bias: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx, dw, db = _norm_bwd(dy, s, weight, mean, rstd, ds, bool(bias), "triton")
    return dx, dw, db if bias else _empty(dw)


@_norm_bwd_op.register_fake
def _(dy, ds, s, weight, mean, rstd, bias):
    dw = weight.new_empty(weight.shape)
    return s.new_empty(s.shape), dw, torch.empty_like(dw) if bias else _empty(dw)


def _save(ctx, inputs, output) -> None:
    x, weight, bias, residual, _, layer = inputs
    _, s, mean, rstd = output
    ctx.bias = bias is not None
    ctx.dtypes = x.dtype, None if residual is None else residual.dtype
    ctx.set_materialize_grads(False)
    saved = x if residual is None else s
    ctx.save_for_backward(saved, weight, mean if layer else None, rstd)


def _backward(ctx, dy, ds, dmean, drstd):
    s, weight, mean, rstd = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros_like(s)
    if ctx.dtypes[1] is None:
        ds = None  # the gradient of a stand-in
    dx, dw, db = _norm_bwd_op(dy, ds, s, weight, mean, rstd, ctx.bias)
    of_x, of_residual = ctx.dtypes
    dresidual = None if of_residual is None else dx.to(of_residual)
    return dx.to(of_x), dw, db if ctx.bias else None, dresidual, None, None


_norm_fwd_op.register_autograd(_backward, setup_context=_save)


class _RMSNorm(torch.autograd.Function):
    """The torch path's RMSNorm: half the time of differentiating torch's own on a CPU."""

    @staticmethod
    def forward(ctx, s, weight, eps):
        y, _, rstd = rms_norm_fwd(s, weight, eps, impl="torch")
        ctx.save_for_backward(s, weight, rstd)
        return y

    @staticmethod
    @once_differentiable  # rstd is saved as a constant: a second derivative would be wrong
    def backward(ctx, dy):
        return *rms_norm_bwd(dy, *ctx.saved_tensors, impl="torch"), None

    @staticmethod
    def spmd_typecheck(*, s, weight):
        from spmd_types import rules

        return rules.einsum("..._,_->..._", s, weight)  # rows may be cut, E not


# ---------------------------------------------------------------- public


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x[..., E] (any sharding but of E) by weight[E]; differentiable.

    With `residual` (like x, possibly of another float dtype) it normalises s = x + residual and
    returns (y, s); gradients flow through both. y has the dtype of x, s the wider of the two
    dtypes.

    Raises ValueError on shapes that do not fit, or if `impl` cannot run (see `dispatch.choose`).
    Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    if choose(impl, x, weight, residual) == "triton":
        y, s, _, _ = _norm_fwd_op(x, weight, None, residual, eps, False)
    else:
        _check(x, weight, None, residual, "torch")
        s = x if residual is None else x + residual
        y = _RMSNorm.apply(s, weight, eps).to(x.dtype)
    return y if residual is None else (y, s)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm of x[..., E] by weight[E] and bias[E]; the rest as `rms_norm`. Ba et al. 2016."""
    if choose(impl, x, weight, bias, residual) == "triton":
        y, s, _, _ = _norm_fwd_op(x, weight, bias, residual, eps, True)
    else:
        _check(x, weight, bias, residual, "torch")
        s, wide = x if residual is None else x + residual, compute_dtype(x)
        b = None if bias is None else bias.to(wide)
        y = F.layer_norm(s.to(wide), weight.shape, weight.to(wide), b, eps).to(x.dtype)
    return y if residual is None else (y, s)
