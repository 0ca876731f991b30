"""The clock against published figures: its constants, its errors, and what does not fit.

    python benchmarks/clock.py      # no GPU: writes benchmarks/results/clock/calibration.json

`results/clock/points.json` holds the figures that others have published, with the page or file on
which each was read, and what the clock reads of their kernels as the pinned Triton compiles them.
Where a page's autotuner chose among configurations and does not say which, all that fit are listed
and the one that is predicted to be fastest stands for it. Every other point fits the constants of
its part (`warpweave/tune/clock/predict.py`), the rest test them. Points of one table resemble one
another, so a second test keeps out whole sources. Nothing here was measured by this project.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np

from warpweave.tune.clock.predict import (
    CLOCK,
    CONSTANTS,
    START,
    Constants,
    Kernel,
    Work,
    cycles,
    terms,
)
from warpweave.tune.parts import PARTS, Part

CLAIM = (
    "On published figures that its constants have not seen, the clock errs by less than 10 % on "
    "average on A100 and H100, and by 13 % on B200."
)
LIMITS = {80: 0.10, 90: 0.10, 100: 0.13}
RESULTS = harness.ROOT / "benchmarks" / "results" / "clock"
RATES = (8, 12, 16, 24, 32, 48, 64, 96)  # bytes per cycle that a multiprocessor loads


class Point(NamedTuple):
    """A published figure: what was run, on what, how fast."""

    part: Part
    source: str
    kernels: tuple[str, ...]
    works: tuple[Work, ...]  # of each of the kernels, whose tiles differ
    credited: float  # FLOPs that its TFLOP/s count
    tflops: float

    @property
    def cycles(self) -> float:
        """As many as the launch took at the boost clock."""
        return self.credited / self.tflops / 1e12 * CLOCK[self.part.arch]


def read(path: Path) -> tuple[list[Point], dict[str, Kernel], dict[str, dict[str, str]]]:
    """(points, kernels by name, where each source was read and what of them was left out)."""
    table = json.loads(path.read_text())
    kernels = {name: Kernel(*values) for name, values in table["kernels"].items()}
    points = [
        Point(
            PARTS[p["part"]],
            p["source"],
            tuple(p["kernels"]),
            tuple(Work(*work) for work in p["works"]),
            p["credited"],
            p["tflops"],
        )
        for p in table["points"]
    ]
    return points, kernels, {name: table[name] for name in ("sources", "left_out")}


def fit(points: list[Point], kernels: dict[str, Kernel]) -> Constants:
    """The constants that come nearest, by squares of relative errors of the time."""
    fits = (_fit_at(rate, points, kernels) for rate in RATES)
    return min(fits, key=lambda pair: pair[0])[1]


def _fit_at(
    rate: float, points: list[Point], kernels: dict[str, Kernel]
) -> tuple[float, Constants]:
    """(sum of squares, constants) at one rate of loads."""
    found = Constants(1.0, 0.7, 0.0, 0.0, 0.0, rate, 0.0)
    error = float("inf")
    for _ in range(5):  # the fastest of a point's kernels may become another
        rows = [np.array(_chosen(p, kernels, found)) / (p.cycles - START) for p in points]
        factors, error = _nonnegative(np.array(rows))
        found = Constants(*factors, rate, 0.0)
    return error, found


def _nonnegative(rows: np.ndarray) -> tuple[list[float], float]:
    """The factors >= 0 by which the columns come nearest to 1, and their sum of squares."""
    best: tuple[float, list[float]] = (float("inf"), [])
    columns = range(rows.shape[1])
    for some in itertools.chain(*(itertools.combinations(columns, n) for n in range(1, 6))):
        values = np.linalg.lstsq(rows[:, some], np.ones(len(rows)), rcond=None)[0]
        error = float(((rows[:, some] @ values - 1) ** 2).sum())
        if (values >= 0).all() and error < best[0] - 1e-9:
            best = error, [0.0] * len(columns)
            for column, value in zip(some, values, strict=True):
                best[1][column] = round(float(value), 4)
    return best[1], best[0]


def _chosen(p: Point, kernels: dict[str, Kernel], c: Constants) -> tuple[float, ...]:
    """The terms of the kernel that is predicted to be fastest."""
    every = (
        terms(kernels[name], work, p.part, c.rate)
        for name, work in zip(p.kernels, p.works, strict=True)
    )
    return min(every, key=lambda found: cycles(found, c))


def errors(points: list[Point], kernels: dict[str, Kernel], c: Constants) -> np.ndarray:
    """Predicted over published TFLOP/s, less 1."""
    return np.array([p.cycles / cycles(_chosen(p, kernels, c), c) - 1 for p in points])


def calibrate(points: list[Point], kernels: dict[str, Kernel]) -> tuple[Constants, dict[str, Any]]:
    """One part's constants, and what they are worth on points that they have not seen."""
    found = fit(points[::2], kernels)
    seen, kept = (errors(half, kernels, found) for half in (points[::2], points[1::2]))
    spread = round(float(np.quantile(np.abs(kept), 0.9)), 3)
    found = replace(found, spread=spread)
    without: list[float] = []
    for source in dict.fromkeys(p.source for p in points):
        others = [p for p in points if p.source != source]
        if others:
            out = [p for p in points if p.source == source]
            without += errors(out, kernels, fit(others, kernels)).tolist()
    return found, {
        "points": len(points),
        "seen": _summary(seen),
        "kept out": _summary(kept),
        "whole sources kept out": _summary(np.array(without)),
    }


