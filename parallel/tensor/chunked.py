"""Tensor ranks whose messages run under pieces of the product: plain process groups, any network.

    column-parallel   own tokens first, then those of rank + 1, ..., each as it arrives
    row-parallel      the tokens of rank + 1 first, ..., own last; each piece leaves for its owner
                      while the next is multiplied, and the owner adds the terms in rank order

A piece is one rank's share of the tokens, and goes straight between the two ranks: at step k every
rank sends one and receives one, so that one message at least is under way under every product. What
is sent is what the blocking twin sends, in the same dtype. Where tokens are not cut nothing is
gathered; then a row-parallel product is made in as many pieces of rows, each of which is summed
over the ranks while the next is multiplied.

Equal to the blocking twin: what is gathered in every bit, and so all gradients of a row-parallel
product but dh; the other results but for rounding, since a product of fewer rows may add its terms
in another order (where it does not, they are equal in every bit on two ranks, whose sum has one
order). Repeated calls give the same bits where tokens are cut, whatever order pieces arrive in.

Cost beside the twin: results of pieces are copied once, into one tensor, and this rank's tokens to
their place beside those that arrive; a row-parallel product holds the terms that it sends and those
that it receives, about 2 [T, N] in all, until it adds them. Every wait ends with the group's
timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warpweave.kernels.runtime.wgrad import bias_gradient
from warpweave.parallel.collectives import Pending, group_rank, group_size, start_exchange
from warpweave.parallel.tensor.ranks import Gradient, Made, TensorRanks


def joined(pieces: list[Any]) -> Any:
    """Results of runs of tokens, in token order, as one: tensors, None, or tuples of these."""
    first = pieces[0]
    if isinstance(first, tuple):
        return tuple(map(joined, zip(*pieces)))
    return first if first is None or len(pieces) == 1 else torch.cat(pieces)


@dataclass(frozen=True)
class ChunkedRanks(TensorRanks):
    """`TensorRanks` with equal results; whole collectives in the backward of a column-parallel
    product, pieces everywhere else."""

    def gather_product(
        self, x: torch.Tensor, multiply: Callable[[torch.Tensor, int], Made]
    ) -> tuple[Made, torch.Tensor]:
        """``multiply(part, first)`` of each rank's x[T/R, ...] as it arrives, and x[T, ...]."""
        if not self.sequence_parallel:
            return multiply(x, 0), x
        rank, ranks = group_rank(self.group), group_size(self.group)
        order = [(rank + step) % ranks for step in range(ranks)]
        whole = x.new_empty(ranks, *x.shape)
        whole[rank] = x
        arriving = [
            start_exchange(whole[rank], whole[owner], -step, self.group)
            for step, owner in enumerate(order[1:], 1)
        ]
        made: dict[int, Made] = {rank: multiply(whole[rank], rank * len(x))}
        for owner, pending in zip(order[1:], arriving):
            made[owner] = multiply(pending.wait(), owner * len(x))
        return joined([made[owner] for owner in range(ranks)]), whole.flatten(0, 1)

    def column_product(
        self, x: torch.Tensor, multiply: Callable[[torch.Tensor, int], Made]
    ) -> Made:
        return self.gather_product(x, multiply)[0]

    def sum_product(
        self, h: torch.Tensor, multiply: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        rank, ranks = group_rank(self.group), group_size(self.group)
        pieces = h.tensor_split(ranks)
        if not self.sequence_parallel:
            sums = [self.start_sum(multiply(piece)) for piece in pieces]
            return joined([pending.wait() for pending in sums])
        arriving: dict[int, Pending] = {}
        for step in range(1, ranks):
            theirs = multiply(pieces[(rank + step) % ranks])
            arriving[(rank - step) % ranks] = start_exchange(
                theirs, torch.empty_like(theirs), step, self.group
            )
        own = multiply(pieces[rank])
        terms = [own if r == rank else arriving[r].wait() for r in range(ranks)]
        for term in terms[1:]:
            terms[0] += term
        return terms[0]

    def row_gradients(
        self,
        dy: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: Callable[[torch.Tensor, int], Made],
    ) -> tuple[Made, torch.Tensor, Gradient]:
        made, whole = self.gather_product(dy, multiply)
        return made, whole, None if bias is None else bias_gradient(bias, dy)
