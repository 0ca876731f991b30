"""The tile tables: the shipped tables, the choice of a tile, and invalid files."""

import dataclasses
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from unittest import mock

import pytest
import torch
import triton
from attention_cases import check
from close import assert_close_f64

from warpweave.kernels.attention import attention
from warpweave.kernels.gemm import fused_gemm, gemm, gemm_into
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import (
    KERNELS,
    KINDS,
    MAX_HEAD_DIM,
    OPTIONAL,
    OPTIONAL_KERNELS,
    VARIANTS,
    AttentionTile,
    GemmTile,
    TileRow,
    read_table,
    write_table,
)
from warpweave.kernels.runtime.tiles import PLAIN

ODD_TILE = AttentionTile(32, 16, 2, 1)
ODD = TileRow("Planted GPU", "attention_fwd", 2, 96, ODD_TILE, triton.__version__)


@pytest.fixture
def table(tmp_path):
    """Set the path of a user's table; what is loaded from it is forgotten afterwards."""
    yield tmp_path / "warpweave" / "tiles.json"
    tiles.load(None)


# ---------------------------------------------------------------- the shipped table


def test_the_shipped_table_answers_every_call_everywhere(monkeypatch) -> None:
    rows = tiles.shipped_table()
    groups = {(row.kernel, row.where, row.size) for row in rows}
    for kernel, where, size in groups:
        kinds = {r.kind for r in rows if (r.kernel, r.where, r.size) == (kernel, where, size)}
        gemm_kinds = kinds >= {*KINDS} and kinds <= {*KINDS, *OPTIONAL}
        assert gemm_kinds if kernel == "gemm" else MAX_HEAD_DIM in kinds
        for kind in kinds:  # each has a row for every version and variant
            default = [r for r in rows if (r.kernel, r.where, r.size) == (kernel, where, size)]
            assert any(r.kind == kind and not r.triton and not r.variants for r in default)
    for kernel in KERNELS.keys() - OPTIONAL_KERNELS:
        assert {(kernel, 0, size) for size in (2, 4, 8)} <= groups
        for arch in (0, 75, 80, 86, 89, 90, 100, 103, 120):
            for size in (2, 4, 8):
                for kind in KINDS if kernel == "gemm" else (1, 64, 65, 256):
                    assert tiles.find_on(kernel, arch, "", size, kind)


def test_every_row_is_reached_by_some_call() -> None:
    """A row hidden by an earlier one would be a tile that no call uses or compiles."""
    every = [
        frozenset(words)
        for n in range(len(VARIANTS) + 1)
        for words in combinations(VARIANTS, n)
        if not {"dropout", "shared"} <= {*words}
    ]
    rows = tiles.shipped_table()
    for version in ((3, 6), (3, 7), (3, 8), (3, 9)):
        for row in rows:
            if row.fits(version, frozenset(row.variants[0].split()) if row.variants else PLAIN):
                same = [r for r in rows if r.key[:4] == row.key[:4]]
                first = {next(r.key for r in same if r.fits(version, words)) for words in every}
                own = row.triton or not any(r.triton and r.fits(version, PLAIN) for r in same)
                assert row.key in first or not own


def test_first_row_that_matches_triton_version_and_variants_is_used(tmp_path, monkeypatch) -> None:
    made = {"capability": 0, "kernel": "attention_fwd", "element_size": 2, "head_dim": 256}
    given = [
        ({"triton": "3.7", "variants": ["into softcap", "masked"]}, 16),
        ({"triton": "3.9+"}, 32),
        ({"variants": ["softcap"]}, 64),
        ({}, 128),
    ]
    rows = [made | more | {"tile": {"q": q, "k": 16, "warps": 4, "stages": 1}} for more, q in given]
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps({"format": "warpweave tiles 1", "rows": rows}))
    monkeypatch.setattr(tiles, "shipped_table", lambda: tuple(read_table(path, by="capability")))

    def taken(version: str, words: str) -> int:
        monkeypatch.setattr(triton, "__version__", version)
        return tiles.shipped_rows("attention_fwd", 90, 2, frozenset(words.split()))[256].tile.q

    assert [taken("3.7.1", w) for w in ("into softcap bounded", "masked", "softcap", "into")] == [
        16, 16, 64, 128,
    ]  # fmt: skip
    assert [taken("3.70.0", w) for w in ("into softcap", "")] == [32, 32]
    assert [taken(v, "masked") for v in ("3.6.0", "3.8.1", "3.9.0", "3.10.2", "4.0")] == [
        128, 128, 32, 32, 32,
    ]  # fmt: skip


