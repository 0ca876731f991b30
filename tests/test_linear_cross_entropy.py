"""Linear layer and cross entropy fused, in both orders of work, against the reference and torch.

Blocks are so small that every problem has several of them, in both dims.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_all_close, assert_close_f64, assert_error_budget, assert_same_bits
from guarded import guarded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from well_formed import told_right, well_formed

from warpweave.kernels import reference
from warpweave.kernels.cross_entropy import (
    blocks,
    cross_entropy_fwd,
    in_forward,
    linear,
    linear_cross_entropy,
    linear_cross_entropy_bwd,
    linear_cross_entropy_fwd,
    recompute,
)
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])
# (recompute, reduction): without recomputing, every token has the same gradient
WAYS = pytest.mark.parametrize(
    ("recompute", "reduction"), [(True, "none"), (True, "mean"), (False, "mean"), (False, "sum")]
)
RECOMPUTE = pytest.mark.parametrize("recompute", [True, False])


@pytest.fixture(autouse=True)
def _small_blocks():
    with mock.patch.object(blocks, "CPU", blocks.BlockSizes(1100, 8, 5)):  # 8 x 128 and 5 x 128
        yield


def _case(T: int, V: int, E: int, dtype: torch.dtype = torch.float64, vocab: int | None = None):
    x = torch.randn(T, E, dtype=torch.float64)
    w = torch.randn(V, E, dtype=torch.float64) * (2 / E) ** 0.5
    labels = torch.randint(vocab or V, (T,))
    labels[:: 3 if T > 1 else 2] = -100
    if T:
        labels[-1] = (vocab or V) - 1
    return x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_(), labels


def _everything(fn, x, w, dloss):
    """Return [loss, dx, dw] of fn(x, w)."""
    loss = fn(x, w)
    return [loss.detach(), *torch.autograd.grad(loss, (x, w), dloss.to(loss.dtype))]


def _ours(x, w, labels, dloss, **options):
    return _everything(lambda x, w: linear_cross_entropy(x, w, labels, **options), x, w, dloss)


def _reduced(losses, labels, reduction):
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (labels != -100).sum().clamp(min=1)


def _truth(x, w, labels, dloss, reduction, **options):
    return _everything(
        lambda x, w: _reduced(
            reference.linear_cross_entropy(x, w, labels, **options), labels, reduction
        ),
        x.detach().double().requires_grad_(),
        w.detach().double().requires_grad_(),
        dloss.double(),
    )


def _dloss(labels, reduction):
    shape = labels.shape if reduction == "none" else ()
    return torch.randn(shape, dtype=torch.float64)


# ------------------------------------------------------------------- correct results


@IMPLS
@WAYS
@pytest.mark.parametrize("shape", [(2, 5), (3, 1, 2), (0, 4)], ids=str)
def test_tokens_may_have_several_dims(shape, recompute, reduction, impl):
    """x[B, S, E] and labels[B, S] give the losses [B, S] of their B S tokens."""
    x, w, labels = _case(torch.Size(shape).numel(), 31, 4)
    dloss, options = _dloss(labels, reduction), {"reduction": reduction, "recompute": recompute}
    options["impl"] = impl
    flat = _ours(x, w, labels, dloss, **options)

    def cut(x, w):
        return linear_cross_entropy(x.view(*shape, 4), w, labels.view(shape), **options)

    assert cut(x, w).shape == (shape if reduction == "none" else ())
    found = _everything(cut, x, w, dloss.view(shape) if reduction == "none" else dloss)
    assert_same_bits([a.flatten() for a in found], [b.flatten() for b in flat])


@IMPLS
@WAYS
@pytest.mark.parametrize(("T", "V", "E"), [(1, 1, 1), (1, 7, 3), (23, 301, 5), (9, 129, 16)])
def test_losses_and_gradients_equal_the_reference_in_float64(T, V, E, recompute, reduction, impl):
    x, w, labels = _case(T, V, E)
    dloss = _dloss(labels, reduction)
    how = {"reduction": reduction, "recompute": recompute, "impl": impl}
    for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 0.2, "z_loss": 0.01}):
        ours = _ours(x, w, labels, dloss, **how, **options)
        for a, b in zip(ours, _truth(x, w, labels, dloss, reduction, **options), strict=True):
            assert a.dtype == torch.float64
            assert_close_f64(a, b, 1e-13)
        assert ours[1][labels == -100].count_nonzero() == 0


@IMPLS
def test_the_raw_forward_half_gives_what_that_of_whole_logits_gives(impl):
    x, w, labels = (t.detach() for t in _case(23, 301, 5, vocab=290))
    for smoothing in (0.0, 0.1):  # this shard starts at column 100 of 350, and ends there
        vocabulary = Vocabulary(100, 350, -100, smoothing, 0.0, impl)
        stats = linear_cross_entropy_fwd(x, w, labels, vocabulary)
        where = {"vocab_start": 100, "vocab_size": 350, "want_sum": smoothing > 0}
        whole = cross_entropy_fwd(x @ w.t(), labels, **where)
        assert len(stats) == 2 + (smoothing > 0)
        assert_all_close(stats, whole[: len(stats)], 1e-13)


def test_the_reference_is_torch_s_linear_and_cross_entropy():
    x, w, labels = _case(11, 29, 7)
    expected = F.cross_entropy(F.linear(x, w), labels, reduction="none", label_smoothing=0.1)
    ours = reference.linear_cross_entropy(x, w, labels, label_smoothing=0.1)
    assert_close_f64(ours, expected, 1e-14)


@WAYS
def test_gradcheck(recompute, reduction):
    x, w, labels = _case(7, 150, 3)
    options = {"label_smoothing": 0.2, "z_loss": 0.05, "reduction": reduction}
    run = partial(linear_cross_entropy, labels=labels, recompute=recompute, **options)
    assert torch.autograd.gradcheck(run, (x, w), fast_mode=True)


@IMPLS
@RECOMPUTE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_stays_within_the_error_budget(dtype, recompute, impl):
    x, w, labels = _case(19, 301, 24, dtype)
    one = torch.ones(())
    ours = _ours(x, w, labels, one, recompute=recompute, impl=impl)
    same = _everything(lambda x, w: F.cross_entropy(F.linear(x, w), labels), x, w, one)
    truth = _truth(x, w, labels, one, "mean")
    assert [t.dtype for t in ours] == [torch.float32, dtype, dtype]
    for a, b, c in zip(ours, same, truth, strict=True):
        assert_error_budget(a, b, c)


@RECOMPUTE
def test_a_float32_weight_gradient_is_never_rounded_to_bf16(recompute):
    x, w, labels = _case(19, 301, 24, torch.bfloat16)
    w.grad_dtype = torch.float32
    linear_cross_entropy(x, w, labels, recompute=recompute).backward()
    count = (labels != -100).sum()
    before, after = (count, 1) if recompute else (1, count)  # of rounding dz, and division by count
    with torch.no_grad():
        z = F.linear(x, w).double()
        dz = (z.softmax(1) - F.one_hot(labels.clamp(min=0), 301)) * (labels != -100)[:, None]
        truth = (dz / before).bfloat16().double().t() @ x.double() / after
    assert w.grad.dtype == torch.float32
    assert_close_f64(w.grad, truth, 3e-4)  # some dz round the other way; bf16 has steps of 8e-3
    assert not torch.equal(w.grad, w.grad.bfloat16().float())


@IMPLS
@WAYS
def test_padding_rows_take_no_part(recompute, reduction, impl):
    x, w, labels = _case(9, 400, 5, vocab=37)
    with torch.no_grad():
        w[37:] = float("nan")
    dloss = _dloss(labels, reduction)
    options = {"reduction": reduction, "recompute": recompute, "impl": impl}
    with guarded():  # unwritten elements are NaN
        ours = _ours(x, w, labels, dloss, vocab_size=37, **options)
    truth = _truth(x, w[:37], labels, dloss, reduction)
    assert_all_close([*ours[:2], ours[2][:37]], truth, 1e-13)
    assert ours[2][37:].count_nonzero() == 0


# ------------------------------------------------------------------- edges


@IMPLS
@RECOMPUTE
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_tokens_and_no_labels_lose_zero(recompute, reduction, impl):
    for T in (0, 6):
        x, w, labels = _case(T, 140, 4, torch.float32)
        labels[:] = -100
        options = {"reduction": reduction, "recompute": recompute, "impl": impl}
        with guarded():
            loss = linear_cross_entropy(x, w, labels, **options)
            assert loss == 0
            loss.backward()
        assert torch.equal(x.grad, torch.zeros(T, 4))
        assert torch.equal(w.grad, torch.zeros(140, 4))


@WAYS
def test_strided_operands(recompute, reduction):
    x, w, labels = _case(12, 34, 6)
    dloss = _dloss(labels, reduction)
    truth = _truth(x, w, labels, dloss, reduction)
    for cut in (lambda t: t.repeat(1, 2)[:, :6], lambda t: t.t().contiguous().t()):
        views = [cut(t.detach()).requires_grad_() for t in (x, w)]
        ours = _ours(*views, labels, dloss, reduction=reduction, recompute=recompute)
        assert_all_close(ours, truth, 1e-13)


@RECOMPUTE
def test_only_what_is_wanted_gets_a_gradient(recompute):
    x, w, labels = _case(9, 150, 5)
    truth = _truth(x, w, labels, torch.ones(()), "mean")
    for wanted in range(2):
        leaves = [t.detach().clone().requires_grad_(i == wanted) for i, t in enumerate((x, w))]
        linear_cross_entropy(*leaves, labels, recompute=recompute).backward()
        assert leaves[1 - wanted].grad is None
        assert_close_f64(leaves[wanted].grad, truth[1 + wanted], 1e-13)
    with torch.no_grad():
        assert_close_f64(linear_cross_entropy(x, w, labels, recompute=recompute), truth[0], 1e-13)


@RECOMPUTE
def test_backward_twice_gives_the_same_twice(recompute):
    x, w, labels = _case(9, 150, 5)
    loss = linear_cross_entropy(x, w, labels, recompute=recompute)
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (x, w))
    for a, b in zip(first, second, strict=True):
        assert_close_f64(3 * a, b, 1e-15)


@RECOMPUTE
def test_a_gradient_too_large_for_float16_is_scaled_in_float32(recompute):
    x, w, labels = _case(9, 150, 5, torch.float16)
    x, w = ((t.detach() * 0.05).requires_grad_() for t in (x, w))
    loss = linear_cross_entropy(x, w, labels, reduction="sum", recompute=recompute)
    for a in torch.autograd.grad(loss * 2.0**16, (x, w)):  # infinite in float16
        assert a.isfinite().all()


@pytest.mark.parametrize("impl", ["triton", "torch"])
@RECOMPUTE
@pytest.mark.parametrize("label", [10, -1, -99, 2**40])
def test_labels_outside_the_vocabulary_are_refused_on_cpu(label, recompute, impl):
    x, w, labels = _case(3, 16, 4)
    labels[1] = label
    with pytest.raises(ValueError, match=rf"\[0, 10\) or -100, got {label}"):
        linear_cross_entropy(x, w, labels, vocab_size=10, recompute=recompute, impl=impl)


# ------------------------------------------------------------------- memory


class _Largest(TorchDispatchMode):
    """A mode that tracks the most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(t, torch.Tensor):
                self.elements = max(self.elements, t.numel())
        return out


