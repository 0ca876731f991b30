"""All-reduce up and down a binary tree, and two of them at once (Sanders, Speck & Träff 2009,
Parallel Computing 35:581), pipelined.

    tree of eight ranks                      its mirror image: ranks counted from the other end
    0 --- 4 --+-- 2 --+-- 1                  7 --- 3 --+-- 5 --+-- 6
              |       +-- 3                            |       +-- 4
              +-- 6 --+-- 5                            +-- 1 --+-- 2
                      +-- 7                                    +-- 0

x is cut into pieces. A rank adds its children's piece to its own and sends it to its parent, while
the piece after it arrives; the root sends whole pieces down again. Of depth D and with c pieces
that takes 2 D + c - 1 rounds. An inner rank of one tree sends and receives 3 n elements (one up and
two down, two and one), a leaf n. Where each of two trees carries a half of x, the inner ranks of
one are the leaves of the other, and every rank but the roots sends and receives 2 n.
"""

from __future__ import annotations

from warpweave.parallel.algorithms.rounds import Recv, Round, Rounds, Send, part


def _parent(at: int, ranks: int) -> int:
    """Of rank `at` > 0: the tree of in-order numbers, in which odd ranks are leaves and 0 the root.

    At its lowest set bit b, `at` is the left or right child of the number whose lowest set bit is
    2 b; what is beyond the last rank is left out.
    """
    lowest = at & -at
    above = (at ^ lowest) | (2 * lowest)
    return above if above < ranks else at ^ lowest


def _tree(names: list[int], rank: int, span: tuple[int, int], pieces: int) -> Rounds:
    """All-reduce of x[span] along the tree whose number i is rank names[i]."""
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
        down = step - height[0] - depth[at]  # the piece that is sent to children
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
    """All-reduce of either half of x along a tree of its own, `pieces` to a half.

    The second tree is the first with ranks counted from the other end; of an odd number of ranks,
    where that would keep odd numbers odd, it is the first moved on by one.

    Raises ValueError if `pieces` is not positive.
    """
    first = list(range(ranks))
    second = first[1:] + first[:1] if ranks % 2 else first[::-1]
    trees = (
        _tree(names, rank, part(half, 2, n), _positive(pieces))
        for half, names in enumerate((first, second))
    )
    for one, other in zip(*trees, strict=True):
        yield Round(one.sends + other.sends, one.receives + other.receives)


def _positive(pieces: int) -> int:
    if pieces < 1:
        raise ValueError(f"pieces must be at least 1, got {pieces}")
    return pieces
