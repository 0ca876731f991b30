"""Algorithms over ranks as generators of messages: run in one process and on gloo, the same bits.

The all-reduces below are the tests' own, as short as they can be. What one process refuses is what
would wait for ever on NCCL, or what a message under way would spoil.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor

from warpweave.parallel.messages import Hop, Steps, run_in_process, run_on_group


def ring(rank: int, ranks: int, x: Tensor) -> Steps[Tensor]:
    """Reduce-scatter and all-gather round a ring (Patarasuk & Yuan 2009), over chunks of x[n].

    Of four ranks the sum of chunk 0 begins on rank 0; chunk c is whole on rank c-1 after 3 hops:

        hop 0   rank r sends chunk r to r+1, which adds it
        hop 1   chunk r-1        hop 2   chunk r-2        then whole chunks, r+1 first
    """
    chunks, right, left = x.tensor_split(ranks), (rank + 1) % ranks, (rank - 1) % ranks
    for hop in range(ranks - 1):
        goes, comes = chunks[(rank - hop) % ranks], chunks[(rank - hop - 1) % ranks]
        arriving = torch.empty_like(comes)
        yield Hop(goes, arriving, right, left)
        yield None
        comes += arriving
    for hop in range(ranks - 1):
        yield Hop(chunks[(rank - hop + 1) % ranks], chunks[(rank - hop) % ranks], right, left)
        yield None
    return x


def doubling(rank: int, ranks: int, x: Tensor) -> Steps[Tensor]:
    """Recursive doubling; ranks beyond a power of two give theirs to another and get the sum."""
    power, spare = 1 << (ranks.bit_length() - 1), torch.empty_like(x)
    extra = rank + power if rank + power < ranks else None
    if rank >= power:
        yield Hop(x, None, rank - power, rank - power)
        yield Hop(None, x, rank - power, rank - power)
        yield None
        return x
    if extra is not None:
        yield Hop(None, spare, extra, extra)
        yield None
        x += spare
    for bit in range(power.bit_length() - 1):
        peer = rank ^ (1 << bit)
        yield Hop(x, spare, peer, peer)
        yield None
        x += spare
    if extra is not None:
        yield Hop(x, None, extra, extra)
        yield None
    return x


def tree(rank: int, ranks: int, x: Tensor) -> Steps[Tensor]:
    """A binary tree: children's sums up to rank 0, the whole one down again."""
    children = [c for c in (2 * rank + 1, 2 * rank + 2) if c < ranks]
    parts = [torch.empty_like(x) for _ in children]
    for child, part in zip(children, parts):
        yield Hop(None, part, child, child)
    yield None
    for part in parts:
        x += part
    if rank > 0:
        parent = (rank - 1) // 2
        yield Hop(x, None, parent, parent)
        yield None
        yield Hop(None, x, parent, parent)
        yield None
    for child in children:
        yield Hop(x, None, child, child)
    yield None
    return x


ALGORITHMS = {"ring": ring, "recursive doubling": doubling, "binary tree": tree}
SIZES = (1, 7, 1000)


def _inputs(ranks: int, size: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=draw, dtype=torch.float64) for _ in range(ranks)]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("overlap", [True, False])
def test_an_all_reduce_in_one_process_gives_every_rank_the_sum(name, ranks, overlap) -> None:
    for size in SIZES:
        given = _inputs(ranks, size)
        steps = [ALGORITHMS[name](r, ranks, x.clone()) for r, x in enumerate(given)]
        found = run_in_process(steps, overlap=overlap)
        expected = torch.stack(given).sum(0)
        assert all(torch.equal(x, found[0]) for x in found)  # the same bits on every rank
        assert (found[0] - expected).abs().max() <= 1e-14 * ranks


def _on_gloo(rank: int, ranks: int) -> list[Tensor]:
    return [
        run_on_group(run(rank, ranks, _inputs(ranks, size)[rank]), dist.group.WORLD, overlap=hides)
        for run, size, hides in itertools.product(ALGORITHMS.values(), SIZES, (True, False))
    ]


def test_an_all_reduce_on_gloo_has_the_bits_of_the_one_in_one_process() -> None:
    ranks = 3
    expected = [
        run_in_process([run(r, ranks, x) for r, x in enumerate(_inputs(ranks, size))])[0]
        for run, size, _ in itertools.product(ALGORITHMS.values(), SIZES, (True, False))
    ]
    for found in run_ranks(ranks, _on_gloo, ranks):
        assert all(map(torch.equal, found, expected))


# ----------------------------------------------------------------------------- what is refused


def _peers(first: Hop, second: Hop, waits: bool = False) -> Steps[None]:
    yield first
    if waits:
        yield None
    yield second
    yield None


def test_messages_that_nccl_could_not_start_in_that_order_are_a_deadlock() -> None:
    """Both send first: gloo would buffer it. In one hop, or in turn, it runs."""
    x = [torch.full((2,), float(rank)) for rank in range(2)]
    into = [torch.zeros(2) for _ in range(2)]
    sends = [Hop(x[r], None, 1 - r, 1 - r) for r in range(2)]
    receives = [Hop(None, into[r], 1 - r, 1 - r) for r in range(2)]
    words = r"^deadlock: rank 0 waits for ranks \[1\]; rank 1 waits for ranks \[0\]$"
    with pytest.raises(RuntimeError, match=words):
        run_in_process([_peers(sends[r], receives[r]) for r in range(2)])
    for waits in (False, True):
        run_in_process([_peers(sends[0], receives[0], waits), _peers(receives[1], sends[1], waits)])
        assert [part.tolist() for part in into] == [[1, 1], [0, 0]]


def test_a_message_is_delivered_when_both_ends_wait_and_not_before() -> None:
    """What is read before is old, and what is written before is sent."""
    seen = []

    def steps(rank: int) -> Steps[None]:
        x = torch.full((1,), float(rank + 5))
        yield Hop(x if rank == 0 else None, x if rank == 1 else None, 1, 0)
        if rank == 0:
            x += 10
        seen.append(float(x))
        yield None
        seen.append(float(x))

    run_in_process([steps(0), steps(1)])
    assert seen == [15, 6, 15, 15]


def test_ends_that_differ_and_ranks_that_leave_are_named() -> None:
    x, three, ints = torch.zeros(2), torch.zeros(3), torch.zeros(2, dtype=torch.int64)

    def one(hop: Hop, waits: bool = True) -> Steps[None]:
        yield hop
        if waits:
            yield None

    send = Hop(x, None, 1, 1)
    for into, words in ((three, "3 of torch.float32"), (ints, "2 of torch.int64")):
        with pytest.raises(RuntimeError, match=f"^rank 0 sends 2 .*32, rank 1 receives {words}$"):
            run_in_process([one(send), one(Hop(None, into, 0, 0))])
    with pytest.raises(RuntimeError, match="rank 0 ends with messages under way"):
        run_in_process([one(send, waits=False), one(Hop(None, x, 0, 0))])
    with pytest.raises(RuntimeError, match=r"^deadlock: rank 0 waits for ranks \[1\]$"):
        run_in_process([one(send), (x for x in ())])
