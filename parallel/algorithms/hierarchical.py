"""All-reduce within nodes, then across (Jia et al. 2018, arXiv:1807.11205; BlueConnect, Cho et al.
2019, MLSys).

    two nodes of two ranks; x of rank r is [ar br]
                          rank 0       rank 1       rank 2       rank 3
    reduce-scatter        a0+a1        b0+b1        a2+a3        b2+b3         within a node
    all-reduce            a            b            a            b             0 with 2, 1 with 3
    all-gather            [a b]        [a b]        [a b]        [a b]         within a node

Each stage is a ring. With L ranks per node, a rank sends 2 (L - 1)/L n elements within its node,
but only 2 (R/L - 1)/R n across nodes.
"""

from __future__ import annotations

from itertools import chain

from warpweave.parallel.algorithms import ring
from warpweave.parallel.algorithms.rounds import Rounds, among, part


def hierarchical(rank: int, ranks: int, n: int, node: int = 2) -> Rounds:
    """Sum x[n] over all ranks, for all ranks; `node` consecutive ranks share a node.

    Raises ValueError if the number of ranks is not divisible by `node`.
    """
    if node < 1 or ranks % node:
        raise ValueError(f"hierarchical: {ranks} ranks are not divisible by {node} ranks per node")
    local, host = rank % node, rank // node
    near = range(host * node, (host + 1) * node)
    start, stop = part(local, node, n)
    across = ring.ring_all_reduce(host, ranks // node, stop - start)
    return chain(
        among(ring.ring_reduce_scatter(local, node, n), near),
        among(across, range(local, ranks, node), start),
        among(ring.ring_all_gather(local, node, n), near),
    )
