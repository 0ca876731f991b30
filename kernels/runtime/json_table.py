"""A table of measurements or of settings as a JSON file, one row to a line: read, checked, written.

    {"format": "warpweave tiles 1", "rows": [
      {…},
      {…}
    ]}

Tables are data and not Python because programs write them, people compare and send them, and one
reader then checks them alike. A file that is not exactly this raises ValueError.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar


class Keyed(Protocol):
    """A row: a table has at most one for each `key`."""

    @property
    def key(self) -> Any: ...


_Row = TypeVar("_Row", bound=Keyed)


def read_rows(path: Path, what: str, form: str, parse: Callable[[Any], _Row]) -> list[_Row]:
    """What `parse` makes of each row of the file, whose "format" is `form`.

    Raises ValueError, one line that says `what` the file should have been, names it and the row, if
    it cannot be read, `parse` raises ValueError or a key comes twice.
    """
    try:
        return _rows(json.loads(path.read_text(encoding="utf-8")), form, parse)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the {what} {path} cannot be used: {error}") from error


def _rows(table: Any, form: str, parse: Callable[[Any], _Row]) -> list[_Row]:
    if not isinstance(table, dict) or table.get("format") != form:
        raise ValueError(f'it does not say "format": "{form}"')
    if table.keys() != {"format", "rows"} or not isinstance(table["rows"], list):
        raise ValueError(f'it must have "format" and a list "rows", and has {sorted(table)}')
    found: dict[Any, _Row] = {}
    for number, fields in enumerate(table["rows"], 1):
        try:
            row = parse(fields)
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error
        if row.key in found:
            raise ValueError(f"row {number}: there is one for {row.key} already")
        found[row.key] = row
    return list(found.values())


def write_rows(path: Path, form: str, rows: Iterable[dict[str, Any]]) -> None:
    """Write such a file, whole or not at all; its folder is made. Raises OSError."""
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    text = f'{{"format": "{form}",\n "rows": [\n{lines}\n]}}\n'
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
