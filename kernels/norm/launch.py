"""What the launches of the norms' kernels share: the tile, rows of tensors, dropout's key."""

from __future__ import annotations

import torch

from warpweave.kernels.dropout import Drop, threshold
from warpweave.kernels.runtime.dispatch import triton


def tile_of(E: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_E and num_warps: 16 elements per thread, several rows per program if rows are
    short."""
    block = max(4, triton.next_power_of_2(E))  # dropout draws four columns at a time
    rows = max(1, 2048 // block)
    return rows, block, max(4, rows * block // 512)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, E] with contiguous rows: a view where strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def drop_arguments(drop: Drop | None) -> tuple[torch.Tensor | None, int, int, int, float]:
    """tokens, seed, site and the constants THRESHOLD and SCALE; all alike without dropout, so that
    one kernel serves."""
    if drop is None:
        return None, 0, 0, 0, 1.0
    return drop.tokens, drop.seed, drop.site, threshold(drop.p), 1 / (1 - drop.p)
