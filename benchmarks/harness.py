"""Shared parts of all benchmarks: equal outputs first, then interleaved timing, a table and JSON.

A benchmark compares *variants* (ours and named baselines) that do the same work. `interleave` runs
them in turn, A B A B ..., so that anything else the machine does affects all of them equally. Every
ratio is the median over rounds of the ratio within a round. Timing starts only after `assert_equal`
has compared the variants' outputs.

A report is a table, then one line of JSON; `Report.finish` also writes it to
``benchmarks/results/<device>/<script>.json``. It describes the device in general words and names no
host.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from warpweave.machine.doctor.check import relative_error as relative_error

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Ratio:
    """A row's speed relative to a baseline: quantiles over rounds of their time ratio."""

    median: float
    p20: float
    p80: float


@dataclass(frozen=True)
class Row:
    """One variant at one shape.

    Attributes:
        name: the variant.
        shape: sizes, in words.
        dtype: the dtype of the computation.
        ms, p20, p80: milliseconds per step on the slowest rank: median and quantiles over rounds.
        tokens_per_s: tokens of all ranks, at the median.
        ratios: baseline -> this row's speed relative to it.
    """

    name: str
    shape: str
    dtype: str
    ms: float
    p20: float
    p80: float
    tokens_per_s: float
    ratios: dict[str, Ratio]


@dataclass(frozen=True)
class Check:
    """An equality that held before timing started: the largest relative error and its limit."""

    name: str
    error: float
    limit: float


@dataclass
class Report:
    """All rows of a script, and the device they were measured on.

    Attributes:
        script: file name of the benchmark without its suffix.
        claim: the one sentence that the benchmark supports or refutes.
        header: device, versions, commit and command.
    """

    script: str
    claim: str
    header: dict[str, Any]
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(
        self, times: Mapping[str, Sequence[float]], baselines: Sequence[str], *, shape: str,
        dtype: str, tokens: int,
    ) -> None:  # fmt: skip
        """Add rows for every variant in `times` (ms per round), compared with each baseline."""
        for name, ms in times.items():
            median, low, high = _quantiles(ms)
            ratios = {
                other: Ratio(*_quantiles([b / a for a, b in zip(ms, times[other], strict=True)]))
                for other in baselines
                if other in times and other != name and name not in baselines
            }
            rate = tokens / median * 1000
            self.rows.append(Row(name, shape, dtype, median, low, high, rate, ratios))

    def finish(self, folder: Path | None) -> None:
        """Print the table and the line of JSON; write it under `folder`, unless that is None."""
        print(self.claim)
        print(", ".join(f"{key} {value}" for key, value in self.header.items()))
        for check in self.checks:
            print(f"equal: {check.name}: {check.error:.1e} (limit {check.limit:.0e})")
        print(f"{'variant':34} {'shape':44} {'ms':>8} {'p20':>8} {'p80':>8} {'tokens/s':>9}  x")
        for row in self.rows:
            ratios = ", ".join(
                f"{r.median:.3f} ({r.p20:.3f} to {r.p80:.3f}) x {name}"
                for name, r in row.ratios.items()
            )
            print(
                f"{row.name:34} {row.shape:44} {row.ms:8.1f} {row.p20:8.1f} {row.p80:8.1f} "
                f"{row.tokens_per_s:9.0f}  {ratios}"
            )
        write_report(dataclasses.asdict(self), folder)


