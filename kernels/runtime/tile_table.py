"""A table of tiles as a JSON file with one tile per line: read, checked, written.

    {"format": "warpweave tiles 1", "rows": [
      {"capability": 90, "kernel": "gemm", "element_size": 2, "kind": "large", "tile": {"m": 128, …
      {"device": "NVIDIA H100 80GB HBM3", "kernel": "attention_fwd", "element_size": 2,
       "head_dim": 64, "triton": "3.7.1", "tile": {"q": 128, …}, "us": 980.1, "shipped_us": 1012.7}

`tiles.json` in this folder is shipped, and its rows are by compute capability. Among its rows for
one kernel, element size and head dim (or kind), a launch uses the first that fits the version of
Triton and the variant of the call. "triton": "3.7" fits that version only, and "3.9+" fits that one
and later ones. "variants": ["into softcap", "masked"] fits calls that keep both of the first, or
the second, and possibly more (see `attention.launch`). A user's table, which ``warpweave tune``
writes, has rows by device. Any other file raises ValueError: a tile that does not fully fit could
give a wrong result on a GPU.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FORMAT = "warpweave tiles 1"
MAX_HEAD_DIM = 256
KINDS = ("large", "heavy", "small")
OPTIONAL = ("wide", "symmetric")  # kinds that have a row only if the large tile does not fit
VARIANTS = ("dropout", "shared", "softcap", "into", "bounded", "striped", "masked")


class AttentionTile(NamedTuple):
    """The tile of an attention kernel: rows of q and of k per step, and Triton's launch options."""

    q: int
    k: int
    warps: int
    stages: int


class GemmTile(NamedTuple):
    """The tile of a product: rows, columns and depth per step, rows of tiles per group of the walk,
    programs per multiprocessor, and Triton's launch options."""

    m: int
    n: int
    k: int
    group: int
    residents: int
    warps: int
    stages: int


Tile = AttentionTile | GemmTile
Kind = int | str  # for attention, the largest head dim of the row; for a product, see `gemm`

KERNELS: dict[str, type[AttentionTile] | type[GemmTile]] = {
    "attention_fwd": AttentionTile,
    "attention_dkdv": AttentionTile,
    "attention_dq": AttentionTile,
    "gemm": GemmTile,
}

_SIDES = (16, 32, 64, 128, 256, 512, 1024)  # a tensor core needs at least 16
SIZES: dict[str, Sequence[int]] = {
    "q": _SIDES,
    "k": _SIDES,
    "m": _SIDES,
    "n": _SIDES[1:],  # an epilogue works on quarters, of pairs, in words of four
    "warps": (1, 2, 4, 8, 16, 32),
    "stages": range(1, 9),
    "group": range(1, 65),
    "residents": range(1, 33),
}


def _is_time(x: Any) -> bool:
    return type(x) in (int, float) and 0 < x < math.inf


def _are_variants(x: Any) -> bool:
    return (
        isinstance(x, list)
        and x != []
        and all(isinstance(each, str) and set(each.split(" ")) <= {*VARIANTS} for each in x)
    )


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "capability": (lambda x: type(x) is int and 0 <= x < 1000, "major * 10 + minor"),
    "device": (lambda x: isinstance(x, str) and x != "", "a device's name"),
    "triton": (lambda x: isinstance(x, str) and x != "", "a version of Triton"),
    "element_size": (lambda x: type(x) is int and x in (2, 4, 8), "2, 4 or 8 bytes"),
    "head_dim": (lambda x: type(x) is int and 0 < x <= MAX_HEAD_DIM, f"1..{MAX_HEAD_DIM}"),
    "kind": (lambda x: x in (*KINDS, *OPTIONAL), f"one of {', '.join((*KINDS, *OPTIONAL))}"),
    "variants": (lambda x: _are_variants(x), f"a list of some of {', '.join(VARIANTS)}"),
    "us": (_is_time, "microseconds"),
    "shipped_us": (_is_time, "microseconds"),
}


