"""An extension of griffe, which reads the API pages' signatures from the sources.

A constructor with ``@fields_as_keywords(place=Place)`` also accepts the fields of `Place`. The
pages show it as ``inspect.signature`` does: the fields, then the records themselves.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import griffe

DECORATOR = "warpweave.layers.keywords.fields_as_keywords"


class FieldsAsKeywords(griffe.Extension):
    """Add the keywords of ``fields_as_keywords`` to the constructors of layers."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change all constructors, after the files of all records were read."""
        for function in _functions(pkg):
            if any(d.callable_path == DECORATOR for d in function.decorators):
                _show_keywords(function)


def _functions(node: griffe.Object) -> list[griffe.Function]:
    found = [m for m in node.members.values() if not m.is_alias]
    inner = [f for m in found if m.is_module or m.is_class for f in _functions(m)]
    return [m for m in found if m.is_function] + inner


def _show_keywords(function: griffe.Function) -> None:
    """Give `function` the parameters that its caller can pass."""
    layer = getattr(import_module(function.module.path), function.parent.name)
    own = {parameter.name: parameter for parameter in function.parameters}
    decorator = next(d for d in function.decorators if d.callable_path == DECORATOR)
    records = [
        function.modules_collection[function.resolve(str(argument.value))]
        for argument in decorator.value.arguments
        if isinstance(argument, griffe.ExprKeyword) and argument.name in own
    ]
    parameters = [own["self"]]
    for name, seen in inspect.signature(layer).parameters.items():
        parameter = own.get(name) or griffe.Parameter(name, annotation=_annotation(records, name))
        if seen.default is None and parameter.name in own and parameter.default is None:
            parameter.annotation = griffe.ExprBinOp(parameter.annotation, "|", "None")  # a record
        parameter.kind = griffe.ParameterKind[seen.kind.name.lower()]
        if seen.default is not seen.empty:
            parameter.default = repr(seen.default)
        parameters.append(parameter)
    function.parameters = griffe.Parameters(*parameters)


def _annotation(records: list[griffe.Class], name: str) -> Any:
    """Return the annotation of a record's field, which links to its type."""
    return next(r.all_members[name].annotation for r in records if name in r.all_members)
