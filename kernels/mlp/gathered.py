"""The gradient at the hidden units where dy is still on its way: `hidden`'s backward kernel under
which the ranks' rows are gathered, see `kernels.overlap.gather`."""

from __future__ import annotations

import torch

from warpweave.kernels.activation import find_activation
from warpweave.kernels.gemm.epilogue import find_precision
from warpweave.kernels.gemm.mainloop import gemm_options, grid, mainloop
from warpweave.kernels.mlp.slope import slopes
from warpweave.kernels.overlap.epilogue import shared_tile
from warpweave.kernels.overlap.function import Steps
from warpweave.kernels.overlap.gather import (
    Transport,
    await_tile,
    copy_parts,
    gathered,
    tile_count_of,
)
from warpweave.kernels.overlap.signals import this_epoch
from warpweave.kernels.overlap.symmetric import Memory
from warpweave.kernels.runtime.dispatch import tl, triton


@triton.jit(do_not_specialize=["rank"])
def _gather_hidden_bwd_kernel(
    whole_ptr,
    w_ptr,
    z_ptr,
    dz_ptr,
    h_ptr,
    addresses_ptr,
    epoch_ptr,
    error_ptr,
    rank,
    slots,
    data,
    capacity,
    S,
    F,
    E,
    stride_we,
    stride_wf,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_E: tl.constexpr,
    WORLD: tl.constexpr,
    COPYING: tl.constexpr,
    POLLS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
):
    epoch, pid = this_epoch(epoch_ptr), tl.program_id(0)
    if pid < COPYING:
        copy_parts(
            pid, whole_ptr, addresses_ptr, epoch, error_ptr, rank, slots, data, capacity, S, E,
            WORLD, COPYING, POLLS, BLOCK_T, BLOCK_E,
        )  # fmt: skip
    else:
        tiles = tile_count_of(S, F, WORLD, BLOCK_T, BLOCK_F)
        for index in range(pid - COPYING, tiles, tl.num_programs(0) - COPYING):
            first, row, col = await_tile(
                index, addresses_ptr, epoch, error_ptr, rank, slots, S, F,
                WORLD, POLLS, BLOCK_T, BLOCK_F, GROUP,
            )  # fmt: skip
            t, f = first + row + tl.arange(0, BLOCK_T), col + tl.arange(0, BLOCK_F)
            dh = mainloop(
                whole_ptr, w_ptr, t, f, first + S, F, E, E, 1, stride_we, stride_wf,
                PRECISION, EVEN_E, BLOCK_T, BLOCK_F, BLOCK_E,
            )  # fmt: skip
            slopes(dh, z_ptr, dz_ptr, h_ptr, t, col, first + S, F, ACT, GATED)


def gather_hidden_bwd_steps(
    dy: torch.Tensor,
    down_weight: torch.Tensor,
    z: torch.Tensor,
    memory: Memory,
    *,
    activation: str,
    want_hidden: bool,
    precision: str | None,
) -> Steps:
    """(dz, h or None, whole) of this rank's rows dy[S, E], with a yield after each launch."""
    (S, E), F, T = dy.shape, down_weight.shape[1], memory.world * len(dy)
    name, gated = find_activation(activation)
    dz, h = torch.empty_like(z), z.new_empty(T, F) if want_hidden else None
    tile = shared_tile(dy, T, down_weight, "large" if want_hidden else "heavy")

    def launch(whole: torch.Tensor, transport: Transport) -> None:
        workers = grid(tile, T, F, dy.device)[0]
        _gather_hidden_bwd_kernel[(transport.copying + workers,)](
            whole, down_weight, z, dz, h, *transport.where, S, F, E, *down_weight.stride(),
            name, gated, find_precision(precision), E % tile.k == 0,
            *transport.constants, tile.m, tile.n, tile.k, tile.group, **gemm_options(tile, dy),
        )  # fmt: skip

    whole = yield from gathered("mlp", dy, memory, tile, launch)
    return dz, h, whole
