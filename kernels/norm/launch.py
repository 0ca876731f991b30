"""What the launches of the norms' kernels share: the tile, and rows of tensors."""

from __future__ import annotations

import torch

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
