"""The numbers that a layout must reproduce, and how far rounding alone moves each of them.

A layout adds the same terms in a different order, so every number differs by some units in the last
place. The model amplifies this: a norm of small values does, and a gradient whose terms cancel
consists of little else. We measure the amplification on the plain model. It is trained again, a few
times, with its initial weights changed by one unit in the last place of the proven dtype, with
random signs. Every later product then has different rounding errors, as it would in a different
order. (With 16-bit dtypes the float32 masters are changed.) A proof measures the error of a number
in units of its largest change, or of one unit in the last place of its size if that is larger.
Nothing that is being proven is used for this.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.model.gpt import GPTConfig
from warpweave.model.plain import plain_shapes
from warpweave.prove.expected import Delayed, compared, last_logits, plain_config, train
from warpweave.prove.layouts import Sizes

MOVED = 3  # trainings with changed weights: in a single one, some number may hardly move by chance
_ZERO = 2.0**-46  # times the largest value of its family: a float64 sum that is zero up to rounding


@dataclass(frozen=True)
class Truth:
    """Every compared value, in float64, by name.

    `largest` has the largest element of each value. A value that is zero up to rounding, relative
    to the largest of its family, gets the family's largest instead: where every token sees only
    itself, queries and keys have no gradient, and 3e-19 counts as none. `rounding` is the most that
    rounding moves any element.
    """

    model: GPTConfig
    values: dict[str, Tensor]
    largest: dict[str, float]
    rounding: dict[str, float]

    def logits(self, tokens: Tensor, step: int) -> Tensor:
        """Return the logits [V] of the token after `tokens`, with the weights after `step`."""
        params = {name: self.values[f"{name} after step {step}"] for name in self.names}
        return last_logits(params, tokens, plain_config(self.model))

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return list(plain_shapes(plain_config(self.model)))


def truth(
    model: GPTConfig,
    sizes: Sizes,
    dtype: torch.dtype = torch.float64,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str = "cpu",
    optimizer: str = "adamw",
    delayed: Delayed | None = None,
) -> Truth:
    """Return the values that layouts of `model` in `dtype` must reproduce; collective over `group`.

    With `delayed` they are those of that update rule. Each training of the plain model runs on one
    rank, on its `device`, and its result is shared. The returned values are on the CPU.
    """
    shapes = compared(plain_config(model), optimizer)
    words = [what.format(name) for what, family in shapes.items() for name in family]
    lengths = [torch.Size(s) for family in shapes.values() for s in family.values()]
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    mine = {
        n: train(model, sizes, dtype if n else torch.float64, n, device, optimizer, delayed)
        for n in range(rank, 1 + MOVED, ranks)
    }
    if rank == 0:
        flat = torch.cat([mine[0][what].reshape(-1) for what in words])
    else:
        flat = torch.empty(sum(s.numel() for s in lengths), dtype=torch.float64)
    if group is not None:
        flat = flat.to(device)
        dist.broadcast(flat, group_src=0, group=group)
        flat = flat.cpu()
    parts = flat.split([s.numel() for s in lengths])
    values = {what: part.view(shape) for what, part, shape in zip(words, parts, lengths)}
    moved = torch.zeros(len(words), dtype=torch.float64)
    for n in mine.keys() - {0}:
        change = [(mine[n][what].double() - value).abs().max() for what, value in values.items()]
        moved = torch.maximum(moved, torch.stack(change).nan_to_num(torch.inf, torch.inf))
    if group is not None:
        moved = moved.to(device)
        dist.all_reduce(moved, dist.ReduceOp.MAX, group=group)
    large = dict(zip(words, torch.stack([part.abs().max() for part in parts]).tolist()))
    for what, family in shapes.items():
        most = max(large[what.format(name)] for name in family)
        for name in family:
            if large[what.format(name)] <= _ZERO * most:
                large[what.format(name)] = most
    eps = torch.finfo(dtype).eps
    rounding = {  # a number that overflows in the plain model gets no tolerance
        what: max(m, eps * large[what]) if math.isfinite(m) else 0.0
        for what, m in zip(words, moved.tolist())
    }
    return Truth(model, values, large, rounding)
