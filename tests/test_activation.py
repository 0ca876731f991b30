"""The activations against plain torch in float64; Triton kernels are interpreted."""

from functools import partial

import pytest
import torch
from close import assert_all_close, assert_close_f64, assert_error_budget, relative_error
from triton.runtime.errors import InterpreterError
from well_formed import well_formed

from warpweave.kernels import activation, reference
from warpweave.kernels.activation import (
    ACTIVATIONS,
    activate,
    activation_bwd,
    activation_bwd_op,
    activation_fwd,
    activation_op,
)

IMPLS = ("torch", "triton")
ops = pytest.mark.parametrize("name", ACTIVATIONS)
impls = pytest.mark.parametrize("impl", IMPLS)


def _input(*shape, dtype=torch.float64) -> torch.Tensor:
    return (3 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()


def _with_gradient(op, x, *name, **options) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = op(x, *name, **options)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    return y, torch.autograd.grad(y, x, dy.to(y.dtype))[0]


@impls
@ops
def test_values_and_gradients_equal_the_reference(name, impl) -> None:
    for shape in ((1, 2), (37, 134), (3, 5, 6), (2,)):
        x = _input(*shape)
        truth = _with_gradient(reference.activate, x, name)
        assert_all_close(_with_gradient(activate, x, name, impl=impl), truth, 1e-13)


def test_the_kinds_are_told_apart_and_a_swapped_gate_is_seen() -> None:
    x = _input(37, 134)
    gelu, relu2, swiglu = (activate(x, name) for name in ("gelu", "relu2", "swiglu"))
    assert relative_error(gelu, activate(x, "gelu_erf")) > 1e-5
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert relative_error(activate(swapped, "swiglu"), swiglu) > 0.1
    halves = torch.cat((x[:, ::2], x[:, 1::2]), 1)
    assert relative_error(activate(halves, "swiglu"), swiglu) > 0.1
    assert relative_error(activate(x, "geglu"), swiglu) > 0.01
    assert relative_error(relu2, x.relu()) > 0.1


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@ops
def test_error_is_within_twice_that_of_the_same_dtype(name, dtype, impl) -> None:
    x = _input(37, 134, dtype=dtype)
    ours = _with_gradient(activate, x, name, impl=impl)
    same = _with_gradient(reference.activate, x, name)
    truth = _with_gradient(reference.activate, x.double(), name)
    for a, b, t in zip(ours, same, truth):
        assert a.dtype == dtype
        assert_error_budget(a, b, t)


@pytest.mark.parametrize(
    "activate",
    [reference.activate, *(partial(activate, impl=impl) for impl in ("torch", "triton"))],
)
@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_a_product_in_bfloat16_is_rounded_once(name, activate) -> None:
    x = _input(37, 134, dtype=torch.bfloat16)
    truth = reference.activate(x.double(), name)
    error = (activate(x, name) - truth).abs()
    assert (error <= 1.01 * 2**-8 * truth.abs() + 1e-5).all()


@impls
@ops
def test_gradcheck(name, impl) -> None:
    assert torch.autograd.gradcheck(partial(activate, activation=name, impl=impl), _input(2, 6))


@impls
@ops
def test_extreme_values_stay_finite(name, impl) -> None:
    x = torch.tensor([-1e4, 1.0, 1e4, 1.0, -90.0, 1.0, 0.0, 1.0]).requires_grad_()
    y, dx = _with_gradient(activate, x, name, impl=impl)
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert_close_f64(y, reference.activate(x.double(), name), 1e-6)


@impls
@ops
def test_strided_and_empty_inputs(name, impl) -> None:
    wide = _input(6, 40)
    for x in (wide[:, 3:23], wide[::2, ::2], wide.mT[:, :4]):
        y, truth = activate(x, name, impl=impl), reference.activate(x, name)
        assert_close_f64(y, truth, 1e-13)
        ours, expected = (torch.autograd.grad(t.sum(), wide)[0] for t in (y, truth))
        assert_close_f64(ours, expected, 1e-13)
    y, dx = _with_gradient(activate, _input(0, 6), name, impl=impl)
    assert len(y) == 0
    assert dx.shape == (0, 6)


@impls
@ops
def test_raw_halves_are_the_gradients(name, impl) -> None:
    x = _input(7, 10)
    y = reference.activate(x, name)
    ours = activation_fwd(x.detach(), name, impl=impl)
    assert_close_f64(ours, y, 1e-13)
    dx = activation_bwd(torch.ones_like(ours), x.detach(), name, impl=impl)
    assert_close_f64(dx, torch.autograd.grad(y.sum(), x)[0], 1e-13)


def test_the_operators_are_well_formed() -> None:
    x = _input(5, 6)
    for name in ("relu2", "geglu"):
        well_formed(activation_op, x, name)
        well_formed(activation_bwd_op, activation_op(x.detach(), name), x.detach(), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_gelu_rounds_no_more_than_its_dtype_and_stays_finite(dtype) -> None:
    """The compiled GELU is written out in float32, and nothing cancels: 1 - sigmoid(x) would."""
    compiled = torch.compile(
        lambda x: activate(x, "gelu", impl="torch"), fullgraph=True, backend="aot_eager"
    )

    def slope(function, x):
        x = x.requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    x = torch.linspace(-12, 12, 9973).to(dtype)
    truth = slope(reference.gelu, x.double())
    assert_close_f64(slope(compiled, x), truth, 4 * torch.finfo(dtype).eps)
    assert_close_f64(compiled(x), reference.gelu(x.double()), 4 * torch.finfo(dtype).eps)
    far = torch.tensor([-1e4, -90.0, 0.0, 90.0, 1e4]).to(dtype)
    assert_close_f64(slope(compiled, far), torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]), 1e-30)


@pytest.mark.parametrize("function", ["_pointwise_fwd_kernel", "_pointwise_bwd_kernel"])
def test_a_function_that_no_kernel_knows_is_no_gelu(function) -> None:
    x, kernel = torch.ones(3), getattr(activation, function)
    tensors = (x, x.clone()) if "fwd" in function else (x, x, x.clone())
    kernel[(1,)](*tensors, 3, "gelu_erf", 4)
    with pytest.raises(InterpreterError):
        kernel[(1,)](*tensors, 3, "mish", 4)
    with pytest.raises(KeyError):
        activation._value(x, "mish")
