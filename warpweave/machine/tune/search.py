"""The search for the fastest tile: compile, compare with the shipped one, time, keep the best.

It runs on a `Bench`; tests substitute a fake one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isnan
from pathlib import Path
from statistics import median
from typing import NamedTuple

from torch import Tensor

from warpweave.kernels.devices import Device
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dispatch import triton
from warpweave.kernels.runtime.tile_table import Tile, TileRow, read_table, write_table
from warpweave.machine.tune.aot import Compiled
from warpweave.machine.tune.calls import Call, Problem
from warpweave.machine.tune.candidates import candidates, fault, resident
from warpweave.machine.tune.timing import Timer, interleave

GAIN = 0.01  # less is a tie: medians of interleaved rounds vary by a few tenths of a percent
ROUNDS, FINAL_ROUNDS, FINALISTS = 10, 40, 3
# Limits on the root mean square of the difference of two tiles' outputs, relative to that of the
# outputs: they allow two roundings to the dtype and a different order of sums. A tile that skips
# one of 64 steps differs by 1/8.
TOLERANCES = {"bf16": 2**-6, "fp32": 2e-5, "fp64": 1e-12}


@dataclass(frozen=True)
class Bench:
    """A device to tune on: its exact name, its resources, and what it does.

    Attributes:
        timer: times a call.
        compile: compiles a problem's timed call with a tile; returns the kernels or the error.
        first_fault: the first problem with a tile in a problem's other calls, or "".
        call: makes a problem's timed call, with the same inputs every time.
    """

    device: str
    part: Device
    timer: Timer
    compile: Callable[[Problem, Tile | None], list[Compiled] | str]
    first_fault: Callable[[Problem, Tile | None], str]
    call: Callable[[Problem], Call]


class Outcome(NamedTuple):
    """A problem, the shipped and the best tile, and their microseconds; as text, "old -> new"."""

    problem: Problem
    shipped: Tile | None
    tile: Tile | None
    shipped_us: float
    us: float

    def __str__(self) -> str:
        old = f"{short(self.shipped)} {self.shipped_us:.1f} us"
        if self.tile == self.shipped:
            return f"{old}, unchanged"
        ratio = self.shipped_us / self.us
        return f"{old} -> {short(self.tile)} {self.us:.1f} us, {ratio:.3f} times as fast"


@dataclass
class SearchReport:
    """Results of a search; the tiles in `wrong` computed different values from the shipped one."""

    rows: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def short(tile: Tile | None) -> str:
    """A tile's sizes in one line."""
    if tile is None:
        return "(separate kernels)"
    return " ".join(f"{name}={value}" for name, value in tile._asdict().items())


# ---------------------------------------------------------------- one row


def fitting(
    problem: Problem,
    part: Device,
    compiler: Callable[[Problem, Tile | None], list[Compiled] | str],
    steps: int,
) -> dict[Tile | None, list[Compiled]]:
    """The shipped tile and all candidates that compile without fault, with their kernels."""
    found: dict[Tile | None, list[Compiled]] = {}
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


def agreeing(
    problem: Problem, found: Sequence[Tile | None], bench: Bench, report: SearchReport
) -> list[Tile | None]:
    """The tiles that compute the same as the first, the shipped one; others are reported."""
    shipped, *others = found
    truth = _under(problem, shipped, bench.call(problem))()
    agreed = [shipped]
    for tile in others:
        try:
            outputs = _under(problem, tile, bench.call(problem))()
        except triton.OutOfResources as error:
            _say(f"{problem} {short(tile)} does not launch: {error}")
            continue
        off = max(map(difference, outputs, truth))
        if off <= TOLERANCES[problem.dtype]:
            agreed.append(tile)
        else:
            report.wrong.append(f"{problem} {short(tile)}")
            _say(
                f"WRONG, please report: the result of {problem} {short(tile)} differs from the "
                f"shipped tile's by {off:.1e} (limit {TOLERANCES[problem.dtype]:.1e}); skipping it"
            )
    return agreed


