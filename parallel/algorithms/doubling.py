"""All-reduce by recursive doubling, and by recursive halving and doubling (Rabenseifner 2004, ICCS;
Thakur et al. 2005, IJHPCA 19:49).

    four ranks; the peer and what is sent to it: all of x, or the listed quarters of it
               recursive doubling             halving, then doubling
               rank 0   1    2    3           rank 0    rank 1    rank 2    rank 3
    round 0    1 all    0    3    2           2: 2 3    3: 2 3    0: 0 1    1: 0 1     adds
    round 1    2 all    3    0    1           1: 1      0: 0      3: 3      2: 2       adds
    round 2                                   1: 0      0: 1      3: 2      2: 3
    round 3                                   2: 0 1    3: 0 1    0: 2 3    1: 2 3

Recursive doubling takes log2 R rounds of n elements. Halving-doubling takes 2 log2 R rounds and
2 (R - 1)/R n elements in all. If R is not a power of two, let P be the greatest power of two below
it. Ranks from P on first send their vectors to a rank below P, which adds them, and receive the sum
at the end: two more rounds of n elements.
"""

from __future__ import annotations

from itertools import chain

from warpweave.parallel.algorithms.rounds import Algorithm, Recv, Round, Rounds, Send, part, reverse


def _folded(rank: int, ranks: int, n: int, algorithm: Algorithm) -> Rounds:
    """Run `algorithm` on the greatest power of two of ranks; each other rank goes through one."""
    power = 1 << (ranks.bit_length() - 1)
    if power == ranks:
        yield from algorithm(rank, ranks, n)
    elif rank < power:
        extra = rank + power
        yield Round((), (Recv(extra, 0, n, True),) if extra < ranks else ())
        yield from algorithm(rank, power, n)
        yield Round((Send(extra, 0, n),) if extra < ranks else ())
    else:
        other = rank - power
        yield Round((Send(other, 0, n),))
        yield from (Round() for _ in algorithm(other, power, n))
        yield Round((), (Recv(other, 0, n, False),))


def _exchanges_of_all(rank: int, ranks: int, n: int) -> Rounds:
    for bit in range(ranks.bit_length() - 1):
        peer = rank ^ (1 << bit)
        yield Round((Send(peer, 0, n),), (Recv(peer, 0, n, True),))


def _doubling_gather(rank: int, ranks: int, n: int) -> Rounds:
    """All-gather: a rank has 1, 2, 4, ... adjacent parts, and exchanges them for as many."""
    for bit in range(ranks.bit_length() - 1):
        size, peer = 1 << bit, rank ^ (1 << bit)
        firsts = (at - at % size for at in (rank, peer))
        goes, comes = ((part(a, ranks, n)[0], part(a + size - 1, ranks, n)[1]) for a in firsts)
        yield Round((Send(peer, *goes),), (Recv(peer, *comes, False),))


def _halving_doubling(rank: int, ranks: int, n: int) -> Rounds:
    halving = reverse(_doubling_gather(rank, ranks, n), adds=True)
    return chain(halving, _doubling_gather(rank, ranks, n))


def recursive_doubling(rank: int, ranks: int, n: int) -> Rounds:
    """All-reduce in which ranks 1, 2, 4, ... apart exchange their partial sums."""
    return _folded(rank, ranks, n, _exchanges_of_all)


def halving_doubling(rank: int, ranks: int, n: int) -> Rounds:
    """All-reduce as a reduce-scatter by recursive halving and an all-gather by doubling."""
    return _folded(rank, ranks, n, _halving_doubling)
