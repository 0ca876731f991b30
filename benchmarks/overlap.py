"""Overlapped products against cuBLAS and NCCL, and what `overlap_model` predicts.

    python benchmarks/overlap.py                                  # one GPU, or none
    torchrun --nproc-per-node 8 benchmarks/overlap.py             # several, over NVLink
    torchrun --nproc-per-node 8 benchmarks/overlap.py --table overlap_table.json

On one GPU virtual ranks share it: the product within the overlapped kernels, with all copies and
sums at the speed of its memory, against as many products of cuBLAS. On several the whole operation,
against cuBLAS and then NCCL (or NCCL first), and torch's own fused operators where they run. Every
output is compared before anything is timed. Without a GPU nothing is timed, and nothing but
PREDICTIONS are printed, for eight of each GPU that the model knows best.

`PUBLISHED` is what others measured; the model's figure stands beside each.

With ``--table`` the linear layers are timed instead, forward, in each way to overlap that can be
timed here, and the table is written by which `overlap="auto"` chooses (`overlap_table`). On several
GPUs all three; on one none, which is refused; without a GPU `none` and `chunked` on two gloo ranks:
what fuses runs there in an interpreter, whose time says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Check,
    Report,
    assert_equal,
    header,
    interleave,
    parser,
    results_folder,
    run_ranks,
)
from torch import Tensor

from warpweave.kernels.devices import Device, find_device
from warpweave.kernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.overlap.epilogue import Epilogue
from warpweave.kernels.overlap.function import (
    all_gather_gemm_steps,
    gemm_all_reduce_steps,
    gemm_reduce_scatter_steps,
    run_local,
)
from warpweave.kernels.overlap.symmetric import local_memory
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor import column_parallel_linear, row_parallel_linear
from warpweave.parallel.tensor.overlap import place_of
from warpweave.parallel.tensor.overlap_model import (
    Moves,
    Product,
    predict,
    recommend,
)
from warpweave.parallel.tensor.overlap_table import WAYS, Measured, write_measured
from warpweave.tune.timing import CudaTimer
from warpweave.tune.timing import interleave as interleave_on_device

CLAIM = "Products that hide messages keep 0.95 of cuBLAS, and take less than cuBLAS and NCCL."
WANTED = 0.95
HALF = torch.bfloat16
MODELS = {"8B": (4096, 14336), "70B": (8192, 28672)}  # width and hidden units, of Llama 3
ROWS = (2048, 8192, 16384)
TINY, TINY_ROWS = {"tiny": (8, 24)}, (24,)
CPU_MODELS, CPU_ROWS = {"small": (512, 2048), "medium": (1024, 4096)}, (1024, 4096)
MOVES: tuple[Moves, ...] = ("gather", "scatter", "reduce")

Calls = Mapping[str, Callable[[], Any]]


@dataclass(frozen=True)
class Published:
    """Gains over cuBLAS and NCCL that others measured, least and most, by `way` on `device`;
    `exact` where it is known that they are of this product."""

    source: str
    product: Product
    device: str
    way: str
    gains: tuple[float, float]
    exact: bool = True

    def model(self) -> float:
        """The gain that the model predicts."""
        p = predict(self.product, find_device(self.device), symmetric=True)
        return p.whole / getattr(p, self.way)

    def words(self) -> str:
        """A line."""
        q, (least, most) = self.product, self.gains
        measured = (
            f"{least:.2f}" if self.exact else f"{least:.2f} to {most:.2f} of products like it"
        )
        return (
            f"{self.source}: {q.moves} M={q.M} N={q.N} K={q.K} on {q.ranks} x {self.device}, "
            f"{self.way}: measured there {measured}, PREDICTED {self.model():.2f}"
        )


def _published() -> Iterator[Published]:
    recipes = {  # hidden units of the rank, width: gains at 4096, 8192, 16384 rows
        (1792, 4096): (1.08, 1.31, 1.59),
        (3584, 8192): (1.20, 1.36, 1.38),
        (6656, 16384): (1.17, 1.19, 1.19),
    }
    for (N, K), gains in recipes.items():
        for M, gain in zip((4096, 8192, 16384), gains):
            product = Product(M, N, K, 8, "gather")
            yield Published("symm-mem-recipes", product, "H100", "fused", (gain, gain))
    product = Product(2048, 3584, 8192, 8, "gather")
    for way, name, us in (("fused", "native", 295), ("chunked", "decomposed", 354)):
        yield Published(f"pytorch #143160, {name}", product, "H100", way, (301 / us, 301 / us))
    for M, gain in ((512, 0.22), (1024, 0.34), (2048, 0.56)):
        product = Product(M, 4096, 14336, 8, "scatter", wire=2)
        yield Published("kraken #19, async-TP", product, "H100", "chunked", (gain, gain))
    for moves, gains in (("gather", (1.30, 1.65)), ("scatter", (1.05, 1.58))):
        N, K = (3584, 8192) if moves == "gather" else (8192, 3584)
        product = Product(8192, N, K, 8, moves, wire=2)
        yield Published("Triton-distributed", product, "H800", "fused", gains, exact=False)
    product = Product(8192, 8192, 3584, 8, "reduce", wire=2)
    source = "FlagTree #861 (ours differs: one shot)"
    yield Published(source, product, "H800", "fused", (1.20, 1.57), exact=False)


PUBLISHED = tuple(_published())


@dataclass
class OverlapReport(Report):
    """Also what the model says: nothing of that was measured.

    Attributes:
        measured: whether there are rows.
        predictions: of every product, in words.
        published: beside the model's figures.
        absent: baselines that cannot run here, and why.
        slow: rows below what is wanted.
    """

    measured: bool = False
    predictions: list[str] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)

    def predict(self, product: Product, device: Device | None) -> None:
        """Say what the model expects of a product."""
        self.predictions.append(str(recommend(product, device, symmetric=True)))
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(self.predictions[-1], flush=True)

    def compare(self, times: Mapping[str, list[float]], product: Product, wanted: float) -> None:
        """Rows of ours and every baseline."""
        baselines = [name for name in times if name != "warpweave"]
        shape = f"{product.moves} M={product.M} N={product.N} K={product.K} ranks={product.ranks}"
        self.add(times, baselines, shape=shape, dtype="bfloat16", tokens=product.M)
        self.slow += [
            f"{row.shape}: {ratio.median:.3f} x {name}, wanted {wanted}"
            for row in self.rows
            if row.shape == shape
            for name, ratio in row.ratios.items()
            if ratio.median < wanted
        ]

    def finish(self, folder: Path | None) -> None:
        """The model beside what others measured, the table, what is slow, the line of JSON."""
        self.published = [point.words() for point in PUBLISHED]
        for line in (*self.published, *self.slow):
            print(line)
        super().finish(folder)


def products(
    ranks: int, models: Mapping[str, tuple[int, int]] = MODELS, rows: tuple[int, ...] = ROWS
) -> Iterator[Product]:
    """The two products of a feed-forward layer: up from gathered rows, down to scattered or reduced
    ones; what moves has 16 bits, as the baselines' does."""
    for width, hidden in models.values():
        for M in rows:
            for moves in MOVES:
                N, K = hidden // ranks, width
                if moves != "gather":
                    N, K = K, N
                yield Product(M, N, K, ranks, moves, wire=2)


