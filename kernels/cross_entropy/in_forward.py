"""The loss of a linear head whose forward also computes the gradients: see `linear`.

It processes some rows at a time. The forward computes z in blocks and their statistics, merges
these over all columns, turns the blocks into dz in place, and multiplies, for a gradient of 1 per
token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from warpweave.kernels.cross_entropy import blocks
from warpweave.kernels.cross_entropy.backward import bwd
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.gemm.fused import gemm_into
from warpweave.kernels.gemm.local import Chunks
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import no_graph
from warpweave.kernels.runtime.dtypes import no_autocast
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- some rows


def _keeps_softmax(x: torch.Tensor, impl: str) -> bool:
    """Return True if a block holds its softmax between statistics and gradients.

    This saves one exponential per element. It is not done in 16 bits, where the softmax would be
    rounded, or with Triton's kernels, which are bound by memory and gain nothing.
    """
    return impl == "torch" and x.dtype == compute_dtype(x)


def _narrow(x: torch.Tensor, columns: int) -> list[slice]:
    """Column slices whose blocks [N, ...] and rows of dW [..., E] are both small enough."""
    return blocks.column_slices(columns, max(x.shape), blocks.sizes(x).elements)


def _rows_fwd_fake(x, weight, labels, first, vocabulary):
    own, kinds = vocabulary.columns(len(weight)), 2 + (vocabulary.label_smoothing != 0.0)
    stats = x.new_empty(kinds, len(x), dtype=compute_dtype(x))
    held = [blocks.aligned_empty(x, cols.stop - cols.start) for cols in _narrow(x, own)]
    return [stats, stats.new_empty(len(held), len(x)), *held[len(first) :]]


@operator("linear_cross_entropy_rows_fwd", _rows_fwd_fake, records=(Vocabulary,))
def _rows_fwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    first: list[torch.Tensor],
    vocabulary: Vocabulary,
) -> list[torch.Tensor]:
    """[stats[k, N], the blocks' own lse[blocks, N], the blocks of z[N, V/tp] or their softmax].

    `first` may contain the first block of z, which is then not among the results. It must come from
    Triton, and so must the statistics, which then leave the block unchanged.
    """
    vocabulary.check_labels(labels)
    held, parts = [*first], []
    with no_autocast(x):
        for i, cols in enumerate(_narrow(x, vocabulary.columns(len(weight)))):
            if i == len(held):
                held.append(blocks.aligned_product(x, weight[cols]))
            block = blocks.from_column(vocabulary, cols.start)
            parts.append(
                blocks.block_stats(held[i], labels, block, _keeps_softmax(x, vocabulary.impl))
            )
    own_lse = torch.stack([part[0] for part in parts])
    stats = blocks.merged(parts, labels, vocabulary.ignore_index)
    return [stats, own_lse, *held[len(first) :]]


@operator(
    "linear_cross_entropy_rows_bwd",
    lambda *_: None,
    records=(Vocabulary,),
    writes=("held", "dx", "dw"),
)
def _rows_bwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    lse: torch.Tensor,
    own_lse: torch.Tensor,
    held: list[torch.Tensor],
    dx: torch.Tensor,
    dw: torch.Tensor,
    add: bool,
    vocabulary: Vocabulary,
) -> None:
    product = blocks.product_impl(vocabulary.impl)
    ones, own = torch.ones_like(lse), vocabulary.columns(len(weight))
    sums = dx if dx.dtype == lse.dtype else torch.empty_like(dx, dtype=lse.dtype)
    with no_autocast(x):
        for cols, z, z_lse in zip(_narrow(x, own), held, own_lse, strict=True):
            block = blocks.from_column(vocabulary, cols.start)
            softmax_lse = z_lse if _keeps_softmax(x, vocabulary.impl) else None
            bwd(ones, z, labels, lse, block, out=z, own_lse=softmax_lse)
            if dx.numel():
                gemm_into(z, weight[cols], sums, cols.start > 0, impl=product)
            if dw.numel():
                gemm_into(z.t(), x, dw[cols], add, impl=product)
        if not add:
            dw[own:] = 0
    if sums is not dx:
        dx.copy_(sums)


# ---------------------------------------------------------------- all rows


def _arriving(x: torch.Tensor, step: int, chunks: Chunks) -> Iterator[tuple[slice, Any]]:
    """Yield (rows, their chunk of x), with the gather of the next chunk already started."""
    starting = ((rows, chunks.start_gather(x[rows])) for rows in blocks.slices(len(x), step))
    following = next(starting, None)
    while following is not None:
        rows, wait = following
        chunk = wait()
        following = next(starting, None)
        yield rows, chunk


@no_graph
def linear_cross_entropy_fwd_bwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    merge: Callable[[torch.Tensor], torch.Tensor] = lambda stats: stats,
    chunks: Chunks | None = None,
    dx_dtype: torch.dtype | None = None,
    want_dw: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses[T], dx[S, E], dW[V/tp, E]), with the gradients of the sum of the losses.

    x[S, E] holds all T rows, or with `chunks` this rank's. dx has `dx_dtype` (empty if None). dW is
    float32 (float64 for float64), and empty without `want_dw`. `merge` merges the stats[k, N] of N
    rows over the vocabulary shards. It is called once per chunk, equally often on every shard.
    """
    chunks = Chunks() if chunks is None else chunks
    wide, sizes, S, parts = compute_dtype(x), blocks.sizes(x), len(x), chunks.parts
    losses, by_rank = x.new_empty(parts, S, dtype=wide), labels.view(parts, S)
    dx = x.new_empty(x.shape if dx_dtype is not None else 0, dtype=dx_dtype)
    dw = x.new_empty(weight.shape if want_dw else 0, dtype=wide)
    w = weight.to(x.dtype)
    step = max(sizes.fewest_rows, sizes.elements // max(1, len(weight))) // parts
    # torch's loss and gradients hold three times z; with half of the rows, a sixth of that.
    fewest = max(chunks.fewest, 2 if len(labels) * len(weight) > sizes.at_once else 1)
    leaving = []
    for rows, chunk in _arriving(x, max(1, min(step, -(-S // fewest))), chunks):
        mine = by_rank[:, rows].flatten()
        first: list[torch.Tensor] = []
        if isinstance(chunk, Gathering):
            z, chunk = blocks.gathering_product(chunk, w), chunk.whole
            cols, *_ = _narrow(chunk, vocabulary.columns(len(w)))
            first = [blocks.aligned(z[:, cols])]
        stats, own_lse, *held = _rows_fwd_op(chunk, w, mine, first, vocabulary)
        stats, held = merge(stats), first + held
        losses[:, rows] = vocabulary.losses(stats, mine).view(parts, -1)
        terms = dx[rows] if dx.ndim > 1 else dx
        if parts > 1 and dx_dtype is not None:  # terms for the tokens of all ranks
            terms = torch.empty_like(chunk, dtype=dx_dtype)
        _rows_bwd_op(chunk, w, mine, stats[0], own_lse, held, terms, dw, rows.start > 0, vocabulary)
        del held, first  # freed before the next ones are allocated
        if dx_dtype is not None:
            leaving.append((rows, terms, chunks.start_sum(terms)))
    for rows, terms, wait in leaving:
        if (total := wait()) is not terms:
            dx[rows] = total
    if S == 0:
        dw.zero_()
    return losses.flatten(), dx, dw


def _fwd_bwd_fake(x, weight, labels, want_dx, want_dw, vocabulary):
    wide = compute_dtype(x)
    losses = x.new_empty(x.shape[0], dtype=wide)
    dx = x.new_empty(x.shape if want_dx else 0)
    return losses, dx, x.new_empty(weight.shape if want_dw else 0, dtype=wide)


@operator("linear_cross_entropy_fwd_bwd", _fwd_bwd_fake, records=(Vocabulary,))
def fwd_bwd_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    want_dx: bool,
    want_dw: bool,
    vocabulary: Vocabulary,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy_fwd_bwd` as one operator for compilers, for any number of tokens."""
    dtype = x.dtype if want_dx else None
    return linear_cross_entropy_fwd_bwd(
        x, weight, labels, vocabulary, dx_dtype=dtype, want_dw=want_dw
    )
