"""Options of a command as TOML: `read_options` reads a user's file, `write_options` writes a run's.

A key is an option's name, with underscores or with hyphens as on the command line. Nested records
of options (model overrides, the plan) have no separate tables, just as they have no prefix on the
command line. TOML has no null: a missing key means the default, and `write_options` writes an
unset option as a comment.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from warpweave.cli.command_line import option_types
from warpweave.kernels.structure import read_document, structure
from warpweave.kernels.words import did_you_mean

_Record = TypeVar("_Record")


def options_of(record: Any) -> dict[str, Any]:
    """The name and value of every option, including those of nested records in `record`."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(record):
        value = getattr(record, item.name)
        found |= options_of(value) if dataclasses.is_dataclass(value) else {item.name: value}
    return found


def with_options(record: _Record, given: dict[str, Any]) -> _Record:
    """`record` with the values in `given`, by option name."""
    own: dict[str, Any] = {}
    for item in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, item.name)
        if dataclasses.is_dataclass(value):
            own[item.name] = with_options(value, given)
        elif item.name in given:
            own[item.name] = given[item.name]
    return dataclasses.replace(record, **own)  # type: ignore[type-var]


def read_options(
    path: Path,
    defaults: _Record,
    without: tuple[str, ...] = (),
    formerly: Mapping[tuple[str, str], str] = MappingProxyType({}),
) -> _Record:
    """`defaults` with the values in the TOML file at `path`. `formerly` maps values from files of
    earlier versions to current ones: {(name, then): now}.

    Raises:
        ValueError: the file is missing, it is not valid TOML, a key is not an option (or is in
            `without`), or a value has the wrong type; one line that names file and key.
    """
    every = option_types(type(defaults))
    kinds = {name: kind for name, kind in every.items() if name not in without}
    given: dict[str, Any] = {}
    for key, value in read_document(path, "TOML").items():
        name = key.replace("-", "_")
        if name not in kinds:
            raise ValueError(f"{path}: unknown option {key!r}{did_you_mean(name, kinds)}")
        if name in given:
            raise ValueError(f"{path}: {name} is set twice")
        if isinstance(value, str):
            value = formerly.get((name, value), value)
        given[name] = structure(kinds[name], value, f"{path}: {key}")
    try:
        return with_options(defaults, given)
    except ValueError as error:  # raised by a record's own checks
        raise ValueError(f"{path}: {error}") from None


def write_options(record: Any, without: tuple[str, ...] = ()) -> str:
    """Every option of `record` as TOML; `read_options` restores the record from it."""
    lines = []
    for name, value in options_of(record).items():
        if name not in without:
            lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML, from which numbers are restored bit for bit."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON strings are valid TOML, except that TOML requires one more character to be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
