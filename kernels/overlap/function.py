"""The public functions of fused communication and GEMM: checks, then the launches of one rank.

Every rank of the group calls the same function with the same shapes, in the same order, on one
stream. `gather` and `scatter` describe what the functions compute and send.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from typing import Any

import torch

from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.gemm.fused import check_operands, check_result
from warpweave.kernels.overlap.gather import all_gather_steps, gather_steps
from warpweave.kernels.overlap.scatter import scatter_steps
from warpweave.kernels.overlap.symmetric import Memory
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import choose, no_graph

ONE_SHOT = 3_600_000  # bytes that NVLink moves in the time of one extra wait (predicted)

Steps = Generator[None, None, Any]


@no_graph
def all_gather_gemm(
    x: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    memory: Memory,
    activation: str | None = None,
    save_z: bool = False,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """All-gather -> GEMM: (y, z or None, whole) from this rank's shard x[S, K] and its b[K, N].

    whole[W S, K] = all-gather(x), and y[W S, N] = residual + dropout(act(whole @ b + bias)) is
    bitwise equal to `fused_gemm` of the gathered rows with the same tile.

    Args:
        memory: the group's symmetric memory, with at least S K elements of x and ceil(S / 16) slots
            (fewer if the tile has more rows; the error message has the number).
        bias, activation, save_z, drop, residual, out_dtype, precision: as for `gemm.fused_gemm` of
            the gathered rows.

    Raises:
        ValueError: shapes, dtypes or options do not fit, the memory is too small, something
            requires a gradient, or Triton cannot run; or, as for TimeoutError, a rank is in a
            different operation, or in one with different sizes or dtypes.
        TimeoutError: with bounded waits, on a CPU: a rank did not publish its rows in time.

    Examples:
        >>> from warpweave.kernels.overlap.symmetric import local_memory
        >>> memory = local_memory(1, slots=16, capacity=1 << 16)[0]  # in a layer: overlap="fused"
        >>> y, _, whole = all_gather_gemm(torch.randn(16, 32), torch.randn(32, 32), memory=memory)
        >>> y.shape
        torch.Size([16, 32])
    """
    epilogue = Epilogue(bias, activation, save_z, drop, residual, out_dtype, precision)
    steps = all_gather_gemm_steps(x, b, memory, epilogue)
    return run_steps("all_gather_gemm", steps, memory)


@no_graph
def gemm_reduce_scatter(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    memory: Memory,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """GEMM -> reduce-scatter: y[S, N], this rank's rows of the sum over ranks of a[W S, K] b[K, N].

    y = residual + dropout(sum + bias). Partial products are sent and added in float32 (float64 for
    float64), unrounded, in rank order.

    Args:
        memory: the group's symmetric memory, with at least W S N elements of float32 and
            ceil(S / 16) ceil(N / 32) slots (or fewer, as for `all_gather_gemm`).
        bias, drop, residual, out_dtype, precision: as for `gemm.fused_gemm` of this rank's rows;
            bias is added once, after the sum.

    Raises the errors of `all_gather_gemm`, and ValueError if the number of rows is not divisible by
    the number of ranks.

    Examples:
        >>> from warpweave.kernels.overlap.symmetric import local_memory
        >>> memory = local_memory(1, slots=16, capacity=1 << 16)[0]  # in a layer: overlap="fused"
        >>> gemm_reduce_scatter(torch.randn(16, 32), torch.randn(32, 32), memory=memory).shape
        torch.Size([16, 32])
    """
    epilogue = Epilogue(bias, None, False, drop, residual, out_dtype, precision)
    steps = gemm_reduce_scatter_steps(a, b, memory, epilogue)
    return run_steps("gemm_reduce_scatter", steps, memory)


@no_graph
def gemm_all_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    memory: Memory,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """GEMM -> all-reduce: y[M, N], the sum over ranks of a[M, K] b[K, N], the same bits on each.

    One-shot, in which every rank reads all partial products. Above `ONE_SHOT` bytes, and if the
    rows are divisible by the ranks, it is two-shot instead: a reduce-scatter and an all-gather of
    its result, which moves fewer bytes but waits once more.

    Args:
        memory, bias, ...: as for `gemm_reduce_scatter`, for all rows.

    Raises the errors of `gemm_reduce_scatter`, but the rows need not be divisible by the ranks.

    Examples:
        >>> from warpweave.kernels.overlap.symmetric import local_memory
        >>> memory = local_memory(1, slots=16, capacity=1 << 16)[0]  # in a layer: overlap="fused"
        >>> gemm_all_reduce(torch.randn(16, 32), torch.randn(32, 32), memory=memory).shape
        torch.Size([16, 32])
    """
    epilogue = Epilogue(bias, None, False, drop, residual, out_dtype, precision)
    steps = gemm_all_reduce_steps(a, b, memory, epilogue)
    return run_steps("gemm_all_reduce", steps, memory)


# ---------------------------------------------------------------- steps

# The functions as generators that yield after each launch, so that W virtual ranks on one device
# can take turns.


def all_gather_gemm_steps(
    x: torch.Tensor,
    b: torch.Tensor,
    memory: Memory,
    epilogue: Epilogue,
) -> Steps:
    """`all_gather_gemm`, launch by launch."""
    epilogue = _checked(x, b, epilogue, memory.world * x.shape[0])
    return gather_steps(x, b, memory, epilogue)


def gemm_reduce_scatter_steps(
    a: torch.Tensor,
    b: torch.Tensor,
    memory: Memory,
    epilogue: Epilogue,
) -> Steps:
    """`gemm_reduce_scatter`, launch by launch."""
    name, world = "gemm_reduce_scatter", memory.world
    if a.shape[0] % world:
        raise ValueError(f"{name}: dim 0 of `a` {[*a.shape]} is not divisible by {world} ranks")
    epilogue = _checked(a, b, epilogue, a.shape[0] // world)
    return scatter_steps(a, b, memory, epilogue, owners=world, name=name)


def gemm_all_reduce_steps(
    a: torch.Tensor,
    b: torch.Tensor,
    memory: Memory,
    epilogue: Epilogue,
) -> Steps:
    """`gemm_all_reduce`, launch by launch."""
    name, M, world = "gemm_all_reduce", a.shape[0], memory.world
    epilogue = _checked(a, b, epilogue, M)
    saved = (world - 1) * (1 - 2 / world) * M * b.shape[1] * compute_dtype(a).itemsize
    if M % world or saved <= ONE_SHOT:
        return scatter_steps(a, b, memory, epilogue, owners=1, name=name)
    return _two_shots(name, a, b, memory, epilogue)


def _two_shots(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    memory: Memory,
    epilogue: Epilogue,
) -> Steps:
    S = len(a) // memory.world
    own = epilogue.of_rows(slice(memory.rank * S, (memory.rank + 1) * S))
    y = yield from scatter_steps(a, b, memory, own, owners=memory.world, name=name)
    return (yield from all_gather_steps(name, y, memory))


def _checked(a: torch.Tensor, b: torch.Tensor, epilogue: Epilogue, rows: int) -> Epilogue:
    """Return `epilogue`, checked for `rows` rows; raise ValueError if it, a and b do not fit."""
    choose("triton", a, b, *epilogue.tensors)
    check_operands(a, b, epilogue.bias)
    check_result(a, epilogue.out_dtype)
    return epilogue.checked((rows, b.shape[1]))


def run_local(ranks: Sequence[Steps]) -> list[Any]:
    """The results of virtual ranks on one device, which take turns to launch on one stream.

    A launch waits only for earlier ones, so this cannot deadlock.
    """
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        for rank, steps in enumerate(ranks):
            if rank in results:
                continue
            try:
                next(steps)
            except StopIteration as end:
                results[rank] = end.value
    return [results[rank] for rank in range(len(ranks))]


def run_steps(name: str, steps: Steps, memory: Memory) -> Any:
    """The result of this rank's steps, run one launch after another."""
    # A compiler must not reorder operations that other ranks wait for. It cannot if it has not been
    # imported, and importing it would cost a second.
    run = torch.compiler.disable(_run_steps) if "torch._dynamo" in sys.modules else _run_steps
    return run(name, steps, memory)


def _run_steps(name: str, steps: Steps, memory: Memory) -> Any:
    launched = False
    try:
        while True:
            next(steps)
            launched = True
    except StopIteration as end:
        result = end.value
    except BaseException:
        if launched:
            memory.leave(name)
        raise
    try:
        memory.settle()
    except (TimeoutError, ValueError):
        memory.leave(name)
        raise
    return result
