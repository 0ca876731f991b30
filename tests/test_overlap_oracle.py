"""Overlapped products compared with the definition of torch's own fused ones.

`torch.ops.symm_mem.fused_all_gather_matmul` and `fused_matmul_reduce_scatter` need NVLink peers.
The functions below are their definition: torch runs them if it has no kernel, and they work on any
process group. They are private; a torch version without them fails here, at the import.
"""

import pytest
import torch
import torch.distributed as dist
from close import relative_error
from ranks import run_ranks
from torch.distributed._symmetric_memory import (
    _fused_all_gather_matmul_fallback,
    _fused_matmul_reduce_scatter_fallback,
)

from warpweave.kernels.overlap import all_gather_gemm, gemm_reduce_scatter
from warpweave.parallel.symmetric import symmetric_memory

SHAPES = ((1, 1, 1), (5, 7, 3), (17, 33, 40))  # rows of a shard, N, K
LIMIT = {torch.float32: 1e-6, torch.float64: 1e-14}


def _errors(rank: int, world: int, dtype: torch.dtype) -> list[float]:
    """Return the errors of both operations at every shape, on this rank's own operands."""
    group = dist.group.WORLD
    memory = symmetric_memory(group, "cpu", slots=8, capacity=1 << 16)
    torch.manual_seed(rank)
    found = []
    for S, N, K in SHAPES:
        x, b = torch.randn(S, K, dtype=dtype), torch.randn(K, N, dtype=dtype)
        theirs = _fused_all_gather_matmul_fallback(x, [b], 0, group.group_name, return_A=True)
        y, _, whole = all_gather_gemm(x, b, memory=memory)
        assert torch.equal(whole, theirs[0])
        found.append(relative_error(y, theirs[1][0]))

        a = torch.randn(world * S, K, dtype=dtype)
        scattered = _fused_matmul_reduce_scatter_fallback(a, b, "sum", 0, group.group_name)
        found.append(relative_error(gemm_reduce_scatter(a, b, memory=memory), scattered))
    return found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", LIMIT)
def test_products_are_those_of_torch(dtype, world):
    for errors in run_ranks(world, _errors, world, dtype):
        assert max(errors) <= LIMIT[dtype]
