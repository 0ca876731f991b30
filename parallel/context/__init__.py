"""Context parallelism: attention over a sequence that is cut over the cp axis.

`attention` the one call and its autograd Function · `strategy` what a strategy is · `ring`,
`gather` the strategies · `messages` hops round a ring, on a process group or all in one process.
"""

from warpweave.parallel.context.attention import (
    Strategy,
    check_strategy,
    choose_strategy,
    context_attention,
)

__all__ = ["Strategy", "check_strategy", "choose_strategy", "context_attention"]
