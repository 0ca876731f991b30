"""Cross entropy, whole and in vocabulary shards, against the reference and torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64, assert_error_budget, assert_same_bits, relative_error
from guarded import guarded
from refused import check
from well_formed import told_right, well_formed

from warpweave.kernels import reference
from warpweave.kernels.cross_entropy import (
    cross_entropy,
    cross_entropy_bwd,
    cross_entropy_fwd,
    forward,
    token_losses,
)
from warpweave.kernels.cross_entropy.backward import (
    cross_entropy_bwd_in_place_op,
    cross_entropy_bwd_op,
)
from warpweave.kernels.cross_entropy.forward import cross_entropy_fwd_op
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary

IMPLS = pytest.mark.parametrize("impl", ["triton", "torch"])


def _case(N: int, V: int, dtype: torch.dtype = torch.float64, vocab: int | None = None):
    logits = (torch.randn(N, V, dtype=torch.float64) * 3).to(dtype)
    labels = torch.randint(vocab or V, (N,))
    labels[:: 3 if N > 1 else 2] = -100
    labels[-1] = (vocab or V) - 1
    return logits, labels


def _loss_and_gradient(fn, logits, labels, dlosses, **options):
    logits = logits.clone().requires_grad_(True)
    losses = fn(logits, labels, **options)
    return losses.detach(), torch.autograd.grad(losses, logits, dlosses.to(losses.dtype))[0]


@IMPLS
@pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 1e-2), (0.1, 1e-2)]
)
@pytest.mark.parametrize(
    ("N", "V"), [(1, 1), (1, 7), (23, 53), (130, 17), (5, 4099), (3, 9001), (67, 256)]
)
def test_losses_and_gradients_equal_the_reference_in_float64(N, V, smoothing, z_loss, impl):
    logits, labels = _case(N, V)
    dlosses = torch.randn(N, dtype=torch.float64)
    given, options = (logits, labels, dlosses), {"label_smoothing": smoothing, "z_loss": z_loss}
    ours = _loss_and_gradient(cross_entropy, *given, reduction="none", impl=impl, **options)
    truth = _loss_and_gradient(reference.cross_entropy, *given, **options)
    for a, b in zip(ours, truth):
        assert a.dtype == torch.float64
        assert_close_f64(a, b, 1e-13)
    assert ours[1][labels == -100].abs().max() == 0 if N > 1 else True


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_reference_equals_torch(smoothing):
    logits, labels = _case(23, 53)
    expected = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    ours = reference.cross_entropy(logits, labels, label_smoothing=smoothing)
    assert_close_f64(ours, expected, 1e-14)


def test_the_reference_s_z_loss_is_the_squared_log_sum_exp():
    """PaLM's z_loss * log^2 Z is added to the loss, where there is a label."""
    logits, labels = _case(23, 53)
    plain = reference.cross_entropy(logits, labels)
    with_z = reference.cross_entropy(logits, labels, z_loss=0.25)
    expected = 0.25 * logits.exp().sum(1).log() ** 2
    assert_close_f64(with_z - plain, expected.masked_fill(labels == -100, 0.0), 1e-13)


@IMPLS
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_reductions_equal_torch(reduction, impl):
    logits, labels = _case(29, 31)
    options = {"reduction": reduction, "ignore_index": 3, "label_smoothing": 0.05}
    labels[labels == -100] = 3
    given = logits, labels, torch.ones((), dtype=torch.float64)
    ours = _loss_and_gradient(cross_entropy, *given, impl=impl, **options)
    truth = _loss_and_gradient(F.cross_entropy, *given, **options)
    for a, b in zip(ours, truth):
        assert_close_f64(a, b, 1e-13)


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_stays_within_the_error_budget(dtype, impl):
    logits, labels = _case(19, 301, dtype)
    given = labels, torch.rand(19, dtype=torch.float64)
    ours = _loss_and_gradient(cross_entropy, logits, *given, reduction="none", impl=impl)
    same = _loss_and_gradient(F.cross_entropy, logits, *given, reduction="none")
    truth = _loss_and_gradient(reference.cross_entropy, logits.double(), *given)
    assert ours[0].dtype == torch.float32
    assert ours[1].dtype == dtype
    assert_close_f64(ours[0], truth[0], 1e-6)  # computed in float32 for any dtype of the logits
    stats, used = cross_entropy_fwd(logits, labels, impl=impl), labels != -100
    wide = logits.detach().double()
    assert {x.dtype for x in stats} == {torch.float32}
    assert_close_f64(stats[0][used], wide.logsumexp(1)[used], 1e-6)
    assert_close_f64(stats[2][used], wide.sum(1)[used], 1e-6)
    assert_error_budget(ours[1], same[1], truth[1])


