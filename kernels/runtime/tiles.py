"""Lookup of the tile with which an attention or product kernel is launched, without any search.

For its kernel and element size a launch uses
  1. the tile of a `pinned` block around it (tests, and ``warpweave tune`` while it measures);
  2. the tile for exactly this device in the user's table, which ``warpweave tune`` has measured, if
     one was passed to `load`;
  3. the shipped tile (`tiles.json` in this folder) of the largest capability that is not above
     the device's, or that of capability 0, for the interpreter and every device below the others.
For a head dim, it uses the row of the smallest head dim that fits, out of 2 and 3 together. If both
have a row for one head dim, the user's row is used. A user's attention tiles are for plain
attention, the only one that is measured: variants that keep more (`attention.launch`) use shipped
rows. A product of an optional kind without a row uses the large tile. In half and single precision,
no tile shipped for A100, H100 and B200 spills registers in any variant that benchmarks/compiled.py
compiles. float64 may spill.

Nothing is read at import, and a user's table is only read by `load`, because a different tile adds
in a different order. A table that cannot be used raises ValueError. Rows measured with another
version of Triton are skipped with a warning: another compiler may spill or run out of shared
memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch

from warpweave.kernels.runtime.dispatch import HAS_TRITON, INTERPRET, capability, triton
from warpweave.kernels.runtime.tile_table import (
    OPTIONAL,
    OPTIONAL_KERNELS,
    Kind,
    Tile,
    TileRow,
    read_table,
)

T = TypeVar("T", Tile, TileRow)
Key = tuple[str, int, Kind]
"""Kernel, bytes per element, kind or head dim."""

PLAIN: frozenset[str] = frozenset()
"""The variant of plain attention and of products."""

_pinned: ContextVar[Mapping[Key, Tile | None] | None] = ContextVar("warpweave_tiles", default=None)
_loaded: list[TileRow] = []  # per process: autograd launches from threads without a context


def load(path: str | Path | None) -> None:
    """Let later launches of this process use the tiles for their device in the user's table `path`.

    None restores the shipped tiles. If the table cannot be used, raises ValueError and changes
    nothing.
    """
    _loaded[:] = [] if path is None else read_table(Path(path), by="device")
    for cached in (own_rows, row_on):
        cached.cache_clear()


def find(
    kernel: str, device: torch.device, size: int, kind: Kind, variant: frozenset[str] = PLAIN
) -> Any:
    """The tile of a kernel, of the type that `tile_table.KERNELS` has for this kernel.

    The elements have `size` bytes. `kind` is a head dim or a kind of product, `variant` a variant
    of attention. Raises ValueError, listing the available kinds, if no row fits.
    """
    tile = find_optional(kernel, device, size, kind, variant)
    return _no_tile(kernel, *_where(device), size, kind, variant) if tile is None else tile


def find_optional(
    kernel: str, device: torch.device, size: int, kind: Kind, variant: frozenset[str] = PLAIN
) -> Any:
    """`find`, but None if no row fits, for kernels that are used only where the table has a row.

    Their head dim must be that of the row, because they may be slower for another one.
    """
    pins = _pinned.get()
    if pins is not None:
        mine = {k: t for (n, s, k), t in pins.items() if (n, s) == (kernel, size)}
        if kernel in OPTIONAL_KERNELS and kind in mine:
            return mine[kind]
        tile = _fitting(mine, kind)
        if tile is not None:
            return tile
    row = row_on(kernel, *_where(device), size, kind, variant)
    return None if row is None else row.tile


def find_on(
    kernel: str, arch: int, name: str, size: int, kind: Kind, variant: frozenset[str] = PLAIN
) -> Any:
    """`find` for a device of this capability and name; "" ignores a user's rows."""
    row = row_on(kernel, arch, name, size, kind, variant)
    return _no_tile(kernel, arch, name, size, kind, variant) if row is None else row.tile


