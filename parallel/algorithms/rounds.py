"""Collectives as data: what each rank sends and receives in each round.

This file uses only the standard library. Every rank holds a vector x[n], which a collective changes
in place. An algorithm is a function from (rank, ranks, n) to that rank's rounds; every rank has the
same number of rounds. The messages of round t of all ranks are in flight at the same time. A rank
without messages in a round proceeds to its next round. ``run_collective`` moves tensors according
to the rounds; ``network`` counts rounds, bytes and seconds.

    ``ring.ring_all_gather(rank, 4, n)``: the part of x that arrives, and the rank it comes from
               rank 0        rank 1        rank 2        rank 3
    round 0    3 from 3      0 from 0      1 from 1      2 from 2
    round 1    2 from 3      3 from 0      0 from 1      1 from 2
    round 2    1 from 3      2 from 0      3 from 1      0 from 2

Two dual collectives consist of the same messages, sent back in reverse order (`reverse`). The dual
of a scatter is a gather, that of a broadcast is a reduction (with sums), and that of an all-gather
is a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple


class Send(NamedTuple):
    """A message of x[start:stop], as it was before the round, to rank `dest`."""

    dest: int
    start: int
    stop: int


class Recv(NamedTuple):
    """A message from rank `source`, stored in x[start:stop] or added to it.

    Terms of the same elements that arrive in one round are summed in rank order, including this
    rank's own term, so the bits do not depend on which message arrives first.
    """

    source: int
    start: int
    stop: int
    adds: bool


class Round(NamedTuple):
    """The messages of one rank that are in flight at the same time.

    Messages from one rank to another arrive in the order in which both ranks list them.
    """

    sends: tuple[Send, ...] = ()
    receives: tuple[Recv, ...] = ()


Rounds = Iterator[Round]
Algorithm = Callable[[int, int, int], Rounds]  # (rank, ranks, n)


def part(index: int, parts: int, n: int) -> tuple[int, int]:
    """Start and stop of the part of x[n] with this index (modulo `parts`). Sizes differ by at most
    one."""
    index %= parts
    return index * n // parts, (index + 1) * n // parts


def reverse(rounds: Iterable[Round], *, adds: bool) -> Rounds:
    """Return the dual of a collective that only stores: every message goes back, the last round
    first. With `adds`, what arrives is added: the dual of a copy to many ranks is a sum over them.
    """
    for sends, receives in reversed(list(rounds)):
        yield Round(
            tuple(Send(source, start, stop) for source, start, stop, _ in receives),
            tuple(Recv(dest, start, stop, adds) for dest, start, stop in sends),
        )


def among(rounds: Iterable[Round], members: Sequence[int], offset: int = 0) -> Rounds:
    """Run `rounds` of len(members) ranks on these `members`, on the elements from `offset` on."""
    for sends, receives in rounds:
        yield Round(
            tuple(Send(members[to], offset + a, offset + b) for to, a, b in sends),
            tuple(Recv(members[of], offset + a, offset + b, adds) for of, a, b, adds in receives),
        )
