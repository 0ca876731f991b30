"""Constructors that take records, whole or field by field."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import Parameter, Signature
from typing import Any


def fields_as_keywords(
    *positional: str, unused: tuple[str, ...] = (), **records: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a constructor that takes records: it takes their fields as keywords, too.

    With ``@fields_as_keywords(style=AttentionStyle, place=Place)`` the call
    ``Attention(64, 8, window=3, mesh=mesh)`` is
    ``Attention(64, 8, style=AttentionStyle(window=3), place=Place(mesh=mesh))``. A field that is
    given beside its record replaces the record's value. ``inspect.signature`` shows the fields; a
    keyword that is none raises TypeError.

    Args:
        positional: fields that may be given without their names, after the constructor's own.
        unused: fields that the layer has no use for, which are no keywords.
        records: parameter of the constructor, by keyword only -> the frozen dataclass it takes.
    """
    offered = {
        parameter: [f for f in fields(record) if f.name not in unused]
        for parameter, record in records.items()
    }

    def decorate(init: Callable[..., None]) -> Callable[..., None]:
        public = _with_fields(inspect.signature(init), positional, offered)

        @functools.wraps(init)
        def wrapped(*args: Any, **keywords: Any) -> None:
            try:
                given = public.bind(*args, **keywords).arguments
            except TypeError as error:
                raise TypeError(f"{init.__qualname__}(): {error}") from None
            for parameter, record in records.items():
                names = [f.name for f in offered[parameter] if f.name in given]
                chosen = {name: given.pop(name) for name in names}
                given[parameter] = replace(given.get(parameter) or record(), **chosen)
            init(**given)

        wrapped.__signature__ = public  # type: ignore[attr-defined]
        return wrapped

    return decorate


def _with_fields(own: Signature, positional: tuple[str, ...], offered: dict) -> Signature:
    """`own`, whose records have defaults, with the fields that are offered of each."""
    after = dict.fromkeys(positional, Parameter.POSITIONAL_OR_KEYWORD)
    first, options, last = [], [], []
    for parameter in own.parameters.values():
        if parameter.kind is not Parameter.KEYWORD_ONLY:
            first.append(parameter)
        else:
            is_record = parameter.name in offered
            last.append(parameter.replace(default=None) if is_record else parameter)
    every = {f.name: f for of_record in offered.values() for f in of_record}
    for name in dict.fromkeys((*positional, *every)):
        kind, field = after.get(name, Parameter.KEYWORD_ONLY), every[name]
        options.append(Parameter(name, kind, default=field.default, annotation=field.type))
    return Signature([*first, *options, *last])
