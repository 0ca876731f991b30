"""All-reduce up and down a binary tree, or two at once (Sanders, Speck & Träff 2009, Parallel
Computing 35:581), pipelined.

    tree of eight ranks                      its mirror image: ranks counted from the other end
    0 --- 4 --+-- 2 --+-- 1                  7 --- 3 --+-- 5 --+-- 6
              |       +-- 3                            |       +-- 4
              +-- 6 --+-- 5                            +-- 1 --+-- 2
                      +-- 7                                    +-- 0

x is cut into pieces. A rank adds its children's piece to its own and sends the sum to its parent
while the next piece arrives. The root sends whole pieces down again. With depth D and c pieces this
takes 2 D + c - 1 rounds. An inner rank of one tree sends 3 n elements and receives 3 n (one up and
two down, two up and one down); a leaf sends and receives n. With two trees, each carries half of x
and the inner ranks of one are the leaves of the other. Every rank except the roots then sends and
receives 2 n.
"""

from __future__ import annotations

from warpweave.parallel.algorithms.rounds import Recv, Round, Rounds, Send, part


def _parent(at: int, ranks: int) -> int:
    """The parent of rank `at` > 0 in the in-order numbered tree: odd ranks are leaves, 0 the root.

    If the lowest set bit of `at` is b, then `at` is the left or right child of the number whose
    lowest set bit is 2 b. Numbers beyond the last rank are skipped.
    """
    lowest = at & -at
    above = (at ^ lowest) | (2 * lowest)
    return above if above < ranks else at ^ lowest


def _tree(names: list[int], rank: int, span: tuple[int, int], pieces: int) -> Rounds:
    """All-reduce x[span] along the tree whose node i is rank names[i]."""
    ranks, at = len(names), names.index(rank)
    parents = [0] + [_parent(i, ranks) for i in range(1, ranks)]
    height, depth = [0] * ranks, [0] * ranks  # distance to the furthest leaf below, and to the root
    for i in range(ranks):
        above = i
        while above > 0:
            above, depth[i] = parents[above], depth[i] + 1
            height[above] = max(height[above], depth[i])
    children = [i for i in range(1, ranks) if parents[i] == at]
    slices = [part(j, pieces, span[1] - span[0]) for j in range(pieces)]

    def piece(j: int) -> list[tuple[int, int]]:
        return [(span[0] + a, span[0] + b) for a, b in slices[j : j + 1]] if j >= 0 else []

    for step in range(2 * height[0] + pieces - 1):
        down = step - height[0] - depth[at]  # the piece that goes to the children
        sends = [Send(names[c], *s) for c in children for s in piece(down)]
        receives = [Recv(names[c], *s, True) for c in children for s in piece(step - height[c])]
        if at > 0:
            sends += [Send(names[parents[at]], *s) for s in piece(step - height[at])]
            receives += [Recv(names[parents[at]], *s, False) for s in piece(down + 1)]
        yield Round(tuple(sends), tuple(receives))


def binary_tree(rank: int, ranks: int, n: int, pieces: int = 1) -> Rounds:
    """All-reduce to rank 0 along a binary tree, and back.

    Raises ValueError if `pieces` is not positive.
    """
    return _tree(list(range(ranks)), rank, (0, n), _positive(pieces))


def double_binary_tree(rank: int, ranks: int, n: int, pieces: int = 8) -> Rounds:
    """All-reduce each half of x along a separate tree, with `pieces` pieces per half.

    The second tree is the first one with ranks counted from the other end. If the number of ranks
    is odd, that would keep odd numbers odd, so the second tree is the first one shifted by one.

    Raises ValueError if `pieces` is not positive.
    """
    first = list(range(ranks))
    second = first[1:] + first[:1] if ranks % 2 else first[::-1]
    halves = enumerate((first, second))
    trees = (_tree(x, rank, part(half, 2, n), _positive(pieces)) for half, x in halves)
    for one, other in zip(*trees, strict=True):
        yield Round(one.sends + other.sends, one.receives + other.receives)


def _positive(pieces: int) -> int:
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    return pieces
