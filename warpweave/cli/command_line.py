"""Read the options of a command: one spelling of switches, and suggestions for unknown choices.

``--tied`` turns a switch on and ``--no-tied`` turns it off in every command, including switches
that may be unset because they override a model preset. ``--tied False`` means ``--no-tied``.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, TypeVar, get_args, get_origin, get_type_hints

import tyro

from warpweave.cli.messages import refusing
from warpweave.kernels.structure import alternatives, structure

_Record = TypeVar("_Record")
_SAID = {"True": True, "False": False}


def read_command_line(
    kind: type[_Record],
    command: str,
    description: str | None,
    argv: Sequence[str] | None = None,
    default: _Record | None = None,
) -> _Record:
    """Read the options of ``warpweave COMMAND`` as a record `kind`. Exit with 2 on a wrong one.

    Options that are not given have their values in `default`.
    """
    words = [*(sys.argv[1:] if argv is None else argv)]
    kinds, groups = option_types(kind), _headings(kind)
    with refusing(ValueError):
        check_choices(kinds, words)
    shown: dict[str, Any] = {"prog": f"warpweave {command}", "description": description}
    if not groups:
        more = {} if default is None else {"default": default}
        return tyro.cli(kind, args=spelled(kinds, words), **shown, **more)
    whole = kind() if default is None else default
    parts = {
        heading: base(**{item.name: getattr(whole, item.name) for item in dataclasses.fields(base)})
        for heading, base in groups.items()
    }
    nested: Any = TypedDict("Options", groups)  # type: ignore[misc, operator]
    form = tyro.conf.OmitArgPrefixes[nested]  # --tp, not --parallelism.tp
    found = tyro.cli(form, args=spelled(kinds, words), default=parts, **shown)
    return kind(**{name: value for part in found.values() for name, value in vars(part).items()})


def _headings(kind: type) -> dict[str, type]:
    """The headings of the help, each with a base of `kind`, if that has no options of its own:
    "data" for ``DataOptions``."""
    bases = () if inspect.get_annotations(kind) else reversed(kind.__bases__)
    return {b.__name__.removesuffix("Options").lower(): b for b in bases if b is not object}


def option_types(kind: type) -> dict[str, Any]:
    """The name and type of every option, including those of nested records in `kind`."""
    hints, found = get_type_hints(kind), {}
    for item in dataclasses.fields(kind):
        factory = item.default_factory
        default = item.default if factory is dataclasses.MISSING else factory()
        inner = dataclasses.is_dataclass(default)
        found |= option_types(type(default)) if inner else {item.name: hints[item.name]}
    return found


def spelled(kinds: dict[str, Any], words: Sequence[str]) -> list[str]:
    """Rewrite `words` for tyro: a switch that may be unset is followed by True or False; any other
    is its name with or without "no-"."""
    found: list[str] = []
    given = [*words]
    while given:
        word = given.pop(0)
        name, equals, value = word.partition("=")
        on = not name.startswith("--no-")
        option = name.removeprefix("--" if on else "--no-").replace("-", "_")
        if not word.startswith("--") or alternatives(kinds.get(option)) != (bool,):
            found.append(word)
            continue
        if on and not equals and given[:1] and given[0] in _SAID:
            value = given.pop(0)
        if equals and (value not in _SAID or not on):  # tyro rejects it
            found.append(word)
            continue
        on = _SAID.get(value, on)
        own = option.replace("_", "-")
        if kinds[option] is bool:
            found.append(f"--{own}" if on else f"--no-{own}")
        else:
            found += [f"--{own}", str(on)]
    return found


def check_choices(kinds: dict[str, Any], words: Sequence[str]) -> None:
    """Raise ``ValueError`` for a word that is not one of its option's choices."""
    for at, word in enumerate(words):
        name, equals, value = word.removeprefix("--").partition("=")
        kind = kinds.get(name.replace("-", "_"))
        choices, several = choices_of(kind)
        if not word.startswith("--") or not choices:
            continue
        values = [value] if equals else []
        for other in () if equals else words[at + 1 :]:
            if other.startswith("--") or (values and not several):
                break
            values.append(other)
        known = [*choices, *(["None"] if kind != alternatives(kind)[0] and not several else [])]
        for value in values:
            if value not in known:
                structure(Literal[choices], value, name.replace("-", "_"))  # raises


def choices_of(kind: Any) -> tuple[tuple[str, ...], bool]:
    """The choices of an option, () if it has none, and True if it accepts several values."""
    kinds = alternatives(kind)
    if several := len(kinds) == 1 and get_origin(kinds[0]) is tuple:
        kinds = alternatives(get_args(kinds[0])[0])
    if any(get_origin(k) is not Literal for k in kinds):
        return (), several
    words = tuple(word for k in kinds for word in get_args(k))
    return (words if all(isinstance(word, str) for word in words) else ()), several
