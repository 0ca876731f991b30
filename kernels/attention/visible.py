"""Masks as intervals of global positions: the keys that a query sees, and the tiles to visit.

    first(p) = max(start of p's document, p - window + 1)
    last(p)  = min(end of p's document - 1, p if causal, p + window - 1 if not)

A query at position p sees the keys at positions first(p)..last(p). A key at p is seen by the
queries of the mirrored interval (back and ahead swapped). Both ends grow with p, and the positions
in a tile of rows ascend. So the tile's first and last row determine which tiles of the other side
any of its rows sees (only these are visited), and which tiles all of its rows see entirely (these
need no mask).

Rows hold at most two runs of positions start, start + stripes, start + 2 stripes, ... With stripes
= 1 these are the runs of a rank in a contiguous or zigzag layout; with as many stripes as ranks,
those of a striped layout. A tile lies within one run. In a kernel the runs of queries, or of keys,
are five numbers: (start, length) of both runs and the common `stripes`.

Documents are cumulative boundaries in global positions, as in FlashAttention's cu_seqlens: document
j is the positions from documents[j] to documents[j + 1] - 1. It may be empty, and positions from
the last boundary on (a layout's padding) are one more document. Keys may have separate boundaries:
a query of document j then sees keys of document j, by the keys' boundaries, and keys in no document
(padding among tokens) are hidden. `document_table` converts the boundaries to the first and last
position of every row's document on the other side, on their device and without a host sync. This
takes a dozen small kernels, so `Packed` has the table of a whole sequence, made once for all
layers.

Window: Beltagy et al. 2020 (arXiv:2004.05150). Packing: Krell et al. 2021 (arXiv:2107.02027).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from warpweave.kernels.reference import Run
from warpweave.kernels.runtime.dispatch import tl, triton

_FAR = 2**31 - 1  # ends the last, open document; tables are int32


def document_table(
    documents: torch.Tensor, runs: Sequence[Run], keys: bool = False
) -> torch.Tensor:
    """int32[1 or B, 2, S]: the first and last position of each row's document on the other side.

    documents[1 or B, n + 1], or [B, 2, n + 1] if keys have separate boundaries. The S rows are
    queries, or keys if `keys`, at the positions `runs`. No host sync.
    """
    documents = documents.clamp(max=_FAR)  # a table's entries are int32
    own, other = (documents, documents) if documents.ndim == 2 else documents.unbind(1)
    if keys:
        own, other = other, own
    where = {"device": documents.device, "dtype": documents.dtype}
    position = torch.cat([torch.arange(n, **where) * by + start for start, n, by in runs])
    position = position.expand(documents.shape[0], -1).contiguous()
    after = torch.searchsorted(own.contiguous(), position, right=True)
    bounds = torch.nn.functional.pad(torch.nn.functional.pad(other, (1, 0)), (0, 1), value=_FAR)
    table = torch.stack((bounds.gather(1, after), bounds.gather(1, after + 1) - 1), 1)
    return table.to(torch.int32)


class Packed(NamedTuple):
    """Boundaries of documents, shared by queries and keys, and a table of them for all calls.

    Attributes:
        boundaries: int32 or int64 [n + 1] or [B, n + 1].
        table: int32[1 or B, 2, S], their `document_table` for the positions 0 to S - 1.

    Examples:
        >>> from warpweave.kernels.attention.visible import packed
        >>> documents = packed(torch.tensor([0, 10, 16]), 16)
        >>> documents.table.shape
        torch.Size([1, 2, 16])
    """

    boundaries: torch.Tensor
    table: torch.Tensor


def packed(documents: torch.Tensor, length: int) -> Packed:
    """These boundaries, [n + 1] or [B, n + 1], with the table for `length` positions.

    Examples:
        >>> packed(torch.tensor([0, 10, 16]), 16).table.shape
        torch.Size([1, 2, 16])
    """
    return Packed(documents, document_table(torch.atleast_2d(documents), [Run(0, length)]))


def rows_of(table: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
    """The part of a whole sequence's `document_table` for rows at the positions `runs`."""
    parts = [table[:, :, start : start + n * by : by] for start, n, by in runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).contiguous()


# ---------------------------------------------------------------- device: runs and tiles


@triton.jit
def rows_before(position, start, length, stripes):
    """The number of rows of the run (start, length) at positions before `position`."""
    before = tl.maximum(position - start, 0)
    # Not tl.cdiv: it would overflow at the end of the last, open document.
    rows = before // stripes + (before % stripes != 0).to(tl.int32)
    return tl.minimum(rows, length)


@triton.jit
def rows_of_tile(index, runs, BLOCK: tl.constexpr):
    """First row, first position and number of rows of tile `index`; no tile straddles two runs."""
    tiles0 = tl.cdiv(runs[1], BLOCK)
    second = index >= tiles0
    return _rows_of_run(index - tl.where(second, tiles0, 0), second, runs, BLOCK)


