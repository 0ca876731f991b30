"""Products whose messages run under chunks of the product: plain process groups, any network.

    column-parallel   own tokens first, then those of rank + 1, ..., each as it arrives
    row-parallel      the tokens of rank + 1 first, ..., own last; each chunk leaves for its owner
                      while the next is multiplied, and the owner adds the terms in rank order

A chunk is one rank's share of the tokens, and goes straight between the two ranks: at step k every
rank sends one and receives one, so that one message at least is under way under every product. What
is sent is what the blocking twin sends, in the same dtype. Where tokens are not cut nothing is
gathered; then a row-parallel product is made in as many chunks of rows, each of which is summed
over the ranks while the next is multiplied.

Equal to the blocking twin: what is gathered in every bit, and so all gradients of a row-parallel
product but dh; the other results but for rounding, since a product of fewer rows may add its terms
in another order (where it does not, they are equal in every bit on two ranks, whose sum has one
order). Repeated calls give the same bits where tokens are cut, whatever order chunks arrive in.

Cost beside the twin: results of chunks are copied once, into one tensor, and this rank's tokens to
their place beside those that arrive; a row-parallel product holds the terms that it sends and those
that it receives, about 2 [T, N] in all, until it adds them. Every wait ends with the group's
timeout.
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
    """Results of runs of tokens, in token order, as one: tensors, None, or tuples of these."""
    first = chunks[0]
    if isinstance(first, tuple):
        return tuple(map(joined, zip(*chunks)))
    return first if first is None or len(chunks) == 1 else torch.cat(chunks)


def gather_product(
    x: torch.Tensor, multiply: Callable[[torch.Tensor, int], Made], group: dist.ProcessGroup
) -> tuple[Made, torch.Tensor]:
    """``multiply(part, first)`` of each rank's x[T/R, ...] as it arrives, and x[T, ...]."""
    rank, ranks = group_rank(group), group_size(group)
    order = [(rank + step) % ranks for step in range(ranks)]
    whole = x.new_empty(ranks, *x.shape)
    whole[rank] = x
    arriving = [
        start_exchange(whole[rank], whole[owner], -step, group)
        for step, owner in enumerate(order[1:], 1)
    ]
    made: dict[int, Made] = {rank: multiply(whole[rank], rank * len(x))}
    for owner, pending in zip(order[1:], arriving):
        made[owner] = multiply(pending.wait(), owner * len(x))
    return joined([made[owner] for owner in range(ranks)]), whole.flatten(0, 1)


def product_scatter(
    h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], group: dist.ProcessGroup
) -> torch.Tensor:
    """This rank's tokens of the sum over ranks of ``multiply(h)``, of all tokens h[T, ...]."""
    rank, ranks = group_rank(group), group_size(group)
    chunks = h.tensor_split(ranks)
    arriving: dict[int, Pending] = {}
    for step in range(1, ranks):
        theirs = multiply(chunks[(rank + step) % ranks])
        arriving[(rank - step) % ranks] = start_exchange(
            theirs, torch.empty_like(theirs), step, group
        )
    own = multiply(chunks[rank])
    terms = [own if r == rank else arriving[r].wait() for r in range(ranks)]
    for term in terms[1:]:
        terms[0] += term
    return terms[0]


def product_reduce(
    h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor], group: dist.ProcessGroup
) -> torch.Tensor:
    """The sum over ranks of ``multiply(h)``, of all tokens h[T, ...]."""
    chunks = h.tensor_split(group_size(group))
    sums = [start_all_reduce_(multiply(chunk), group) for chunk in chunks]
    return joined([pending.wait() for pending in sums])