def test_a_users_tile_of_attention_is_for_plain_calls_alone(table) -> None:
    write_table(table, [ODD])
    tiles.load(table)
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == ODD.tile
    for words in (frozenset({"softcap"}), frozenset({"masked"})):
        shipped = tiles.find_on("attention_fwd", 90, "", 2, 96, words)
        assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96, words) == shipped


def test_what_no_row_is_for_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gemm has no tile for 'huge'; it has .* \['large'"):
        tiles.find_on("gemm", 90, "", 2, "huge")
    with pytest.raises(ValueError, match="attention_fwd has no tile for 257"):
        tiles.find_on("attention_fwd", 90, "", 2, 257)


# ---------------------------------------------------------------- the user's table


def test_optional_product_kinds_without_a_row_use_the_large_tile() -> None:
    found = {arch: tiles.find_on("gemm", arch, "", 2, "wide") for arch in (0, 80, 90, 100, 120)}
    large = {arch: tiles.find_on("gemm", arch, "", 2, "large") for arch in found}
    assert [arch for arch in found if found[arch] != large[arch]] == [100]
    own = {arch: tiles.find_on("gemm", arch, "", 2, "symmetric") for arch in found}
    assert [own[arch] == large[arch] for arch in (0, 90, 100, 120)] == [True, False, False, True]


def test_an_optional_kernel_runs_only_where_the_table_has_a_row(table) -> None:
    def found(head_dim, variant=PLAIN):
        return tiles.row_on("attention_bwd", 90, "Planted GPU", 2, head_dim, variant)

    assert found(64) is None
    row = TileRow("Planted GPU", "attention_bwd", 2, 64, ODD_TILE, triton.__version__)
    write_table(table, [row])
    tiles.load(table)
    assert [found(D) for D in (32, 64, 65)] == [None, row, None]  # it may be slower for others
    assert found(64, frozenset({"dropout"})) is None  # never measured
    with pytest.raises(
        ValueError, match=r"attention_bwd has no tile for 65; it has tiles for \[64"
    ):
        tiles.find_on("attention_bwd", 90, "Planted GPU", 2, 65)


def test_a_table_may_lie_in_folders_that_are_not_there_yet(table) -> None:
    path = table.parent / "of" / "mine" / "tiles.json"
    write_table(path, [ODD])
    tiles.load(path)
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 65) == ODD.tile


def test_a_users_tile_is_for_its_device_kernel_element_size_and_kind(table) -> None:
    gemm_row = TileRow("Planted GPU", "gemm", 4, "heavy", GemmTile(32, 64, 16, 2, 3, 4, 2), "x")
    gemm_row = dataclasses.replace(gemm_row, triton=triton.__version__, us=1.5, shipped_us=2)
    write_table(table, [ODD, dataclasses.replace(ODD, where="Other GPU"), gemm_row])
    tiles.load(table)

    def same_as_shipped(kernel, size, kind, name="Planted GPU"):
        shipped = tiles.find_on(kernel, 90, "", size, kind)
        return tiles.find_on(kernel, 90, name, size, kind) == shipped

    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 65) == ODD.tile
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == ODD.tile
    assert tiles.find_on("gemm", 90, "Planted GPU", 4, "heavy") == gemm_row.tile
    for kernel, size, kind in (
        ("attention_fwd", 2, 64),  # smaller rows and larger ones remain
        ("attention_fwd", 2, 97),
        ("attention_fwd", 4, 96),
        ("attention_dq", 2, 96),
        ("gemm", 4, "large"),
        ("gemm", 2, "heavy"),
    ):
        assert same_as_shipped(kernel, size, kind)
    assert same_as_shipped("attention_fwd", 2, 96, "Planted GPU 2")
    assert same_as_shipped("gemm", 4, "heavy", "Other GPU")


def test_the_table_is_read_once(table) -> None:
    write_table(table, [ODD])
    tiles.load(table)
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == ODD.tile
    table.write_text("broken")  # it is not read again, also not for another kernel
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == ODD.tile
    assert tiles.find_on("attention_dq", 90, "Planted GPU", 2, 96)
    with pytest.raises(ValueError, match=r"tiles\.json is not JSON: Expecting value"):
        tiles.load(table)
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == ODD.tile


def test_it_holds_in_every_thread_until_another_is_loaded(table) -> None:
    """Autograd launches a backward's kernels from separate threads."""
    shipped = tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96)
    write_table(table, [ODD])
    tiles.load(table)
    with ThreadPoolExecutor(1) as other:
        found = other.submit(tiles.find_on, "attention_fwd", 90, "Planted GPU", 2, 96)
    assert found.result() == ODD.tile != shipped
    tiles.load(None)
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == shipped


