"""The fused projection to queries, keys and values, against the reference; interpreted kernels."""

from functools import partial

import pytest
import torch
from close import assert_close_f64, assert_error_budget, assert_same_bits, relative_error
from rules import rulecheck
from torch.utils.checkpoint import checkpoint

from warpweave.kernels import reference
from warpweave.kernels.gemm.local import LOCAL
from warpweave.kernels.qkv import function as module
from warpweave.kernels.qkv import kernels, qkv_bwd, qkv_fwd, qkv_rope
from warpweave.kernels.rope import rope_table
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect

impls = pytest.mark.parametrize("impl", ["torch", "triton"])


def _tensors(B=2, S=5, E=12, D=10, G=3, kv=2, dtype=torch.float64):
    """Draw (x, weight, bias), (cos, sin); the positions do not start at 0."""
    rows = (kv, G + 2, D)
    drawn = torch.randn(B, S, E), torch.randn(*rows, E) / E**0.5, torch.randn(rows)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    table = rope_table(torch.arange(S) * 7 + 3, D, dtype=wide)
    return [t.to(dtype).requires_grad_() for t in drawn], table


def _with_gradients(op, tensors, table, **options):
    tensors = [t.detach().requires_grad_() for t in tensors]
    bias = tensors[2] if len(tensors) == 3 else None
    out = op(*tensors[:2], bias, *table, **options)
    dy = [torch.linspace(-1, 2, t.numel(), dtype=torch.float64).view(t.shape).to(t) for t in out]
    return *out, *torch.autograd.grad(out, tensors, dy)


def _assert_equal(ours, truth, rtol=1e-12):
    assert len(ours) == len(truth)
    for a, b in zip(ours, truth):
        assert a.shape == b.shape
        assert_close_f64(a, b, rtol)


@impls
@pytest.mark.parametrize(
    "shape",
    [{"D": 2, "G": 1, "kv": 1, "B": 1, "S": 1}, {"D": 40, "G": 1, "kv": 3},
     {"D": 6, "G": 7, "kv": 1, "E": 70}, {"D": 64, "G": 2, "kv": 2, "S": 37},
     {"D": 96, "G": 1, "kv": 1}, {"S": 0}, {"B": 0}, {"kv": 0}, {"E": 0}],
    ids=str,
)  # fmt: skip
def test_values_and_gradients_equal_the_reference(shape, impl) -> None:
    tensors, table = _tensors(**shape)
    ours = _with_gradients(qkv_rope, tensors, table, impl=impl)
    _assert_equal(ours, _with_gradients(reference.qkv_rope, tensors, table))
    unbiased = _with_gradients(qkv_rope, tensors[:2], table, impl=impl)
    _assert_equal(unbiased, _with_gradients(reference.qkv_rope, tensors[:2], table))


@impls
def test_without_a_table_nothing_turns(impl) -> None:
    tensors, (cos, sin) = _tensors()
    still = torch.ones_like(cos), torch.zeros_like(sin)
    ours = _with_gradients(qkv_rope, tensors, (None, None), impl=impl)
    _assert_equal(ours, _with_gradients(reference.qkv_rope, tensors, still))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_error_is_within_twice_that_of_the_same_dtype(dtype) -> None:
    tensors, table = _tensors(S=19, dtype=dtype)
    ours = _with_gradients(qkv_rope, tensors, table, impl="triton")
    same = _with_gradients(reference.qkv_rope, tensors, table)
    wide = [t.double() for t in tensors], [t.double() for t in table]
    for a, b, t in zip(ours, same, _with_gradients(reference.qkv_rope, *wide)):
        assert a.dtype == dtype
        assert_error_budget(a, b, t)


@impls
def test_gradcheck(impl) -> None:
    tensors, table = _tensors(B=1, S=2, E=3, D=4, G=1, kv=1)
    run = partial(qkv_rope, impl=impl)
    fast = impl == "triton"
    assert torch.autograd.gradcheck(lambda *t: run(*t, *table), tensors, fast_mode=fast)


