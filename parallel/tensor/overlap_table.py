"""Measured times of products and of what moves around them, by which `overlap="auto"` chooses.

    {"format": "warpweave overlap 1", "rows": [
      {"device": "CPU", "link": "gloo", "ranks": 2, "dtype": "float32", "moves": "gather",
       "M": 4096, "N": 1024, "K": 1024, "us": {"none": 98000.0, "chunked": 71000.0}},

one row to a line. `overlap_table.json` beside this file is shipped and has no row yet: nobody has
had several GPUs, and on two gloo ranks of a busy CPU the faster of the two ways was another in
every run. ``benchmarks/overlap.py --table FILE`` writes a table of the ranks that it runs on, which
`load` takes instead. Every rank of a group must have the same one: what it says is what the ranks
then do together.

A product is looked up on the device, link, ranks and dtype that it runs on; of those sizes the
nearest is taken, if none of M, N and K is more than `NEAR` times as large or as small: what was
measured far from here says nothing of here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from warpweave.kernels.runtime.json_table import read_rows, write_rows
from warpweave.parallel.tensor.overlap_model import Moves, Product

FORMAT = "warpweave overlap 1"
WAYS = ("none", "chunked", "fused")  # "none" was measured in every row
LINKS = ("gloo", "nvlink", "network")
DTYPES = ("float64", "float32", "bfloat16", "float16")
NEAR = 2.0


class Place(NamedTuple):
    """Where a product runs: the device's name ("CPU" for any), how its ranks are linked, how many
    there are, and the dtype of its operands."""

    device: str
    link: str
    ranks: int
    dtype: str


@dataclass(frozen=True)
class Measured:
    """A product a[M, K] b[K, N] of one rank with what its group moves: microseconds by way."""

    place: Place
    moves: Moves
    M: int
    N: int
    K: int
    us: Mapping[str, float]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a table has at most one row for."""
        return self.place, self.moves, self.M, self.N, self.K


_loaded: list[tuple[Measured, ...]] = []  # at most one, of the process


def load(path: str | Path | None) -> None:
    """From here on this process chooses by the table at `path`; None: by the shipped one.

    Raises ValueError, and changes nothing, if the table cannot be used.
    """
    _loaded[:] = [] if path is None else [tuple(read_measured(Path(path)))]


def nearest(product: Product, place: Place) -> Measured | None:
    """The measurement of a product like this one, or None if nothing near was measured."""
    found, least = None, math.inf
    for row in _loaded[0] if _loaded else shipped():
        if row.place == place and row.moves == product.moves:
            sizes = ((row.M, product.M), (row.N, product.N), (row.K, product.K))
            ratios = [max(a, b) / max(1, min(a, b)) for a, b in sizes]
            if max(ratios) <= NEAR and math.prod(ratios) < least:
                found, least = row, math.prod(ratios)
    return found


@cache
def shipped() -> tuple[Measured, ...]:
    """Every shipped row."""
    return tuple(read_measured(Path(__file__).with_name("overlap_table.json")))


def read_measured(path: Path) -> list[Measured]:
    """The rows of a table; ValueError, one line that names file and row, if it is none."""
    return read_rows(path, "overlap table", FORMAT, _measured)


def write_measured(path: Path, rows: Iterable[Measured]) -> None:
    """Write a table, whole or not at all; its folder is made. Raises OSError."""
    write_rows(path, FORMAT, ({**row.place._asdict(), **_own(row)} for row in rows))


def _own(row: Measured) -> dict[str, Any]:
    fields = asdict(row)
    del fields["place"]
    return fields


def _measured(fields: Any) -> Measured:
    """The row that an object of the file stands for, or ValueError."""
    names = {*Place._fields, *Measured.__dataclass_fields__} - {"place"}
    if not isinstance(fields, dict) or fields.keys() != names:
        found = sorted(fields) if isinstance(fields, dict) else repr(fields)
        raise ValueError(f"it must have {sorted(names)}, and has {found}")
    choices = {"link": LINKS, "dtype": DTYPES, "moves": get_args(Moves)}
    for name, words in choices.items():
        if fields[name] not in words:
            raise ValueError(f"{name} must be one of {', '.join(words)}, got {fields[name]!r}")
    if not isinstance(fields["device"], str) or not fields["device"]:
        raise ValueError(f"device must be a device's name, got {fields['device']!r}")
    for name, least in (("ranks", 2), ("M", 1), ("N", 1), ("K", 1)):
        if type(fields[name]) is not int or fields[name] < least:
            raise ValueError(f"{name} must be an integer >= {least}, got {fields[name]!r}")
    us = fields["us"]
    if not isinstance(us, dict) or not {"none"} < us.keys() <= {*WAYS}:
        raise ValueError(f"us must have none and at least one of {', '.join(WAYS[1:])}, got {us!r}")
    for way, time in us.items():
        if type(time) not in (int, float) or not 0 < time < math.inf:
            raise ValueError(f"us of {way} must be microseconds, got {time!r}")
    place = Place(*(fields[name] for name in Place._fields))
    return Measured(place, *(fields[name] for name in ("moves", "M", "N", "K", "us")))
