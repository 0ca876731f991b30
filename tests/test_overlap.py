"""Overlapped products: virtual ranks in one process, and real ones over shared memory."""

import pytest
import torch
import torch.distributed as dist
from close import assert_close_f64
from ranks import run_ranks

from warpweave.kernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.overlap.epilogue import Epilogue
from warpweave.kernels.overlap.function import (
    all_gather_gemm_steps,
    gemm_all_reduce_steps,
    gemm_reduce_scatter_steps,
    run_local,
)
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.parallel.symmetric import symmetric_memory

SHAPES = ((1, 1, 1), (5, 7, 3), (33, 40, 17), (64, 32, 64))


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_virtual_ranks_gather_and_multiply(world):
    memories = local_memory(world, slots=64, capacity=1 << 17, polls=3)
    for S, N, K in SHAPES:
        x = torch.randn(world, S, K, dtype=torch.float64)
        b = torch.randn(world, K, N, dtype=torch.float64)
        steps = [all_gather_gemm_steps(x[r], b[r], memories[r], Epilogue()) for r in range(world)]
        for r, (y, z, whole) in enumerate(run_local(steps)):
            memories[r].check("all_gather_gemm")
            assert torch.equal(whole, x.flatten(0, 1))
            assert z is None
            assert_close_f64(y, x.flatten(0, 1) @ b[r], 1e-14)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("op", [gemm_reduce_scatter_steps, gemm_all_reduce_steps])
def test_virtual_ranks_multiply_and_sum(world, op):
    memories = local_memory(world, slots=64, capacity=1 << 18, polls=3)
    for S, N, K in SHAPES:
        a = torch.randn(world, world * S, K, dtype=torch.float64)
        b = torch.randn(world, K, N, dtype=torch.float64)
        y = run_local([op(a[r], b[r], memories[r], Epilogue()) for r in range(world)])
        whole = torch.einsum("rmk,rkn->mn", a, b)
        for r in range(world):
            memories[r].check("sum")
            own = whole[r * S : (r + 1) * S] if op is gemm_reduce_scatter_steps else whole
            assert_close_f64(y[r], own, 1e-14)


# ---------------------------------------------------------------- real processes


def _run_shared(rank: int, world: int, rounds: int) -> list:
    memory = symmetric_memory(dist.group.WORLD, "cpu", slots=64, capacity=1 << 18)
    found = []
    for i in range(rounds):
        S, N, K = SHAPES[i % len(SHAPES)]
        torch.manual_seed(i)
        a = torch.randn(world, world * S, K, dtype=torch.float64)
        b = torch.randn(world, K, N, dtype=torch.float64)
        y, _, whole = all_gather_gemm(a[0, rank * S : (rank + 1) * S], b[rank], memory=memory)
        assert torch.equal(whole, a[0])
        assert_close_f64(y, a[0] @ b[rank], 1e-14)
        total = torch.einsum("rmk,rkn->mn", a, b)
        y = gemm_reduce_scatter(a[rank], b[rank], memory=memory)
        assert_close_f64(y, total[rank * S : (rank + 1) * S], 1e-14)
        y = gemm_all_reduce(a[rank], b[rank], memory=memory)
        assert_close_f64(y, total, 1e-14)
        found.append(y)
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_real_ranks_over_shared_memory(world):
    results = run_ranks(world, _run_shared, world, 8)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))
