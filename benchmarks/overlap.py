"""Overlapped products compared with cuBLAS and NCCL, and the fastest `overlap` of a layer here.

    python benchmarks/overlap.py                                  # one GPU, or none
    torchrun --nproc-per-node 8 benchmarks/overlap.py             # several, over NVLink

On one GPU virtual ranks share it: the product in the overlapped kernels, with all copies and sums
at the speed of its memory, is compared with as many products of cuBLAS. On several GPUs the whole
operation is compared with cuBLAS and then NCCL (or NCCL first), and with torch's own fused
operators if they run. Then a linear layer runs forward and backward for each value of `overlap`,
and a line names the fastest. Without a GPU such layers run on two gloo ranks, except for "fused":
its kernels would run in an interpreter, whose time says nothing. Every output is compared before
timing starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from harness import (
    Report,
    assert_equal,
    header,
    interleave,
    parser,
    results_folder,
    run_ranks,
)
from torch import Tensor

from warpweave.kernels.gemm.epilogue import Epilogue
from warpweave.kernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.overlap.function import (
    all_gather_gemm_steps,
    gemm_all_reduce_steps,
    gemm_reduce_scatter_steps,
    run_local,
)
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.machine.tune.timing import CudaTimer
from warpweave.machine.tune.timing import interleave as interleave_on_device
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import column_parallel_linear, row_parallel_linear
from warpweave.parallel.words import Overlap

CLAIM = "Products that hide messages keep 0.95 of cuBLAS, and take less time than cuBLAS and NCCL."
WANTED = 0.95
HALF = torch.bfloat16
MODELS = {"8B": (4096, 14336), "70B": (8192, 28672)}  # width and hidden units, of Llama 3
ROWS = (2048, 8192, 16384)
TINY, TINY_ROWS = {"tiny": (8, 24)}, (24,)
CPU_MODELS, CPU_ROWS = {"small": (512, 2048), "medium": (1024, 4096)}, (1024, 4096)
Moves = Literal["gather", "scatter", "reduce"]

Calls = Mapping[str, Callable[[], Any]]


class Product(NamedTuple):
    """A rank's product, a[M, K] b[K, N], and what its group of `ranks` moves for it: all ranks'
    rows of a before ("gather"), or terms of the result after ("scatter" or "reduce")."""

    M: int
    N: int
    K: int
    ranks: int
    moves: Moves

    def __str__(self) -> str:
        return f"{self.moves} M={self.M} N={self.N} K={self.K} ranks={self.ranks}"


@dataclass
class OverlapReport(Report):
    """A report that also has what is missing, what is slow, and the fastest values of `overlap`.

    Attributes:
        absent: baselines that cannot run here, with the reason.
        slow: rows below the wanted ratio.
        fastest: per product of a layer, the fastest value and its gain over "none".
    """

    absent: dict[str, str] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    fastest: list[str] = field(default_factory=list)

    def compare(self, times: Mapping[str, list[float]], product: Product, wanted: float) -> None:
        """Add rows for ours and every baseline."""
        baselines = [name for name in times if name != "warpweave"]
        self.add(times, baselines, shape=str(product), dtype="bfloat16", tokens=product.M)
        self.slow += [
            f"{row.shape}: {ratio.median:.3f} x {name}, wanted {wanted}"
            for row in self.rows
            if row.shape == str(product)
            for name, ratio in row.ratios.items()
            if ratio.median < wanted
        ]

    def choose(self, times: Mapping[str, list[float]], product: Product, dtype: str) -> None:
        """Add a row for every value of `overlap`, and record the fastest."""
        self.add(times, ["none"], shape=f"layer {product}", dtype=dtype, tokens=product.M)
        best = min(self.rows[-len(times) :], key=lambda row: row.ms)
        gain = f", {best.ratios['none'].median:.2f} x none" if best.ratios else ""
        self.fastest.append(f"{product}: overlap={best.name!r} is fastest{gain}")

    def finish(self, folder: Path | None) -> None:
        """Print what is slow and what is fastest, the table, and the line of JSON."""
        for line in (*self.slow, *self.fastest):
            print(line)
        super().finish(folder)


def products(
    ranks: int, models: Mapping[str, tuple[int, int]] = MODELS, rows: tuple[int, ...] = ROWS
) -> Iterator[Product]:
    """Yield the two products of a feed-forward layer: up from gathered rows, down to scattered or
    reduced ones."""
    for width, hidden in models.values():
        for M in rows:
            for moves in get_args(Moves):
                N, K = hidden // ranks, width
                if moves != "gather":
                    N, K = K, N
                yield Product(M, N, K, ranks, moves)


def draw(product: Product, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draw a and b of a rank; a is its shard if rows are gathered."""
    generator = torch.Generator(device).manual_seed(rank)
    rows = product.M // product.ranks if product.moves == "gather" else product.M

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=HALF)

    return normal(rows, product.K), normal(product.K, product.N) / product.K**0.5


