"""Rotary embedding against plain torch in float64; Triton runs interpreted."""

import pytest
import torch
from close import assert_close_f64, assert_error_budget, relative_error

from warpweave.kernels import reference
from warpweave.kernels.rope import apply_rope, rope_fwd, rope_table

IMPLS = ("torch", "triton")
SHAPES = ((1, 1, 1, 2), (2, 37, 3, 10), (1, 5, 2, 80), (3, 7, 5, 64))


def _inputs(shape, dtype=torch.float64):
    x, dy = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    cos, sin = rope_table(torch.arange(3, 3 + shape[1]) * 7, shape[3], dtype=torch.float64)
    return x.requires_grad_(), dy, cos, sin


def test_the_table_is_exact_at_positions_no_float32_angle_can_hold() -> None:
    cos, sin = rope_table(torch.tensor([0, 1, 10**7 + 1]), 4, theta=100.0, dtype=torch.float64)
    angles = torch.tensor([[0, 0], [1, 0.1], [10**7 + 1, 10**6 + 0.1]], dtype=torch.float64)
    assert_close_f64(cos, angles.cos(), 1e-9)
    assert_close_f64(sin, angles.sin(), 1e-9)
    assert relative_error(angles.float().cos(), angles.cos()) > 1e-3
    assert rope_table(torch.arange(3), 4)[0].dtype == torch.float32


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_the_reference(shape, impl) -> None:
    x, dy, cos, sin = _inputs(shape)
    y, truth = apply_rope(x, cos, sin, impl=impl), reference.apply_rope(x, cos, sin)
    assert_close_f64(y, truth, 1e-14)
    (dx,), (dtruth,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(truth, x, dy)
    assert_close_f64(dx, dtruth, 1e-14)
    assert relative_error(rope_fwd(dy, cos, sin, impl=impl), dtruth) > 1e-3  # not conjugated


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_is_within_twice_that_of_the_same_dtype(dtype, impl) -> None:
    x, dy, cos, sin = _inputs((2, 37, 3, 10), dtype)
    table = cos.float(), sin.float()
    y, same = apply_rope(x, *table, impl=impl), reference.apply_rope(x, *table)
    truth = reference.apply_rope(x.double(), cos, sin)
    assert y.dtype == dtype
    assert_error_budget(y, same, truth)
    budget = [torch.autograd.grad(out, x, dy.to(out.dtype))[0] for out in (y, same)]
    wide = x.detach().double().requires_grad_()
    (dtruth,) = torch.autograd.grad(reference.apply_rope(wide, cos, sin), wide, dy.double())
    assert_error_budget(*budget, dtruth)


@pytest.mark.parametrize("impl", IMPLS)
def test_rotation_keeps_length_and_depends_on_relative_position_only(impl) -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64).expand(2, 1, 9, 1, 16)
    cos, sin = rope_table(torch.arange(9) + 1000, 16, dtype=torch.float64)
    q, k = apply_rope(q, cos, sin, impl=impl), apply_rope(k, cos, sin, impl=impl)
    assert_close_f64(q.norm(dim=-1), q.norm(dim=-1)[:, :1].expand(1, 9, 1), 1e-13)
    scores = (q[0, :, 0] @ k[0, :, 0].T).diagonal(2)
    assert_close_f64(scores, scores[:1].expand(7), 1e-13)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck(impl) -> None:
    x, _, cos, sin = _inputs((1, 3, 2, 6))
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin, impl=impl), x)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_and_empty_inputs(impl) -> None:
    qkv = torch.randn(2, 11, 4, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = rope_table(torch.arange(11), 8, dtype=torch.float64)
    for x in (qkv[:, :, :, 1], qkv[..., 2, :].transpose(1, 2).contiguous().transpose(1, 2)):
        y = apply_rope(x, cos, sin, impl=impl)
        assert y.is_contiguous()
        assert_close_f64(y, reference.apply_rope(x, cos, sin), 1e-14)
        (dx,) = torch.autograd.grad(y.sum(), qkv)  # an expanded dy
        assert_close_f64(dx, torch.autograd.grad(reference.apply_rope(x, cos, sin).sum(), qkv)[0])
    empty = torch.empty(0, 11, 2, 8, dtype=torch.float64, requires_grad=True)
    y = apply_rope(empty, cos, sin, impl=impl)
    assert torch.autograd.grad(y.sum(), empty)[0].shape == y.shape == empty.shape


@pytest.mark.parametrize("impl", IMPLS)
def test_shapes_that_do_not_fit_raise(impl) -> None:
    x, _, cos, sin = _inputs((2, 5, 3, 8))
    with pytest.raises(ValueError, match="even D"):
        apply_rope(x[..., :7], cos, sin, impl=impl)
    with pytest.raises(ValueError, match=r"must be \[S, D/2\]"):
        apply_rope(x, cos[:4], sin[:4], impl=impl)
    with pytest.raises(ValueError, match="even head_dim"):
        rope_table(torch.arange(4), 7)


def test_the_operator_is_well_formed() -> None:
    x, _, cos, sin = _inputs((1, 5, 2, 8))
    torch.library.opcheck(torch.ops.warpweave.rope.default, (x, cos, sin, False))


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo's own
@pytest.mark.parametrize("impl", IMPLS)
def test_it_compiles_without_breaks(impl) -> None:
    x, dy, cos, sin = _inputs((1, 5, 2, 8))
    compiled = torch.compile(apply_rope, fullgraph=True, backend="aot_eager")
    y, truth = compiled(x, cos, sin, impl=impl), apply_rope(x, cos, sin, impl=impl)
    assert_close_f64(y, truth, 1e-15)  # Dynamo's addcmul rounds twice
    dx, dtruth = (torch.autograd.grad(out, x, dy)[0] for out in (y, truth))
    assert_close_f64(dx, dtruth, 1e-15)
