"""Typed values from JSON and TOML: `read_document` parses a file, `structure` checks the types.

class Sidecar(TypedDict):
    tokens: Annotated[int, "an integer > 0", lambda n: n > 0]
    dtype: Literal["uint8", "uint16"]

structure(Sidecar, {"tokens": 0, "dtype": "uint8"})  # ValueError: tokens must be an integer > 0
"""

from __future__ import annotations

import inspect
import json
import tomllib
from collections import Counter
from functools import cache
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from warpweave.kernels.words import did_you_mean

Count = Annotated[int, "an integer >= 0", lambda n: n >= 0]
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string in quotes",
          Path: "a path in quotes"}  # fmt: skip


def read_document(path: Path, form: Literal["JSON", "TOML"] = "JSON") -> Any:
    """Parse a file. Raises ValueError, one line with the path, if it cannot be read or parsed."""
    try:
        data = path.read_bytes()
        if form == "TOML":
            return tomllib.loads(data.decode())
        text = data.decode(json.detect_encoding(data))  # UTF-8, 16, or 32
        return json.loads(text, object_pairs_hook=_with_unique_names)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also errors of decoding
        raise ValueError(f"{path} is not {form}: {' '.join(str(error).split())}") from None


def _with_unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ, as TOML requires; JSON would take the last value of a name."""
    found = dict(pairs)
    if len(found) < len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {name!r}")
    return found


def structure(kind: Any, value: Any, where: str = "") -> Any:
    """Return a parsed value as a `kind`, converted if its type differs.

    kind                                 value
    int, bool, str, dict                 of exactly that type: true is not an integer
    float, Path, Any                     a number, a string, anything
    Literal[...], X | Y, None            one of these values or types, null
    list[X], tuple[X, ...], tuple[X, Y]  a list of these
    dict[str, X]                         an object with any names
    dataclass, NamedTuple                an object with these fields only; those with a default may
                                         be missing
    TypedDict                            an object with these fields; others stay as they are
    Annotated[X, words, fits]            an X for which ``fits(x)``; `words` describe it

    Raises:
        ValueError: the value has a different type; one line with its path from `where` (the path
            of the whole value, or a text that ends in ": "), the expected type and the value.
    """
    if value is None and type(None) in get_args(kind):
        return None
    kinds = alternatives(kind)
    for each in kinds:
        try:
            return _converted(each, value, where)
        except (TypeError, OverflowError):
            continue
        except ValueError:  # a part of the value has a different type
            if len(kinds) == 1:
                raise
    choices = [word for k in kinds if get_origin(k) is Literal for word in get_args(k)]
    words = [word for word in choices if isinstance(word, str)]
    near = did_you_mean(value, words) if isinstance(value, str) else ""
    raise ValueError(f"{_owner(where)} must be {_described(kind)}, got {_written(value)}{near}")


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types of a union, except None; for any other type, that type alone."""
    union = get_origin(kind) in (Union, UnionType)
    return tuple(k for k in get_args(kind) if k is not type(None)) if union else (kind,)


def _converted(kind: Any, value: Any, where: str) -> Any:
    """Convert a value to a type that is not a union; raise TypeError if it has a different one."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or type(value) is kind:
        return value
    if origin is Annotated:
        found = _converted(inner[0], value, where)
        if inner[2](found):
            return found
    elif origin is Literal:
        if any(type(value) is type(x) and value == x for x in inner):
            return value
    elif origin in (list, tuple) and isinstance(value, (list, tuple)):
        kinds = inner[:1] * len(value) if origin is list or inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            parts = enumerate(zip(kinds, value))
            return origin(structure(k, part, f"{where}[{i}]") for i, (k, part) in parts)
    elif origin is dict and isinstance(value, dict):
        return {k: structure(inner[1], v, f"{where}[{k!r}]") for k, v in value.items()}
    elif kind is Path and isinstance(value, str):
        return Path(value)
    elif kind is float and type(value) is int:
        return float(value)
    elif isinstance(value, dict) and kind not in _WORDS and origin is None:
        return _record(kind, value, where)
    raise TypeError


def _record(kind: Any, value: dict[str, Any], where: str) -> Any:
    """Return an object as a dataclass, NamedTuple or TypedDict."""
    kinds, needed, is_open = _record_fields(kind)
    dot = "" if where in ("", f"{_owner(where)}: ") else "."
    # Values first, in order: a format's version explains best why the names differ.
    found = {k: structure(kinds[k], value[k], where + dot + k) for k in kinds if k in value}
    if missing := [name for name in kinds if name in needed - value.keys()]:
        raise ValueError(f"{_owner(where)} has no {', '.join(missing)}")
    if is_open:
        return value | found
    if unknown := [name for name in value if name not in kinds]:
        expected = f"expected {', '.join(kinds)}{did_you_mean(unknown[0], kinds)}"
        raise ValueError(f"{_owner(where)} has an unknown field {unknown[0]!r}; {expected}")
    return kind(**found)


@cache
def _record_fields(record: Any) -> tuple[dict[str, Any], set[str], bool]:
    """The types of a record's fields, the names of those that it needs, and if it may have more."""
    kinds = get_type_hints(record, include_extras=True)
    if is_typeddict(record):
        optional = {k for k in kinds if get_origin(kinds[k]) is NotRequired or not record.__total__}
        inner = {k: get_args(kind)[0] if get_origin(kind) is NotRequired else kind
                 for k, kind in kinds.items()}  # fmt: skip
        return inner, kinds.keys() - optional, True
    given = inspect.signature(record).parameters.values()
    return kinds, {one.name for one in given if one.default is one.empty}, False


def _written(value: Any) -> str:
    """A value of a message, cut; Python refuses to write integers of more than 4300 digits."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return "a value with a huge integer"


def _owner(where: str) -> str:
    return where.removesuffix(": ") or "it"


def _described(kind: Any) -> str:
    """A type in words."""
    words = []
    for each in alternatives(kind):
        origin, inner = get_origin(each), get_args(each)
        if origin is Annotated:
            words.append(inner[1])
        elif origin is Literal:
            words.append("one of " + ", ".join(map(str, inner)))
        elif origin in (list, tuple):
            fixed = origin is tuple and inner[-1] is not Ellipsis
            size = f" of {len(inner)} values" if fixed else ""
            words.append(f"a list{size}, each {_described(inner[0])}")
        else:
            words.append(_WORDS.get(each, "an object"))
    return " or ".join(words)