def test_nobody_reads_one_unasked_nor_anything_at_import(table, monkeypatch) -> None:
    table.parent.mkdir()
    table.write_text("broken")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(table.parent.parent))
    monkeypatch.chdir(table.parent)
    q = torch.randn(1, 3, 1, 16)
    attention(q, q, q, impl="triton")
    gemm(q[0, :, 0], q[0, :, 0].t(), impl="triton")
    code = "import warpweave.kernels.attention, warpweave.kernels.gemm\n"
    code += "from warpweave.kernels.runtime.tiles import shipped_table as table\n"
    code += "assert not table.cache_info().currsize"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=800)
    shipped = tiles.find_on("gemm", 90, "", 2, "large")
    assert tiles.find_on("gemm", 90, "Planted GPU", 2, "large") == shipped


def test_rows_of_another_triton_are_announced_and_left_out(table) -> None:
    old = dataclasses.replace(ODD, kernel="attention_dq", triton="3.0.0")
    write_table(table, [ODD, old, dataclasses.replace(old, where="Other GPU", triton="2.0.0")])
    tiles.load(table)
    words = r"they were measured with Triton 3\.0\.0, but .*warpweave tune"
    with pytest.warns(UserWarning, match=f"ignoring .* Planted GPU: {words}"):
        assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 96) == ODD.tile
    shipped = tiles.find_on("attention_dq", 90, "", 2, 96)
    assert tiles.find_on("attention_dq", 90, "Planted GPU", 2, 96) == shipped  # does not warn again
    older = dataclasses.replace(ODD, kernel="attention_dkdv", triton="2.9.1")
    write_table(table, [old, older, dataclasses.replace(older, where="Other GPU", triton="2.0.0")])
    tiles.load(table)
    with pytest.warns(UserWarning, match=r"with Triton 2\.9\.1, 3\.0\.0, but this is"):
        assert tiles.find_on("attention_dq", 90, "Planted GPU", 2, 96) == shipped


# ---------------------------------------------------------------- the file


def test_what_is_written_is_read_back_and_a_failure_leaves_the_old_file(table) -> None:
    rows = [
        dataclasses.replace(ODD, us=12.5, shipped_us=13),
        TileRow("Grün é", "gemm", 8, "small", GemmTile(16, 32, 16, 1, 1, 1, 1), "3.7.1"),
    ]
    write_table(table, rows)
    assert read_table(table, by="device") == rows
    shipped = table.with_name("shipped.json")  # capability 0 is valid
    write_table(shipped, tiles.shipped_table())
    assert read_table(shipped, by="capability") == [*tiles.shipped_table()]
    shipped.unlink()
    before = table.read_text()
    with pytest.raises(TypeError):
        write_table(table, [dataclasses.replace(ODD, us=object())])
    beside = []
    with mock.patch("os.fsync", side_effect=lambda _: beside.extend(table.parent.iterdir())):
        write_table(table, rows)
    assert sorted(path.name[:12] for path in beside) == [".tiles.json.", "tiles.json"]
    for failure in (OSError, KeyboardInterrupt):
        with mock.patch("os.fsync", side_effect=failure), pytest.raises(failure):
            write_table(table, rows[:1])
    assert table.read_text() == before
    assert [*table.parent.iterdir()] == [table]


GOOD = {
    "device": "X", "kernel": "attention_fwd", "element_size": 2, "head_dim": 64,
    "tile": {"q": 64, "k": 32, "warps": 4, "stages": 2}, "triton": "3.7.1",
}  # fmt: skip
GEMM = {"m": 64, "n": 64, "k": 32, "group": 8, "residents": 1, "warps": 4, "stages": 2}


def _without(name):
    return {key: value for key, value in GOOD.items() if key != name}


