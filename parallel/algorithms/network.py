"""Rounds, bytes and seconds of a collective on a described network, without sending anything.

The model is α-β-γ (Hockney 1994, Thakur et al. 2005). A round takes α, plus β for every byte over
its busiest link, plus γ for every byte that the busiest rank adds. A rank has one link into the
network and one out of it. A node that several ranks share also has such a pair of links, which
carries the messages between nodes.

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
    """The time that messages, bytes and additions take.

    Attributes:
        alpha: seconds per round within a node, without bytes.
        beta: seconds per byte over a rank's link, in either direction.
        gamma: seconds per byte that a rank adds.
        node: ranks per node; None if all ranks share one node.
        node_alpha: seconds per round, without bytes, in which a message leaves its node.
        node_beta: seconds per byte over the link that all ranks of a node share.

    Examples:
        >>> Network(alpha=5e-6, beta=1 / 50e9, node=8, node_alpha=2e-5, node_beta=1 / 25e9).node
        8
    """

    alpha: float
    beta: float
    gamma: float = 0.0
    node: int | None = None
    node_alpha: float = 0.0
    node_beta: float = 0.0


@dataclass(frozen=True)
class Traffic:
    """The bytes that a collective moves, and the time that it takes.

    Attributes:
        rounds: number of rounds in which anything is sent.
        total: bytes over all ranks and rounds.
        busiest: bytes over the busiest link, in its busier direction.
        at_once: bytes over all ranks in the round that moves the most.
        seconds: time on the network.

    Examples:
        >>> from warpweave.parallel.algorithms.network import Network, traffic
        >>> from warpweave.parallel.algorithms.ring import ring_all_reduce
        >>> found = traffic(ring_all_reduce, 4, 1024, Network(alpha=5e-6, beta=2e-11))
        >>> found.rounds, found.total
        (6, 24576)
    """

    rounds: int
    total: int
    busiest: int
    at_once: int
    seconds: float


class _Links:
    """Elements over the link out of, and the link into, each rank or node."""

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
    """Return the traffic of `algorithm` over x[n], with elements of `size` bytes, on `ranks` ranks.

    Raises:
        ValueError: in some round a rank does not receive what it is sent, or ranks have different
            numbers of rounds; the error names the round and the rank.

    Examples:
        >>> from warpweave.parallel.algorithms.network import Network
        >>> from warpweave.parallel.algorithms.ring import ring_all_reduce
        >>> found = traffic(ring_all_reduce, 4, 1024, Network(alpha=5e-6, beta=2e-11))
        >>> found.busiest
        6144
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
                raise ValueError(
                    f"round {step}: rank {rank} does not receive exactly what is sent to it"
                )
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
    """The rounds of all ranks, one round of each at a time."""
    every = [algorithm(rank, ranks, n) for rank in range(ranks)]
    for step in count():
        rounds = [next(rounds, None) for rounds in every]
        there = [r for r in rounds if r is not None]
        if not there:
            return
        if len(there) < ranks:
            raise ValueError(
                f"round {step}: rank {rounds.index(None)} has no more rounds, but other ranks do"
            )
        yield there
