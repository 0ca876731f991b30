"""The words by which layouts, strategies and overlap are chosen, and sizes that go with them;
imports the standard library only.

The command line offers the words as options, and refuses a wrong one without importing torch; the
planner counts with the sizes.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

Kind = Literal["zigzag", "contiguous", "striped", "balanced"]  # sequence layout: `layout`
Strategy = Literal["auto", "ring", "gather", "stream", "ulysses", "hybrid"]  # of `context`
Choice = Literal[Strategy, "measured"]  # of a plan; "measured": "auto" by measured links
Overlap = Literal["none", "bulk", "chunked", "fused"]  # of `tensor.ranks`

FEWEST_ROWS = 128  # of a chunk of a balanced layout: a tile of the attention kernels
CAPPED = (1024, 2**26)  # logits with a softcap: rows of each rank at a time, and logits, at most


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of an error message about `word`, such as "; did you mean 'zb-v'?".

    It names the nearest of the `known` words, whatever their case; "" if none is near.
    """
    plain = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), plain, 1)
    return f"; did you mean {plain[near[0]]!r}?" if near else ""


def chunks_of(seq_len: int, parts: int, kind: Kind) -> int:
    """The equal chunks of a sequence that each of `parts` ranks holds: two in zigzag; balanced 16,
    or 8, 4 or 2 so that a chunk has `FEWEST_ROWS` rows; otherwise one. A single rank holds the
    whole sequence as one chunk, so that nothing is padded."""
    if parts == 1:
        return 1
    if kind == "balanced":
        rows = seq_len // parts
        return next((n for n in (16, 8, 4) if rows >= n * FEWEST_ROWS), 2)
    return 2 if kind == "zigzag" else 1


def local_rows(seq_len: int, parts: int, chunks: int) -> int:
    """Rows on each of `parts` ranks with so many chunks each: the sequence is padded at its end."""
    return -(-seq_len // (parts * chunks)) * chunks
