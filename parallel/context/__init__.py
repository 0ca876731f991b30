"""Context parallelism: attention over a sequence that is sharded over the cp axis.

`attention` the public call and its autograd Function · `strategy` the interface of a strategy ·
`ring`, `gather`, `ulysses` (and the hybrid of Ulysses and ring) the strategies; ring and Ulysses
are generators of `parallel.messages` · `kept` attention results that activation checkpointing keeps
instead of recomputing · `explain` the cost of each strategy, and the choice of "auto" · `links` the
measured speeds on which "auto" bases its choice.
"""

from warpweave.parallel.context.attention import check_strategy, context_attention, resolve_strategy
from warpweave.parallel.context.links import Links, measure_links
from warpweave.parallel.words import Strategy

__all__ = [
    "Links", "Strategy", "check_strategy", "context_attention", "measure_links", "resolve_strategy",
]  # fmt: skip
