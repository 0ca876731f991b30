"""Option types that tyro lacks: options with an optional value, and a model's fields as options."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Annotated, Any, get_type_hints

import tyro

from warpweave.kernels.structure import alternatives

_WORDS: dict[str, Any] = {"True": True, "False": False, "auto": "auto"}
RESUME = tyro.constructors.PrimitiveConstructorSpec[Any](  # the value of --resume is optional
    (0, 1), "[True|False|auto]", lambda words: _WORDS[words[0]] if words else True,
    lambda value: value in _WORDS.values(), lambda value: [str(value)], (*_WORDS,),
)  # fmt: skip


def _switch(name: str) -> Any:
    """A switch that may be unset: ``--tied``, or ``--no-tied``, which `cli.command_line` rewrites
    as ``--tied False``."""
    off = f"--no-{name.replace('_', '-')}"
    return tyro.constructors.PrimitiveConstructorSpec[Any](
        (0, 1), f"| {off}", lambda words: _WORDS[words[0]] if words else True,
        lambda value: isinstance(value, bool), lambda value: [str(value)], ("True", "False"),
    )  # fmt: skip


def overrides_of(config: type, module: str) -> Any:
    """Make a frozen record ``GPTOverrides``, importable from `module`, with the fields of `config`,
    their types, and their help. None means not given."""
    hints = {"vocab_size": "(default: the larger of the preset's and the data's)"}
    kinds, fields = get_type_hints(config), []
    sizes_first = sorted(dataclasses.fields(config), key=lambda item: bool(item.kw_only))
    for item in sizes_first:
        if item.name == "rope_scaling":  # a record that only a loaded model sets
            continue
        hint = hints.get(item.name, "(default: the preset's)")
        about: list[Any] = [tyro.conf.arg(help_behavior_hint=hint)]
        if alternatives(kinds[item.name]) == (bool,):
            about.append(_switch(item.name))
        option: Any = Annotated[(kinds[item.name] | None, *about)]  # type: ignore[valid-type]
        fields.append((item.name, option, None))
    docs = [inspect.getdoc(c) or "" for c in config.__mro__[:-1]]
    said = [text.partition("Attributes:")[2].partition("\n\nExamples:")[0] for text in docs]
    namespace = {"__doc__": "A model.\n\nAttributes:" + "".join(said)}
    made = dataclasses.make_dataclass("GPTOverrides", fields, frozen=True, namespace=namespace)
    made.__module__ = module  # where pickle looks for it; make_dataclass has module= from 3.12 on
    return made
