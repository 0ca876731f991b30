"""Write the rows of the tile table that a compiler needs: what spills gets a smaller tile.

    python benchmarks/tile_rows.py --targets sm_90              # under the Triton that is installed
    python benchmarks/tile_rows.py --triton 3.9+                # rows for 3.9 and from there on

Compiles every attention case of the compile gate. Of each kernel that spills, does not fit or
lacks its tensor-core instruction, the nearest tile (`warpweave.tune.candidates`) without any such
fault becomes a row for the case's variant, before the row that failed, so that calls which keep
still more take it, too. A table in which nothing fails stays as it is. Exit status 1 if some kernel
has no tile up to --steps away; nothing is written then.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

from gate.cases import GATED, Case, cases
from gate.compile import compile_case
from gate.report import failures
from gate.tiles import tile_cases

from warpweave.kernels.attention import launch
from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.dispatch import triton
from warpweave.kernels.runtime.tile_table import (
    KERNELS,
    AttentionTile,
    TileRow,
    read_table,
    write_table,
)
from warpweave.tune.calls import Problem
from warpweave.tune.candidates import around, could_fit

SHIPPED = Path(tiles.__file__).with_name("tiles.json")
NAMES = {2: "bf16", 4: "fp32", 8: "fp64"}
_TODO: list[tuple[Case, str]] = []  # of this process and its forks: calls cannot be pickled


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What a launch asked the table for: a kernel, bytes per element, a head dim and a variant."""

    kernel: str
    size: int
    head_dim: int
    variant: frozenset[str]


@dataclasses.dataclass(frozen=True)
class Mended:
    """The row that failed in a case, the row to stand before it (None: no tile is clean), why."""

    failed: TileRow
    row: TileRow | None
    why: str


def compile_with(
    case: Case, target: str, other: dict[str, AttentionTile] | None = None
) -> tuple[dict[str, Lookup], dict[str, str]]:
    """What each kernel of the case asked for, and the fault of each that has one; the kernels in
    `other` get these tiles."""
    asked: dict[str, Lookup] = {}

    def find(kernel, device, size, kind, variant):
        asked[kernel] = Lookup(kernel, size, kind, variant)
        return (other or {}).get(kernel) or tiles.find(kernel, device, size, kind, variant)

    with patch.object(launch, "find", find):
        reports = compile_case(case, target, clock=False)
    names = {r.kernel: next((k for k in KERNELS if k in r.kernel), "") for r in reports}
    faults: dict[str, str] = {}
    for r in reports:
        for line in failures([r]):
            # A compiler that gives up names no kernel: it was compiling the last that had asked.
            faults.setdefault(names[r.kernel] or [*asked][-1], line)
    return asked, faults


def mend(case: Case, target: str, triton_range: str, steps: int) -> list[Mended]:
    """The rows that the kernels of a case need on a target; none if nothing is wrong."""
    found: list[Mended] = []
    asked, faults = compile_with(case, target)
    for kernel, why in faults.items():
        if kernel not in asked:  # of none that takes its tile from the table
            continue
        failed = _row_of(asked[kernel], TARGETS[target].arch)
        tile = _clean_tile(case, target, asked[kernel], failed.tile, steps)
        row = None
        if tile is not None:
            words = " ".join(sorted(asked[kernel].variant))
            row = dataclasses.replace(
                failed, tile=tile, variants=(words,) if words else (), triton=triton_range
            )
        found.append(Mended(failed, row, why))
    return found


def _clean_tile(
    case: Case, target: str, lookup: Lookup, start: AttentionTile, steps: int
) -> AttentionTile | None:
    """The nearest tile, no larger than `start`, under which the kernel has no fault."""
    problem = Problem(lookup.kernel, NAMES[lookup.size], lookup.head_dim)
    for tile in around(start, steps):
        if tile.q * tile.k <= start.q * start.k and could_fit(problem, tile, TARGETS[target]):
            _, faults = compile_with(case, target, {lookup.kernel: tile})
            if lookup.kernel not in faults:
                return tile
    return None