PRODUCT = {**_without("head_dim"), "kernel": "gemm", "kind": "large", "tile": GEMM}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("text", r'rows must be a list, each an object, got .text.'),
        ([3], r"rows\[0\] must be an object, got 3"),
        ([GOOD, {**GOOD, "kernel": "norm"}], r"row 2: kernel must be one of .* got 'norm'"),
        ([{**GOOD, "kernel": []}], r"kernel must be one of .* got \[\]"),
        ([GOOD, GOOD], r"row 2: an earlier row has the same key \('X', 'attention_fwd', 2, 64\)"),
        ([GOOD, {**GOOD, "triton": "3.8.0"}], r"row 2: an earlier row has the same key \('X'"),
        ([{**GOOD, "element_size": 2.0}], r"element_size must be 2, 4 or 8 bytes, got 2\.0"),
        ([{**GOOD, "head_dim": True}], r"head_dim must be 1\.\.256, got True"),
        ([{**GOOD, "head_dim": 0}], r"head_dim must be 1\.\.256, got 0"),
        ([{**GOOD, "us": True}], r"us must be microseconds, got True"),
        ([{**GOOD, "us": float("inf")}], r"us must be microseconds, got inf"),
        ([{**GOOD, "shipped_us": float("nan")}], r"shipped_us must be microseconds, got nan"),
        ([{**GOOD, "tile": {**GOOD["tile"], "stages": True}}], r"must be an integer, got True"),
        ([{**GOOD, "tile": {**GOOD["tile"], "stages": 9}}], r"stages must be 1, .* 8, got 9"),
        ([_without("triton")],
         r"row 1: expected the keys \['device', .*'triton'\], got \['device'"),
        ([{**_without("device"), "capability": 90}], r"expected the keys \['device'"),
        ([{**GOOD, "speed": 1}], r"expected the keys .*, got .*'speed'"),
        ([{**GOOD, "device": ""}], r"device must be a device's name, got ''"),
        ([{**GOOD, "triton": 3.7}], r"triton must be a version of Triton, got 3\.7"),
        ([{**GOOD, "element_size": 3}], r"element_size must be 2, 4 or 8 bytes, got 3"),
        ([{**GOOD, "head_dim": 257}], r"head_dim must be 1\.\.256, got 257"),
        ([{**GOOD, "us": 0}], r"us must be microseconds, got 0"),
        ([{**GOOD, "shipped_us": "12"}], r"shipped_us must be microseconds, got '12'"),
        ([{**GOOD, "tile": None}], r"row 1: tile must be an object, got None"),
        ([{**GOOD, "tile": GEMM}], r"row 1: tile has no q$"),
        ([{**GOOD, "tile": {**GOOD["tile"], "q": 48}}], r"tile.q must be 16, .* 1024, got 48"),
        ([{**GOOD, "tile": {**GOOD["tile"], "warps": 3}}], r"warps must be 1, .* or 32, got 3"),
        ([{**GOOD, "kernel": "gemm"}], r"expected the keys .*'kind'"),
        ([{**PRODUCT, "kind": ["large"]}],
         r"kind must be one of large, heavy, small, wide, symmetric, got \['large'\]"),
        ([{**PRODUCT, "tile": {**GEMM, "n": 16}}], r"tile.n must be 32, .* got 16"),
    ],
)  # fmt: skip
def test_a_row_that_is_wrong_is_refused_with_file_row_and_value(table, rows, message) -> None:
    table.parent.mkdir()
    table.write_text(json.dumps({"format": "warpweave tiles 1", "rows": rows}))
    with pytest.raises(ValueError, match=message) as caught:
        tiles.load(table)
    assert str(table) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Expecting value"),
        (b'{"format": "warpweave tiles 1", "rows": [', "Expecting value"),
        (b"\xff\xfe\x00", "can't decode"),
        (b"[" * 100_000, "recursion"),
        (b"[]", r"it must be an object, got \[\]$"),
        (b'{"format": "warpweave tiles 2", "rows": []}',
         'format must be "warpweave tiles 1", got .war'),
        (b'{"format": "warpweave tiles 1"}', "it has no rows$"),
        (b'{"format": "warpweave tiles 1", "rows": {}}', "rows must be a list, .*, got {}$"),
        (b'{"format": "warpweave tiles 1", "rows": [], "us": 1}',
         "unknown field 'us'; expected format, rows$"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused(table, content, message) -> None:
    table.parent.mkdir()
    table.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        tiles.load(table)
    assert str(table) in str(caught.value)


def test_a_file_that_cannot_be_read_is_refused(table) -> None:
    table.mkdir(parents=True)
    with pytest.raises(ValueError, match=r"tiles\.json cannot be read: Is a directory"):
        tiles.load(table)
    table.rmdir()
    table.symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"tiles\.json cannot be read: No such file"):
        tiles.load(table)


# ---------------------------------------------------------------- any tile is correct