def rows_of(product: Product, rank: int) -> slice:
    """Return the rows of the result that a rank has."""
    S = product.M // product.ranks
    return slice(rank * S, (rank + 1) * S) if product.moves == "scatter" else slice(None)


# ---------------------------------------------------------------- one device


def virtual_ranks(product: Product, device: torch.device, report: OverlapReport) -> Calls:
    """Check, then return ours on as many virtual ranks, and as many products of cuBLAS."""
    drawn = [draw(product, rank, device) for rank in range(product.ranks)]
    memories = local_memory(
        product.ranks, slots=-(-product.M // 16) * -(-product.N // 32), device=device,
        capacity=4 * product.M * max(product.N, product.K),
    )  # fmt: skip
    whole = [a for a, _ in drawn]
    if product.moves == "gather":
        whole = [torch.cat(whole)] * product.ranks

    def ours() -> list[Tensor]:
        if product.moves == "gather":
            steps = [all_gather_gemm_steps(*x, m, Epilogue()) for x, m in zip(drawn, memories)]
            return [y for y, _, _ in run_local(steps)]
        op = gemm_reduce_scatter_steps if product.moves == "scatter" else gemm_all_reduce_steps
        return run_local([op(*x, m, Epilogue()) for x, m in zip(drawn, memories)])

    def cublas() -> list[Tensor]:
        return [a @ b for a, (_, b) in zip(whole, drawn)]

    expected = [y.float() for y in cublas()]
    if product.moves != "gather":
        total = torch.stack(expected).sum(0)
        expected = [total[rows_of(product, rank)] for rank in range(product.ranks)]
    pairs = {f"rank {i}": pair for i, pair in enumerate(zip(ours(), expected))}
    report.checks.append(assert_equal(f"{product}", pairs, 4 * torch.finfo(HALF).eps))
    return {"warpweave": ours, "cuBLAS": cublas}


# ---------------------------------------------------------------- several devices


def real_ranks(
    product: Product, device: torch.device, workspace: Workspace, report: OverlapReport
) -> Calls:
    """Check, then return ours, cuBLAS with NCCL, and torch's fused operator if it runs."""
    group = dist.group.WORLD
    rank, S = dist.get_rank(), product.M // product.ranks
    a, b = draw(product, rank, device)

    def ours() -> Tensor:
        if product.moves == "gather":
            return all_gather_gemm(a, b, memory=workspace)[0]
        op = gemm_reduce_scatter if product.moves == "scatter" else gemm_all_reduce
        return op(a, b, memory=workspace)

    def theirs() -> Tensor:
        if product.moves == "gather":
            whole = a.new_empty(product.M, product.K)
            dist.all_gather_into_tensor(whole, a)
            return whole @ b
        terms = a @ b
        if product.moves == "reduce":
            dist.all_reduce(terms)
            return terms
        y = a.new_empty(S, product.N)
        dist.reduce_scatter_tensor(y, terms)
        return y

    def fused() -> Tensor:
        import torch.distributed._symmetric_memory  # defines the operators

        ops = torch.ops.symm_mem
        if product.moves == "gather":
            return ops.fused_all_gather_matmul(a, [b], 0, group.group_name)[1][0]
        return ops.fused_matmul_reduce_scatter(a, b, "sum", 0, group.group_name)

    calls = {"warpweave": ours, "cuBLAS + NCCL": theirs}
    if product.moves != "reduce":  # torch has no such operator
        try:
            fused()
            calls["torch fused"] = fused
        except RuntimeError as error:
            report.absent[f"torch fused {product.moves}"] = str(error).splitlines()[0]
    pairs = {name: (call(), theirs()) for name, call in calls.items()}
    report.checks.append(assert_equal(f"{product}", pairs, 8 * torch.finfo(HALF).eps))
    return calls


def waited_for(call: Callable[[], Any]) -> Callable[[], None]:
    """Return the call, followed by waiting for the device."""

    def run() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


# ---------------------------------------------------------------- the `overlap` of a layer


def layer_calls(
    product: Product, words: tuple[str, ...], device: torch.device, workspace: Workspace | None
) -> tuple[dict[str, Callable[[], list[Tensor]]], torch.dtype]:
    """Return a linear layer of this product, forward and backward, per value: y, dx and dW."""
    group = dist.group.WORLD
    x, b = draw(product, dist.get_rank(), device)
    x, weight = (t if device.type == "cuda" else t.float() for t in (x, b.t().contiguous()))
    leaves = x.requires_grad_(), weight.requires_grad_()
    layer = column_parallel_linear if product.moves == "gather" else row_parallel_linear
    cut = {"group": group, "sequence_parallel": product.moves != "reduce", "workspace": workspace}
    dy = torch.ones_like(layer(*leaves, **cut, overlap="none"))

    def run(word: str) -> list[Tensor]:
        y = layer(*leaves, **cut, overlap=word)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    return {word: partial(run, word) for word in words}, x.dtype


def compare_words(
    report: OverlapReport, quick: bool, rounds: int, device: torch.device
) -> OverlapReport:
    """Check all products' layers against "none", then add their rows; every rank calls this."""
    gpu = device.type == "cuda"
    words = tuple(word for word in get_args(Overlap) if gpu or word != "fused")
    models, rows = (MODELS, ROWS) if gpu else (CPU_MODELS, CPU_ROWS)
    models, rows = (TINY, TINY_ROWS) if quick else (models, rows)
    workspace = Workspace(dist.group.WORLD) if gpu else None
    for product in products(dist.get_world_size(), models, rows):
        calls, dtype = layer_calls(product, words, device, workspace)
        found = {word: call() for word, call in calls.items()}
        pairs = {
            f"{word} {name}": (a, b)
            for word, results in found.items()
            for name, a, b in zip(("y", "dx", "dW"), results, found["none"])
        }
        limit = 8 * torch.finfo(dtype).eps if dtype == HALF else 1e-5
        report.checks.append(assert_equal(f"layer {product}", pairs, limit))
        timed = {word: waited_for(call) for word, call in calls.items()}
        report.choose(interleave(timed, rounds=rounds), product, str(dtype)[6:])
    return report


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> None:
    """Measure what the available GPUs (or CPU) can run."""
    options = parser(CLAIM).parse_args(arguments)
    sizes = (TINY, TINY_ROWS) if options.quick else (MODELS, ROWS)
    rounds = options.rounds or (2 if options.quick else 30)
    if not torch.cuda.is_available():
        print("there is no GPU: layers on 2 gloo ranks, nothing fused", flush=True)
        report = OverlapReport("overlap", CLAIM, header(ranks=2, threads_per_rank=1))
        report = run_ranks(2, compare_words, report, options.quick, rounds, torch.device("cpu"))
        report.finish(results_folder(options))
        return
    several = dist.is_torchelastic_launched()
    if several:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_node_local_rank())
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    told = {"kind": name.lower().replace(" ", "-"), "device": name}
    report = OverlapReport("overlap", CLAIM, header(**told))
    if several:
        workspace = Workspace(dist.group.WORLD)
        for product in products(dist.get_world_size(), *sizes):
            calls = real_ranks(product, device, workspace, report)
            timed = {name: waited_for(call) for name, call in calls.items()}
            report.compare(interleave(timed, rounds=rounds), product, 1.0)
        compare_words(report, options.quick, rounds, device)
        if dist.get_rank() == 0:
            report.finish(results_folder(options))
        dist.destroy_process_group()
        return
    timer = CudaTimer(device)
    for ranks in (2, 4, 8):
        for product in products(ranks, *sizes):
            calls = virtual_ranks(product, device, report)
            report.compare(interleave_on_device(calls, timer, rounds=rounds), product, WANTED)
            torch.cuda.empty_cache()
    report.finish(results_folder(options))


if __name__ == "__main__":
    main()
