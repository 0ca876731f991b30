"""What a strategy of context parallelism is: a forward and a backward over shards of the sequence.

`attention._ContextAttention` is the one autograd Function; a strategy only moves keys, values and
their gradients between the ranks, and calls `block_fwd` and `block_bwd` for what is here. Every
argument has been checked. A new strategy is a file with one `ForwardBackward`, a word in
`parallel.words.Strategy`, a row in `attention._STRATEGIES` and its needs in `resolve_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.parallel.collectives import group_rank
from warpweave.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class Shards:
    """Where this rank's rows lie and what is attended: all that a strategy is told besides tensors.

    Attributes:
        layout: which positions each rank holds.
        group: the ranks between which keys and values travel; None for one.
        options: of the whole sequence's attention; the runs are each block's own.
        heads: query heads and KV heads of this rank before anything moves.
        neighbours: the neighbours that trade rows for heads; None for one. The cp ranks are those
            of `group` times these, neighbours first.
        overlap: hide messages behind compute; without it the same bits, one after the other.
    """

    layout: SequenceLayout
    group: dist.ProcessGroup | None
    options: AttentionOptions
    heads: tuple[int, int]
    neighbours: dist.ProcessGroup | None = None
    overlap: bool = True

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return group_rank(self.group)


class ForwardBackward(NamedTuple):
    """A strategy.

    ``forward(shards, q, k, v, sinks)`` with q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D] and
    sinks[Hq] or None returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and a tuple of the
    tensors that the backward needs besides o and lse.

    ``backward(shards, do, saved, lse, delta, o)`` with those and delta[B, Hq, S/cp] returns dq,
    dk, dv of this rank's own rows, summed over all ranks, in the inputs' dtypes. `o` is None if a
    gradient came through lse; otherwise it spares the CPU path a copy.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