@pytest.mark.parametrize(
    ("fwd", "dkdv", "dq"),
    [
        ((16, 64, 4, 1), (64, 16, 4, 1), (16, 64, 4, 1)),  # wide where the shipped ones are tall
        ((128, 16, 4, 2), (16, 128, 8, 3), (128, 16, 2, 1)),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_attention_is_right_under_a_users_odd_tiles(table, fwd, dkdv, dq, causal) -> None:
    """Through the file: every valid entry of a table gives the reference's results.
    `test_kernels_at_random` has small tiles."""
    names = ("attention_fwd", "attention_dkdv", "attention_dq")
    rows = [
        TileRow("X", name, 8, 64, AttentionTile(*tile), "3.7.1")
        for name, tile in zip(names, (fwd, dkdv, dq))
    ]
    with tiles.pinned(_through_a_file(table, rows)):
        check("triton", {"Sq": 53, "Sk": 61, "D": 40}, causal=causal)
        check("triton", {"Sq": 37, "Sk": 37}, causal=causal, window=11 if causal else None)


@pytest.mark.parametrize(
    "tile", [(16, 32, 16, 1, 1, 1, 1), (128, 32, 32, 3, 2, 8, 4), (32, 128, 16, 64, 32, 2, 8)]
)
def test_products_are_right_under_a_users_odd_tiles(table, tile) -> None:
    rows = [TileRow("X", "gemm", 8, kind, GemmTile(*tile), "3.7.1") for kind in KINDS]
    shapes = (67, 37), (37, 70), 70, (67, 35)
    a, b, bias, r = (torch.randn(s, dtype=torch.float64) for s in shapes)
    out = torch.ones(67, 70, dtype=torch.float64)
    options = {"activation": "swiglu", "save_z": True, "residual": r}
    want, want_z = fused_gemm(a, b, bias, **options, impl="torch")
    with tiles.pinned(_through_a_file(table, rows)):
        y, z = fused_gemm(a, b, bias, **options, impl="triton")
        gemm_into(a, b, out, True, impl="triton")
    assert_close_f64(y, want, 1e-13)
    assert_close_f64(z, want_z, 1e-13)
    assert_close_f64(out, 1 + a @ b, 1e-13)


def _through_a_file(path, rows):
    write_table(path, rows)
    return {(r.kernel, r.size, r.kind): r.tile for r in read_table(path, by="device")}


def test_pins_hold_inside_their_block_only_and_for_their_key_only() -> None:
    tile, cpu = AttentionTile(16, 16, 1, 1), torch.device("cpu")
    shipped = tiles.find("attention_fwd", cpu, 4, 64)
    with pytest.raises(KeyError), tiles.pinned({("attention_fwd", 4, 64): tile}):
        raise KeyError
    assert tiles.find("attention_fwd", cpu, 4, 64) == shipped
    with tiles.pinned({("attention_fwd", 4, 64): tile}):
        assert tiles.find("attention_fwd", cpu, 4, 40) == tile
        for key in (("attention_fwd", 4, 65), ("attention_fwd", 8, 64), ("attention_dq", 4, 64)):
            assert tiles.find(key[0], cpu, *key[1:]) != tile
    assert tiles.find("attention_fwd", cpu, 4, 64) == shipped != tile


# ---------------------------------------------------------------- the device of a launch


def test_a_launch_takes_the_tile_of_its_device_by_capability_and_name(table, monkeypatch) -> None:
    write_table(table, [ODD])
    tiles.load(table)
    names = {torch.device("cuda:0"): "Planted GPU", torch.device("cuda:1"): "Other GPU"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(tiles, "device_name", tiles.device_name.__wrapped__)
    monkeypatch.setattr(tiles, "capability", lambda device: 80 + 10 * device.index)
    one, other = names
    given = "attention_fwd", 2, 96

    def found(device: torch.device, variant: frozenset[str] = PLAIN) -> AttentionTile:
        return tiles.find(given[0], device, *given[1:], variant)

    plain = tiles.find_on("attention_fwd", 0, "", 2, 96)
    assert found(one) == found(other) == plain != ODD.tile  # interpreted
    monkeypatch.setattr(tiles, "INTERPRET", False)
    assert found(one) == ODD.tile
    assert found(other) == tiles.find_on("attention_fwd", 90, "", 2, 96) != ODD.tile
    for words in (frozenset({"softcap"}), frozenset({"masked"})):
        assert found(one, words) == tiles.find_on("attention_fwd", 80, "", 2, 96, words)
    with tiles.pinned({given: ODD.tile._replace(q=512)}):
        for device in names:
            assert found(device).q == found(device, frozenset({"softcap"})).q == 512
    assert tiles.device_name(torch.device("cpu")) == ""


def test_a_version_of_triton_is_two_numbers_and_no_triton_is_the_oldest(monkeypatch) -> None:
    for version, numbers in (("3.7.1", (3, 7)), ("3.10.0+git1a2b", (3, 10)), ("4.0", (4, 0))):
        monkeypatch.setattr(triton, "__version__", version)
        assert tiles.triton_version() == numbers
    monkeypatch.setattr(tiles, "HAS_TRITON", False)
    assert tiles.triton_version() == (0, 0)
