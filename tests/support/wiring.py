"""Tables of wiring: what each option of a command changes, and that it changes nothing else.

A command's table has a `Row` for each of its options. `check` runs the command twice, or what
stands for it: with the row's `given` alone and with its `option`, too. `run(words)` gives what was
seen of it by name: what the engine was told, which steps were saved. What differs must be what the
row says, so that an option which is parsed and never passed on, or passed on as another one, shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One option in words of a command line, what has to be given besides, and what it changes."""

    option: str
    changes: set[str]
    given: str = ""


def names(record: Any) -> set[str]:
    """The options that a record of them has, those of the records in it among them."""
    found: set[str] = set()
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        found |= names(value) if dataclasses.is_dataclass(value) else {item.name}
    return found


def missing(table: dict[str, Row], record: Any) -> set[str]:
    """Options without a row, and rows without an option."""
    return set(table) ^ names(record)


def differences(row: Row, run: Callable[[list[str]], dict[str, Any]]) -> set[str]:
    """What the option of `row` changes."""
    before, after = run(row.given.split()), run(f"{row.given} {row.option}".split())
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
