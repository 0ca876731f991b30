"""A collective as data: what each rank sends and receives in each round, of the standard library
alone.

Every rank holds a vector x[n], which a collective changes in place. An algorithm is a function from
(rank, ranks, n) to that rank's rounds, as many on every rank: round t of all is one moment, and its
messages are under way at once. A rank that has none in it goes on to its next. ``run_collective``
moves tensors by the rounds, ``network`` counts rounds, bytes and seconds.

    ``ring.ring_all_gather(rank, 4, n)``; the part of x that arrives, and from whom
               rank 0        rank 1        rank 2        rank 3
    round 0    3 from 3      0 from 0      1 from 1      2 from 2
    round 1    2 from 3      3 from 0      0 from 1      1 from 2
    round 2    1 from 3      2 from 0      3 from 1      0 from 2

Two collectives that are dual are the same messages, sent back in reverse order (`reverse`): a
gather is a scatter's, a reduction is a broadcast's with sums, a reduce-scatter an all-gather's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Send(NamedTuple):
    """x[start:stop], as it was before the round, to rank `dest`."""

    dest: int
    start: int
    stop: int


class Recv(NamedTuple):
    """x[start:stop] from rank `source`: stored, or added to what is there.

    Terms of the same elements that arrive in one round are summed in rank order, this rank's own at
    its place: the bits do not depend on which message is the first.
    """

    source: int
    start: int
    stop: int
    adds: bool


class Round(NamedTuple):
    """The messages of one rank that are under way at once.

    Messages between the same two ranks, in one direction, arrive in the order in which they are
    listed on either side.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Recv, ...] = ()


Rounds = Iterator[Round]
Algorithm = Callable[[int, int, int], Rounds]  # (rank, ranks, n)


def part(index: int, parts: int, n: int) -> tuple[int, int]:
    """Start and stop of the part of x[n] with this index (modulo `parts`); sizes differ by at most
    one."""
    index %= parts
    return index * n // parts, (index + 1) * n // parts


def reverse(rounds: Iterable[Round], *, adds: bool) -> Rounds:
    """The dual collective: every message goes back, the last round first.

    Args:
        rounds: of a collective that only stores.
        adds: what arrives is added: of a copy to many comes a sum of many.
    """
    for sends, receives in reversed(list(rounds)):
        yield Round(
            tuple(Send(source, start, stop) for source, start, stop, _ in receives),
            tuple(Recv(dest, start, stop, adds) for dest, start, stop in sends),
        )


def among(rounds: Iterable[Round], members: Sequence[int], offset: int = 0) -> Rounds:
    """`rounds` of len(members) ranks, run by these `members`, on the elements from `offset` on."""
    for sends, receives in rounds:
        yield Round(
            tuple(Send(members[to], offset + start, offset + stop) for to, start, stop in sends),
            tuple(
                Recv(members[source], offset + start, offset + stop, adds)
                for source, start, stop, adds in receives
            ),
        )
