"""The halves of the norms as other code calls them: tensors of any
strides, and of different dtypes."""

import itertools

import pytest
import torch
from close import assert_close_f64, assert_close_or_none, assert_same_bits, relative_error

from warpweave.kernels import norm, reference
from warpweave.kernels.dropout import Drop
from warpweave.kernels.norm import backward, forward

F64, BF16, F16, F32 = torch.float64, torch.bfloat16, torch.float16, torch.float32
IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])
LAYER = pytest.mark.parametrize("layer", [False, True], ids=["rms", "layer"])
ROWS, E = 19, 12


def _spread(x: torch.Tensor) -> torch.Tensor:
    """Return the same values, each with gaps around it."""
    wide = x.new_zeros(*(2 * n + 1 for n in x.shape))
    at = tuple(slice(1, None, 2) for _ in x.shape)
    wide[at] = x
    return wide[at]


def _row_wise(x: torch.Tensor, more: int) -> torch.Tensor:
    """Return the same values, contiguous in rows that are `more` columns apart."""
    return torch.nn.functional.pad(x, (0, more))[..., : x.shape[-1]]


def _drawn(layer: bool, dtype=F64):
    x, residual, dy, ds = torch.randn(4, ROWS, E, dtype=F64).to(dtype)
    w, b, x_bias = torch.randn(3, E, dtype=F64).to(dtype)
    drop = Drop(0.3, 11, 2, torch.arange(ROWS) * 5)
    return x, residual, dy, ds, w, b if layer else None, x_bias, drop


@IMPLS
@LAYER
@pytest.mark.parametrize("wide", [False, True], ids=["held", "in blocks"])
def test_operands_of_any_strides_are_read_right(wide, layer, impl, monkeypatch) -> None:
    """Each operand of both halves, alone and all together, has gaps between its elements."""
    if wide:
        monkeypatch.setattr(forward, "FWD_WIDTH", 8)
        monkeypatch.setattr(backward, "BWD_WIDTH", 8)
    x, residual, dy, ds, w, b, x_bias, drop = _drawn(layer)
    given = {"x": x, "weight": w, "residual": residual, "x_bias": x_bias}
    given |= {"bias": b} if layer else {}
    how = {"drop": drop, "impl": impl}
    want = norm.norm_fwd(**given, **how | {"impl": "torch"}, layer=layer)
    _, s, mean, rstd = want
    back = {"dy": dy, "s": s, "weight": w, "rstd": rstd, "ds": ds}
    wanted = {"x_bias": True, "bias": layer, "residual_dtype": F64}
    mean_of = {"mean": mean} if layer else {}
    truth = norm.norm_bwd(**back, mean=mean, **wanted, **how | {"impl": "torch"})
    for name in ("all",) if wide else (*given, "all"):
        some = {n: _spread(t) if name in (n, "all") else t for n, t in given.items()}
        assert_close_or_none(norm.norm_fwd(**some, **how, layer=layer), want, 1e-13)
    for name in ("all",) if wide else (*back, *mean_of, "all"):
        some = {n: _spread(t) if name in (n, "all") else t for n, t in (back | mean_of).items()}
        found = norm.norm_bwd(**{"mean": None} | some, **wanted, **how)
        assert_close_or_none(found, truth, 1e-12)
    apart = {n: _row_wise(t, i) for i, (n, t) in enumerate(back.items()) if t.ndim > 1}
    found = norm.norm_bwd(**{"mean": mean} | back | apart, **wanted, **how)
    assert_close_f64(found.dx, truth.dx, 1e-12)
    apart = {n: _row_wise(t, 3 + i) for i, (n, t) in enumerate(given.items()) if t.ndim > 1}
    y, *_ = norm.norm_fwd(**given | apart, **how, layer=layer)
    assert_close_f64(y, want[0], 1e-13)
    y, s, *_ = norm.norm_fwd(apart["x"], w, b, layer=layer, impl=impl)  # s is x
    assert s is apart["x"]
    assert_close_f64(y, norm.norm_fwd(x, w, b, layer=layer, impl="torch")[0], 1e-13)


