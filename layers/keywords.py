"""Constructors that accept records of options, or the records' fields as keywords."""

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
    """Decorate a constructor that has record parameters: also accept the records' fields.

    With ``@fields_as_keywords(style=AttentionStyle, place=Place)`` the call
    ``Attention(64, 8, window=3, mesh=mesh)`` means
    ``Attention(64, 8, style=AttentionStyle(window=3), place=Place(mesh=mesh))``. If both a record
    and one of its fields are given, the field replaces the record's value. ``inspect.signature``
    shows the fields. An unknown keyword raises TypeError.

    Args:
        positional: fields that may be given by position, after the constructor's own parameters.
        unused: fields that the layer does not use and does not accept.
        records: keyword-only parameter of the constructor -> the frozen dataclass it expects.
    """
    offered = {name: [f for f in fields(r) if f.name not in unused] for name, r in records.items()}

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
    """The signature `own` with the records' fields added as keywords, and the records last."""
    by_keyword, by_place = Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD
    parameters = own.parameters.values()
    first = [p for p in parameters if p.kind is not by_keyword]
    last = [p for p in parameters if p.kind is by_keyword and p.name not in offered]
    records = [own.parameters[name] for name in offered]
    whole = [p.replace(default=None, annotation=f"{p.annotation} | None") for p in records]
    every = {f.name: f for of_record in offered.values() for f in of_record}
    options = []
    for name in dict.fromkeys((*positional, *every)):
        kind, field = by_place if name in positional else by_keyword, every[name]
        options.append(Parameter(name, kind, default=field.default, annotation=field.type))
    return Signature([*first, *options, *last, *whole])
