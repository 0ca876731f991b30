"""Cross entropy of logits, `cross_entropy`, and of a linear layer, `linear_cross_entropy`.

`function` of logits · `halves` kernels and torch path, on a shard of the vocabulary too · `linear`
without ever holding the logits.
"""

from warpweave.kernels.cross_entropy.function import cross_entropy
from warpweave.kernels.cross_entropy.halves import (
    cross_entropy_bwd,
    cross_entropy_fwd,
    token_losses,
)
from warpweave.kernels.cross_entropy.linear import (
    linear_cross_entropy,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    linear_cross_entropy_fwd_bwd,
)

__all__ = [
    "cross_entropy",
    "cross_entropy_bwd",
    "cross_entropy_fwd",
    "linear_cross_entropy",
    "linear_cross_entropy_bwd",
    "linear_cross_entropy_fwd",
    "linear_cross_entropy_fwd_bwd",
    "token_losses",
]
