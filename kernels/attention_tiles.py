"""Which tiles the attention kernels cut their work into, by device, element size and head dim."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.dispatch import INTERPRET, capability

MAX_HEAD_DIM = 256


class Tile(NamedTuple):
    """How a kernel cuts its work: rows of q and of k per step, and Triton's launch options."""

    q: int
    k: int
    warps: int
    stages: int


# (compute capability, bytes per element, head dim) -> tiles of fwd, dkdv, dq. A call takes the
# largest capability not above its device's that has the element size, and there the smallest head
# dim that fits; (0, 0, 256) is for the interpreter and everything else. In half and
# single precision all compile without register spills (plain masks; benchmarks/compiled.py), larger
# dkdv tiles do not.
TILES: dict[tuple[int, int, int], tuple[Tile, Tile, Tile]] = {
    (0, 0, 256): (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    (80, 2, 64): (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(64, 64, 4, 2)),
    (80, 2, 128): (Tile(128, 64, 8, 3), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    (80, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    (80, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    (80, 4, 128): (Tile(32, 16, 4, 2), Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    (80, 4, 256): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    (80, 8, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (90, 2, 64): (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    (90, 2, 128): (Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    (90, 2, 256): (Tile(128, 64, 8, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
    (90, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    (90, 4, 128): (Tile(32, 16, 4, 2), Tile(16, 32, 8, 1), Tile(32, 16, 8, 1)),
    (90, 4, 256): (Tile(16, 16, 4, 1), Tile(16, 16, 8, 1), Tile(16, 16, 4, 1)),
    (100, 2, 64): (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    (100, 2, 128): (Tile(128, 64, 8, 3), Tile(64, 64, 8, 1), Tile(128, 64, 8, 2)),
    (100, 2, 256): (Tile(64, 64, 8, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
}


def tiles_for(
    q: torch.Tensor,
    *,
    bounded: bool = False,
    softcap: bool = False,
    dropout: bool = False,
    adds: bool = False,
) -> tuple[Tile, Tile, Tile]:
    """The tiles of the forward, the dk and dv, and the dq kernel for q[B, S, H, D].

    What keeps more values per score takes half the keys at a time, and does not spill: dropout
    everywhere; a softcap, or adding to what is there, in the kernels that are full without (dk and
    dv, where dropout takes a quarter, and a forward of four warps); a window or documents
    (`bounded`) in dq on Blackwell.
    """
    fitting = [
        (arch, -head_dim)
        for arch, size, head_dim in TILES
        if size == q.element_size() and head_dim >= q.shape[3] and arch <= capability(q.device)
    ]
    if INTERPRET or not fitting:
        return TILES[0, 0, MAX_HEAD_DIM]
    arch, head_dim = max(fitting)
    fwd, dkdv, dq = TILES[arch, q.element_size(), -head_dim]
    more = softcap or adds
    if dropout:
        dkdv = _half(dkdv)
    return (
        _half(fwd) if dropout or (more and fwd.warps == 4) else fwd,
        _half(dkdv) if dropout or more else dkdv,
        _half(dq) if dropout or (bounded and arch >= 100) else dq,
    )


def _half(tile: Tile) -> Tile:
    return tile._replace(k=max(16, tile.k // 2))
