"""Cross entropy of logits, `cross_entropy`, and fused with a linear layer, `linear_cross_entropy`.

`vocabulary` the formula, and the columns of a vocabulary shard · `forward` and `backward` of logits
· `function` the autograd Function and the op · `linear` the loss of a linear head: either its
backward recomputes the logits (`recompute`), or its forward computes the gradients (`in_forward`) ·
`blocks` the blocks of logits, which are never held whole.
"""

from warpweave.kernels.cross_entropy.backward import cross_entropy_bwd
from warpweave.kernels.cross_entropy.forward import cross_entropy_fwd
from warpweave.kernels.cross_entropy.function import cross_entropy
from warpweave.kernels.cross_entropy.in_forward import linear_cross_entropy_fwd_bwd
from warpweave.kernels.cross_entropy.linear import linear_cross_entropy
from warpweave.kernels.cross_entropy.recompute import (
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
)
from warpweave.kernels.cross_entropy.vocabulary import token_losses

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
