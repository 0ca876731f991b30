"""Measure tiles of the attention and product kernels on this GPU, and keep the best for it.

``warpweave tune`` takes the shipped tile of each kernel, dtype and head dim (or kind of product)
and those around it, leaves out what spills or does not fit once compiled, checks that the others
compute what the shipped tile does, times them, and writes the table that this GPU's launches read
from then on (`kernels/runtime/tiles.py`). A tile replaces the shipped one only if it is at least
1 % faster in a second, longer measurement, and compiles cleanly in every other call that takes it.
Training never tunes: without the table, the shipped tiles are used.

Run it alone on the GPU. Every row is written as soon as it is measured: Ctrl-C loses one at most.
``warpweave tune --dry --target sm_90`` needs no GPU: it lists which tiles compile cleanly.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
import tyro
from torch import Tensor

from warpweave.aot import PARTS, Compiled, Part
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dispatch import capability, triton
from warpweave.kernels.runtime.tile_table import MAX_HEAD_DIM, Row, Tile, read_table, write_table
from warpweave.tile_calls import Call, Problem, problems, timed_call
from warpweave.tile_candidates import (
    candidates,
    compile_tile,
    fault,
    first_fault,
    resident,
    target_of,
)
from warpweave.timing import Clock, CudaClock, interleave

GAIN = 0.01  # less is a tie: medians of interleaved rounds repeat to a few tenths of a percent
ROUNDS, FINAL_ROUNDS, FINALISTS = 10, 40, 3
# Root mean square of the difference of two tiles' outputs over that of the outputs: two roundings
# to the dtype, and sums in another order. A tile that leaves out one of 64 steps differs by 1/8.
LIMITS = {"bf16": 2**-6, "fp32": 2e-5, "fp64": 1e-12}


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
    output: Path | None = None
    """Where to write instead of the table that launches read."""
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
        if self.dry and self.output is not None:
            raise ValueError(f"--dry measures nothing and writes no table: drop {self.output}")
        return problems(self.kernels, self.dtypes, self.head_dims)


@dataclass(frozen=True)
class Bench:
    """A device as tuning sees it.

    Attributes:
        device: its exact name.
        part: what it offers.
        clock: times a call.
        compile: what the compiler makes of a problem's timed call under a tile, or why it fails.
        first_fault: what is wrong with a tile in a problem's other calls, or "".
        call: a problem's timed call, of inputs that are the same each time it is asked for.
    """

    device: str
    part: Part
    clock: Clock
    compile: Callable[[Problem, Tile], list[Compiled] | str]
    first_fault: Callable[[Problem, Tile], str]
    call: Callable[[Problem], Call]


class Outcome(NamedTuple):
    """A problem, the row that was written for it, and the shipped tile."""

    problem: Problem
    row: Row
    shipped: Tile


@dataclass
class Report:
    """What has come of it; `wrong` are tiles that computed something else than the shipped one."""

    rows: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- one row


def fitting(
    problem: Problem,
    part: Part,
    compiler: Callable[[Problem, Tile], list[Compiled] | str],
    steps: int,
) -> dict[Tile, list[Compiled]]:
    """The shipped tile, and the candidates that compile without fault, as compiled."""
    found: dict[Tile, list[Compiled]] = {}
    shipped, *others = candidates(problem, part, steps)
    for tile in (shipped, *others):
        compiled = compiler(problem, tile)
        if isinstance(compiled, str):
            if tile == shipped:
                raise ValueError(f"{problem}: the shipped tile does not compile: {compiled}")
            continue
        if tile == shipped:
            found[tile] = compiled
        if not fault(compiled, problem):
            found.setdefault(resident(tile, compiled), compiled)
    return found


def agreeing(problem: Problem, found: Sequence[Tile], bench: Bench, report: Report) -> list[Tile]:
    """The tiles that compute what the first one, the shipped, does; the others are reported."""
    shipped, *others = found
    truth = _under(problem, shipped, bench.call(problem))()
    agreed = [shipped]
    for tile in others:
        try:
            outputs = _under(problem, tile, bench.call(problem))()
        except triton.OutOfResources as error:
            _say(f"{problem} {_short(tile)}: does not launch: {error}")
            continue
        off = max(map(difference, outputs, truth))
        if off <= LIMITS[problem.dtype]:
            agreed.append(tile)
        else:
            report.wrong.append(f"{problem} {_short(tile)}")
            _say(
                f"WRONG, please report: {problem} {_short(tile)} differs from the shipped tile's "
                f"result by {off:.1e}, limit {LIMITS[problem.dtype]:.1e}; it is left out"
            )
    return agreed


def difference(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of actual - expected over that of `expected`; infinite for NaN."""
    error = (actual.double() - expected.double()).norm().item()
    scale = expected.double().norm().item()
    error = error / scale if scale else error
    return error if error == error else float("inf")


