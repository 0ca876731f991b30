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
the cache if it holds the rows in flight; there is no largest E.

Sources: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467); the fused
chain: Dao's layer_norm of flash-attention.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from warpweave.kernels import dropout as keyed
from warpweave.kernels.dispatch import choose, processors, tl, triton
from warpweave.kernels.numeric import to_dtype, upcast
from warpweave.kernels.reference import compute_dtype

FWD_WIDTH, BWD_WIDTH = 16384, 8192  # longest rows that are held in registers


# ---------------------------------------------------------------- device helpers


@triton.jit
def _sum_tile(
    x_ptr,
    x_bias_ptr,
    residual_ptr,
    tokens_ptr,
    s_ptr,
    row,
    start,
    rows,
    stride_x,
    stride_residual,
    seed,
    site,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """s of `row` and the BLOCK_E columns from `start`, rounded as it is stored; stored unless it
    is x."""
    col = start + tl.arange(0, BLOCK_E)[None, :]
    live = (row[:, None] < rows) & (col < E)
    s = upcast(tl.load(x_ptr + row[:, None] * stride_x + col, live, 0.0))
    if x_bias_ptr is not None:
        s += upcast(tl.load(x_bias_ptr + col, col < E, 0.0))
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row, row < rows, 0)[:, None]
        group = start // 4 + tl.arange(0, BLOCK_E // 4)[None, :]
        keep = keyed.kept(seed, site, token, group, THRESHOLD, row.shape[0], BLOCK_E // 4)
        s = tl.where(keep, s * SCALE, 0.0)
    if residual_ptr is not None:
        s += upcast(tl.load(residual_ptr + row[:, None] * stride_residual + col, live, 0.0))
    if s_ptr is not None:
        stored = to_dtype(s, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row[:, None] * E + col, stored, live)
        s = upcast(stored)
    return s


@triton.jit
def _row_statistics(mean_ptr, rstd_ptr, row, rows):
    """(mean, rstd), each [ROWS, 1]; without a mean rstd stands for it."""
    rstd = tl.load(rstd_ptr + row, row < rows, 0.0)[:, None]
    if mean_ptr is None:
        return rstd, rstd
    else:
        return tl.load(mean_ptr + row, row < rows, 0.0)[:, None], rstd


@triton.jit
def _normal_tile(s_ptr, mean_ptr, mean, rstd, row, start, rows, stride_s, E, BLOCK_E: tl.constexpr):
    """n = (s - mean) * rstd, 0 outside."""
    col = start + tl.arange(0, BLOCK_E)[None, :]
    live = (row[:, None] < rows) & (col < E)
    n = upcast(tl.load(s_ptr + row[:, None] * stride_s + col, live, 0.0))
    if mean_ptr is not None:
        n = tl.where(live, n - mean, 0.0)
    return n * rstd


@triton.jit
def _store_dx(
    dx,
    ds_ptr,
    tokens_ptr,
    dx_ptr,
    dresidual_ptr,
    row,
    start,
    rows,
    stride_ds,
    seed,
    site,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Add ds, store the gradients of residual and x; returns that of x, not rounded."""
    col = start + tl.arange(0, BLOCK_E)[None, :]
    live = (row[:, None] < rows) & (col < E)
    if ds_ptr is not None:
        dx += upcast(tl.load(ds_ptr + row[:, None] * stride_ds + col, live, 0.0))
    at = row[:, None] * E + col
    if dresidual_ptr is not None:
        tl.store(dresidual_ptr + at, to_dtype(dx, dresidual_ptr.dtype.element_ty), live)
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + row, row < rows, 0)[:, None]
        group = start // 4 + tl.arange(0, BLOCK_E // 4)[None, :]
        keep = keyed.kept(seed, site, token, group, THRESHOLD, row.shape[0], BLOCK_E // 4)
        dx = tl.where(keep, dx * SCALE, 0.0)
    tl.store(dx_ptr + at, to_dtype(dx, dx_ptr.dtype.element_ty), live)
    return dx


# ---------------------------------------------------------------- forward


@triton.jit(do_not_specialize=("seed", "site"))
def _norm_fwd_kernel(
    x_ptr,
    x_bias_ptr,
    residual_ptr,
    tokens_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    stride_x,
    stride_residual,
    stride_y,
    seed,
    site,
    E: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # 1. One tile of whole rows; go on with what is stored.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, BLOCK_E)[None, :]
    live = (row[:, None] < rows) & (col < E)
    s = _sum_tile(
        x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, 0, rows, stride_x,
        stride_residual, seed, site, E, THRESHOLD, SCALE, BLOCK_E,
    )  # fmt: skip

    # 2. Statistics of each row.
    if mean_ptr is not None:
        mean = tl.sum(s, 1) / E
        tl.store(mean_ptr + row, mean, row < rows)
        s = tl.where(live, s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(s * s, 1) / E + EPS)
    tl.store(rstd_ptr + row, rstd, row < rows)

    # 3. Normalise, scale, shift.
    y = s * rstd[:, None] * upcast(tl.load(weight_ptr + col, col < E, 0.0))
    if bias_ptr is not None:
        y += upcast(tl.load(bias_ptr + col, col < E, 0.0))
    tl.store(y_ptr + row[:, None] * stride_y + col, to_dtype(y, y_ptr.dtype.element_ty), live)


@triton.jit(do_not_specialize=("seed", "site"))
def _norm_fwd_wide_kernel(
    x_ptr,
    x_bias_ptr,
    residual_ptr,
    tokens_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    s_ptr,
    mean_ptr,
    rstd_ptr,
    rows,
    stride_x,
    stride_residual,
    stride_y,
    seed,
    site,
    E: tl.constexpr,
    EPS: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # 1. Blocks of columns in turn: s, and the statistics so far (Chan et al. 1983).
    dtype: tl.constexpr = rstd_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, squares = tl.zeros((ROWS,), dtype), tl.zeros((ROWS,), dtype)
    before = tl.zeros((1,), dtype)
    for start in range(0, E, BLOCK_E):
        s = _sum_tile(
            x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, start, rows, stride_x,
            stride_residual, seed, site, E, THRESHOLD, SCALE, BLOCK_E,
        )  # fmt: skip
        if mean_ptr is not None:
            col = start + tl.arange(0, BLOCK_E)[None, :]
            count = tl.sum((col < E).to(dtype), 1)
            centre = tl.sum(s, 1) / count
            s = tl.where((row[:, None] < rows) & (col < E), s - centre[:, None], 0.0)
            away, share = centre - mean, count / (before + count)
            squares += away * away * before * share
            mean += away * share
            before += count
        squares += tl.sum(s * s, 1)
    rstd = 1 / tl.sqrt(squares / E + EPS)
    tl.store(rstd_ptr + row, rstd, row < rows)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean, row < rows)

    # 2. The same blocks again, as they were stored (by other threads, perhaps).
    tl.debug_barrier()
    for start in range(0, E, BLOCK_E):
        col = start + tl.arange(0, BLOCK_E)[None, :]
        live = (row[:, None] < rows) & (col < E)
        if s_ptr is not None:
            s = upcast(tl.load(s_ptr + row[:, None] * E + col, live, 0.0))
        else:
            s = upcast(tl.load(x_ptr + row[:, None] * stride_x + col, live, 0.0))
        if mean_ptr is not None:
            s -= mean[:, None]
        y = s * rstd[:, None] * upcast(tl.load(weight_ptr + col, col < E, 0.0))
        if bias_ptr is not None:
            y += upcast(tl.load(bias_ptr + col, col < E, 0.0))
        tl.store(y_ptr + row[:, None] * stride_y + col, to_dtype(y, y_ptr.dtype.element_ty), live)


def _tile(E: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_E and num_warps: 16 elements per thread, several rows per program if rows are
    short."""
    block = max(4, triton.next_power_of_2(E))  # dropout draws four columns at a time
    rows = max(1, 2048 // block)
    return rows, block, max(4, rows * block // 512)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, E] with contiguous rows: a view where strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


class Dropped(NamedTuple):
    """Which elements of x are dropped: `dropout.dropout`'s arguments; tokens None for none."""

    p: float = 0.0
    seed: int = 0
    site: int = 0
    tokens: torch.Tensor | None = None

    def kernel_arguments(self) -> tuple[int, int, int, float]:
        """seed, site, THRESHOLD, SCALE; all alike without dropout, so that one kernel serves."""
        if self.tokens is None:
            return 0, 0, 0, 1.0
        return self.seed, self.site, keyed._threshold(self.p), 1 / (1 - self.p)


def _dropped(x, p: float, seed: int, site: int, tokens) -> Dropped:
    """The checked arguments; nothing is dropped at p = 0."""
    if not 0 <= p < 1:
        raise ValueError(f"dropout must be in [0, 1), got {p}")
    if p > 0 and tokens is None:
        raise ValueError(f"dropout = {p} is keyed by global token ids: tokens is missing")
    if tokens is not None and (tokens.shape != x.shape[:-1] or tokens.dtype != torch.int64):
        raise ValueError(
            f"tokens must be int64 {[*x.shape[:-1]]} of x {[*x.shape]}, got {tokens.dtype} "
            f"{[*tokens.shape]}"
        )
    if not (0 <= seed < 2**63 and 0 <= site < 2**32):
        raise ValueError(f"need 0 <= seed < 2**63 and 0 <= site < 2**32, got {seed} and {site}")
    return Dropped(p, seed, site, tokens.contiguous()) if p > 0 else Dropped()


def _check(x, weight, bias, residual, x_bias=None) -> None:
    if x.ndim == 0 or weight.shape != x.shape[-1:] or x.shape[-1] == 0:
        raise ValueError(f"weight must be [E] of x[..., E], got {[*weight.shape]}, x {[*x.shape]}")
    for name, v in (("bias", bias), ("x_bias", x_bias)):
        if v is not None and v.shape != weight.shape:
            raise ValueError(f"{name} must be like weight {[*weight.shape]}, got {[*v.shape]}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must be like x {[*x.shape]}, got {[*residual.shape]}")
    for name, v in (("x", x), ("weight", weight), ("residual", residual)):
        if v is not None and not v.dtype.is_floating_point:
            raise ValueError(f"{name} must have a float dtype, got {v.dtype}")


def _out_rows(out: torch.Tensor, x: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    """`out` as [rows, E], a view."""
    rows, E = x.shape[:-1].numel(), x.shape[-1]
    dims = [(n, step) for n, step in zip(out.shape[:-1], out.stride()) if n != 1]
    even = all(a[1] == b[0] * b[1] for a, b in pairwise(dims))
    beside = out.ndim > 0 and (out.stride(-1) == 1 or E == 1)
    fits = out.shape == x.shape and out_dtype in (None, out.dtype)
    if fits and ((even and beside) or rows == 0):
        return out.view(rows, E)
    raise ValueError(
        f"out must be like x {[*x.shape]}, in rows at one distance with elements side by side, and "
        f"of dtype {out_dtype}; got {[*out.shape]} {out.dtype} with strides {out.stride()}"
    )


def _sum_torch(x, x_bias, drop: Dropped, residual) -> torch.Tensor:
    """s by torch's own operators, differentiable."""
    s = x if x_bias is None else (x + x_bias).to(x.dtype)
    if drop.tokens is not None:
        flat, tokens = s.reshape(-1, s.shape[-1]), drop.tokens.reshape(-1)
        s = keyed.dropout(
            flat, drop.p, seed=drop.seed, site=drop.site, tokens=tokens, impl="torch"
        ).view(x.shape)
    return s if residual is None else s + residual


def norm_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    layer: bool,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    site: int = 0,
    tokens: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """(y, s, mean or None, rstd): the forward half of both norms, of LayerNorm if `layer`.

    Arguments and errors as `rms_norm`. y is `out` if that is given, else new; s is x itself where
    nothing is added to x and nothing dropped. mean and rstd are [...], fp32 (fp64).
    """
    impl = choose(impl, x, weight, bias, residual, x_bias, tokens, out)
    _check(x, weight, bias, residual, x_bias)
    drop = _dropped(x, dropout, seed, site, tokens)
    E, s_dtype = x.shape[-1], x.dtype
    if residual is not None:
        s_dtype = torch.promote_types(x.dtype, residual.dtype)
    wide = torch.float64 if s_dtype == torch.float64 else torch.float32
    y2 = None if out is None else _out_rows(out, x, out_dtype)
    if impl == "torch":
        s = _sum_torch(x, x_bias, drop, residual)
        sw = s.to(wide)
        if layer:
            b = None if bias is None else bias.to(wide)
            found, mean, rstd = torch.native_layer_norm(sw, (E,), weight.to(wide), b, eps)
            mean = mean.squeeze(-1)
        else:
            length = torch.linalg.vector_norm(sw, dim=-1, keepdim=True)
            rstd, mean = length.square_().div_(E).add_(eps).rsqrt_(), None
            found = (sw * rstd).mul_(weight)
        y = found.to(out_dtype or x.dtype) if out is None else out.copy_(found)
        return y, s, mean, rstd.squeeze(-1)

    changed = residual is not None or x_bias is not None or drop.tokens is not None
    s = torch.empty(x.shape, dtype=s_dtype, device=x.device) if changed else x
    y = torch.empty(x.shape, dtype=out_dtype or x.dtype, device=x.device) if out is None else out
    rstd = torch.empty(x.shape[:-1], dtype=wide, device=x.device)
    mean = torch.empty_like(rstd) if layer else None
    if rstd.numel():
        x2, r2 = _rows(x), None if residual is None else _rows(residual)
        y2 = y.view(-1, E) if out is None else y2
        kernel, (rows, block, warps) = _norm_fwd_kernel, _tile(E)
        if E > FWD_WIDTH:
            kernel, (rows, block, warps) = _norm_fwd_wide_kernel, (1, 8192, 16)
        with torch.cuda.device_of(x):
            kernel[(triton.cdiv(len(x2), rows),)](
                x2,
                None if x_bias is None else x_bias.contiguous(),
                r2,
                drop.tokens,
                weight.contiguous(),
                None if bias is None else bias.contiguous(),
                y2,
                s if changed else None,
                mean,
                rstd,
                len(x2),
                x2.stride(0),
                0 if r2 is None else r2.stride(0),
                y2.stride(0),
                *drop.kernel_arguments()[:2],
                E,
                eps,
                *drop.kernel_arguments()[2:],
                rows,
                block,
                num_warps=warps,
            )
    return y, s, mean, rstd


def rms_norm_fwd(x, weight, eps: float = 1e-6, *, residual=None, impl: str | None = None):
    """(y, s, rstd): `norm_fwd` of an RMSNorm; s is x itself without residual."""
    y, s, _, rstd = norm_fwd(x, weight, None, eps, layer=False, residual=residual, impl=impl)
    return y, s, rstd


def layer_norm_fwd(x, weight, bias, eps: float = 1e-5, *, residual=None, impl: str | None = None):
    """(y, s, mean, rstd): `norm_fwd` of a LayerNorm."""
    return norm_fwd(x, weight, bias, eps, layer=True, residual=residual, impl=impl)


# ---------------------------------------------------------------- backward


@triton.jit(do_not_specialize=("seed", "site"))
def _norm_bwd_kernel(
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    tokens_ptr,
    dx_ptr,
    dresidual_ptr,
    dw_ptr,
    db_ptr,
    dx_bias_ptr,
    rows,
    stride_dy,
    stride_ds,
    stride_s,
    seed,
    site,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # 1. This program owns tiles pid, pid + programs, ...; its share of the sums is in registers.
    col = tl.arange(0, BLOCK_E)[None, :]
    weight = upcast(tl.load(weight_ptr + col, col < E, 0.0))
    dw = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    if dx_bias_ptr is not None:
        dx_bias = tl.zeros((ROWS, BLOCK_E), dw_ptr.dtype.element_ty)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        live = (row[:, None] < rows) & (col < E)

        # 2. The normalised row, again.
        mean, rstd = _row_statistics(mean_ptr, rstd_ptr, row, rows)
        n = _normal_tile(s_ptr, mean_ptr, mean, rstd, row, 0, rows, stride_s, E, BLOCK_E)

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
        dx = _store_dx(
            dx, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, 0, rows, stride_ds, seed, site,
            E, THRESHOLD, SCALE, BLOCK_E,
        )  # fmt: skip
        if dx_bias_ptr is not None:
            dx_bias += dx

    # 5. One partial sum per program; torch adds them.
    out = tl.program_id(0).to(tl.int64) * E + tl.arange(0, BLOCK_E)
    inside = tl.arange(0, BLOCK_E) < E
    tl.store(dw_ptr + out, tl.sum(dw, 0), inside)
    if db_ptr is not None:
        tl.store(db_ptr + out, tl.sum(db, 0), inside)
    if dx_bias_ptr is not None:
        tl.store(dx_bias_ptr + out, tl.sum(dx_bias, 0), inside)


@triton.jit(do_not_specialize=("seed", "site"))
def _norm_bwd_wide_kernel(
    dy_ptr,
    ds_ptr,
    s_ptr,
    weight_ptr,
    mean_ptr,
    rstd_ptr,
    tokens_ptr,
    dx_ptr,
    dresidual_ptr,
    dw_ptr,
    db_ptr,
    dx_bias_ptr,
    rows,
    stride_dy,
    stride_ds,
    stride_s,
    seed,
    site,
    E: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # 1. As above, but this program's share of the sums is in memory (in the L2 cache), zero so far.
    dtype: tl.constexpr = dw_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mean, rstd = _row_statistics(mean_ptr, rstd_ptr, row, rows)

        # 2. The two means over each row.
        along, level = tl.zeros((ROWS,), dtype), tl.zeros((ROWS,), dtype)
        for start in range(0, E, BLOCK_E):
            col = start + tl.arange(0, BLOCK_E)[None, :]
            live = (row[:, None] < rows) & (col < E)
            n = _normal_tile(s_ptr, mean_ptr, mean, rstd, row, start, rows, stride_s, E, BLOCK_E)
            g = upcast(tl.load(dy_ptr + row[:, None] * stride_dy + col, live, 0.0))
            g *= upcast(tl.load(weight_ptr + col, col < E, 0.0))
            along += tl.sum(g * n, 1) / E
            if mean_ptr is not None:
                level += tl.sum(g, 1) / E

        # 3. The same blocks again: input gradient, and parameter gradients over ROWS rows.
        for start in range(0, E, BLOCK_E):
            col = start + tl.arange(0, BLOCK_E)[None, :]
            live = (row[:, None] < rows) & (col < E)
            n = _normal_tile(s_ptr, mean_ptr, mean, rstd, row, start, rows, stride_s, E, BLOCK_E)
            g = upcast(tl.load(dy_ptr + row[:, None] * stride_dy + col, live, 0.0))
            at = start + tl.arange(0, BLOCK_E)
            out = tl.program_id(0).to(tl.int64) * E + at
            dw = tl.load(dw_ptr + out, at < E, 0.0) + tl.sum(g * n, 0)
            tl.store(dw_ptr + out, dw, at < E)
            if db_ptr is not None:
                db = tl.load(db_ptr + out, at < E, 0.0) + tl.sum(g, 0)
                tl.store(db_ptr + out, db, at < E)
            g *= upcast(tl.load(weight_ptr + col, col < E, 0.0))
            dx = (g - n * along[:, None] - level[:, None]) * rstd
            dx = _store_dx(
                dx, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, start, rows, stride_ds, seed,
                site, E, THRESHOLD, SCALE, BLOCK_E,
            )  # fmt: skip
            if dx_bias_ptr is not None:
                dx_bias = tl.load(dx_bias_ptr + out, at < E, 0.0) + tl.sum(dx, 0)
                tl.store(dx_bias_ptr + out, dx_bias, at < E)
        tl.debug_barrier()  # the sums are read again, by other threads perhaps


class NormGradients(NamedTuple):
    """What `norm_bwd` returns; dresidual is dx itself where the two are equal, absent ones None."""

    dx: torch.Tensor
    dresidual: torch.Tensor | None
    dx_bias: torch.Tensor | None
    dw: torch.Tensor
    db: torch.Tensor | None


def norm_bwd(
    dy: torch.Tensor,
    s: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    ds: torch.Tensor | None = None,
    bias: bool = False,
    x_bias: bool = False,
    dropout: float = 0.0,
    seed: int = 0,
    site: int = 0,
    tokens: torch.Tensor | None = None,
    x_dtype: torch.dtype | None = None,
    residual_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> NormGradients:
    """The backward half of both norms: of LayerNorm if `mean` is given.

    ds is the gradient of the returned s, if it has one; `bias` and `x_bias` say which sums are
    wanted; x_dtype (by default that of s) and residual_dtype (None: there is no residual) are those
    of dx and dresidual. dw and db have the dtype of weight, dx_bias that of rstd.
    """
    impl = choose(impl, dy, s, weight, mean, rstd, ds, tokens)
    _check(s, weight, None, dy)
    if ds is not None:
        _check(s, weight, None, ds)
    drop = _dropped(s, dropout, seed, site, tokens)
    x_dtype = s.dtype if x_dtype is None else x_dtype
    apart = residual_dtype is not None and (drop.tokens is not None or residual_dtype != x_dtype)
    if rstd.numel() == 0:
        dx = torch.empty(s.shape, dtype=x_dtype, device=s.device)
        dresidual = torch.empty_like(dx, dtype=residual_dtype) if apart else None
        dw, dx_bias = torch.zeros_like(weight), torch.zeros_like(weight, dtype=rstd.dtype)
        db = torch.zeros_like(dw) if bias else None
    else:
        half = _bwd_torch if impl == "torch" else _bwd_triton
        dx, dresidual, dx_bias, dw, db = half(
            dy, s, weight, mean, rstd, ds, bias, x_bias, drop, x_dtype,
            residual_dtype if apart else None,
        )  # fmt: skip
    if not apart and residual_dtype is not None:
        dresidual = dx
    return NormGradients(dx, dresidual, dx_bias if x_bias else None, dw, db)


def _bwd_torch(dy, s, weight, mean, rstd, ds, bias, x_bias, drop: Dropped, x_dtype, apart):
    """torch's fused LayerNorm backward; with mean 0 it is RMSNorm's, but for subtracting g's
    mean."""
    E, wide = s.shape[-1], rstd.dtype
    dy2, s2, r2, w = _rows(dy).to(wide), _rows(s).to(wide), rstd.reshape(-1), weight.to(wide)
    dx, dw, db = torch.ops.aten.native_layer_norm_backward(
        dy2,
        s2,
        (E,),
        torch.zeros_like(r2).unsqueeze(1) if mean is None else mean.reshape(-1, 1),
        r2.unsqueeze(1),
        w,
        w if bias else None,
        (True, True, bias),
    )
    if mean is None:
        kind = s.device.type
        casts = torch.is_autocast_enabled(kind)  # it would cast this product
        with torch.autocast(kind, enabled=False) if casts else nullcontext():
            dx.add_((torch.mv(dy2, w) * (r2 / E)).unsqueeze(1))
    if ds is not None:
        dx.add_(_rows(ds))
    dresidual = None if apart is None else dx.to(apart).view(s.shape)
    if drop.tokens is not None:
        tokens = drop.tokens.reshape(-1)
        dropped = keyed._dropped(tokens, E, drop.p, drop.seed, drop.site)
        dx = dx.mul_(1 / (1 - drop.p)).masked_fill_(dropped, 0)
    dx_bias = dx.sum(0) if x_bias else None
    db = db.to(weight.dtype) if bias else None
    return dx.to(x_dtype).view(s.shape), dresidual, dx_bias, dw.to(weight.dtype), db


def _bwd_triton(dy, s, weight, mean, rstd, ds, bias, x_bias, drop: Dropped, x_dtype, apart):
    E, wide = s.shape[-1], rstd.dtype
    dy2, s2, ds2 = _rows(dy), _rows(s), None if ds is None else _rows(ds)
    kernel, (rows, block, warps) = _norm_bwd_kernel, _tile(E)
    warps = min(16, 2 * warps)  # 8 elements per thread: with 16 some widths spill on sm_100
    widest = BWD_WIDTH // 2 if bias and x_bias else BWD_WIDTH  # three sums take more registers
    if widest < E:
        kernel, (rows, block, warps) = _norm_bwd_wide_kernel, (4, 1024, 16)
    tiles = triton.cdiv(len(s2), rows)
    # All resident at once: 80 registers up to E = 2048, 64 up to 4096, 128 beyond.
    resident = 24 // warps if block <= 2048 else max(1, 8192 // block)
    programs = min(tiles, resident * processors(s.device))
    dx = torch.empty(s.shape, dtype=x_dtype, device=s.device)
    dresidual = None if apart is None else torch.empty_like(dx, dtype=apart)
    partial = dx.new_empty(1 + bias + x_bias, programs, E, dtype=wide)
    if widest < E:
        partial.zero_()  # that kernel adds to them
    with torch.cuda.device_of(s):
        kernel[(programs,)](
            dy2,
            ds2,
            s2,
            weight.contiguous(),
            None if mean is None else mean.contiguous(),
            rstd.contiguous(),
            drop.tokens,
            dx,
            dresidual,
            partial[0],
            partial[1] if bias else None,
            partial[-1] if x_bias else None,
            len(s2),
            dy2.stride(0),
            0 if ds2 is None else ds2.stride(0),
            s2.stride(0),
            *drop.kernel_arguments()[:2],
            E,
            *drop.kernel_arguments()[2:],
            rows,
            block,
            num_warps=warps,
        )
    dw = partial[0].sum(0).to(weight.dtype)  # sums apart: outputs of an operator share no storage
    db = partial[1].sum(0).to(weight.dtype) if bias else None
    return dx, dresidual, partial[-1].sum(0) if x_bias else None, dw, db


def rms_norm_bwd(dy, s, weight, rstd, *, ds=None, impl: str | None = None):
    """(dx, dw): `norm_bwd` of an RMSNorm; dx, in the dtype of s, is the gradient of x and of the
    residual alike."""
    found = norm_bwd(dy, s, weight, None, rstd, ds=ds, impl=impl)
    return found.dx, found.dw


def layer_norm_bwd(
    dy, s, weight, mean, rstd, *, ds=None, bias: bool = True, impl: str | None = None
):
    """(dx, dw, db or None): `norm_bwd` of a LayerNorm, as `rms_norm_bwd`."""
    found = norm_bwd(dy, s, weight, mean, rstd, ds=ds, bias=bias, impl=impl)
    return found.dx, found.dw, found.db


# ---------------------------------------------------------------- registration

# Flags and dtypes are int: DTensor caches rules and outputs by tensors and ints, and both depend on
# them.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _empty(x: torch.Tensor) -> torch.Tensor:
    """An operator's outputs cannot be None and cannot be its inputs: this stands for absent
    ones."""
    return x.new_empty(0)


def _sum_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


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
        dropout=dropout, seed=seed, site=site, tokens=tokens, out_dtype=_DTYPES[out_dtype],
        impl="triton",
    )  # fmt: skip
    return y, _empty(s) if s is x else s, mean if layer else _empty(rstd), rstd


@_norm_fwd_op.register_fake
def _(
    x, weight, bias, residual, x_bias, tokens, eps, layer, dropout, seed, site, out_dtype
):  # fmt: skip
    s = x.new_empty(x.shape, dtype=_sum_dtype(x, residual))
    rstd = x.new_empty(x.shape[:-1], dtype=compute_dtype(s))
    if residual is None and x_bias is None and tokens is None:
        s = _empty(x)
    y = x.new_empty(x.shape, dtype=_DTYPES[out_dtype])
    return y, s, torch.empty_like(rstd) if layer else _empty(rstd), rstd


@torch.library.custom_op("warpweave::norm_fwd_out", mutates_args=("out",))
def _norm_fwd_out_op(
    out: torch.Tensor,
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
) -> torch.Tensor:
    s = norm_fwd(
        x, weight, bias, eps, layer=bool(layer), residual=residual, x_bias=x_bias,
        dropout=dropout, seed=seed, site=site, tokens=tokens, out=out, impl="triton",
    )[1]  # fmt: skip
    return _empty(s) if s is x else s


@_norm_fwd_out_op.register_fake
def _(out, x, weight, bias, residual, x_bias, tokens, eps, layer, dropout, seed, site):
    if residual is None and x_bias is None and tokens is None:
        return _empty(x)
    return x.new_empty(x.shape, dtype=_sum_dtype(x, residual))


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
        dy, s, weight, mean, rstd, ds=ds, bias=bool(bias), x_bias=bool(x_bias), dropout=dropout,
        seed=seed, site=site, tokens=tokens, x_dtype=_DTYPES[x_dtype],
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
    dx, dw = s.new_empty(s.shape, dtype=_DTYPES[x_dtype]), weight.new_empty(weight.shape)
    dresidual = _empty(dx)
    if residual_dtype >= 0 and (tokens is not None or residual_dtype != x_dtype):
        dresidual = s.new_empty(s.shape, dtype=_DTYPES[residual_dtype])
    dx_bias = weight.new_empty(weight.shape, dtype=rstd.dtype) if x_bias else _empty(rstd)
    return dx, dresidual, dx_bias, dw, torch.empty_like(dw) if bias else _empty(dw)


def _save(ctx, inputs, output) -> None:
    x, weight, bias, residual, x_bias, tokens, _, layer, *ctx.draw, _ = inputs
    _, s, mean, rstd = output
    ctx.bias, ctx.layer = bias is not None, layer
    ctx.x_dtype, ctx.x_bias_dtype = x.dtype, None if x_bias is None else x_bias.dtype
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
    dx, dresidual, dx_bias, dw, db = _norm_bwd_op(
        dy, ds, s, weight, mean, rstd, tokens, ctx.bias, ctx.x_bias_dtype is not None, *ctx.draw,
        _DTYPES.index(ctx.x_dtype), to_residual,
    )  # fmt: skip
    if ctx.residual_dtype is None:
        dresidual = None
    elif tokens is None and ctx.residual_dtype == ctx.x_dtype:
        dresidual = dx
    dx_bias = None if ctx.x_bias_dtype is None else dx_bias.to(ctx.x_bias_dtype)
    return dx, dw, db if ctx.bias else None, dresidual, dx_bias, *[None] * 7


_norm_fwd_op.register_autograd(_backward, setup_context=_save)


class _RMSNorm(torch.autograd.Function):
    """The torch path's RMSNorm: half the time of differentiating torch's own on a CPU."""

    @staticmethod
    def forward(ctx, s, weight, eps, out_dtype=None):
        y, _, _, rstd = norm_fwd(
            s, weight, None, eps, layer=False, out_dtype=out_dtype, impl="torch"
        )
        ctx.save_for_backward(s, weight, rstd)
        return y

    @staticmethod
    @once_differentiable  # rstd is saved as a constant: a second derivative would be wrong
    def backward(ctx, dy):
        return *rms_norm_bwd(dy, *ctx.saved_tensors, impl="torch"), None, None

    @staticmethod
    def spmd_typecheck(*, s, weight):
        from spmd_types import rules

        return rules.einsum("..._,_->..._", s, weight)  # rows may be cut, E not


# ---------------------------------------------------------------- public


def _norm(
    x, weight, bias, eps, residual, x_bias, dropout, seed, site, tokens, out_dtype, out, layer, impl
):
    """Both norms: y, or (y, s) if anything that makes s was given."""
    impl = choose(impl, x, weight, bias, residual, x_bias, tokens, out)
    _check(x, weight, bias, residual, x_bias)
    returns_sum = residual is not None or x_bias is not None or tokens is not None
    drop = _dropped(x, dropout, seed, site, tokens)
    if out is not None:
        _out_rows(out, x, out_dtype)
        given = (x, weight, bias, residual, x_bias)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
            raise ValueError("out= has no gradient: use torch.no_grad(), or norm_fwd and norm_bwd")
    dtype = out_dtype or (x.dtype if out is None else out.dtype)
    if dtype not in _DTYPES:
        raise ValueError(f"out_dtype must be one of {_DTYPES}, got {dtype}")
    if impl == "torch":
        s = _sum_torch(x, x_bias, drop, residual)
        if layer:
            wide = compute_dtype(s)
            b = None if bias is None else bias.to(wide)
            y = F.layer_norm(s.to(wide), weight.shape, weight.to(wide), b, eps).to(dtype)
        else:
            y = _RMSNorm.apply(s, weight, eps, dtype)
        y = y if out is None else out.copy_(y)
    else:
        made = (x, weight, bias, residual, x_bias, drop.tokens, eps, layer, *drop[:3])
        if out is None:
            y, s, _, _ = _norm_fwd_op(*made, _DTYPES.index(dtype))
        else:
            y, s = out, _norm_fwd_out_op(out, *made)
        if residual is None and x_bias is None and drop.tokens is None:
            s = x
    return (y, s) if returns_sum else y


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    site: int = 0,
    tokens: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of s = residual + dropout(x + x_bias) by weight[E]; differentiable.

    x[..., E]: any sharding but of E. With `residual` (like x, possibly of another float dtype),
    `x_bias`[E] or `tokens` it returns (y, s), gradients flowing through both; else y alone.

    Args:
        dropout, seed, site, tokens: as `dropout.dropout`, with the same mask: `tokens`[...] (int64,
            x without its last dim) are the global indices of the rows. It must be given if
            dropout > 0, and makes no difference at 0.
        out_dtype: dtype of y, by default that of x (or of `out`); s has the wider one of x and
            residual.
        out: where to write y (and what is returned as y): like x, rows at one distance, such as
            this rank's part of an all-gather's buffer or a slice of a wider one. As torch's own
            `out=` it has no gradient; a Function that has one calls `norm_fwd` and `norm_bwd`.

    Raises ValueError on shapes, dtypes or numbers that do not fit, on `out` with inputs that
    require grad, or if `impl` cannot run (see `dispatch.choose`). Zhang and Sennrich 2019
    (arXiv:1910.07467).
    """
    return _norm(
        x, weight, None, eps, residual, x_bias, dropout, seed, site, tokens, out_dtype, out, False,
        impl,
    )  # fmt: skip


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    seed: int = 0,
    site: int = 0,
    tokens: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """LayerNorm by weight[E] and bias[E]; the rest as `rms_norm`. Ba et al. 2016."""
    return _norm(
        x, weight, bias, eps, residual, x_bias, dropout, seed, site, tokens, out_dtype, out, True,
        impl,
    )  # fmt: skip
