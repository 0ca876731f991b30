"""The kernel of a product and all that follows it up to the next one; see `fused` for what that is.

Programs are persistent (see `mainloop`).
"""

from __future__ import annotations

import torch

from warpweave.kernels.activation import find_activation, pointwise
from warpweave.kernels.dropout import Drop, keep_mask, launch_arguments
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    grid,
    operands,
    split_columns,
    tile_origin,
    tile_product,
)
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype, upcast


@triton.jit
def epilogue(
    y,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    seed,
    site,
    m,
    col,
    M,
    N,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    DTYPE: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
):
    """All that follows the product, of accumulators at rows m and columns from `col`."""
    COLS: tl.constexpr = y.shape[1] // 2 if GATED else y.shape[1]
    n = col + tl.arange(0, y.shape[1])
    live = (m < M)[:, None] & (n < N)[None, :]

    # 1. Bias.
    if bias_ptr is not None:
        y += tl.load(bias_ptr + n, n < N, 0.0).to(y.dtype)[None, :]

    # 2. Activation, of what backward will see.
    if ACT is not None:
        z = to_dtype(y, DTYPE)
        if z_ptr is not None:
            tl.store(z_ptr + m[:, None] * N + n[None, :], z, live)
        y = upcast(z)
        if GATED:
            gate, up = tl.split(y.reshape(y.shape[0], COLS, 2))
            y = pointwise(gate, ACT) * up
            col = col // 2
            n = col + tl.arange(0, COLS)
            live = (m < M)[:, None] & (n < N // 2)[None, :]
        else:
            y = pointwise(y, ACT)

    # 3. Dropout.
    if tokens_ptr is not None:
        token = tl.load(tokens_ptr + m, m < M, 0)[:, None]
        group = col // 4 + tl.arange(0, COLS // 4)[None, :]
        keep = keep_mask(seed, site, token, group, THRESHOLD, y.shape[0], COLS // 4)
        y = tl.where(keep, y * SCALE, 0.0)

    # 4. Residual.
    if residual_ptr is not None:
        at = residual_ptr + m[:, None] * stride_rm + n[None, :] * stride_rn
        y += tl.load(at, live, 0.0).to(y.dtype)

    # 5. Store, or add.
    y_ptrs = y_ptr + m[:, None] * stride_ym + n[None, :] * stride_yn
    if ADD:
        y += tl.load(y_ptrs, live, 0.0).to(y.dtype)
    tl.store(y_ptrs, to_dtype(y, y_ptr.dtype.element_ty), live)


@triton.jit
def finish_tile(
    y,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    seed,
    site,
    m,
    col,
    M,
    N,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    DTYPE: tl.constexpr,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
):
    """`epilogue` of a tile, a quarter of the columns at a time: with what it reads, a whole tile is
    more than the registers."""
    left, right = split_columns(y)
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    STEP: tl.constexpr = y.shape[1] // 4
    epilogue(
        first, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip
    epilogue(
        second, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + STEP,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip
    epilogue(
        third, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 2 * STEP,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip
    epilogue(
        fourth, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 3 * STEP,
        M, N, stride_rm, stride_rn, stride_ym, stride_yn, DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "site"])
def _gemm_kernel(
    a,
    b,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    seed,
    site,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_rm,
    stride_rn,
    stride_ym,
    stride_yn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    DESCRIBED: tl.constexpr = stride_am is None or stride_ak is None
    DTYPE: tl.constexpr = a.dtype if DESCRIBED else a.dtype.element_ty
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        # 1. The accumulators of a tile.
        row, col = tile_origin(index, M, N, BLOCK_M, BLOCK_N, GROUP)
        y = tile_product(
            a, b, row, col, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip

        # 2. All that follows.
        finish_tile(
            y, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site,
            row + tl.arange(0, BLOCK_M), col, M, N, stride_rm, stride_rn, stride_ym, stride_yn,
            DTYPE, ACT, GATED, THRESHOLD, SCALE, ADD,
        )  # fmt: skip


def launch_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    activation: str | None = None,
    z: torch.Tensor | None = None,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    add: bool = False,
    precision: str | None = None,
) -> None:
    """Fill y, or add to it, and fill z; nothing is checked."""
    (M, K), N = a.shape, b.shape[1]
    if y.numel() == 0:
        return
    name, gated = (None, False) if activation is None else find_activation(activation)
    heavy = add or (drop is not None and residual is not None)
    tile = find_tile(a, b, "heavy" if heavy else "large")
    tokens, seed, site, constants = launch_arguments(drop)
    a_tiles, b_tiles, strides = operands(a, b, tile)
    with torch.cuda.device_of(a):
        _gemm_kernel[grid(tile, M, N, a.device)](
            a_tiles,
            b_tiles,
            None if bias is None else bias.contiguous(),
            z,
            tokens,
            residual,
            y,
            seed,
            site,
            M,
            N,
            K,
            *strides,
            *((0, 0) if residual is None else residual.stride()),
            *y.stride(),
            name,
            gated,
            *constants,
            add,
            find_precision(precision),
            K % tile.k == 0,
            tile.m,
            tile.n,
            tile.k,
            tile.group,
            **gemm_options(tile, a),
        )


def find_precision(precision: str | None) -> str:
    """How Triton multiplies float32: as asked, or by None as torch's own products do."""
    if precision is None:
        return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    if precision not in ("ieee", "tf32", "tf32x3"):
        raise ValueError(f'precision must be None, "ieee", "tf32" or "tf32x3", got {precision!r}')
    return precision
