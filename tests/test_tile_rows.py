"""benchmarks/tile_rows.py: what a compiler spills gets a row of the tile table."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from tile_rows import SHIPPED, Mended, with_rows

from warpweave.kernels.runtime.tile_table import AttentionTile, TileRow, read_table, write_table

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "tile_rows.py"
CASE = "attention dropout carried fwd D=64 bfloat16"


def run(table: Path, *options: str) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, "--targets=sm_90", f"--only={CASE}", f"--table={table}", *options],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    return {"status": done.returncode, **json.loads(done.stdout.splitlines()[-1])}


def own(row: TileRow) -> bool:
    """A row that the case's kernel may take on Hopper under the pinned Triton."""
    where = (row.where, row.kernel, row.size, row.kind, row.triton)
    return where == (90, "attention_fwd", 2, 64, "")


def test_a_row_is_written_for_what_spills_and_the_table_stays_once_nothing_does(tmp_path) -> None:
    table, shipped = tmp_path / "tiles.json", read_table(SHIPPED, by="capability")
    without = [row for row in shipped if not (own(row) and row.variants)]
    write_table(table, without)
    assert run(table, "--steps=0") == {"status": 1, "cases": 1, "mended": 1, "added": 0, "left": 1}
    assert read_table(table, by="capability") == without
    assert run(table) == {"status": 0, "cases": 1, "mended": 1, "added": 1, "left": 0}
    rows = read_table(table, by="capability")
    (plain,) = (row for row in without if own(row))
    row, after = (row for row in rows if own(row))
    assert (row.variants, after) == (("dropout into",), plain)
    assert row.tile != plain.tile
    assert row.tile.q * row.tile.k <= plain.tile.q * plain.tile.k
    assert [row for row in rows if row not in without] == [row]
    assert run(table) == {"status": 0, "cases": 1, "mended": 0, "added": 0, "left": 0}
    assert read_table(table, by="capability") == rows


def test_the_shipped_table_is_as_the_writer_writes_it(tmp_path) -> None:
    write_table(tmp_path / "tiles.json", read_table(SHIPPED, by="capability"))
    assert (tmp_path / "tiles.json").read_text() == SHIPPED.read_text()


def test_a_row_stands_before_the_one_that_failed() -> None:
    big, small, other = (AttentionTile(q, 64, 8, 2) for q in (128, 64, 32))
    plain = TileRow(90, "attention_fwd", 2, 64, big)
    masked = dataclasses.replace(plain, tile=small, variants=("masked",))
    table = [dataclasses.replace(masked, where=80), masked, plain]

    def mended(failed: TileRow, tile: AttentionTile | None, *variants: str) -> Mended:
        row = tile and dataclasses.replace(plain, tile=tile, variants=variants)
        return Mended(failed, row, "spills")

    into = mended(plain, small, "into")
    softcap = mended(plain, small, "softcap")
    found = with_rows(table, [mended(plain, other, "dropout"), into, softcap, into])
    assert [(row.tile, row.variants) for row in found[2:]] == [
        (other, ("dropout",)), (small, ("into", "softcap")), (big, ()),
    ]  # fmt: skip
    assert found[:2] == table[:2]
    # What fails for a variant of its own row is replaced there, and plain attention likewise.
    assert with_rows(table, [mended(masked, other, "masked")])[1].tile == other
    assert with_rows(table, [mended(plain, other)]) == [*table[:2], mended(plain, other).row]
    assert with_rows(table, [mended(plain, None)]) == table
