"""Report what the compiler makes of every kernel at every shipped tile, without a GPU.

    python benchmarks/compiled.py                                  # all three parts: 14 minutes
    python benchmarks/compiled.py --targets sm_90 --only attention
    pip install --no-deps --target build/triton-3.9.0 triton==3.9.0
    PYTHONPATH=build/triton-3.9.0 python benchmarks/compiled.py    # with a different Triton

Facts, from the cubin: registers per thread, bytes of stack (spills) and of shared memory, programs
that one multiprocessor holds at once (`held`), the fraction of its warps that these use (`occ`),
and the tensor-core instruction. PREDICTIONS, `us` in microseconds:

    busy         the fraction of program slots that the launch's waves fill
    ideal        the tensor cores' share of a hot loop's time if everything overlapped ...
    serial       ... and if nothing did (`benchmarks/clock`); for the loop without masks
    roofline us  the least FLOPs and bytes of the whole case (`kernels/cost.py`) at the data sheet's
                 peaks: nothing is faster, and nothing real reaches it
    clock us     the launch by the clock, whose constants `clock_fit.py` fits to published figures,
                 and the interval that contained nine of ten kept-out ones

The exit status is 1 if a kernel spills (float64, for proofs, may), does not fit the part, lacks the
tensor-core instruction that it claims, or has its wgmma serialized (ptxas' C75xx). No prediction
can fail. Results go to benchmarks/results/compiled/<target>.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from math import ceil
from pathlib import Path
from typing import Any

import harness
from clock.predict import predicted
from clock.reading import main_loop
from gate.cases import GATED
from gate.compile import compile_targets
from gate.report import Report, failures

from warpweave.kernels.cost import Cost
from warpweave.kernels.devices import TARGETS

CLAIM = (
    "No shipped tile of 16 or 32 bits spills, exceeds shared memory, misses the tensor cores that "
    "it claims or serializes them."
)


PREDICTIONS = ("busy", "roofline_us", "ideal", "serial", "bound", "clock_us")  # fields of a row
LINE = (
    "{case:38} {kernel:27} {tiles:>14} {num_warps:>5} {registers:>4} {stack:>5} {shared:>6} "
    "{occupancy:>4} {warps_active:>4} {busy:>5} {ideal:>5} {serial:>6} {roofline_us:>11} "
    "{clock_us:>23}  {product}"
)
HEADINGS = {
    "case": "case", "kernel": "kernel", "tiles": "tiles", "num_warps": "warps",
    "registers": "regs", "stack": "stack", "shared": "shared", "occupancy": "held",
    "warps_active": "occ", "busy": "busy", "ideal": "ideal", "serial": "serial",
    "roofline_us": "roofline us", "clock_us": "clock us", "product": "product",
}  # fmt: skip


def row(report: Report) -> dict[str, Any]:
    """Return the figures of one compiled kernel (see the module); None if there is no such figure.

    Further fields: `tiles`, the launch's size constants (in capitals); `programs` of the launch,
    and `waves` relative to what the part holds at once; `flops` and `bytes`, the least of the case;
    `bound`, the busiest pipe; `clock_us`: [time, low, high].
    """
    part = TARGETS[report.target]
    held = report.occupancy * part.processors
    waves = report.programs / held if held else 0.0
    cost = Cost(*report.cost) if report.cost else None
    roofline = cost.seconds(part.half, part.memory) * 1e6 if cost and part.half else None
    loop = main_loop(report.loops) if report.loops else None
    clock = predicted(report, cost, part)
    sizes = ("BLOCK", "ROWS", "TILES", "STRIDE")
    return {
        "case": report.case,
        "kernel": report.kernel,
        "tiles": {n: v for n, v in report.constants.items() if n.startswith(sizes) and v},
        "num_warps": report.num_warps,
        "registers": report.registers,
        "stack": report.stack,
        "shared": report.shared,
        "occupancy": report.occupancy,
        "warps_active": round(report.occupancy * report.num_warps / part.warps, 3),
        "product": report.product,
        "programs": report.programs,
        "waves": round(waves, 2),
        "busy": round(waves / ceil(waves), 3) if waves else 0.0,
        "flops": cost and cost.flops,
        "bytes": cost and cost.bytes,
        "roofline_us": roofline and round(roofline, 2),
        "ideal": loop and round(loop.ideal, 3),
        "serial": loop and round(loop.serial, 3),
        "bound": loop.bound if loop else "",
        "clock_us": clock and [round(x, 2) for x in vars(clock).values()],
    }


def table(target: str, rows: list[dict[str, Any]]) -> None:
    """Print the rows of one part."""
    part = TARGETS[target]
    print(
        f"\n{target} ({part.name}: {part.half / 1e12:.0f} TFLOP/s bf16, "
        f"{part.memory / 1e12:.2f} TB/s by its data sheet); busy, ideal, serial and us are "
        "PREDICTIONS, see the head of benchmarks/compiled.py"
    )
    print(LINE.format(**HEADINGS))
    for r in rows:
        shown = {name: "" if value is None else value for name, value in r.items()}
        shown |= {
            "kernel": r["kernel"].strip("_").removesuffix("_kernel"),
            "tiles": "x".join(map(str, r["tiles"].values())),
            "warps_active": f"{r['warps_active']:.0%}",
            "clock_us": "{:.1f} ({:.1f}-{:.1f})".format(*r["clock_us"]) if r["clock_us"] else "",
            "product": r["product"].split(".row")[0],
        }
        print(LINE.format(**shown))


def main(arguments: list[str] | None = None) -> int:
    """Compile, print and write; return the exit status."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--targets", default=",".join(GATED), help=f"some of {', '.join(TARGETS)}")
    options.add_argument("--only", default="", help="cases whose name contains this (a|b: either)")
    options.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    options.add_argument("--results", type=Path, help="folder; default with --only: none")
    given = options.parse_args(arguments)
    targets = tuple(given.targets.split(","))
    if unknown := [target for target in targets if target not in TARGETS]:
        options.error(f"unknown targets {unknown}; expected some of {', '.join(TARGETS)}")
    folder = given.results or (None if given.only else harness.ROOT / "benchmarks" / "results")

    print("compiling all cases takes 14 minutes on 2 cores; tables follow at the end", flush=True)
    found: dict[str, list[Report]] = {target: [] for target in targets}
    for tiles in (False, True):
        part = compile_targets(
            targets, given.only, tiles=tiles, jobs=given.jobs, timeout=3600, planted=False,
            clock=True,
        )  # fmt: skip
        for target, reports in part.items():
            known = {report.case for report in found[target]}  # some cases are in both lists
            found[target] += [report for report in reports if report.case not in known]
    if not any(found.values()):
        options.error(f"no case has {given.only!r} in its name")
    wrong, summary = [], {}
    for target, reports in found.items():
        rows = [row(report) for report in reports]
        table(target, rows)
        mine = failures(reports)
        wrong += mine
        summary[target] = {"kernels": len(rows), "failures": len(mine)}
        if folder is not None:
            write(folder / "compiled" / f"{target}.json", target, rows, mine)
    kernels = sum(part["kernels"] for part in summary.values())
    print("\n" + ("\n".join(wrong) or f"nothing is wrong with any of these {kernels} kernels"))
    print(json.dumps({"script": "compiled", "claim": CLAIM, "ok": not wrong, "parts": summary}))
    return 1 if wrong else 0


def _lines(report: dict) -> str:
    """Return JSON with one line per field, and, at the end, one line per kernel for the rows."""
    head = [f"{json.dumps(key)}: {json.dumps(x)}" for key, x in report.items() if key != "rows"]
    rows = ",\n".join(map(json.dumps, report["rows"]))
    return "{\n" + ",\n".join([*head, f'"rows": [\n{rows}\n]']) + "\n}\n"


def write(path: Path, target: str, rows: list[dict[str, Any]], wrong: list[str]) -> None:
    """Write one part's rows, with the header that all results have."""
    part: dict[str, Any] = dataclasses.asdict(TARGETS[target])
    device = f"{part['name']} (compiled for it, not run on it)"
    header = harness.header(kind="compiled", device=device)
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "script": "compiled",
        "claim": CLAIM,
        "header": header,
        "part": part,
        "predictions": PREDICTIONS,
        "failures": wrong,
        "rows": rows,
    }
    path.write_text(_lines(report))


if __name__ == "__main__":
    sys.exit(main())
