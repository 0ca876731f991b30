"""Triton's interpreter without the work whose results it throws away or has had before.

A kernel that the interpreter runs spends nine tenths of its time on what surrounds numpy: the
language is replaced by the interpreter's at every call of a device function, each sum of integers
is computed again in 64 bits for an assertion that is off, and each tensor makes a type and a tuple
of its shape anew. `install` keeps what is always the same. No number changes: what computes stays
Triton's (`tests/test_quick_interpreter.py` runs programs with it and without).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from triton.language import core, semantic
from triton.runtime import interpreter

Places = list[tuple[object, str, Any]]  # place, attribute, replacement


def _language() -> Places:
    """The language is prepared once a launch for each module, and what is to be replaced is looked
    up once."""
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang
    prepared: set[str] = set()
    members: dict[int, list[tuple[str, Any, Callable]]] = {}

    def launch_afresh(self, *args, **options):
        prepared.clear()
        return launch(self, *args, **options)

    def prepare_once(function):
        if (module := function.__globals__["__name__"]) in prepared:
            return None  # of a device function, which takes nothing back
        prepared.add(module)
        return prepare(function)

    def interpreted(member):
        def call(*args, **options):
            options["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **options)

        return call

    def replace_builtins(place, builder, scope):
        if id(place) not in members:
            found = ((name, getattr(place, name)) for name in dir(place))
            members[id(place)] = [
                (n, member, interpreted(member)) for n, member in found if core.is_builtin(member)
            ]
        for name, member, replacement in members[id(place)]:
            if getattr(place, name) is member:
                scope.set_attr(place, name, replacement)

    return [
        (interpreter.GridExecutor, "__call__", launch_afresh),
        (interpreter, "_patch_lang", prepare_once),
        (interpreter, "_patch_builtin", replace_builtins),
    ]


def _types() -> Places:
    """What a type or a shape determines is computed once for each."""
    right_unwrap, right_dtype = core._unwrap_if_constexpr, interpreter._get_np_dtype
    right_block = core.block_type.__init__
    numpy_dtypes: dict[str, Any] = {}
    blocks: dict[tuple[Any, ...], tuple] = {}
    shapes: dict[tuple[int, ...], tuple] = {}
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.tensor}

    def unwrap(o):
        kind = type(o)
        if kind is core.constexpr:
            return o.value
        return o if kind in plain else right_unwrap(o)

    def numpy_dtype(dtype):
        if (found := numpy_dtypes.get(dtype.name)) is None:
            found = numpy_dtypes[dtype.name] = right_dtype(dtype)
        return found

    def same_dtype(self, other):
        other = unwrap(other)
        return isinstance(other, core.dtype) and self.name == other.name

    def block(self, element_ty, shape):
        if type(shape) not in (list, core.tuple):
            return right_block(self, element_ty, shape)
        key = (element_ty.name, *map(unwrap, shape))
        if any(type(size) is not int for size in key[1:]):  # 2.0 is equal to 2, but no size
            return right_block(self, element_ty, shape)
        if (found := blocks.get(key)) is None:
            right_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = found

    def same_block(self, other):
        return (
            isinstance(other, core.block_type)
            and self.element_ty == other.element_ty
            and self.shape.values == other.shape.values
        )

    def tensor(self, handle, type):
        sizes = builtins.tuple(type.shape.values) if type.is_block() else ()
        if (found := shapes.get(sizes)) is None:
            right_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = found

    right_tensor = core.tensor.__init__
    return [
        (core, "_unwrap_if_constexpr", unwrap),
        (interpreter, "_get_np_dtype", numpy_dtype),
        (core.dtype, "__eq__", same_dtype),
        (core.block_type, "__init__", block),
        (core.block_type, "__eq__", same_block),
        (core.tensor, "__init__", tensor),
    ]


def _sums() -> Places:
    """No sum is made again for `device_assert` where that does nothing, as `debug` is not set."""
    right = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def assert_no_overflow(self, lhs, rhs, operation):
        if self.builder.options.debug:
            right(self, lhs, rhs, operation)

    place = semantic.TritonSemantic
    return [(place, "binary_op_sanitize_overflow_impl", assert_no_overflow)]


_plain: Places = []  # what was replaced


def install() -> None:
    """Replace them in this process, for good."""
    for place, name, value in () if _plain else (*_language(), *_types(), *_sums()):
        _plain.append((place, name, getattr(place, name)))
        setattr(place, name, value)


@contextmanager
def uninstalled() -> Iterator[None]:
    """Triton's own interpreter, to compare with."""
    with ExitStack() as stack:
        for place, name, value in _plain:
            stack.enter_context(mock.patch.object(place, name, value))
        yield
