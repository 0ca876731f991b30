"""Compare published training speeds with what `warpweave.plan` predicts.

python benchmarks/plan_rows.py                # fits, tests, writes benchmarks/results/plan/

One set of efficiencies per GPU is fitted on half of the rows (`published`) and tested on the other
half. Rows with the same layout that differ only in their release stay together, and half of each
source's rows go to either side. A row is kept and named, but not predicted, if its degrees do not
multiply to its number of GPUs, or if the planner has no figure for its precision.
"""

from __future__ import annotations

import json
import math
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import parser, results_folder
from published import (
    EIGHT_BITS,
    GPUS,
    LIKE,
    START,
    Constants,
    Row,
    read,
    seconds_predicted,
    seconds_printed,
)

from warpweave.plan.time import least_time

CLAIM = "The planner's median error is at most 5 %, and 9 of 10 rows are within 15 %."
SEED, ROUNDS = 29, 3


def halves(rows: Iterable[Row], seed: int = SEED) -> tuple[list[Row], list[Row]]:
    """Return (fit, test): for every library and GPU, half of the layouts on either side."""
    layouts: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        layouts[row.same()].append(row)
    groups: dict[tuple, list[list[Row]]] = defaultdict(list)
    for same in layouts.values():
        groups[same[0].library, same[0].gpu].append(same)
    drawn = random.Random(seed)
    sides: tuple[list[Row], list[Row]] = ([], [])
    turn = 0
    for key in sorted(groups):
        drawn.shuffle(groups[key])
        for layout in groups[key]:
            sides[turn % 2].extend(layout)
            turn += 1
    return sides


class Fit:
    """One GPU's efficiencies for some rows, by damped Gauss-Newton on the logarithms of both.

    The residuals are log(predicted / printed), with Cauchy weights, so that a row that the model
    gets wrong does not pull the others along. Each efficiency has a prior (normal in its logarithm,
    `PRIOR`) around `START`, which a few rows do not overrule. Within a round, a step takes
    `least_time`, times the ratio of the simulated time to it at the beginning of the round:
    simulating thousands of pipelines takes hours.
    """

    LOWER, UPPER = 0.05, 1.0  # bounds of a fraction
    KNEE, PRIOR = 0.05, 0.25

    def __init__(self, rows: list[Row], start: Constants = START) -> None:
        self.rows = rows
        self.names = [name for name in asdict(start) if self._matters(name)]
        self.start = start
        self.values = np.log([getattr(start, name) for name in self.names])
        self.prior = self.values.copy()
        self.trust = (self.KNEE / self.PRIOR) ** 2 / len(rows)

    def _matters(self, name: str) -> bool:
        return name != "product8" or any(row.precision in EIGHT_BITS for row in self.rows)

    def constants(self, values: np.ndarray | None = None) -> Constants:
        """Return the efficiencies for these logarithms."""
        logs = self.values if values is None else values
        return replace(self.start, **dict(zip(self.names, map(float, np.exp(logs)))))

    def run(self, rounds: int = ROUNDS) -> Constants:
        """Return the efficiencies after some rounds."""
        for _ in range(rounds):
            at = self.constants()
            ratios = [
                seconds_predicted(r, at) / seconds_predicted(r, at, least_time) for r in self.rows
            ]
            self._round(np.log(ratios))
        return self.constants()

    def _residuals(self, values: np.ndarray, ratios: np.ndarray) -> np.ndarray:
        at = self.constants(values)
        return ratios + [
            math.log(seconds_predicted(row, at, least_time) / seconds_printed(row))
            for row in self.rows
        ]

    def _round(self, ratios: np.ndarray, steps: int = 8) -> None:
        bounds = [(1e-7, 1e-3) if n == "latency" else (self.LOWER, self.UPPER) for n in self.names]
        low, high = np.log(np.array(bounds)).T
        residuals = partial(self._residuals, ratios=ratios)
        values, damping = self.values, 0.03
        r = residuals(values)
        for _ in range(steps):
            moved = [residuals(values + 0.02 * e) for e in np.eye(len(values))]
            J = (np.array(moved) - r).T / 0.02
            weights = 1 / (1 + (r / self.KNEE) ** 2)
            while damping < 100:
                A = J.T @ (weights[:, None] * J) / len(r)
                A += (self.trust + 0.03 * damping) * np.eye(len(values))
                pull = self.trust * (self.prior - values) - J.T @ (weights * r) / len(r)
                step = np.linalg.solve(A, pull)
                new = np.clip(values + np.clip(step, -0.5, 0.5), low, high)
                found = residuals(new)
                if self._loss(found, new) < self._loss(r, values):
                    values, r, damping = new, found, damping / 3
                    break
                damping *= 4
        self.values = values

    def _loss(self, residuals: np.ndarray, values: np.ndarray) -> float:
        far = self.trust * float(((values - self.prior) ** 2).sum())
        return float(np.log1p((residuals / self.KNEE) ** 2).mean()) * self.KNEE**2 + far


def fit(rows: list[Row], rounds: int = ROUNDS) -> dict[str, Constants]:
    """Return GPU -> its efficiencies. With fewer than four rows it has those of the same chip with
    different memory (`LIKE`), or `START`."""
    found = {}
    for gpu in GPUS:
        own = [row for row in rows if row.gpu == gpu]
        if len(own) > 3:
            found[gpu] = Fit(own).run(rounds)
        else:
            found[gpu] = found.get(LIKE.get(gpu, gpu), START)
        print(gpu, f"{len(own)} rows", found[gpu], flush=True)
    return found


# ------------------------------------------------------------------ report


