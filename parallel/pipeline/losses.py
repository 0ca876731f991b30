"""Losses that a stage returns beside its activation: the model's own, and auxiliary ones of any
block.

A language model's loss is the last stage's. A mixture of experts has others in every block: the
load-balancing loss (arXiv:2101.03961) and the router's z-loss (arXiv:2202.08906). So a stage, and
any segment of it, returns y or (y, losses):

    losses["loss"]      the model's own: the last stage's, which has no y (None)
    losses[other name]  auxiliary ones, which are added to it

A loss is 0-dim, in the dtype in which it is to be summed (float32 or wider), and already divided by
the number of tokens of the whole global batch: this micro-batch's and this data and context rank's
share of one sum, the same on every tensor rank. Losses of one name are added. Each is a root of the
stage's backward pass, beside y, and its gradient is 1 (times the loss scale); one that depends on
no parameter is only counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LOSS = "loss"  # the name of the model's own

Losses = Mapping[str, Tensor]
Output = Tensor | None | tuple[Tensor | None, Losses]


def split_losses(output: Output) -> tuple[Tensor | None, Losses]:
    """(y, losses) of an output that is y or both.

    Raises:
        ValueError: a loss is not a 0-dim tensor of 32 bits or more.
    """
    if not isinstance(output, tuple):
        return output, {}
    y, losses = output
    for name, value in losses.items():
        if not isinstance(value, Tensor) or value.ndim or value.dtype.itemsize < 4:
            found = (value.dtype, [*value.shape]) if isinstance(value, Tensor) else (value,)
            raise ValueError(
                f"the loss {name!r} must be a 0-dim tensor of 32 bits or more, in which it is "
                f"summed, got {' '.join(map(str, found))}"
            )
    return y, losses


def add_losses(total: dict[str, Tensor], losses: Losses) -> None:
    """Add `losses` to `total`, name by name."""
    for name, value in losses.items():
        total[name] = total[name] + value if name in total else value
