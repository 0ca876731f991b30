"""The words by which a cut over ranks is chosen: of the standard library alone.

A command line offers them as options, and answers a wrong one without torch.
"""

from __future__ import annotations

from typing import Literal

Kind = Literal["zigzag", "contiguous", "striped", "balanced"]  # how the sequence is cut: `layout`
Strategy = Literal["auto", "ring", "gather", "stream", "ulysses", "hybrid"]  # of `context`
Choice = Literal[Strategy, "measured"]  # of a plan: "auto" by links that the run has measured
Overlap = Literal["none", "bulk", "chunked", "fused"]  # of `tensor.ranks`
