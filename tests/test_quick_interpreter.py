"""The changes that speed up Triton's interpreter for the tests change no bit of its results."""

import dataclasses

import numpy as np
import pytest
import torch
from quick_interpreter import uninstalled
from torch import Tensor
from triton.language import core
from triton.runtime import interpreter

from warpweave.kernels.attention import attention
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.norm import layer_norm


def _attention(q, k, v):
    return attention(*(x[None, :, None] for x in (q, k, v)), causal=True, window=5, impl="triton")


def _dropout(x):
    return dropout(x, Drop(0.3, 7, 1, torch.arange(len(x))), impl="triton")


OPS = {
    "attention": (_attention, ((19, 40), (19, 40), (19, 40))),
    "dropout": (_dropout, ((3, 41),)),
    "norm": (lambda *x: layer_norm(*x, impl="triton"), ((5, 37), (37,), (37,))),
}


def _computed(op: str, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    run, shapes = OPS[op]
    leaves = [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]
    y = run(*leaves)
    dy = torch.randn(y.shape, generator=generator).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("op", OPS)
def test_every_bit_is_that_of_tritons_own_interpreter(op, dtype):
    first, again = _computed(op, dtype), _computed(op, dtype)  # the second time from the cache
    with uninstalled():
        expected = _computed(op, dtype)
    for a, b, c in zip(first, again, expected):
        assert torch.equal(a, c)
        assert torch.equal(b, c)


def _told(element: core.dtype, shape: object) -> object:
    """Return Triton's answer for a block of this shape: its size, dtype and name, or its error."""
    try:
        block = core.block_type(element, shape)
    except Exception as error:
        return type(error), str(error)
    other = core.block_type(core.int8, shape)
    tensor = core.tensor(None, block)
    return (
        *(block.name, block.numel, repr(block.shape), interpreter._get_np_dtype(block)),
        *(bool(block == core.block_type(element, [*shape])), bool(block == other), block == 3),
        *(tensor.numel.value, [s.value for s in tensor.shape], tensor.dtype.name),
    )


@pytest.mark.parametrize("element", [core.float16, core.bfloat16, core.pointer_type(core.int64)])
@pytest.mark.parametrize(
    "shape", [[4], [4, 8], [core.constexpr(4), 8], core.tuple([2, 1]), [3], [], (4, 8), [2.0]]
)
def test_types_and_their_errors_are_tritons(element, shape):
    found = _told(element, shape), _told(element, shape)
    with uninstalled():
        assert found == (_told(element, shape),) * 2


def _operand(name: str, sizes: tuple[int, ...]) -> core.tensor:
    dtype = getattr(core, name)
    data = np.arange(np.prod(sizes)).reshape(sizes).astype(interpreter._get_np_dtype(dtype))
    return core.tensor(
        interpreter.TensorHandle(data, dtype),
        dtype if sizes == (1,) else core.block_type(dtype, [*sizes]),
    )


_NAMES = ["int1", "int32", "uint32", "int64", "float16", "bfloat16", "float32", "float64"]
_NUMBERS = [0, 1, -1, 2**31 - 1, 2**31, -(2**31), 2**63, -0.0, 0.0, 0.5, 1e-40, -np.inf, True]


@pytest.mark.parametrize("flags", [(True, False), (True, True), (False, True)])
@pytest.mark.parametrize("sizes", [(1,), (4,)])
@pytest.mark.parametrize("name", _NAMES)
def test_operands_and_their_errors_are_tritons(name, sizes, flags):
    """Compares two tensors, and a tensor and a number: their dtype, shape and every bit."""
    semantic = interpreter.interpreter_semantic
    others = [_operand(n, s) for n in _NAMES for s in ((1,), (4,), (2, 1))]

    def told(lhs, rhs):
        try:
            with np.errstate(over="ignore"):
                found = semantic.binary_op_type_checking_impl(
                    lhs, rhs, arithmetic_check=flags[0], div_or_mod=flags[1]
                )
        except Exception as error:
            return type(error), str(error)
        return [
            (str(x.type), x.shape.values, x.handle.dtype.name, x.handle.data.tobytes())
            for x in found
        ]

    def all_told():
        x = _operand(name, sizes)
        return [told(*pair) for y in (*others, *_NUMBERS) for pair in ((x, y), (y, x))]

    found = all_told(), all_told()
    with uninstalled():
        assert found == (all_told(),) * 2


@pytest.mark.parametrize("operation", ["add", "sub", "mul"])
def test_an_overflow_is_told_where_triton_tells_it(operation, monkeypatch):
    semantic, builder = interpreter.interpreter_semantic, interpreter.interpreter_builder
    large, other = (semantic.scalar_constant(n, core.int32) for n in (2**30, -(2**31) + 2**29))
    operands = (large, large) if operation != "sub" else (other, large)

    def told() -> str:
        try:
            with np.errstate(over="ignore"):
                getattr(semantic, operation)(*operands, True)
        except AssertionError as error:
            return str(error)
        return ""

    for debug in (False, True):
        monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, debug=debug))
        found = told()
        with uninstalled():
            assert found == told()
        assert bool(found) == debug
