"""Rotary embedding against plain torch in float64; Triton kernels are interpreted."""

import itertools
import math

import pytest
import torch
from close import assert_close_f64, assert_error_budget, relative_error
from torch.utils.checkpoint import checkpoint
from traffic import traffic
from well_formed import well_formed

from warpweave.kernels import cost, reference
from warpweave.kernels.rope import (
    RopeScaling,
    apply_rope,
    apply_rope_qk,
    rope_fwd,
    rope_qk_fwd,
    rope_table,
)
from warpweave.kernels.rope.rotation import rope_op, rope_qk_op

IMPLS = ("torch", "triton")
SHAPES = ((1, 1, 1, 2), (2, 37, 3, 10), (1, 5, 2, 80), (3, 7, 5, 64), (1, 3, 2, 256))
PAIRS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])


def _inputs(shape, dtype=torch.float64, rotary_dim=None):
    x, dy = torch.randn(2, *shape, dtype=torch.float64).to(dtype)
    positions = torch.arange(3, 3 + shape[1]) * 7
    cos, sin = rope_table(positions, rotary_dim or shape[3], dtype=torch.float64)
    return x.requires_grad_(), dy, cos, sin


def test_the_table_is_exact_at_positions_no_float32_angle_can_hold() -> None:
    cos, sin = rope_table(torch.tensor([0, 1, 10**7 + 1]), 4, theta=100.0, dtype=torch.float64)
    angles = torch.tensor([[0, 0], [1, 0.1], [10**7 + 1, 10**6 + 0.1]], dtype=torch.float64)
    assert_close_f64(cos, angles.cos(), 1e-9)
    assert_close_f64(sin, angles.sin(), 1e-9)
    assert relative_error(angles.float().cos(), angles.cos()) > 1e-3
    assert rope_table(torch.arange(3), 4)[0].dtype == torch.float32
    far = torch.tensor([2**24 + 1, 2**40 + 3])  # nor any float32 position
    cos, sin = rope_table(far, 2, dtype=torch.float64)
    assert cos[:, 0].tolist() == pytest.approx([math.cos(at) for at in far.tolist()], abs=1e-12)
    assert sin[:, 0].tolist() == pytest.approx([math.sin(at) for at in far.tolist()], abs=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
@PAIRS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients_equal_the_reference(shape, interleaved, impl) -> None:
    for rotary_dim in {shape[3], max(2, shape[3] // 4 * 2)}:
        x, dy, cos, sin = _inputs(shape, rotary_dim=rotary_dim)
        options = {"interleaved": interleaved}
        y = apply_rope(x, cos, sin, **options, impl=impl)
        truth = reference.apply_rope(x, cos, sin, **options)
        assert_close_f64(y, truth, 1e-14)
        assert torch.equal(y[..., rotary_dim:], x[..., rotary_dim:])
        (dx,), (dtruth,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(truth, x, dy)
        assert_close_f64(dx, dtruth, 1e-14)
        forth = rope_fwd(dy, cos, sin, **options, impl=impl)
        assert relative_error(forth, dtruth) > 1e-3  # not conjugated
        other = rope_fwd(dy, cos, sin, interleaved=not interleaved, conjugate=True, impl=impl)
        assert rotary_dim == 2 or relative_error(other, dtruth) > 1e-3


@PAIRS
@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_is_within_twice_that_of_the_same_dtype(dtype, impl, interleaved) -> None:
    x, dy, cos, sin = _inputs((2, 37, 3, 10), dtype, rotary_dim=8)
    table, options = (cos.float(), sin.float()), {"interleaved": interleaved}
    y = apply_rope(x, *table, **options, impl=impl)
    same = reference.apply_rope(x, *table, **options)
    truth = reference.apply_rope(x.double(), cos, sin, **options)
    assert y.dtype == dtype
    assert_error_budget(y, same, truth)
    budget = [torch.autograd.grad(out, x, dy.to(out.dtype))[0] for out in (y, same)]
    wide = x.detach().double().requires_grad_()
    exact = reference.apply_rope(wide, cos, sin, **options)
    (dtruth,) = torch.autograd.grad(exact, wide, dy.double())
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
    x, _, cos, sin = _inputs((1, 3, 2, 7), rotary_dim=4)
    how = {"interleaved": True, "impl": impl}
    assert torch.autograd.gradcheck(lambda x: apply_rope(x, cos, sin, **how), x)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_and_empty_inputs(impl) -> None:
    qkv = torch.randn(2, 11, 4, 3, 8, dtype=torch.float64, requires_grad=True)
    table = torch.stack(rope_table(torch.arange(11), 8, dtype=torch.float64), -1)
    cos, sin = table.unbind(-1)
    for x in (qkv[:, :, :, 1], qkv[..., 2, :].transpose(1, 2).contiguous().transpose(1, 2)):
        y = apply_rope(x, cos, sin, impl=impl)
        assert y.is_contiguous()
        assert_close_f64(y, reference.apply_rope(x, cos, sin), 1e-14)
        (dx,) = torch.autograd.grad(y.sum(), qkv)  # an expanded dy
        assert_close_f64(dx, torch.autograd.grad(reference.apply_rope(x, cos, sin).sum(), qkv)[0])
    q, k = (qkv.detach()[:, :, :n, 0].transpose(1, 3).contiguous().transpose(1, 3) for n in (4, 2))
    assert q.stride(-1) != 1 != k.stride(-1)
    for given in ((q, k), (q.contiguous(), k), (q, k.contiguous())):
        for x, y in zip(given, apply_rope_qk(*given, cos, sin, impl=impl)):
            assert_close_f64(y, reference.apply_rope(x, cos, sin), 1e-14)
    empty = torch.empty(0, 11, 2, 8, dtype=torch.float64, requires_grad=True)
    y = apply_rope(empty, cos, sin, impl=impl)
    assert torch.autograd.grad(y.sum(), empty)[0].shape == y.shape == empty.shape
    for heads in ((0, 2), (3, 0), (0, 0)):  # without heads in one, the other is still rotated
        given = [qkv.detach()[:, :, :n, 0] for n in heads]
        for x, y in zip(given, apply_rope_qk(*given, cos, sin, impl=impl), strict=True):
            assert_close_f64(y, reference.apply_rope(x, cos, sin), 1e-14)


@pytest.mark.parametrize("impl", IMPLS)
def test_gradients_come_with_a_graph_where_one_is_asked_for(impl) -> None:
    x, _, cos, sin = _inputs((2, 5, 3, 8))
    y = apply_rope(x, cos, sin, impl=impl)
    (want,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    assert torch.equal(dx, want)


def test_the_operators_are_well_formed() -> None:
    x, _, cos, sin = _inputs((1, 5, 2, 8))
    table, k = (cos, sin), x.detach()[:, :, :1].clone()
    well_formed(rope_op, x, *table, True, False)
    well_formed(rope_qk_op, x, k.requires_grad_(), *table, False, True)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_defaults_rotate_halves_forward_with_a_base_of_10000(impl) -> None:
    x, _, cos, sin = _inputs((2, 5, 3, 8))
    x, y, plain = x.detach(), x.detach()[:, :, :1].clone(), {"interleaved": False, "impl": impl}
    truth = [reference.apply_rope(t, cos, sin, interleaved=False) for t in (x, y)]
    found = [apply_rope(x, cos, sin, impl=impl), *apply_rope_qk(x, y, cos, sin, impl=impl)]
    halves = [rope_fwd(x, cos, sin, impl=impl), *rope_qk_fwd(x, y, cos, sin, impl=impl)]
    for a, b, t in zip(found, halves, (truth[0], *truth), strict=True):
        assert torch.equal(a, b)
        assert_close_f64(a, t, 1e-14)
    back = rope_fwd(x, cos, sin, conjugate=True, **plain)
    assert torch.equal(rope_fwd(x, cos, sin, conjugate=True, impl=impl), back)
    for how in ({"conjugate": True}, {"interleaved": True}):
        assert relative_error(rope_fwd(x, cos, sin, **how, impl=impl), found[0]) > 1e-3
    at = torch.arange(3)
    frequencies = torch.tensor([1, 0.1, 0.01, 0.001], dtype=torch.float64)  # 10000^(-2 i / 8)
    angles = torch.outer(at.double(), frequencies)
    for a, t in zip(rope_table(at, 8, dtype=torch.float64), (angles.cos(), angles.sin())):
        assert_close_f64(a, t, 1e-12)


# ------------------------------------------------------------ two at once


@PAIRS
@pytest.mark.parametrize("impl", IMPLS)
def test_queries_and_keys_together_are_each_alone(impl, interleaved) -> None:
    qkv = torch.randn(2, 37, 9, 40, dtype=torch.float64)
    cos, sin = rope_table(torch.arange(37), 24, dtype=torch.float64)
    leaf, options = qkv.requires_grad_(), {"interleaved": interleaved, "impl": impl}
    dq, dk = torch.randn(2, 37, 7, 40).double(), torch.randn(2, 37, 1, 40).double()
    alone = [apply_rope(x, cos, sin, **options) for x in (leaf[:, :, :7], leaf[:, :, 7:8])]
    expected = torch.autograd.grad(alone, leaf, (dq, dk))[0]
    q, k = leaf[:, :, :7] * 1, leaf[:, :, 7:8] * 1
    pair = apply_rope_qk(q, k, cos, sin, **options)
    assert all(torch.equal(a, b) for a, b in zip(pair, alone, strict=True))
    assert torch.equal(torch.autograd.grad(pair, leaf, (dq, dk))[0], expected)
    with torch.no_grad():
        q, k = q.detach().clone(), leaf.detach()[:, :, 7:8]  # with different strides
        q.copy_(leaf[:, :, :7])
        again = apply_rope_qk(q, k, cos, sin, **options)
        assert all(torch.equal(a, b) for a, b in zip(again, alone, strict=True))
        back = rope_qk_fwd(*again, cos, sin, conjugate=True, **options)
        once = (rope_fwd(x, cos, sin, conjugate=True, **options) for x in again)
        assert all(torch.equal(a, b) for a, b in zip(back, once, strict=True))
    empty = torch.empty(2, 37, 0, 40, dtype=torch.float64)
    assert apply_rope_qk(empty, pair[1].detach(), cos, sin, **options)[1].shape == dk.shape


@pytest.mark.parametrize("impl", IMPLS)
def test_pairs_checkpoint_and_autocast(impl) -> None:
    x, _, cos, sin = _inputs((1, 5, 3, 8), rotary_dim=6)

    def loss(x):
        q, k = apply_rope_qk(x[:, :, :2], x[:, :, 2:], cos, sin, interleaved=True, impl=impl)
        return (q * q[..., :1]).sum() + (k**3).sum()

    (truth,) = torch.autograd.grad(loss(x), x)
    recomputed = checkpoint(loss, x, use_reentrant=False)
    with torch.autocast("cpu", torch.bfloat16):
        cast = loss(x)
    for found in (recomputed, cast):
        assert_close_f64(torch.autograd.grad(found, x)[0], truth, 1e-14)


@PAIRS
def test_every_element_is_read_and_written_once(interleaved) -> None:
    qkv, options = torch.randn(2, 32, 12, 64).bfloat16(), {"interleaved": interleaved}
    cos, sin = rope_table(torch.arange(32), 16)
    resident = dict.fromkeys(("cos_ptr", "sin_ptr"), "read by every head")
    q, k = qkv[:, :, :8], qkv[:, :, 8:10]
    with traffic() as t:
        rope_qk_fwd(q, k, cos, sin, impl="triton", **options)
    least = cost.rope(2, 32, 10, 64, rotary_dim=16).bytes
    assert 0.99 * least <= t.moved(resident) <= 1.01 * least
    assert len(t.launches) == 1


def test_rows_further_apart_than_int32_can_count() -> None:
    """The pages between the two sequences are never touched, so they use no memory."""
    cos, sin = rope_table(torch.arange(3), 8)
    x = torch.randn(2, 3, 2, 8).half()
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided(x.shape, (2**31, 16, 8, 1))
    far.copy_(x)
    y = apply_rope(x, cos, sin, impl="triton")
    assert torch.equal(apply_rope(far, cos, sin, impl="triton"), y)


# ------------------------------------------------------------ tables of extended models

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS = {
    "linear": (RopeScaling("linear", 4.0), "linear", {}),
    "yarn": (RopeScaling("yarn", 16.0, 4096), "yarn", {}),
    "yarn betas": (RopeScaling("yarn", 40.0, 4096, 2.0, 24.0), "yarn",
                   {"beta_slow": 2.0, "beta_fast": 24.0}),
    "yarn between dims": (RopeScaling("yarn", 32.0, 4096, truncate=False), "yarn",
                          {"truncate": False}),
    "yarn without temperature": (RopeScaling("yarn", 4.0, 32768, attention_factor=1.0), "yarn",
                                 {"attention_factor": 1.0}),
    "llama 3.1": (RopeScaling("llama3", 8.0, 8192), "llama3", LLAMA3),
    "llama 3.2": (RopeScaling("llama3", 32.0, 8192), "llama3", LLAMA3),
}  # fmt: skip


def _theirs(kind: str, head_dim: int, length: int, parameters: dict, **now):
    """Return the frequencies and the multiplier by the independent implementation."""
    pytest.importorskip("transformers", reason="the independent implementation of the tables")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=2 * head_dim, num_attention_heads=2, head_dim=head_dim,
        max_position_embeddings=length, rope_parameters={"rope_type": kind, **parameters},
    )  # fmt: skip
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **now)


def _transformers(scaling: RopeScaling, kind: str, more: dict, head_dim, part, theta):
    parameters = {"rope_theta": theta, "factor": scaling.factor, "partial_rotary_factor": part}
    if scaling.original_length:
        parameters["original_max_position_embeddings"] = scaling.original_length
    length = int(scaling.factor * max(scaling.original_length, 4096))
    return _theirs(kind, head_dim, length, parameters | more)


def test_ramp_clamped_to_the_head_dims_equals_transformers() -> None:
    """For example with a base so small that the slowest dim turns often."""
    scaling = RopeScaling("yarn", 4.0, 100)
    frequencies, _ = _transformers(scaling, "yarn", {}, 16, 1.0, 2.0)
    plain = 2.0 ** (torch.arange(0, 16, 2, dtype=torch.float64) / -16)
    assert ((scaling.scale(plain, 2.0) - frequencies) / frequencies).abs().max() < 1e-5


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_dim", "part", "theta"), [(128, 1.0, 5e5), (80, 0.5, 1e4)])
def test_scaled_tables_are_those_of_transformers(name, head_dim, part, theta) -> None:
    scaling, kind, more = SCALINGS[name]
    frequencies, multiplier = _transformers(scaling, kind, more, head_dim, part, theta)
    assert multiplier == pytest.approx(scaling.multiplier, abs=1e-12)
    rotary_dim = int(head_dim * part)
    plain = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / -rotary_dim)
    ours = scaling.scale(plain, theta)
    error = ((ours - frequencies.double()) / ours).abs().max()
    assert error < 1e-5  # theirs are float32
    assert relative_error(plain, ours) == 0 or ((plain - ours) / ours).abs().max() > 0.5
    positions = torch.tensor([0, 1, 77])
    cos, sin = rope_table(positions, rotary_dim, theta=theta, scaling=scaling, dtype=torch.float64)
    angles = torch.outer(positions.double(), frequencies.double())
    assert_close_f64(cos, angles.cos() * multiplier, 1e-4)
    assert_close_f64(sin, angles.sin() * multiplier, 1e-4)


def test_ntk_scaling_equals_the_dynamic_form_of_transformers_at_one_length() -> None:
    given = {"rope_theta": 1e4, "factor": 3.0}
    frequencies, _ = _theirs("dynamic", 128, 2048, given, seq_len=8192)
    plain = 1e4 ** (torch.arange(0, 128, 2, dtype=torch.float64) / -128)
    ours = RopeScaling("ntk", 3.0 * 8192 / 2048 - 2.0).scale(plain, 1e4)
    assert ((ours - frequencies.double()) / ours).abs().max() < 1e-5
    assert ours[0] == plain[0]
    assert_close_f64(ours[-1:] * 10, plain[-1:])  # the lowest is interpolated by the whole factor


@pytest.mark.parametrize("kind", ["linear", "ntk", "yarn", "llama3"])
def test_every_frequency_is_divided_by_something_from_1_to_the_factor(kind) -> None:
    """A faster one is divided by less, for any dims, base and factor, including one pair and 1."""
    for own in (0.0, 0.5, 1.0):
        assert RopeScaling(kind, 3.0, 100, attention_factor=own).multiplier == own
    for R, theta, factor in itertools.product((2, 4, 6, 16), (1.5, 1e4), (1.0, 3.0)):
        plain = theta ** (torch.arange(0, R, 2, dtype=torch.float64) / -R)
        by = plain / RopeScaling(kind, factor, 100).scale(plain, theta)
        assert ((by >= 1 - 1e-12) & (by <= factor + 1e-12)).all(), (R, theta, factor, by)
        assert (by.diff() >= -1e-12).all()
        if kind == "ntk":
            assert by[0] == 1
            assert R == 2 or abs(by[-1] - factor) < 1e-12


@pytest.mark.parametrize("impl", IMPLS)
def test_a_temperature_in_the_table_scales_scores_by_its_square(impl) -> None:
    q = torch.randn(1, 9, 1, 16, dtype=torch.float64, requires_grad=True)
    scaling = RopeScaling("yarn", 8.0, 4)
    positions, wide = torch.arange(9), {"dtype": torch.float64}
    warm = rope_table(positions, 16, scaling=scaling, **wide)
    cold = [t / scaling.multiplier for t in warm]
    assert scaling.multiplier > 1.2
    scores = []
    for table in (warm, cold):
        y = apply_rope(q, *table, impl=impl)[0, :, 0]
        scores.append(y @ y.T)
    assert_close_f64(scores[0], scores[1] * scaling.multiplier**2, 1e-13)
    dq, dtruth = (torch.autograd.grad(s.square().sum(), q, retain_graph=True)[0] for s in scores)
    assert_close_f64(dq, dtruth * scaling.multiplier**4, 1e-12)
