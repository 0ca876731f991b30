"""The tile, the grid and the main loop of every kernel that multiplies matrices.

`gemm` and `mlp` call `tile_product` and then their epilogues. `qkv` and the kernels fused with
communication call `mainloop`, which accepts only pointers. Programs are persistent: `residents`
programs per multiprocessor loop over the tiles, in groups of GROUP rows of tiles, column after
column, so that concurrent programs share operands in L2 (Kerr et al. 2017, CUTLASS).

Next to a collective, such a kernel would keep NCCL's kernel off the multiprocessors until it ends.
If NCCL's came first, the programs that found no room would run after all others (NVIDIA/nccl#689).
Under `leaving`, a product leaves some multiprocessors free, and its programs take tiles from a
counter instead of every n-th tile, so that a late program finds little or nothing to do. In both
cases one program sums each tile in one order, so the results are bitwise the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from warpweave.kernels.runtime.dispatch import all_registers, capability, processors, tl, triton
from warpweave.kernels.runtime.dtypes import dot
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import find


def find_tile(a: torch.Tensor, b: torch.Tensor, kind: str) -> GemmTile:
    """The tile for the product of a[M, K] and b[K, N].

    Kinds: "large"; "heavy", for epilogues that spill at a large product's tile or serialize wgmma
    (adding, dropout with a residual, and the gradient of an activation that does not return its
    value); "symmetric", for a matrix times its own transpose. Each becomes "small" if there is less
    than one tile per multiprocessor, or if operands are not loaded 16 bytes at a time.
    """
    if has_few_tiles(a, b, kind) or not (is_aligned(a) and is_aligned(b)):
        kind = "small"
    return find("gemm", a.device, a.element_size(), kind)


def has_few_tiles(a: torch.Tensor, b: torch.Tensor, kind: str) -> bool:
    """Return True if a[M, K] b[K, N] has less than one tile of this kind per multiprocessor."""
    tile = find("gemm", a.device, a.element_size(), kind)
    return tile_count(tile, a.shape[0], b.shape[1]) < processors(a.device)


def shared_tile(a: torch.Tensor, rows: int, b: torch.Tensor, kind: str = "large") -> GemmTile:
    """The tile for the product of [rows, K], of a's dtype, with b[K, N]: the same on every rank.

    Ranks must agree on it, because parts are tiles. So it depends only on sizes, while `find_tile`
    also considers the alignment of this rank's operands. For large products it is that of `kind`:
    "large", "heavy", or "wide" for a result in a wider dtype than the operands.
    """
    tile = find("gemm", a.device, a.element_size(), kind)
    odd = a.shape[1] % 16 or b.shape[1] % 16  # 16-byte loads are impossible
    if odd or tile_count(tile, rows, b.shape[1]) < processors(a.device):
        tile = find("gemm", a.device, a.element_size(), "small")
    return tile


def is_aligned(x: torch.Tensor) -> bool:
    """Return True if x can be loaded 16 bytes at a time.

    Its rows, or its columns, must be contiguous, not overlap, and be aligned (Triton requires
    addresses that are multiples of 16 bytes, and strides of 16 elements). A descriptor, see
    `operands`, requires the same, and between 1 and 2^31 - 1 rows and columns.
    """
    (m, n), (s, t) = x.shape, x.stride()
    rows, columns = t == 1 and s % 16 == 0 and s >= n, s == 1 and t % 16 == 0 and t >= m
    return (rows or columns) and x.data_ptr() % 16 == 0 and 0 < min(m, n) <= max(m, n) < 2**31


def operands(
    a: torch.Tensor, b: torch.Tensor, tile: GemmTile
) -> tuple[Any, Any, tuple[int | None, ...]]:
    """(a, b, strides) in the form that a kernel passes to `tile_product`.

    From Hopper on, 16-bit a and b with aligned rows or columns become tensor descriptors: the copy
    engine (TMA) loads their tiles, and no thread computes addresses. A descriptor is of the matrix
    or of its transpose, whichever has contiguous rows; the stride of these is None. Two descriptors
    cost the host 7 us per launch, which is not worth it for small products (tiles of fewer than 128
    rows).
    """
    if a.element_size() != 2 or tile.m < 128 or capability(a.device) < 90:
        return a, b, (*a.stride(), *b.stride())
    if not (is_aligned(a) and is_aligned(b)):
        return a, b, (*a.stride(), *b.stride())
    a, a_strides = _descriptor(a, tile.m, tile.k)
    b, b_strides = _descriptor(b, tile.k, tile.n)
    return a, b, (*a_strides, *b_strides)


def _descriptor(x: torch.Tensor, rows: int, columns: int) -> tuple[Any, tuple[int | None, ...]]:
    from triton.tools.tensor_descriptor import TensorDescriptor  # here, as Triton may be missing

    if x.stride(1) == 1:
        return TensorDescriptor.from_tensor(x, [rows, columns]), (None, 1)
    return TensorDescriptor.from_tensor(x.t(), [columns, rows]), (1, None)


def tile_count(tile: GemmTile, M: int, N: int) -> int:
    """The number of tiles that cover [M, N]."""
    return -(-M // tile.m) * -(-N // tile.n)


_spare: ContextVar[int] = ContextVar("warpweave_spare", default=0)


@contextmanager
def leaving(count: int) -> Iterator[None]:
    """A context whose products leave `count` multiprocessors to running collectives; 0 leaves none.

    It applies to the calling thread, so not to autograd's threads.
    """
    token = _spare.set(count)
    try:
        yield
    finally:
        _spare.reset(token)


def grid(tile: GemmTile, M: int, N: int, device: torch.device) -> tuple[int]:
    """The number of programs: as many as run at once on all multiprocessors that `leaving` does not
    reserve, at most one per tile."""
    here = max(1, processors(device) - _spare.get())
    return (min(tile_count(tile, M, N), tile.residents * here),)


def tile_counter(device: torch.device) -> torch.Tensor | None:
    """The `counter_ptr` of `next_tile` for one launch: int32[1] of 0 under `leaving`, else None.

    Each launch has a separate counter, which costs filling one number: if a counter outlived its
    launch, streams and replays of captured graphs would share it.
    """
    return torch.zeros(1, dtype=torch.int32, device=device) if _spare.get() else None


def gemm_options(tile: GemmTile, a: torch.Tensor) -> dict[str, int]:
    """Triton's options for a launch with `tile`; ptxas' own register limit spills in float32 and on
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
def next_tile(index, counter_ptr):
    """The tile that a program computes after tile `index`; its first is its program number.

    If this is called before the product of tile `index`, it costs a register, and the product hides
    the atomic's latency.
    """
    if counter_ptr is None:
        return index + tl.num_programs(0)
    else:
        return tl.num_programs(0) + tl.atomic_add(counter_ptr, 1, sem="relaxed")


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
    """The accumulators of a b at rows m[BLOCK_M] and columns n[BLOCK_N] (int64).

    They are 0 from row M and column N on.
    """
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
def tile_product(
    a,
    b,
    row,
    col,
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
    """The accumulators of the tile of a b at `row` and `col`; a and b come from `operands`."""
    if stride_am is None or stride_ak is None:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        i, j = row.to(tl.int32), col.to(tl.int32)
        for k in range(0, K, BLOCK_K):  # a descriptor reads 0 past the ends
            x = a.load([i, k]) if stride_am is None else tl.trans(a.load([k, i]))
            y = b.load([k, j]) if stride_bk is None else tl.trans(b.load([j, k]))
            acc = dot(x, y, acc)
    else:
        m, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        acc = mainloop(
            a, b, m, n, M, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc


@triton.jit
def split_columns(x):
    """The left and the right half of a tile's columns."""
    return tl.split(x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1))