def best(problem: Problem, found: Sequence[Tile], bench: Bench) -> tuple[Tile, float, float]:
    """(tile, its microseconds, those of the first one, the shipped), by interleaved rounds.

    The fastest few of a first pass run again, for the winner of many may have been lucky; whoever
    is not faster by `GAIN` in that second pass, or has a fault in another call, has lost.
    """
    shipped, call = found[0], bench.call(problem)
    calls = {tile: _under(problem, tile, call) for tile in found}
    first = _ratios(interleave(calls, bench.clock, rounds=ROUNDS), shipped)
    finalists = sorted(found[1:], key=first.__getitem__)[:FINALISTS]
    calls = {tile: calls[tile] for tile in (shipped, *finalists)}
    times = interleave(calls, bench.clock, rounds=FINAL_ROUNDS)
    us = {tile: median(ms) * 1e3 for tile, ms in times.items()}
    ratios = _ratios(times, shipped)
    for tile in sorted(finalists, key=ratios.__getitem__):
        if ratios[tile] > 1 - GAIN:
            break
        if not (wrong := bench.first_fault(problem, tile)):
            return tile, us[tile], us[shipped]
        _say(f"{problem} {_short(tile)}: faster, but {wrong}")
    return shipped, us[shipped], us[shipped]


def _ratios(times: dict[Tile, list[float]], shipped: Tile) -> dict[Tile, float]:
    """Each tile's median over rounds of its time over the shipped one's."""
    return {
        tile: median(a / b for a, b in zip(ms, times[shipped], strict=True))
        for tile, ms in times.items()
    }


def _under(problem: Problem, tile: Tile, call: Call) -> Call:
    def run() -> tuple[Tensor, ...]:
        with tiles.pinned(problem.pins(tile)):
            return call()

    return run


# ---------------------------------------------------------------- all of them


def tune(
    todo: Sequence[Problem], bench: Bench, path: Path, *, minutes: float, steps: int = 2
) -> Report:
    """Tune `todo` on the bench's device; each row is in the table at `path` once it is measured.

    Rows that the table has already, for other devices too, stay. Raises ValueError if there is a
    file that is no such table, before anything is measured, and OSError if it cannot be written.
    """
    add_rows(path, [])
    report, began = Report(), time.monotonic()
    for problem in todo:
        if time.monotonic() - began > minutes * 60:
            report.left_out.append(str(problem))
            continue
        found = [*fitting(problem, bench.part, bench.compile, steps)]
        found = agreeing(problem, found, bench, report)
        tile, us, shipped_us = best(problem, found, bench)
        row = Row(
            bench.device, problem.kernel, problem.size, problem.kind, tile,
            triton.__version__, round(us, 2), round(shipped_us, 2),
        )  # fmt: skip
        add_rows(path, [row])
        report.rows.append(Outcome(problem, row, found[0]))
        _say(f"{problem}: {len(found)} tiles, {_line(report.rows[-1])}")
    return report


def add_rows(path: Path, rows: Sequence[Row]) -> None:
    """Put rows into the table at `path`, in place of those of the same key; the others stay."""
    kept = read_table(path, by="device") if os.path.lexists(path) else []
    write_table(path, {row.key: row for row in (*kept, *rows)}.values())


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
        CudaClock(device),
        lambda problem, tile: compile_tile(target, problem, tile),
        lambda problem, tile: first_fault(target, problem, tile),
        call,
    )


def tune_here(config: TuneConfig, make_bench: Callable[[], Bench] = cuda_bench) -> dict[str, Any]:
    """Tune on the current GPU, and print old against new; the summary."""
    todo, began = config.problems(), time.perf_counter()
    path = config.output or tiles.own_path()
    if path is None:
        raise ValueError("there is no home folder for a tile table: pass --output FILE")
    bench = make_bench()
    report = tune(todo, bench, path, minutes=config.minutes, steps=config.steps)
    for outcome in report.rows:
        print(f"{outcome.problem!s:24} {_line(outcome)}")
    return {
        "device": bench.device,
        "table": str(path),
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
            print(f"{problem!s:24} {_short(tile):36} {figures}{mark}", flush=True)
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


def _line(outcome: Outcome) -> str:
    _, row, shipped = outcome
    old = f"{_short(shipped)} {row.shipped_us:.1f} us"
    if row.tile == shipped:
        return f"{old}, which stays"
    return (
        f"{old} -> {_short(row.tile)} {row.us:.1f} us, {row.shipped_us / row.us:.3f} times as fast"
    )


def _short(tile: Tile) -> str:
    return " ".join(f"{name}={value}" for name, value in tile._asdict().items())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave tune``."""
    config = tyro.cli(TuneConfig, prog="warpweave tune", description=__doc__, args=argv)
    try:
        summary = dry_run(config) if config.dry else tune_here(config)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        print(f"warpweave: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