def _largest(fn) -> int:
    with _Largest() as mode:
        fn()
    return mode.elements


@IMPLS
@RECOMPUTE
def test_the_logits_are_never_there(recompute, impl):
    """Nothing larger than a block is made except dW: 40 x 700 logits in blocks of at most 1100."""
    x, w, labels = _case(40, 700, 3)
    loss = []
    options = {"recompute": recompute, "impl": impl}
    largest = _largest(lambda: loss.append(linear_cross_entropy(x, w, labels, **options)))
    assert largest <= (1100 if recompute else 700 * 3)
    assert _largest(loss[0].backward) <= 700 * 3
    plain = _largest(lambda: F.cross_entropy(F.linear(x, w), labels).backward())
    assert plain == 40 * 700  # this test would detect them


# ------------------------------------------------------------------- weight gradients elsewhere


@RECOMPUTE
@pytest.mark.parametrize("within", [accumulate, collect])
def test_the_weight_gradient_goes_where_the_store_says(recompute, within):
    x, w, labels = _case(13, 301, 5, torch.float32)
    truth = _truth(x, w, labels, torch.ones(()), "mean")
    home = torch.full_like(w, float("nan"))
    store = WeightGradients({w: home})
    for times in (1, 2):  # written the first time, accumulated the second
        x.grad, loss = None, linear_cross_entropy(x, w, labels, recompute=recompute)
        with within(store):
            loss.backward()
        assert_close_f64(x.grad, truth[1], 1e-6)
        assert len(store) == (within is collect and not recompute)
        assert times == 2 or not len(store) or w.grad is None
        store.run()
        assert w.grad is home
        assert_close_f64(home, times * truth[2], 1e-6)


