"""All-reduce within nodes, then across (Jia et al. 2018, arXiv:1807.11205; BlueConnect, Cho et al.
2019, MLSys).

    two nodes of two ranks; x of rank r is [ar br]
                          rank 0       rank 1       rank 2       rank 3
    reduce-scatter        a0+a1        b0+b1        a2+a3        b2+b3         within a node
    all-reduce            a            b            a            b             0 with 2, 1 with 3
    all-gather            [a b]        [a b]        [a b]        [a b]         within a node

Each stage is a ring. With L ranks to a node, a rank sends 2 (L - 1)/L n elements within its node,
and only 2 (R/L - 1)/R n across.
"""

from __future__ import annotations

from itertools import chain

from warpweave.parallel.algorithms import ring
from warpweave.parallel.algorithms.rounds import Rounds, among, part


def hierarchical(rank: int, ranks: int, n: int, node: int = 2) -> Rounds:
    """The sum of x[n] over the ranks, on all; `node` consecutive ranks share a node.

    Raises ValueError if `node` does not divide the ranks.
    """
    if node < 1 or ranks % node:
        raise ValueError(f"hierarchical: nodes of {node} do not divide {ranks} ranks")
    local, host = rank % node, rank // node
    near = range(host * node, (host + 1) * node)
    start, stop = part(local, node, n)
    return chain(
        among(ring.ring_reduce_scatter(local, node, n), near),
        among(
            ring.ring_all_reduce(host, ranks // node, stop - start),
            range(local, ranks, node),
            start,
        ),
        among(ring.ring_all_gather(local, node, n), near),
    )
