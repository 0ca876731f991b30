"""``warpweave prove``: show that a layout computes what one plain device computes.

`command` the command, the ranks it starts and their verdict · `layouts` what is proven, listed or
drawn · `proof` of one layout, and its limits · `expected` its batches and what `plain_gpt` makes
of them · `typecheck` the types of a program, without any ranks.
"""

from warpweave.prove.command import ProveConfig, judge, main
from warpweave.prove.layouts import Layout
from warpweave.prove.proof import LIMITS, Errors, prove_layout

__all__ = ["LIMITS", "Errors", "Layout", "ProveConfig", "judge", "main", "prove_layout"]
