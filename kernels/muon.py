"""Muon's orthogonalization of a matrix by Newton-Schulz steps.

From Jordan et al. 2024, kellerjordan.github.io/posts/muon. Products of a matrix with itself compute
only one triangle.

    X = G / |G|, transposed if m > n: [m, n] with m <= n         |G| the Frobenius norm
    5 times:  A = X X^T;  B = b A + c A A;  X <- a X + B X         a, b, c = 3.4445, -4.7750, 2.0315

The singular values of X move close to 1 (0.7 to 1.2) and the singular vectors stay, so X is close
to U V^T for G = U S V^T. A and B are symmetric, and A A = A A^T: both are a `symmetric_product`

    out[m, m] = alpha x[m, k] x^T + beta add[m, m]

whose kernel computes only the tiles on or above the diagonal. It stores each tile twice, unchanged
and mirrored. A tile across the diagonal stores only its part above it, so no element is written
twice:

    tiles of 4 x 4    0 1 2 3
                      . 4 5 6        6 of 16 are not computed; of 32 x 32, 496 of 1024
                      . . 7 8
                      . . . 9

The polynomial b A + c A A is the epilogue of the second product, which saves a pass over A and B.
torch's product (cuBLAS) computes B X and adds a X in the same call. A step takes 3 m^2 n + m^3
FLOPs, 2 m^2 n of them for B X. Three full products would take 4 m^2 n + 2 m^3.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warpweave.kernels.gemm.epilogue import find_precision
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    is_aligned,
    operands,
    split_columns,
    tile_count,
    tile_origin,
    tile_product,
)
from warpweave.kernels.runtime.dispatch import choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import FLOATS, no_autocast, to_dtype

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7  # added to the norm, so that a matrix of zeros stays zero


# ---------------------------------------------------------------- symmetric product


@triton.jit
def _mirrored_store(
    acc, add_ptr, out_ptr, row, col, M, ALPHA: tl.constexpr, BETA: tl.constexpr
):  # fmt: skip
    """Store ALPHA acc + BETA add in out[M, M] and in the mirrored place.

    The tile has the rows from `row` and the columns from `col`; elements below the diagonal are
    skipped.
    """
    i, j = tl.arange(0, acc.shape[0])[:, None], tl.arange(0, acc.shape[1])[None, :]
    above = (row - col).to(tl.int32)  # on the diagonal j - i = row - col
    live = (j - i >= above) & (col + j < M)
    upper, lower = i * M + j, j * M + i  # 32 bits, from 64-bit corners; 64-bit offsets would spill
    y = acc * ALPHA
    if add_ptr is not None:
        y += BETA * tl.load(add_ptr + (row * M + col) + upper, live, 0.0).to(acc.dtype)
    y = to_dtype(y, out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row * M + col) + upper, y, live)
    tl.store(out_ptr + (col * M + row) + lower, y, live & (j - i > above))


@triton.jit
def _symmetric_kernel(
    x,
    xt,
    add_ptr,
    out_ptr,
    M,
    K,
    stride_xm,
    stride_xk,
    stride_tk,
    stride_tn,
    ALPHA: tl.constexpr,
    BETA: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    # 1. Skip a tile below the diagonal: another program stores it as its mirrored tile.
    row, col = tile_origin(tl.program_id(0), M, M, BLOCK_M, BLOCK_N, GROUP)
    if col + BLOCK_N <= row:
        return

    # 2. The accumulators.
    acc = tile_product(
        x, xt, row, col, M, M, K, stride_xm, stride_xk, stride_tk, stride_tn,
        PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip

    # 3. The polynomial and both stores, a quarter of the columns at a time.
    STEP: tl.constexpr = BLOCK_N // 4
    left, right = split_columns(acc)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    _mirrored_store(first, add_ptr, out_ptr, row, col, M, ALPHA, BETA)
    _mirrored_store(second, add_ptr, out_ptr, row, col + STEP, M, ALPHA, BETA)
    _mirrored_store(third, add_ptr, out_ptr, row, col + 2 * STEP, M, ALPHA, BETA)
    _mirrored_store(fourth, add_ptr, out_ptr, row, col + 3 * STEP, M, ALPHA, BETA)


def _symmetric_triton(
    x: torch.Tensor, add: torch.Tensor | None, alpha: float, beta: float
) -> torch.Tensor:
    out = x.new_empty(len(x), len(x))
    if not is_aligned(x):  # zeros add nothing, and loading single elements would spill
        x = F.pad(x, (0, -x.shape[1] % 16)).contiguous()
    M, K = x.shape
    if M == 0:
        return out
    tile = find_tile(x, x.t(), "symmetric")
    rows, columns, strides = operands(x, x.t(), tile)
    with torch.cuda.device_of(x):
        _symmetric_kernel[(tile_count(tile, M, M),)](
            rows, columns, add, out, M, K, *strides, alpha, beta, find_precision(None),
            K % tile.k == 0, tile.m, tile.n, tile.k, tile.group, **gemm_options(tile, x),
        )  # fmt: skip
    return out


@no_graph
def symmetric_product(
    x: torch.Tensor,
    add: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    impl: str | None = None,
) -> torch.Tensor:
    """alpha x[m, k] x^T + beta add[m, m] as [m, m] in the dtype of x; `add` must be symmetric.

    Sums are fp32 (fp64 for fp64), rounded once. The Triton kernel computes one triangle, reads only
    the upper triangle of `add`, and returns a bitwise symmetric result.

    Raises:
        ValueError: x is not a matrix of floats; `add` is not [m, m], contiguous, and of the dtype
            of x; a gradient is required; or `impl` cannot run.
    """
    impl = choose(impl, x, add)
    if x.ndim != 2 or x.dtype not in FLOATS:
        raise ValueError(f"expected a matrix of floats, got {x.dtype} {[*x.shape]}")
    square = (len(x), len(x))
    if add is not None and (add.shape != square or add.dtype != x.dtype or not add.is_contiguous()):
        raise ValueError(
            f"`add` must be contiguous {x.dtype} {[*square]}, got {add.dtype} {[*add.shape]} with "
            f"strides {add.stride()}"
        )
    with no_autocast(x):
        if impl == "triton":
            return _symmetric_triton(x, add, alpha, beta)
        if add is None:
            return (x @ x.t()).mul_(alpha)
        return torch.addmm(add, x, x.t(), beta=beta, alpha=alpha)


# ---------------------------------------------------------------- Newton-Schulz


@no_graph
def orthogonalize(g: torch.Tensor, *, steps: int = 5, impl: str | None = None) -> torch.Tensor:
    """Approximately U V^T of g[m, n] = U S V^T, by Muon's Newton-Schulz steps in the dtype of g.

    Muon is usually run in bf16. The norm is always fp32 (fp64 for fp64). A matrix of zeros stays
    zero.

    Raises:
        ValueError: g is not a matrix of floats, steps < 1, a gradient is required, or `impl` cannot
            run.
    """
    impl = choose(impl, g)
    if g.ndim != 2 or g.dtype not in FLOATS:
        raise ValueError(f"muon expects a matrix of floats, got {g.dtype} {[*g.shape]}")
    if steps < 1:
        raise ValueError(f"Newton-Schulz needs steps >= 1, got {steps}")
    a, b, c = COEFFICIENTS
    stands = g.shape[0] > g.shape[1]
    x = g.t() if stands else g
    wide = torch.float64 if g.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(x, dtype=wide)
    x = (x / (norm + _EPS)).to(g.dtype)
    with no_autocast(g):
        for _ in range(steps):
            gram = symmetric_product(x, impl=impl)
            poly = symmetric_product(gram, gram, alpha=c, beta=b, impl=impl)
            x = torch.addmm(x, poly, x, beta=a)
    return x.t() if stands else x
