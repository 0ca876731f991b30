"""Run ``warpweave tune``: tune on this GPU, or compile for a different one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from warpweave.cli.messages import refusing
from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dispatch import capability, triton
from warpweave.launch.processes import Processes
from warpweave.machine.tune.calls import TOKENS, Call, Problem, timed_call
from warpweave.machine.tune.candidates import compile_tile, first_fault, target_of
from warpweave.machine.tune.options import TuneConfig
from warpweave.machine.tune.search import Bench, fitting, short, tune
from warpweave.machine.tune.timing import CudaTimer


def cuda_bench() -> Bench:
    """The bench of the current CUDA device. Raises ValueError if there is none, or if tiles cannot
    be compiled for it."""
    if not torch.cuda.is_available():
        raise ValueError(
            "tune needs a CUDA GPU, but there is none; pass --dry --target sm_90 to only list the "
            "tiles that compile"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    target = target_of(capability(device))

    def call(problem: Problem) -> Call:
        generator = torch.Generator(device).manual_seed(0)
        return timed_call(problem, partial(torch.randn, device=device, generator=generator))

    return Bench(
        tiles.device_name(device), TARGETS[target], CudaTimer(device),
        partial(compile_tile, target), partial(first_fault, target), call,
    )  # fmt: skip


def tune_here(config: TuneConfig, make_bench: Callable[[], Bench] = cuda_bench) -> dict[str, Any]:
    """Tune on the current GPU and print old and new tiles. Return the summary."""
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
        "changed": sum(row.tile != row.shipped for row in report.rows),
        "wrong": report.wrong,
        "left_out": report.left_out,
        "seconds": round(time.perf_counter() - began, 1),
    }


def dry_run(config: TuneConfig) -> dict[str, Any]:
    """Compile the candidates for a GPU that is not present, and print those without fault.

    Each problem lists its shipped tile, if any, then the others, nearest first. Nothing is timed or
    written."""
    began, part, rows, left_out = time.perf_counter(), TARGETS[config.target], [], []
    todo = config.problems()
    print(_HEADING.format(part=part), flush=True)
    for problem in todo:
        if time.perf_counter() - began > config.minutes * 60:
            left_out.append(str(problem))
            continue
        compiled = fitting(problem, part, partial(compile_tile, config.target), config.steps)
        for number, (tile, kernels) in enumerate(compiled.items()):
            worst = {name: of(getattr(k, name) for k in kernels) for name, of in _WORST.items()}
            figures = "  ".join(f"{name} {value:6}" for name, value in worst.items())
            mark = "" if number else "  (shipped)"
            print(f"{problem!s:24} {short(tile):58} {figures}{mark}", flush=True)
            rows.append({"problem": str(problem), "tile": tile and tile._asdict(), **worst})
    return {
        "dry": True,
        "target": config.target,
        "device": f"{part.name} (compiled for it, not run on it)",
        "table": None,
        "tuned": 0,
        "left_out": left_out,
        "rows": rows,
        "seconds": round(time.perf_counter() - began, 1),
    }


_HEADING = f"""\
Compiled for {{part.name}}, not run, for {TOKENS} tokens of an 8B Llama. Columns, each for the worst
kernel: registers per thread, bytes of shared memory, and programs that one multiprocessor holds at
once (occupancy). A tile may still spill in other calls; only tuning on a GPU compiles those."""
_WORST = {"registers": max, "shared": max, "occupancy": min}


def run(config: TuneConfig, processes: Processes | None = None) -> None:
    """Run ``warpweave tune`` and print its summary. Exit with 2 if the options cannot work."""
    with refusing(ValueError, OSError, torch.OutOfMemoryError):
        summary = dry_run(config) if config.dry else tune_here(config)
    print(json.dumps(summary))
