"""The tiles of an attention call: those of its device, smaller where the call keeps more values.

Every rule here ends a spill that the compiler made of the table's tile for an A100, H100 or B200;
benchmarks/compiled.py compiles what they answer. The interpreter takes the table's tiles as they
are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.runtime.dispatch import INTERPRET, all_registers, capability, triton
from warpweave.kernels.runtime.tile_table import AttentionTile
from warpweave.kernels.runtime.tiles import find


class Variant(NamedTuple):
    """Which variant of a kernel a call takes, by what it keeps in registers: `bounded` by a window
    or documents, `into` the sums of earlier calls, rows in stripes, dropout's draws `shared`."""

    causal: bool = False
    bounded: bool = False
    softcap: bool = False
    dropout: bool = False
    into: bool = False
    striped: bool = False
    shared: bool = False

    @property
    def more(self) -> bool:
        """Whether that is more than plain attention, which may be causal, keeps."""
        return self.bounded or self.softcap or self.dropout or self.into


def variant_of(options: AttentionOptions, into: bool) -> Variant:
    """The variant that a call with these resolved options takes."""
    bounded = options.window is not None or options.documents is not None
    striped = any(run.stripes > 1 for run in (*options.q_runs, *options.k_runs))
    capped, drops = bool(options.softcap), options.dropout > 0
    shared = drops and draws_are_shared(options)
    return Variant(options.causal, bounded, capped, drops, into, striped, shared)


def draws_are_shared(options: AttentionOptions) -> bool:
    """Whether four probabilities of a tile share each of dropout's draws, see `device.draws`."""
    runs = *options.q_runs, *options.k_runs
    return all(run.stripes == 1 and run.start % 16 == 0 for run in runs)


def _eased(q: torch.Tensor, variant: Variant) -> bool:
    """Whether a call keeps little more than plain attention: dropout with shared draws alone, of
    16-bit heads of 64 and 128."""
    alone = Variant(variant.causal, dropout=True, shared=True)
    return variant == alone and q.element_size() == 2 and q.shape[3] in (64, 128)


def _plain(q: torch.Tensor, variant: Variant) -> bool:
    """Whether a call keeps what plain attention does, and no columns are masked off."""
    return not (variant.more or variant.striped or _masked(q))


def forward_tile(q: torch.Tensor, variant: Variant) -> AttentionTile:
    """The tile of the forward, which holds queries and goes through keys, for q[B, S, H, D].

    Only plain attention has the registers for 128 keys at a time: all else takes half of them.
    Dropout, and a softcap in a program of four warps, keep more per score: half the keys, but not
    where draws are shared, with nothing else, on Hopper or in eight warps. What goes
    on from earlier sums keeps more per row: at most 64 rows past head dim 128 or in four warps (as
    with both dropout and softcap), and past head dim 128 in float32 two stages, since with one the
    compiler spills kilobytes. On B200 64 by 64 past head dim 128 for all but plain attention.
    Columns that are masked off take eight warps, and of 16-bit elements
    half the keys on Ampere and, of 64 rows, past head dim 128: a quarter with dropout and softcap.
    """
    tile = find("attention_fwd", q.device, q.element_size(), q.shape[3])
    if INTERPRET:
        return tile
    wide, masks = q.shape[3] > 128, _masked(q)
    b200 = 100 <= capability(q.device) < 120
    if wide and b200 and q.element_size() == 2 and not _plain(q, variant):
        tile = tile._replace(q=64, k=64)
    if tile.k == 128 and (variant.more or masks):
        tile = _half_keys(tile)
    if masks:
        tile = tile._replace(warps=8)
    if (wide and (variant.into or masks)) or (
        tile.warps == 4 and (variant.into or (variant.dropout and variant.softcap))
    ):
        tile = tile._replace(q=min(tile.q, 64))
    if wide and masks and variant.dropout and variant.softcap:
        tile = _half_keys(tile)
    if variant.into and wide and q.element_size() == 4:
        tile = tile._replace(stages=2)
    masks = masks and q.element_size() == 2 and (wide or capability(q.device) < 90)
    drops = variant.dropout
    if _eased(q, variant):
        drops = tile.warps == 4 and capability(q.device) // 10 != 9
    half = drops or masks or (variant.softcap and tile.warps == 4)
    return _half_keys(tile) if half else tile


