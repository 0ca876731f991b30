"""benchmarks/tile_rows.py: a kernel that spills gets a row in the tile table."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tile_rows
from refused import exits
from tile_rows import SHIPPED, Fix, main, with_rows

from warpweave.kernels.runtime.tile_table import AttentionTile, TileRow, read_table, write_table

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "tile_rows.py"
CASE = "attention dropout carried fwd D=64 bfloat16"


def run(table: Path, *options: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, SCRIPT, "--targets=sm_90", f"--only={CASE}", f"--table={table}", *options],
        env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def result(done: subprocess.CompletedProcess) -> dict:
    assert done.stdout, done.stderr
    return {"status": done.returncode, **json.loads(done.stdout.splitlines()[-1])}


def own(row: TileRow) -> bool:
    """Make a row that the case's kernel may use on Hopper with the pinned Triton."""
    where = (row.where, row.kernel, row.size, row.kind)
    return where == (90, "attention_fwd", 2, 64) and row.triton in ("", "3.7+")


def test_a_row_is_written_for_what_spills_until_nothing_does(tmp_path) -> None:
    table, shipped = tmp_path / "tiles.json", read_table(SHIPPED, by="capability")
    without = [row for row in shipped if not (own(row) and row.variants)]
    write_table(table, without)
    assert result(run(table, "--steps=0")) == {"status": 1, "cases": 1, "new_rows": 0, "refused": 1}
    assert read_table(table, by="capability") == without
    done = run(table, "--triton=3.7+")
    assert result(done) == {"status": 0, "cases": 1, "new_rows": 1, "refused": 0}
    assert f"{CASE} (attention_fwd_kernel): 255 registers and " in done.stdout
    rows = read_table(table, by="capability")
    (plain,) = (row for row in without if own(row))
    row, after = (row for row in rows if own(row))
    assert (row.variants, row.triton, after) == (("dropout into",), "3.7+", plain)
    assert row.tile != plain.tile
    assert row.tile.q * row.tile.k <= plain.tile.q * plain.tile.k
    assert [row for row in rows if row not in without] == [row]


def test_nothing_is_written_while_something_is_refused(tmp_path, monkeypatch, capsys) -> None:
    """In this case by a second pass, after a first that had a row for everything."""
    table = tmp_path / "tiles.json"
    write_table(table, read_table(SHIPPED, by="capability"))
    plain = next(row for row in read_table(table, by="capability") if own(row) and not row.variants)
    into = dataclasses.replace(plain, tile=plain.tile._replace(k=16), variants=("into",))
    passes = iter([[[Fix(plain, into, "spills")]], [[], [Fix(into, None, "spills still")]]])
    monkeypatch.setattr(tile_rows, "in_forks", lambda *_: next(passes))
    assert main([f"--only={CASE}", f"--table={table}"]) == 1
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == {"cases": 3, "new_rows": 1, "refused": 1}
    assert table.read_text() == SHIPPED.read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--triton", "newest"], "expected a version like 3.6 or 3.9+, got 'newest'"),
        (["--triton", "3.5"], "rows for 3.5 are not used by Triton 3."),
        (["--targets", "sm_86"],
         "unknown targets ['sm_86']; expected some of sm_80, sm_90, sm_100"),
        (["--only", "misspelt"], "no attention case has 'misspelt' in its name"),
    ],
)  # fmt: skip
def test_options_that_would_write_nothing_are_refused(options, message, capsys) -> None:
    assert message in exits(lambda: main(options), capsys)


def test_the_shipped_table_is_as_the_writer_writes_it(tmp_path) -> None:
    write_table(tmp_path / "tiles.json", read_table(SHIPPED, by="capability"))
    assert (tmp_path / "tiles.json").read_text() == SHIPPED.read_text()


def test_a_row_stands_before_the_one_that_was_refused() -> None:
    big, small, other = (AttentionTile(q, 64, 8, 2) for q in (128, 64, 32))
    plain = TileRow(90, "attention_fwd", 2, 64, big)
    masked = dataclasses.replace(plain, tile=small, variants=("masked",))
    table = [dataclasses.replace(masked, where=80), masked, plain]

    def fix(refused: TileRow, tile: AttentionTile, *variants: str) -> Fix:
        return Fix(refused, dataclasses.replace(plain, tile=tile, variants=variants), "spills")

    into, softcap = fix(plain, small, "into"), fix(plain, small, "softcap")
    found = with_rows(table, [fix(plain, other, "dropout"), into, softcap, into])
    assert [(row.tile, row.variants) for row in found[2:]] == [
        (other, ("dropout",)), (small, ("into", "softcap")), (big, ()),
    ]  # fmt: skip
    assert found[:2] == table[:2]
    # A row that is rejected for the very calls it covers is replaced there.
    assert with_rows(table, [fix(masked, other, "masked")])[1].tile == other
    assert with_rows(table, [fix(plain, other)]) == [*table[:2], fix(plain, other).row]
