"""What the launches of attention's kernels share: strides, widths, tables and constants."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from warpweave.kernels.attention.options import Mask, Scores, check_into
from warpweave.kernels.attention.visible import document_table
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import triton


def unit_stride(x: torch.Tensor) -> torch.Tensor:
    """x with stride 1 in the last dim: torch's flash attention reads nonsense otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def widened(q: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a call on q with zeros up to a head dim that is a multiple of 8: heads of
    others would be loaded number by number, and spill. Zeros change no score and no gradient.
    float64 q are for proofs."""
    missing = -q.shape[3] % 8
    if not missing or q.element_size() == 8:
        return [*tensors]
    return [F.pad(x, (0, missing)) for x in tensors]


def narrow_into(wide: torch.Tensor, x: torch.Tensor) -> None:
    """Bring to x what a kernel wrote into it widened."""
    if wide is not x:
        x.copy_(wide[..., : x.shape[3]])


def tile_count(runs: tuple[int, ...], block: int) -> int:
    return triton.cdiv(runs[1], block) + triton.cdiv(runs[3], block)


def table_of(mask: Mask, runs: tuple[int, ...], batch: int) -> tuple[torch.Tensor | None, int]:
    """The documents of the rows in `runs` for a kernel, and the step from sample to sample."""
    if mask.documents is None:
        return None, 0
    table = document_table(mask.documents, runs)
    return table, 0 if len(table) < batch else table.stride(0)


Steps = tuple[int, ...]  # from sample to sample, row to row, head to head


def shared_steps(*tensors: torch.Tensor) -> tuple[int, list[Steps]]:
    """A number, and the steps of the tensors in multiples of it, for kernels to load many elements
    at a time: 8 or less where some step is no multiple of 16, which Triton sees by itself."""
    found = [tuple(by if n > 1 else 0 for n, by in zip(x.shape, x.stride()[:3])) for x in tensors]
    shared = math.gcd(16, *(by for steps in found for by in steps))
    step = 1 if shared == 16 else shared
    return step, [tuple(by // step for by in steps) for steps in found]


def one_set(k: Steps, v: Steps) -> tuple[Steps, Steps | None]:
    """v's steps are None where they are k's: kernels then hold one set of addresses."""
    return k, None if v == k else v


def numbers(mask: Mask, scores: Scores) -> tuple[int, ...]:
    """The kernels' arguments window, seed, sample, head0."""
    return mask.window, scores.seed, scores.sample, scores.head


def constants(mask: Mask, scores: Scores) -> tuple[float, float, int, float, bool, bool]:
    """The kernels' constants SCALE, CAP, DROP, KEEP, CAUSAL, WINDOW."""
    drop = min(round(scores.dropout * 2**32), 2**32 - 1)
    keep = 1 / (1 - scores.dropout)
    return scores.scale, scores.softcap, drop, keep, mask.causal, bool(mask.window)


def check_carried(q, sinks, out_dtype, into) -> None:
    if into is None:
        return
    if isinstance(into, torch.Tensor) or len(into) != 2:
        raise ValueError(f"into must be (o, lse), got {type(into).__name__} of {len(into)}")
    if sinks is not None or out_dtype is not None:
        raise ValueError("with into, start lse from the sinks instead, and give no out_dtype")
    o, lse = into
    check_into("o", o, q)
    B, S, H, _ = q.shape
    if lse.shape != (B, H, S) or lse.dtype != compute_dtype(q) or not lse.is_contiguous():
        raise ValueError(
            f"lse to add to must be contiguous {compute_dtype(q)} of shape {(B, H, S)}, "
            f"got {lse.dtype} {tuple(lse.shape)} of strides {lse.stride()}"
        )
