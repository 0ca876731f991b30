"""Bytes and seconds of rounds on a described network, and the effect of rounds on a tensor."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from refused import check

from warpweave.parallel.algorithms import direct, doubling, rooted
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.hierarchical import hierarchical
from warpweave.parallel.algorithms.network import Network, Traffic, traffic
from warpweave.parallel.algorithms.rounds import (
    Algorithm,
    Recv,
    Round,
    Rounds,
    Send,
    among,
    part,
    reverse,
)
from warpweave.parallel.algorithms.trees import binary_tree, double_binary_tree
from warpweave.parallel.messages import run_in_process
from warpweave.parallel.run_collective import collective_steps, run_collective

# Messages (source, dest, elements, whether they are added) of five ranks in three rounds.
MESSAGES = [
    [(0, 1, 4, False), (3, 2, 6, True)],
    [(1, 4, 0, True)],  # empty: not a round
    [(0, 2, 3, False), (1, 3, 5, True), (4, 3, 2, True), (2, 3, 1, False)],
]


def _algorithm(rounds: list[list[tuple[int, int, int, bool]]]) -> Algorithm:
    def of_rank(rank: int, ranks: int, n: int) -> Rounds:
        for messages in rounds:
            sends = [Send(to, 0, size) for source, to, size, _ in messages if source == rank]
            receives = [Recv(at, 0, size, adds) for at, to, size, adds in messages if to == rank]
            yield Round(tuple(sends), tuple(receives))

    return of_rank


@pytest.mark.parametrize(
    ("network", "seconds"),
    [
        # alpha + beta by the bytes of the busiest link + gamma by those that the busiest rank adds
        (Network(1, 10, 100), (1 + 10 * 12 + 100 * 12) + (1 + 10 * 16 + 100 * 14)),
        # ranks 0 and 1, 2 and 3, 4: 20 bytes arrive at the second node in the last round
        (Network(1, 10, 100, node=2, node_alpha=7, node_beta=9), 1321 + (7 + 9 * 20 + 100 * 14)),
        # bytes are free
        (Network(1, 10, 100, node=2, node_alpha=7), 1321 + (7 + 10 * 16 + 100 * 14)),
        (Network(3, 10, 0, node=2, node_alpha=1, node_beta=2), (3 + 10 * 12) + (3 + 10 * 16)),
        # no message leaves its node
        (Network(1, 10, 100, node=9, node_alpha=50, node_beta=50), 2882),
    ],
)  # fmt: skip
def test_bytes_and_seconds_are_those_of_the_busiest_links(network: Network, seconds: float) -> None:
    """This counts links into ranks and nodes, and links out of them,
    because everything is sent back."""
    found = traffic(_algorithm(MESSAGES), 5, 99, network, size=2)
    assert found == Traffic(rounds=2, total=42, busiest=18, at_once=22, seconds=seconds)
    back = [[(to, source, *more) for source, to, *more in messages] for messages in MESSAGES]
    less = 4 * network.gamma  # rank 1 adds at most 5 elements, where rank 3 added 7
    again = traffic(_algorithm(back), 5, 99, network, size=2)
    assert again == replace(found, seconds=seconds - less)


def test_an_element_has_four_bytes_if_nothing_is_said() -> None:
    ring = all_reduces(4)["ring"]
    four, one = (traffic(ring, 4, 8, Network(1, 1), **given) for given in ({}, {"size": 1}))
    assert (four.total, four.busiest, four.at_once) == (4 * 48, 4 * 12, 4 * 8)
    assert one.total == 48


# ---------------------------------------------------------------- valid rounds


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 12])
@pytest.mark.parametrize("n", [0, 1, 6, 7, 100])
def test_parts_follow_each_other_and_differ_by_one(parts: int, n: int) -> None:
    spans = [part(index, parts, n) for index in range(parts)]
    assert (spans[0][0], spans[-1][1]) == (0, n)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    assert max(b - a for a, b in spans) - min(b - a for a, b in spans) <= 1
    assert [part(index - 3 * parts, parts, n) for index in range(parts)] == spans
    assert part(parts, parts, n) == spans[0]


def test_rounds_go_back_and_among_other_ranks() -> None:
    first = Round((Send(1, 0, 3), Send(2, 3, 5)), (Recv(2, 5, 6, False), Recv(2, 0, 1, False)))
    second = Round((Send(2, 1, 2),))
    there = [first, second]
    back = [
        Round((), (Recv(2, 1, 2, True),)),
        Round((Send(2, 5, 6), Send(2, 0, 1)), (Recv(1, 0, 3, True), Recv(2, 3, 5, True))),
    ]
    assert list(reverse(there, adds=True)) == back
    assert [r.adds for one in reverse(there, adds=False) for r in one.receives] == [False] * 3
    assert list(among(there, [10, 4, 7], 100)) == [
        Round(
            (Send(4, 100, 103), Send(7, 103, 105)),
            (Recv(7, 105, 106, False), Recv(7, 100, 101, False)),
        ),
        Round((Send(7, 101, 102),)),
    ]


def test_defaults_are_those_that_the_docstrings_name() -> None:
    def rounds(algorithm, ranks: int = 6) -> list[list[Round]]:
        return [list(algorithm(rank, ranks, 24)) for rank in range(ranks)]

    assert rounds(hierarchical) == rounds(partial(hierarchical, node=2))
    assert rounds(binary_tree) == rounds(partial(binary_tree, pieces=1))
    assert rounds(double_binary_tree) == rounds(partial(double_binary_tree, pieces=8))
    for name in ("broadcast", "reduce", "scatter", "gather"):
        algorithm = getattr(rooted, f"binomial_{name}")
        assert rounds(algorithm) == rounds(partial(algorithm, root=0))
    for ranks, node in ((2, 1), (4, 2), (6, 2), (7, 1), (12, 3), (36, 6)):
        assert all_reduces(ranks)["hierarchical"].keywords == {"node": node}
    assert all_reduces(12, 6)["hierarchical"].keywords == {"node": 6}


# ---------------------------------------------------------------- the effect on a tensor


def test_what_is_read_and_written_in_one_round_is_read_first() -> None:
    """Covers an exchange of the same elements, with an overlap of one, and of adjacent ones."""

    def shifted(by: int):
        def rounds(rank: int, ranks: int, n: int) -> Rounds:
            peer = 1 - rank
            yield Round((Send(peer, 2, 4),), (Recv(peer, 2 + by, 4 + by, False),))

        return rounds

    for by in (-2, -1, 0, 1, 2):
        xs = [torch.arange(6) + 10 * rank for rank in range(2)]
        steps = [collective_steps(r, shifted(by)(r, 2, 6), x.clone()) for r, x in enumerate(xs)]
        for rank, found in enumerate(run_in_process(steps)):
            expected = xs[rank].clone()
            expected[2 + by : 4 + by] = xs[1 - rank][2:4]
            assert torch.equal(found, expected), (by, rank)


def test_terms_of_one_round_are_summed_in_rank_order_this_ranks_at_its_place() -> None:
    """This holds for any order in which they are listed, with other
    elements stored next to them."""
    xs = [torch.tensor([x, 7.0]) for x in (1e8, 3.0, -1e8, 0.25)]
    whole = ((xs[0] + xs[1]) + xs[2]) + xs[3]
    for rank in range(4):
        others = [r for r in (2, 0, 3, 1) if r != rank]
        sends, adds = (Send(rank, 0, 1),), tuple(Recv(other, 0, 1, True) for other in others)
        rounds = [Round((), adds) if r == rank else Round(sends) for r in range(4)]
        steps = [collective_steps(r, [rounds[r]], x.clone()) for r, x in enumerate(xs)]
        found = run_in_process(steps)
        assert found[rank].tolist() == [float(whole[0]), 7.0], rank


def test_what_cannot_run_is_refused() -> None:
    flat = doubling.recursive_doubling(0, 1, 4)
    for x, words in (
        (torch.zeros(4), None),
        (torch.zeros(8)[::2], r"got shape \[4\] with strides \[2\]$"),
        (torch.zeros(2, 2), r"got shape \[2, 2\] with strides \[2, 1\]$"),
        (torch.zeros(()), r"got shape \[\] with strides \[\]$"),
    ):
        check(lambda x=x: list(collective_steps(0, flat, x)), words)
    x = torch.zeros(8)[::2]
    assert run_collective(direct.ordered, x, None) is x
    for node in (1, 4):
        check(lambda node=node: list(hierarchical(0, 4, 8, node=node)), None)
    for node in (-2, 0, 3):
        words = f"4 ranks are not divisible by {node} ranks per node"
        check(lambda node=node, words=words: list(hierarchical(0, 4, 8, node=node)), words)
    for pieces, words in ((0, "at least 1, got 0"), (-1, "at least 1, got -1"), (1, None)):
        for tree in (binary_tree, double_binary_tree):
            check(lambda p=pieces, t=tree: list(t(0, 4, 8, pieces=p)), words)
    for n, words in ((6, None), (0, None), (7, "7 elements are not divisible by the 3 ranks")):
        check(lambda n=n: list(direct.pairwise_all_to_all(1, 3, n)), words)