@IMPLS
@RECOMPUTE
@pytest.mark.parametrize(("T", "V"), [(3, 50257), (70, 1105), (9, 131), (1, 1)])
def test_rows_of_the_logits_are_aligned_whatever_the_vocabulary(T, V, recompute, impl):
    x, w, labels = _case(T, V, 16, torch.float32)
    seen, packed = [], lambda x, columns: x.new_empty(len(x), columns)

    def everything():
        return _ours(x, w, labels, torch.ones(()), recompute=recompute, impl=impl)

    def spy(z, *args, real=blocks.block_stats, **options):
        seen.append(z.stride(0))
        return real(z, *args, **options)

    sizes = mock.patch.object(blocks, "CPU", blocks.BlockSizes(2**18, 64, 64))
    with sizes, mock.patch.object(blocks, "block_stats", spy):
        found = everything()
        assert not any(by % 128 for by in seen)
        with mock.patch.object(blocks, "aligned_empty", packed):
            assert all(map(torch.equal, found, everything()))
    assert any(by % 128 for by in seen)  # of packed ones


def test_logits_that_are_made_again_are_made_once_for_both_gradients():
    """This holds with and without deferral. Later they would have to be made a third time, from a
    weight that may be gone."""
    x, w, labels = _case(13, 301, 5)
    store, calls = WeightGradients(), []
    right = linear.linear_cross_entropy_bwd

    def counted(*args, dw=None, dx_dtype=None, **options):
        calls.append((dw is not None, dx_dtype is not None))
        return right(*args, dw=dw, dx_dtype=dx_dtype, **options)

    with mock.patch.object(linear, "linear_cross_entropy_bwd", counted):
        linear_cross_entropy(x, w, labels, recompute=True).backward()
        once = w.grad.clone()
        with collect(store):
            linear_cross_entropy(x, w, labels, recompute=True).backward()
    assert len(store) == 0
    assert calls == [(True, True)] * 2
    assert_close_f64(w.grad, 2 * once, 1e-13)


