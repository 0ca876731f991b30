"""The tiles of an attention call: those of its device, smaller where the call keeps more values."""

from __future__ import annotations

import torch

from warpweave.kernels.attention_args import Scores
from warpweave.kernels.dispatch import INTERPRET, all_registers, capability
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

    What keeps more values per score takes half the keys at a time, and does not spill: dropout in
    the forward and dq; a softcap in a forward of four warps; a window or documents (`bounded`) in
    dq of 16-bit elements on Blackwell. Of 16 bits, head dims that are no multiple of 16 are loaded
    number by number: up to 64 that takes eight warps in the forward, 32 queries in dk and dv and
    half the keys in dq; beyond, it spills on Ampere.
    A forward that adds keeps more per row: at most 64 rows where it is full, as one of four warps
    with both dropout and softcap, and two stages in float32 past head dim 128, where with one the
    compiler spills kilobytes. `_smaller` has the rules of dk and dv.
    """
    size, D = q.element_size(), q.shape[3]
    fwd = find("attention_fwd", q.device, size, D)
    dkdv = find("attention_dkdv", q.device, size, D)
    dq = find("attention_dq", q.device, size, D)
    if INTERPRET:
        return fwd, dkdv, dq
    if size == 2 and D % 16:
        fwd, dkdv, dq = fwd._replace(warps=8), dkdv._replace(q=min(dkdv.q, 32)), _half(dq)
    if (adds and D > 128) or (fwd.warps == 4 and (adds or (dropout and softcap))):
        fwd = fwd._replace(q=min(fwd.q, 64))
    if adds and D > 128 and size == 4:
        fwd = fwd._replace(stages=2)
    return (
        _half(fwd) if dropout or (softcap and fwd.warps == 4) else fwd,
        _smaller(dkdv, q, softcap=softcap, dropout=dropout, adds=adds),
        _half(dq) if dropout or (bounded and size == 2 and capability(q.device) >= 100) else dq,
    )


def _half(tile: AttentionTile) -> AttentionTile:
    return tile._replace(k=max(16, tile.k // 2))


def _smaller(
    tile: AttentionTile, q: torch.Tensor, *, softcap: bool, dropout: bool, adds: bool
) -> AttentionTile:
    """The tile of dk and dv, which hold keys and go through queries.

    Fewer queries cost little, so with dropout 16-bit elements take at most 32 at a time. Fewer keys
    read the queries more often, and below 64 there is no wgmma or tcgen05: past head dim 64, up to
    Hopper, 64 are taken where more would spill, to add to what is there or with both dropout and
    softcap. Float32 has neither of those instructions: half the keys, with dropout a quarter.
    """
    if q.element_size() > 2:
        tile = _half(tile) if dropout else tile
        return _half(tile) if dropout or softcap or adds else tile
    if dropout:
        tile = tile._replace(q=min(tile.q, 32))
    if (adds or (dropout and softcap)) and q.shape[3] > 64 and capability(q.device) < 100:
        tile = tile._replace(k=min(tile.k, 64))
    return tile


def launch_options(tile: AttentionTile, q: torch.Tensor, scores: Scores) -> dict[str, int]:
    """Triton's options for a launch with `tile`.

    ptxas limits registers by itself, and spills for it in float32 and, on Blackwell, with dropout
    or past head dim 64; there the limit is the hardware's.
    """
    options = {"num_warps": tile.warps}
    fuller = scores.dropout > 0 or q.shape[3] > 64
    if q.element_size() == 4 or (fuller and capability(q.device) >= 100):
        options = all_registers(tile.warps)
    return {**options, "num_stages": tile.stages}
