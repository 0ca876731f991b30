"""Gradients summed in the order of the global micro-batches: bitwise identical for any dp.

Floating-point addition is not associative, so an all-reduce gives different bits for different
numbers of ranks, and a training run on four ranks drifts away from the same run on one. Here the
global micro-batches are dealt out in turn: micro-batch j of rank r of R is number j R + r. After
each of them, every rank gets the R terms of its slice (one all-to-all) and adds them to its
accumulator in rank order, which is ascending order:

    six global micro-batches g0 to g5, slices a and b
    ranks    rank    backward passes    its accumulator
    1        0       g0 g1 .. g5        ((((g0 + g1) + g2) + g3) + g4) + g5
    2        0       g0 g2 g4           a of (g0 + g1), then ((.. + g2) + g3), then ((.. + g4) + g5)
             1       g1 g3 g5           b of the same
    3        0       g0 g3              a of (g0 + g1) + g2, then ((.. + g3) + g4) + g5

ZeRO 1 to 3 keep the slice; ZeRO 0 all-gathers it once per step. The number of bytes is that of a
reduce-scatter in every micro-batch, which ZeRO 2 and 3 send anyway. The global norm, which
determines the clip factor, is summed in integers (`exact_sum`). Gradients that are still partial
over tensor ranks are summed by ``algorithms.direct.ordered``.

The computation of a micro-batch must also be the same: the same number of sequences in it, the same
tp, cp and pp, the same kind of device, and on a CPU the same number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from warpweave.parallel.collectives import all_gather_into, start_all_to_all
from warpweave.parallel.data.flat import FlatLayout
from warpweave.parallel.data.reduce import FlatGradients
from warpweave.parallel.schedule.actions import FINISHES, Schedule, placement
from warpweave.parallel.shard import ParamRecord

_LIMBS, _BITS = 3, 22  # per term, below the largest; 2**(63 - 22) terms do not overflow
_CHUNK = 2**20  # terms in float64 at a time


def check_order(lists: Schedule, *, tied: bool) -> None:
    """Raise ValueError unless every stage ends the backwards of micro-batches in ascending order.
    With `tied`, if the first and last stage are on one rank, they are checked as one."""
    rank_of = placement(lists)
    last = len(rank_of) - 1
    alone = [{stage} for stage in range(last + 1)]
    for stages in [*alone, {0, last}] if tied else alone:
        actions = [a for a in lists[rank_of[min(stages)]] if a.op in FINISHES]
        order = [a.mb for a in actions if a.stage in stages]
        if order != sorted(order):
            raise ValueError(
                f"reduce = 'ordered' needs micro-batches in ascending order, but the backward of "
                f"stages {sorted(stages)} has the order {order}; use a different schedule"
            )


class OrderedGradients(FlatGradients):
    """`FlatGradients` whose sum over micro-batches and data ranks is in their global order.

    Args:
        layout, params, dtype, device: as for `FlatGradients`.
        group: all ranks that see different tokens; None for a single rank.
        sharded_result: each rank keeps its slice. Otherwise all slices are gathered at the end of a
            step.

    Attributes:
        reduced: the sum: [layout.slice_size] if sharded, otherwise [layout.size].
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: Sequence[tuple[ParamRecord, nn.Parameter]],
        group: dist.ProcessGroup | None,
        *,
        sharded_result: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(
            layout,
            params,
            group,
            sharded_result=sharded_result,
            sharded_accumulation=True,
            dtype=dtype,
            device=device,
        )
        self._sum = torch.zeros(layout.slice_size, dtype=dtype, device=device)
        self._gathers = not sharded_result and group is not None
        size = layout.size if self._gathers else 0
        self.reduced = torch.zeros(size, dtype=dtype, device=device) if size else self._sum

    def start(self, following: Sequence[FlatGradients] = (), *, last: bool = True) -> None:
        """Start an all-to-all of this micro-batch's gradient, slice r to rank r."""
        self.finish()
        terms = self.flat if self.group is None else torch.empty_like(self.flat)
        sizes = [self.layout.slice_size] * (self.layout.size // self.layout.slice_size)
        work = start_all_to_all(self.flat, terms, sizes, sizes, self.group)
        self._in_flight, self._is_last = (work, terms), last

    def _add(self, out: Tensor) -> None:
        """Add the terms out[R * slice] to the slice, one after the other."""
        for term in out.view(-1, self.layout.slice_size):
            if self._reduced_is_stale:
                self._sum.copy_(term)
                self._reduced_is_stale = False
            else:
                self._sum.add_(term)

    def _start_last(self) -> dist.Work | None:
        """Start the all-gather of the slices of ZeRO 0."""
        if not self._gathers:
            return None
        return all_gather_into(self.reduced, self._sum, group=self.group, async_op=True)


def exact_sum(
    pieces: Iterable[Tensor],
    groups: Iterable[dist.ProcessGroup | None],
    like: Tensor,
    *,
    squares: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sum of all elements, or of their squares, on all ranks of `groups`. The bits do not
    depend on how the elements are cut into pieces and over ranks. Collective, no host sync.

    Terms are fixed-point numbers relative to the largest of all (as in Demmel and Nguyen 2015,
    "Parallel reproducible summation"). Their sum is a sum of integers, which does not depend on the
    order.

    Args:
        pieces: float32 or float64 [n >= 1], of this rank.
        groups: the sum is taken over one after the other; each term is on only one of their ranks.
        like: a tensor with the dtype of the terms, on their device.
        squares: sum the squares.

    Returns:
        Three 0-dim tensors: the largest magnitude u, or 1 if that is 0; the sum of x / u, or of its
        squares (both float64); and whether all of this rank's terms are finite. If any rank's terms
        are not, u is infinite or the sum is not a number.
    """
    pieces, groups = list(pieces), [group for group in groups if group is not None]
    largest = [torch.linalg.vector_norm(piece, torch.inf) for piece in pieces]
    top = torch.stack([like.new_zeros(()), *largest]).amax()
    finite = top.isfinite()
    top = torch.where(finite, top, torch.inf)  # the largest of NaN and a number may be either
    for group in groups:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
    unit = torch.where(top > 0, top, 1.0).double()
    sums = torch.zeros(_LIMBS, dtype=torch.int64, device=like.device)
    for piece in pieces:
        for part in piece.split(_CHUNK):
            rest = part.double() / unit
            if squares:
                rest.square_()
            for limb in range(_LIMBS):
                whole = rest.mul_(2.0**_BITS).floor()
                sums[limb] += whole.long().sum()
                rest.sub_(whole)
    for group in groups:
        dist.all_reduce(sums, group=group)
    scales = 2.0 ** (-_BITS * torch.arange(1, _LIMBS + 1, device=like.device, dtype=torch.float64))
    return unit, (sums.double() * scales).sum(), finite
