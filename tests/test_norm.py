"""RMSNorm and LayerNorm against plain torch in float64; Triton kernels are interpreted."""

import pytest
import torch
from close import assert_close_f64, assert_close_or_none, assert_error_budget, relative_error
from torch.utils.checkpoint import checkpoint
from traffic import traffic
from well_formed import told_right, well_formed

from warpweave.kernels import cost, dropout, norm, reference
from warpweave.kernels.dropout import Drop
from warpweave.kernels.norm import function
from warpweave.kernels.norm.function import NormOptions, WantedGradients, norm_bwd_op, norm_op

IMPLS = ("torch", "triton")
SHAPES = ((1, 1), (1, 8), (37, 67), (2, 3, 128), (19, 2049))  # the last: more tiles than programs


def _call(module, x, w, b, residual, **options):
    """Return (y, s or None) of the LayerNorm with bias if there is a b,
    of the RMSNorm otherwise."""
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
    """Return the outputs, then the gradients of every input."""
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


def test_wrong_epsilon_missing_bias_and_lost_residual_gradient_are_detected() -> None:
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
        (
            lambda *given: _chain(norm, TERMS[-1], True, *given, impl=impl),
            [t.requires_grad_() for t in _chain_inputs((3, 5))],
        ),
    ):
        assert torch.autograd.gradcheck(call, inputs, fast_mode=impl == "triton")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_second_derivative_of_rms_norm_is_refused(impl) -> None:
    x, w, _, _ = _inputs((3, 8), torch.float64, bias=False, residual=False)
    y = norm.rms_norm(x, w, impl=impl)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"not support second derivatives|no autograd formula"):
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
    dx, dr = torch.autograd.grad(s.sum(), (x, r))  # y is unused
    assert torch.equal(dx, torch.ones_like(dx))
    assert torch.equal(dr, torch.ones_like(dx))


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_equal_contiguous_ones(impl) -> None:
    wide = torch.randn(3, 5, 40, dtype=torch.float64)
    w = torch.randn(2 * 13, dtype=torch.float64)[::2]
    for x in (wide[..., 7:20], wide[:, ::2, 1:27:2], wide.mT[:, 3:, :].expand(3, 37, 5)[:, ::3]):
        x, weight = x.detach().requires_grad_(), w[: x.shape[-1]]
        y = norm.rms_norm(x, weight, impl=impl)
        (dx,) = torch.autograd.grad(y.sum(), x)  # with an expanded (stride 0) dy
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


def test_the_operator_is_well_formed() -> None:
    x, w, b, r = _inputs((5, 12), torch.float32, True, True)
    drop, bf16, f32 = Drop(0.5, 3, 1, torch.arange(5)), torch.bfloat16, torch.float32
    well_formed(norm_op, x, w, b, r, b, drop, NormOptions(True, 1e-5, bf16))
    well_formed(norm_op, x, w, None, None, None, None, NormOptions(False, 1e-5, f32))
    (x, w, r), row = (t.detach() for t in (x, w, r)), torch.rand(5)
    well_formed(norm_bwd_op, x, r, x, w, row, row, drop, WantedGradients(True, True, f32, f32))
    well_formed(norm_bwd_op, x, r, x, w, row, row, None, WantedGradients(False, False, f32, bf16))
    wanted = WantedGradients(False, True, f32, None)
    well_formed(norm_bwd_op, x, None, x, w, None, row, None, wanted)
    low, lw = x.bfloat16(), w.bfloat16()  # with a stream of another dtype, and alone
    for stream, layer in ((r, False), (r.half(), True), (low, True), (None, True)):
        told_right(norm_op, low, lw, None, stream, None, None, NormOptions(layer, 1e-5, f32))
    for s, dtypes in ((x, (bf16, f32)), (x, (bf16, bf16)), (low, (bf16, None)), (x, (f32, bf16))):
        wanted = WantedGradients(True, True, *dtypes)
        told_right(norm_bwd_op, low, s, s, lw, None, row, None, wanted)


