"""Context parallelism: attention over a sequence that is cut over the cp axis.

`attention` the one call and its autograd Function · `strategy` what a strategy is · `ring`,
`gather`, `ulysses` (and its hybrid with the ring) the strategies · `messages` between ranks, on
process groups or all in one process · `explain` what each strategy sends, holds and leaves exposed.
"""

from warpweave.parallel.context.attention import (
    check_strategy,
    choose_strategy,
    context_attention,
    resolve_strategy,
)
from warpweave.parallel.words import Strategy

__all__ = ["Strategy", "check_strategy", "choose_strategy", "context_attention", "resolve_strategy"]