@impls
def test_strided_operands_and_gradients(impl) -> None:
    tensors, table = _tensors()
    spread = [t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for t in tensors]
    turned = spread[1].detach().mT.contiguous().mT.requires_grad_()
    angles = torch.stack(table, -1).unbind(-1)
    out = qkv_rope(spread[0], turned, spread[2], *angles, impl=impl)
    truth = reference.qkv_rope(*tensors, *table)
    _assert_equal(out, truth)
    dy = [torch.randn(t.shape[::-1], dtype=t.dtype).permute(3, 2, 1, 0) for t in truth]
    grads = torch.autograd.grad(out, (spread[0], turned, spread[2]), dy)
    _assert_equal(grads, torch.autograd.grad(truth, tensors, dy))


@impls
def test_slice_of_kv_heads_is_a_slice_of_weight_and_unused_grads_are_zero(impl):
    (x, weight, bias), table = _tensors(D=6, G=2, kv=4)
    whole = qkv_rope(x, weight, bias, *table, impl=impl)
    half = slice(2, 4)
    part = qkv_rope(x, weight[half], bias[half], *table, impl=impl)
    for a, b in zip(part, whole):
        assert_close_f64(a, b.chunk(2, 2)[1], 1e-15)
    (dw,) = torch.autograd.grad(whole[1].sum(), weight)
    assert dw[:, 2].abs().min() > 0
    assert dw[:, [0, 1, 3]].abs().max() == 0


@impls
def test_whichever_operands_want_gradients_get_them(impl) -> None:
    tensors, table = _tensors()
    dy = [torch.randn_like(t) for t in reference.qkv_rope(*tensors, *table)]
    truth = torch.autograd.grad(reference.qkv_rope(*tensors, *table), tensors, dy)
    for wants in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2)):
        given = [t.detach().requires_grad_(i in wants) for i, t in enumerate(tensors)]
        out = qkv_rope(*given, *table, impl=impl)
        found = torch.autograd.grad(out, [given[i] for i in wants], dy)
        _assert_equal(found, [truth[i] for i in wants])


@impls
def test_the_halves_are_what_the_function_is_made_of(impl) -> None:
    tensors, table = _tensors()
    x, weight, bias = (t.detach() for t in tensors)
    q, k, v = qkv_fwd(x, weight, bias, *table, impl=impl)
    _assert_equal((q, k, v), reference.qkv_rope(x, weight, bias, *table))
    dz = qkv_bwd(q, k, v, *table, impl=impl)
    assert_close_f64(dz, (x.flatten(0, 1) @ weight.flatten(0, 2).t() + bias.flatten()), 1e-13)


@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_autocast_leaves_the_kernels_alone(way, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "fused_or_unfused", lambda *_: way)
    (x, weight, bias), table = _tensors(dtype=torch.float32)

    @torch.no_grad()
    def run() -> tuple[torch.Tensor, ...]:
        found = qkv_fwd(x, weight, bias, *table, impl="triton")
        return *found, qkv_bwd(*found, *table, impl="triton")

    want = run()
    _assert_equal(want[:3], reference.qkv_rope(x, weight, bias, *table), 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run(), want)


@impls
def test_weight_gradients_can_be_deferred_and_accumulated(impl) -> None:
    (x, weight, bias), table = _tensors(dtype=torch.float32)

    def loss():
        return sum(t.sum() for t in qkv_rope(x, weight, bias, *table, impl=impl))

    truth = torch.autograd.grad(loss(), (weight, bias))
    for context in (collect, accumulate):
        homes = {p: torch.full_like(p, float("nan")) for p in (weight, bias)}
        store = WeightGradients(homes)
        for _ in range(2):
            y = loss()
            with context(store):
                y.backward()
            assert len(store) == (2 if context is collect else 0)
            store.run()
        for p, expected in zip((weight, bias), truth):
            assert p.grad is homes[p]
            assert_close_f64(p.grad, 2 * expected, 1e-5)
            p.grad = None


