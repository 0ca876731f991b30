"""Broadcast, reduce, scatter and gather along a binomial tree (Thakur et al. 2005, IJHPCA 19:49).

    broadcast from rank 0 of eight: the messages of each round
    round 0    0 -> 4
    round 1    0 -> 2    4 -> 6
    round 2    0 -> 1    2 -> 3    4 -> 5    6 -> 7

ceil(log2 R) rounds, for any R. The root of a broadcast sends n elements per round. A scatter sends
each rank only what it and the ranks below it will keep, (R - 1)/R n in all. Ranks are counted from
the root, so the tree is the same for every root.
"""

from __future__ import annotations

from collections.abc import Callable

from warpweave.parallel.algorithms.rounds import Recv, Round, Rounds, Send, part, reverse

Slices = list[tuple[int, int]]


def _down(rank: int, ranks: int, root: int, slices: Callable[[int, int], Slices]) -> Rounds:
    """Send down the tree from its root. slices(first, count) returns the slices for the `count`
    ranks from `first` on, counted from the root."""
    at, step = (rank - root) % ranks, 1 << (ranks - 1).bit_length()
    while step := step // 2:
        below = min(step, ranks - at - step)  # size of the receiver's subtree
        if at % (2 * step) == 0 and below > 0:
            peer = (at + step + root) % ranks
            yield Round(tuple(Send(peer, *span) for span in slices(at + step, below)))
        elif at % (2 * step) == step:
            peer, own = (at - step + root) % ranks, min(step, ranks - at)
            yield Round((), tuple(Recv(peer, *span, False) for span in slices(at, own)))
        else:
            yield Round()


def binomial_broadcast(rank: int, ranks: int, n: int, root: int = 0) -> Rounds:
    """Send x[n] of rank `root` to all ranks."""
    return _down(rank, ranks, root, lambda first, count: [(0, n)])


def binomial_reduce(rank: int, ranks: int, n: int, root: int = 0) -> Rounds:
    """Sum x[n] over the ranks, on rank `root`; other ranks are left with partial sums."""
    return reverse(binomial_broadcast(rank, ranks, n, root), adds=True)


def binomial_scatter(rank: int, ranks: int, n: int, root: int = 0) -> Rounds:
    """Send part r of x[n] of rank `root` to rank r; other parts are overwritten on the way."""

    def slices(first: int, count: int) -> Slices:
        start = (first + root) % ranks
        stop = min(start + count, ranks)  # ranks counted from the root may wrap around to 0
        spans = [(start, stop)] + [(0, start + count - ranks)] * (start + count > ranks)
        return [(part(a, ranks, n)[0], part(b - 1, ranks, n)[1]) for a, b in spans]

    return _down(rank, ranks, root, slices)


def binomial_gather(rank: int, ranks: int, n: int, root: int = 0) -> Rounds:
    """Send part r of x[n] of each rank r to rank `root`; overwrites other parts on the way."""
    return reverse(binomial_scatter(rank, ranks, n, root), adds=False)
