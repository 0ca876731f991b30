"""The Triton kernels of both norms. `norm.py` launches them; formulas and shapes stand there.

Two forms of each direction: one for rows that fit into a program's registers, and `wide` ones that
go through the row in blocks of columns, twice. They share the device helpers below, all of which
work on a tile of rows, `row`[ROWS] (int64), by columns from `start`: `col`[1, BLOCK_E], with `live`
[ROWS, BLOCK_E] where both exist. What is absent (a bias, a residual, dropout, the mean of an
RMSNorm) is a pointer that is None: decided at compile time.

Source of the running statistics of the wide forward: Chan, Golub and LeVeque 1983.
"""

from __future__ import annotations

from warpweave.kernels import dropout as keyed
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.numeric import to_dtype, upcast

# They change from one site of the network or step to the next and compile no kernel of their own.
_RUNTIME = ("seed", "site")

# ---------------------------------------------------------------- device helpers


@triton.jit
def _columns(row, start, rows, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """col and live."""
    col = start + tl.arange(0, BLOCK_E)[None, :]
    return col, (row[:, None] < rows) & (col < E)


@triton.jit
def _load(ptr, stride, row, col, live):
    """A tile in the dtype to compute in, 0 outside."""
    return upcast(tl.load(ptr + row[:, None] * stride + col, live, 0.0))


@triton.jit
def _store(ptr, stride, tile, row, col, live):
    # One offset for all tensors of this stride: without the brackets a width spills on sm_80.
    tl.store(ptr + (row[:, None] * stride + col), to_dtype(tile, ptr.dtype.element_ty), live)


@triton.jit
def _vector(ptr, col, E: tl.constexpr):
    """Columns of a parameter, [1, BLOCK_E], 0 outside."""
    return upcast(tl.load(ptr + col, col < E, 0.0))


@triton.jit
def _drop(
    tile, tokens_ptr, row, start, rows, seed, site, THRESHOLD: tl.constexpr, SCALE: tl.constexpr
):
    """What `dropout.dropout` leaves of the tile; forward and backward alike."""
    GROUPS: tl.constexpr = tile.shape[1] // 4
    token = tl.load(tokens_ptr + row, row < rows, 0)[:, None]
    group = start // 4 + tl.arange(0, GROUPS)[None, :]
    keep = keyed.kept(seed, site, token, group, THRESHOLD, tile.shape[0], GROUPS)
    return tl.where(keep, tile * SCALE, 0.0)


@triton.jit
def _sum(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, start, rows,
         stride_x, stride_residual, seed, site, E: tl.constexpr, THRESHOLD: tl.constexpr,
         SCALE: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """A tile of s, rounded as it is stored; stored unless it is x."""
    col, live = _columns(row, start, rows, E, BLOCK_E)
    s = _load(x_ptr, stride_x, row, col, live)
    if x_bias_ptr is not None:
        s += _vector(x_bias_ptr, col, E)
    if tokens_ptr is not None:
        s = _drop(s, tokens_ptr, row, start, rows, seed, site, THRESHOLD, SCALE)
    if residual_ptr is not None:
        s += _load(residual_ptr, stride_residual, row, col, live)
    if s_ptr is not None:
        stored = to_dtype(s, s_ptr.dtype.element_ty)
        tl.store(s_ptr + row[:, None] * E + col, stored, live)
        s = upcast(stored)
    return s


@triton.jit
def _store_y(s, rstd, weight_ptr, bias_ptr, y_ptr, stride_y, row, col, live, E: tl.constexpr):
    """Normalise, scale and shift a tile of s, from which the mean is gone."""
    y = s * rstd[:, None] * _vector(weight_ptr, col, E)
    if bias_ptr is not None:
        y += _vector(bias_ptr, col, E)
    _store(y_ptr, stride_y, y, row, col, live)


@triton.jit
def _row_statistics(mean_ptr, rstd_ptr, row, rows):
    """(mean, rstd), each [ROWS, 1]; without a mean rstd stands for it."""
    rstd = tl.load(rstd_ptr + row, row < rows, 0.0)[:, None]
    if mean_ptr is None:
        return rstd, rstd
    else:
        return tl.load(mean_ptr + row, row < rows, 0.0)[:, None], rstd


@triton.jit
def _normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, live):
    """A tile of n = (s - mean) * rstd, 0 outside."""
    n = _load(s_ptr, stride_s, row, col, live)
    if mean_ptr is not None:
        n = tl.where(live, n - mean, 0.0)
    return n * rstd


@triton.jit
def _store_dx(dx, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, start, rows, stride_ds,
              seed, site, E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
              BLOCK_E: tl.constexpr):  # fmt: skip
    """Add ds, store the gradients of residual and x; returns that of x, not rounded."""
    col, live = _columns(row, start, rows, E, BLOCK_E)
    if ds_ptr is not None:
        dx += _load(ds_ptr, stride_ds, row, col, live)
    if dresidual_ptr is not None:
        _store(dresidual_ptr, E, dx, row, col, live)
    if tokens_ptr is not None:
        dx = _drop(dx, tokens_ptr, row, start, rows, seed, site, THRESHOLD, SCALE)
    _store(dx_ptr, E, dx, row, col, live)
    return dx


@triton.jit
def _add_to(ptr, at, inside, tile):
    """Add the sum over a tile's rows to what this program has at `at`."""
    tl.store(ptr + at, tl.load(ptr + at, inside, 0.0) + tl.sum(tile, 0), inside)


# ---------------------------------------------------------------- forward


@triton.jit(do_not_specialize=_RUNTIME)
def norm_fwd_kernel(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, weight_ptr, bias_ptr,
                    y_ptr, s_ptr, mean_ptr, rstd_ptr,
                    rows, stride_x, stride_residual, stride_y, seed, site,
                    E: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
                    SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. One tile of whole rows; go on with what is stored.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col, live = _columns(row, 0, rows, E, BLOCK_E)
    s = _sum(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, 0, rows, stride_x,
             stride_residual, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip

    # 2. Statistics of each row.
    if mean_ptr is not None:
        mean = tl.sum(s, 1) / E
        tl.store(mean_ptr + row, mean, row < rows)
        s = tl.where(live, s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(s * s, 1) / E + EPS)
    tl.store(rstd_ptr + row, rstd, row < rows)

    # 3. The result.
    _store_y(s, rstd, weight_ptr, bias_ptr, y_ptr, stride_y, row, col, live, E)


@triton.jit(do_not_specialize=_RUNTIME)
def norm_fwd_wide_kernel(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, weight_ptr, bias_ptr,
                         y_ptr, s_ptr, mean_ptr, rstd_ptr,
                         rows, stride_x, stride_residual, stride_y, seed, site,
                         E: tl.constexpr, EPS: tl.constexpr, THRESHOLD: tl.constexpr,
                         SCALE: tl.constexpr, ROWS: tl.constexpr,
                         BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. Blocks of columns in turn: s, and the statistics so far.
    dtype: tl.constexpr = rstd_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean, squares = tl.zeros((ROWS,), dtype), tl.zeros((ROWS,), dtype)
    before = tl.zeros((1,), dtype)
    for start in range(0, E, BLOCK_E):
        s = _sum(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, start, rows, stride_x,
                 stride_residual, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip
        if mean_ptr is not None:
            col, live = _columns(row, start, rows, E, BLOCK_E)
            count = tl.sum((col < E).to(dtype), 1)
            centre = tl.sum(s, 1) / count
            s = tl.where(live, s - centre[:, None], 0.0)
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
        col, live = _columns(row, start, rows, E, BLOCK_E)
        if s_ptr is not None:
            s = _load(s_ptr, E, row, col, live)
        else:
            s = _load(x_ptr, stride_x, row, col, live)
        if mean_ptr is not None:
            s -= mean[:, None]
        _store_y(s, rstd, weight_ptr, bias_ptr, y_ptr, stride_y, row, col, live, E)


# ---------------------------------------------------------------- backward


@triton.jit(do_not_specialize=_RUNTIME)
def norm_bwd_kernel(dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, tokens_ptr,
                    dx_ptr, dresidual_ptr, dw_ptr, db_ptr, dx_bias_ptr,
                    rows, stride_dy, stride_ds, stride_s, seed, site,
                    E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
                    ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. This program owns tiles pid, pid + programs, ...; its share of the sums is in registers.
    #    With the one of x_bias they leave none for the weight, which is then loaded with every row.
    col = tl.arange(0, BLOCK_E)[None, :]
    if dx_bias_ptr is None:
        weight = _vector(weight_ptr, col, E)
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
        n = _normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, live)

        # 3. Parameter gradients.
        g = _load(dy_ptr, stride_dy, row, col, live)
        dw += g * n
        if db_ptr is not None:
            db += g

        # 4. Input gradient.
        if dx_bias_ptr is not None:
            weight = _vector(weight_ptr, col, E)
        g *= weight
        dx = g - n * (tl.sum(g * n, 1) / E)[:, None]
        if mean_ptr is not None:
            dx -= (tl.sum(g, 1) / E)[:, None]
        dx = _store_dx(dx * rstd, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, 0, rows,
                       stride_ds, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip
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


@triton.jit(do_not_specialize=_RUNTIME)
def norm_bwd_wide_kernel(dy_ptr, ds_ptr, s_ptr, weight_ptr, mean_ptr, rstd_ptr, tokens_ptr,
                         dx_ptr, dresidual_ptr, dw_ptr, db_ptr, dx_bias_ptr,
                         rows, stride_dy, stride_ds, stride_s, seed, site,
                         E: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
                         ROWS: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    # 1. As above, but this program's share of the sums is in memory (in the L2 cache), zero so far.
    dtype: tl.constexpr = dw_ptr.dtype.element_ty
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
        mean, rstd = _row_statistics(mean_ptr, rstd_ptr, row, rows)

        # 2. The two means over each row.
        along, level = tl.zeros((ROWS,), dtype), tl.zeros((ROWS,), dtype)
        for start in range(0, E, BLOCK_E):
            col, live = _columns(row, start, rows, E, BLOCK_E)
            n = _normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, live)
            g = _load(dy_ptr, stride_dy, row, col, live) * _vector(weight_ptr, col, E)
            along += tl.sum(g * n, 1) / E
            if mean_ptr is not None:
                level += tl.sum(g, 1) / E

        # 3. The same blocks again: input gradient, and parameter gradients over ROWS rows. To hold
        # g and n instead would take half of all registers at E = 16384 and more than all beyond;
        # the sums would not fit beside them and go to memory and back with every row, 8 bytes per
        # element each, where this second reading of bfloat16 costs 4.
        for start in range(0, E, BLOCK_E):
            col, live = _columns(row, start, rows, E, BLOCK_E)
            n = _normal(s_ptr, stride_s, mean_ptr, mean, rstd, row, col, live)
            g = _load(dy_ptr, stride_dy, row, col, live)
            at = start + tl.arange(0, BLOCK_E)
            out, inside = tl.program_id(0).to(tl.int64) * E + at, at < E
            _add_to(dw_ptr, out, inside, g * n)
            if db_ptr is not None:
                _add_to(db_ptr, out, inside, g)
            g *= _vector(weight_ptr, col, E)
            dx = (g - n * along[:, None] - level[:, None]) * rstd
            dx = _store_dx(dx, ds_ptr, tokens_ptr, dx_ptr, dresidual_ptr, row, start, rows,
                           stride_ds, seed, site, E, THRESHOLD, SCALE, BLOCK_E)  # fmt: skip
            if dx_bias_ptr is not None:
                _add_to(dx_bias_ptr, out, inside, dx)
        tl.debug_barrier()  # the sums are read again, by other threads perhaps
