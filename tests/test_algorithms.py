"""Collectives as rounds of messages: their results, traffic and cost.

The truth is a sum or copy on one process, and closed forms of rounds, bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from math import log2
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from warpweave.parallel.algorithms import direct, ring, rooted
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.network import Network, traffic
from warpweave.parallel.algorithms.rounds import Algorithm, Round, Send, part
from warpweave.parallel.messages import run_in_process
from warpweave.parallel.run_collective import collective_steps, run_collective

NAMES = tuple(all_reduces(2))


def run(algorithm: Algorithm, xs: list[Tensor], overlap: bool = True) -> list[Tensor]:
    """Run `algorithm` on copies of `xs`, and return every rank's result."""
    ranks, n = len(xs), len(xs[0])
    every = [collective_steps(r, algorithm(r, ranks, n), x.clone()) for r, x in enumerate(xs)]
    return run_in_process(every, overlap=overlap)


def draw(ranks: int, n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(17 * ranks + n)
    if dtype.is_floating_point:
        return [torch.randn(n, generator=g, dtype=dtype) for _ in range(ranks)]
    return [torch.randint(-999, 1000, (n,), generator=g, dtype=dtype) for _ in range(ranks)]


# ----------------------------------------------------------------------------- results


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64])
def test_all_reduce_is_exact_on_integers_and_bitwise_equal_on_every_rank(ranks) -> None:
    for n in (1, 7, 1000) if ranks != 6 else (1, 7, 1000, 10**6):
        xs = draw(ranks, n, torch.int64)
        whole = torch.stack(xs).sum(0)
        for name, algorithm in all_reduces(ranks).items():
            assert all(torch.equal(x, whole) for x in run(algorithm, xs)), (name, n)
            found = run(algorithm, draw(ranks, n), overlap=False)
            assert all(torch.equal(x, found[0]) for x in found), (name, n)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_ordered_sums_are_taken_in_rank_order(ranks) -> None:
    xs = draw(ranks, 97)
    whole = xs[0].clone()
    for x in xs[1:]:
        whole += x
    assert all(torch.equal(x, whole) for x in run(direct.ordered, xs))
    other = torch.stack(xs).flip(0).cumsum(0)[-1]
    assert ranks < 3 or not torch.equal(other, whole)  # the order shows in the bits


@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8, 13])
def test_rooted_collectives_from_every_root(ranks) -> None:
    for n in (3, 40):
        xs = draw(ranks, n, torch.int64)
        for root in range(ranks):
            broadcast, reduced, scattered, gathered = (
                run(partial(getattr(rooted, f"binomial_{name}"), root=root), xs)
                for name in ("broadcast", "reduce", "scatter", "gather")
            )
            assert all(torch.equal(x, xs[root]) for x in broadcast)
            assert torch.equal(reduced[root], torch.stack(xs).sum(0))
            for r in range(ranks):
                a, b = part(r, ranks, n)
                assert torch.equal(scattered[r][a:b], xs[root][a:b])
                assert torch.equal(gathered[root][a:b], xs[r][a:b])


