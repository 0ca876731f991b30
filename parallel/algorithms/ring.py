"""All-gather, reduce-scatter and all-reduce around a ring (Patarasuk & Yuan 2009, JPDC 69:117).

    all-gather on four ranks: the part of x that goes from rank r to rank r + 1
               rank 0 -> 1    1 -> 2    2 -> 3    3 -> 0
    round 0        0            1         2         3
    round 1        3            0         1         2
    round 2        2            3         0         1

R - 1 rounds of n/R elements to one neighbor: (R - 1)/R n in all, which is the minimum.
"""

from __future__ import annotations

from itertools import chain

from warpweave.parallel.algorithms.rounds import Recv, Round, Rounds, Send, part, reverse


def ring_all_gather(rank: int, ranks: int, n: int) -> Rounds:
    """Send part r of x[n] of each rank r to all ranks."""
    right, left = (rank + 1) % ranks, (rank - 1) % ranks
    for step in range(ranks - 1):
        goes, comes = part(rank - step, ranks, n), part(rank - step - 1, ranks, n)
        yield Round((Send(right, *goes),), (Recv(left, *comes, False),))


def ring_reduce_scatter(rank: int, ranks: int, n: int) -> Rounds:
    """Sum part r of x[n] over the ranks, on rank r; other parts hold partial sums."""
    return reverse(ring_all_gather(rank, ranks, n), adds=True)


def ring_all_reduce(rank: int, ranks: int, n: int) -> Rounds:
    """Sum x[n] over the ranks, on all: 2 (R - 1) rounds, 2 (R - 1)/R n elements sent."""
    return chain(ring_reduce_scatter(rank, ranks, n), ring_all_gather(rank, ranks, n))