def _summary(found: np.ndarray) -> dict[str, float]:
    if not len(found):
        return {}
    figures = {
        "mean error": np.abs(found).mean(),
        "bias": found.mean(),
        "largest": np.abs(found).max(),
    }
    return {name: round(float(value), 3) for name, value in figures.items()}


def rankings(points: list[Point], kernels: dict[str, Kernel], c: Constants) -> dict[str, Any]:
    """Spearman's correlation of tiles, predicted and published, where a table has four or more."""
    found = {}
    for source in dict.fromkeys(p.source for p in points):
        table = [p for p in points if p.source == source and len(p.kernels) == 1]
        if len({p.kernels for p in table}) == len(table) >= 4:
            predicted = [-cycles(_chosen(p, kernels, c), c) / p.credited for p in table]
            ranks = [np.argsort(np.argsort(x)) for x in (predicted, [p.tflops for p in table])]
            found[source] = round(float(np.corrcoef(*ranks)[0, 1]), 2)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Fit, test, print, write; 1 if the package's constants are not these or err by more."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args(arguments)
    points, kernels, words = read(RESULTS / "points.json")
    report: dict[str, Any] = {}
    fitted: dict[int, Constants] = {}
    for part in dict.fromkeys(p.part for p in points):
        own = [p for p in points if p.part == part]
        fitted[part.arch], summary = calibrate(own, kernels)
        off = errors(own, kernels, fitted[part.arch])
        by_source = {
            source: _summary(np.array([e for p, e in zip(own, off) if p.source == source]))
            for source in dict.fromkeys(p.source for p in own)
        }
        ranks = rankings(own, kernels, fitted[part.arch])
        report[f"sm_{part.arch}"] = {
            "constants": vars(fitted[part.arch]),
            **summary,
            "rank correlation of tiles": ranks,
            "by source": by_source,
            "figures": [
                {"source": p.source, "kernel": p.kernels[0] if len(p.kernels) == 1 else "best of "
                 f"{len(p.kernels)}", "published": p.tflops, "error": round(float(e), 3)}
                for p, e in zip(own, off)
            ],
        }  # fmt: skip
        print(f"\nsm_{part.arch} ({part.device}): {len(own)} published figures; PREDICTIONS")
        for name, value in summary.items():
            print(f"  {name}: {value}")
        for source, figures in by_source.items():
            print(f"  {source}: {figures}{f', rank {ranks[source]}' if source in ranks else ''}")
    print("\nleft out: " + "; ".join(f"{what}: {why}" for what, why in words["left_out"].items()))
    same = fitted == CONSTANTS
    if not same:
        print(f"\nwarpweave/tune/clock/predict.py has other constants than these: {fitted}")
    header = harness.header(kind="predictions", device="published figures of A100, H100, B200")
    text = {"script": "clock", "claim": CLAIM, "header": header, **words, **report}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "calibration.json").write_text(_lines(text))
    kept = {arch: report[f"sm_{arch}"]["kept out"]["mean error"] for arch in fitted}
    ok = same and all(error < LIMITS[arch] for arch, error in kept.items())
    print(json.dumps({"script": "clock", "claim": CLAIM, "ok": ok, "kept out": kept}))
    return 0 if ok else 1


def _lines(report: dict[str, Any]) -> str:
    """JSON, a line for each published figure."""
    text = json.dumps(report, indent=1)
    start = 0
    while (at := text.find('{\n    "source"', start)) >= 0:
        end = text.index("}", at)
        text = text[:at] + " ".join(text[at:end].split()) + text[end:]
        start = at + 1
    return text + "\n"


if __name__ == "__main__":
    sys.exit(main())