@dataclass(frozen=True)
class TileRow:
    """One tile, and where it applies.

    Attributes:
        where: a compute capability (major * 10 + minor; 0 is below every device), or the exact name
            of a device.
        kernel: a key of `KERNELS`.
        size: bytes per element.
        kind: for attention the largest head dim to which it applies; for products one of `KINDS` or
            `OPTIONAL`.
        triton: for a device, the version of Triton that the tile was measured with. For a
            capability, the minor version that the row is for, with "+" if it is also for later
            ones; "" for all.
        us, shipped_us: the measured microseconds of this tile and of the shipped one.
        variants: the variants of an attention call that the row is for, () for all.
    """

    where: int | str
    kernel: str
    size: int
    kind: Kind
    tile: Tile
    triton: str = ""
    us: float | None = None
    shipped_us: float | None = None
    variants: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[int | str | Kind, ...]:
        """The key of the row; a table has at most one row per key."""
        version = (self.triton, *self.variants) if isinstance(self.where, int) else ()
        return self.where, self.kernel, self.size, self.kind, *version

    def fits(self, version: tuple[int, int], variant: frozenset[str]) -> bool:
        """Return True if a capability's row is for this version of Triton and this variant."""
        from_there_on, number = self.triton.endswith("+"), self.triton.removesuffix("+")
        own = tuple(map(int, number.split("."))) if number else version
        return (version >= own if from_there_on else version == own) and (
            not self.variants or any(variant.issuperset(v.split(" ")) for v in self.variants)
        )


def read_table(path: Path, *, by: str) -> list[TileRow]:
    """The rows of a table `by` "capability" (the shipped one) or "device" (a user's).

    Raises ValueError, one line that names the file, if it cannot be read or is not such a table.
    """
    try:
        return _rows(json.loads(path.read_text(encoding="utf-8")), by)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the tile table {path} cannot be used: {error}") from error


def _rows(table: Any, by: str) -> list[TileRow]:
    if not isinstance(table, dict) or table.get("format") != FORMAT:
        raise ValueError(f'expected "format": "{FORMAT}"')
    if table.keys() != {"format", "rows"} or not isinstance(table["rows"], list):
        raise ValueError(f'expected the keys "format" and "rows" (a list), got {sorted(table)}')
    found: dict[tuple[int | str | Kind, ...], TileRow] = {}
    for number, fields in enumerate(table["rows"], 1):
        try:
            row = _row(fields, by)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        if row.key in found:
            raise ValueError(f"row {number}: an earlier row has the same key {row.key}")
        found[row.key] = row
    return list(found.values())


def _row(fields: Any, by: str) -> TileRow:
    """Convert an object of the file to a row, or raise ValueError."""
    kernel = fields.get("kernel") if isinstance(fields, dict) else None
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    kind = "kind" if kernel == "gemm" else "head_dim"
    where = {by} if by == "capability" else {by, "triton"}
    needed = {*where, "kernel", "element_size", kind, "tile"}
    optional = {"triton", "variants"} if by == "capability" else {"us", "shipped_us"}
    if not needed <= fields.keys() <= needed | optional:
        raise ValueError(f"expected the keys {sorted(needed)}, got {sorted(fields)}")
    for name, value in fields.items():
        if name not in ("kernel", "tile"):
            is_right, what = _FIELDS[name]
            if not is_right(value):
                raise ValueError(f"{name} must be {what}, got {value!r}")
    more = {name: fields[name] for name in ("triton", "us", "shipped_us") if name in fields}
    more["variants"] = tuple(fields.get("variants", ()))
    tile = _tile(KERNELS[kernel], fields["tile"])
    return TileRow(fields[by], kernel, fields["element_size"], fields[kind], tile, **more)


def _tile(shape: type[AttentionTile] | type[GemmTile], sizes: Any) -> Tile:
    if not isinstance(sizes, dict) or sizes.keys() != {*shape._fields}:
        raise ValueError(f"tile must have {', '.join(shape._fields)}, got {sizes!r}")
    for name, size in sizes.items():
        if type(size) is not int or size not in SIZES[name]:
            *others, last = map(str, SIZES[name])
            raise ValueError(f"tile's {name} must be {', '.join(others)} or {last}, got {size!r}")
    return shape(**sizes)


def write_table(path: Path, rows: Iterable[TileRow]) -> None:
    """Write a table atomically, and create its folder if needed. Raises OSError."""
    lines = ",\n".join("  " + json.dumps(_fields(row)) for row in rows)
    text = f'{{"format": "{FORMAT}",\n "rows": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    number, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(number, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(number)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _fields(row: TileRow) -> dict[str, Any]:
    by = "device" if isinstance(row.where, str) else "capability"
    kind = "kind" if row.kernel == "gemm" else "head_dim"
    fields = {
        by: row.where,
        "kernel": row.kernel,
        "element_size": row.size,
        kind: row.kind,
        "variants": [*row.variants],
        "triton": row.triton,
        "tile": row.tile._asdict(),
        "us": row.us,
        "shipped_us": row.shipped_us,
    }
    return {name: value for name, value in fields.items() if value not in ("", None, [])}
