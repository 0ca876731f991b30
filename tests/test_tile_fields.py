"""Every field of a tile table: valid values up to their edges, and invalid ones."""

from __future__ import annotations

import json

import pytest

from warpweave.kernels.runtime.tile_table import VARIANTS, read_table, write_table

FIELDS = {  # of a row: valid values and invalid ones, at each edge
    "element_size": ((2, 4, 8), (0, 1, 3, 6, 16, True, 2.0, "2")),
    "head_dim": ((1, 48, 256), (0, -1, 257, True, 64.0, "64", None)),
    "kind": (("large", "heavy", "small", "wide", "symmetric"), ("huge", "", None, 1)),
    "capability": ((0, 90, 120, 999), (-1, 1000, True, 90.0, "90")),
    "device": (("X",), ("", 90, None)),
    "triton": (("3.7.1", "4.0"), ("", 3.7, None)),
    "us": ((1, 0.001, 1e30), (0, -1.0, float("inf"), float("nan"), True, "1", None)),
    "shipped_us": ((1, 0.001, 1e30), (0, -1.0, float("inf"), float("nan"), True, "1", None)),
    "variants": (
        (["masked"], ["into softcap", "shared"], [*VARIANTS]),
        ([], "masked", ["mask"], ["into  softcap"], [1], [["masked"]], None),
    ),
}
TILES = {  # of a tile
    "q": ((16, 128, 1024), (0, 8, 24, 2048, True, 16.0)),
    "k": ((16, 128, 1024), (0, 8, 24, 2048, True, 16.0)),
    "m": ((16, 128, 1024), (0, 8, 24, 2048, True, 16.0)),
    "n": ((32, 128, 1024), (0, 16, 48, 2048, True, 32.0)),
    "warps": ((1, 2, 4, 8, 16, 32), (0, 3, 64, True, 4.0)),
    "stages": ((1, 5, 8), (0, 9, True, 2.0)),
    "group": ((1, 33, 64), (0, 65, True, 8.0)),
    "residents": ((1, 17, 32), (0, 33, True, 1.0)),
}
PLAIN = {
    "attention_dq": {"q": 64, "k": 32, "warps": 4, "stages": 2},
    "gemm": {"m": 64, "n": 64, "k": 32, "group": 8, "residents": 1, "warps": 4, "stages": 2},
}


def _good(by: str, kernel: str) -> dict:
    kind = {"kind": "large"} if kernel == "gemm" else {"head_dim": 64}
    where = {"capability": 90} if by == "capability" else {"device": "X", "triton": "3.7.1"}
    return where | kind | {"kernel": kernel, "element_size": 2, "tile": PLAIN[kernel]}


@pytest.mark.parametrize("kernel", PLAIN)
@pytest.mark.parametrize("by", ["capability", "device"])
def test_every_field_is_taken_up_to_its_edges_and_refused_beyond(by, kernel, tmp_path) -> None:
    path, good = tmp_path / "tiles.json", _good(by, kernel)

    def read(row: dict, back: bool = False) -> str | None:
        path.write_text(json.dumps({"format": "warpweave tiles 1", "rows": [row]}))
        try:
            (found,) = read_table(path, by=by)
        except ValueError as error:
            return str(error)
        if not back:
            return None
        write_table(path, [found])
        assert read_table(path, by=by) == [found]
        assert json.loads(path.read_text())["rows"] == [row]  # nothing is lost or invented
        return None

    own = good.keys() | ({"triton", "variants"} if by == "capability" else {"us", "shipped_us"})
    for name, (right, wrong) in FIELDS.items():
        for value in (*right, *wrong):
            said = read(good | {name: value}, True)
            if name not in own:
                assert "expected the keys" in said, (name, value)
            else:
                assert (said is None) == any(value is v for v in right), (name, value, said)
                assert said is None or (f"row 1: {name}" in said and " must be " in said)
    for name in good:
        assert read({k: v for k, v in good.items() if k != name}) is not None, name
    for name, (right, wrong) in TILES.items():
        for value in (*right, *wrong):
            said = read(good | {"tile": good["tile"] | {name: value}})
            fits = name in good["tile"] and any(value is v for v in right)
            assert (said is None) == fits, (name, value, said)
            assert said is None or "row 1: tile" in said