def summary(errors: list[float]) -> dict[str, float]:
    """Summarize relative errors: number, median and 90th percentile of their size, and bias."""
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(sizes),
        "median": round(median(sizes), 4),
        "p90": round(sizes[math.ceil(0.9 * len(sizes)) - 1], 4),
        "within_15_percent": round(sum(size <= 0.15 for size in sizes) / len(sizes), 4),
        "bias": round(median(errors), 4),
    }


def predicted(rows: list[Row], found: dict[str, Constants], fitted: set[int]) -> list[dict]:
    """Return every row with its half, its seconds and its relative error."""
    table = []
    for at, row in enumerate(rows):
        entry: dict[str, Any] = {"row": at + 1, "source": row.source, "table": row.table}
        entry |= {"model": row.model, "gpu": row.gpu, "n_gpus": row.n_gpus}
        degrees = ("tp", "pp", "cp", "dp", "chunks", "micro_batch")
        sizes = {n: getattr(row, n) for n in degrees}
        entry["layout"] = " ".join(f"{n}{'?' if v is None else v}" for n, v in sizes.items())
        entry |= {"seq_len": row.seq_len, "precision": row.precision, "recompute": row.recompute}
        entry |= {"kind": row.kind, "value": row.value}
        if row.problem:
            entry |= {"half": "-", "problem": row.problem}
        else:
            printed, seconds = seconds_printed(row), seconds_predicted(row, found[row.gpu])
            entry |= {"half": "fit" if at in fitted else "test"}
            entry |= {"seconds": round(printed, 4), "predicted": round(seconds, 4)}
            entry["error"] = round(seconds / printed - 1, 4)
        table.append(entry)
    return table


def markdown(table: list[dict], summaries: dict[str, dict], found: dict[str, Constants]) -> str:
    """Return the tables as a page."""
    lines = [
        "# Published training speeds and what the planner predicts",
        "",
        "By `benchmarks/plan_rows.py`. All is PREDICTED, nothing was measured here; `error` is",
        "predicted over printed seconds of a step, less one. Efficiencies are fitted on the rows",
        "of half `fit`; they saw none of half `test`.",
        "",
        "| rows of | rows | median error | 9 of 10 within | within 15 % | bias |",
        "|---|---|---|---|---|---|",
    ]
    for name, s in summaries.items():
        lines.append(
            f"| {name} | {s['rows']} | {s['median']:.1%} | {s['p90']:.1%} | "
            f"{s['within_15_percent']:.0%} | {s['bias']:+.1%} |"
        )
    names = list(asdict(next(iter(found.values()))))
    lines += ["", f"| GPU | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for gpu, constants in found.items():
        lines.append(f"| {gpu} | {' | '.join(f'{v:.3g}' for v in asdict(constants).values())} |")
    columns = ["row", "source", "table", "model", "seq_len", "gpu", "n_gpus", "layout", "precision",
               "recompute", "kind", "value", "half", "seconds", "predicted", "error"]  # fmt: skip
    lines += ["", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for entry in table:
        cells = [str(entry.get(name, "")) for name in columns]
        if "problem" in entry:
            cells[-1] = entry["problem"]
        else:
            cells[-1] = f"{entry['error']:+.1%}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def scatter(table: list[dict], path: Path) -> None:
    """Plot predicted over printed seconds, one point per row, by half and GPU."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for at, gpu in enumerate(GPUS):
        for half, marker in (("fit", "."), ("test", "o")):
            points = [e for e in table if e["gpu"] == gpu and e["half"] == half]
            axis.scatter(
                [e["seconds"] for e in points], [e["predicted"] / e["seconds"] for e in points],
                marker=marker, s=16, color=f"C{at}", facecolors="none" if half == "test" else None,
                linewidths=0.8, label=gpu if half == "test" else None,
            )  # fmt: skip
    for height, style in ((1.0, "-"), (0.85, ":"), (1.15, ":")):
        axis.axhline(height, color="#888888", lw=0.8, ls=style)
    axis.set(xscale="log", xlabel="seconds of a step, printed", ylabel="predicted / printed")
    axis.set_title(
        "published rows: dots fitted, rings tested; dotted: 15 %", loc="left", fontsize=10
    )
    axis.legend(fontsize=8, ncols=4)
    figure.tight_layout()
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "warpweave"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Fit, test, write; the last line is JSON."""
    options = parser(CLAIM).parse_args(argv)
    rows = read()
    good = [row for row in rows if row.problem is None]
    if options.quick:  # a few rows of one GPU, with short pipelines
        good = [row for row in good if row.gpu == "B200"]
    fitted = halves(good)[0]
    found = fit(fitted, 1 if options.quick else options.rounds or ROUNDS)
    chosen = {id(row) for row in good}
    kept = [row for row in rows if row.problem or id(row) in chosen]
    numbers = {at for at, row in enumerate(kept) if any(row is other for other in fitted)}
    table = predicted(kept, found, numbers)
    sides = {half: [e["error"] for e in table if e["half"] == half] for half in ("fit", "test")}
    summaries = {half: summary(errors) for half, errors in sides.items()}
    for gpu in GPUS:
        errors = [e["error"] for e in table if e["half"] == "test" and e["gpu"] == gpu]
        if errors:
            summaries[f"test, {gpu}"] = summary(errors)
    report = {
        "script": "plan_rows", "claim": CLAIM, "seed": SEED, "summary": summaries,
        "flagged": sum("problem" in e for e in table),
        "efficiencies": {gpu: asdict(constants) for gpu, constants in found.items()},
    }  # fmt: skip
    folder = results_folder(options)
    if folder is not None:
        (folder / "plan").mkdir(parents=True, exist_ok=True)
        text = json.dumps(report | {"rows": table}, indent=1)
        (folder / "plan" / "rows.json").write_text(text + "\n")
        (folder / "plan" / "rows.md").write_text(markdown(table, summaries, found))
        scatter(table, folder / "plan" / "rows.svg")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
