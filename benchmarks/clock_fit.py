"""Fit the clock to published figures: its constants, its errors, and the figures that do not fit.

    python benchmarks/clock_fit.py  # no GPU, seconds: writes results/clock/calibration.json

`results/clock/points.json` has the figures that others have published, with the page or file of
each, and what the clock reads from their kernels as compiled by the pinned Triton. If a page's
autotuner chose among configurations and the page does not say which, all that fit are listed, and
the one with the fastest prediction is used. Every other point is used to fit the constants of its
part (`clock/predict.py`); the rest test them. Points of one table resemble each other, so a second
test keeps out whole sources. Nothing here was measured by this project.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
from clock.predict import CLOCK, CONSTANTS, START, Constants, Kernel, Work, cycles, terms

from warpweave.kernels.devices import TARGETS, Device

CLAIM = (
    "On published figures that its constants have not seen, the clock errs by less than 10 % on "
    "average on A100 and H100, and by less than 13 % on B200."
)
LIMITS = {80: 0.10, 90: 0.10, 100: 0.13}
RESULTS = harness.ROOT / "benchmarks" / "results" / "clock"
RATES = (8, 12, 16, 24, 32, 48, 64, 96)  # bytes per cycle that a multiprocessor loads
_ROUNDING = 1e-10  # a sum of squared relative errors this small is rounding


class Point(NamedTuple):
    """A published figure: the launch, the part and the speed."""

    part: Device
    source: str
    launches: dict[str, tuple[Kernel, Work]]  # the candidates, by the kernel's name
    credited: float  # FLOPs that the published TFLOP/s count
    tflops: float

    @property
    def cycles(self) -> float:
        """The cycles that the launch took, at the boost clock."""
        return self.credited / self.tflops / 1e12 * CLOCK[self.part.arch]

    def terms(self, c: Constants) -> tuple[float, ...]:
        """The terms of the kernel with the fastest prediction."""
        every = (terms(*launch, self.part, c.rate) for launch in self.launches.values())
        return min(every, key=lambda found: cycles(found, c))


def read(path: Path) -> tuple[list[Point], dict[str, dict[str, str]]]:
    """Return (points, where each source was read and what was left out of it)."""
    table = json.loads(path.read_text())
    points = []
    for p in table["points"]:
        works = dict(zip(p["kernels"], p["works"], strict=True))
        launches = {n: (Kernel(*table["kernels"][n]), Work(*work)) for n, work in works.items()}
        points.append(Point(TARGETS[p["part"]], p["source"], launches, p["credited"], p["tflops"]))
    return points, {name: table[name] for name in ("sources", "left_out")}


def fit(points: list[Point]) -> Constants:
    """Return the constants with the least squared relative errors of the time.

    Where only exposed / rate matters, several rates give the same error up to rounding, which
    differs between CPUs and versions of LAPACK. The rate of `CONSTANTS` wins if it is one of them.
    """
    found = [_fit_at(rate, points) for rate in RATES]
    nearest = min(error for error, _ in found) * (1 + 1e-9) + _ROUNDING
    usual = CONSTANTS[points[0].part.arch].rate
    return min(
        (c for error, c in found if error <= nearest), key=lambda c: (c.rate != usual, c.rate)
    )


def _fit_at(rate: float, points: list[Point]) -> tuple[float, Constants]:
    """Return (sum of squares, constants) at one load rate."""
    found, error = Constants(1.0, 0.7, 0.0, 0.0, 0.0, rate, 0.0), 0.0
    for _ in range(5):  # the fastest of a point's kernels may change
        rows = [np.array(p.terms(found)) / (p.cycles - START) for p in points]
        factors, error = _nonnegative(np.array(rows))
        found = Constants(*factors, rate, 0.0)
    return error, found


def _nonnegative(rows: np.ndarray) -> tuple[list[float], float]:
    """Return the factors >= 0 that bring the columns closest to 1, and their sum of squares."""
    best, least = np.zeros(rows.shape[1]), float("inf")
    columns = range(rows.shape[1])
    for some in itertools.chain(*(itertools.combinations(columns, n + 1) for n in columns)):
        values = np.linalg.lstsq(rows[:, some], np.ones(len(rows)), rcond=None)[0]
        error = float(((rows[:, some] @ values - 1) ** 2).sum())
        if (values >= 0).all() and error < least - 1e-9:  # fewer factors win a tie
            best, least = np.zeros(len(columns)), error
            best[[*some]] = values
    return best.round(4).tolist(), least


def errors(points: list[Point], c: Constants) -> np.ndarray:
    """Return predicted over published TFLOP/s, minus 1."""
    return np.array([p.cycles / cycles(p.terms(c), c) - 1 for p in points])


def calibrate(points: list[Point]) -> tuple[Constants, dict[str, Any]]:
    """Return one part's constants, and their errors on points that they have not seen."""
    found = fit(points[::2])
    seen, kept = (errors(half, found) for half in (points[::2], points[1::2]))
    without = list[float]()
    for source, out in by_source(points).items():
        if others := [p for p in points if p.source != source]:
            without += errors(out, fit(others)).tolist()
    spread = round(float(np.quantile(np.abs(kept), 0.9)), 3)
    return replace(found, spread=spread), {
        "points": len(points),
        "seen": _summary(seen),
        "kept out": _summary(kept),
        "whole sources kept out": _summary(np.array(without)),
    }


