"""What follows the product dh = dy W2 in registers: dz = dh act'(z), and h = act(z) again."""

from __future__ import annotations

from warpweave.kernels.activation import pointwise_and_slope
from warpweave.kernels.gemm.mainloop import split_columns
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.numeric import to_dtype, upcast


@triton.jit
def _slope_tile(dh, z_ptr, dz_ptr, h_ptr, t, col, T, F, ACT: tl.constexpr, GATED: tl.constexpr):
    """dz, and h if h_ptr is given, for a tile dh at rows t and columns from `col`."""
    COLS: tl.constexpr = dh.shape[1]
    dtype: tl.constexpr = dz_ptr.dtype.element_ty
    f = col + tl.arange(0, COLS)
    at, live = t[:, None] * F + f[None, :], (t < T)[:, None] & (f < F)[None, :]
    if GATED:  # a pair of gate and up is one column of dh
        c = 2 * col + tl.arange(0, 2 * COLS)
        pairs, here = t[:, None] * (2 * F) + c[None, :], (t < T)[:, None] & (c < 2 * F)[None, :]
        z = tl.load(z_ptr + pairs, here, 0.0)
        gate, up = tl.split(z.reshape(dh.shape[0], COLS, 2))
        gate, up = upcast(gate), upcast(up)
        h, slope = pointwise_and_slope(gate, ACT)
        dgate, dup = to_dtype(dh * up * slope, dtype), to_dtype(dh * h, dtype)
        tl.store(dz_ptr + pairs, tl.join(dgate, dup).reshape(dh.shape[0], 2 * COLS), here)
        h *= up
    else:
        h, slope = pointwise_and_slope(upcast(tl.load(z_ptr + at, live, 0.0)), ACT)
        tl.store(dz_ptr + at, to_dtype(dh * slope, dtype), live)
    if h_ptr is not None:
        tl.store(h_ptr + at, to_dtype(h, dtype), live)


@triton.jit
def slopes(dh, z_ptr, dz_ptr, h_ptr, t, col, T, F, ACT: tl.constexpr, GATED: tl.constexpr):
    """dz, and h if h_ptr is given, of accumulators dh, a quarter of the columns at a time: what dh,
    z, dz and h of a whole tile take is more than the registers."""
    left, right = split_columns(dh)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    STEP: tl.constexpr = dh.shape[1] // 4
    _slope_tile(first, z_ptr, dz_ptr, h_ptr, t, col, T, F, ACT, GATED)
    _slope_tile(second, z_ptr, dz_ptr, h_ptr, t, col + STEP, T, F, ACT, GATED)
    _slope_tile(third, z_ptr, dz_ptr, h_ptr, t, col + 2 * STEP, T, F, ACT, GATED)
    _slope_tile(fourth, z_ptr, dz_ptr, h_ptr, t, col + 3 * STEP, T, F, ACT, GATED)
