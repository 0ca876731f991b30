"""Tables of wiring: what each option of a command changes, and that it changes nothing else.

A command's table has a `Row` for each of its options. `check` runs the command, or a substitute,
twice: with the row's `given` alone, and also with its `option`. `run(words)` returns observations
by name: what the engine was told, which steps were saved. The difference must be what the row says,
so an option that is parsed but never passed on, or passed on as a different one, is detected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """An option as command-line words, the other words it needs, and its effect."""

    option: str
    changes: set[str]
    given: str = ""


def names(record: Any) -> set[str]:
    """Return the names of a record's options, including those of the records in it."""
    found: set[str] = set()
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        found |= names(value) if dataclasses.is_dataclass(value) else {item.name}
    return found


def missing(table: dict[str, Row], record: Any) -> set[str]:
    """Return options without a row, and rows without an option."""
    return set(table) ^ names(record)


def differences(row: Row, run: Callable[[list[str]], dict[str, Any]]) -> set[str]:
    """Return the differences that the option of `row` makes."""
    before, after = run(row.given.split()), run(f"{row.given} {row.option}".split())
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
