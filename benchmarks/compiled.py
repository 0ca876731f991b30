"""What the compiler makes of every kernel at every tile that is shipped. It needs no GPU.

    python benchmarks/compiled.py                                  # sm_80, sm_90, sm_100: minutes
    python benchmarks/compiled.py --targets sm_90 --only attention
    pip install --no-deps --target build/triton-3.9.0 triton==3.9.0
    PYTHONPATH=build/triton-3.9.0 python benchmarks/compiled.py    # with another Triton
    python benchmarks/compiled.py --accept                         # what it reads is the new table

Facts, from the cubin: registers, bytes of stack (spills), shared memory, programs that one
multiprocessor holds at once (occupancy), the tensor-core instruction used. Predictions, marked as
such: the roofline of the op's least FLOPs and bytes (`kernels/cost.py`) at the data sheet's peaks,
which no kernel undercuts and no real one reaches; `busy`, the share of the multiprocessors' slots
that the launch's whole waves of programs fill; and the roofline over `busy`, the time if nothing
but slots that stay empty kept the kernel from it. `ideal` and `serial` are the clock's
(`warpweave/tune/clock`): the tensor cores' share of a hot loop's time if everything overlapped and
if nothing did, of the loop with the larger `serial` (the one without masks); `bound` is the pipe
that is busiest. `clock us` is what the clock's constants, fitted to published figures, make of the
launch (`benchmarks/clock.py`; `warpweave/tune/clock/predict.py`), with the interval in which nine
of ten kept-out figures lay.

Exit status 1 if a kernel spills (float64, for proofs, may), does not fit the part, lacks the
tensor-core instruction that it claims, or has its wgmma run one by one (ptxas' C75xx); the lines
then say which. So does a hot loop with 3 % more instructions or stalls per 1,000 FLOPs of the
tensor cores than benchmarks/results/clock/<target>.json has under the Triton of that table, or of a
kernel that it does not have: `--accept` (with `--only`, of some) takes the new figures, which a
commit then shows. Results go to benchmarks/results/compiled/<target>.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from math import ceil
from pathlib import Path
from typing import Any

import harness
import triton

from warpweave.kernels.cost import Cost
from warpweave.tune.clock.predict import main_loop
from warpweave.tune.clock.ratchet import read_table, worsened, write_table
from warpweave.tune.parts import PARTS
from warpweave.tune.predicted import predicted

sys.path.insert(0, str(harness.ROOT / "tests"))  # the cases: tests and benchmarks share them
from compile_targets import TARGETS, Report, compile_targets, failures

CLOCK = harness.ROOT / "benchmarks" / "results" / "clock"
CLAIM = (
    "No shipped tile of 16 or 32 bits spills, exceeds shared memory, misses the tensor cores that "
    "it claims or keeps them waiting for one another, and no hot loop costs more than is committed."
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel of one case on one part.

    Attributes:
        occupancy: programs per multiprocessor; `warps_active` is that of the part's warps.
        waves: programs of the launch over those that the whole part holds at once.
        busy: PREDICTION: waves over whole waves, the share of slots that are filled.
        tiles: the launch's constants in capitals that are sizes.
        flops, bytes: the least that the whole case needs.
        roofline_us: PREDICTION for the whole case: no kernel is faster.
        predicted_us: PREDICTION: `roofline_us` over `busy`.
        ideal, serial, bound: PREDICTIONS of the clock; None and "" without products.
        clock_us: PREDICTION of the launch: [time, low, high]; None where the clock cannot say.
    """

    case: str
    kernel: str
    tiles: dict[str, int]
    num_warps: int
    registers: int
    stack: int
    shared: int
    occupancy: int
    warps_active: float
    product: str
    programs: int
    waves: float
    busy: float
    flops: int | None
    bytes: int | None
    roofline_us: float | None
    predicted_us: float | None
    ideal: float | None
    serial: float | None
    bound: str
    clock_us: list[float] | None


def row(report: Report) -> Row:
    """The figures of one compiled kernel."""
    part = PARTS[report.target]
    held = report.occupancy * part.processors
    waves = report.programs / held if held else 0.0
    flops, bytes_ = report.cost or (None, None)
    busy = waves / ceil(waves) if waves else 0.0
    roofline = None
    if report.cost is not None and part.flops:
        roofline = Cost(*report.cost).seconds(part.flops, part.bandwidth) * 1e6
    loop = main_loop(report.loops) if report.loops else None
    clock = predicted(report, report.cost and Cost(*report.cost), part)
    return Row(
        case=report.case,
        kernel=report.kernel,
        tiles={
            name: value
            for name, value in report.constants.items()
            if name.startswith(("BLOCK", "ROWS", "TILES", "STRIDE")) and value
        },
        num_warps=report.num_warps,
        registers=report.registers,
        stack=report.stack,
        shared=report.shared,
        occupancy=report.occupancy,
        warps_active=round(report.occupancy * report.num_warps / part.warps, 3),
        product=report.product,
        programs=report.programs,
        waves=round(waves, 2),
        busy=round(busy, 3),
        flops=flops,
        bytes=bytes_,
        roofline_us=None if roofline is None else round(roofline, 2),
        predicted_us=round(roofline / busy, 2) if roofline is not None and busy else None,
        ideal=None if loop is None else round(loop.ideal, 3),
        serial=None if loop is None else round(loop.serial, 3),
        bound="" if loop is None else loop.bound,
        clock_us=None if clock is None else [round(x, 2) for x in vars(clock).values()],
    )


