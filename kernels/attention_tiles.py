"""The tiles of an attention call: those of its device, smaller where the call keeps more values."""

from __future__ import annotations

import torch

from warpweave.kernels.attention_args import Mask, Scores
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
    everywhere; a softcap in the kernels that are full without (dk and dv, where dropout takes a
    quarter, and a forward of four warps); adding to what is there in dk and dv; a window or
    documents (`bounded`) in dq of 16-bit elements on Blackwell. A forward that adds keeps more per
    row: at most 64 rows where it is full, as one of four warps with both dropout and softcap, and
    two stages in float32 past head dim 128, where with one the compiler spills kilobytes.
    """
    size, D = q.element_size(), q.shape[3]
    fwd = find("attention_fwd", q.device, size, D)
    dkdv = find("attention_dkdv", q.device, size, D)
    dq = find("attention_dq", q.device, size, D)
    if INTERPRET:
        return fwd, dkdv, dq
    if dropout:
        dkdv = _half(dkdv)
    if (adds and D > 128) or (fwd.warps == 4 and (adds or (dropout and softcap))):
        fwd = fwd._replace(q=min(fwd.q, 64))
    if adds and D > 128 and size == 4:
        fwd = fwd._replace(stages=2)
    return (
        _half(fwd) if dropout or (softcap and fwd.warps == 4) else fwd,
        _half(dkdv) if dropout or softcap or adds else dkdv,
        _half(dq) if dropout or (bounded and size == 2 and capability(q.device) >= 100) else dq,
    )


def _half(tile: AttentionTile) -> AttentionTile:
    return tile._replace(k=max(16, tile.k // 2))


def launch_options(
    tile: AttentionTile, q: torch.Tensor, mask: Mask, scores: Scores, *, more: bool = False
) -> dict[str, int]:
    """Triton's options for a launch with `tile`; `more` says that it adds, or has sinks.

    Left alone, ptxas spills a few bytes of float32 kernels to fit one program more on a
    multiprocessor. A stated limit, even that of the hardware, stops it; but it then holds fewer
    programs of kernels that would not have spilled, so plain masks go without.
    """
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    bounded = mask.window > 0 or mask.documents is not None
    fuller = more or bounded or scores.softcap > 0 or scores.dropout > 0
    if fuller and q.element_size() == 4 and torch.version.hip is None:  # ptxas is NVIDIA's
        options["maxnreg"] = min(255, 2048 // tile.warps)
    return options
