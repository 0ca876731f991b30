"""What a strategy of context parallelism is: a forward and a backward over shards of the sequence.

`attention._ContextAttention` is the one autograd Function; a strategy only moves keys, values and
their gradients between the ranks, and calls the kernels' halves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from warpweave.parallel.layout import SequenceLayout


class Attend(NamedTuple):
    """Which keys count and how much: the arguments of `attention` that both directions share."""

    causal: bool = True
    window: int | None = None
    documents: torch.Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    dropout: float = 0.0
    dropout_seed: int = 0
    dropout_origin: tuple[int, int] = (0, 0)
    impl: str | None = None


@dataclass(frozen=True)
class Shards:
    """Where this rank's rows lie and what is attended: all that a strategy is told besides tensors.

    Attributes:
        layout: which positions each rank holds.
        group: the cp process group, ``layout.parts`` ranks.
        attend: the mask and the scores.
        overlap: hide messages behind compute; without it the same bits, one after the other.
    """

    layout: SequenceLayout
    group: dist.ProcessGroup
    attend: Attend
    overlap: bool = True

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return dist.get_rank(self.group)


class Passes(NamedTuple):
    """A strategy.

    ``forward(shards, q, k, v, sinks)`` with q[B, S/cp, Hq, D], k and v[B, S/cp, Hkv, D] and
    sinks[Hq] or None returns o (like q), lse[B, Hq, S/cp] (fp32 or float64) and a tuple of the
    tensors that the backward needs besides.

    ``backward(shards, do, q, kept, lse, delta, o)`` with those and delta[B, Hq, S/cp] returns dq,
    dk, dv of this rank's own rows, summed over all ranks, in the inputs' dtypes. `o` is None if a
    gradient came through lse; otherwise it spares the CPU path a copy.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]]
    backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
