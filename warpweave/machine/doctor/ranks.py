"""Checks over ranks: every mesh axis by `prove`, each fused product, and the collectives' speed.

One launch of ranks runs many checks. If it ends early, the first check without a result has failed,
and the ranks are started again for the checks after it.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.kernels.overlap import all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.launch.devices import BACKENDS
from warpweave.launch.interrupt import Stopped
from warpweave.launch.ranks import launch
from warpweave.launch.session import Session, join, reported
from warpweave.machine.doctor.check import Check, Measured, within_budget
from warpweave.machine.doctor.machine import drain
from warpweave.parallel.collectives import (
    start_all_gather,
    start_all_reduce_,
    start_exchange,
    start_reduce_scatter,
)
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.prove.command import prove_rank
from warpweave.prove.layouts import Layout
from warpweave.prove.options import ProveConfig
from warpweave.prove.proof import LIMITS, Errors

TIMEOUT = 120.0  # seconds that a message may take


def axes(device: str, ranks: int, dtypes: tuple[str, ...]) -> Iterator[Check]:
    """Checks that prove every axis on `ranks` ranks: a model trained there equals the plain one."""
    chosen: dict[str, dict[str, Any]] = {
        "one device": {},
        "dp, ZeRO 3": {"dp": ranks, "zero": 3},
        "tp": {"tp": ranks, "style": "llama", "sequence_parallel": False},
        "tp, sequence parallel, chunked": {"tp": ranks, "overlap": "chunked"},
        "cp, ring": {"cp": ranks, "cp_strategy": "ring", "style": "llama"},
        "cp, Ulysses": {"cp": ranks, "cp_strategy": "ulysses", "packed": True},
        "pp, 1F1B": {"pp": ranks, "style": "llama"},
        "pp, interleaved": {"pp": ranks, "schedule": "interleaved", "style": "gemma"},
    }
    if device == "cuda":
        chosen["tp, fused"] = {"tp": ranks, "overlap": "fused"}
    if ranks == 1:
        chosen = {"one device": {}}
    named = [
        (f"{name}, {dtype}", layout)
        for name, options in chosen.items()
        for dtype in dtypes
        for layout in ProveConfig(**options, dtype=dtype, device=device).layouts()
    ]
    named.sort(key=lambda of: -of[1].mesh.world)  # the order that `prove_rank` requires
    rows = _RankRows([layout for _, layout in named], _proven)
    for number, (name, layout) in enumerate(named):
        yield Check(name, f"the plain model on one {device}", partial(_axis, rows, number, layout))


def fused(device: str, ranks: int, dtypes: tuple[str, ...]) -> Iterator[Check]:
    """Checks of each product fused with communication, and each collective, on `ranks` ranks."""
    if ranks == 1:
        return
    items = [(name, dtype) for dtype in dtypes for name in PRODUCTS]
    items += [(name, dtypes[0]) for name in COLLECTIVES]
    rows = _RankRows(items, partial(_on_ranks, device, ranks))
    for number, (name, dtype) in enumerate(items):
        against = "reference, all ranks' terms" if name in PRODUCTS else "its sum or parts"
        run = partial(lambda number: Measured(**rows[number]), number)
        yield Check(f"{name} on {ranks} ranks, {dtype}", against, run)


class _RankRows:
    """The ranks' result for each item; the ranks start when the first result is requested."""

    def __init__(self, items: Sequence[Any], start: Callable[[Sequence[Any], str], None]) -> None:
        self._items, self._start, self._found, self._said = items, start, list[dict](), ""

    def __getitem__(self, number: int) -> dict:
        if number >= len(self._found):
            self._found += [{}] * (number - len(self._found))  # for items whose launch raised
            self._found += self._more(self._items[number:])
        if found := self._found[number]:
            return found
        raise RuntimeError(f"the ranks exited before they produced this result{self._said}")

    def _more(self, items: Sequence[Any]) -> list[dict]:
        """The rows of these items, ending with an empty row for the first one without a result."""
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
            try:
                self._start(items, file.name)
            except Stopped:
                raise
            except SystemExit as ended:  # a rank failed and has reported why
                self._said = f" (exit status {ended.code}, see above)"
            lines = [line for line in file if line.endswith("\n")]
        found = [json.loads(line) for line in lines]
        return found + [{}] * (len(found) < len(items))


# ---------------------------------------------------------------- axes


def _axis(rows: _RankRows, number: int, layout: Layout) -> Measured:
    row = rows[number]
    errors = Errors(**row["errors"])
    if row["layout"] != str(layout):
        raise RuntimeError(f"expected results for layout {layout}, got results for {row['layout']}")
    return Measured(errors.worst, LIMITS[layout.dtype], f"largest: {errors.where}")


def _proven(layouts: Sequence[Layout], path: str) -> None:
    """Run `prove_rank` on as many ranks as the first layout, the largest, needs."""
    backend = BACKENDS[layouts[0].device]
    launch(_prove_quietly, ([*layouts], TIMEOUT, path), layouts[0].mesh, backend=backend)