@RECOMPUTE
def test_the_gradient_of_a_computed_weight_is_never_deferred(recompute):
    x, w, labels = _case(9, 150, 5)
    scale, store = torch.ones(150, 1, dtype=torch.float64, requires_grad=True), WeightGradients()
    truth = torch.autograd.grad(F.cross_entropy(F.linear(x, w * scale), labels), scale)
    with collect(store):
        ours = torch.autograd.grad(
            linear_cross_entropy(x, w * scale, labels, recompute=recompute), scale
        )
    assert len(store) == 0
    assert_close_f64(ours[0], truth[0], 1e-13)


def test_a_16_bit_gradient_is_summed_in_float32():
    """16 slices of rows into a bf16 gradient: rounded once, not sixteen times."""
    x, w, labels = (t.detach() for t in _case(128, 20, 8, torch.bfloat16))
    vocabulary = Vocabulary(0, 20, -100, 0.0, 0.0, "torch")
    stats = linear_cross_entropy_fwd(x, w, labels, vocabulary)
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        dw = torch.ones(20, 8, dtype=dtype)
        arguments = torch.ones(128), x, w, labels, stats[0], vocabulary
        with mock.patch.object(blocks, "CPU", blocks.BlockSizes(160, 8, 8)):
            assert linear_cross_entropy_bwd(*arguments, dw=dw, add=True) is None
        results.append(dw)
    assert torch.equal(results[0], results[1].bfloat16())


# ------------------------------------------------------------------- torch's own machinery