def dkdv_tile(q: torch.Tensor, variant: Variant) -> AttentionTile:
    """The tile of dk and dv, which hold keys and go through queries.

    Only plain attention has the registers to hold 128 keys in four warps: all else takes eight, and
    past head dim 64 on Ampere 64 by 64, on Hopper at most 32 queries, but for bounds alone on rows
    that are not striped. Single versions of Triton have not enough for causal attention past head
    dim 64 either, 3.6 on Ampere and from 3.9 on Hopper: half the queries. Fewer queries cost
    little: with dropout 16-bit elements take at most 32 at a time unless draws are shared, with
    nothing else (then, on Ampere, 16 past head dim 64, by 128 keys), and half where columns are
    masked off and anything more is kept, on Ampere past head dim 64, with a softcap too or, under
    Triton 3.6, bounds. Fewer keys read the queries more often, and below 64 there is no wgmma or
    tcgen05: past head dim 64, up to Hopper, 64 are taken where more would spill, to add to what is
    there or with both dropout and softcap. Heads past 128 are plain attention's 16 by 64 up to
    Hopper, which spills from Triton 3.9 on: else 32 by 32. Float32 has neither of those
    instructions: half the keys, with dropout a quarter.
    """
    tile = find("attention_dkdv", q.device, q.element_size(), q.shape[3])
    if INTERPRET:
        return tile
    if q.element_size() > 2:
        tile = _half_keys(tile) if variant.dropout else tile
        return _half_keys(tile) if variant.dropout or variant.softcap or variant.into else tile
    wide, arch, more = q.shape[3] > 64, capability(q.device), variant.more or _masked(q)
    eased = _eased(q, variant)
    spills = 90 <= arch < 100 and _version() >= [3, 9]
    if q.shape[3] > 128 and arch < 100 and (spills or not _plain(q, variant)):
        tile = tile._replace(q=32, k=32)
    if tile.k == 128 and more:
        tile = tile._replace(warps=8)
    bounds = variant == Variant(variant.causal, bounded=True) and not _masked(q)
    if tile.k == 128 and wide and arch < 90 and eased:
        tile = tile._replace(q=16)
    elif tile.k == 128 and wide and arch < 90 and more:
        tile = tile._replace(q=64, k=64)
    elif tile.k == 128 and wide and arch < 100 and more:
        tile = tile if bounds else tile._replace(q=32)
    elif tile.k == 128 and wide and variant.causal and _spills_causal(arch):
        tile = tile._replace(q=tile.q // 2)
    if variant.dropout and not eased:
        tile = tile._replace(q=min(tile.q, 32))
    if wide and spills and variant.dropout and not variant.shared:
        tile = tile._replace(q=min(tile.q, 16))
    both = variant.dropout and variant.softcap
    old = variant.bounded and _version() < [3, 7]
    if _masked(q) and (variant.more if arch >= 90 else wide or both or old):
        tile = tile._replace(q=max(16, tile.q // 2))
    if wide and arch < 100 and (variant.into or both):
        tile = tile._replace(k=min(tile.k, 64))
    return tile


def _version() -> list[int]:
    return [int(number) for number in triton.__version__.split(".")[:2]]


def _spills_causal(arch: int) -> bool:
    """Whether this version of Triton spills where its neighbours do not, see `dkdv_tile`."""
    return _version() < [3, 7] if arch < 90 else _version() >= [3, 9] and arch < 100


def dq_tile(q: torch.Tensor, variant: Variant) -> AttentionTile:
    """The tile of dq, which holds queries and goes through keys.

    On Ampere only plain attention has the registers for 128 queries: all else takes 64 by 64. On
    B200 only plain and bounded attention has them for four warps: all else takes eight. Half the
    keys with dropout, or of 16-bit elements if four warps mask columns off or Blackwell bounds, a
    quarter with a softcap too. Past head dim 128 half the queries, on Hopper where earlier sums go
    on, on Blackwell for all but plain attention. Dropout whose draws are shared, with nothing else,
    only halves the keys, and not on Hopper.
    """
    tile = find("attention_dq", q.device, q.element_size(), q.shape[3])
    if INTERPRET:
        return tile
    if _eased(q, variant):
        return tile if capability(q.device) // 10 == 9 else _half_keys(tile)
    low, blackwell = q.element_size() == 2, capability(q.device) >= 100
    bounds = low and variant.bounded and blackwell
    narrow = variant.into or (blackwell and not _plain(q, variant))
    if low and q.shape[3] > 128 and tile.q == 128 and narrow:
        return _half_keys(tile._replace(q=64)) if variant.dropout or bounds else tile._replace(q=64)
    if tile.q == 128 and capability(q.device) < 90 and (variant.more or _masked(q)):
        tile = tile._replace(q=64, k=64)
    keeps = variant.softcap or variant.dropout or variant.into
    if low and blackwell and tile.q == 128 and (keeps or _masked(q)):
        tile = tile._replace(warps=8)
    masks = low and _masked(q) and tile.warps == 4
    if masks and variant.dropout and variant.softcap:
        tile = _half_keys(tile)
    return _half_keys(tile) if variant.dropout or bounds or masks else tile


def _masked(q: torch.Tensor) -> bool:
    """Whether tiles have columns that the heads of q do not; in float64, for proofs, no matter."""
    return q.element_size() < 8 and q.shape[3] != padded(q.shape[3])


def padded(head_dim: int) -> int:
    """The columns of a tile: a power of two of at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def _half_keys(tile: AttentionTile) -> AttentionTile:
    return tile._replace(k=max(16, tile.k // 2))


def launch_options(tile: AttentionTile, q: torch.Tensor, variant: Variant) -> dict[str, int]:
    """Triton's options for a launch with `tile`.

    ptxas limits registers by itself, and spills for it in float32, where columns are masked off
    and, on Blackwell, with dropout or past head dim 64; there the limit is the hardware's.
    """
    options = {"num_warps": tile.warps}
    fuller = variant.dropout or q.shape[3] > 64
    if q.element_size() == 4 or _masked(q) or (fuller and capability(q.device) >= 100):
        options = all_registers(tile.warps)
    return {**options, "num_stages": tile.stages}