def _row_of(lookup: Lookup, arch: int) -> TileRow:
    """The row that answers a lookup on a device of capability `arch`."""
    tile = tiles.find_on(lookup.kernel, arch, "", lookup.size, lookup.head_dim, lookup.variant)
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    rows = [
        row
        for row in tiles.shipped_table()
        if (row.kernel, row.size, row.tile) == (lookup.kernel, lookup.size, tile)
        and row.kind >= lookup.head_dim
        and row.where <= arch
        and row.fits(version, lookup.variant)
    ]
    return min(rows, key=lambda row: (-row.where, row.kind))


def with_rows(table: Iterable[TileRow], mended: Iterable[Mended]) -> list[TileRow]:
    """The table with each new row before the one that failed, or in its place if it is for the
    same calls; of several for one variant the first. Neighbours of one tile become one row."""
    rows = list(table)
    for each in mended:
        if each.row is None:
            continue
        at = next(i for i, row in enumerate(rows) if row.key == each.failed.key)
        if each.row.key == each.failed.key:
            rows[at] = each.row
        elif any(_same_calls(row, each.row) for row in rows[:at]):
            continue
        elif at and rows[at - 1] == dataclasses.replace(each.row, variants=rows[at - 1].variants):
            words = {*rows[at - 1].variants, *each.row.variants}
            rows[at - 1] = dataclasses.replace(each.row, variants=tuple(sorted(words)))
        else:
            rows.insert(at, each.row)
    return rows


def _same_calls(row: TileRow, new: TileRow) -> bool:
    """Whether `row` is for those of `new`, and maybe for more variants."""
    return row.key[:5] == new.key[:5] and {*row.variants} >= {*new.variants}


@contextmanager
def shipping(table: tuple[TileRow, ...]) -> Iterator[None]:
    """Within this context `table` is the shipped one."""
    with patch.object(tiles, "shipped_table", lambda: table):
        tiles.find_on.cache_clear()
        try:
            yield
        finally:
            tiles.find_on.cache_clear()


def main(arguments: list[str] | None = None) -> int:
    """Compile, search, write; returns the exit status."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--targets", default=",".join(GATED), help=f"of {', '.join(GATED)}")
    options.add_argument("--only", default="attention", help="cases whose name has this")
    options.add_argument("--table", type=Path, default=SHIPPED, help="read and written")
    options.add_argument(
        "--triton", default="", help="for which Triton the new rows are: 3.6, 3.9+"
    )
    options.add_argument("--steps", type=int, default=3, help="how far from a tile to look")
    options.add_argument("--jobs", type=int, default=2, help="compilers at a time")
    given = options.parse_args(arguments)
    targets = given.targets.split(",")
    if unknown := {*targets} - {*GATED}:
        options.error(f"unknown targets {sorted(unknown)}, rows are for {', '.join(GATED)}")
    table = tuple(read_table(given.table, by="capability"))
    with shipping(table):
        todo = [
            (case, target)
            for case in {c.name: c for c in [*cases(), *tile_cases()]}.values()
            for target in targets
            if "attention" in case.name and given.only in case.name and target in case.targets
        ]
        if not todo:
            options.error(f"no attention case has {given.only!r} in its name")
        _TODO[:] = todo
        task = partial(_mend_number, triton_range=given.triton, steps=given.steps)
        with get_context("fork").Pool(given.jobs) as pool:
            mended = [m for found in pool.imap(task, range(len(todo))) for m in found]
    for each in mended:
        now = "no tile is clean" if each.row is None else f"{each.row.variants} {each.row.tile}"
        print(f"{each.why}\n    {each.failed.tile} -> {now}")
    left = sum(each.row is None for each in mended)
    rows = with_rows(table, mended)
    if mended and not left:
        write_table(given.table, rows)
    added = len(rows) - len(table)
    print(json.dumps({"cases": len(todo), "mended": len(mended), "added": added, "left": left}))
    return 1 if left else 0


def _mend_number(index: int, *, triton_range: str, steps: int) -> list[Mended]:
    return mend(*_TODO[index], triton_range, steps)


if __name__ == "__main__":
    sys.exit(main())
