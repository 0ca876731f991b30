"""Launch arguments of the attention kernels: tile, strides, widths, tables, numbers, constants.

A tile is a row of the table for a device, dtype, head dim and variant. The variant is what a kernel
keeps in registers in addition to plain attention, causal or not. The more it keeps, the smaller the
largest tile that does not spill. benchmarks/compiled.py, which compiles all variants for A100, H100
and B200, shows which rows are needed. benchmarks/tile_rows.py writes the rows that a compiler makes
necessary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.attention.visible import document_table, rows_of
from warpweave.kernels.reference import Run
from warpweave.kernels.runtime.dispatch import all_registers, capability, triton
from warpweave.kernels.runtime.tile_table import AttentionTile
from warpweave.kernels.runtime.tiles import find, find_optional

# ---------------------------------------------------------------- tiles


def variant_of(q: torch.Tensor, options: AttentionOptions, into: bool) -> frozenset[str]:
    """The words for what a call on q[B, S, H, D] with these resolved options keeps in registers:

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
    # float64 is for proofs, so its spills do not matter.
    if q.shape[3] != padded(q.shape[3]) and q.element_size() < 8:
        found.add("masked")
    return frozenset(found)


def draws_are_shared(options: AttentionOptions) -> bool:
    """Return True if four probabilities of a tile share each dropout draw, see `device.draws`."""
    runs = *options.q_runs, *options.k_runs
    return all(run.stripes == 1 and run.start % 16 == 0 for run in runs)


def padded(head_dim: int) -> int:
    """The columns of a tile: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def find_attention_tile(kernel: str, q: torch.Tensor, variant: frozenset[str]) -> AttentionTile:
    """The tile of "attention_fwd", "attention_dkdv" or "attention_dq" for q[B, S, H, D]."""
    return find(kernel, q.device, q.element_size(), q.shape[3], variant)


def find_fused_tile(
    q: torch.Tensor, k: torch.Tensor, options: AttentionOptions, variant: frozenset[str]
) -> AttentionTile | None:
    """The tile of "attention_bwd", which computes dq, dk and dv in one kernel, or None if there is
    none, or results must be deterministic.

    Its sums of dq have 32-bit row numbers.
    """
    if options.deterministic or torch.are_deterministic_algorithms_enabled():
        return None
    B, S, H, D = q.shape
    if not q.numel() or not k.numel() or B * S * H >= 2**31:
        return None
    return find_optional("attention_bwd", q.device, q.element_size(), D, variant)


def launch_options(tile: AttentionTile, q: torch.Tensor, variant: frozenset[str]) -> dict[str, int]:
    """Triton's options for a launch with `tile`.

    ptxas' own register limit causes spills in float32, if columns are masked off and, on Blackwell,
    with dropout or past head dim 64. For these, the limit is the hardware's.
    """
    options = {"num_warps": tile.warps}
    fuller = q.shape[3] > 64 or not variant.isdisjoint({"dropout", "shared"})
    if q.element_size() == 4 or "masked" in variant or (fuller and capability(q.device) >= 100):
        options = all_registers(tile.warps)
    return {**options, "num_stages": tile.stages}


# ---------------------------------------------------------------- tensors


def unit_stride(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with stride 1 in the last dim; torch's flash attention misreads others."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def widened(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Pad the tensors of a call on q with zeros up to a head dim that is a multiple of 8.

    Other head dims would be loaded number by number, and spill. Zeros change no score and no
    gradient. float64 q is for proofs and stays as it is.
    """
    missing = -q.shape[3] % 8
    if not missing or q.element_size() == 8:
        return [*tensors]
    return [F.pad(x, (0, missing)) for x in tensors]


def narrow_into(wide: torch.Tensor, x: torch.Tensor) -> None:
    """Copy to x what a kernel wrote into its widened form."""
    if wide is not x:
        x.copy_(wide[..., : x.shape[3]])


Steps = tuple[int, ...]  # from sample to sample, row to row, head to head


def shared_steps(*tensors: torch.Tensor) -> tuple[int, list[Steps]]:
    """A number, and the steps of the tensors in multiples of it, so that kernels load many elements
    at a time.

    The number is 8 or less if some step is not a multiple of 16; Triton detects multiples of 16.
    """
    found = [tuple(by if n > 1 else 0 for n, by in zip(x.shape, x.stride()[:3])) for x in tensors]
    shared = math.gcd(16, *(by for steps in found for by in steps))
    step = 1 if shared == 16 else shared
    return step, [tuple(by // step for by in steps) for steps in found]


def one_set(k: Steps, v: Steps) -> tuple[Steps, Steps | None]:
    """Replace v's steps by None if they equal k's: kernels then hold one set of addresses."""
    return k, None if v == k else v


def added_rows(sums: torch.Tensor, tile: AttentionTile) -> Any:
    """sums[B, H, S, D] as rows [B * H * S, D] that a kernel adds tiles to.

    From Hopper on, float32 sums are a tensor descriptor: the copy engine adds a tile in shared
    memory, and no thread computes addresses. Otherwise they are a pointer for atomics.
    """
    if capability(sums.device) < 90 or sums.dtype != torch.float32:
        return sums
    from triton.tools.tensor_descriptor import TensorDescriptor  # here, as Triton may be missing

    D = sums.shape[3]
    return TensorDescriptor.from_tensor(sums.view(-1, D), [tile.q, padded(D)])


def table_of(
    options: AttentionOptions, q: torch.Tensor, keys: bool = False
) -> tuple[torch.Tensor | None, int]:
    """The documents of the rows of q, or of `keys`, for a kernel, and the step between samples.

    int32, or int64 for float64: with a mask from 32-bit loads, Triton gives the float64 product the
    operand layout of 32-bit products, and fails ("Currently fp64 don't support largeK").
    """
    if options.documents is None:
        return None, 0
    runs = options.k_runs if keys else options.q_runs
    if options.table is None:
        table = document_table(options.documents, runs, keys)
    else:
        table = rows_of(options.table, runs)
    table = table.long() if q.dtype == torch.float64 else table
    return table, 0 if len(table) < len(q) else table.stride(0)


# ---------------------------------------------------------------- arguments


def count_tiles(runs: Sequence[Run], block: int) -> int:
    """The number of tiles of `block` rows."""
    return sum(triton.cdiv(run.length, block) for run in runs)


def numbers(options: AttentionOptions, heads: int, group: int) -> tuple[int, ...]:
    """The kernels' number arguments: the runs, five numbers per side, then heads, group, window,
    seed, sample, head0."""
    sides = []
    for runs in (options.q_runs, options.k_runs):
        first, second = [*runs, Run(0, 0), Run(0, 0)][:2]
        sides += [*first[:2], *second[:2], first.stripes]
    key = options.dropout_seed, *options.dropout_origin
    return *sides, heads, group, options.window or 0, *key


def constants(
    options: AttentionOptions, into: bool, step: int, head_dim: int, tile: AttentionTile
) -> tuple[float | bool, ...]:
    """The kernels' constants SCALE, CAP, DROP, KEEP, ALIGNED, CAUSAL, WINDOW, INTO, STEP, D,
    BLOCK_M, BLOCK_N, BLOCK_D."""
    drop = min(round(options.dropout * 2**32), 2**32 - 1)
    dropout = drop, 1 / (1 - options.dropout), drop > 0 and draws_are_shared(options)
    scores = options.scale, options.softcap or 0.0, *dropout
    mask = options.causal, options.window is not None
    return *scores, *mask, into, step, head_dim, tile.q, tile.k, padded(head_dim)
