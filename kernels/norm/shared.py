"""Arguments and device helpers shared by the forward and backward of both norms.

`function` has the formulas and shapes. Each direction has two forms: one for rows that fit into a
program's registers, and a `wide` one that goes through the row twice in blocks of columns. The
device helpers work on a tile of rows, `row`[ROWS] (int64), and columns from `start`: `col`[1,
BLOCK_E], with `mask`[ROWS, BLOCK_E] where both exist. A pointer that is None marks an absent
argument (a bias, a residual, dropout, the mean of an RMSNorm), which is decided at compile time.

Source of the running statistics of the wide forward: Chan, Golub and LeVeque 1983.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels import dropout as keyed
from warpweave.kernels.dropout import Drop, check_drop, split_drop
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype, upcast

# ---------------------------------------------------------------- on the host


class NormOptions(NamedTuple):
    """The arguments of a norm other than tensors."""

    layer: bool
    eps: float
    out_dtype: torch.dtype


class Terms(NamedTuple):
    """The terms that turn x into s = residual + dropout(x + x_bias), all of them optional."""

    residual: torch.Tensor | None = None
    x_bias: torch.Tensor | None = None
    drop: Drop | None = None

    @property
    def absent(self) -> bool:
        """True if s is x itself."""
        return self.residual is None and self.x_bias is None and self.drop is None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Residual, x_bias, a seed that is a tensor, and tokens."""
        return self.residual, self.x_bias, *split_drop(self.drop)[1]

    def dtype(self, x: torch.Tensor) -> torch.dtype:
        """The dtype of s, the wider of those of x and residual."""
        return (
            x.dtype if self.residual is None else torch.promote_types(x.dtype, self.residual.dtype)
        )


class WantedGradients(NamedTuple):
    """The sums over tokens to compute in a norm's backward, and the dtypes of dx and dresidual.

    residual_dtype is None if there is no residual.
    """

    bias: bool
    x_bias: bool
    x_dtype: torch.dtype
    residual_dtype: torch.dtype | None

    def apart(self, drop: Drop | None) -> torch.dtype | None:
        """The dtype of a dresidual that differs from dx; None if it is dx or does not exist."""
        same = drop is None and self.residual_dtype == self.x_dtype
        return None if same else self.residual_dtype


def check_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    terms: Terms,
    eps: float = 0.0,
) -> Terms:
    """Return the terms, without a dropout that drops nothing.

    Raises ValueError unless weight, bias and x_bias are [E], E > 0, for x[..., E], residual is
    shaped like x, all have float dtypes, the dropout has one token per row, and eps is not
    negative.
    """
    residual, x_bias, drop = terms
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if weight is None:
        raise ValueError("weight must be [E] for x[..., E], got None; pass ones(E) to skip scaling")
    if x.ndim == 0 or weight.shape != x.shape[-1:] or x.shape[-1] == 0:
        raise ValueError(
            f"weight must be [E] for x[..., E], got weight {[*weight.shape]}, x {[*x.shape]}"
        )
    for name, v in (("bias", bias), ("x_bias", x_bias)):
        if v is not None and v.shape != weight.shape:
            raise ValueError(
                f"{name} must have the shape {[*weight.shape]} of weight, got {[*v.shape]}"
            )
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have the shape {[*x.shape]} of x, got {[*residual.shape]}")
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "x_bias": x_bias}
    for name, v in given.items():
        if v is not None and not v.dtype.is_floating_point:
            raise ValueError(f"{name} must have a float dtype, got {v.dtype}")
    return terms._replace(drop=check_drop(drop, x.shape[:-1]))


def tile_of(E: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_E and num_warps: 16 elements per thread, several rows per program if rows are
    short."""
    block = max(4, triton.next_power_of_2(E))  # dropout draws four columns at a time
    rows = max(1, 2048 // block)
    return rows, block, max(4, rows * block // 512)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, E] with contiguous rows: a view if the strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


# ---------------------------------------------------------------- inside the kernels


@triton.jit
def columns(row, start, rows, E: tl.constexpr, BLOCK_E: tl.constexpr):
    """The columns of a block and their mask."""
    col = start + tl.arange(0, BLOCK_E)[None, :]
    return col, (row[:, None] < rows) & (col < E)


@triton.jit
def load_tile(ptr, stride, row, col, mask):
    """Load a tile in the compute dtype, with 0 outside."""
    return upcast(tl.load(ptr + row[:, None] * stride + col, mask, 0.0))


@triton.jit
def store_tile(ptr, stride, tile, row, col, mask):
    # One offset for all tensors of this stride: without the parentheses, one width spills on sm_80.
    tl.store(ptr + (row[:, None] * stride + col), to_dtype(tile, ptr.dtype.element_ty), mask)


@triton.jit
def vector(ptr, col, E: tl.constexpr):
    """Load columns of a parameter as [1, BLOCK_E], with 0 outside."""
    return upcast(tl.load(ptr + col, col < E, 0.0))


@triton.jit
def drop_mask(
    tile, tokens_ptr, row, start, rows, seed, site, THRESHOLD: tl.constexpr, SCALE: tl.constexpr
):
    """Apply the mask of `dropout.dropout` to a tile, in the forward and in the backward."""
    GROUPS: tl.constexpr = tile.shape[1] // 4
    token = tl.load(tokens_ptr + row, row < rows, 0)[:, None]
    group = start // 4 + tl.arange(0, GROUPS)[None, :]
    keep = keyed.keep_mask(seed, site, token, group, THRESHOLD, tile.shape[0], GROUPS)
    return tl.where(keep, tile * SCALE, 0.0)


@triton.jit
def sum_of(x_ptr, x_bias_ptr, residual_ptr, tokens_ptr, s_ptr, row, start, rows,
         stride_x, stride_residual, seed, site, E: tl.constexpr, THRESHOLD: tl.constexpr,
         SCALE: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Compute a tile of s, rounded as stored; store it unless s is x."""
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
    """Normalize, scale and shift a tile of s, from which the mean is already subtracted."""
    y = s * rstd[:, None] * vector(weight_ptr, col, E)
    if bias_ptr is not None:
        y += vector(bias_ptr, col, E)
    store_tile(y_ptr, E, y, row, col, mask)


@triton.jit
def row_statistics(mean_ptr, rstd_ptr, row, rows):
    """(mean, rstd), each [ROWS, 1]; without a mean, rstd is returned twice."""
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
    """Add ds and store the gradients of residual and x; return the latter, not rounded."""
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
    """Add the sum over a tile's rows to this program's sum at `at`."""
    tl.store(ptr + at, tl.load(ptr + at, inside, 0.0) + tl.sum(tile, 0), inside)