@IMPLS
@LAYER
def test_results_have_the_dtypes_that_the_halves_promise(layer, impl) -> None:
    """If operands differ: s has the wider dtype of x and residual; y and dx have the requested one
    or their input's; sums have that of the statistics."""
    x, residual, dy, ds, w, b, x_bias, drop = _drawn(layer)
    x, residual, w = x.to(BF16), residual.to(F32), w.to(F16)
    b = b if b is None else b.to(F32)
    how = {"layer": layer, "impl": impl}
    for terms, of_s in (
        ({}, BF16),
        ({"residual": residual}, F32),
        ({"x_bias": x_bias.float()}, BF16),
        ({"drop": drop}, BF16),
        ({"x_bias": x_bias.to(F16), "residual": residual}, F32),
        ({"residual": residual.double()}, F64),
    ):
        of_sums = F64 if of_s == F64 else F32
        for out in (None, F32, F16):
            y, s, mean, rstd = norm.norm_fwd(x, w, b, out_dtype=out, **terms, **how)
            assert (y.dtype, s.dtype, rstd.dtype) == (out or BF16, of_s, of_sums)
            assert (mean is None) == (not layer)
        options = {"ds": ds.to(of_s), "bias": layer, "x_bias": True, "impl": impl}
        options |= {"drop": terms.get("drop")}
        for asked, stream in itertools.product((None, BF16, F32), (None, F32, BF16)):
            of = {"x_dtype": asked, "residual_dtype": stream}
            found = norm.norm_bwd(dy.to(F16), s, w, mean, rstd, **of, **options)
            assert found.dx.dtype == (asked or of_s)
            sums = [found.dw, found.dx_bias, *([found.db] if layer else [])]
            assert {t.dtype for t in sums} == {of_sums}
            assert found.db is None or layer
            assert (found.dresidual is None) == (stream is None)
            assert stream is None or found.dresidual.dtype == stream
            same = stream == found.dx.dtype and "drop" not in terms
            assert (found.dresidual is found.dx) == same


@IMPLS
@LAYER
def test_what_a_float64_residual_makes_float64_is_computed_in_it(layer, impl) -> None:
    x, residual, dy, ds, w, b, *_ = _drawn(layer)
    x, w = x.float().requires_grad_(), w.requires_grad_()
    residual, bias = residual.requires_grad_(), (b.requires_grad_(),) if layer else ()
    inputs, options = (x, w, *bias, residual), {"residual": residual, "out_dtype": F64}
    name, results = "layer_norm" if layer else "rms_norm", []
    for module, how in ((norm, {"impl": impl}), (reference, {})):
        y, s = getattr(module, name)(x, w, *bias, **options, **how)
        assert s.dtype == y.dtype == F64
        loss = (y * dy).sum() + (s * ds).sum()
        results.append((y, s, *torch.autograd.grad(loss, inputs)))
    for a, t in zip(*results, strict=True):
        assert a.dtype == t.dtype
        assert_close_f64(a, t, 1e-6 if t.dtype == F32 else 1e-12)


@IMPLS
def test_a_bias_wider_than_x_is_added_before_s_is_rounded_to_the_dtype_of_x(impl) -> None:
    x, x_bias = torch.randn(ROWS, E).to(BF16), torch.randn(E, requires_grad=True)
    w = torch.randn(E)
    for call in (norm.rms_norm, norm.layer_norm):
        y, s = call(x, w, x_bias=x_bias, impl=impl)
        assert (y.dtype, s.dtype) == (BF16, BF16)
        assert torch.equal(s, (x + x_bias).to(BF16))
        (dx_bias,) = torch.autograd.grad(s.float().sum() + y.float().sum(), x_bias)
        assert dx_bias.dtype == F32
        name = call.__name__
        truth = getattr(reference, name)(x, w, x_bias=x_bias)
        assert_close_f64(y, truth[0], 2**-7)


@LAYER
def test_the_halves_have_the_defaults_of_rms_norm(layer) -> None:
    """Uses values no larger than the root of eps, so that a different eps shows."""
    x, _, _, _, w, b, *_ = _drawn(layer)
    x = x * 1e-3
    names = reference.layer_norm if layer else reference.rms_norm
    bias = (b,) if layer else ()
    y, *_ = norm.norm_fwd(x, w, b, layer=layer)
    assert_close_f64(y, names(x, w, *bias, eps=1e-6), 1e-13)
    whole = norm.layer_norm(x, w, b) if layer else norm.rms_norm(x, w)
    assert_close_f64(whole, names(x, w, *bias, eps=1e-5 if layer else 1e-6), 1e-13)
    assert relative_error(names(x, w, *bias, eps=1e-5), names(x, w, *bias, eps=1e-6)) > 0.1


