"""Overlap by chunks: a product in chunks of tokens, each hiding the messages of another chunk.

It uses plain point-to-point messages of the process group, so it works on any network.

A chunk is one rank's T/R tokens. In every step each rank sends one chunk and receives one.

    column-parallel, all-gather of x          row-parallel, reduce-scatter of y
    (rank 0 of 4)                             (rank 0 of 4)
    step   multiplied   in flight             step   multiplied   sent to its owner
    0      x0 (own)     x1, x2, x3            0      y1
    1      x1           x2, x3                1      y2           y1
    2      x2           x3                    2      y3           y2
    3      x3                                 3      y0 (own)     y3
                                              then y0 = sum of the terms, in rank order

Volume and dtype of the messages are those of the blocking collective. Without sequence parallelism
nothing is gathered; a row-parallel product is then computed in R chunks of rows, and each chunk's
all-reduce is hidden behind the next chunk's product.

Compared with overlap "none", the gathered x and dy are bitwise equal, and therefore also all
gradients of a row-parallel product except dh. Other results are equal up to rounding, because a
product of fewer rows may add its terms in a different order. With sequence parallelism, repeated
calls give the same bits regardless of the order in which chunks are received.

The cost is a copy of each chunk's result into one tensor, and of x into the gathered x. A
row-parallel product also holds the terms that it sends and receives, about 2 [T, N], until it adds
them. Every wait ends with the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from warpweave.parallel.collectives import (
    Pending,
    group_rank,
    group_size,
    start_all_reduce_,
    start_exchange,
)

Made = TypeVar("Made")


def joined(chunks: list[Any]) -> Any:
    """Concatenate results of consecutive runs of tokens: tensors, None, or tuples of these."""
    first = chunks[0]
    if isinstance(first, tuple):
        return tuple(map(joined, zip(*chunks)))
    return first if first is None or len(chunks) == 1 else torch.cat(chunks)


def gather_product(
    x: torch.Tensor, multiply: Callable[[torch.Tensor, int], Made], group: dist.ProcessGroup
) -> tuple[Made, torch.Tensor]:
    """Call ``multiply(part, first)`` on each rank's x[T/R, ...] as it is received. Return the
    results, concatenated in token order, and the gathered x[T, ...]. `first` is the index of a
    part's first token."""
    rank, ranks = group_rank(group), group_size(group)
    order = [(rank + step) % ranks for step in range(ranks)]
    whole = x.new_empty(ranks, *x.shape)
    whole[rank] = x
    arriving = [
        start_exchange(whole[rank], whole[owner], (rank - step) % ranks, owner, group)
        for step, owner in enumerate(order[1:], 1)
    ]
    made: dict[int, Made] = {rank: multiply(whole[rank], rank * len(x))}
    for owner, pending in zip(order[1:], arriving):
        made[owner] = multiply(pending.wait(), owner * len(x))
    return joined([made[owner] for owner in range(ranks)]), whole.flatten(0, 1)


def product_scatter(
    h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], group: dist.ProcessGroup
) -> torch.Tensor:
    """Reduce-scatter ``multiply(h)`` for all tokens h[T, ...]; return this rank's T/R tokens of the
    sum over ranks."""
    rank, ranks = group_rank(group), group_size(group)
    chunks = h.tensor_split(ranks)
    arriving: dict[int, Pending] = {}
    for step in range(1, ranks):
        dest, source = (rank + step) % ranks, (rank - step) % ranks
        theirs = multiply(chunks[dest])
        arriving[source] = start_exchange(theirs, torch.empty_like(theirs), dest, source, group)
    own = multiply(chunks[rank])
    terms = [own if r == rank else arriving[r].wait() for r in range(ranks)]
    for term in terms[1:]:
        terms[0] += term
    return terms[0]


def product_reduce(
    h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], group: dist.ProcessGroup
) -> torch.Tensor:
    """All-reduce ``multiply(h)`` for all tokens h[T, ...], in R chunks of tokens."""
    chunks = h.tensor_split(group_size(group))
    sums = [start_all_reduce_(multiply(chunk), group) for chunk in chunks]
    return joined([pending.wait() for pending in sums])
