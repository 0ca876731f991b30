"""The all-reduce algorithms by name.

n elements on each of R ranks. Values are multiples of n; R is a power of two, p = log2 R.

    name                  rounds          sent or received        sent by all
                                          by the busiest rank
    naive                 2 (R - 1)       R - 1                   2 (R - 1)
    parallel              1               R - 1                   R (R - 1)
    ordered               2               2 (R - 1)/R             2 (R - 1)
    ring                  2 (R - 1)       2 (R - 1)/R             2 (R - 1)
    recursive doubling    p               p                       R p
    halving-doubling      2 p             2 (R - 1)/R             2 (R - 1)
    binary tree           2 p             3                       2 (R - 1)
    double binary tree    2 p + c - 1     2                       2 (R - 1)       c pieces
    hierarchical          2 (L + R/L) - 4 2 (R - 1)/R             2 (R - 1)       nodes of L
"""

from __future__ import annotations

from functools import partial

from warpweave.parallel.algorithms.direct import naive, ordered, parallel
from warpweave.parallel.algorithms.doubling import halving_doubling, recursive_doubling
from warpweave.parallel.algorithms.hierarchical import hierarchical
from warpweave.parallel.algorithms.ring import ring_all_reduce
from warpweave.parallel.algorithms.rounds import Algorithm
from warpweave.parallel.algorithms.trees import binary_tree, double_binary_tree


def all_reduces(ranks: int, node: int | None = None) -> dict[str, Algorithm]:
    """Return every algorithm that runs on `ranks` ranks, by name.

    Args:
        node: ranks per node, for the hierarchical algorithm. None means the largest divisor of
            `ranks` that is at most its square root.

    Examples:
        >>> sorted(all_reduces(4))[:3]
        ['binary tree', 'double binary tree', 'halving-doubling']
    """
    if node is None:
        node = max(k for k in range(1, ranks + 1) if ranks % k == 0 and k * k <= ranks)
    return {
        "naive": naive,
        "parallel": parallel,
        "ordered": ordered,
        "ring": ring_all_reduce,
        "recursive doubling": recursive_doubling,
        "halving-doubling": halving_doubling,
        "binary tree": binary_tree,
        "double binary tree": double_binary_tree,
        "hierarchical": partial(hierarchical, node=node),
    }
