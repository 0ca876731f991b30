"""The tile of an attention call: a row of the table for its device, dtype, head dim and variant.

A variant is what a kernel keeps in registers beside plain attention, causal or not: the more it
keeps, the smaller the tile that does not spill. Which rows there must be, benchmarks/compiled.py
tells, which compiles all variants for A100, H100 and B200.
"""

from __future__ import annotations

import torch

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.runtime.dispatch import all_registers, capability
from warpweave.kernels.runtime.tile_table import AttentionTile
from warpweave.kernels.runtime.tiles import find


def variant_of(q: torch.Tensor, options: AttentionOptions, into: bool) -> frozenset[str]:
    """The words for what a call on q[B, S, H, D] with these resolved options keeps:

    bounded   by a window or by documents            softcap   the slope of tanh
    into      the sums of earlier calls              masked    columns past the head dim
    striped   distances between the rows of a run    dropout   a draw for each probability
    shared    instead of dropout: four probabilities to a draw, and nothing else
    """
    words = {
        "bounded": options.window is not None or options.documents is not None,
        "softcap": bool(options.softcap),
        "into": into,
        "striped": any(run.stripes > 1 for run in (*options.q_runs, *options.k_runs)),
    }
    found = {word for word, holds in words.items() if holds}
    if options.dropout > 0:
        found.add("shared" if not found and draws_are_shared(options) else "dropout")
    # float64 is for proofs: what it spills does not matter.
    if q.shape[3] != padded(q.shape[3]) and q.element_size() < 8:
        found.add("masked")
    return frozenset(found)


def draws_are_shared(options: AttentionOptions) -> bool:
    """Whether four probabilities of a tile share each of dropout's draws, see `device.draws`."""
    runs = *options.q_runs, *options.k_runs
    return all(run.stripes == 1 and run.start % 16 == 0 for run in runs)


def padded(head_dim: int) -> int:
    """The columns of a tile: a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def find_tile(kernel: str, q: torch.Tensor, variant: frozenset[str]) -> AttentionTile:
    """The tile of "attention_fwd", "attention_dkdv" or "attention_dq" for q[B, S, H, D]."""
    return find(kernel, q.device, q.element_size(), q.shape[3], variant)


def launch_options(tile: AttentionTile, q: torch.Tensor, variant: frozenset[str]) -> dict[str, int]:
    """Triton's options for a launch with `tile`.

    ptxas limits registers by itself, and spills for it in float32, where columns are masked off
    and, on Blackwell, with dropout or past head dim 64; there the limit is the hardware's.
    """
    options = {"num_warps": tile.warps}
    fuller = q.shape[3] > 64 or not variant.isdisjoint({"dropout", "shared"})
    if q.element_size() == 4 or "masked" in variant or (fuller and capability(q.device) >= 100):
        options = all_registers(tile.warps)
    return {**options, "num_stages": tile.stages}
