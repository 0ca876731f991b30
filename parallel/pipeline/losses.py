"""Losses that a stage returns in addition to its activation: the model's own, and auxiliary ones.

The loss of a language model is that of the last stage. A mixture of experts has other losses in
every block: the load-balancing loss (arXiv:2101.03961) and the router's z-loss (arXiv:2202.08906).
A stage, and any segment of it, therefore returns y or (y, losses):

    losses["loss"]      the model's own loss, from the last stage, which has no y (None)
    losses[other name]  auxiliary losses, which are added to it

A loss is 0-dim, in the dtype in which to sum it (float32 or wider). It is already divided by the
number of tokens of the whole global batch, so it is this micro-batch's and this data and context
rank's share of one sum; it is the same on every tensor rank. Losses with the same name are added.
Each loss is a root of the stage's backward pass, as is y, and its gradient is 1 (times the loss
scale). A loss that depends on no parameter is only reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

LOSS = "loss"  # the name of the model's own loss

Losses = Mapping[str, Tensor]
Output = Tensor | None | tuple[Tensor | None, Losses]


def split_losses(output: Output) -> tuple[Tensor | None, Losses]:
    """Return (y, losses) of an output that is y or (y, losses). Raise ValueError if a loss is not a
    0-dim tensor of 32 bits or more."""
    if not isinstance(output, tuple):
        return output, {}
    y, losses = output
    for name, value in losses.items():
        if not isinstance(value, Tensor) or value.ndim or value.dtype.itemsize < 4:
            found = (value.dtype, [*value.shape]) if isinstance(value, Tensor) else (value,)
            raise ValueError(
                f"the loss {name!r} must be a 0-dim tensor of at least 32 bits, because it is "
                f"summed in its dtype; got {' '.join(map(str, found))}"
            )
    return y, losses


def add_losses(total: dict[str, Tensor], losses: Losses) -> None:
    """Add `losses` to `total`, name by name."""
    for name, value in losses.items():
        total[name] = total[name] + value if name in total else value
