"""Ranks that are threads: they compute what processes would, and errors are reported."""

from __future__ import annotations

import pytest
import test_mesh
import torch
import torch.distributed as dist
from test_ranks import _fail, _sum
from threads import run_threads

from warpweave.parallel.collectives import start_all_gather, start_all_reduce_
from warpweave.parallel.mesh import Mesh


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_in_rank_order(world: int) -> None:
    assert run_threads(world, _sum, 2.0) == [world * (world + 1.0)] * world
    assert not dist.is_initialized()
    assert dist.group.WORLD is None


def test_the_error_is_that_of_the_rank_that_failed() -> None:
    with pytest.raises(ValueError, match="planted on rank one"):
        run_threads(2, _fail)


@pytest.mark.parametrize("world", [4, 8])
def test_meshes_have_the_groups_that_processes_have(world: int) -> None:
    meshes = test_mesh._meshes(4) if world == 4 else [Mesh(2, 2, 2, 1), Mesh(1, 2, 2, 2), Mesh(8)]
    run_threads(world, test_mesh._check_groups, meshes)


def _numbers(rank: int) -> torch.Tensor:
    first = torch.rand(())
    if rank == 1:
        torch.rand(5)
    dist.barrier()
    return torch.stack((first, torch.rand(())))


def test_random_numbers_are_each_ranks_own() -> None:
    before = torch.get_rng_state()
    torch.manual_seed(0)
    drawn = torch.rand(7)
    zero, one, two = run_threads(3, _numbers)
    assert torch.equal(zero, drawn[:2])
    assert torch.equal(two, drawn[:2])
    assert torch.equal(one, drawn[[0, 6]])
    torch.set_rng_state(before)
    run_threads(2, _numbers)
    assert torch.equal(torch.get_rng_state(), before)


def _in_flight(rank: int) -> None:
    """Collectives are begun in one order and awaited in another; no result is available earlier."""
    x, y = torch.full((2,), rank + 1.0), torch.full((3,), 10.0 * rank)
    total, every = start_all_reduce_(x, dist.group.WORLD), start_all_gather(y, dist.group.WORLD)
    dist.barrier()
    assert x.tolist() == [rank + 1.0] * 2
    assert every.wait().tolist() == [0.0] * 3 + [10.0] * 3
    assert total.wait().tolist() == [3.0] * 2
    if rank == 0:
        for i in range(3):
            dist.send(torch.tensor([i]), 1)
        return
    messages = [torch.empty(1, dtype=torch.int64) for _ in range(3)]
    works = [dist.irecv(message, 0) for message in messages]
    for work in works[::-1]:
        work.wait()
    assert messages == [0, 1, 2]


def test_what_is_in_flight_arrives_when_it_is_awaited() -> None:
    run_threads(2, _in_flight)


def _all_wait(rank: int) -> None:
    if rank:
        dist.recv(torch.empty(2), 3 - rank)


def _another(rank: int) -> None:
    dist.all_reduce(torch.empty(2 + rank))


def _too_long(rank: int) -> None:
    if rank == 0:
        dist.send(torch.empty(3), 1)
    else:
        dist.recv(torch.empty(2), 0)


def test_what_a_network_would_take_without_a_word_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="are left wait: rank 1 for a message of 2, rank 2 for"):
        run_threads(3, _all_wait)
    with pytest.raises(AssertionError, match=r"different collectives: \('all_reduce', \(2,\)"):
        run_threads(2, _another)
    with pytest.raises(AssertionError, match="sent and received differ"):
        run_threads(2, _too_long)