def _prove_quietly(layouts: list[Layout], timeout: float, path: str, port: int) -> None:
    """Run `prove_rank` with its table on stderr, as stdout is for the page."""
    os.dup2(2, 1)
    prove_rank(layouts, timeout, path, port)


# ---------------------------------------------------------------- products and collectives


def _on_ranks(device: str, ranks: int, items: Sequence[tuple[str, str]], path: str) -> None:
    args = (device, ranks, [*items], path)
    launch(measure_rank, args, Mesh(tp=ranks), backend=BACKENDS[device])


def measure_rank(
    device: str, ranks: int, items: list[tuple[str, str]], path: str, port: int | None = None
) -> None:
    """Measure `items` in turn as one rank; rank 0 writes a line of JSON for each to `path`."""
    backend = BACKENDS[device]
    session = join(Mesh(tp=ranks), timeout=TIMEOUT, backend=backend, port=port)
    torch.set_num_threads(1)
    with reported(session):
        measure_items(session, items, path)
        session.close()


def measure_items(session: Session, items: Sequence[tuple[str, str]], path: str) -> None:
    """Measure `items` on ranks that have joined (`measure_rank`)."""
    mesh = session.mesh.connect(session.device.type)
    group = mesh.group("tp")
    for number, (name, dtype) in enumerate(items):
        session.beat(number, name)
        if name in PRODUCTS:
            found = _fused_product(name, NAMED_DTYPES[dtype], session.device, mesh)
        else:
            found = _collective(name, session.device, group)
        every = [Measured(*of) for of in exchange([*found], group)]
        largest = max(every, key=lambda of: of.error - of.limit if of.error <= of.limit else inf)
        if session.rank == 0:
            with open(path, "a") as file:
                file.write(json.dumps(largest._asdict()) + "\n")


PRODUCTS = ("all-gather -> gemm", "gemm -> reduce-scatter", "gemm -> all-reduce")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "send and receive")


def _fused_product(
    name: str, dtype: torch.dtype, device: torch.device, mesh: ConnectedMesh
) -> Measured:
    """Check one fused product of a[rank] and b[rank]; every rank draws the same a and b."""
    rank, ranks, memory = mesh.index("tp"), mesh.size("tp"), mesh.workspace("tp")
    M, K, N = (257, 515, 130) if device.type == "cuda" else (3, 11, 10)
    generator = torch.Generator().manual_seed(0)
    shapes = (ranks, M if name == PRODUCTS[0] else ranks * M, K), (ranks, K, N)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    a, b = (x.to(device, dtype) for x in drawn)

    def result(a: Tensor, b: Tensor) -> Tensor:
        if name == PRODUCTS[0]:
            return a.flatten(0, 1) @ b[rank]
        total = (a @ b).sum(0)
        return total.chunk(ranks)[rank] if name == PRODUCTS[1] else total

    if name == PRODUCTS[0]:
        ours, *_ = all_gather_gemm(a[rank], b[rank], memory=memory)
    elif name == PRODUCTS[1]:
        ours = gemm_reduce_scatter(a[rank], b[rank], memory=memory)
    else:
        ours = gemm_all_reduce(a[rank], b[rank], memory=memory)
    wide = compute_dtype(a)
    plain = result(a.to(wide), b.to(wide)).to(dtype)
    return within_budget(ours, plain, result(a.double(), b.double()), K)


def _collective(name: str, device: torch.device, group: dist.ProcessGroup) -> Measured:
    """Measure the fraction of wrong elements and the speed of the links: bytes per second that
    leave a rank in a ring algorithm."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    n = (1 << 24 if device.type == "cuda" else 1 << 18) // ranks * ranks
    whole = torch.arange(n, device=device) % 1000

    def of(rank: int) -> Tensor:
        return (whole + rank).float()

    total = (whole * ranks + ranks * (ranks - 1) // 2).float()
    before, after, part = (rank - 1) % ranks, (rank + 1) % ranks, (ranks - 1) / ranks
    run, right, share = {
        "all-reduce": (lambda x: start_all_reduce_(x, group), total, 2 * part),
        "all-gather": (lambda x: start_all_gather(x.chunk(ranks)[rank], group),
                       torch.cat([of(r).chunk(ranks)[r] for r in range(ranks)]), part),
        "reduce-scatter": (lambda x: start_reduce_scatter(x, group),
                           total.chunk(ranks)[rank], part),
        "send and receive": (
            lambda x: start_exchange(x, torch.empty_like(x), after, before, group), of(before), 1.0,
        ),
    }[name]  # fmt: skip
    for _ in range(3):  # the first one creates the communicator
        x = of(rank)
        drain(device)
        began = time.perf_counter()
        found = run(x).wait()
        drain(device)
        seconds = time.perf_counter() - began
    wrong = (found != right).double().mean().item() if found.shape == right.shape else 1.0
    return Measured(wrong, 0.0, f"{share * n * 4 / seconds / 1e9:.2f} GB/s")
