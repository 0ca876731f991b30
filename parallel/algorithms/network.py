"""Rounds, bytes and seconds of a collective on a described network, without sending anything.

The model is α-β-γ (Hockney 1994, Thakur et al. 2005): a round lasts α, and β for every byte over
its busiest link, and γ for every byte that the busiest rank adds. A rank has one link into the
network and one out of it; a node, where several ranks share one, has such a pair, too, which
messages between nodes take.

    two nodes of two ranks; a message from rank 0 to rank 3 loads the three links marked #
    rank 0 -#-+                +-#- rank 3
              +-- node -#- node
    rank 1 ---+                +--- rank 2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from warpweave.parallel.algorithms.rounds import Algorithm, Round


@dataclass(frozen=True)
class Network:
    """Seconds of a message and of a byte.

    Attributes:
        alpha: seconds of a round without bytes, within a node.
        beta: seconds per byte over a rank's link, either way.
        gamma: seconds per byte that a rank adds.
        node: ranks of a node; None if all share one.
        node_alpha: seconds of a round, without bytes, in which a message leaves its node.
        node_beta: seconds per byte over the link that all ranks of a node share.
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    node: int | None = None
    node_alpha: float = 0.0
    node_beta: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """What a collective moves, in bytes, and how long it takes.

    Attributes:
        rounds: in which anything is sent.
        total: over all ranks and rounds.
        busiest: over the link, either way, that carries most.
        at_once: in the round that moves most, over all ranks.
        seconds: on the network.
    """

    rounds: int
    total: int
    busiest: int
    at_once: int
    seconds: float


class _Links:
    """Elements over the link out of each rank or node and the one into it."""

    def __init__(self, count: int) -> None:
        self.out, self.into = [0] * count, [0] * count

    def carry(self, source: int, dest: int, elements: int) -> None:
        self.out[source] += elements
        self.into[dest] += elements

    def add(self, other: _Links) -> None:
        self.out = list(map(int.__add__, self.out, other.out))
        self.into = list(map(int.__add__, self.into, other.into))

    @property
    def busiest(self) -> int:
        return max(*self.out, *self.into)


def traffic(
    algorithm: Algorithm, ranks: int, n: int, network: Network, *, size: int = 4
) -> Traffic:
    """Traffic of `algorithm` over x[n], elements of `size` bytes, on each of `ranks` ranks.

    Raises:
        ValueError: in some round a rank is sent what it does not receive, or ranks have unequally
        many rounds; names the round and the rank.
    """
    node = network.node or ranks
    whole, at_once, seconds = _Links(ranks), [], 0.0
    for step, rounds in enumerate(_together(algorithm, ranks, n)):
        near, far, added = _Links(ranks), _Links(-(-ranks // node)), 0
        for source, (sends, _) in enumerate(rounds):
            for dest, start, stop in sends:
                near.carry(source, dest, stop - start)
                if source // node != dest // node:
                    far.carry(source // node, dest // node, stop - start)
        for rank, (_, receives) in enumerate(rounds):
            if near.into[rank] != sum(r.stop - r.start for r in receives):
                raise ValueError(f"round {step}: what rank {rank} is sent is not what it receives")
            added = max(added, sum(r.stop - r.start for r in receives if r.adds))
        if not near.busiest:
            continue
        whole.add(near)
        at_once.append(sum(near.out))
        seconds += max(network.alpha, network.node_alpha if far.busiest else 0.0)
        seconds += size * max(near.busiest * network.beta, far.busiest * network.node_beta)
        seconds += size * added * network.gamma
    return Traffic(
        rounds=len(at_once),
        total=size * sum(at_once),
        busiest=size * whole.busiest,
        at_once=size * max(at_once, default=0),
        seconds=seconds,
    )


def _together(algorithm: Algorithm, ranks: int, n: int) -> Iterator[list[Round]]:
    """The rounds of all ranks, moment by moment."""
    every = [algorithm(rank, ranks, n) for rank in range(ranks)]
    for step in count():
        rounds = [next(rounds, None) for rounds in every]
        there = [r for r in rounds if r is not None]
        if not there:
            return
        if len(there) < ranks:
            raise ValueError(f"round {step}: rank {rounds.index(None)} has no more, others have")
        yield there
