"""GEMM -> reduce-scatter, and GEMM -> all-reduce: tiles leave as soon as they are multiplied.

    y[S, N] = epilogue(sum over ranks r of (a_r b_r)[own S rows])        a_r[W S, K], b_r[K, N]

Two launches. `_partials_kernel` multiplies tile after tile and stores each where it will be added,
rows of the next rank first, its own last, so that peers' rows travel while it multiplies on.
`_sum_kernel` awaits a tile from every rank and adds them in the order of the ranks, in float32:
nothing is added by atomics, so the sum is the same bits on every run, and for an all-reduce on
every rank. Bias, dropout and residual follow the sum, once.

A reduce-scatter stores a tile into the memory of the rank that owns its rows, an all-reduce in one
shot into this rank's own, for all peers to read. Remote elements of a rank, in float32:
(W - 1) S N sent, or (W - 1) M N read. In two shots, a reduce-scatter and an all-gather of its
result, it is (W - 1) S N sent and as many read, in the dtype of y, and one wait more.

Nobody can wait for ever: `_partials_kernel` waits for nobody, `_sum_kernel` only for what that
publishes.

Sources: as `gather`. Limits: not differentiable; W divides the rows that are scattered.
"""

from __future__ import annotations

from collections.abc import Generator

import torch

from warpweave.kernels.gemm.epilogue import Epilogue, epilogue, find_precision
from warpweave.kernels.gemm.mainloop import gemm_options, grid, mainloop, shared_tile, tile_origin
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
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype


@triton.jit(do_not_specialize=["rank", "signature"])
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
    """Multiply and hand out; rows belong to OWNERS ranks, S to each (1: all rows to everyone)."""
    epoch = this_epoch(epoch_ptr)
    columns = tl.cdiv(N, BLOCK_N)
    each = tl.cdiv(S, BLOCK_M) * columns
    for index in range(tl.program_id(0), OWNERS * each, tl.num_programs(0)):
        # 1. A tile: the next rank's rows first, own last.
        owner = (rank + 1 + index // each) % OWNERS
        row, col = tile_origin(index % each, S, N, BLOCK_M, BLOCK_N, GROUP)
        s, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        first = tl.cast(owner, tl.int64) * S
        y = mainloop(
            a_ptr, b_ptr, first + s, n, first + S, N, K, stride_am, stride_ak, stride_bk, stride_bn,
            PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip

        # 2. To where it is added.
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


@triton.jit(do_not_specialize=["rank", "signature", "seed", "site"])
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
    """Add a quarter of a tile from every rank, in their order, and finish it."""
    epoch = this_epoch(epoch_ptr)
    COLS: tl.constexpr = BLOCK_N // 4
    slot = tl.program_id(0) // 4
    columns = tl.cdiv(N, BLOCK_N)
    row = tl.cast(slot // columns, tl.int64) * BLOCK_M
    col = tl.cast(slot % columns * 4 + tl.program_id(0) % 4, tl.int64) * COLS
    s, n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, COLS)
    live = (s < S)[:, None] & (n < N)[None, :]
    wide: tl.constexpr = tl.float64 if like_ptr.dtype.element_ty == tl.float64 else tl.float32
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
    """y of this rank's rows (owners = W) or of all (owners = 1), with a yield after each launch."""
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
        _sum_kernel[(4 * rows * columns,)](
            like, *given.tensors, y, memory.addresses, memory.epoch, memory.error,
            *where, signature, *given.key, S, N, *given.strides,
            *given.constants, world, owners, memory.polls, tile.m, tile.n,
            num_warps=tile.warps, num_stages=1,
        )  # fmt: skip
    memory.advance()
    yield
    return y