@IMPLS
def test_gradcheck(impl):
    logits, labels = _case(5, 11)
    for smoothing, z_loss in ((0.0, 0.0), (0.3, 0.0), (0.3, 0.1)):
        options = {"label_smoothing": smoothing, "z_loss": z_loss, "impl": impl}
        assert torch.autograd.gradcheck(
            lambda z, o=options: cross_entropy(z, labels, **o), logits.requires_grad_(True),
            fast_mode=impl == "triton",
        )  # fmt: skip


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("cut", [slice(None), slice(3, 40)])  # whole rows, and part of each
def test_in_place_gradients_overwrite_the_logits_with_the_same_numbers(dtype, cut, impl):
    whole, labels = _case(19, 47, dtype, vocab=45)
    logits, before = whole[:, cut], whole.clone()
    dlosses, lse = torch.rand(19), whole.double().logsumexp(1)
    lse = lse if dtype == torch.float64 else lse.float()
    options = {"vocab_start": cut.start or 0, "vocab_size": 45, "impl": impl}
    options |= {"label_smoothing": 0.1, "z_loss": 0.01}
    expected = cross_entropy_bwd(dlosses, logits.clone(), labels, lse, **options)
    out = cross_entropy_bwd(dlosses, logits, labels, lse, in_place=True, **options)
    assert out.data_ptr() == logits.data_ptr()
    assert torch.equal(out, expected)
    assert torch.equal(whole[:, :3], expected[:, :3] if cut.start is None else before[:, :3])
    assert torch.equal(whole[:, 40:], expected[:, 40:] if cut.stop is None else before[:, 40:])


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_in_place_gradients_allocate_no_second_logits(dtype, impl):
    logits, labels = _case(64, 1024, dtype)
    lse = logits.logsumexp(1)

    def most(in_place):
        """Return the bytes of the largest buffer that an operation allocates."""
        with torch.profiler.profile(profile_memory=True) as profile:
            cross_entropy_bwd(lse, logits.clone(), labels, lse, in_place=in_place, impl=impl)
        taken = sorted(event.self_cpu_memory_usage for event in profile.events())
        return taken[-2] if in_place else taken[-1]  # one of them is the clone

    assert most(in_place=False) == logits.nbytes
    assert most(in_place=True) < logits.nbytes / 10


# ------------------------------------------------------------------- vocabulary shards


def _sharded(logits, labels, dlosses, shards, vocab, impl, smoothing=0.0, fault=None, z_loss=0.01):
    """Emulate tensor parallelism in one process: halves per shard, combined by hand."""
    width = logits.shape[1] // shards
    parts = list(logits.split(width, 1))
    starts = [i * width for i in range(shards)]
    where = [{"vocab_start": s, "vocab_size": vocab, "impl": impl} for s in starts]
    if fault == "padding takes part":
        where = [{**w, "vocab_size": logits.shape[1]} for w in where]
    each = [cross_entropy_fwd(z, labels, **w) for z, w in zip(parts, where)]
    lse = torch.logsumexp(torch.stack([e[0] for e in each]), 0)
    target, total = (torch.stack([e[i] for e in each]).sum(0) for i in (1, 2))
    if fault == "local lse":
        lse = each[0][0]
    size = width if fault == "local vocabulary" else vocab
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    losses = token_losses(lse, target, total, labels, vocab_size=size, **options)
    if fault == "no gradient of the z-loss":
        options["z_loss"] = 0.0
    given = labels, lse
    grads = [cross_entropy_bwd(dlosses, z, *given, **options, **w) for z, w in zip(parts, where)]
    return losses, torch.cat(grads, 1)


