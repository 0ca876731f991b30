"""What every kernel that multiplies matrices shares: its tile, its grid, and its main loop.

`gemm`, `mlp` and `qkv` put their own epilogues behind `mainloop`. Their programs are persistent: a
tile's `residents` per multiprocessor walk over the tiles, column groups of GROUP rows first, so
that the programs of one moment share operands in L2 (Kerr et al. 2017, CUTLASS).
"""

from __future__ import annotations

import torch

from warpweave.kernels.runtime.dispatch import all_registers, capability, processors, tl, triton
from warpweave.kernels.runtime.numeric import dot
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import find


def find_tile(a: torch.Tensor, b: torch.Tensor, kind: str) -> GemmTile:
    """The tile for the product of a[M, K] and b[K, N].

    Kinds: "large"; "heavy", for the epilogues that spill at a large product's tile or make wgmma
    wait for one another: adding, dropout with a residual, and the gradient of an activation that
    does not return its value. Either becomes "small" with less than one tile per multiprocessor,
    and with operands that are not loaded 16 bytes at a time.
    """
    tile = find("gemm", a.device, a.element_size(), kind)
    few = tile_count(tile, a.shape[0], b.shape[1]) < processors(a.device)
    if few or not (_is_aligned(a) and _is_aligned(b)):
        tile = find("gemm", a.device, a.element_size(), "small")
    return tile


def _is_aligned(x: torch.Tensor) -> bool:
    """Rows, or columns, are contiguous, and all start where 16 bytes can be loaded at a time (what
    Triton asks for: addresses that are multiples of 16 bytes, strides of 16 elements)."""
    strides = x.stride()
    whole = any(s == 1 and t % 16 == 0 for s, t in (strides, strides[::-1]))
    return whole and x.data_ptr() % 16 == 0


def tile_count(tile: GemmTile, M: int, N: int) -> int:
    """How many tiles cover [M, N]."""
    return -(-M // tile.m) * -(-N // tile.n)


def grid(tile: GemmTile, M: int, N: int, device: torch.device) -> tuple[int]:
    """As many programs as run at once, or as there are tiles."""
    return (min(tile_count(tile, M, N), tile.residents * processors(device)),)


def gemm_options(tile: GemmTile, a: torch.Tensor) -> dict[str, int]:
    """Triton's options for a launch with `tile`; ptxas' own limit spills in float32 and on
    Blackwell."""
    options = {"num_warps": tile.warps}
    if a.element_size() == 4 or capability(a.device) >= 100:
        options = all_registers(tile.warps)
    return {**options, "num_stages": tile.stages}


# ---------------------------------------------------------------- device helpers


@triton.jit
def tile_origin(index, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """First row and column (int64) of tile `index`: GROUP rows of tiles, column after column."""
    rows, cols = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    first = index // (GROUP * cols) * GROUP
    height = tl.minimum(rows - first, GROUP)
    inside = index % (GROUP * cols)
    i, j = first + inside % height, inside // height
    return i.to(tl.int64) * BLOCK_M, j.to(tl.int64) * BLOCK_N


@triton.jit
def mainloop(
    a_ptr,
    b_ptr,
    m,
    n,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The accumulators of a b at rows m[BLOCK_M] and columns n[BLOCK_N] (int64), which are 0 from
    row M and column N on."""
    wide: tl.constexpr = tl.float64 if a_ptr.dtype.element_ty == tl.float64 else tl.float32
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b_ptrs = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn
    step = tl.full((), BLOCK_K, tl.int64)
    a_live, b_live = (m < M)[:, None], (n < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), wide)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a, b = tl.load(a_ptrs, a_live, 0.0), tl.load(b_ptrs, b_live, 0.0)
        else:
            left = k < K - start
            a = tl.load(a_ptrs, a_live & left[None, :], 0.0)
            b = tl.load(b_ptrs, b_live & left[:, None], 0.0)
        acc = dot(a, b, acc, PRECISION)
        a_ptrs += step * stride_ak
        b_ptrs += step * stride_bk
    return acc


@triton.jit
def split_columns(x):
    """The left and the right half of a tile's columns."""
    return tl.split(x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1))
