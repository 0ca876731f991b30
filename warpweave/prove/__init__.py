"""``warpweave prove``: show that a layout computes what one plain device computes.

`command` the command, the ranks it starts and their verdict · `layouts` what is proven, listed or
drawn · `proof` of one layout · `expected` its batches and what `plain_gpt` makes of them ·
`comparison` errors and limits · `typecheck` the types of a program, without any ranks.
"""

from warpweave.prove.command import ProveConfig, judge, main
from warpweave.prove.comparison import LIMITS, Errors
from warpweave.prove.layouts import Layout
from warpweave.prove.proof import prove_layout

__all__ = ["LIMITS", "Errors", "Layout", "ProveConfig", "judge", "main", "prove_layout"]