def _sharded_errors(shards, width, vocab, impl, smoothing, fault=None):
    logits, labels = _case(13, shards * width, vocab=vocab)
    dlosses = torch.randn(13, dtype=torch.float64)
    ours = _sharded(logits, labels, dlosses, shards, vocab, impl, smoothing, fault)
    options = {"vocab_size": vocab, "label_smoothing": smoothing, "z_loss": 0.01}
    truth = _loss_and_gradient(reference.cross_entropy, logits, labels, dlosses, **options)
    return [relative_error(a, b) for a, b in zip(ours, truth)], ours[1]


# 41 of 4 x 12: the last shard holds 5 columns of the vocabulary; 33 of 4 x 11: it holds none; 9 of
# 5 x 4: the last two hold none, and begin beyond it.
@IMPLS
@pytest.mark.parametrize(
    ("shards", "width", "vocab"), [(2, 8, 16), (4, 12, 41), (4, 11, 33), (5, 4, 9)]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_shards_with_padding_equal_the_whole(shards, width, vocab, smoothing, impl):
    with guarded():  # unwritten elements are NaN
        errors, dlogits = _sharded_errors(shards, width, vocab, impl, smoothing)
    assert max(errors) < 1e-13
    assert dlogits[:, vocab:].abs().sum() == 0


@IMPLS
@pytest.mark.parametrize(
    "fault", ["padding takes part", "local vocabulary", "local lse", "no gradient of the z-loss"]
)
def test_planted_faults_are_seen(fault, impl):
    errors, _ = _sharded_errors(4, 12, 41, impl, 0.1, fault)
    assert max(errors) > 1e-3


@IMPLS
def test_padding_columns_of_the_whole_take_no_part(impl):
    logits, labels = _case(9, 40, vocab=37)
    logits[:, 37:] = float("nan")
    given = labels, torch.ones(9, dtype=torch.float64)
    options = {"vocab_size": 37, "reduction": "none", "impl": impl}
    losses, dlogits = _loss_and_gradient(cross_entropy, logits, *given, **options)
    truth = _loss_and_gradient(reference.cross_entropy, logits[:, :37], *given)
    assert_close_f64(losses, truth[0], 1e-13)
    assert_close_f64(dlogits[:, :37], truth[1], 1e-13)
    assert dlogits[:, 37:].abs().sum() == 0


# ------------------------------------------------------------------- edges


@IMPLS
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_batch_without_any_label_loses_zero(reduction, impl):
    logits, labels = _case(6, 10, torch.float32)
    labels[:] = -100
    logits[2] = float("inf")  # an ignored row may hold anything
    logits[3] = float("nan")
    shape = (6,) if reduction == "none" else ()
    given = logits, labels, torch.ones(shape)
    loss, gradient = _loss_and_gradient(cross_entropy, *given, reduction=reduction, impl=impl)
    assert torch.equal(loss, torch.zeros(shape))
    assert torch.equal(gradient, torch.zeros(6, 10))


@IMPLS
def test_empty_batches_and_strided_logits(impl):
    assert cross_entropy(torch.randn(0, 9), torch.zeros(0, dtype=torch.int64), impl=impl) == 0
    logits, labels = _case(12, 34)
    ones = torch.ones(12, dtype=torch.float64)
    truth = _loss_and_gradient(reference.cross_entropy, logits, labels, ones)
    wide = torch.zeros(12, 50, dtype=torch.float64)
    wide[:, 5:39] = logits
    for view in (wide[:, 5:39], logits.T.contiguous().T):
        lse, target, _ = cross_entropy_fwd(view, labels, want_sum=False, impl=impl)
        losses = token_losses(lse, target, None, labels, vocab_size=34)
        assert_close_f64(losses, truth[0], 1e-13)
        assert_close_f64(cross_entropy_bwd(ones, view, labels, lse, impl=impl), truth[1], 1e-13)


@IMPLS
def test_each_operand_of_the_halves_may_have_gaps(impl):
    logits, labels = _case(12, 34)
    dloss = torch.randn(12, dtype=torch.float64)
    truth = cross_entropy_fwd(logits, labels, impl="torch")
    given = {"dloss": dloss, "logits": logits, "labels": labels, "lse": truth[0]}
    of_bwd = cross_entropy_bwd(**given, impl="torch")
    for name in (*given, "all"):
        apart = {n: t for n, t in given.items() if name in (n, "all")}
        some = given | {n: torch.stack((t, t.flip(0)), -1)[..., 0] for n, t in apart.items()}
        found = cross_entropy_fwd(some["logits"], some["labels"], impl=impl)
        for x, y in zip(found, truth, strict=True):
            assert_close_f64(x, y, 1e-13)
        assert_close_f64(cross_entropy_bwd(**some, impl=impl), of_bwd, 1e-13)
        if some["logits"].is_contiguous():
            some["logits"] = logits.clone()
            written = cross_entropy_bwd(**some, in_place=True, impl=impl)
            assert_close_f64(written, of_bwd, 1e-13)
    wide = torch.nn.functional.pad(logits, (3, 5))[:, 3:37]  # the result's rows keep that stride
    found = cross_entropy_bwd(**given | {"logits": wide}, impl=impl)
    assert_close_f64(found, of_bwd, 1e-13)
    written = cross_entropy_bwd(**given | {"logits": wide}, in_place=True, impl=impl)
    assert written is wide
    assert_close_f64(wide, of_bwd, 1e-13)
    assert not torch.cat((wide._base[:, :3], wide._base[:, 37:]), 1).any()


@IMPLS
def test_masked_and_huge_logits_are_exact(impl):
    """This covers a whole block of -inf before the first finite logit, and no overflow at 1e4."""
    logits, labels = _case(4, 5000, torch.float32)
    logits[:, :4500] = -float("inf")
    logits[1] += 1e4
    logits[2] -= 1e4
    labels[:] = 4777
    given, how = (labels, torch.ones(4, dtype=torch.float64)), {"reduction": "none", "impl": impl}
    loss, gradient = _loss_and_gradient(cross_entropy, logits, *given, **how)
    truth = _loss_and_gradient(reference.cross_entropy, logits.double(), *given)
    assert_close_f64(loss[[0, 3]], truth[0][[0, 3]], 1e-6)
    assert_close_f64(loss, truth[0], 1e-3)  # float32 has steps of 1e-3 at 1e4
    assert_close_f64(gradient, truth[1], 2e-3)


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_row_may_be_masked_wholly_on_some_shards(dtype, impl):
    """Its lse there is -inf and its gradient 0, as for padding columns."""
    logits, labels = _case(5, 12, dtype)
    labels[:] = torch.tensor([0, 5, 1, -100, 7])
    for row, masked in enumerate((slice(4, 12), slice(0, 4), slice(8, 12), slice(0, 8))):
        logits[row, masked] = -float("inf")
    lses = torch.stack([cross_entropy_fwd(z, labels, impl=impl, vocab_start=4 * n, vocab_size=12)[0]
                        for n, z in enumerate(logits.split(4, 1))])  # fmt: skip
    whole = logits.to(lses.dtype).logsumexp(1).masked_fill(labels == -100, 0.0)
    assert lses[1:, 0].isneginf().all()
    assert_close_f64(lses.logsumexp(0)[labels != -100], whole[labels != -100], 1e-6)
    losses, gradient = _sharded(logits, labels, torch.ones(5).to(whole), 3, 12, impl, z_loss=0.0)
    truth = _loss_and_gradient(reference.cross_entropy, logits.double(), labels, torch.ones(5))
    assert_close_f64(losses, truth[0], 1e-6)
    assert_close_f64(gradient, truth[1], 1e-2 if dtype == torch.bfloat16 else 1e-13)


@IMPLS
def test_the_running_maximum_may_grow_in_every_block(impl):
    logits, labels = _case(4, 13000)
    logits += torch.linspace(0, 60, 13000, dtype=torch.float64)
    lse, target, total = cross_entropy_fwd(logits, labels, impl=impl)
    used = labels != -100
    assert_close_f64(lse[used], logits.logsumexp(1)[used], 1e-14)
    assert_close_f64(total[used], logits.sum(1)[used], 1e-13)
    picked = logits.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    assert torch.equal(target[used], picked[used])
    for x in (lse, target, total):
        assert x[~used].tolist() == [0.0]


@IMPLS
@pytest.mark.parametrize("label", [10, -1, -99, 2**40])
def test_labels_outside_the_vocabulary_are_refused_on_cpu(label, impl):
    labels, x = torch.tensor([1, label, -100]), torch.randn(3, 16)
    check(lambda: cross_entropy(x[:, :10], labels, impl=impl), str(label))
    check(lambda: cross_entropy_fwd(x, labels, vocab_size=10, impl=impl), r"\[0, 10\)")


@IMPLS
def test_operators_pass_opcheck(impl):
    logits, labels = _case(6, 21, torch.float32, vocab=19)
    vocabulary = Vocabulary(0, 19, -100, 0.1, 0.01, impl)
    well_formed(cross_entropy_fwd_op, logits, labels, vocabulary, True)
    arguments = (torch.ones(6), logits, labels, logits.logsumexp(1), vocabulary)
    well_formed(cross_entropy_bwd_op, *arguments)
    well_formed(cross_entropy_bwd_in_place_op, *arguments)
    low = logits.detach().bfloat16()
    for want_sum in (True, False):
        told_right(cross_entropy_fwd_op, low, labels, vocabulary, want_sum)
    told_right(cross_entropy_bwd_op, torch.ones(6), low, labels, torch.ones(6), vocabulary)


def test_rows_times_strides_past_two_to_the_31_do_not_wrap():
    """The memory between the rows is never touched, in the forward and in place."""
    rows, stride = 2**11 + 16, 2**20
    far = torch.empty(rows * stride, dtype=torch.float16).as_strided((rows, 2), (stride, 1))
    near = far.copy_(torch.randn(rows, 2)).contiguous()
    labels, dloss = torch.randint(2, (rows,)), torch.randn(rows)
    found, wanted = (cross_entropy_fwd(x, labels, impl="triton") for x in (far, near))
    assert_same_bits(found, wanted)
    wanted = cross_entropy_bwd(dloss, near, labels, wanted[0], impl="triton")
    cross_entropy_bwd(dloss, far, labels, found[0], in_place=True, impl="triton")
    assert torch.equal(far, wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "vocab"), [(0, 30), (7, 50)])