def draw(product: Product, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """a and b of a rank: a is its shard where rows are gathered."""
    generator = torch.Generator(device).manual_seed(rank)
    rows = product.M // product.ranks if product.moves == "gather" else product.M

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=HALF)

    return normal(rows, product.K), normal(product.K, product.N) / product.K**0.5


def rows_of(product: Product, rank: int) -> slice:
    """Which rows of the result a rank has."""
    S = product.M // product.ranks
    return slice(rank * S, (rank + 1) * S) if product.moves == "scatter" else slice(None)


# ---------------------------------------------------------------- one device


def virtual_ranks(product: Product, device: torch.device, report: OverlapReport) -> Calls:
    """Ours on as many virtual ranks, and as many products of cuBLAS, after a comparison."""
    drawn = [draw(product, rank, device) for rank in range(product.ranks)]
    memories = local_memory(
        product.ranks, slots=-(-product.M // 16) * -(-product.N // 32), device=device,
        capacity=2 * product.M * max(product.N, product.K),
    )  # fmt: skip
    whole = [a for a, _ in drawn]
    if product.moves == "gather":
        whole = [torch.cat(whole)] * product.ranks

    def ours() -> list[Tensor]:
        if product.moves == "gather":
            steps = [all_gather_gemm_steps(*x, m, Epilogue()) for x, m in zip(drawn, memories)]
            return [y for y, _, _ in run_local(steps)]
        op = gemm_reduce_scatter_steps if product.moves == "scatter" else gemm_all_reduce_steps
        return run_local([op(*x, m, Epilogue(), HALF) for x, m in zip(drawn, memories)])

    def cublas() -> list[Tensor]:
        return [a @ b for a, (_, b) in zip(whole, drawn)]

    expected = [y.float() for y in cublas()]
    if product.moves != "gather":
        total = torch.stack(expected).sum(0)
        expected = [total[rows_of(product, rank)] for rank in range(product.ranks)]
    pairs = {f"rank {i}": pair for i, pair in enumerate(zip(ours(), expected))}
    report.checks.append(assert_equal(f"{product}", pairs, 4 * torch.finfo(HALF).eps))
    return {"warpweave": ours, "cuBLAS": cublas}


# ---------------------------------------------------------------- several


def real_ranks(
    product: Product, device: torch.device, workspace: Workspace, report: OverlapReport
) -> Calls:
    """Ours, NCCL and cuBLAS, and torch's fused operator if it runs, after a comparison."""
    group = dist.group.WORLD
    rank, S = dist.get_rank(), product.M // product.ranks
    a, b = draw(product, rank, device)

    def ours() -> Tensor:
        if product.moves == "gather":
            return all_gather_gemm(a, b, memory=workspace)[0]
        op = gemm_reduce_scatter if product.moves == "scatter" else gemm_all_reduce
        return op(a, b, memory=workspace, wire_dtype=HALF)

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
    if product.moves != "reduce":  # torch has none
        try:
            fused()
            calls["torch fused"] = fused
        except RuntimeError as error:
            report.absent[f"torch fused {product.moves}"] = str(error).splitlines()[0]
    pairs = {name: (call(), theirs()) for name, call in calls.items()}
    report.checks.append(assert_equal(f"{product}", pairs, 8 * torch.finfo(HALF).eps))
    return calls


def waited_for(call: Callable[[], Any]) -> Callable[[], None]:
    """The call, until the device has done it."""

    def run() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return run


# ---------------------------------------------------------------- the table of auto


def layer_calls(
    product: Product, x: Tensor, weight: Tensor, workspace: Workspace, ways: tuple[str, ...]
) -> dict[str, Callable[[], Tensor]]:
    """The forward of a linear layer of this product, in each way."""
    layer = column_parallel_linear if product.moves == "gather" else row_parallel_linear
    cut = {"group": dist.group.WORLD, "sequence_parallel": product.moves != "reduce"}
    return {way: partial(layer, x, weight, **cut, overlap=way, workspace=workspace) for way in ways}


@torch.no_grad()
def measure_table(
    quick: bool, rounds: int, device: torch.device
) -> tuple[list[Measured], list[Check]]:
    """On every rank: rows of all products, after a comparison with the blocking twin."""
    ways = WAYS if device.type == "cuda" else WAYS[:2]
    models, rows = (MODELS, ROWS) if device.type == "cuda" else (CPU_MODELS, CPU_ROWS)
    models, rows = (TINY, TINY_ROWS) if quick else (models, rows)
    workspace, found, checks = Workspace(dist.group.WORLD), [], []
    for product in products(dist.get_world_size(), models, rows):
        x, b = draw(product, dist.get_rank(), device)
        x, weight = (t if device.type == "cuda" else t.float() for t in (x, b.t().contiguous()))
        calls = layer_calls(product, x, weight, workspace, ways)
        pairs = {way: (call(), calls["none"]()) for way, call in calls.items()}
        limit = 8 * torch.finfo(x.dtype).eps if x.dtype == HALF else 1e-5
        checks.append(assert_equal(f"{product}", pairs, limit))
        timed = {way: waited_for(call) for way, call in calls.items()}
        us = {w: round(1e3 * median(ms), 1) for w, ms in interleave(timed, rounds=rounds).items()}
        sizes = product.moves, product.M, product.N, product.K
        found.append(Measured(place_of(x, dist.group.WORLD), *sizes, us))
    return found, checks


def write_table(path: Path, rows: list[Measured], checks: list[Check]) -> None:
    """The file, and what is in it."""
    write_measured(path, rows)
    for row, check in zip(rows, checks, strict=True):
        us = ", ".join(f"{way} {time:.0f}" for way, time in row.us.items())
        print(f"{row.moves} M={row.M} N={row.N} K={row.K}: {us} us, equal to {check.error:.0e}")
    print(f"{path}: {len(rows)} rows of {rows[0].place}", flush=True)


# ---------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> None:
    """Predict, and measure what can be measured here."""
    command = parser(CLAIM)
    command.add_argument("--table", type=Path, help="write the table of overlap='auto' here")
    options = command.parse_args(arguments)
    sizes = (TINY, TINY_ROWS) if options.quick else (MODELS, ROWS)
    rounds = options.rounds or (2 if options.quick else 30)
    if options.table is not None and not torch.cuda.is_available():
        print("there is no GPU: none and chunked on 2 gloo ranks, nothing fused", flush=True)
        found = run_ranks(2, measure_table, options.quick, rounds, torch.device("cpu"))
        write_table(options.table, *found)
        return
    if not torch.cuda.is_available():
        print("there is no GPU: nothing is measured, and what follows is PREDICTED", flush=True)
        told = {"kind": "predicted", "device": "none: what follows is PREDICTED"}
        report = OverlapReport("overlap", CLAIM, header(**told))
        for name in ("A100", "H100", "B200"):
            for product in products(8, *sizes):
                report.predict(product, find_device(name))
        report.finish(options.results)
        return
    several = dist.is_torchelastic_launched()
    if options.table is not None and int(os.environ.get("WORLD_SIZE", "1")) < 2:
        command.error("--table times ranks that move data: start it with torchrun on several GPUs")
    if several:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        torch.cuda.set_device(dist.get_node_local_rank())
    device = torch.device("cuda", torch.cuda.current_device())
    if options.table is not None:
        found = measure_table(options.quick, rounds, device)
        if dist.get_rank() == 0:
            write_table(options.table, *found)
        dist.destroy_process_group()
        return
    name = torch.cuda.get_device_name(device)
    told = {"kind": name.lower().replace(" ", "-"), "device": name}
    report = OverlapReport("overlap", CLAIM, header(**told), measured=True)
    if several:
        workspace = Workspace(dist.group.WORLD)
        for product in products(dist.get_world_size(), *sizes):
            report.predict(product, find_device(name))
            calls = real_ranks(product, device, workspace, report)
            timed = {name: waited_for(call) for name, call in calls.items()}
            report.compare(interleave(timed, rounds=rounds), product, 1.0)
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