def write_report(report: Mapping[str, Any], folder: Path | None) -> Path | None:
    """Print a report as a line of JSON; write it under `folder`, if given, and return its path."""
    path = None
    if folder is not None:
        path = folder / report["header"]["kind"] / f"{report['script']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report), flush=True)
    return path


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the 20 % and 80 % quantiles."""
    t = torch.tensor(values, dtype=torch.float64)
    return t.median().item(), t.quantile(0.2).item(), t.quantile(0.8).item()


def parser(claim: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    options = argparse.ArgumentParser(description=claim)
    options.add_argument("--quick", action="store_true", help="tiny shapes: outputs only")
    options.add_argument("--rounds", type=int, help="timed rounds per variant")
    options.add_argument(
        "--results", type=Path, help="folder for the JSON; default: benchmarks/results, or with "
        "--quick none",
    )  # fmt: skip
    return options


def results_folder(options: argparse.Namespace) -> Path | None:
    """Return the folder for the report; None for a quick run, unless a folder was given."""
    if options.results is not None or options.quick:
        return options.results
    return ROOT / "benchmarks" / "results"


def header(**extra: Any) -> dict[str, Any]:
    """Describe device (in general words), versions, commit and command; `extra` is added."""

    def git(*args: str) -> str:
        command = ["git", "-C", str(ROOT), *args]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    triton = None
    try:
        import triton as module

        triton = module.__version__
    except ImportError:
        pass
    cores = os.cpu_count()
    name = getattr(torch.cpu, "get_capabilities", dict)().get("cpu_name", "")  # newer torch only
    named = f" ({name})" if name else ""
    return {
        "kind": "cpu",
        "device": f"CPU with {cores} cores, {torch.backends.cpu.get_cpu_capability()}{named}",
        "cpu_count": cores,
        "torch": torch.__version__,
        "triton": triton,
        "commit": git("rev-parse", "--short=12", "HEAD") or None,
        "dirty": bool(git("status", "--porcelain", "--", ".", ":!benchmarks/results")),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "load_before": round(os.getloadavg()[0], 2),
        **extra,
    }


def assert_equal(name: str, pairs: Mapping[str, tuple[Tensor, Tensor]], limit: float) -> Check:
    """Check that all (actual, expected) pairs agree to `limit`; ``AssertionError`` names one."""
    errors = {key: relative_error(*pair) for key, pair in pairs.items()}
    worst = max(errors, key=lambda key: errors[key])
    if not errors[worst] <= limit:
        raise AssertionError(f"{name}: {worst} differs by {errors[worst]:.1e}, limit {limit:.0e}")
    return Check(name, errors[worst], limit)


def interleave(
    variants: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Return milliseconds per call of every variant, one list entry per round.

    Each round calls every variant once, in a new random order (the same on all ranks): a variant's
    time depends on what ran before it, through caches and freed memory. With several ranks (if a
    process group exists), a barrier precedes each call and the slowest rank's time counts.
    """
    names = list(variants)
    ranks = dist.is_initialized() and dist.get_world_size() > 1
    for _ in range(warmup):
        for name in names:
            variants[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                if ranks:
                    dist.barrier()
                began = clock()
                variants[name]()
                times[name].append((clock() - began) * 1000)
    finally:
        gc.enable()
    if ranks:
        table = torch.tensor([times[name] for name in names], dtype=torch.float64)
        dist.all_reduce(table, dist.ReduceOp.MAX)
        times = dict(zip(names, table.tolist(), strict=True))
    return times


def torch_adamw(
    params: Iterable[Tensor], lr: float, betas: tuple[float, float], eps: float, decay: float
) -> torch.optim.AdamW:
    """Return torch's fused AdamW with weight decay on matrices only, like ours."""
    every = list(params)
    groups = [
        {"params": [p for p in every if (p.ndim > 1) == matrix], "weight_decay": decay * matrix}
        for matrix in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)


def run_ranks(world: int, entry: Callable[..., Any], *args: Any) -> Any:
    """Run ``entry(*args)`` on `world` gloo ranks with one thread each; return rank 0's result.

    Ranks are processes on this machine that connect through a file and listen on loopback only.
    `entry` must be importable and its result picklable. Raises torch's ``ProcessRaisedException``
    if a rank fails.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "warpweave.model.engine"])
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (world, os.path.join(folder, "store"), results, entry, args), nprocs=world,
            start_method="forkserver",
        )  # fmt: skip
    return results.get()


def _rank(rank: int, world: int, store: str, results: Any, entry: Callable, args: tuple) -> None:
    from warpweave.launch.processes import end_with_parent

    end_with_parent()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    result = entry(*args)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()
