"""All-gather -> GEMM: the product starts with this rank's rows while the others' are copied.

Sources: FLUX, Chang et al. 2024, arXiv:2406.06858; Triton-distributed, Zheng et al. 2025,
arXiv:2504.19442.

    whole[W S, K] = all-gather(x[S, K])        y[W S, N] = epilogue(whole @ b[K, N])

    rank 0 of 4, time from left to right
    launch 1   publish x0
    launch 2   copiers      copy x1    copy x2    copy x3
               other        tiles of   tiles of   tiles of   tiles of
               programs     x0 @ b     x1 @ b     x2 @ b     x3 @ b

`_publish_kernel` copies this rank's shard to symmetric memory (and to `whole`) and sets a flag per
BLOCK_M rows. In `_gather_gemm_kernel`, the first programs of the grid are the copiers. They copy
other ranks' rows into `whole`, each block as soon as its flag is set. The other programs compute
the tiles of y in the order in which rows become available: first those of this rank, which wait for
nothing, then those of rank + 1, + 2, ... A tile lies within one shard, for any length of the shard.

It cannot deadlock: the publishing launch waits for nothing, copiers wait only for peers' publishing
launches, and tiles wait only for copiers, which start before them. This also holds if one program
runs at a time, as in the interpreter.

`whole` is returned, because the gradient of b is a product with it. A rank reads (W - 1) S K remote
elements. The epilogue is that of `gemm.fused_gemm`. The sums are only over K, so y is bitwise equal
to the product of the gathered rows with the same tile.

Limits: not differentiable; equally large shards.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NamedTuple

import torch

from warpweave.kernels.devices import CTAS
from warpweave.kernels.gemm.epilogue import Epilogue, find_precision, finish_tile
from warpweave.kernels.gemm.mainloop import (
    gemm_options,
    mainloop,
    shared_tile,
    tile_count,
    tile_origin,
)
from warpweave.kernels.overlap.signals import (
    await_,
    await_part,
    data_of,
    flag_of,
    publish,
    publish_to_all,
    this_epoch,
)
from warpweave.kernels.overlap.symmetric import Memory, Signature
from warpweave.kernels.runtime.dispatch import RUNTIME, processors, tl, triton
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import find

COPIERS = 16  # programs that copy: enough to saturate NVLink with an eighth of the SMs (predicted)


@triton.jit(do_not_specialize=RUNTIME)
def _publish_kernel(
    x_ptr,
    whole_ptr,
    addresses_ptr,
    epoch_ptr,
    rank,
    slots,
    data,
    capacity,
    S,
    K,
    stride_xs,
    stride_xk,
    world,
    signature,
    PEERS: tl.constexpr,
    SIGNED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy BLOCK_S rows of this rank's shard to symmetric memory and set their flag."""
    epoch, part = this_epoch(epoch_ptr), tl.program_id(0)
    own = data_of(addresses_ptr, rank, epoch, data, capacity, x_ptr)
    s = tl.cast(part, tl.int64) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None]
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)[None, :]
        live = (s < S) & (k < K)
        x = tl.load(x_ptr + s * stride_xs + k.to(tl.int64) * stride_xk, live, 0.0)
        tl.store(own + s * K + k, x, live)
        tl.store(whole_ptr + (tl.cast(rank, tl.int64) * S + s) * K + k, x, live)
    publish_to_all(addresses_ptr, rank, part, slots, epoch, world, signature, PEERS, SIGNED)


# ---------------------------------------------------------------- within the kernels


