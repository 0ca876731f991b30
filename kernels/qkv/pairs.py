"""Device helpers for columns by pairs: the columns that are rotated together, angles, and places.

The package's docstring has the order of columns.
"""

from __future__ import annotations

from warpweave.kernels.gemm.mainloop import split_columns
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype, upcast


@triton.jit
def columns_of_pairs(col, HALF: tl.constexpr, COLS: tl.constexpr):
    """The rows of W for the COLS columns from `col`, which are numbered by pairs."""
    c = col + tl.arange(0, COLS)
    p = c // 2
    return p // HALF * (2 * HALF) + c % 2 * HALF + p % HALF


@triton.jit
def places(q_ptr, k_ptr, v_ptr, p, m, kv_heads, HALF: tl.constexpr, G: tl.constexpr):
    """Addresses of the first elements of pairs p at rows m in q, k or v; and true if p rotates."""
    head, i = p // HALF, p % HALF
    slot, kv = head % (G + 2), head // (G + 2)
    is_q, is_k = (slot < G)[None, :], (slot == G)[None, :]
    in_q = m[:, None] * (kv_heads * G * 2 * HALF) + ((kv * G + slot) * 2 * HALF + i)[None, :]
    in_kv = m[:, None] * (kv_heads * 2 * HALF) + (kv * 2 * HALF + i)[None, :]
    place = tl.where(is_q, q_ptr + in_q, tl.where(is_k, k_ptr + in_kv, v_ptr + in_kv))
    return place, slot <= G


@triton.jit
def angles(cos_ptr, sin_ptr, p, m, M, S, turns, HALF: tl.constexpr):
    """cos and sin of pairs p at rows m; 1 and 0 for pairs that do not rotate."""
    at = (m % S)[:, None] * HALF + (p % HALF)[None, :]
    live = (m < M)[:, None] & turns[None, :]
    return upcast(tl.load(cos_ptr + at, live, 1.0)), upcast(tl.load(sin_ptr + at, live, 0.0))


@triton.jit
def _turn_tile(
    z,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    m,
    pair,
    M,
    S,
    kv_heads,
    HALF: tl.constexpr,
    G: tl.constexpr,
):
    """Add the bias, rotate, and store accumulators at rows m and the pairs from `pair`."""
    PAIRS: tl.constexpr = z.shape[1] // 2
    p = pair + tl.arange(0, PAIRS)
    real = p < kv_heads * (G + 2) * HALF
    z1, z2 = tl.split(z.reshape(z.shape[0], PAIRS, 2))
    if bias_ptr is not None:
        at = bias_ptr + p // HALF * (2 * HALF) + p % HALF
        z1 += tl.load(at, real, 0.0).to(z.dtype)[None, :]
        z2 += tl.load(at + HALF, real, 0.0).to(z.dtype)[None, :]
    place, turns = places(q_ptr, k_ptr, v_ptr, p, m, kv_heads, HALF, G)
    if cos_ptr is not None:
        cos, sin = angles(cos_ptr, sin_ptr, p, m, M, S, turns & real, HALF)
        z1, z2 = z1 * cos - z2 * sin, z2 * cos + z1 * sin
    live = (m < M)[:, None] & real[None, :]
    tl.store(place, to_dtype(z1, q_ptr.dtype.element_ty), live)
    tl.store(place + HALF, to_dtype(z2, q_ptr.dtype.element_ty), live)


@triton.jit
def turn(
    z,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    m,
    col,
    M,
    S,
    kv_heads,
    HALF: tl.constexpr,
    G: tl.constexpr,
):
    """Do all that follows the product, for accumulators at rows m and columns from `col`.

    As in `gemm`, this is done for a quarter of the columns at a time.
    """
    left, right = split_columns(z)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    pair, STEP = col // 2, z.shape[1] // 8
    _turn_tile(
        first, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
        m, pair, M, S, kv_heads, HALF, G,
    )  # fmt: skip
    _turn_tile(
        second, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
        m, pair + STEP, M, S, kv_heads, HALF, G,
    )  # fmt: skip
    _turn_tile(
        third, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
        m, pair + 2 * STEP, M, S, kv_heads, HALF, G,
    )  # fmt: skip
    _turn_tile(
        fourth, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
        m, pair + 3 * STEP, M, S, kv_heads, HALF, G,
    )  # fmt: skip
