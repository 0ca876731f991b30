"""``warpweave tune`` once its options are understood: tunes here, or compiles for elsewhere."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dispatch import capability, triton
from warpweave.kernels.runtime.tile_table import Tile
from warpweave.messages import one_line
from warpweave.tune.aot import Compiled
from warpweave.tune.calls import TOKENS, Call, Problem, timed_call, timed_cost
from warpweave.tune.candidates import compile_tile, first_fault, target_of
from warpweave.tune.clock.reading import main_loop
from warpweave.tune.options import TuneConfig
from warpweave.tune.parts import PARTS, Part
from warpweave.tune.predicted import predicted
from warpweave.tune.search import Bench, fitting, tune
from warpweave.tune.timing import CudaTimer


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
    """Compile the candidates for a GPU that is not there, and print those without fault, of each
    problem the one that is PREDICTED to be fastest first."""
    began, part, rows, left_out = time.perf_counter(), PARTS[config.target], [], []
    todo = config.problems()
    print(_HEADING.format(part=part), flush=True)
    for problem in todo:
        if time.perf_counter() - began > config.minutes * 60:
            left_out.append(str(problem))
            continue
        compiled = fitting(
            problem,
            part,
            lambda p, tile: compile_tile(config.target, p, tile, clock=True),
            config.steps,
        )
        shipped = next(iter(compiled))
        found = [_dry_row(problem, tile, compiled[tile], part) for tile in compiled]
        found.sort(key=lambda row: (row["predicted_us"] or [float("inf")])[0])
        for row in found:
            figures = "  ".join(f"{name} {row[name]:6}" for name in _WORST)
            clock = row["unread"] or "predicted {:.0f} us ({:.0f}-{:.0f})".format(
                *row["predicted_us"]
            )
            mark = "  (shipped)" if row["tile"] == shipped._asdict() else ""
            tile = " ".join(f"{name}={value}" for name, value in row["tile"].items())
            print(f"{problem!s:24} {tile:58} {figures}  {clock}{mark}", flush=True)
        rows += found
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


_HEADING = f"""\
Compiled for {{part.device}}, not run: {TOKENS} tokens of an 8B Llama, bytes of shared memory,
PREDICTED times with the interval in which nine of ten should lie, the shortest first. One that is
shorter than the shipped tile's may spill in other calls, which only the GPU's own run compiles."""
_WORST = {"registers": max, "shared": max, "occupancy": min}


def _dry_row(problem: Problem, tile: Tile, kernels: list[Compiled], part: Part) -> dict[str, Any]:
    """One tile's figures, those of the worst of its kernels: `ideal` and `serial` in the hot loop
    that does best, for that is the one without masks; `predicted_us` of all together, with its
    interval. None, and `unread`, where the clock cannot say."""
    cost = timed_cost(problem)
    clock = [predicted(kernel, cost, part) for kernel in kernels]
    sums = [sum(x) for x in zip(*(astuple(x) for x in clock if x), strict=True)]
    unread = next((kernel.unread for kernel in kernels if kernel.unread), "")
    loops = [main_loop(kernel.loops) for kernel in kernels if kernel.loops]
    return {
        "problem": str(problem),
        "tile": tile._asdict(),
        **{name: of(getattr(k, name) for k in kernels) for name, of in _WORST.items()},
        "ideal": min((round(x.ideal, 3) for x in loops), default=None),
        "serial": min((round(x.serial, 3) for x in loops), default=None),
        "predicted_us": [round(x, 1) for x in sums] if all(clock) else None,
        "unread": "" if all(clock) else unread or "no prediction: it spills, or has no products",
    }


def run(config: TuneConfig) -> None:
    """Do what the command was asked, print its summary; exits with 2 on what cannot be."""
    try:
        summary = dry_run(config) if config.dry else tune_here(config)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        print(f"warpweave: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(summary))
