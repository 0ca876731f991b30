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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from warpweave.kernels.structure import read_document, structure

FORMAT = "warpweave tiles 1"
MAX_HEAD_DIM = 256
KINDS = ("large", "heavy", "small")
OPTIONAL = ("wide", "symmetric")  # kinds that have a row only if the large tile does not fit
_KINDS = (*KINDS, *OPTIONAL)
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
    "attention_bwd": AttentionTile,  # optional: only where it is faster than the two before it
    "gemm": GemmTile,
}
OPTIONAL_KERNELS = ("attention_bwd",)  # kernels that are used only where the table has a row

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


_Time = Annotated[float, "microseconds", lambda x: 0 < x < math.inf]
_FIELDS: dict[str, Any] = {
    "capability": Annotated[int, "major * 10 + minor", lambda x: 0 <= x < 1000],
    "device": Annotated[str, "a device's name", bool],
    "triton": Annotated[str, "a version of Triton", bool],
    "element_size": Annotated[int, "2, 4 or 8 bytes", lambda x: x in (2, 4, 8)],
    "head_dim": Annotated[int, f"1..{MAX_HEAD_DIM}", lambda x: 0 < x <= MAX_HEAD_DIM],
    "kind": Annotated[str, f"one of {', '.join(_KINDS)}", lambda x: x in _KINDS],
    "variants": Annotated[list[str], "a non-empty list of strings, each one or more of "
                          f"{', '.join(VARIANTS)} separated by single spaces",
                          lambda x: x and {*" ".join(x).split(" ")} <= {*VARIANTS}],
    "us": _Time,
    "shipped_us": _Time,
}  # fmt: skip


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


class _Table(NamedTuple):
    """The file."""

    format: Annotated[str, f'"{FORMAT}"', FORMAT.__eq__]
    rows: list[dict]


def read_table(path: Path, *, by: str) -> list[TileRow]:
    """The rows of a table `by` "capability" (the shipped one) or "device" (a user's).

    Raises ValueError, one line that names the file, if it cannot be read or is not such a table.
    """
    document = read_document(path)
    try:
        table = structure(_Table, document)
        found: dict[tuple[int | str | Kind, ...], TileRow] = {}
        for number, fields in enumerate(table.rows, 1):
            row = _row(fields, by, f"row {number}: ")
            if row.key in found:
                raise ValueError(f"row {number}: an earlier row has the same key {row.key}")
            found[row.key] = row
        return list(found.values())
    except ValueError as error:
        raise ValueError(f"the tile table {path} cannot be used: {error}") from error


def _row(fields: dict[str, Any], by: str, where: str) -> TileRow:
    """Convert an object of the file to a row, or raise ValueError."""
    kernel = fields.get("kernel")
    if not isinstance(kernel, str) or kernel not in KERNELS:
        raise ValueError(f"{where}kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    kind = "kind" if kernel == "gemm" else "head_dim"
    place = {by} if by == "capability" else {by, "triton"}
    needed = {*place, "kernel", "element_size", kind, "tile"}
    optional = {"triton", "variants"} if by == "capability" else {"us", "shipped_us"}
    if not needed <= fields.keys() <= needed | optional:
        raise ValueError(f"{where}expected the keys {sorted(needed)}, got {sorted(fields)}")
    of = {name: structure(_FIELDS[name], fields[name], where + name)
          for name in fields if name not in ("kernel", "tile")}  # fmt: skip
    more: dict[str, Any] = {name: of[name] for name in ("triton", "us", "shipped_us") if name in of}
    more["variants"] = tuple(of.get("variants", ()))
    tile = structure(KERNELS[kernel], fields["tile"], f"{where}tile")
    for name, size in tile._asdict().items():
        if size not in SIZES[name]:
            *others, last = map(str, SIZES[name])
            raise ValueError(
                f"{where}tile.{name} must be {', '.join(others)} or {last}, got {size}"
            )
    return TileRow(of[by], kernel, of["element_size"], of[kind], tile, **more)


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
