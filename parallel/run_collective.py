"""Execution of the collectives of ``parallel.algorithms`` on tensors, as ``messages`` steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from warpweave.parallel.algorithms.rounds import Algorithm, Recv, Round
from warpweave.parallel.messages import Batch, Steps, run_on_group


def run_collective(
    algorithm: Algorithm, x: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Run this rank's part of a collective over `group` on x[n], in place, and return `x`.

    Args:
        algorithm: such as ``algorithms.ring.ring_all_reduce``; the same on every rank.
        x: contiguous, of the same size on all ranks, in the dtype in which to sum.
        group: the ranks; None for a single rank, which has nothing to do.

    Raises:
        ValueError: `x` is not a contiguous vector.

    Examples:
        >>> from warpweave.parallel.algorithms.ring import ring_all_reduce
        >>> run_collective(ring_all_reduce, torch.ones(4), None)  # a group, on several ranks
        tensor([1., 1., 1., 1.])
    """
    if group is None:
        return x
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    # There is no compute to hide messages behind, so no message needs a separate thread.
    steps = collective_steps(rank, algorithm(rank, ranks, x.numel()), x)
    return run_on_group(steps, group, overlap=False)


def collective_steps(rank: int, rounds: Iterable[Round], x: torch.Tensor) -> Steps[torch.Tensor]:
    """Run the `rounds` of `rank` on x[n], in place, and return `x`, as in `run_collective`. A round
    is a batch of messages."""
    if x.ndim != 1 or not x.is_contiguous():
        raise ValueError(
            f"expected a contiguous vector, got shape {[*x.shape]} with strides {[*x.stride()]}"
        )
    for sends, receives in rounds:
        goes = [(x[start:stop], dest) for dest, start, stop in sends if start < stop]
        comes = [r for r in receives if r.start < r.stop]
        arriving = [x[r.start : r.stop] for r in comes]
        for i, r in enumerate(comes):
            if r.adds or any(r.start < s.stop and s.start < r.stop for s in sends):
                arriving[i] = torch.empty_like(arriving[i])
        if goes or comes:
            yield Batch(goes, [(into, r.source) for into, r in zip(arriving, comes, strict=True)])
            yield None
        _put_in(rank, x, list(zip(comes, arriving, strict=True)))
    return x


def _put_in(rank: int, x: torch.Tensor, arrived: list[tuple[Recv, torch.Tensor]]) -> None:
    """Put what has arrived into x. Sums are in rank order, including this rank's own term."""
    terms: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
    for (source, start, stop, adds), value in arrived:
        if adds:
            terms.setdefault((start, stop), {})[source] = value
        elif value.data_ptr() != x[start:stop].data_ptr():
            x[start:stop] = value
    for (start, stop), of in terms.items():
        own = of[rank] = x[start:stop]
        total, *others = (term for _, term in sorted(of.items()))
        for term in others:
            total += term
        if total is not own:
            own.copy_(total)