def table(target: str, rows: list[Row]) -> None:
    """Print the rows of one part."""
    part = PARTS[target]
    print(
        f"\n{target} ({part.device}: {part.flops / 1e12:.0f} TFLOP/s bf16, "
        f"{part.bandwidth / 1e12:.2f} TB/s by its data sheet); busy, ideal, serial and us are "
        "PREDICTIONS"
    )
    print(
        f"{'case':38} {'kernel':27} {'tiles':>14} {'warps':>5} {'regs':>4} {'stack':>5} "
        f"{'shared':>6} {'held':>4} {'occ':>4} {'busy':>5} {'ideal':>5} {'serial':>6} "
        f"{'roofline us':>11} {'/ busy':>8} {'clock us':>22}  product"
    )
    for r in rows:
        tiles = "x".join(str(v) for v in r.tiles.values())
        roofline, predicted, ideal, serial = (
            "" if x is None else f"{x:.{digits}f}"
            for x, digits in ((r.roofline_us, 1), (r.predicted_us, 1), (r.ideal, 3), (r.serial, 3))
        )
        clock = "{:.1f} ({:.1f}-{:.1f})".format(*r.clock_us) if r.clock_us else ""
        print(
            f"{r.case:38} {r.kernel.strip('_').removesuffix('_kernel'):27} {tiles:>14} "
            f"{r.num_warps:5} {r.registers:4} {r.stack:5} {r.shared:6} {r.occupancy:4} "
            f"{r.warps_active:4.0%} {r.busy:5.2f} {ideal:>5} {serial:>6} {roofline:>11} "
            f"{predicted:>8} {clock:>22}  {r.product.split('.row')[0]}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Compile, print, write; returns the exit status."""
    options = argparse.ArgumentParser(description=CLAIM)
    options.add_argument("--targets", default=",".join(TARGETS), help=f"of {', '.join(PARTS)}")
    options.add_argument("--only", default="", help="cases whose name has this, or one of a|b")
    options.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    options.add_argument("--results", type=Path, help="folder; by default none with --only")
    options.add_argument("--accept", action="store_true", help="the clock's figures are as wanted")
    given = options.parse_args(arguments)
    targets = tuple(given.targets.split(","))
    if unknown := [target for target in targets if target not in PARTS]:
        options.error(f"unknown targets {unknown}, known are {', '.join(PARTS)}")
    if given.accept and given.only and (other := [t for t in targets if _of_another_triton(t)]):
        options.error(f"the tables of {other} are of another Triton: --accept them without --only")
    folder = given.results or (None if given.only else harness.ROOT / "benchmarks" / "results")

    found: dict[str, list[Report]] = {target: [] for target in targets}
    for tiles in (False, True):
        part = compile_targets(
            targets, given.only, tiles=tiles, jobs=given.jobs, timeout=3600, planted=False,
            clock=True,
        )  # fmt: skip
        for target, reports in part.items():
            known = {report.case for report in found[target]}  # some are in both lists
            found[target] += [report for report in reports if report.case not in known]
    if not any(found.values()):
        options.error(f"no case has {given.only!r} in its name")
    wrong, summary = [], {}
    for target, reports in found.items():
        rows = [row(report) for report in reports]
        table(target, rows)
        mine = failures(reports) + ratchet(target, reports, accept=given.accept)
        wrong += mine
        summary[target] = {"kernels": len(rows), "failures": len(mine)}
        if folder is not None:
            write(folder / "compiled" / f"{target}.json", target, rows, mine)
    print("\n" + ("\n".join(wrong) or CLAIM))
    print(json.dumps({"script": "compiled", "claim": CLAIM, "ok": not wrong, "parts": summary}))
    return 1 if wrong else 0


def ratchet(
    target: str, reports: list[Report], *, accept: bool, folder: Path | None = None
) -> list[str]:
    """One line for each kernel whose hot loops cost more than the table has; with `accept` they are
    put into it instead."""
    path = (folder or CLOCK) / f"{target}.json"
    version = triton.__version__
    now, names = {}, Counter[str]()
    for r in reports:
        if r.loops or r.unread:
            names[name := f"{r.case} {r.kernel.strip('_')}"] += 1
            name += f" {names[name]}" if names[name] > 1 else ""
            now[name] = [tuple(round(x, 4) for x in loop.per_1000_flops) for loop in r.loops]
    committed = read_table(path, version)
    if accept:
        write_table(path, version, {**(committed or {}), **now})
    elif committed is None:
        print(f"{path.name}: no figures under Triton {version}, so none can have worsened")
    else:
        return [f"{target} {line}" for line in worsened(now, committed)]
    return []


def _of_another_triton(target: str, folder: Path | None = None) -> bool:
    """Whether what is committed for `target` could not be kept beside new figures of some cases."""
    path = (folder or CLOCK) / f"{target}.json"
    return path.exists() and read_table(path, triton.__version__) is None


def _lines(report: dict) -> str:
    """JSON with a line for each field, and of the rows, which come last, a line for each kernel."""
    head = [f"{json.dumps(key)}: {json.dumps(x)}" for key, x in report.items() if key != "rows"]
    rows = ",\n".join(map(json.dumps, report["rows"]))
    return "{\n" + ",\n".join([*head, f'"rows": [\n{rows}\n]']) + "\n}\n"


def write(path: Path, target: str, rows: list[Row], wrong: list[str]) -> None:
    """One part's rows, with the header that all results have."""
    part: dict[str, Any] = dataclasses.asdict(PARTS[target])
    header = harness.header(kind="compiled", device=f"{part['device']}, compiled for, not run on")
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "script": "compiled",
        "claim": CLAIM,
        "header": header,
        "part": part,
        "predictions": [
            "busy",
            "roofline_us",
            "predicted_us",
            "ideal",
            "serial",
            "bound",
            "clock_us",
        ],
        "failures": wrong,
        "rows": [dataclasses.asdict(r) for r in rows],
    }
    path.write_text(_lines(report))


if __name__ == "__main__":
    sys.exit(main())
