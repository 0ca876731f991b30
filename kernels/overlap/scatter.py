"""GEMM -> reduce-scatter and GEMM -> all-reduce, which send each tile as soon as it is computed.

Sources are those of `gather`.

    y[S, N] = epilogue(sum over ranks r of (a_r b_r)[own S rows])        a_r[W S, K], b_r[K, N]

    rank 0 of 4, time from left to right; rank i owns rows i
    launch 1   tiles of rows 1   of rows 2   of rows 3   of rows 0
               each stored on    rank 1      rank 2      rank 3      rank 0
    launch 2   rows 0: wait for the tile of each rank, add the four in rank order, epilogue

`_partials_kernel` computes the rows of the next rank first and its own last, so that the rest of
the product hides remote stores. `_sum_kernel` waits for a tile of every rank and adds them in rank
order in float32, without atomics. So the sum is bitwise the same on every run and, in an
all-reduce, on every rank. Bias, dropout and residual follow the sum once.

A reduce-scatter stores a tile in the memory of the rank that owns its rows. A one-shot all-reduce
stores it in this rank's own memory, from which all ranks read. A rank's remote elements, in
float32, are (W - 1) S N sent, or (W - 1) M N read. A two-shot all-reduce, which is a reduce-scatter
and an all-gather of its result, sends (W - 1) S N, reads as many in the dtype of y, and waits once
more.

It cannot deadlock: `_partials_kernel` waits for nothing, and `_sum_kernel` waits only for
`_partials_kernel`s.

Limits: not differentiable; the rows of a reduce-scatter must be divisible by W.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from warpweave.kernels.gemm.epilogue import Epilogue, epilogue, find_precision
from warpweave.kernels.gemm.mainloop import gemm_options, grid, mainloop, shared_tile, tile_origin
from warpweave.kernels.overlap.gather import waiting_programs
from warpweave.kernels.overlap.signals import (
    await_part,
    data_of,
    flag_of,
    publish,
    publish_to_all,
    signature_of,
    this_epoch,
)
from warpweave.kernels.overlap.symmetric import Memory, Signature
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import RUNTIME, tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype


@triton.jit(do_not_specialize=RUNTIME)
def _partials_kernel(
    a_ptr,
    b_ptr,
    like_ptr,
    addresses_ptr,
    epoch_ptr,
    rank,
    slots,
    data,
    capacity,
    S,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    world,
    signature,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    PEERS: tl.constexpr,
    SIGNED: tl.constexpr,
    OWNERS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Compute and publish partial products.

    OWNERS ranks own S rows each; in an all-reduce, OWNERS = 1.
    """
    epoch = this_epoch(epoch_ptr)
    columns = tl.cdiv(N, BLOCK_N)
    each = tl.cdiv(S, BLOCK_M) * columns
    for index in range(tl.program_id(0), OWNERS * each, tl.num_programs(0)):
        # 1. A tile: rows of the next rank first, this rank's rows last.
        owner = (rank + 1 + index // each) % OWNERS
        row, col = tile_origin(index % each, S, N, BLOCK_M, BLOCK_N, GROUP)
        s, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        first = tl.cast(owner, tl.int64) * S
        y = mainloop(
            a_ptr, b_ptr, first + s, n, first + S, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip

        # 2. Store it where it will be added, and publish.
        slot = (row // BLOCK_M) * columns + col // BLOCK_N
        live = (s < S)[:, None] & (n < N)[None, :]
        at = s[:, None] * N + n[None, :]
        y = to_dtype(y, like_ptr.dtype.element_ty)
        if OWNERS > 1:
            there = data_of(addresses_ptr, owner, epoch, data, capacity, like_ptr)
            tl.store(there + tl.cast(rank, tl.int64) * S * N + at, y, live)
            if SIGNED:
                word = signature_of(addresses_ptr, owner, rank, epoch, slot, slots, world)
                tl.store(word, signature)
            publish(flag_of(addresses_ptr, owner, rank, slot, slots), epoch, "sys")
        else:
            tl.store(data_of(addresses_ptr, rank, epoch, data, capacity, like_ptr) + at, y, live)
            publish_to_all(addresses_ptr, rank, slot, slots, epoch, world, signature, PEERS, SIGNED)


@triton.jit(do_not_specialize=RUNTIME)
def _sum_kernel(
    like_ptr,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    addresses_ptr,
    epoch_ptr,
    error_ptr,
    rank,
    slots,
    data,
    capacity,
    signature,
    seed,
    site,
    S,
    N,
    stride_rm,
    stride_rn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    WORLD: tl.constexpr,
    OWNERS: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add quarters of tiles over all ranks, in rank order, and apply the epilogue."""
    epoch = this_epoch(epoch_ptr)
    COLS: tl.constexpr = BLOCK_N // 4
    columns = tl.cdiv(N, BLOCK_N)
    wide: tl.constexpr = tl.float64 if like_ptr.dtype.element_ty == tl.float64 else tl.float32
    for index in range(tl.program_id(0), 4 * tl.cdiv(S, BLOCK_M) * columns, tl.num_programs(0)):
        slot = index // 4
        row = tl.cast(slot // columns, tl.int64) * BLOCK_M
        col = tl.cast(slot % columns * 4 + index % 4, tl.int64) * COLS
        s, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, COLS)
        live = (s < S)[:, None] & (n < N)[None, :]
        y = tl.zeros((BLOCK_M, COLS), wide)
        for source in range(WORLD):
            await_part(
                addresses_ptr, epoch, error_ptr, rank, slots, signature, source, slot, WORLD, POLLS
            )
            if OWNERS > 1:
                there = data_of(addresses_ptr, rank, epoch, data, capacity, like_ptr)
                there += tl.cast(source, tl.int64) * S * N
            else:
                there = data_of(addresses_ptr, source, epoch, data, capacity, like_ptr)
            y += tl.load(there + s[:, None] * N + n[None, :], live, 0.0).to(wide)
        epilogue(
            y, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, s, col,
            S, N, stride_rm, stride_rn, N, 1,
            like_ptr.dtype.element_ty, ACT, GATED, THRESHOLD, SCALE, False,
        )  # fmt: skip


def scatter_steps(
    a: torch.Tensor,
    b: torch.Tensor,
    memory: Memory,
    after: Epilogue,
    *,
    owners: int,
    name: str,
) -> Generator[None, None, torch.Tensor]:
    """Reduce-scatter (owners = W) or one-shot all-reduce (owners = 1); yields after each launch."""
    (M, K), N, world = a.shape, b.shape[1], memory.world
    S = M // owners
    y, _ = after.outputs(a, S, N)
    if y.numel() == 0:
        return y
    wire = compute_dtype(a)
    tile = shared_tile(a, M, b, "wide" if wire.itemsize > a.element_size() else "large")
    rows, columns = -(-S // tile.m), -(-N // tile.n)
    like = a.new_empty(0, dtype=wire)
    size = (world if owners > 1 else 1) * S * N * wire.itemsize
    memory = memory.fitting(name, a.device, rows * columns, size)
    where = (memory.rank, memory.slots, memory.data_offset, memory.capacity)
    signature = Signature(name, M, N, a.dtype, (tile.m, tile.n)).word()
    with torch.cuda.device_of(a):
        _partials_kernel[grid(tile, M, N, a.device)](
            a, b, like, memory.addresses, memory.epoch, *where, S, N, K, *a.stride(), *b.stride(),
            world, signature, find_precision(after.precision), K % tile.k == 0,
            triton.next_power_of_2(world), memory.polls > 0, owners,
            tile.m, tile.n, tile.k, tile.group, **gemm_options(tile, a),
        )  # fmt: skip
    yield
    given = after.arguments(None)
    with torch.cuda.device_of(a):
        _sum_kernel[(waiting_programs(4 * rows * columns, a.device),)](
            like, *given.tensors, y, memory.addresses, memory.epoch, memory.error,
            *where, signature, *given.key, S, N, *given.strides,
            *given.constants, world, owners, memory.polls, tile.m, tile.n,
            num_warps=tile.warps, num_stages=1,
        )  # fmt: skip
    memory.advance()
    yield
    return y
