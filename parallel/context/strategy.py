"""What a strategy of context parallelism is: a forward and a backward on sequence shards.

`attention._ContextAttention` is the one autograd Function. A strategy moves k, v and their
gradients (Ulysses also q, o and theirs) between ranks and calls `block_fwd` and `block_bwd` on what
a rank then holds. Arguments have been checked. A new strategy is a file with one `ForwardBackward`,
a word in `parallel.words.Strategy`, a row in `attention._STRATEGIES` and its constraints in
`resolve_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.collectives import group_rank
from warpweave.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class Shards:
    """What a strategy is told besides tensors: the layout, the groups and the attention options.

    Attributes:
        layout: which positions each rank holds.
        group: the ring, or the ranks that gather; None for one rank.
        options: of the attention of the whole sequence; each call sets its own runs of positions.
        heads: query heads and KV heads of a rank before any all-to-all.
        ulysses_group: the ranks of the all-to-alls; None for one rank. cp rank = rank in `group`
            times its size + rank in it.
        overlap: hide messages behind compute; False gives the same bits, one after the other.
        buffers: of the ring's messages; calls one after the other share them. None for those of
            this call's forward, and of its backward.
    """

    layout: SequenceLayout
    group: dist.ProcessGroup | None
    options: AttentionOptions
    heads: tuple[int, int]
    ulysses_group: dist.ProcessGroup | None = None
    overlap: bool = True
    buffers: Buffers | None = None

    @property
    def rank(self) -> int:
        """This rank's index in `group`."""
        return group_rank(self.group)


class ForwardBackward(NamedTuple):
    """A strategy's two halves.

    ``forward(shards, q, k, v, sinks)`` with q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D] and
    sinks[Hq] or None returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and a tuple of the
    tensors that the backward needs besides o and lse.

    ``backward(shards, upstream, saved)`` with those and the `Upstream` of this rank's rows returns
    dq, dk, dv of its rows, summed over all ranks, in the inputs' dtypes.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
