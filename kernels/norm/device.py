"""What the Triton kernels of both norms share; formulas and shapes stand in `function`.

Two forms of each direction: one for rows that fit into a program's registers, and `wide` ones that
go through the row in blocks of columns, twice. They share the device helpers below, all of which
work on a tile of rows, `row`[ROWS] (int64), by columns from `start`: `col`[1, BLOCK_E], with `mask`
[ROWS, BLOCK_E] where both exist. What is absent (a bias, a residual, dropout, the mean of an
RMSNorm) is a pointer that is None: decided at compile time.

Source of the running statistics of the wide forward: Chan, Golub and LeVeque 1983.
"""

from __future__ import annotations

from warpweave.kernels import dropout as keyed
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.numeric import to_dtype, upcast

# They change from one site of the network or step to the next and compile no kernel of their own.
RUNTIME = ("seed", "site")


@triton.jit
def columns(row, start, rows, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """col and mask."""
    col = start + tl.arange(0, BLOCK_E)[None, :]
    return col, (row[:, None] < rows) & (col < E)


@triton.jit
def load_tile(ptr, stride, row, col, mask):
    """A tile in the dtype to compute in, 0 outside."""
    return upcast(tl.load(ptr + row[:, None] * stride + col, mask, 0.0))


@triton.jit
def store_tile(ptr, stride, tile, row, col, mask):
    # One offset for all tensors of this stride: without the brackets a width spills on sm_80.
    tl.store(ptr + (row[:, None] * stride + col), to_dtype(tile, ptr.dtype.element_ty), mask)


@triton.jit
def vector(ptr, col, E: tl.constexpr):
    """Columns of a parameter, [1, BLOCK_E], 0 outside."""
    return upcast(tl.load(ptr + col, col < E, 0.0))


@triton.jit
def drop_mask(
    tile, tokens_ptr, row, start, rows, seed, site, THRESHOLD: tl.constexpr, SCALE: tl.constexpr
):
    """What `dropout.dropout` leaves of the tile; forward and backward alike."""
    GROUPS: tl.constexpr = tile.shape[1] // 4
    token = tl.load(tokens_ptr + row, row < rows, 0)[:, None]
    group = start // 4 + tl.arange(0, GROUPS)[None, :]
    keep = keyed.keep_mask(seed, site, token, group, THRESHOLD, tile.shape[0], GROUPS)
    return tl.where(keep, tile * SCALE, 0.0)


@triton.jit
def sum_of(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, start, rows,
         stride_x, stride_residual, seed, site, E: tl.constexpr, THRESHOLD: tl.constexpr,
         SCALE: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """A tile of s, rounded as it is stored; stored unless it is x."""
    col, mask = columns(row, start, rows, E, BLOCK_E)
    s = load_tile(x_ptr, stride_x, row, col, mask)
    if x_bias_ptr is not None:
        s += vector(x_bias_ptr, col, E)
    if tokens_ptr is not None:
        s = drop_mask(s, tokens_ptr, row, start, rows, seed, site, THRESHOLD, SCALE)
    if residual_ptr is not None:
        s += load_tile(residual_ptr, stride_residual, row, col, mask)
    if s_ptr is not None:
        stored = to_dtype(s, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row[:, None] * E + col, stored, mask)
        s = upcast(stored)
    return s


@triton.jit
def store_y(s, rstd, weight_ptr, bias_ptr, y_ptr, row, col, mask, E: tl.constexpr):
    """Normalise, scale and shift a tile of s, from which the mean is gone."""
    y = s * rstd[:, None] * vector(weight_ptr, col, E)
    if bias_ptr is not None:
        y += vector(bias_ptr, col, E)
    store_tile(y_ptr, E, y, row, col, mask)


@triton.jit
def row_statistics(mean_ptr, rstd_ptr, row, rows):
    """(mean, rstd), each [ROWS, 1]; without a mean rstd stands for it."""
    rstd = tl.load(rstd_ptr + row, row < rows, 0.0)[:, None]
    if mean_ptr is None:
        return rstd, rstd
    else:
        return tl.load(mean_ptr + row, row < rows, 0.0)[:, None], rstd


@triton.jit
def normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, mask):
    """A tile of n = (s - mean) * rstd, 0 outside."""
    n = load_tile(s_ptr, stride_s, row, col, mask)
    if mean_ptr is not None:
        n = tl.where(mask, n - mean, 0.0)
    return n * rstd


@triton.jit
def store_dx(dx, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, start, rows, stride_ds,
              seed, site, E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
              BLOCK_E: tl.constexpr):  # fmt: skip
    """Add ds, store the gradients of residual and x; returns that of x, not rounded."""
    col, mask = columns(row, start, rows, E, BLOCK_E)
    if ds_ptr is not None:
        dx += load_tile(ds_ptr, stride_ds, row, col, mask)
    if dresidual_ptr is not None:
        store_tile(dresidual_ptr, E, dx, row, col, mask)
    if tokens_ptr is not None:
        dx = drop_mask(dx, tokens_ptr, row, start, rows, seed, site, THRESHOLD, SCALE)
    store_tile(dx_ptr, E, dx, row, col, mask)
    return dx


@triton.jit
def add_to(ptr, at, inside, tile):
    """Add the sum over a tile's rows to what this program has at `at`."""
    tl.store(ptr + at, tl.load(ptr + at, inside, 0.0) + tl.sum(tile, 0), inside)