def difference(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of actual - expected relative to that of `expected`; infinite for NaN."""
    error = (actual.double() - expected.double()).norm().item()
    scale = expected.double().norm().item()
    error = error / scale if scale else error
    return inf if isnan(error) else error


def best(
    problem: Problem, found: Sequence[Tile | None], bench: Bench
) -> tuple[Tile | None, float, float]:
    """(best tile, its microseconds, those of the first, the shipped tile), by interleaved rounds.

    The fastest few of a first pass are timed again, because the fastest of many may have been
    lucky. A tile is rejected if it is not faster by `GAIN` in that second pass, or fails in a
    different call.
    """
    shipped, call = found[0], bench.call(problem)
    calls = {tile: _under(problem, tile, call) for tile in found}
    first = _ratios(interleave(calls, bench.timer, rounds=ROUNDS), shipped)
    finalists = sorted(found[1:], key=first.__getitem__)[:FINALISTS]
    calls = {tile: calls[tile] for tile in (shipped, *finalists)}
    times = interleave(calls, bench.timer, rounds=FINAL_ROUNDS)
    us = {tile: median(ms) * 1e3 for tile, ms in times.items()}
    ratios = _ratios(times, shipped)
    for tile in sorted(finalists, key=ratios.__getitem__):
        if ratios[tile] > 1 - GAIN:
            break
        if not (wrong := bench.first_fault(problem, tile)):
            return tile, us[tile], us[shipped]
        _say(f"{problem} {short(tile)}: faster, but {wrong}")
    return shipped, us[shipped], us[shipped]


def _ratios(
    times: dict[Tile | None, list[float]], shipped: Tile | None
) -> dict[Tile | None, float]:
    """Each tile's median over rounds of its time relative to the shipped one's."""
    return {
        tile: median(a / b for a, b in zip(ms, times[shipped], strict=True))
        for tile, ms in times.items()
    }


def _under(problem: Problem, tile: Tile | None, call: Call) -> Call:
    def run() -> tuple[Tensor, ...]:
        with tiles.pinned(problem.pins(tile)):
            return call()

    return run


# ---------------------------------------------------------------- all of them


def tune(
    todo: Sequence[Problem], bench: Bench, path: Path, *, minutes: float, steps: int = 2
) -> SearchReport:
    """Tune `todo` on the bench's device; write each row to the table at `path` once measured.

    Existing rows, including those of other devices, are kept. Raises ValueError before measuring if
    the file is not a tile table, and OSError if it cannot be written.
    """
    add_rows(path, [])
    report, began = SearchReport(), time.monotonic()
    for problem in todo:
        if time.monotonic() - began > minutes * 60:
            report.left_out.append(str(problem))
            continue
        found = [*fitting(problem, bench.part, bench.compile, steps)]
        with tiles.pinned(_replaced(problem, bench.device, path)):
            found = agreeing(problem, found, bench, report)
            tile, us, shipped_us = best(problem, found, bench)
        us, shipped_us = round(us, 2), round(shipped_us, 2)
        place = bench.device, problem.kernel, problem.size, problem.kind
        if tile is None:
            add_rows(path, [], without=place)
        else:
            add_rows(path, [TileRow(*place, tile, triton.__version__, us, shipped_us)])
        report.rows.append(Outcome(problem, found[0], tile, shipped_us, us))
        _say(f"{problem}: {len(found)} tiles, {report.rows[-1]}")
    return report


def _replaced(problem: Problem, device: str, path: Path) -> dict[tiles.Key, Tile]:
    """The tiles in the table at `path` of the kernels that `problem` replaces, for this Triton."""
    return {
        (row.kernel, row.size, row.kind): row.tile
        for row in read_table(path, by="device")
        if (row.where, row.triton) == (device, triton.__version__)
        and row.kernel in problem.replaces
        and (row.size, row.kind) == (problem.size, problem.kind)
    }


def add_rows(path: Path, rows: Sequence[TileRow], without: tuple | None = None) -> None:
    """Put rows into the table at `path`, replacing those with the same key and keeping others,
    except a row with the key `without`."""
    kept = read_table(path, by="device") if os.path.lexists(path) else []
    of_key = {row.key: row for row in (*kept, *rows)}
    of_key.pop(without, None)
    write_table(path, of_key.values())


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