@impls
def test_the_weight_and_the_bias_may_be_views_of_leaves_of_other_shapes(impl) -> None:
    (x, weight, bias), table = _tensors(B=1, S=3, E=4, D=4, G=1, kv=3)
    truth = _with_gradients(qkv_rope, (x, weight, bias), table, impl=impl)
    kv, slots, D, E = weight.shape
    for rows in ((-1,), (kv, -1), (kv * slots, D), (1, kv, slots, D)):
        leaves = weight.detach().reshape(*rows, E), bias.detach().reshape(rows)
        w, b = (t.requires_grad_() for t in leaves)
        out = qkv_rope(x, w.view_as(weight), b.view_as(bias), *table, impl=impl)
        dy = [torch.linspace(-1, 2, t.numel(), dtype=t.dtype).view(t.shape) for t in out]
        found = torch.autograd.grad(out, (x, w, b), dy)
        assert [g.shape for g in found] == [x.shape, w.shape, b.shape]
        of_views = found[0], found[1].view_as(weight), found[2].view_as(bias)
        assert_same_bits((*out, *of_views), truth)


def test_the_typing_rule_holds_on_every_placement() -> None:
    tensors, table = _tensors(B=2, S=4, E=6, D=4, G=1, kv=4)
    x, weight, bias = (t.detach() for t in tensors)
    for b in (bias, None):
        arguments = (x, weight, b, *table, module.QKVOptions(None, (3, 4), x.dtype), LOCAL)
        report = rulecheck(module._QKV, arguments)
        assert len(report.checked) == 5  # batch, sequence, heads, and nothing cut twice
        assert report.rejected


@impls
def test_autocast_and_checkpoint(impl) -> None:
    tensors, table = _tensors(dtype=torch.float32)
    truth = _with_gradients(reference.qkv_rope, tensors, table)
    with torch.autocast("cpu", torch.bfloat16):
        ours = _with_gradients(qkv_rope, tensors, table, impl=impl)
    assert {t.dtype for t in ours[:3]} == {torch.bfloat16}
    assert {t.dtype for t in ours[3:]} == {torch.float32}
    _assert_equal(ours, truth, 0.03)

    def again(*inputs, **options):
        return checkpoint(partial(qkv_rope, **options), *inputs, use_reentrant=False)

    _assert_equal(_with_gradients(again, tensors, table, impl=impl), truth, 1e-5)


def test_the_operators_are_well_formed() -> None:
    tensors, table = _tensors(S=2, E=3, D=4, G=1, kv=1)
    x, weight, bias = (t.detach() for t in tensors)
    ops = torch.ops.warpweave
    heads = qkv_fwd(x, weight, bias, *table)
    for b, turned in ((bias, table), (None, (None, None))):
        torch.library.opcheck(ops.qkv_fwd.default, (x, weight, b, *turned, None, "triton"))
        torch.library.opcheck(ops.qkv_bwd.default, (*heads, *turned))


@pytest.mark.parametrize("fault", ["keys do not turn", "turned the other way in backward"])
def test_planted_faults_exceed_the_tolerance(fault, monkeypatch) -> None:
    tensors, table = _tensors()
    truth = _with_gradients(qkv_rope, tensors, table, impl="triton")
    if fault == "keys do not turn":
        bare = [t.detach() for t in tensors]
        _, k, v = qkv_fwd(*bare, *table, impl="triton")
        still = qkv_fwd(*bare, None, None, impl="triton")
        assert relative_error(still[1], k) > 0.1
        assert torch.equal(still[2], v)
        return
    turned = lambda *dy, impl: qkv_bwd(*dy[:4], -dy[4], impl=impl)  # noqa: E731
    monkeypatch.setattr(module, "qkv_bwd", turned)
    wrong = _with_gradients(qkv_rope, tensors, table, impl="triton")
    assert min(relative_error(a, b) for a, b in zip(wrong[3:], truth[3:])) > 0.01
