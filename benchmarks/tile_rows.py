"""Write the rows of the tile table that a compiler needs: a tile that spills is replaced.

    python benchmarks/tile_rows.py                              # for the installed Triton
    python benchmarks/tile_rows.py --targets sm_90 --triton 3.9+  # rows for 3.9 and later

The script compiles every attention case of the compile gate. For each kernel that the gate refuses,
the nearest tile that it accepts (`warpweave.machine.tune.candidates`) becomes a row for the case's
variant. It goes before the row that was used, so that calls that keep more in registers also use
it. Then everything is compiled again, and the table is written once nothing is refused. If no tile
up to --steps away is clean, the exit status is 1 and nothing is written. Kernels without a tile in
the table are left to `compiled.py`.

A row has the capability of the one that it replaces. Higher parts without their own rows share it:
name them in --targets as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from gate.cases import GATED, Case, cases
from gate.compile import compile_case, in_forks
from gate.report import failures
from gate.tiles import tile_cases

from warpweave.kernels.attention import launch
from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import KERNELS, Tile, TileRow, read_table, write_table
from warpweave.machine.tune.calls import Problem
from warpweave.machine.tune.candidates import around, could_fit

SHIPPED = Path(tiles.__file__).with_name("tiles.json")
DTYPES = {2: "bf16", 4: "fp32", 8: "fp64"}
PASSES = 5

Lookup = tuple[Problem, frozenset[str]]
"""A launch's lookup in the table: kernel, dtype and head dim, and the variant."""


@dataclasses.dataclass(frozen=True)
class Fix:
    """The row whose tile was refused, the new row (None: no tile is clean), and the reason."""

    refused: TileRow
    row: TileRow | None
    why: str


def compile_with(
    case: Case, target: str, pins: Mapping[tiles.Key, Tile]
) -> tuple[dict[str, Lookup], dict[str, str]]:
    """Return what each kernel of a case looks up in the table, and why the gate refuses some of
    them, both by the table's kernel names."""
    asked: dict[str, Lookup] = {}

    def find(kernel, device, size, kind, variant):
        asked[kernel] = Problem(kernel, DTYPES[size], kind), variant
        return tiles.find(kernel, device, size, kind, variant)

    with patch.object(launch, "find", find), tiles.pinned(pins):
        reports = compile_case(case, target, clock=False)
    refused: dict[str, str] = {}
    for report in reports:
        # A compiler that gives up names no kernel: it was compiling the last one that looked up.
        own = [*asked][-1:] if report.error else [k for k in KERNELS if k in report.kernel]
        refused |= {kernel: line for line in failures([report]) for kernel in own}
    return asked, refused


def fixes_of(case: Case, target: str, steps: int) -> list[Fix]:
    """Return a fix for each kernel of a case that the gate refuses."""
    found: list[Fix] = []
    asked, refused = compile_with(case, target, {})
    for kernel, why in refused.items():
        problem, variant = asked[kernel]
        arch = TARGETS[target].arch
        old = tiles.row_on(kernel, arch, "", problem.size, problem.kind, variant)
        words = (" ".join(sorted(variant)),) if variant else ()
        row = next(
            (
                dataclasses.replace(old, tile=tile, variants=words)
                for tile in around(old.tile, steps)
                if tile.q * tile.k <= old.tile.q * old.tile.k
                and could_fit(problem, tile, TARGETS[target])
                and kernel not in compile_with(case, target, problem.pins(tile))[1]
            ),
            None,
        )
        found.append(Fix(old, row, why))
    return found


def with_rows(table: Iterable[TileRow], fixes: Iterable[Fix]) -> list[TileRow]:
    """Return the table with each new row before the refused one, or in its place if both are for
    the same calls. Adjacent rows with the same tile become one row."""
    rows = list(table)
    for fix in {fix.row.key: fix for fix in fixes if fix.row}.values():
        at = next(i for i, row in enumerate(rows) if row.key == fix.refused.key)
        before = rows[at - 1] if at else None
        if fix.row.key == fix.refused.key:
            rows[at] = fix.row
        elif before == dataclasses.replace(fix.row, variants=before.variants if before else ()):
            words = tuple(sorted({*before.variants, *fix.row.variants}))
            rows[at - 1] = dataclasses.replace(before, variants=words)
        else:
            rows.insert(at, fix.row)
    return rows


@contextmanager
def shipping(table: Iterable[TileRow]) -> Iterator[None]:
    """Use `table` as the shipped one in this context."""
    tiles.row_on.cache_clear()
    with patch.object(tiles, "shipped_table", lambda: tuple(table)):
        try:
            yield
        finally:
            tiles.row_on.cache_clear()


def triton_range(text: str) -> str:
    """Return the Triton versions in the table's notation; they must include the installed one."""
    if not re.fullmatch(r"\d+\.\d+\+?", text):
        raise argparse.ArgumentTypeError(f"expected a version like 3.6 or 3.9+, got {text!r}")
    row = dataclasses.replace(tiles.shipped_table()[0], triton=text, variants=())
    if not row.fits(tiles.triton_version(), tiles.PLAIN):
        installed = ".".join(map(str, tiles.triton_version()))
        raise argparse.ArgumentTypeError(f"rows for {text} are not used by Triton {installed}")
    return text


def main(arguments: list[str] | None = None) -> int:
    """Compile, search and write; return the exit status."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--targets", default=",".join(GATED), help=f"some of {', '.join(GATED)}")
    options.add_argument("--only", default="", help="attention cases whose name contains this")
    options.add_argument("--table", type=Path, default=SHIPPED, help="table to read and write")
    options.add_argument(
        "--triton", type=triton_range, help="versions for new rows; default: the replaced row's"
    )
    options.add_argument("--steps", type=int, default=3, help="how far from a tile to search")
    options.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    given = options.parse_args(arguments)
    targets = given.targets.split(",")
    if unknown := {*targets} - {*GATED}:
        options.error(f"unknown targets {sorted(unknown)}; expected some of {', '.join(GATED)}")
    table = read_table(given.table, by="capability")
    with shipping(table):
        named = {case.name: case for case in [*cases(), *tile_cases()]}
    todo = [
        (case, target)
        for name, case in named.items()
        for target in targets
        if name.startswith("attention") and given.only in name and target in case.targets
    ]
    if not todo:
        options.error(f"no attention case has {given.only!r} in its name")
    rows, fixes = table, list[Fix]()
    for _ in range(PASSES):
        with shipping(rows):
            found = in_forks(lambda task: fixes_of(*task, given.steps), todo, given.jobs)
        fixes = [fix for each in found for fix in each]
        for fix in fixes:
            now = "no tile is clean" if fix.row is None else f"{fix.row.variants} {fix.row.tile}"
            print(f"{fix.why}\n    {fix.refused.tile} -> {now}", flush=True)
        if not fixes or not all(fix.row for fix in fixes):
            break
        if given.triton:
            fixes = [
                dataclasses.replace(fix, row=dataclasses.replace(fix.row, triton=given.triton))
                for fix in fixes
            ]
        rows = with_rows(rows, fixes)
    if not fixes and rows != table:
        write_table(given.table, rows)
    new = [row for row in rows if row not in table]
    print(json.dumps({"cases": len(todo), "new_rows": len(new), "refused": len(fixes)}))
    return 1 if fixes else 0


if __name__ == "__main__":
    sys.exit(main())
