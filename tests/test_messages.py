"""Errors of the executor in one process: messages that would hang on NCCL, or be corrupted in
flight. test_algorithms.py and test_ring.py run valid algorithms."""

from __future__ import annotations

import pytest
import torch

from warpweave.parallel.messages import Batch, Hop, Steps, run_in_process


def _peers(first: Hop, second: Hop, waits: bool = False) -> Steps[None]:
    yield first
    if waits:
        yield None
    yield second
    yield None


def test_messages_that_nccl_could_not_start_in_that_order_are_a_deadlock() -> None:
    """Both send first: gloo would buffer it. As one batch, or in turn, it works."""
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


def test_messages_of_a_batch_begin_together_and_arrive_in_their_order() -> None:
    """One after the other they would deadlock. Two messages to one rank are also covered."""
    x = [torch.tensor([10.0 * rank, 10.0 * rank + 1]) for rank in range(2)]
    into = [torch.zeros(2) for _ in range(2)]

    def one(rank: int, count: int) -> Steps[None]:
        there = [(x[rank][k : k + 1], 1 - rank) for k in range(2)]
        back = [(into[rank][k : k + 1], 1 - rank) for k in range(count)]
        yield Batch(there, back)
        yield None

    run_in_process([one(0, 2), one(1, 2)])
    assert [part.tolist() for part in into] == [[10, 11], [0, 1]]
    with pytest.raises(RuntimeError, match=r"^rank 0 sends 2 messages, rank 1 receives 1$"):
        run_in_process([one(0, 2), one(1, 1)])


def test_a_message_is_delivered_when_both_ends_wait_and_not_before() -> None:
    """Earlier reads return old data, and earlier writes change what is sent."""
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
    for at in (0, 2, -1):  # they belong to no group
        with pytest.raises(RuntimeError, match=f"^rank 0 sends to or receives from rank {at}; "):
            run_in_process([one(Hop(x, None, at, 1)), one(Hop(None, x, 0, 0))])
    with pytest.raises(RuntimeError, match="rank 0 ends with pending messages"):
        run_in_process([one(send, waits=False), one(Hop(None, x, 0, 0))])
    with pytest.raises(RuntimeError, match=r"^deadlock: rank 0 waits for ranks \[1\]$"):
        run_in_process([one(send), (x for x in ())])
