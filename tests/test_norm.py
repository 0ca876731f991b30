"""RMSNorm and LayerNorm against plain torch in float64; Triton runs interpreted."""

import pytest
import torch
from close import assert_close_f64, assert_error_budget, relative_error

from warpweave.kernels import norm, reference

IMPLS = ("torch", "triton")
SHAPES = ((1, 1), (1, 8), (37, 67), (2, 3, 128), (19, 2049))  # the last: more tiles than programs


def _call(module, x, w, b, residual, **options):
    """(y, s or None) of the LayerNorm with bias if there is a b, of the RMSNorm otherwise."""
    if b is None:
        out = module.rms_norm(x, w, residual=residual, **options)
    else:
        out = module.layer_norm(x, w, b, residual=residual, **options)
    return out if residual is not None else (out, None)


def _inputs(shape, dtype, bias: bool, residual: bool) -> list[torch.Tensor | None]:
    shapes = [shape, shape[-1:], shape[-1:] if bias else None, shape if residual else None]
    made = [None if s is None else torch.randn(s, dtype=torch.float64) + 0.5 for s in shapes]
    return [None if t is None else t.to(dtype).requires_grad_() for t in made]


def _run(module, inputs, dy, ds, **options) -> list[torch.Tensor]:
    """Outputs, then the gradients of every input there is."""
    inputs = [None if t is None else t.detach().requires_grad_() for t in inputs]
    y, s = _call(module, *inputs, **options)
    loss = (y * dy).sum() + (0 if s is None else (s * ds).sum())
    gradients = torch.autograd.grad(loss, [t for t in inputs if t is not None])
    return [t for t in (y, s) if t is not None] + list(gradients)


def _double(tensors):
    return [None if t is None else t.detach().double() for t in tensors]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients_equal_the_reference_in_float64(shape, bias, impl) -> None:
    for residual in (False, True):
        inputs = _inputs(shape, torch.float64, bias, residual)
        dy, ds = torch.randn(2, *shape, dtype=torch.float64)
        ours, truth = _run(norm, inputs, dy, ds, impl=impl), _run(reference, inputs, dy, ds)
        scale = max(t.abs().max() for t in truth)  # at E = 1 LayerNorm's true gradient is zero
        for a, b in zip(ours, truth, strict=True):
            assert a.dtype == torch.float64
            assert (a - b).abs().max() <= 1e-12 * scale


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bias", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_is_within_twice_that_of_the_same_dtype(dtype, bias, impl) -> None:
    inputs = _inputs((61, 131), dtype, bias, True)
    dy, ds = torch.randn(2, 61, 131).to(dtype)
    ours = _run(norm, inputs, dy, ds, impl=impl)
    same = _run(reference, inputs, dy, ds)
    truth = _run(reference, _double(inputs), dy.double(), ds.double())
    for a, b, t in zip(ours, same, truth, strict=True):
        assert a.dtype == b.dtype == dtype
        assert_error_budget(a, b, t)


def test_a_wrong_epsilon_an_absent_bias_and_a_lost_residual_gradient_are_seen() -> None:
    inputs = _inputs((37, 67), torch.float64, True, True)
    dy, ds = torch.randn(2, 37, 67, dtype=torch.float64)
    truth = _run(reference, inputs, dy, ds)
    x, w, b, residual = inputs
    wrong = norm.layer_norm(x, w, b, 1.001e-5, residual=residual)[0]
    assert relative_error(wrong, truth[0]) > 1e-11  # 1000 tolerances
    assert relative_error(norm.layer_norm(x, w, residual=residual)[0], truth[0]) > 1e-3
    assert relative_error(_run(norm, inputs, dy, 0 * ds)[2], truth[2]) > 1e-3