@pytest.mark.parametrize("kind", ["ring", "direct"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_a_reduce_scatter_and_an_all_gather(kind, ranks) -> None:
    room = {"ring": ring, "direct": direct}[kind]
    names = (f"{kind}_reduce_scatter", f"{kind}_all_gather")
    reduce_scatter, all_gather = (getattr(room, name) for name in names)
    for n in (3, 41):
        xs = draw(ranks, n, torch.int64)
        spans = [part(r, ranks, n) for r in range(ranks)]
        sums, whole = run(reduce_scatter, xs), torch.stack(xs).sum(0)
        assert all(torch.equal(x[a:b], whole[a:b]) for x, (a, b) in zip(sums, spans, strict=True))
        joined = torch.cat([x[a:b] for x, (a, b) in zip(xs, spans, strict=True)])
        assert all(torch.equal(x, joined) for x in run(all_gather, xs))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_an_all_to_all_is_a_transposition(ranks) -> None:
    xs = draw(ranks, 5 * ranks, torch.int64)
    expected = torch.stack(xs).view(ranks, ranks, 5).transpose(0, 1)
    found = torch.stack(run(direct.pairwise_all_to_all, xs)).view(ranks, ranks, 5)
    assert torch.equal(found, expected)


def _on_gloo(rank: int, ranks: int, n: int) -> list[Tensor]:
    x, every = draw(ranks, n)[rank], all_reduces(ranks).values()
    return [run_collective(algorithm, x.clone(), dist.group.WORLD) for algorithm in every]


@pytest.mark.parametrize("ranks", [3, 4])
def test_on_gloo_they_have_the_bits_of_one_process(ranks) -> None:
    expected = [run(algorithm, draw(ranks, 1001))[0] for algorithm in all_reduces(ranks).values()]
    for found in run_ranks(ranks, _on_gloo, ranks, 1001):
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


# ----------------------------------------------------------------------------- traffic


class Form(NamedTuple):
    """Closed forms on R ranks: rounds, and the busiest link's and all bytes as multiples of n."""

    rounds: float
    busiest: float
    total: float


def forms(R: int, L: int) -> dict[str, Form]:
    p, P = (R - 1).bit_length(), 1 << (R.bit_length() - 1)
    log, fold = int(log2(P)), P < R
    return {
        "naive": Form(2 * (R - 1), R - 1, 2 * (R - 1)),
        "parallel": Form(R > 1, R - 1, R * (R - 1)),
        "ordered": Form(2 * (R > 1), 2 * (R - 1) / R, 2 * (R - 1)),
        "ring": Form(2 * (R - 1), 2 * (R - 1) / R, 2 * (R - 1)),
        "recursive doubling": Form(log + 2 * fold, log + fold, P * log + 2 * (R - P)),
        "halving-doubling": Form(2 * log + 2 * fold, 2 * (P - 1) / P + fold, 2 * (R - 1)),
        "binary tree": Form(2 * p, min(R - 1, 3), 2 * (R - 1)),
        "double binary tree": Form(2 * p + 7, min(R / 2, 2), 2 * (R - 1)),
        "hierarchical": Form(
            2 * (L - 1) + 2 * (R // L - 1), 2 * (L - 1) / L + 2 * (R // L - 1) / R, 2 * (R - 1)
        ),
    }


FREE = Network(0.0, 0.0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 31, 64])
def test_rounds_and_bytes_are_those_of_the_closed_forms(ranks) -> None:
    node = max(k for k in range(1, ranks + 1) if ranks % k == 0 and k * k <= ranks)
    n = 16 * ranks * (1 << (ranks.bit_length() - 1))
    for name, algorithm in all_reduces(ranks).items():
        found, form = traffic(algorithm, ranks, n, FREE, size=1), forms(ranks, node)[name]
        assert found.rounds == form.rounds, name
        assert max(len([*algorithm(r, ranks, n)]) for r in range(ranks)) == form.rounds, name
        assert found.total == form.total * n, name
        assert found.busiest == pytest.approx(form.busiest * n, rel=1e-12), name


def test_what_the_lectures_say_of_time_and_bandwidth() -> None:
    """Compare rounds, bytes over the busiest link, and bytes at once, as the ranks increase."""
    n = 64 * 64

    def grows(name: str, what: Callable) -> float:
        """Return the power of R with which it grows from 16 ranks to 64."""
        few, many = (what(traffic(all_reduces(R)[name], R, n, FREE)) for R in (16, 64))
        return log2(many / few) / 2

    def rounds(t):
        return t.rounds

    assert grows("naive", rounds) == pytest.approx(1, abs=0.04)
    assert grows("naive", lambda t: t.busiest) == pytest.approx(1, abs=0.04)
    assert grows("ring", rounds) == pytest.approx(1, abs=0.04)
    assert grows("ring", lambda t: t.busiest) == pytest.approx(0, abs=0.04)
    assert grows("parallel", rounds) == 0
    assert grows("parallel", lambda t: t.at_once) == pytest.approx(2, abs=0.04)
    assert grows("halving-doubling", lambda t: 2.0**t.rounds) == pytest.approx(2)  # R^2: 2 log2 R


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_simulated_seconds_are_the_closed_forms(ranks) -> None:
    a, b, c = 3e-5, 2e-9, 5e-10
    n, p, share = 64 * ranks, int(log2(ranks)), (ranks - 1) / ranks
    one = {  # alphas, betas and gammas, the latter two as multiples of n
        "naive": (2 * (ranks - 1), 2 * (ranks - 1), ranks - 1),
        "parallel": (1, ranks - 1, ranks - 1),
        "ordered": (2, 2 * share, share),
        "ring": (2 * (ranks - 1), 2 * share, share),
        "recursive doubling": (p, p, p),
        "halving-doubling": (2 * p, 2 * share, share),
        # two children's messages in each round except the root's
        "binary tree": (2 * p, 2 * (2 * p - 1), 2 * p - 1),
    }
    for name, (alphas, betas, gammas) in one.items():
        seconds = traffic(all_reduces(ranks)[name], ranks, n, Network(a, b, c)).seconds
        assert seconds == pytest.approx(alphas * a + 4 * n * (betas * b + gammas * c)), name


def test_a_long_vector_takes_a_double_tree_two_thirds_of_one_trees_time() -> None:
    """Pipelined: an inner rank of one tree sends 3 n, of two trees 2 n."""
    n = 1 << 20

    def seconds(pieces: int, name: str) -> float:
        tree = partial(all_reduces(32)[name], pieces=pieces)
        return traffic(tree, 32, n, Network(0.0, 1.0), size=1).seconds / n

    assert seconds(512, "binary tree") == pytest.approx(3, rel=0.03)
    assert seconds(512, "double binary tree") == pytest.approx(2, rel=0.03)
    # not split: two children's messages in all rounds except two
    assert seconds(1, "binary tree") == 18


def test_a_node_is_left_by_fewer_bytes_of_the_hierarchical_algorithm() -> None:
    """Eight ranks in nodes of four: the ring's link between nodes carries what each rank sends."""
    across = Network(1e-6, 0.0, node=4, node_alpha=1e-5, node_beta=1.0)
    n, algorithms = 64, all_reduces(8, node=4)
    bytes_of = {k: traffic(f, 8, n, across, size=1).seconds for k, f in algorithms.items()}
    assert bytes_of["ring"] == pytest.approx(2 * 7 / 8 * n + 14 * 1e-5)
    # each of four ranks sends n/4 across once around a ring of two: n, and one rank's share n/4
    assert bytes_of["hierarchical"] == pytest.approx(n + 2e-5 + 6e-6)
    assert bytes_of["parallel"] == pytest.approx(16 * n + 1e-5)


# ----------------------------------------------------------------------------- faults


def _wrong_peer(step: list[Round]) -> None:
    rank = next(r for r, one in enumerate(step) if one.sends)
    first, *others = step[rank].sends
    wrong = first._replace(dest=(first.dest + 1) % len(step))
    step[rank] = step[rank]._replace(sends=(wrong, *others))


def _dropped(step: list[Round]) -> None:
    step[:] = [Round()] * len(step)


def _one_off(step: list[Round]) -> None:
    """Shift one rank's segments by one element, at both ends."""
    rank = next(r for r, one in enumerate(step) if one.sends)
    late = tuple(Send(dest, a + 1, b + 1) for dest, a, b in step[rank].sends)
    step[rank] = step[rank]._replace(sends=late)


def _stored(step: list[Round]) -> None:
    """Store a message that should be added."""
    rank = next(r for r, one in enumerate(step) if one.receives)
    stored = tuple(r._replace(adds=False) for r in step[rank].receives)
    step[rank] = step[rank]._replace(receives=stored)


def _faulty(algorithm: Algorithm, fault: Callable[[list[Round]], None]) -> Algorithm:
    """Return `algorithm` with a fault in its first round."""

    def rounds(rank: int, ranks: int, n: int):
        every = [list(algorithm(r, ranks, n)) for r in range(ranks)]
        step = next(k for k in range(len(every[0])) if any(any(one[k]) for one in every))
        first = [one[step] for one in every]
        fault(first)
        return iter([*every[rank][:step], first[rank], *every[rank][step + 1 :]])

    return rounds


@pytest.mark.parametrize("fault", [_wrong_peer, _dropped, _one_off, _stored])
@pytest.mark.parametrize("name", NAMES)
def test_a_fault_is_an_error_or_a_wrong_sum(fault, name) -> None:
    ranks = 5
    algorithm, xs = all_reduces(ranks)[name], draw(ranks, 60, torch.int64)
    whole = torch.stack(xs).sum(0)
    try:
        right = all(torch.equal(x, whole) for x in run(_faulty(algorithm, fault), xs))
    except RuntimeError:  # the two ends of a message differ, or a rank waits forever
        right = False
    assert not right


def test_rounds_that_do_not_match_are_not_priced() -> None:
    sent = r"^round 0: rank 1 does not receive exactly what is sent to it$"

    def longer(by: int, step: list[Round]) -> None:
        step[0] = step[0]._replace(sends=[Send(dest, a, b + by) for dest, a, b in step[0].sends])

    def deaf(step: list[Round]) -> None:
        step[1] = step[1]._replace(receives=())

    for fault in (_wrong_peer, partial(longer, 1), partial(longer, -1), deaf):
        with pytest.raises(ValueError, match=sent):
            traffic(_faulty(ring.ring_all_gather, fault), 4, 8, FREE)
    words = "^round 2: rank 1 has no more rounds, but other ranks do$"
    with pytest.raises(ValueError, match=words):
        traffic(lambda r, R, n: islice(ring.ring_all_gather(r, R, n), 3 - (r == 1)), 4, 8, FREE)
