"""The fused MLP: every activation, option and implementation against the reference, the tensors it
saves, and the destinations of its gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from close import assert_all_close, assert_close_f64, assert_error_budget, relative_error
from refused import check
from rules import rulecheck
from saved import saved_elements
from torch.utils.checkpoint import checkpoint

from warpweave.kernels import reference
from warpweave.kernels.activation import ACTIVATIONS
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import mainloop
from warpweave.kernels.gemm.local import LOCAL
from warpweave.kernels.mlp import function as module
from warpweave.kernels.mlp import gelu_mlp, hidden_bwd, hidden_fwd, mlp, swiglu_mlp
from warpweave.kernels.runtime.tile_table import GemmTile
from warpweave.kernels.runtime.tiles import pinned
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect

impls = pytest.mark.parametrize("impl", ["torch", "triton"])
NAMES = ("x", "up_weight", "down_weight", "up_bias", "down_bias")


def _tensors(activation, shape=(2, 3), E=20, F=33, dtype=torch.float64, bias=True):
    """Draw x, W1, W2, b1, b2 of moderate size; with a gated activation the odd F is paired."""
    units = (F, 2) if ACTIVATIONS[activation].gated else (F,)
    shapes = [(*shape, E), (*units, E), (E, F), units, (E,)]
    drawn = [torch.randn(s, dtype=torch.float64).to(dtype) for s in shapes]
    drawn[1], drawn[2] = drawn[1] / E**0.5, drawn[2] / F**0.5
    return [t.requires_grad_() for t in drawn[: None if bias else 3]]


def _drop(shape=(2, 3)):
    return Drop(0.3, 2**40 + 5, 3, torch.arange(torch.Size(shape).numel()) * 7919 * 2**28)


def _with_gradients(op, tensors, **options):
    tensors = [t.detach().requires_grad_() for t in tensors]
    residual = options.get("residual")
    if residual is not None:
        options["residual"] = residual = residual.detach().to(tensors[0].dtype).requires_grad_()
    y = op(*tensors, **options)
    dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape).to(y.dtype)
    wanted = tensors if residual is None else [*tensors, residual]
    return y, *torch.autograd.grad(y, wanted, dy)


@impls
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_values_and_gradients_equal_the_reference(activation, impl) -> None:
    for shape, bias in (((2, 3), True), ((67,), False), ((1,), True), ((0, 4), True), ((), False)):
        tensors = _tensors(activation, shape, bias=bias)
        options = {"activation": activation}
        ours = _with_gradients(mlp, tensors, **options, impl=impl)
        assert_all_close(ours, _with_gradients(reference.mlp, tensors, **options), 1e-12)


@impls
@pytest.mark.parametrize("recompute", module.RECOMPUTE)
def test_dropout_and_residual_and_whatever_is_recomputed_equal_the_reference(recompute, impl):
    tensors = _tensors("swiglu")
    whole = {"drop": _drop(), "residual": torch.randn(2, 3, 20)}
    for keys in (("drop", "residual"), ("drop",), ("residual",)):
        options = {"activation": "swiglu"} | {key: whole[key] for key in keys}
        ours = _with_gradients(mlp, tensors, **options, recompute=recompute, impl=impl)
        assert_all_close(ours, _with_gradients(reference.mlp, tensors, **options), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_error_is_within_twice_that_of_the_same_dtype(activation, dtype) -> None:
    tensors = _tensors(activation, (37,), dtype=dtype)
    options = {"activation": activation, "drop": _drop((37,)), "residual": torch.randn(37, 20)}
    ours = _with_gradients(mlp, tensors, **options, impl="triton")
    same = _with_gradients(reference.mlp, tensors, **options)
    options["residual"] = options["residual"].to(dtype)
    truth = _with_gradients(reference.mlp, [t.double() for t in tensors], **options)
    for a, b, t in zip(ours, same, truth):
        assert a.dtype == dtype
        assert_error_budget(a, b, t)


@impls
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_numbers_do_not_depend_on_what_is_recomputed(activation, impl) -> None:
    tensors = _tensors(activation, (9,), dtype=torch.bfloat16)
    runs = [
        _with_gradients(mlp, tensors, activation=activation, recompute=r, impl=impl)
        for r in module.RECOMPUTE
    ]
    for other in runs[1:]:
        assert all(map(torch.equal, runs[0], other))


@pytest.mark.parametrize("activation", ["relu2", "geglu"])
def test_gradcheck(activation) -> None:
    tensors = _tensors(activation, (3,), E=4, F=3)
    residual = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def run(residual, *tensors, impl):
        return mlp(*tensors, activation=activation, residual=residual, drop=_drop((3,)), impl=impl)

    for impl in ("torch", "triton"):
        call, fast = partial(run, impl=impl), impl == "triton"
        assert torch.autograd.gradcheck(call, (residual, *tensors), fast_mode=fast)


def test_only_what_is_promised_is_kept() -> None:
    """Counts elements saved for backward, without weights and biases."""
    T, E, F = 6, 20, 33

    def saved(**options) -> int:
        tensors = _tensors(options["activation"], (T,), E, F)
        return saved_elements(partial(mlp, *tensors, **options), tensors[1:])

    for impl in ("torch", "triton"):
        assert saved(activation="swiglu", recompute="up", impl=impl) == T * E
        assert saved(activation="swiglu", recompute="activation", impl=impl) == T * (E + 2 * F)
        assert saved(activation="swiglu", recompute="nothing", impl=impl) == T * (E + 3 * F)
        assert saved(activation="gelu", recompute="activation", impl=impl) == T * (E + F)
    assert saved(activation="gelu", impl="triton") == T * (E + F)
    assert saved(activation="gelu") == T * (E + 2 * F)  # torch on a CPU, where memory is cheaper
    with torch.no_grad():
        assert not mlp(*_tensors("gelu"), activation="gelu", impl="triton").requires_grad


@impls
def test_every_subset_of_gradients_can_be_wanted(impl) -> None:
    options = {"activation": "swiglu", "recompute": "up", "impl": impl}
    tensors = _tensors("swiglu")
    truth = dict(zip(NAMES, _with_gradients(mlp, tensors, activation="swiglu", impl="torch")[1:]))
    for wanted in (("x",), ("down_weight",), ("down_bias",), ("up_bias",), ("x", "up_weight")):
        given = [t.detach().requires_grad_(n in wanted) for n, t in zip(NAMES, tensors)]
        y = mlp(*given, **options)
        dy = torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)
        y.backward(dy)
        for name, t in zip(NAMES, given):
            assert (t.grad is not None) == (name in wanted)
            if name in wanted:
                assert_close_f64(t.grad, truth[name], 1e-12)


@impls
def test_weight_gradients_can_be_deferred_and_accumulated_in_float32_buffers(impl) -> None:
    x, *parameters = tensors = _tensors("swiglu", (9,), dtype=torch.bfloat16)
    for p in parameters:
        p.grad_dtype = torch.float32
    options = {"activation": "swiglu", "impl": impl}
    plain = torch.autograd.grad(mlp(*tensors, **options).sum(), tensors)
    for context in (collect, accumulate):
        homes = {p: torch.full(p.shape, float("nan")) for p in parameters}
        store = WeightGradients(homes)
        for _ in range(2):
            y = mlp(*tensors, **options)
            with context(store):
                y.sum().backward()
            assert len(store) == (4 if context is collect else 0)
            store.run()
        for p, expected in zip(parameters, plain[1:]):
            assert p.grad is homes[p]
            assert expected.dtype == p.grad.dtype == torch.float32
            assert_close_f64(p.grad, 2 * expected.double(), 1e-5)
            p.grad = None
        assert_close_f64(x.grad, 2 * plain[0].double(), 1e-2)
        x.grad = None


@impls
def test_gate_and_up_as_others_keep_them_are_stacked_or_refused(impl) -> None:
    """Concatenated, they have the shape of ours flattened, so two dims are always rejected."""
    x, gate, down = _tensors("relu2", bias=False)
    up, bias = torch.randn_like(gate), torch.randn(2 * 33, dtype=torch.float64)
    y = swiglu_mlp(x, torch.stack([gate, up], 1), down, bias.view(2, -1).t(), impl=impl)
    g, u = (x @ torch.cat([gate, up]).t() + bias).chunk(2, -1)
    assert_close_f64(y, (F.silu(g) * u) @ down.t(), 1e-13)
    for weight in (torch.cat([gate, up]), torch.stack([gate, up], 1).flatten(0, 1)):
        words = r"up_weight\[F, 2, E\] \(torch.stack\(\[gate, up\], 1"
        check(partial(swiglu_mlp, x, weight, down, impl=impl), words)
    both = torch.stack([gate, up], 1)
    words = r"up_bias must be \[33, 2\], got \[66\]"
    check(partial(swiglu_mlp, x, both, down, bias, impl=impl), words)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_view_of_a_leaf_goes_where_the_leafs_does(dtype) -> None:
    """A layer keeps [2F, E], as a linear layer does, and passes [F, 2, E]."""
    x, up, down, bias, _ = (t.detach() for t in _tensors("swiglu", dtype=dtype))

    def collected(weight, bias, up, up_bias):
        weight.grad_dtype = torch.float32
        home = torch.full_like(weight, float("nan"), dtype=torch.float32)
        store = WeightGradients({weight: home})
        with collect(store):
            swiglu_mlp(x, up(weight), down, up_bias(bias)).square().sum().backward()
        assert weight.grad is bias.grad is None
        assert len(store) == 2
        store.run()
        assert weight.grad is home
        return home, bias.grad

    up, bias = up.requires_grad_(), bias.requires_grad_()
    expected = collected(up, bias, lambda w: w, lambda b: b)
    flat = (t.detach().flatten(0, 1).requires_grad_() for t in (up, bias))
    found = collected(*flat, lambda w: w.unflatten(0, (-1, 2)), lambda b: b.view(-1, 2))
    assert all(map(torch.equal, found, [x.flatten(0, 1) for x in expected]))


@impls
def test_gelu_is_torchs_by_tanh_or_by_erf(impl) -> None:
    x, *weights = _tensors("gelu_erf")
    y = gelu_mlp(x, *weights, approximate="none", impl=impl)
    h = F.gelu(F.linear(x, weights[0], weights[2]))
    assert_close_f64(y, F.linear(h, *weights[1::2]), 1e-12)
    assert relative_error(gelu_mlp(x, *weights, impl=impl), y) > 1e-6


@impls
def test_strided_operands(impl) -> None:
    tensors = _tensors("swiglu")
    spread = [t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for t in tensors]
    turned = spread[2].detach().t().contiguous().t().requires_grad_()
    spread[2] = turned
    assert not spread[0].is_contiguous()
    options = {"activation": "swiglu", "impl": impl}
    dy = torch.randn(20, 2, 3, dtype=torch.float64).permute(1, 2, 0)
    ours = torch.autograd.grad(mlp(*spread, **options), spread, dy)
    truth = torch.autograd.grad(reference.mlp(*tensors, activation="swiglu"), tensors, dy)
    assert_all_close(ours, truth, 1e-12)


@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_hidden_units_gradient_reads_descriptors_as_it_does_pointers(monkeypatch, activation):
    dy, down = torch.randn(131, 48).half(), torch.randn(48, 64).half()
    z = torch.randn(131, 128 if activation == "geglu" else 64).half()
    options = {"activation": activation, "want_hidden": True, "impl": "triton"}
    with pinned({("gemm", 2, "large"): GemmTile(128, 32, 32, 2, 1, 4, 1)}):
        by_pointers = hidden_bwd(dy, down, z, **options)
        monkeypatch.setattr(mainloop, "capability", lambda device: 90)
        monkeypatch.delattr(mainloop, "mainloop")  # the one that uses pointers
        found = hidden_bwd(dy, down, z, **options)
    assert all(map(torch.equal, found, by_pointers))


@impls
@pytest.mark.parametrize("activation", ["gelu", "geglu"])
def test_slices_of_the_hidden_units_are_partial_sums_and_slices_of_gradients(activation, impl):
    """Tensor parallelism needs these properties of the halves."""
    x, up, down, up_bias, _ = (t.detach() for t in _tensors(activation, (7,), F=32))
    dy = torch.randn(7, 20, dtype=torch.float64)
    options = {"activation": activation, "impl": impl}

    def halves(s):
        rows = up[s].flatten(0, -2)
        bias = up_bias[s].flatten()
        h, z = hidden_fwd(x, rows, bias, save_z=True, **options)
        dz, again = hidden_bwd(dy, down[:, s], z, want_hidden=True, **options)
        assert_close_f64(again, h, 1e-15)
        spread = z.repeat_interleave(2, -1)[:, ::2]
        assert_close_f64(hidden_bwd(dy, down[:, s], spread, **options)[0], dz, 1e-13)
        assert hidden_bwd(dy, down[:, s], z, **options)[1] is None
        return h @ down[:, s].t(), dz @ rows, dz

    y, dx, dz = halves(slice(None))
    (y0, dx0, dz0), (y1, dx1, dz1) = halves(slice(0, 16)), halves(slice(16, 32))
    assert_close_f64(y0 + y1, y, 1e-13)
    assert_close_f64(dx0 + dx1, dx, 1e-13)
    assert_close_f64(torch.cat((dz0, dz1), 1), dz, 1e-13)


def test_the_typing_rule_holds_on_every_placement() -> None:
    """Tokens can be sharded; sharded hidden units would leave a partial sum."""
    x, up, down, up_bias, down_bias = (t.detach() for t in _tensors("swiglu", (4,), 6, 8))
    options = module.MLPOptions("swiglu", impl="torch", dtype=x.dtype)
    for biases, residual in (((up_bias, down_bias), x.clone()), ((None, None), None)):
        arguments = (x, up, biases[0], down, biases[1], residual, options, True, LOCAL)
        report = rulecheck(module._MLP, arguments)
        assert len(report.checked) > 2
        assert report.rejected


@impls
def test_under_autocast_output_is_bf16_and_gradients_have_parameter_dtype(impl) -> None:
    tensors = _tensors("swiglu", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = mlp(*tensors, activation="swiglu", impl=impl)
        grads = torch.autograd.grad(y.float().sum(), tensors)
    assert y.dtype == torch.bfloat16
    truth = torch.autograd.grad(reference.mlp(*tensors, activation="swiglu").sum(), tensors)
    for a, b in zip(grads, truth):
        assert a.dtype == torch.float32
        assert_close_f64(a, b, 0.03)


@impls
def test_under_checkpoint_gradients_reach_the_parameters(impl) -> None:
    tensors = _tensors("gelu")
    run = partial(mlp, activation="gelu", impl=impl)
    truth = torch.autograd.grad(run(*tensors).sum(), tensors)
    y = checkpoint(run, *tensors, use_reentrant=False)
    y.sum().backward()
    assert all(map(torch.equal, [t.grad for t in tensors], truth))


def test_the_operator_is_well_formed() -> None:
    dy, _, down = (t.detach() for t in _tensors("swiglu", (5,), E=4, F=3, bias=False))
    z = torch.randn(5, 6, dtype=torch.float64)
    for want_hidden in (False, True):
        arguments = dy, down, z, "swiglu", want_hidden, None, "triton"
        torch.library.opcheck(torch.ops.warpweave.hidden_bwd.default, arguments)
    x, up = torch.randn(5, 4), torch.randn(6, 4)
    for bias in (None, torch.randn(6)):
        arguments = x, up, bias, "swiglu", None, "triton"
        torch.library.opcheck(torch.ops.warpweave.hidden_again.default, arguments)


@impls
@pytest.mark.parametrize(
    ("dtype", "of_residual"),
    [(torch.float16, torch.float32), (torch.float32, torch.bfloat16),
     (torch.float16, torch.bfloat16), (torch.float64, torch.float32)],
    ids=str,
)  # fmt: skip
def test_a_residual_of_another_dtype_is_added_in_the_wider_of_both(dtype, of_residual, impl):
    x, *weights = (t.to(dtype) for t in _tensors("gelu"))
    for drop, size in ((None, 0.0), (_drop(), 1e4)):  # half precision has steps of 8 at 1e4
        residual = (size + torch.randn(x.shape)).to(of_residual).requires_grad_()
        options = {"activation": "gelu", "impl": impl, "drop": drop}
        y = mlp(x, *weights, residual=residual, **options)
        assert y.dtype == torch.promote_types(dtype, of_residual)
        assert torch.equal(y, residual + mlp(x, *weights, **options))
        (dx,) = torch.autograd.grad(y.sum(), residual)
        assert torch.equal(dx, torch.ones_like(residual))


@pytest.mark.parametrize("fault", ["slope forgotten", "stale hidden", "mask of another site"])
def test_planted_faults_exceed_the_tolerance(fault, monkeypatch) -> None:
    tensors = _tensors("gelu")
    options = {"activation": "gelu", "drop": _drop(), "impl": "triton"}
    truth = _with_gradients(mlp, tensors, **options)
    backward, drop_backward = module.hidden_bwd, module.dropout

    def broken(dy, down_weight, z, **named):
        dz, h = backward(dy, down_weight, z, **named)
        return (dy @ down_weight, h) if fault == "slope forgotten" else (dz, z)

    def elsewhere(dy, drop, impl):  # the kernel draws the forward's mask
        return drop_backward(dy, drop._replace(site=4), impl=impl)

    if fault == "mask of another site":
        monkeypatch.setattr(module, "dropout", elsewhere)
    else:
        monkeypatch.setattr(module, "hidden_bwd", broken)
    wrong = _with_gradients(mlp, tensors, **options)
    errors = [relative_error(a, b) for a, b in zip(wrong, truth)]
    assert max(errors) > 1e-2
    assert errors[0] == 0
