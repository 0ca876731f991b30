"""The activations against plain torch in float64; Triton runs interpreted."""

from functools import partial

import pytest
import torch
from close import assert_close_f64, assert_error_budget, relative_error

from warpweave.kernels import activation, reference
from warpweave.kernels.activation import activate, geglu, gelu, relu2, swiglu

IMPLS = ("torch", "triton")
PAIRS = {
    "gelu_tanh": (gelu, reference.gelu),
    "gelu_erf": (partial(gelu, approximate="none"), partial(reference.gelu, approximate="none")),
    "relu2": (relu2, reference.relu2),
    "swiglu": (swiglu, reference.swiglu),
    "geglu": (geglu, reference.geglu),
}
ops = pytest.mark.parametrize(("op", "truth_of"), PAIRS.values(), ids=PAIRS)
impls = pytest.mark.parametrize("impl", IMPLS)


def _input(*shape, dtype=torch.float64) -> torch.Tensor:
    return (3 * torch.randn(shape, dtype=torch.float64)).to(dtype).requires_grad_()


def _with_gradient(op, x, **options) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = op(x, **options)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
    return y, torch.autograd.grad(y, x, dy.to(y.dtype))[0]


@impls
@ops
def test_values_and_gradients_equal_the_reference(op, truth_of, impl) -> None:
    for shape in ((1, 2), (37, 134), (3, 5, 6), (2,)):
        x = _input(*shape)
        for ours, truth in zip(_with_gradient(op, x, impl=impl), _with_gradient(truth_of, x)):
            assert_close_f64(ours, truth, 1e-13)


def test_the_kinds_are_told_apart_and_a_swapped_gate_is_seen() -> None:
    x = _input(37, 134)
    assert relative_error(gelu(x), gelu(x, approximate="none")) > 1e-5
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert relative_error(swiglu(swapped), swiglu(x)) > 0.1
    halves = torch.cat((x[:, ::2], x[:, 1::2]), 1)
    assert relative_error(swiglu(halves), swiglu(x)) > 0.1
    assert relative_error(geglu(x), swiglu(x)) > 0.01
    assert relative_error(relu2(x), x.relu()) > 0.1


@impls
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@ops
def test_error_is_within_twice_that_of_the_same_dtype(op, truth_of, dtype, impl) -> None:
    x = _input(37, 134, dtype=dtype)
    ours = _with_gradient(op, x, impl=impl)
    same, truth = _with_gradient(truth_of, x), _with_gradient(truth_of, x.double())
    for a, b, t in zip(ours, same, truth):
        assert a.dtype == dtype
        assert_error_budget(a, b, t)


@impls
@ops
def test_gradcheck(op, truth_of, impl) -> None:
    assert torch.autograd.gradcheck(partial(op, impl=impl), _input(2, 6))


@impls
@ops
def test_extreme_values_stay_finite(op, truth_of, impl) -> None:
    x = torch.tensor([-1e4, 1.0, 1e4, 1.0, -90.0, 1.0, 0.0, 1.0]).requires_grad_()
    y, dx = _with_gradient(op, x, impl=impl)
    assert y.isfinite().all()
    assert dx.isfinite().all()
    assert_close_f64(y, truth_of(x.double()), 1e-6)


@impls
@ops
def test_strided_and_empty_inputs(op, truth_of, impl) -> None:
    wide = _input(6, 40)
    for x in (wide[:, 3:23], wide[::2, ::2], wide.mT[:, :4]):
        y, truth = op(x, impl=impl), truth_of(x)
        assert_close_f64(y, truth, 1e-13)
        ours, expected = (torch.autograd.grad(t.sum(), wide)[0] for t in (y, truth))
        assert_close_f64(ours, expected, 1e-13)
    y, dx = _with_gradient(op, _input(0, 6), impl=impl)
    assert len(y) == 0
    assert dx.shape == (0, 6)


@impls
def test_what_does_not_fit_raises(impl) -> None:
    with pytest.raises(ValueError, match="gate, up pairs"):
        swiglu(_input(3, 5), impl=impl)
    with pytest.raises(ValueError, match="gate, up pairs"):
        geglu(torch.tensor(1.0), impl=impl)
    with pytest.raises(ValueError, match="activation must be one of gelu"):
        activate(_input(3), "silu", impl=impl)
    with pytest.raises(ValueError, match="no gradient of swiglu"):
        activation.activation_bwd(_input(3, 4), _input(3, 4), "swiglu", impl=impl)
    with pytest.raises(ValueError, match="approximate must be"):
        gelu(_input(3), approximate="erf", impl=impl)


@impls
def test_raw_halves_are_the_gradients(impl) -> None:
    x = _input(7, 10)
    dx = activation.swiglu_bwd(torch.ones(7, 5, dtype=x.dtype), x.detach(), impl=impl)
    assert_close_f64(dx, torch.autograd.grad(reference.swiglu(x).sum(), x)[0], 1e-13)
    dx = activation.gelu_bwd(torch.ones_like(x), x.detach(), impl=impl)
    assert_close_f64(dx, torch.autograd.grad(reference.gelu(x).sum(), x)[0], 1e-13)


def test_the_operators_are_well_formed() -> None:
    x = _input(5, 6)
    for name in ("relu2", "geglu"):
        torch.library.opcheck(torch.ops.warpweave.activation_fwd.default, (x, name))


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo's own
@impls
def test_they_compile_without_breaks(impl) -> None:
    def both(x):
        return swiglu(relu2(gelu(x, impl=impl), impl=impl), impl=impl)

    x = _input(5, 6)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for a, b in zip(_with_gradient(compiled, x), _with_gradient(both, x)):
        assert torch.equal(a, b)
