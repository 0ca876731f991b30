"""The rank pool itself: results in order, a failing rank named with its traceback."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks


def _sum(rank: int, value: float) -> float:
    x = torch.tensor([value * (rank + 1)])
    dist.all_reduce(x)
    return x.item()


def _fail(rank: int) -> None:
    if rank == 1:
        raise ValueError("planted on rank one")
    dist.barrier()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_results_come_back_in_rank_order(world: int) -> None:
    assert run_ranks(world, _sum, 2.0) == [world * (world + 1.0)] * world


def test_the_failing_rank_is_named() -> None:
    with pytest.raises(AssertionError, match="planted on rank one"):
        run_ranks(2, _fail)