@triton.jit
def copy_parts(
    copier,
    whole_ptr,
    addresses_ptr,
    epoch,
    error_ptr,
    rank,
    slots,
    data,
    capacity,
    signature,
    S,
    K,
    WORLD: tl.constexpr,
    COPYING: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy the other ranks' shards, as the copiers, which are the first COPYING programs.

    The shard of rank + 1 is first. Each BLOCK_M rows are copied as soon as they are published.
    """
    parts = tl.cdiv(S, BLOCK_M)
    for index in range(copier, (WORLD - 1) * parts, COPYING if COPYING > 0 else 1):
        source, part = (rank + 1 + index // parts) % WORLD, index % parts
        await_part(
            addresses_ptr, epoch, error_ptr, rank, slots, signature, source, part, WORLD, POLLS
        )
        there = data_of(addresses_ptr, source, epoch, data, capacity, whole_ptr)
        s = tl.cast(part, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
        for start in range(0, K, BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)[None, :]
            live = (s < S) & (k < K)
            x = tl.load(there + s * K + k, live, 0.0)
            tl.store(whole_ptr + (tl.cast(source, tl.int64) * S + s) * K + k, x, live)
        publish(flag_of(addresses_ptr, rank, WORLD + source, part, slots), epoch, "gpu")


@triton.jit
def await_tile(
    index,
    addresses_ptr,
    epoch,
    error_ptr,
    rank,
    slots,
    S,
    N,
    WORLD: tl.constexpr,
    COPYING: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Wait for the rows of tile `index` of y and return (first, row, col).

    The tile starts at `row` in the shard that starts at row `first` of all rows. Tiles are in the
    order of shards, this rank's first.
    """
    each = tl.cdiv(S, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    source = (rank + index // each) % WORLD
    row, col = tile_origin(index % each, S, N, BLOCK_M, BLOCK_N, GROUP)
    if source != rank:
        part = row // BLOCK_M
        await_(  # longer than the copier's wait, so that the copier reports the operation
            flag_of(addresses_ptr, rank, WORLD + source, part, slots), epoch,
            error_ptr, source, part, 0, 2 * POLLS, "gpu",
        )  # fmt: skip
    return tl.cast(source, tl.int64) * S, row, col


@triton.jit
def tile_count_of(S, N, WORLD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The number of tiles of y, over all shards."""
    return WORLD * tl.cdiv(S, BLOCK_M) * tl.cdiv(N, BLOCK_N)


@triton.jit(do_not_specialize=RUNTIME)
def _gather_gemm_kernel(
    whole_ptr,
    b_ptr,
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
    K,
    stride_bk,
    stride_bn,
    stride_rm,
    stride_rn,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_K: tl.constexpr,
    WORLD: tl.constexpr,
    COPYING: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    epoch, pid = this_epoch(epoch_ptr), tl.program_id(0)
    if pid < COPYING:
        copy_parts(
            pid, whole_ptr, addresses_ptr, epoch, error_ptr, rank, slots, data, capacity,
            signature, S, K, WORLD, COPYING, POLLS, BLOCK_M, BLOCK_K,
        )  # fmt: skip
    else:
        tiles = tile_count_of(S, N, WORLD, BLOCK_M, BLOCK_N)
        for index in range(pid - COPYING, tiles, tl.num_programs(0) - COPYING):
            first, row, col = await_tile(
                index, addresses_ptr, epoch, error_ptr, rank, slots, S, N,
                WORLD, COPYING, POLLS, BLOCK_M, BLOCK_N, GROUP,
            )  # fmt: skip
            m, n = first + row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
            y = mainloop(
                whole_ptr, b_ptr, m, n, first + S, N, K, K, 1, stride_bk, stride_bn,
                PRECISION, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            finish_tile(
                y, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col,
                first + S, N, stride_rm, stride_rn, N // 2 if GATED else N, 1,
                whole_ptr.dtype.element_ty, ACT, GATED, THRESHOLD, SCALE, False,
            )  # fmt: skip


@triton.jit(do_not_specialize=RUNTIME)
def _gather_kernel(
    whole_ptr,
    addresses_ptr,
    epoch_ptr,
    error_ptr,
    rank,
    slots,
    data,
    capacity,
    signature,
    S,
    K,
    WORLD: tl.constexpr,
    COPYING: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """All-gather alone: all programs are copiers."""
    copy_parts(
        tl.program_id(0), whole_ptr, addresses_ptr, this_epoch(epoch_ptr), error_ptr, rank, slots,
        data, capacity, signature, S, K, WORLD, COPYING, POLLS, BLOCK_M, BLOCK_K,
    )  # fmt: skip


# ---------------------------------------------------------------- launchers


def waiting_programs(parts: int, device: torch.device) -> int:
    """The number of programs of a launch that waits for peers: at most one per multiprocessor.

    It leaves `CTAS` multiprocessors free, and is at most one per part of the work. A peer may
    itself wait for a message of this rank. The message's kernel would never start if the waiting
    programs held all multiprocessors until they end.
    """
    return min(parts, max(1, processors(device) - CTAS))


class Peers(NamedTuple):
    """The arguments and constants of `copy_parts` and `await_tile`, in order, and the number of
    copiers."""

    where: tuple[torch.Tensor | int, ...]
    constants: tuple[int, int, int]
    copying: int

    def grid(self, tiles: int, device: torch.device) -> tuple[int]:
        """The number of copiers and of programs for the tiles, of which there is at least one."""
        programs = waiting_programs(self.copying + tiles, device)
        return (max(programs, self.copying + 1),)


def gathered(
    name: str,
    x: torch.Tensor,
    memory: Memory,
    tile: GemmTile,
    launch: Callable[[torch.Tensor, Peers], object],
) -> Generator[None, None, torch.Tensor]:
    """whole[W S, K] = all-gather(x[S, K]).

    ``launch(whole, peers)`` launches the kernel that copies and multiplies.
    """
    (S, K), world = x.shape, memory.world
    whole = x.new_empty(world * S, K)
    if whole.numel() == 0:
        if K == 0 and S:
            raise ValueError(f"{name} needs x[S, K] with K >= 1, got {[*x.shape]}")
        return whole
    parts = -(-S // tile.m)
    memory = memory.fitting(name, x.device, parts, x.numel() * x.element_size())
    where = memory.rank, memory.slots, memory.data_offset, memory.capacity
    signature = Signature(name, S, K, x.dtype, (tile.m, 1)).word()
    with torch.cuda.device_of(x):
        _publish_kernel[(parts,)](
            x, whole, memory.addresses, memory.epoch, *where, S, K, *x.stride(), world, signature,
            triton.next_power_of_2(world), memory.polls > 0, tile.m, tile.k,
            num_warps=8, num_stages=1,
        )  # fmt: skip
    yield
    copying = min(COPIERS, (world - 1) * parts)
    addresses = memory.addresses, memory.epoch, memory.error
    peers = Peers((*addresses, *where, signature), (world, copying, memory.polls), copying)
    with torch.cuda.device_of(x):
        launch(whole, peers)
    memory.advance()
    yield
    return whole


def all_gather_steps(
    name: str, x: torch.Tensor, memory: Memory
) -> Generator[None, None, torch.Tensor]:
    """whole[W S, N] = all-gather(x[S, N]); yields after each launch."""
    tile = find("gemm", x.device, x.element_size(), "small")

    def launch(whole: torch.Tensor, peers: Peers) -> None:
        if peers.copying:
            _gather_kernel[(peers.copying,)](
                whole, *peers.where, *x.shape, *peers.constants, tile.m, tile.n,
                num_warps=8, num_stages=1,
            )  # fmt: skip

    return gathered(name, x, memory, tile, launch)


def gather_steps(
    x: torch.Tensor,
    b: torch.Tensor,
    memory: Memory,
    epilogue: Epilogue,
) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """`all_gather_gemm`, yielding after each launch; only the size of the memory is checked."""
    (S, K), N, rows = x.shape, b.shape[1], memory.world * len(x)
    y, z = epilogue.outputs(x, rows, N)
    given, tile = epilogue.arguments(z), shared_tile(x, rows, b)

    def launch(whole: torch.Tensor, peers: Peers) -> None:
        _gather_gemm_kernel[peers.grid(tile_count(tile, rows, N), x.device)](
            whole, b, *given.tensors, y, *peers.where, *given.key, S, N, K, *b.stride(),
            *given.strides, *given.constants, find_precision(epilogue.precision), K % tile.k == 0,
            *peers.constants, tile.m, tile.n, tile.k, tile.group, **gemm_options(tile, x),
        )  # fmt: skip

    whole = yield from gathered("all_gather_gemm", x, memory, tile, launch)
    return y, z, whole