@RECOMPUTE
def test_under_autocast_both_are_cast_and_gradients_keep_their_dtype(recompute):
    x, w, labels = _case(9, 301, 16, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours = _ours(x, w, labels, torch.ones(()), recompute=recompute)
    low = [t.detach().bfloat16().requires_grad_() for t in (x, w)]
    same = _ours(*low, labels, torch.ones(()), recompute=recompute)
    assert [t.dtype for t in ours] == [torch.float32] * 3
    assert torch.equal(ours[0], same[0])
    assert_all_close(ours[1:], same[1:], 1e-2)


@WAYS
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(recompute, reduction, reentrant):
    x, w, labels = _case(9, 301, 4)
    dloss = _dloss(labels, reduction)

    def loss(x):  # the weight is the module's, not an argument, which would be another tensor
        options = {"recompute": recompute, "reduction": reduction}
        return linear_cross_entropy(x * 1.5, w, labels, **options)

    home = torch.zeros_like(w)
    for store in (None, WeightGradients({w: home})):
        x.grad = w.grad = None
        result = checkpoint(loss, x, use_reentrant=reentrant)
        with nullcontext() if store is None else accumulate(store):
            result.backward(dloss)
        assert store is None or w.grad is home
        truth = _truth(x * 1.5, w, labels, dloss, reduction)
        assert_close_f64(x.grad, truth[1] * 1.5, 1e-13)
        assert_close_f64(w.grad, truth[2], 1e-13)


@IMPLS
def test_operators_pass_opcheck(impl):
    x, w, labels = (t.detach() for t in _case(9, 150, 4, torch.float32, vocab=149))
    vocabulary = Vocabulary(0, 149, -100, 0.1, 0.01, impl)
    well_formed(recompute._fwd_op, x, w, labels, vocabulary)
    stats = linear_cross_entropy_fwd(x, w, labels, vocabulary)
    dw = torch.zeros(150, 4)
    for dtype in (x.dtype, None):
        given = torch.ones(9), x, w, labels, stats[0], dw, True, dtype, vocabulary
        well_formed(recompute._bwd_op, *given)
    well_formed(in_forward.fwd_bwd_op, x, w, labels, True, True, vocabulary)
    for first in ([], [x @ w[:128].t()]) if impl == "triton" else ([],):
        well_formed(in_forward._rows_fwd_op, x, w, labels, first, vocabulary)
    stats, own, *held = in_forward._rows_fwd_op(x, w, labels, [], vocabulary)
    assert len(held) == 2
    given = x, w, labels, stats[0], own, held, torch.zeros(9, 4), dw, False, vocabulary
    well_formed(in_forward._rows_bwd_op, *given)
    x, w = x.bfloat16(), w.bfloat16()
    for smoothing in (0.0, 0.1):
        vocabulary = vocabulary._replace(label_smoothing=smoothing)
        told_right(recompute._fwd_op, x, w, labels, vocabulary)
        told_right(in_forward._rows_fwd_op, x, w, labels, [], vocabulary)
    for dtype in (torch.bfloat16, torch.float32, None):
        given = torch.ones(9), x, w, labels, torch.ones(9), dw, True, dtype, vocabulary
        told_right(recompute._bwd_op, *given)
    for wanted in ((True, True), (True, False), (False, True), (False, False)):
        told_right(in_forward.fwd_bwd_op, x, w, labels, *wanted, vocabulary)


# ------------------------------------------------------------------- planted faults


FAULTS = {  # functions of `blocks`, and what replaces them
    "column_slices": lambda *given, right=blocks.column_slices: right(*given)[:1],  # the first only
    "from_column": lambda vocabulary, first: vocabulary,  # all blocks start at zero
    "merged": lambda parts, labels, ignored: parts[0],  # no merge of lse
}


@pytest.mark.parametrize("name", FAULTS)
@RECOMPUTE
def test_planted_faults_are_seen(name, recompute):
    x, w, labels = _case(9, 301, 4)
    with mock.patch.object(blocks, name, FAULTS[name]):
        loss = linear_cross_entropy(x, w, labels, recompute=recompute)
    truth = _truth(x, w, labels, torch.ones(()), "mean")
    assert (loss - truth[0]).abs() > 1e-3


def test_a_cpu_computes_gradients_in_the_forward_wherever_it_can() -> None:
    x, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.arange(5)
    leaves = {"x": x.clone().requires_grad_(), "weight": weight.clone().requires_grad_()}
    for wanted in ({"x"}, {"weight"}, {"x", "weight"}, set()):
        given = {"x": x, "weight": weight} | {n: t for n, t in leaves.items() if n in wanted}
        for reduction, again in itertools.product(("mean", "sum", "none"), (None, True, False)):
            if (reduction, again) == ("none", False):
                continue
            ahead = bool(wanted) and not again and reduction != "none"
            right, how = linear_cross_entropy_fwd, {"reduction": reduction, "recompute": again}
            with (
                mock.patch.object(linear, "_fwd_bwd", wraps=linear._fwd_bwd) as early,
                mock.patch.object(linear, "linear_cross_entropy_fwd", wraps=right) as late,
            ):
                linear_cross_entropy(**given, labels=labels, **how)
            assert (early.call_count, late.call_count) == (ahead, not ahead)
            if ahead:
                made = early.call_args.kwargs
                assert (made["dx_dtype"] is not None) == ("x" in wanted)
                assert made["want_dw"] == ("weight" in wanted)


def test_a_block_is_copied_unless_its_rows_are_a_multiple_of_128_apart() -> None:
    whole = torch.randn(3, 256)
    for z in (whole, whole[:, :128], whole[:, :100], whole[:, 3:7]):
        assert blocks.aligned(z) is z
    for width in (1, 100, 129, 200):
        z = torch.randn(3, 2 * width)[:, :width]
        found = blocks.aligned(z)
        assert torch.equal(found, z)
        assert found.stride() == (-(-width // 128) * 128, 1)