def test_the_rows_of_a_chunk_change_no_bit(monkeypatch, start, vocab, dtype):
    """One row at a time, several with fewer at the end, and all of them."""
    logits, labels = _case(23, 30, dtype, vocab=vocab)
    logits[3], dloss = float("inf"), torch.randn(23)  # this row is ignored
    where = {"vocab_start": start, "vocab_size": vocab}
    found = []
    for chunk in (2**18, 150, 29):
        monkeypatch.setattr(forward, "_CHUNK", chunk)
        stats = cross_entropy_fwd(logits, labels, **where)
        found.append([*stats])
        for in_place in (False, True):
            for options in ({}, {"label_smoothing": 0.1}, {"z_loss": 0.1}):
                given = dloss, logits.clone(), labels, stats[0]
                dlogits = cross_entropy_bwd(*given, in_place=in_place, **where, **options)
                assert dlogits.dtype == dtype
                assert not dlogits[labels == -100].any()
                found[-1].append(dlogits)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


def test_a_label_of_no_column_has_a_gradient_of_nan_alone():
    """On a CPU the forward rejects it, but the halves may get one."""
    logits, labels = _case(5, 8)
    labels[:] = torch.tensor([1, 8, -100, -1, 7])
    given = torch.ones(5), logits, labels, logits.logsumexp(1)
    for impl in ("torch", "triton"):
        dlogits = cross_entropy_bwd(*given, label_smoothing=0.1, impl=impl)
        assert dlogits.isnan().all(1).tolist() == [False, True, False, True, False]
        assert dlogits.isnan().any(1).tolist() == [False, True, False, True, False]
        assert not dlogits[2].any()
