"""Context parallelism: attention over a sequence that is sharded over the cp axis.

`attention` the public call and its autograd Function · `strategy` what a strategy is · `ring`,
`gather`, `ulysses` (and the hybrid of Ulysses and ring) the strategies, of which ring and Ulysses
are generators of `parallel.messages` · `kept` attention results that activation checkpointing keeps
instead of recomputing · `explain` what each strategy sends, holds and leaves exposed, and which one
"auto" is · `links` the measured speeds by which "auto" chooses.
"""

from warpweave.parallel.context.attention import (
    check_strategy,
    context_attention,
    resolve_strategy,
)
from warpweave.parallel.context.links import Links, measure_links
from warpweave.parallel.words import Strategy

__all__ = [
    "Links",
    "Strategy",
    "check_strategy",
    "context_attention",
    "measure_links",
    "resolve_strategy",
]
