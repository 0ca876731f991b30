"""Measure tiles of the attention and product kernels on this GPU, and keep the best for it.

``warpweave tune`` takes the shipped tile of each kernel, dtype and head dim (or kind of product)
and those around it, leaves out what spills or does not fit once compiled, checks that the others
compute what the shipped tile does, times them, and writes a table of the best, which ``warpweave
train --tiles`` and `kernels.runtime.tiles.load` take. A tile replaces the shipped one only if it is
at least 1 % faster in a second, longer measurement, and compiles cleanly in every other call that
takes it.

Run it alone on the GPU. Every row is written as soon as it is measured: Ctrl-C loses one at most.
``warpweave tune --dry --target sm_90`` needs no GPU: it lists which tiles compile cleanly.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor

from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dispatch import capability, triton
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM
from warpweave.messages import one_line
from warpweave.tune.calls import Call, Problem, problems, timed_call
from warpweave.tune.candidates import compile_tile, first_fault, target_of
from warpweave.tune.parts import PARTS
from warpweave.tune.search import Bench, fitting, short, tune
from warpweave.tune.timing import CudaTimer


@dataclass(frozen=True)
class TuneConfig:
    """What to tune, and for how long."""

    kernels: tuple[Literal["attention_fwd", "attention_dkdv", "attention_dq", "gemm"], ...] = (
        "attention_fwd", "attention_dkdv", "attention_dq", "gemm",
    )  # fmt: skip
    """Which kernels; the MLP and the QKV projection take gemm's tiles."""
    dtypes: tuple[Literal["bf16", "fp32", "fp64"], ...] = ("bf16",)
    """What they compute in; fp16 takes bf16's tiles."""
    head_dims: tuple[int, ...] = (64, 128, 256)
    """Of attention; a tile is used up to its head dim, from the next smaller one of the table."""
    steps: int = 2
    """How far from the shipped tile: 1 is about eight tiles a row, 2 about thirty."""
    minutes: float = 20.0
    """No row is begun after that."""
    output: Path = Path("tiles.json")
    """Table to write; rows that it has of other devices or kernels stay."""
    dry: bool = False
    """No GPU: list the tiles that compile cleanly for `target`, and write nothing."""
    target: Literal["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"] = "sm_90"
    """With --dry: what to compile for."""

    def problems(self) -> list[Problem]:
        """The rows to tune. Raises ValueError on numbers that cannot be."""
        if wrong := [D for D in self.head_dims if not 1 <= D <= MAX_HEAD_DIM]:
            raise ValueError(f"head dims must be 1..{MAX_HEAD_DIM}, got {wrong}")
        if self.steps not in (1, 2):
            raise ValueError(f"steps must be 1 or 2, got {self.steps}")
        if not 0 < self.minutes <= 24 * 60:
            raise ValueError(f"need 0 < minutes <= {24 * 60}, got {self.minutes}")
        if self.dry and self.output != TuneConfig.output:
            raise ValueError(f"--dry measures nothing and writes no table: drop {self.output}")
        return problems(self.kernels, self.dtypes, self.head_dims)


def cuda_bench() -> Bench:
    """The current CUDA device. Raises ValueError without one, and for one that tiles cannot be
    compiled for."""
    if not torch.cuda.is_available():
        raise ValueError(
            "tune times kernels on a CUDA GPU and there is none: run it where one is, or list the "
            "tiles that compile with --dry --target sm_90"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(capability(device))

    def call(problem: Problem) -> Call:
        generator = torch.Generator(device).manual_seed(0)

        def make(*sizes: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(sizes, dtype=dtype, device=device, generator=generator)

        return timed_call(problem, make)

    return Bench(
        tiles.device_name(device),
        PARTS[target],
        CudaTimer(device),
        lambda problem, tile: compile_tile(target, problem, tile),
        lambda problem, tile: first_fault(target, problem, tile),
        call,
    )


def tune_here(config: TuneConfig, make_bench: Callable[[], Bench] = cuda_bench) -> dict[str, Any]:
    """Tune on the current GPU, and print old against new; the summary."""
    todo, began = config.problems(), time.perf_counter()
    bench = make_bench()
    report = tune(todo, bench, config.output, minutes=config.minutes, steps=config.steps)
    for outcome in report.rows:
        print(f"{outcome.problem!s:24} {outcome}")
    return {
        "device": bench.device,
        "table": str(config.output),
        "triton": triton.__version__,
        "tuned": len(report.rows),
        "changed": sum(row.tile != shipped for _, row, shipped in report.rows),
        "wrong": report.wrong,
        "left_out": report.left_out,
        "seconds": round(time.perf_counter() - began, 1),
    }


def dry_run(config: TuneConfig) -> dict[str, Any]:
    """Compile the candidates for a GPU that is not there, and print those without fault."""
    began, part, rows, left_out = time.perf_counter(), PARTS[config.target], [], []
    todo = config.problems()
    for problem in todo:
        if time.perf_counter() - began > config.minutes * 60:
            left_out.append(str(problem))
            continue
        compiled = fitting(
            problem, part, lambda p, tile: compile_tile(config.target, p, tile), config.steps
        )
        for number, (tile, kernels) in enumerate(compiled.items()):
            worst = {
                "registers": max(k.registers for k in kernels),
                "shared": max(k.shared for k in kernels),
                "occupancy": min(k.occupancy for k in kernels),
            }
            rows.append({"problem": str(problem), "tile": tile._asdict()} | worst)
            figures = "  ".join(f"{name} {value:6}" for name, value in worst.items())
            mark = "  (shipped)" if number == 0 else ""
            print(f"{problem!s:24} {short(tile):36} {figures}{mark}", flush=True)
    return {
        "dry": True,
        "target": config.target,
        "device": f"{part.device}, compiled for, not run on",
        "table": None,
        "tuned": 0,
        "left_out": left_out,
        "rows": rows,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave tune``."""
    config = tyro.cli(TuneConfig, prog="warpweave tune", description=__doc__, args=argv)
    try:
        summary = dry_run(config) if config.dry else tune_here(config)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        print(f"warpweave: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(summary))