def by_source(points: list[Point]) -> dict[str, list[Point]]:
    """Return the points of each source."""
    found: dict[str, list[Point]] = {}
    for p in points:
        found.setdefault(p.source, []).append(p)
    return found


def _summary(found: np.ndarray) -> dict[str, float]:
    sizes = np.abs(found)
    figures = {"mean error": sizes.mean(), "bias": found.mean(), "largest": sizes.max()}
    return {name: round(float(value), 3) for name, value in figures.items()}


def rankings(points: list[Point], c: Constants) -> dict[str, Any]:
    """Return Spearman's correlation of predicted and published tiles, for tables with >= 4."""
    found = {}
    for source, own in by_source(points).items():
        table = [p for p in own if len(p.launches) == 1]
        if len({name for p in table for name in p.launches}) == len(table) >= 4:
            predicted = [-cycles(p.terms(c), c) / p.credited for p in table]
            ranks = [np.argsort(np.argsort(x)) for x in (predicted, [p.tflops for p in table])]
            found[source] = round(float(np.corrcoef(*ranks)[0, 1]), 2)
    return found


def report(points: list[Point]) -> tuple[Constants, dict[str, Any]]:
    """Fit one part, print its errors, and return its constants and all figures."""
    part, (found, summary) = points[0].part, calibrate(points)
    off, ranks = errors(points, found), rankings(points, found)
    tables = {source: _summary(errors(own, found)) for source, own in by_source(points).items()}
    print(f"\nsm_{part.arch} ({part.name}): {len(points)} published figures; PREDICTIONS err by")
    for name in ("seen", "kept out", "whole sources kept out"):
        print(f"  {name:24} {_percent(summary[name])}")
    for source, figures in tables.items():
        rank = f", rank correlation of tiles {ranks[source]}" if source in ranks else ""
        print(f"  {source:24} {_percent(figures)}{rank}")
    return found, {
        "constants": vars(found),
        **summary,
        "rank correlation of tiles": ranks,
        "by source": tables,
        "figures": [
            {"source": p.source, "kernel": _name(p), "published": p.tflops, "error": round(e, 3)}
            for p, e in zip(points, off.tolist(), strict=True)
        ],
    }


def _name(p: Point) -> str:
    return f"best of {len(p.launches)}" if len(p.launches) > 1 else next(iter(p.launches))


def _percent(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1%}" for name, value in figures.items())


def main(arguments: list[str] | None = None) -> int:
    """Fit, test, print, write; return 1 if the package's constants differ or err by more."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args(arguments)
    points, words = read(RESULTS / "points.json")
    fitted, parts = dict[int, Constants](), dict[str, Any]()
    for part in dict.fromkeys(p.part for p in points):
        own = [p for p in points if p.part == part]
        fitted[part.arch], parts[f"sm_{part.arch}"] = report(own)
    for title, lines in words.items():
        print(f"\n{title.replace('_', ' ')}:")
        print(*(f"  {name}: {said}" for name, said in lines.items()), sep="\n")
    if fitted != CONSTANTS:
        print(f"\nbenchmarks/clock/predict.py has different constants; fitted: {fitted}")
    header = harness.header(kind="predictions", device="published figures of A100, H100, B200")
    text = {"script": "clock_fit", "claim": CLAIM, "header": header, **words, **parts}
    given.results.mkdir(parents=True, exist_ok=True)
    (given.results / "calibration.json").write_text(_lines(text))
    kept = {arch: parts[f"sm_{arch}"]["kept out"]["mean error"] for arch in fitted}
    ok = fitted == CONSTANTS and all(error < LIMITS[arch] for arch, error in kept.items())
    print(json.dumps({"script": "clock_fit", "claim": CLAIM, "ok": ok, "kept out": kept}))
    return 0 if ok else 1


def _lines(report: dict[str, Any]) -> str:
    """Return JSON with one line per published figure."""
    text = json.dumps(report, indent=1)
    return re.sub(r'\{\s+"source":[^}]*', lambda found: " ".join(found[0].split()), text) + "\n"


if __name__ == "__main__":
    sys.exit(main())
