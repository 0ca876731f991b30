"""The interface of a context-parallel strategy: a forward and a backward on sequence shards.

`attention._ContextAttention` is the only autograd Function. A strategy moves k, v and their
gradients (Ulysses also q, o and their gradients) between ranks, and calls `block_fwd` and
`block_bwd` on what a rank then holds. Arguments have already been checked. To add a strategy, add a
file with one `ForwardBackward`, a word in `parallel.words.Strategy`, a row in
`attention._STRATEGIES` and its constraints in `resolve_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.collectives import group_rank, group_size
from warpweave.parallel.layout import SequenceLayout


@dataclass(frozen=True)
class Shards:
    """The arguments of a strategy other than tensors: layout, groups and attention options.

    Attributes:
        layout: the positions that each rank holds.
        group: the ring, or the ranks that gather; None for one rank.
        options: attention options for the whole sequence; each call sets its own runs of positions.
        heads: numbers of query heads and KV heads of a rank before any all-to-all.
        ulysses_group: the ranks of the all-to-alls; None for one rank.
        overlap: hide messages behind compute. False gives the same bits, one after the other.
        buffers: message buffers of the ring, shared by consecutive calls. None uses separate
            buffers for this call's forward and for its backward.
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
        """This rank's index on the cp axis: the groups of all-to-alls are of consecutive ranks."""
        ranks = group_size(self.ulysses_group)
        return group_rank(self.group) * ranks + group_rank(self.ulysses_group)


class ForwardBackward(NamedTuple):
    """The two halves of a strategy.

    ``forward(shards, q, k, v, sinks)`` takes q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D], and
    sinks[Hq] or None. It returns o (like q), lse[B, Hq, S/cp] (fp32 or float64), and a tuple of the
    tensors that the backward needs in addition to o and lse.

    ``backward(shards, upstream, saved)`` takes those tensors and the `Upstream` of this rank's
    rows. It returns dq, dk, dv of its rows, summed over all ranks, in the inputs' dtypes.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
