"""The words by which layouts, strategies and overlap are chosen; imports the standard library only.

The command line offers them as options, and refuses a wrong one without importing torch.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["zigzag", "contiguous", "striped", "balanced"]  # sequence layout: `layout`
Strategy = Literal["auto", "ring", "gather", "stream", "ulysses", "hybrid"]  # of `context`
Choice = Literal[Strategy, "measured"]  # of a plan; "measured": "auto" by measured links
Overlap = Literal["none", "bulk", "chunked", "fused"]  # of `tensor.ranks`