@pytest.mark.parametrize("impl", IMPLS)
def test_gradcheck(impl) -> None:
    x, w, b, r = _inputs((3, 5), torch.float64, True, True)
    for call, inputs in (
        (lambda x, w, b, r: norm.layer_norm(x, w, b, residual=r, impl=impl), (x, w, b, r)),
        (lambda x, w, r: norm.rms_norm(x, w, residual=r, impl=impl), (x, w, r)),
    ):
        assert torch.autograd.gradcheck(call, inputs, fast_mode=impl == "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_second_derivative_of_rms_norm_is_refused(impl) -> None:
    x, w, _, _ = _inputs((3, 8), torch.float64, bias=False, residual=False)
    y = norm.rms_norm(x, w, impl=impl)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|no autograd formula"):
        dx.sum().backward()


@pytest.mark.parametrize("impl", IMPLS)
def test_no_rows_and_unused_outputs(impl) -> None:
    x, w, b, r = _inputs((0, 7), torch.float32, True, True)
    y, s = norm.layer_norm(x, w, b, residual=r, impl=impl)
    dx, dw, db, dr = torch.autograd.grad(y.sum() + s.sum(), (x, w, b, r))
    assert y.shape == s.shape == dx.shape == dr.shape == (0, 7)
    assert not dw.any()
    assert not db.any()
    x, w, _, r = _inputs((4, 7), torch.float32, False, True)
    y, s = norm.rms_norm(x, w, residual=r, impl=impl)
    dx, dr = torch.autograd.grad(s.sum(), (x, r))  # y unused
    assert torch.equal(dx, torch.ones_like(dx))
    assert torch.equal(dr, torch.ones_like(dx))


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_equal_contiguous_ones(impl) -> None:
    wide = torch.randn(3, 5, 40, dtype=torch.float64)
    w = torch.randn(2 * 13, dtype=torch.float64)[::2]
    for x in (wide[..., 7:20], wide[:, ::2, 1:27:2], wide.mT[:, 3:, :].expand(3, 37, 5)[:, ::3]):
        x, weight = x.detach().requires_grad_(), w[: x.shape[-1]]
        y = norm.rms_norm(x, weight, impl=impl)
        (dx,) = torch.autograd.grad(y.sum(), x)  # and an expanded (stride 0) dy
        c = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        truth = reference.rms_norm(c, weight)
        assert_close_f64(y, truth, 1e-13)
        assert_close_f64(dx, torch.autograd.grad(truth.sum(), c)[0], 1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_float32_residual_stream_stays_float32(impl) -> None:
    x, w = torch.randn(9, 33).half().requires_grad_(), torch.randn(33).half()
    r = torch.randn(9, 33, requires_grad=True)
    y, s = norm.rms_norm(x, w, residual=r, impl=impl)
    assert (y.dtype, s.dtype) == (torch.float16, torch.float32)
    assert torch.equal(s, x.float() + r)
    dx, dr = torch.autograd.grad(y.float().sum() + s.sum(), (x, r))
    assert (dx.dtype, dr.dtype) == (torch.float16, torch.float32)
    assert torch.equal(dx, dr.half())


@pytest.mark.parametrize("impl", IMPLS)
def test_what_is_normalised_is_the_rounded_sum_that_is_returned(impl) -> None:
    x, w, b, r = _inputs((37, 67), torch.float16, True, True)
    y, s = norm.layer_norm(x, w, b, residual=r, impl=impl)
    assert torch.equal(y, norm.layer_norm(s, w, b, impl=impl))


def test_parameter_gradients_are_the_same_bits_every_time() -> None:
    x, dy, w = torch.randn(301, 67), torch.randn(301, 67), torch.randn(67)
    _, s, rstd = norm.rms_norm_fwd(x, w, impl="triton")
    assert s is x
    first, second = (norm.rms_norm_bwd(dy, s, w, rstd, impl="triton") for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_shapes_that_do_not_fit_raise() -> None:
    x, w = torch.randn(4, 6), torch.randn(6)
    for impl in IMPLS:
        with pytest.raises(ValueError, match=r"weight must be \[E\]"):
            norm.rms_norm(x, torch.randn(5), impl=impl)
        with pytest.raises(ValueError, match="bias must be like weight"):
            norm.layer_norm(x, w, torch.randn(1), impl=impl)
        with pytest.raises(ValueError, match="residual must be like x"):
            norm.rms_norm(x, w, residual=torch.randn(1, 6), impl=impl)
    with pytest.raises(ValueError, match="E <= 8192, got 8193"):
        norm.rms_norm(torch.randn(1, 8193), torch.randn(8193), impl="triton")


def test_the_operator_is_well_formed() -> None:
    x, w, b, r = _inputs((5, 12), torch.float32, True, True)
    op = torch.ops.warpweave.norm_fwd.default
    torch.library.opcheck(op, (x, w, b, r, 1e-5, True))
    torch.library.opcheck(op, (x, w, None, None, 1e-5, False))


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # Dynamo's own
@pytest.mark.parametrize("impl", IMPLS)
def test_it_compiles_without_breaks(impl) -> None:
    x, w, _, r = _inputs((5, 12), torch.float32, False, True)

    def loss(x, w, r):
        y, s = norm.rms_norm(x, w, residual=r, impl=impl)
        return (y * y).sum() + s.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    eager = torch.autograd.grad(loss(x, w, r), (x, w, r))
    for a, b in zip(torch.autograd.grad(compiled(x, w, r), (x, w, r)), eager):
        assert torch.equal(a, b)


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_raw_halves_of_both_implementations_agree(layer) -> None:
    x, w, b, r = (t.detach() for t in _inputs((37, 67), torch.float64, True, True))
    dy, ds = torch.randn(2, 37, 67, dtype=torch.float64)
    results = []
    for impl in IMPLS:
        if layer:
            forward = norm.layer_norm_fwd(x, w, b, residual=r, impl=impl)
            backward = norm.layer_norm_bwd(dy, forward[1], w, *forward[2:], ds=ds, impl=impl)
        else:
            forward = norm.rms_norm_fwd(x, w, residual=r, impl=impl)
            backward = norm.rms_norm_bwd(dy, forward[1], w, forward[2], ds=ds, impl=impl)
        results.append(forward + backward)
    for a, b in zip(*results, strict=True):
        assert_close_f64(a, b, 1e-12)
