"""QKV projection of tokens sharded over the ranks, whose forward kernel gathers them.

See `kernels.overlap.gather`.
"""

from __future__ import annotations

import torch

from warpweave.kernels.gemm.epilogue import find_precision
from warpweave.kernels.gemm.mainloop import gemm_options, mainloop, shared_tile, tile_count
from warpweave.kernels.overlap.function import Steps
from warpweave.kernels.overlap.gather import (
    Peers,
    await_tile,
    copy_parts,
    gathered,
    tile_count_of,
)
from warpweave.kernels.overlap.signals import this_epoch
from warpweave.kernels.overlap.symmetric import Memory
from warpweave.kernels.qkv.pairs import columns_of_pairs, turn
from warpweave.kernels.runtime.dispatch import RUNTIME, tl, triton
from warpweave.kernels.runtime.wgrad import rows


@triton.jit(do_not_specialize=RUNTIME)
def _gather_qkv_kernel(
    whole_ptr,
    w_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    addresses_ptr,
    epoch_ptr,
    error_ptr,
    rank,
    slots,
    data,
    capacity,
    signature,
    S,
    positions,
    E,
    kv_heads,
    stride_wn,
    stride_we,
    HALF: tl.constexpr,
    G: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_E: tl.constexpr,
    WORLD: tl.constexpr,
    COPYING: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
):
    epoch, pid = this_epoch(epoch_ptr), tl.program_id(0)
    if pid < COPYING:
        copy_parts(
            pid, whole_ptr, addresses_ptr, epoch, error_ptr, rank, slots, data, capacity,
            signature, S, E, WORLD, COPYING, POLLS, BLOCK_M, BLOCK_E,
        )  # fmt: skip
    else:
        N = kv_heads * (G + 2) * (2 * HALF)
        tiles = tile_count_of(S, N, WORLD, BLOCK_M, BLOCK_N)
        for index in range(pid - COPYING, tiles, tl.num_programs(0) - COPYING):
            first, row, col = await_tile(
                index, addresses_ptr, epoch, error_ptr, rank, slots, S, N,
                WORLD, COPYING, POLLS, BLOCK_M, BLOCK_N, GROUP,
            )  # fmt: skip
            m, n = first + row + tl.arange(0, BLOCK_M), columns_of_pairs(col, HALF, BLOCK_N)
            z = mainloop(
                whole_ptr, w_ptr, m, n, first + S, N, E, E, 1, stride_we, stride_wn,
                PRECISION, EVEN_E, BLOCK_M, BLOCK_N, BLOCK_E,
            )  # fmt: skip
            turn(
                z, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, m, col,
                first + S, positions, kv_heads, HALF, G,
            )  # fmt: skip


def gather_qkv_steps(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    table: tuple[torch.Tensor | None, torch.Tensor | None],
    memory: Memory,
    *,
    shape: tuple[int, int],
    precision: str | None,
) -> Steps:
    """(q, k, v, whole) from this rank's tokens x[S, E]; yields after each launch.

    `shape` is (B, positions) of all tokens.
    """
    (S, E), (kv_heads, slots, head_dim, _) = x.shape, weight.shape
    T, w = memory.world * S, rows(weight)
    q = x.new_empty(*shape, kv_heads * (slots - 2), head_dim)
    k, v = (x.new_empty(*shape, kv_heads, head_dim) for _ in "kv")
    flat = None if bias is None else bias.flatten().contiguous()
    cos, sin = (t if t is None else t.contiguous() for t in table)
    tile = shared_tile(x, T, w.t(), "heavy")

    def launch(whole: torch.Tensor, peers: Peers) -> None:
        _gather_qkv_kernel[peers.grid(tile_count(tile, T, len(w)), x.device)](
            whole, w, flat, cos, sin, q, k, v, *peers.where, S, shape[1], E, kv_heads,
            *w.stride(), head_dim // 2, slots - 2, find_precision(precision), E % tile.k == 0,
            *peers.constants, tile.m, tile.n, tile.k, tile.group, **gemm_options(tile, x),
        )  # fmt: skip

    whole = yield from gathered("qkv_rope", x, memory, tile, launch)
    return q, k, v, whole
