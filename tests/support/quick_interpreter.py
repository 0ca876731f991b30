"""Triton's interpreter without work whose results are discarded or already known.

The interpreter spends nine tenths of a kernel's time around numpy. It replaces the language at
every call of a device function, computes each sum of integers again in 64 bits for an assertion
that is off, and makes a new type and a new shape tuple for each tensor. `install` caches what never
changes. No value changes: the computations remain Triton's (`tests/test_quick_interpreter.py` runs
programs with it and without it).
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
from triton.language import core, semantic
from triton.runtime import interpreter

Places = list[tuple[object, str, Any]]  # place, attribute, replacement


def _language() -> Places:
    """Prepare the language once per launch for each module, and look up the replacements once."""
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang
    prepared: set[str] = set()
    members: dict[int, list[tuple[str, Any, Callable]]] = {}

    def launch_afresh(self, *args, **options):
        prepared.clear()
        return launch(self, *args, **options)

    def prepare_once(function):
        if (module := function.__globals__["__name__"]) in prepared:
            return None  # of a device function, whose replacements are not undone
        prepared.add(module)
        return prepare(function)

    asks_for_semantic = core.add.__code__  # that of functions made by `builtin`

    def interpreted(member):
        if getattr(member, "__code__", None) is asks_for_semantic:
            member = member.__wrapped__  # it is passed

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
    """Compute the properties of a type or a shape once for each."""
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
        if any(type(size) is not int for size in key[1:]):  # 2.0 equals 2 but is not a size
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
    """Skip the second sum for `device_assert`, which does nothing because `debug` is not set."""
    right = semantic.TritonSemantic.binary_op_sanitize_overflow_impl

    def assert_no_overflow(self, lhs, rhs, operation):
        if self.builder.options.debug:
            right(self, lhs, rhs, operation)

    place = semantic.TritonSemantic
    return [(place, "binary_op_sanitize_overflow_impl", assert_no_overflow)]


def _operands() -> Places:
    """Use two operands of equal dtype and shape as they are, and cache the constants that numbers
    of a program become next to a tensor."""
    place, right = semantic.TritonSemantic, semantic.TritonSemantic.binary_op_type_checking_impl
    tensor, block_type, handle = core.tensor, core.block_type, interpreter.TensorHandle
    least = {"int32": -(2**31), "int64": -(2**63)}
    constants: dict[tuple[Any, ...], np.ndarray] = {}
    takes_number = {"int32": int, "int64": int, "fp32": float, "fp64": float}
    widened = {"fp16", "bf16"}  # these are widened for division

    def constant(like, value):
        kind = like.type
        sizes = builtins.tuple(kind.shape.values) if type(kind) is block_type else (1,)
        key = (value, like.dtype.name, sizes)
        if (data := constants.get(key)) is None:
            data = constants[key] = np.full(sizes, value, dtype=interpreter._get_np_dtype(kind))
            data.flags.writeable = False
        return tensor(handle(data, like.dtype), kind)

    def beside(like, value):
        """Return `value` as a tensor like `like`, if it is a number that does not change the type
        of `like`."""
        name = like.dtype.name
        if type(value) is not takes_number.get(name) or (value == 0.0 and name[0] == "f"):
            return None
        if type(value) is int and not least[name] <= value < -least[name]:
            return None
        return constant(like, value)

    def operands(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True,
        div_or_mod=False,
    ):  # fmt: skip
        if type(lhs) is tensor:
            if type(rhs) is tensor:
                name = lhs.dtype.name
                if (
                    name == rhs.dtype.name
                    and lhs.shape is rhs.shape  # shapes are cached, so identity suffices
                    and type(lhs.dtype) is core.dtype
                    and not (div_or_mod and name in widened)
                ):
                    return lhs, rhs
            elif arithmetic_check and (number := beside(lhs, rhs)) is not None:
                return lhs, number
        elif arithmetic_check and type(rhs) is tensor and (number := beside(rhs, lhs)) is not None:
            return number, rhs
        return right(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    return [(place, "binary_op_type_checking_impl", operands)]


def _arrays() -> Places:
    """Compare an array's element size with that of its dtype only once per pair."""
    right = interpreter.TensorHandle.__post_init__
    fits: set[tuple[int, str]] = set()

    def fit(self):
        if (key := (self.data.itemsize, self.dtype.name)) not in fits:
            right(self)
            fits.add(key)

    return [(interpreter.TensorHandle, "__post_init__", fit)]


_plain: Places = []  # what was replaced


def _all() -> Places:
    return [*_language(), *_types(), *_sums(), *_operands(), *_arrays()]


def install() -> None:
    """Install the replacements in this process for good."""
    for place, name, value in () if _plain else _all():
        _plain.append((place, name, getattr(place, name)))
        setattr(place, name, value)


@contextmanager
def uninstalled() -> Iterator[None]:
    """Restore Triton's own interpreter within the context, for comparison."""
    with ExitStack() as stack:
        for place, name, value in _plain:
            stack.enter_context(mock.patch.object(place, name, value))
        yield
