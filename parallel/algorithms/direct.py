"""Collectives whose messages go directly from their first owner to their last.

    all-reduce    rounds      elements sent by the busiest rank, and by all
    `naive`       2 (R - 1)   (R - 1) n              2 (R - 1) n     one message at a time
    `parallel`    1           (R - 1) n              R (R - 1) n     all at once
    `ordered`     2           2 (R - 1)/R n          2 (R - 1) n     a reduce-scatter, an all-gather

`naive` is slow because of its many rounds, `parallel` because of its bytes. `ordered` has as few
bytes as a ring if the network carries all pairs of ranks at once. It sums every element in rank
order.
"""

from __future__ import annotations

from itertools import chain

from warpweave.parallel.algorithms.rounds import Recv, Round, Rounds, Send, part, reverse


def _one_after_another(rank: int, ranks: int, n: int) -> Rounds:
    """x[n] of rank 0 to rank 1, then to rank 2, ..."""
    for peer in range(1, ranks):
        if rank == 0:
            yield Round((Send(peer, 0, n),))
        else:
            yield Round((), (Recv(0, 0, n, False),) if rank == peer else ())


def naive(rank: int, ranks: int, n: int) -> Rounds:
    """All-reduce through rank 0: ranks send to it one by one, then receive from it one by one."""
    there = reverse(_one_after_another(rank, ranks, n), adds=True)
    return chain(there, _one_after_another(rank, ranks, n))


def _peers(rank: int, ranks: int) -> list[tuple[int, int]]:
    """(rank + k, rank - k) modulo the ranks, for k = 1 to R - 1, so no two ranks begin with the
    same peer."""
    return [((rank + k) % ranks, (rank - k) % ranks) for k in range(1, ranks)]


def parallel(rank: int, ranks: int, n: int) -> Rounds:
    """All-reduce in which every rank sends its whole vector to every other rank."""
    peers = _peers(rank, ranks)
    yield Round(
        tuple(Send(to, 0, n) for to, _ in peers),
        tuple(Recv(source, 0, n, True) for _, source in peers),
    )


def direct_all_gather(rank: int, ranks: int, n: int) -> Rounds:
    """Send part r of x[n] of each rank r to all ranks, in one round."""
    peers = _peers(rank, ranks)
    yield Round(
        tuple(Send(to, *part(rank, ranks, n)) for to, _ in peers),
        tuple(Recv(source, *part(source, ranks, n), False) for _, source in peers),
    )


def direct_reduce_scatter(rank: int, ranks: int, n: int) -> Rounds:
    """Sum part r of x[n] over the ranks, x0 + x1 + x2 + ..., on rank r, in one round."""
    return reverse(direct_all_gather(rank, ranks, n), adds=True)


def ordered(rank: int, ranks: int, n: int) -> Rounds:
    """All-reduce that sums the terms of every element in rank order."""
    return chain(direct_reduce_scatter(rank, ranks, n), direct_all_gather(rank, ranks, n))


def pairwise_all_to_all(rank: int, ranks: int, n: int) -> Rounds:
    """Exchange part b of rank a's x[n] for part a of rank b's, in R rounds between pairs.

    In round i, rank r and rank i - r (modulo R) exchange, so no part is overwritten before it is
    sent. If the number of ranks is odd, one rank has no peer in each round.

    Raises ValueError if n is not divisible by R.
    """
    if n % ranks:
        raise ValueError(
            f"pairwise_all_to_all: {n} elements are not divisible by the {ranks} ranks"
        )
    for index in range(ranks):
        peer = (index - rank) % ranks
        span = part(peer, ranks, n)
        both = (Send(peer, *span),), (Recv(peer, *span, False),)
        yield Round() if peer == rank else Round(*both)