@triton.jit
def _rows_of_run(index, second, runs, BLOCK: tl.constexpr):
    """`rows_of_tile` for tile `index` of the first or the second run."""
    at = index * BLOCK
    row = at + tl.where(second, runs[1], 0)
    position = at * runs[4] + tl.where(second, runs[2], runs[0])
    rows = tl.minimum(tl.where(second, runs[3], runs[1]) - at, BLOCK)
    return row.to(tl.int64), position, rows


# ---------------------------------------------------------------- device: intervals


@triton.jit
def _interval(
    position,
    doc_first,
    doc_last,
    window,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):
    """The interval first..last that `position` sees, `back` and `ahead`; empty if last < first.

    An end that no option bounds is `position`, and is not used.
    """
    first, last = position, position
    if BACK and WINDOW:
        first = position - window + 1
    if AHEAD and WINDOW:
        last = position + window - 1
    if DOCUMENTS:  # also under a causal mask: the keys of a document may begin or end elsewhere
        first = doc_first if BACK and not WINDOW else tl.maximum(first, doc_first)
        last = doc_last if AHEAD and not WINDOW else tl.minimum(last, doc_last)
    return first, last


@triton.jit
def reach(
    position,
    rows,
    stripes,
    table_ptr,
    seq,
    window,
    BACK: tl.constexpr,
    AHEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The intervals that a tile of `rows` from `position` on sees.

    Returns those of every row (two vectors), and those of the first and last rows as (first of
    first, last of first, first of last, last of last). Rows past the tile's end reach nothing that
    a window or a document bounds ahead of them. `table_ptr` is at the tile's first row in a table
    of `seq` rows, or None without documents.
    """
    i, end = tl.arange(0, BLOCK), position + (rows - 1) * stripes
    every = position + i * stripes
    if table_ptr is None:
        first, last = _interval(every, 0, 0, window, BACK, AHEAD, WINDOW, False)
        if WINDOW:
            last = tl.where(i < rows, last, -1)
        top_first, top_last = _interval(position, 0, 0, window, BACK, AHEAD, WINDOW, False)
        end_first, end_last = _interval(end, 0, 0, window, BACK, AHEAD, WINDOW, False)
    else:
        at = table_ptr + i
        a, b = tl.load(at, i < rows, 0), tl.load(at + seq, i < rows, -1)
        first, last = _interval(every, a, b, window, BACK, AHEAD, WINDOW, True)
        a, b = tl.load(table_ptr), tl.load(table_ptr + seq)
        top_first, top_last = _interval(position, a, b, window, BACK, AHEAD, WINDOW, True)
        a, b = tl.load(table_ptr + rows - 1), tl.load(table_ptr + seq + rows - 1)
        end_first, end_last = _interval(end, a, b, window, BACK, AHEAD, WINDOW, True)
    return first, last, (top_first, top_last, end_first, end_last)


@triton.jit
def span(
    ends,
    start,
    length,
    stripes,
    MASK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
    short=None,
):
    """The tiles of the run (start, length) that rows with these `ends` (see `reach`) must visit.

    With MASK these are the tiles that some rows see only in part; without it, those that all rows
    see entirely. Returns (first tile, count, first tile of a hole, tiles in the hole). FIRST and
    LAST are true if that end of the intervals bounds anything. A tile that the end of the run cuts
    short is seen in part. If `short` is true, all tiles count as seen in part.
    """
    any_from, all_from = 0, 0
    any_to, all_to = tl.cdiv(length, BLOCK), length // BLOCK
    if FIRST:
        any_from = rows_before(ends[0], start, length, stripes) // BLOCK
        all_from = tl.cdiv(rows_before(ends[2], start, length, stripes), BLOCK)
    if LAST:
        any_to = tl.cdiv(rows_before(ends[3] + 1, start, length, stripes), BLOCK)
        all_to = rows_before(ends[1] + 1, start, length, stripes) // BLOCK
    if FIRST:
        all_to = tl.maximum(all_to, all_from)
    if short is not None:
        all_to = tl.where(short, all_from, all_to)
    if not MASK:
        return all_from, all_to - all_from, 0, 0
    elif not FIRST:
        return all_to, any_to - all_to, 0, 0
    else:
        count = (all_from - any_from) + (any_to - all_to)  # negative only if no row sees any key
        return any_from, count, all_from, all_to - all_from


@triton.jit
def rows_of_step(j, span0, span1, runs, HOLES: tl.constexpr, BLOCK: tl.constexpr):
    """`rows_of_tile` for the tile of step j, through span0 of the first run and then span1 of the
    second."""
    second = j >= span0[1]
    tile = j + tl.where(second, span1[0] - span0[1], span0[0])
    if HOLES:
        hole, size = tl.where(second, span1[2], span0[2]), tl.where(second, span1[3], span0[3])
        tile += tl.where(tile >= hole, size, 0)
    return _rows_of_run(tile, second, runs, BLOCK)
