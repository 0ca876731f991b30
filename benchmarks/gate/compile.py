"""Compile the cases for GPUs that need not be present, in a subprocess without TRITON_INTERPRET.

`warpweave.machine.tune.aot` compiles every kernel that a case's call launches down to the cubin.
Nothing runs. To look at your own kernels, run this in ``benchmarks``:

    python -m gate.compile sm_90 attention

(--tiles: the cases of every shipped tile instead; --clock: also print hot loops, with the order of
their waits).
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from clock import HotLoop
from clock.kernel import ReadKernel, read_kernel

from gate.cases import GATED, Case, cases
from gate.planted import planted_cases
from gate.report import Report
from gate.tiles import tile_cases
from warpweave.machine.tune.aot import compiling

BENCHMARKS = Path(__file__).resolve().parent.parent

# ---------------------------------------------------------------- in the subprocess

T, R = TypeVar("T"), TypeVar("R")
_inherited: list[Callable[[int], Any]] = []  # by a fork


def compile_case(case: Case, target: str, *, clock: bool) -> list[Report]:
    """Compile each kernel that a case launches on a target, and report on it.

    With `clock`, also report its hot loops.
    """
    of_case: dict[str, Any] = {
        "target": target,
        "case": case.name,
        "tensor_cores": case.tensor_cores,
        "float64": case.float64,
        "cost": None if case.cost is None else (case.cost.flops, case.cost.bytes),
    }
    with compiling(target) as compiled:
        try:
            case.call()
            kernels = [read_kernel(kernel, target, clock=clock) for kernel in compiled]
        except Exception as error:  # from any pass of the compiler: other cases continue
            of_case["error"] = _reason(error)
            kernels = [ReadKernel("failed", 0, {}, 0, 0, 0, 0, 0)]
    if not kernels:
        raise RuntimeError(f"case {case.name!r} launched no kernel")
    kept = {field.name for field in dataclasses.fields(Report)}
    figures = [{n: x for n, x in vars(kernel).items() if n in kept} for kernel in kernels]
    return [Report(**of_case, **facts) for facts in figures]


def in_forks(call: Callable[[T], R], items: Sequence[T], jobs: int) -> list[R]:
    """[call(item) for item in items] by `jobs` forks, which inherit both.

    Cases contain lambdas, which cannot be sent through a pipe.
    """
    start = (lambda index: call(items[index]),)
    with get_context("fork").Pool(jobs, _inherited.append, start) as pool:
        return pool.map(_call_inherited, range(len(items)), chunksize=1)


def _call_inherited(index: int) -> Any:
    return _inherited[0](index)


def _reason(error: BaseException) -> str:
    """The innermost error: Triton wraps it once per call of a device function."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"[-2000:]


def _compile_here(
    targets: tuple[str, ...], only: str, *, tiles: bool, planted: bool, clock: bool, jobs: int
) -> list[Report]:
    """Compile the cases whose name contains `only`, distributed over `jobs` forks."""
    found = tile_cases() if tiles else [*planted_cases(), *cases()] if planted else cases()
    tasks = [
        (case, target)
        for case in found
        for target in targets
        if any(word in case.name for word in only.split("|"))
        and (target in case.targets or target not in GATED)
    ]
    compiled = in_forks(lambda task: compile_case(*task, clock=clock), tasks, jobs)
    return [report for reports in compiled for report in reports]


# ---------------------------------------------------------------- in the test process


def compile_targets(
    targets: tuple[str, ...] = GATED,
    only: str = "",
    *,
    tiles: bool = False,
    jobs: int = 2,
    timeout: float = 3000,  # it takes two minutes on two idle cores
    planted: bool = True,
    clock: bool = False,
) -> dict[str, list[Report]]:
    """Compile the cases whose name contains `only` for every target; with `tiles`, `tile_cases`.

    `planted` includes the cases that must fail; `clock` reads the hot loops.
    """
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = cache
        path = str(BENCHMARKS), environment.get("PYTHONPATH", "")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        command = [sys.executable, "-P", "-m", __name__, ",".join(targets), only, f"--jobs={jobs}"]
        flags = ["--tiles"] * tiles + ["--planted"] * planted + ["--clock"] * clock
        done = subprocess.run(
            [*command, "--json", *flags],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    if done.returncode:
        raise RuntimeError(f"compiling for {targets} failed:\n{done.stderr[-4000:]}")
    reports = [Report(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    reports = [
        dataclasses.replace(r, loops=[HotLoop(**loop) for loop in vars(r)["loops"]])
        for r in reports
    ]
    return {target: [r for r in reports if r.target == target] for target in targets}


def main(arguments: list[str]) -> None:
    """``python -m gate.compile sm_90[,sm_100] [PART OF A NAME] [--tiles] [--planted] [--clock]
    [--jobs=N] [--json]``"""
    words = [a for a in arguments if not a.startswith("--")]
    jobs = [int(a.removeprefix("--jobs=")) for a in arguments if a.startswith("--jobs=")]
    reports = _compile_here(
        tuple(words[0].split(",")),
        words[1] if len(words) > 1 else "",
        tiles="--tiles" in arguments,
        planted="--planted" in arguments,
        clock="--clock" in arguments,
        jobs=jobs[0] if jobs else 1,
    )
    if "--json" in arguments:
        print(json.dumps([dataclasses.asdict(r) for r in reports]))
        return
    for r in reports:
        print(
            f"{r.target:7} {r.case:40} {r.kernel:32} warps {r.num_warps:2} regs {r.registers:3} "
            f"stack {r.stack:4} shared {r.shared:6} {r.instructions}"
            f"{r.serialised}{r.error}{r.unread}"
        )
        for loop in r.loops:
            print(
                f"    {loop.instructions} instructions, {loop.stalls} stalls, ideal "
                f"{loop.ideal:.3f} ({loop.bound}), serial {loop.serial:.3f} {loop.classes}\n"
                f"    {loop.order}"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