@IMPLS
@LAYER
def test_autocast_leaves_the_halves_alone(layer, impl) -> None:
    x, residual, dy, ds, w, b, x_bias, drop = _drawn(layer, F32)

    def run() -> list[torch.Tensor]:
        how = {"drop": drop, "impl": impl}
        forward = norm.norm_fwd(x, w, b, layer=layer, residual=residual, x_bias=x_bias, **how)
        _, s, mean, rstd = forward
        back = norm.norm_bwd(dy, s, w, mean, rstd, ds=ds, bias=layer, x_bias=True, **how)
        return [t for t in (*forward, *back) if t is not None]

    want = run()
    with torch.autocast("cpu", BF16):
        assert_same_bits(run(), want)


@IMPLS
@LAYER
def test_only_the_gradients_that_are_wanted_are_made(layer, impl) -> None:
    x, _, dy, ds, w, b, *_ = _drawn(layer)
    _, s, mean, rstd = norm.norm_fwd(x, w, b, layer=layer, impl=impl)
    for options in ({}, {"ds": ds}):
        plain = norm.norm_bwd(dy, s, w, mean, rstd, **options, impl=impl)
        assert plain.dresidual is plain.dx_bias is plain.db is None
        for words, field in (
            ({"bias": True}, "db"),
            ({"x_bias": True}, "dx_bias"),
            ({"residual_dtype": F64}, "dresidual"),
        ):
            found = norm.norm_bwd(dy, s, w, mean, rstd, **options, **words, impl=impl)
            made = {name for name, t in found._asdict().items() if t is not None}
            assert made == {"dx", "dw", field}
            assert_close_or_none((found.dx, found.dw), (plain.dx, plain.dw), 1e-13)


@IMPLS
@LAYER
@pytest.mark.parametrize("wide", [False, True], ids=["held", "in blocks"])
def test_sums_over_tokens_are_of_what_is_not_rounded(wide, layer, impl, monkeypatch) -> None:
    """This holds in 16 bits, although dx itself is rounded; sums do not share memory."""
    if wide:
        monkeypatch.setattr(backward, "BWD_WIDTH", 8)
    x, _, dy, ds, w, b, _, drop = (
        t.to(BF16) if isinstance(t, torch.Tensor) else t for t in _drawn(layer)
    )
    _, s, mean, rstd = norm.norm_fwd(x, w, b, layer=layer, impl="torch")
    exact = [None if t is None else t.double() for t in (dy, s, w, mean, rstd)]
    options = {"bias": layer, "x_bias": True, "drop": drop}
    found = norm.norm_bwd(dy, s, w, mean, rstd, ds=ds, **options, impl=impl)
    truth = norm.norm_bwd(*exact, ds=ds.double(), **options, impl="torch")
    assert found.dx.dtype == BF16
    assert_close_or_none(found[2:], truth[2:], 1e-5)
    assert [t.dtype for t in found[2:] if t is not None] == [F32] * (2 + layer)


@LAYER
@pytest.mark.parametrize("width", [8, 16, 32], ids="held up to {}".format)
def test_sums_start_from_zero_whatever_memory_held(width, layer, monkeypatch) -> None:
    """New memory is NaN here. With three sums, rows are half as wide as with two."""
    monkeypatch.setattr(backward, "BWD_WIDTH", width)
    empty = torch.empty
    x, residual, dy, ds, w, b, x_bias, drop = _drawn(layer)
    given = {"layer": layer, "residual": residual, "x_bias": x_bias, "drop": drop}
    wanted = {"ds": ds, "bias": layer, "residual_dtype": F64, "drop": drop}
    _, s, mean, rstd = want = norm.norm_fwd(x, w, b, **given, impl="torch")
    truth = norm.norm_bwd(dy, s, w, mean, rstd, **wanted, x_bias=True, impl="torch")
    monkeypatch.setattr(torch, "empty", lambda *a, **how: empty(*a, **how).fill_(torch.nan))
    found = norm.norm_fwd(x, w, b, **given, impl="triton")
    back = norm.norm_bwd(dy, s, w, mean, rstd, **wanted, x_bias=True, impl="triton")
    assert_close_or_none((*found, *back), (*want, *truth), 1e-12)