@cache
def row_on(
    kernel: str, arch: int, name: str, size: int, kind: Kind, variant: frozenset[str] = PLAIN
) -> TileRow | None:
    """The row that contains the tile of `find_on`, or None if no row fits."""
    rows = _rows_on(kernel, arch, name, size, variant)
    return rows.get(kind) if kernel in OPTIONAL_KERNELS else _fitting(rows, kind)


def _where(device: torch.device) -> tuple[int, str]:
    """The capability and name by which a device's rows are found."""
    return (0, "") if INTERPRET else (capability(device), device_name(device))


def _rows_on(
    kernel: str, arch: int, name: str, size: int, variant: frozenset[str]
) -> dict[Kind, TileRow]:
    rows = shipped_rows(kernel, arch, size, variant)
    if name and not variant:
        own = own_rows(name)
        rows |= {row.kind: row for row in own if (row.kernel, row.size) == (kernel, size)}
    return rows


def _no_tile(
    kernel: str, arch: int, name: str, size: int, kind: Kind, variant: frozenset[str]
) -> NoReturn:
    rows = _rows_on(kernel, arch, name, size, variant)
    raise ValueError(f"{kernel} has no tile for {kind!r}; it has tiles for {[*rows]}")


def _fitting(rows: Mapping[Kind, T], kind: Kind) -> T | None:
    """The entry of this kind, or of the smallest head dim that fits.

    An optional kind falls back to "large".
    """
    if isinstance(kind, int):
        kind = min((k for k in rows if isinstance(k, int) and k >= kind), default=kind)
    elif kind in OPTIONAL and kind not in rows:
        kind = "large"
    return rows.get(kind)


@contextmanager
def pinned(tiles: Mapping[Key, Tile | None]) -> Iterator[None]:
    """A context in which launches of this thread use these tiles, and otherwise those of the
    contexts around it, on any device. None excludes an optional kernel."""
    token = _pinned.set({**(_pinned.get() or {}), **tiles})
    try:
        yield
    finally:
        _pinned.reset(token)


# ---------------------------------------------------------------- the tables


def shipped_rows(
    kernel: str, arch: int, size: int, variant: frozenset[str] = PLAIN
) -> dict[Kind, TileRow]:
    """Kind or head dim -> its first row for `variant`, on a device of capability `arch`."""
    version = triton_version()
    of_size = [row for row in shipped_table() if (row.kernel, row.size) == (kernel, size)]
    places = (r.where for r in of_size if isinstance(r.where, int) and r.where <= arch)
    best = max(places, default=None)
    found: dict[Kind, TileRow] = {}
    for row in of_size:
        if row.where == best and row.fits(version, variant):
            found.setdefault(row.kind, row)
    return found


def triton_version() -> tuple[int, int]:
    """Major and minor version of the installed Triton; (0, 0) if it is not installed."""
    major, minor = triton.__version__.split(".")[:2] if HAS_TRITON else (0, 0)
    return int(major), int(minor)


@cache
def shipped_table() -> tuple[TileRow, ...]:
    """Every shipped row.

    For each kernel but the optional ones, capability and element size there is a row for every kind
    of product, or for the largest head dim.
    """
    return tuple(read_table(Path(__file__).with_name("tiles.json"), by="capability"))


@cache
def own_rows(name: str) -> tuple[TileRow, ...]:
    """The user's rows for the device of this name, if measured with this version of Triton.

    Warns about rows that it leaves out.
    """
    rows = [row for row in _loaded if row.where == name]
    stale = {row.triton for row in rows if row.triton != triton.__version__}
    if stale:
        warnings.warn(
            f"ignoring the table's tiles for {name}: they were measured with Triton "
            f"{', '.join(sorted(stale))}, but this is {triton.__version__}; rerun `warpweave tune`",
            stacklevel=2,
        )
    return tuple(row for row in rows if row.triton not in stale)


@cache
def device_name(device: torch.device) -> str:
    """The name of a CUDA device in a user's rows; "" for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""
