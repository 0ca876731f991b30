"""The tiles of an attention call: those of its device, smaller where the call keeps more values."""

from __future__ import annotations

import torch

from warpweave.kernels.dispatch import INTERPRET, capability
from warpweave.kernels.tile_table import AttentionTile
from warpweave.kernels.tiles import find


def tiles_for(
    q: torch.Tensor,
    *,
    bounded: bool = False,
    softcap: bool = False,
    dropout: bool = False,
    adds: bool = False,
) -> tuple[AttentionTile, AttentionTile, AttentionTile]:
    """The tiles of the forward, the dk and dv, and the dq kernel for q[B, S, H, D].

    What keeps more values per score takes half the keys at a time, and does not spill: dropout
    everywhere; a softcap, or adding to what is there, in the kernels that are full without (dk and
    dv, where dropout takes a quarter, and a forward of four warps); a window or documents
    (`bounded`) in dq of 16-bit elements on Blackwell.
    """
    size, D = q.element_size(), q.shape[3]
    fwd = find("attention_fwd", q.device, size, D)
    dkdv = find("attention_dkdv", q.device, size, D)
    dq = find("attention_dq", q.device, size, D)
    if INTERPRET:
        return fwd, dkdv, dq
    more = softcap or adds
    if dropout:
        dkdv = _half(dkdv)
    return (
        _half(fwd) if dropout or (more and fwd.warps == 4) else fwd,
        _half(dkdv) if dropout or more else dkdv,
        _half(dq) if dropout or (bounded and size == 2 and capability(q.device) >= 100) else dq,
    )


def _half(tile: AttentionTile) -> AttentionTile:
    return tile._replace(k=max(16, tile.k // 2))