# ------------------------------------------------------------ the chain before the norm, fused

P, KEY = 0.4, {"seed": 2**40 + 5, "site": 2}
TERMS = ("x_bias", "dropout", "residual x_bias", "residual dropout", "residual x_bias dropout")


def _tokens(shape) -> torch.Tensor:
    return (torch.arange(shape[:-1].numel()) * 7919 + 2**35).view(shape[:-1])


def _drop(shape) -> Drop:
    return Drop(P, **KEY, tokens=_tokens(shape))


def _keep(shape) -> torch.Tensor:
    """Return the mask that dropout.dropout draws, for x[..., E] with `_tokens`."""
    ones = torch.ones(shape).flatten(0, -2)
    return (reference.dropout(ones, P, **KEY, tokens=_tokens(shape).flatten()) != 0).view(shape)


def _chain(module, terms, layer, x, w, b, residual, x_bias, **options):
    """Return (y, s) of the norm after the named terms."""
    given = {"residual": residual} if "residual" in terms else {}
    if "x_bias" in terms:
        given["x_bias"] = x_bias
    if "dropout" in terms and module is reference:
        given |= {"keep": _keep(x.shape), "dropout": P}
    elif "dropout" in terms:
        given["drop"] = _drop(x.shape)
    if layer:
        return module.layer_norm(x, w, b, **given, **options)
    return module.rms_norm(x, w, **given, **options)


