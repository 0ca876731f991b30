"""Options for layouts, strategies and overlap, and the sizes that go with them.

This file imports only the standard library: the command line offers these words as options and
rejects an invalid one without importing torch, and the planner computes with the sizes.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["zigzag", "contiguous", "striped", "balanced"]  # sequence layout: `layout`
Strategy = Literal["auto", "ring", "gather", "stream", "ulysses", "hybrid"]  # of `context`
Choice = Literal[Strategy, "measured"]  # of a plan; "measured" is "auto" with measured links
Overlap = Literal["none", "bulk", "chunked", "fused"]  # of `tensor.ranks`

FEWEST_ROWS = 128  # in a chunk of a balanced layout: one tile of the attention kernels
CAPPED = (1024, 2**26)  # logits with a softcap: at most these rows per rank, and logits, at a time


def chunks_of(seq_len: int, parts: int, kind: Kind) -> int:
    """The number of equal chunks of a sequence that each of `parts` ranks holds.

    It is 2 for zigzag, 16 for balanced (8, 4 or 2 if chunks would otherwise have fewer than
    `FEWEST_ROWS` rows), and 1 for other kinds. A single rank holds the whole sequence as one chunk,
    so nothing is padded.
    """
    if parts == 1:
        return 1
    if kind == "balanced":
        rows = seq_len // parts
        return next((n for n in (16, 8, 4) if rows >= n * FEWEST_ROWS), 2)
    return 2 if kind == "zigzag" else 1


def local_rows(seq_len: int, parts: int, chunks: int) -> int:
    """Rows on each of `parts` ranks with this many chunks each; padding goes at the end."""
    return -(-seq_len // (parts * chunks)) * chunks