def _chain_run(module, terms, layer, inputs, dy, ds, **options) -> list[torch.Tensor]:
    """Return y, s and the gradients of x, w, b, residual and x_bias; zeros for missing inputs."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    y, s = _chain(module, terms, layer, *inputs, **options)
    loss = (y * dy).sum() + (s * ds).sum()
    return [y, s, *torch.autograd.grad(loss, inputs, materialize_grads=True)]


def _chain_inputs(shape, dtype=torch.float64, stream=None) -> list[torch.Tensor]:
    """Draw x, w, b, residual, x_bias."""
    shape = torch.Size(shape)
    made = [torch.randn(s, dtype=torch.float64) for s in (shape, shape[-1:], shape[-1:], shape)]
    made[1] += 1
    made = [t.to(dtype) for t in (*made, torch.randn(shape[-1]))]
    made[3] = made[3].to(stream or dtype)
    return made


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("terms", TERMS)
def test_the_chain_equals_the_reference_in_float64(terms, layer, impl) -> None:
    for shape in ((1, 1), (2, 19, 67)):
        inputs = _chain_inputs(shape)
        dy, ds = torch.randn(2, *shape, dtype=torch.float64)
        ours = _chain_run(norm, terms, layer, inputs, dy, ds, impl=impl)
        truth = _chain_run(reference, terms, layer, inputs, dy, ds)
        scale = max(t.abs().max() for t in truth)
        for a, b in zip(ours, truth, strict=True):
            assert a.dtype == torch.float64
            assert (a - b).abs().max() <= 1e-12 * scale


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("terms", ["residual", *TERMS])
def test_raw_halves_of_both_implementations_agree(terms, layer) -> None:
    for shape in ((37, 67), (2, 3, 67), (67,)):
        x, w, b, r, x_bias = _chain_inputs(shape)
        dy, ds = torch.randn(2, *shape, dtype=torch.float64)
        draw = {"drop": _drop(x.shape)} if "dropout" in terms else {}
        given = {n: t for n, t in (("residual", r), ("x_bias", x_bias)) if n in terms}
        wanted = {"residual_dtype": r.dtype} if "residual" in terms else {}
        wanted |= {"x_bias": "x_bias" in terms}
        results = []
        for impl in IMPLS:
            options = {**draw, "impl": impl}
            forward = norm.norm_fwd(x, w, b if layer else None, layer=layer, **given, **options)
            _, s, mean, rstd = forward
            backward = norm.norm_bwd(dy, s, w, mean, rstd, ds=ds, bias=layer, **wanted, **options)
            results.append((*forward, *backward))
        assert_close_or_none(*results, 1e-12)


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_the_chain_is_the_separate_operators_to_the_bit(layer) -> None:
    """In float32 each step rounds equally; the mask is dropout's own."""
    shape = torch.Size((37, 67))
    x, w, b, r, x_bias = _chain_inputs(shape, torch.float32)
    y, s = _chain(norm, "residual x_bias dropout", layer, x, w, b, r, x_bias, impl="triton")
    separate = r + dropout.dropout(x + x_bias, _drop(shape), impl="triton")
    assert torch.equal(s, separate)
    alone = norm.layer_norm(s, w, b, impl="triton") if layer else norm.rms_norm(s, w, impl="triton")
    assert torch.equal(y, alone)
    other = _drop(shape)._replace(site=3)  # another site has another mask
    assert relative_error(r + dropout.dropout(x + x_bias, other), s) > 0.1


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize(
    ("dtype", "stream"),
    [*((dtype, dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16)),
     (torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
    ids=str,
)  # fmt: skip
def test_the_chain_is_within_the_error_budget(dtype, stream, layer, impl) -> None:
    inputs = _chain_inputs((61, 131), dtype, stream)
    wide = torch.promote_types(dtype, stream)
    dy, ds = torch.randn(61, 131).to(dtype), torch.randn(61, 131).to(wide)
    for terms in ("residual", "residual x_bias dropout"):
        ours = _chain_run(norm, terms, layer, inputs, dy, ds, impl=impl)
        same = _chain_run(reference, terms, layer, inputs, dy, ds)
        truth = _chain_run(reference, terms, layer, _double(inputs), dy.double(), ds.double())
        expected = [dtype, wide, dtype, dtype, dtype, stream, dtype]
        for a, b, t, d in zip(ours, same, truth, expected, strict=True):
            assert a.dtype == b.dtype == d
            assert_error_budget(a, b, t)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_each_sum_over_tokens_comes_in_the_dtype_that_its_parameter_asks_for(layer, impl) -> None:
    made, (dy, ds) = _chain_inputs((61, 131), torch.bfloat16), torch.randn(2, 61, 131).bfloat16()
    low: dict[int, torch.Tensor] = {}
    for wide in (None, 1, 2, 4):
        leaves = [t.clone().requires_grad_() for t in made]
        if wide is not None:
            leaves[wide].grad_dtype = torch.float32
        y, s = _chain(norm, "residual x_bias", layer, *leaves, impl=impl)
        given = [t for n, t in enumerate(leaves) if layer or n != 2]
        torch.autograd.backward((y, s), (dy, ds))
        found = {n: t.grad for n, t in enumerate(leaves) if t.grad is not None}
        assert len(found) == len(given)
        asked = {n: torch.float32 if n == wide else torch.bfloat16 for n in found}
        assert {n: t.dtype for n, t in found.items()} == asked
        low = low or found
        assert all(torch.equal(t.bfloat16(), low[n]) for n, t in found.items())
        # torch's own sum of x_bias is rounded
        if wide in found and (impl == "triton" or wide != 4):
            assert not torch.equal(found[wide], low[wide].float())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_y_has_the_dtype_that_is_asked_for(layer, impl) -> None:
    """A float32 stream into bfloat16 products, and the reverse, rounded once."""
    for dtype, out in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        x, w, b, _, x_bias = _chain_inputs((37, 67), dtype)
        x = x.requires_grad_()
        options = {"out_dtype": out, "impl": impl}
        y = norm.layer_norm(x, w, b, **options) if layer else norm.rms_norm(x, w, **options)
        args = (x.detach().double(), w.double(), b.double())
        truth = reference.layer_norm(*args) if layer else reference.rms_norm(*args[:2])
        assert y.dtype == out
        assert relative_error(y, truth) < 2 * torch.finfo(out).eps
        (dx,) = torch.autograd.grad(y, x, torch.randn(37, 67).to(out))
        assert dx.dtype == dtype
        y, s = _chain(norm, "x_bias", layer, x, w, b, None, x_bias, **options)
        assert (y.dtype, s.dtype) == (out, dtype)


@pytest.mark.parametrize(
    ("rows", "E", "layer"), [(17, 8192 + 9, True), (2, 16384 + 27, False), (2, 16384 + 27, True)]
)
def test_rows_too_long_for_the_registers(rows, E, layer) -> None:
    inputs = _chain_inputs((rows, E))
    inputs[0] += 3  # with this mean, a sum of squares alone would lose digits
    dy, ds = torch.randn(2, rows, E, dtype=torch.float64)
    terms = TERMS[-1] if layer else "residual"
    ours = _chain_run(norm, terms, layer, inputs, dy, ds, impl="triton")
    truth = _chain_run(reference, terms, layer, inputs, dy, ds)
    assert_close_or_none(ours, truth, 1e-12)


def test_the_width_of_a_vocabulary() -> None:
    x, w = torch.randn(2, 65536), torch.randn(65536)
    y, truth = norm.rms_norm(x, w, impl="triton"), reference.rms_norm(x.double(), w.double())
    assert_error_budget(y, reference.rms_norm(x, w), truth)
    x += 3
    y, same = norm.layer_norm(x, w, w, impl="triton"), reference.layer_norm(x, w, w)
    assert_error_budget(y, same, reference.layer_norm(x.double(), w.double(), w.double()))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_chain_of_no_rows_and_dropout_of_nothing(impl) -> None:
    x, w, b, r, x_bias = (
        t.requires_grad_() for t in _chain_inputs((2, 0, 7), torch.bfloat16, torch.float32)
    )
    y, s = _chain(norm, "residual x_bias dropout", True, x, w, b, r, x_bias, impl=impl)
    grads = torch.autograd.grad(y.sum() + s.sum(), (x, w, b, r, x_bias))
    assert [g.dtype for g in grads] == [t.dtype for t in (x, w, b, r, x_bias)]
    assert not any(g.any() for g in grads)
    x, w, *_ = _chain_inputs((5, 7))
    y, s = norm.rms_norm(x, w, drop=Drop(0.0, 0, 0, torch.arange(5)), impl=impl)
    assert s is x
    assert torch.equal(y, norm.rms_norm(x, w, impl=impl))


@pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
def test_sums_over_rows_are_the_same_bits_every_time(layer) -> None:
    x, w, *_ = _chain_inputs((301, 67), torch.float32)
    _, s, mean, rstd = norm.norm_fwd(x, w, layer=layer, impl="triton")
    assert s is x
    dy, drop = torch.randn(301, 67), Drop(P, **KEY, tokens=torch.arange(301))
    terms = {"bias": True, "x_bias": True, "drop": drop} if layer else {}
    first, second = (norm.norm_bwd(dy, s, w, mean, rstd, **terms, impl="triton") for _ in range(2))
    for name in ("dx", "dw", *(("dx_bias", "db") if layer else ())):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert first.dresidual is None


@pytest.mark.parametrize(
    "fault", ["mask of another site", "bias of x twice", "no dresidual", "stale s"]
)
def test_the_comparison_sees_planted_faults_of_the_chain(fault, monkeypatch) -> None:
    inputs = _chain_inputs((37, 67))
    dy, ds = torch.randn(2, 37, 67, dtype=torch.float64)
    truth = _chain_run(reference, TERMS[-1], True, inputs, dy, ds)
    run = function.launch_backward

    def faulty(dy, s, weight, mean, rstd, wanted, ds, drop):
        if fault == "mask of another site":
            drop = drop._replace(site=3)
        if fault == "stale s":
            s = s.roll(1, 0)
        found = norm.NormGradients(*run(dy, s, weight, mean, rstd, wanted, ds, drop))
        if fault == "bias of x twice":
            found = found._replace(dx_bias=2 * found.dx_bias)
        return found._replace(dresidual=found.dx.clone()) if fault == "no dresidual" else found

    monkeypatch.setattr(function, "launch_backward", faulty)
    wrong = _chain_run(norm, TERMS[-1], True, inputs, dy, ds, impl="triton")
    assert max(relative_error(a, b) for a, b in zip(wrong, truth, strict=True)) > 0.1


def test_the_chain_reads_and_writes_everything_once() -> None:
    T, E, layer = 1024, 128, True
    x, w, b, r, x_bias = _chain_inputs((T, E), torch.bfloat16, torch.float32)
    given = {"drop": Drop(P, **KEY, tokens=torch.arange(T)), "impl": "triton"}
    terms = {"layer": layer, "residual": True, "x_bias": True, "dropout": True, "stream_size": 4}
    with traffic() as t:
        _, s, mean, rstd = norm.norm_fwd(x, w, b, layer=layer, residual=r, x_bias=x_bias, **given)
    vectors = dict.fromkeys(("weight_ptr", "bias_ptr", "x_bias_ptr"), "read by every program")
    assert t.moved(vectors) <= 1.01 * cost.norm(T, E, **terms).bytes
    options = {"bias": layer, "x_bias": True, "x_dtype": x.dtype, "residual_dtype": s.dtype}
    dy, ds = torch.randn(T, E).bfloat16(), torch.randn(T, E)
    with traffic() as t:
        norm.norm_bwd(dy, s, w, mean, rstd, ds=ds, **options, **given)
    least = cost.norm(T, E, backward=True, **terms).bytes
    found = t.moved({"weight_ptr": "read by every program"})
    assert 0.99 * least <= found <= 1.05 * least  # the partial sums of few rows


def test_rows_further_apart_than_int32_can_count() -> None:
    """The pages between the two rows are never touched, so they use no memory."""
    far = torch.empty(2**31 + 64, dtype=torch.float16).as_strided((2, 64), (2**31, 1))
    x, w = torch.randn(2, 64).half(), torch.randn(64).half()
    y, _, _, rstd = norm.norm_fwd(x, w, layer=False, impl="triton")
    far.copy_(x)
    assert torch.equal(norm.rms_norm(far, w, impl="triton"), y)
    found = norm.norm_bwd(far, far, w, None, rstd, ds=far, impl="triton")
    near = norm.norm_bwd(x, x, w, None, rstd, ds=x, impl="triton")
    assert torch.equal(found.dx, near.dx)
    assert torch.equal(found.dw, near.dw)


# ------------------------------------------------------------ under torch's own machinery


def _loss(x, w, b, r, x_bias, impl):
    y, s = _chain(norm, TERMS[-1], True, x, w, b, r, x_bias, impl=impl)
    return (y * y).sum() + s.sum()


@pytest.mark.parametrize("impl", IMPLS)
def test_the_chain_checkpoints_and_autocasts(impl) -> None:
    inputs = [t.requires_grad_() for t in _chain_inputs((5, 12), torch.float32)]
    eager = torch.autograd.grad(_loss(*inputs, impl), inputs)
    again = torch.autograd.grad(checkpoint(_loss, *inputs, impl, use_reentrant=False), inputs)
    assert all(map(torch.equal, again, eager))
    with torch.autocast("cpu", torch.bfloat16):
        gradients = torch.autograd.grad(_loss(*inputs, impl), inputs)
        x = inputs[0]
        dx = torch.autograd.grad(norm.rms_norm(x, inputs[1], impl=impl).sum(), x)[0]
    assert_close_or_none(gradients, eager, 1e-6)
    assert torch.equal(dx, torch.autograd.grad(norm.rms_norm(x, inputs[1], impl=impl).sum(), x)[0])
