"""Tensor-parallel linear layers, embedding and loss equal plain torch on 1 to 4 ranks.

Each check makes the whole problem on every rank from the same seeds, runs the function under test
on this rank's shards and compares its shards of the output and of all gradients with plain torch in
float64. The planted faults run through the same checks and must fail them.
"""

from __future__ import annotations

import inspect
import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64
from ranks import run_ranks
from rules import over_group, rulecheck
from sharded import beside_replicas, draw, fused, noticed, on_first, world
from spmd_types import I, R, S
from spmd_types.rulecheck import RuleCheckError
from threads import run_threads

from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect
from warpweave.parallel import collectives, tensor

T, WIDE, NARROW = 12, 24, 7  # T and WIDE divide by 1, 2, 3 and 4
VOCAB, PADDED, E = (
    13,
    48,
    5,
)  # on 4 ranks of 12 columns: one whole, one with one column, two without any
RTOL = 1e-12


def own(x: torch.Tensor | None, dim: int, cut: bool = True) -> torch.Tensor | None:
    """This rank's slice (or, uncut, the whole) of `x` as a leaf of its own."""
    if x is None:
        return None
    _, rank, ranks = world()
    part = x.detach().chunk(ranks, dim)[rank] if cut else x.detach()
    return part.clone().requires_grad_(part.is_floating_point())


def leaf(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


def grads(y: torch.Tensor, dy: torch.Tensor, *inputs: torch.Tensor | None) -> list[torch.Tensor]:
    """Detached [y, gradients of the inputs that are there]."""
    before = [None if x is None else x.detach().clone() for x in inputs]
    y.backward(dy)
    for x, old in zip(inputs, before):
        assert x is None or torch.equal(x.detach(), old), "an input was written over"
    return [y.detach(), *(x.grad for x in inputs if x is not None)]


def summed(x: torch.Tensor) -> torch.Tensor:
    return collectives.reduce_from(x, world()[0])


def compare(results: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for actual, truth in zip(results, expected, strict=True):
        assert_close_f64(actual, truth, RTOL)


# ---------------------------------------------------------------- the checks


def check_column(
    column, *, sequence: bool = False, bias: bool = True, shape=(T, NARROW), **more
) -> list:
    x, w, b, dy = draw(1, *shape), draw(2, WIDE, shape[-1]), draw(3, WIDE) if bias else None, None
    dy = draw(4, *shape[:-1], WIDE)
    wx, ww, wb = leaf(x), leaf(w), None if b is None else leaf(b)
    truth = grads(F.linear(wx, ww, wb), dy, wx, ww, wb)
    x, w, b = own(x, 0, sequence), own(w, 0), own(b, 0)
    y = column(x, w, b, group=world()[0], sequence_parallel=sequence, **more)
    results = grads(y, own(dy, -1).detach(), x, w, b)
    cuts = [(-1, True), (0, sequence), (0, True), (0, True)]
    compare(results, [own(t, *cut) for t, cut in zip(truth, cuts)])
    return results


def check_row(row, *, sequence: bool = False, bias: bool = True, shape=(T, WIDE), **more) -> list:
    x, w, b = draw(1, *shape), draw(2, NARROW, shape[-1]), draw(3, NARROW) if bias else None
    dy = draw(4, *shape[:-1], NARROW)
    wx, ww, wb = leaf(x), leaf(w), None if b is None else leaf(b)
    truth = grads(F.linear(wx, ww, wb), dy, wx, ww, wb)
    x, w, b = own(x, -1), own(w, 1), own(b, 0, False)
    y = row(x, w, b, group=world()[0], sequence_parallel=sequence, **more)
    results = grads(y, own(dy, 0, sequence).detach(), x, w, b)
    if sequence and bias:
        results[-1] = summed(results[-1])  # documented: each rank's own tokens, the caller sums
    cuts = [(0, sequence), (-1, True), (1, True), (0, False)]
    compare(results, [own(t, *cut) for t, cut in zip(truth, cuts)])
    return results


def check_embedding(embedding, *, sequence: bool = False, padded: int | None = PADDED) -> list:
    _, _, ranks = world()
    size = padded or -(-VOCAB // ranks) * ranks
    table, dy = draw(1, size, E), draw(2, T, E)
    ids = torch.tensor([0, 12, 11, 12, 3, 0, 5, 6, 7, 12, 1, 9])
    whole = leaf(table)
    truth = grads(F.embedding(ids, whole), dy, whole)
    w = own(table, 0)
    y = embedding(
        ids,
        w,
        group=world()[0],
        vocab_size=VOCAB,
        sequence_parallel=sequence,
        padded_vocab_size=padded,
    )
    results = grads(y, own(dy, 0, sequence).detach(), w)
    compare(results, [own(truth[0], 0, sequence), own(truth[1], 0)])
    return results


def check_loss(loss, *, smoothing: float = 0.0, padded: int | None = PADDED, impl=None) -> list:
    _, _, ranks = world()
    size = padded or -(-VOCAB // ranks) * ranks
    z, dloss = draw(1, T, size) * 30, draw(2, T)
    z[:, VOCAB:] = 1e3  # padding that takes part in anything is seen at once
    labels = torch.tensor([0, 12, 11, -100, 3, 0, 5, 6, 7, 12, -100, 9])
    whole = leaf(z)
    kept = whole[:, :VOCAB]
    truth = F.cross_entropy(kept, labels, reduction="none", label_smoothing=smoothing)
    truth = grads(truth, dloss, whole)
    local = own(z, 1)
    losses = loss(
        local,
        labels,
        group=world()[0],
        vocab_size=VOCAB,
        label_smoothing=smoothing,
        padded_vocab_size=padded,
    )
    results = grads(losses, dloss, local)
    compare(results, [truth[0], own(truth[1], 1)])
    return results


# ---------------------------------------------------------------- right answers


LAYERS = [
    (check_column, tensor.column_parallel_linear),
    (check_row, tensor.row_parallel_linear),
]


def _no_tokens_and_many_dims(how: dict[str, object]) -> None:
    check_row(tensor.row_parallel_linear, shape=(0, WIDE), **how)
    check_column(tensor.column_parallel_linear, shape=(T, 2, NARROW), sequence=True, **how)
    check_row(tensor.row_parallel_linear, shape=(T, 2, WIDE), sequence=True, **how)


def _fused(rank: int) -> None:
    """What moves within the products, by kernels that share memory."""
    workspace = fused()
    for sequence, bias in itertools.product((False, True), repeat=2):
        for check, function in LAYERS:
            check(function, sequence=sequence, bias=bias, **workspace)
    _no_tokens_and_many_dims(workspace)


def _everything(rank: int) -> None:
    _, _, ranks = world()
    for sequence in (False, True):
        for bias in (False, True):
            for check, function in LAYERS:
                blocking, overlapped, _ = (
                    check(function, sequence=sequence, bias=bias, overlap=overlap)
                    for overlap in ("none", "bulk", "chunked")
                )
                assert all(torch.equal(a, b) for a, b in zip(blocking, overlapped, strict=True))
        for padded in (None, PADDED):
            check_embedding(tensor.vocab_parallel_embedding, sequence=sequence, padded=padded)
    check_column(tensor.column_parallel_linear, shape=(2, 5, NARROW))  # any leading dims
    check_row(tensor.row_parallel_linear, shape=(1, 3, WIDE))
    for how in ({}, {"overlap": "chunked"}):
        _no_tokens_and_many_dims(how)
    for padded in (None, PADDED):
        for smoothing in (0.0, 0.3):
            results = check_loss(
                tensor.vocab_parallel_cross_entropy, smoothing=smoothing, padded=padded
            )
            assert results[0][3] == results[0][10] == 0  # ignored
            assert results[1][[3, 10]].count_nonzero() == 0
            every = collectives.start_all_gather(results[0].unsqueeze(0), world()[0]).wait()
            assert torch.equal(every, results[0].expand(ranks, T)), (
                "losses differ between the ranks"
            )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_output_and_gradient_equals_plain_torch(ranks: int) -> None:
    run_threads(ranks, _everything)


def _within_products(rank: int) -> None:
    on_first(rank, (1, 2, 3, 4), _fused)
    on_first(rank, (1, 2), _fused_and_deferred)


def test_so_they_do_where_data_moves_within_the_products() -> None:
    run_ranks(4, _within_products)


def _beside(rank: int) -> None:
    for check in (_everything, _fused, _deferred, _fused_and_deferred):
        beside_replicas(rank, check)


def test_the_group_need_not_be_the_world() -> None:
    run_ranks(4, _beside)


def test_without_a_group_too() -> None:
    _everything(0)
    _fused(0)


def test_the_triton_loss_agrees() -> None:
    def loss(logits, labels, **options):
        return tensor.vocab_parallel_cross_entropy(logits, labels, impl="triton", **options)

    check_loss(loss, smoothing=0.3)


# ---------------------------------------------------------------- deferred weight gradients


def _deferred(rank: int) -> None:
    """With a collector, backward makes dx only; the store makes the same weight gradients."""
    _deferred_linear({})
    group, *_ = world()
    options = {"group": group, "vocab_size": VOCAB, "padded_vocab_size": PADDED}
    for sequence in (False, True):
        store, w = WeightGradients(), own(draw(1, PADDED, E), 0)
        ids = torch.arange(T)
        y = tensor.vocab_parallel_embedding(ids, w, sequence_parallel=sequence, **options)
        dy = draw(2, *y.shape)
        (expected,) = torch.autograd.grad(y, w, dy, retain_graph=True)
        with collect(store):
            y.backward(dy)
        store.run()
        assert torch.equal(w.grad, expected)


def _fused_and_deferred(rank: int) -> None:
    _deferred_linear(fused())


def _deferred_linear(how: dict[str, object]) -> None:
    group, _, ranks = world()
    for sequence in (False, True):
        for function, cut_x, cut_w, width in (
            (tensor.column_parallel_linear, 0, 0, NARROW),
            (tensor.row_parallel_linear, -1, 1, WIDE),
        ):
            for bias in (None, draw(3, WIDE // ranks if cut_w == 0 else NARROW)):
                outcomes = []
                for store in (None, WeightGradients()):
                    x = own(draw(1, T, width), cut_x, sequence or cut_x == -1)
                    w = own(draw(2, WIDE + NARROW - width, width), cut_w)
                    b = None if bias is None else leaf(bias)
                    y = function(x, w, b, group=group, sequence_parallel=sequence, **how)
                    if store is None:
                        y.backward(draw(4, *y.shape))
                    else:
                        with collect(store):
                            y.backward(draw(4, *y.shape))
                        assert w.grad is None
                        assert len(store) == 1 + (b is not None)
                        store.run()
                    outcomes.append([x.grad, w.grad] + ([] if b is None else [b.grad]))
                if how:  # dx is another product then, whose ranks add in another order
                    assert_close_f64(outcomes[1].pop(0), outcomes[0].pop(0), RTOL)
                assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_gradients_can_be_deferred(ranks: int) -> None:
    run_threads(ranks, _deferred)


def _functions(sequence: bool) -> list[tuple]:
    """(function of all leaves, leaves): each layer with weights, on this rank."""
    group, *_ = world()
    options = {"group": group, "sequence_parallel": sequence}
    words = options | {"vocab_size": VOCAB, "padded_vocab_size": PADDED}
    return [
        (
            lambda x, w, b: tensor.column_parallel_linear(x, w, b, **options),
            [own(draw(1, T, NARROW), 0, sequence), own(draw(2, WIDE, NARROW), 0),
             own(draw(3, WIDE), 0)],
        ),
        (
            lambda x, w, b: tensor.row_parallel_linear(x, w, b, **options),
            [own(draw(1, T, WIDE), -1), own(draw(2, NARROW, WIDE), 1), leaf(draw(3, NARROW))],
        ),
        (
            lambda w: tensor.vocab_parallel_embedding(torch.arange(T) % 5, w, **words),
            [own(draw(1, PADDED, E), 0)],
        ),
    ]  # fmt: skip


def _at_home(rank: int) -> None:
    """A step's first backward pass overwrites a home, whatever it held; the next ones add to it."""
    for sequence, within in itertools.product((False, True), (accumulate, collect)):
        for function, leaves in _functions(sequence):
            weights = leaves[1:] or leaves
            dy = draw(4, *function(*leaves).shape)
            expected = torch.autograd.grad(function(*leaves), weights, dy)
            homes = {w: torch.full_like(w, float("nan")) for w in weights}
            store = WeightGradients(homes)
            for times in (1, 2):
                with within(store):
                    function(*leaves).backward(dy)
                store.run()
                for w, gradient in zip(weights, expected, strict=True):
                    assert w.grad is homes[w]
                    assert_close_f64(w.grad, times * gradient, 1e-14)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_of_micro_batches_add_up_in_their_home(ranks: int) -> None:
    run_threads(ranks, _at_home)


def _frozen(rank: int) -> None:
    """Only what is wanted is made, and it is the same."""
    for sequence in (False, True):
        for function, leaves in _functions(sequence)[:2]:
            dy = draw(4, *function(*leaves).shape)
            expected = torch.autograd.grad(function(*leaves), leaves, dy)
            for wanted in itertools.product((False, True), repeat=3):
                if not any(wanted):
                    continue
                chosen = [leaf(t.detach()).requires_grad_(w) for t, w in zip(leaves, wanted)]
                function(*chosen).backward(dy)
                for t, want, gradient in zip(chosen, wanted, expected, strict=True):
                    assert (t.grad is not None) == want
                    assert not want or torch.equal(t.grad, gradient)


@pytest.mark.parametrize("ranks", [1, 2])
def test_frozen_parameters_cost_and_change_nothing(ranks: int) -> None:
    run_threads(ranks, _frozen)


def test_the_gradient_of_a_computed_weight_is_never_deferred() -> None:
    scale, v, x = leaf(draw(1, NARROW, 1)), draw(2, NARROW, E), draw(3, T, E)
    for function in (tensor.column_parallel_linear, tensor.row_parallel_linear):
        (expected,) = torch.autograd.grad(F.linear(x, scale * v).sum(), scale)
        store = WeightGradients()
        with collect(store):
            (got,) = torch.autograd.grad(function(x, scale * v, group=None).sum(), scale)
        assert not len(store)
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("n", "k"), [(5, 0), (0, 5)])
def test_a_linear_layer_without_features_is_that_of_torch(n: int, k: int) -> None:
    for function in (tensor.column_parallel_linear, tensor.row_parallel_linear):
        x, w, b = leaf(draw(1, 2, 3, k)), leaf(draw(2, n, k)), leaf(draw(3, n))
        results = []
        for y in (F.linear(x, w, b), function(x, w, b, group=None)):
            results.append((y, *torch.autograd.grad(y.sum(), (x, w, b))))
        assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


# ---------------------------------------------------------------- low precision (test_sums.py)


def test_autocast_computes_in_its_dtype_and_keeps_fp32_weights() -> None:
    x, w, b = (
        leaf(draw(1, T, NARROW).float()),
        leaf(draw(2, WIDE, NARROW).float()),
        leaf(draw(3, WIDE).float()),
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, w, b)
        for linear in (tensor.column_parallel_linear, tensor.row_parallel_linear):
            y = linear(x, w, b, group=None)
            assert y.dtype == torch.bfloat16
            assert torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad.dtype == w.grad.dtype == b.grad.dtype == torch.float32
    assert_close_f64(w.grad, x.detach().bfloat16().float().sum(0).expand(WIDE, -1), 1e-6)
    for function, leaves in _functions(False):  # float64 is asked for, not left over
        expected = function(*leaves)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(function(*leaves), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by dynamo, of any Function
def test_compiles_whole_without_a_group() -> None:
    ids, table, w, b = torch.arange(T), draw(1, VOCAB, E), draw(2, E, E), draw(3, E)
    labels = ids.flip(0)

    def model(table, w, b):
        x = tensor.vocab_parallel_embedding(ids, table, group=None, vocab_size=VOCAB)
        x = tensor.column_parallel_linear(x, w, b, group=None)
        x = tensor.row_parallel_linear(x.tanh(), w, b, group=None)
        return tensor.vocab_parallel_cross_entropy(
            x @ table.t(), labels, group=None, vocab_size=VOCAB
        )

    outcomes = []
    for fn in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        leaves = leaf(table), leaf(w), leaf(b)
        losses = fn(*leaves)
        losses.sum().backward()
        outcomes.append([losses.detach(), *(x.grad for x in leaves)])
    compare(*outcomes)


# ---------------------------------------------------------------- errors come before any launch


def test_errors_name_the_constraint_and_the_values() -> None:
    x, w, b = draw(1, 4, 6), draw(2, 5, 6), draw(3, 5)
    for linear in (tensor.column_parallel_linear, tensor.row_parallel_linear):
        with pytest.raises(ValueError, match=r"rank 0: x\(4, 5\) and weight\(5, 6\)"):
            linear(x[:, :5], w, group=None)
        with pytest.raises(ValueError, match=r"bias\(4,\) does not fit weight\(5, 6\)"):
            linear(x, w, b[:4], group=None)
        with pytest.raises(ValueError, match=r"x torch.float32, weight torch.float64"):
            linear(x.float(), w, b, group=None)
    ids = torch.tensor([0, VOCAB])
    with pytest.raises(ValueError, match="14 rows on each of 1 tensor ranks are not the 13"):
        tensor.vocab_parallel_embedding(ids, draw(1, 14, E), group=None, vocab_size=VOCAB)
    with pytest.raises(RuntimeError, match=r"an id lies outside \[0, 13\)"):
        tensor.vocab_parallel_embedding(ids, draw(1, VOCAB, E), group=None, vocab_size=VOCAB)
    loss = tensor.vocab_parallel_cross_entropy
    with pytest.raises(ValueError, match=r"label_smoothing must lie in \[0, 1\), got 1.5"):
        loss(draw(1, 2, VOCAB), ids, group=None, vocab_size=VOCAB, label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"got \(2, 13\) and \(1,\)"):
        loss(draw(1, 2, VOCAB), ids[:1], group=None, vocab_size=VOCAB)
    with pytest.raises(ValueError, match="13"):
        loss(draw(1, 2, VOCAB), ids, group=None, vocab_size=VOCAB)


def _refused(rank: int) -> None:
    """None of these may start a collective: the ranks would wait for each other."""
    group, _, ranks = world()
    labels = torch.zeros(T, dtype=torch.int64)
    for padded in (None, PADDED):  # logits that were gathered already: loss + log(R) if accepted
        size = padded or -(-VOCAB // ranks) * ranks
        with pytest.raises(
            ValueError, match=rf"rank {rank}: {size} logits columns on each of {ranks}"
        ):
            tensor.vocab_parallel_cross_entropy(
                draw(1, T, size), labels, group=group, vocab_size=VOCAB, padded_vocab_size=padded
            )
    with pytest.raises(ValueError, match=rf"rank {rank}: 11 tokens .* divisible by the {ranks}"):
        tensor.row_parallel_linear(
            draw(1, 11, 4), draw(2, 3, 4), group=group, sequence_parallel=True
        )
    with pytest.raises(
        ValueError, match=rf"T divisible by the {ranks} tensor ranks, got ids\(11,\)"
    ):
        tensor.vocab_parallel_embedding(
            labels[:11],
            draw(1, PADDED // ranks, E),
            group=group,
            vocab_size=VOCAB,
            padded_vocab_size=PADDED,
            sequence_parallel=True,
        )


def test_gathered_logits_and_uneven_tokens_are_refused() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- planted faults


def bias_on_every_rank(x, w, b, *, group, sequence_parallel):
    sums = collectives.reduce_scatter if sequence_parallel else collectives.reduce_from
    return sums(F.linear(x, w, b), group)


def no_sum_of_the_output(x, w, b, *, group, sequence_parallel):
    y = F.linear(x, w, b)
    return collectives.own_slice(y, group) if sequence_parallel else y


def no_sum_of_the_input_gradient(x, w, b, *, group, sequence_parallel):
    whole = collectives.gather(x, group) if sequence_parallel else x
    return F.linear(whole, w, b)


def no_gather_of_the_input(x, w, b, *, group, sequence_parallel):
    _, _, ranks = world()
    return F.linear(x.repeat(ranks, 1) if sequence_parallel else x, w, b)


def no_sum_of_the_rows(ids, w, *, group, vocab_size, sequence_parallel, padded_vocab_size):
    local, elsewhere = tensor.embedding._local_ids(ids, w.shape[0], group)
    y = F.embedding(local, w).masked_fill(elsewhere.unsqueeze(-1), 0)
    return collectives.own_slice(y, group) if sequence_parallel else y


def foreign_ids_hit_row_zero(ids, w, *, group, vocab_size, sequence_parallel, padded_vocab_size):
    local, _ = tensor.embedding._local_ids(ids, w.shape[0], group)
    sums = collectives.reduce_scatter if sequence_parallel else collectives.reduce_from
    return sums(F.embedding(local, w), group)


def smoothing_over_the_local_vocabulary(logits, labels, **options):
    def local(self, stats, labels):
        return right(self._replace(size=logits.shape[1]), stats, labels)

    right = Vocabulary.losses
    with mock.patch.object(Vocabulary, "losses", local):
        return tensor.vocab_parallel_cross_entropy(logits, labels, **options)


def padding_in_the_softmax(logits, labels, *, vocab_size, padded_vocab_size, **options):
    return tensor.vocab_parallel_cross_entropy(
        logits, labels, vocab_size=padded_vocab_size, **options
    )


def no_merge_of_the_maxima(logits, labels, **options):
    with mock.patch.object(tensor.ranks.TensorRanks, "merge", lambda ranks, stats: stats):
        return tensor.vocab_parallel_cross_entropy(logits, labels, **options)


FAULTS = [
    (check_column, no_sum_of_the_input_gradient, (False, True)),
    (check_column, no_gather_of_the_input, (True,)),
    (check_row, bias_on_every_rank, (False, True)),
    (check_row, no_sum_of_the_output, (False, True)),
    (check_embedding, no_sum_of_the_rows, (False, True)),
    (check_embedding, foreign_ids_hit_row_zero, (False, True)),
    (check_loss, smoothing_over_the_local_vocabulary, ()),
    (check_loss, padding_in_the_softmax, ()),
    (check_loss, no_merge_of_the_maxima, ()),
]


def _planted(rank: int) -> None:
    for check, fault, sequences in FAULTS:
        for options in [{"sequence": s} for s in sequences] or [{"smoothing": 0.3}]:
            where = noticed(check, fault, **options)  # not everywhere: rank 0 holds row zero
            assert where > 0, f"{fault.__name__} {options} was not noticed on any rank"


def test_planted_faults_are_noticed() -> None:
    run_ranks(2, _planted)


# ---------------------------------------------------------------- typing rules

IDS = torch.tensor([0, 3, 2, 1, 4, 2])
VOCABULARY = Vocabulary(0, 7, -100, 0.1, 0.0, "torch")
RANKED = (
    tensor.linear._ColumnParallelLinear,
    tensor.linear._RowParallelLinear,
    tensor.loss.CrossEntropy,
)
COLUMN, ROW, LOSS = map(over_group, RANKED)
CASES = {
    "column": (
        COLUMN,
        (draw(1, 6, 4), draw(2, 10, 4), draw(3, 10), torch.float64, "tp", False),
        {"x": I, "weight": S(0), "bias": S(0)},
    ),
    "column, sequence": (
        COLUMN,
        (draw(1, 6, 4), draw(2, 10, 4), draw(3, 10), torch.float64, "tp", True),
        {"x": S(0), "weight": S(0), "bias": S(0)},
    ),
    "row": (
        ROW,
        (draw(1, 6, 4), draw(2, 10, 4), draw(3, 10), torch.float64, "tp", False),
        {"x": S(1), "weight": S(1), "bias": I},
    ),
    "row, sequence": (
        ROW,
        (draw(1, 6, 4), draw(2, 10, 4), draw(3, 10), torch.float64, "tp", True),
        {"x": S(1), "weight": S(1), "bias": R},
    ),
    "embedding": (
        tensor.embedding._VocabParallelEmbedding,
        (IDS, draw(1, 8, 5), "tp", 7, False),
        {"ids": R, "weight": S(0)},
    ),
    "embedding, sequence": (
        tensor.embedding._VocabParallelEmbedding,
        (IDS, draw(1, 8, 5), "tp", 7, True),
        {"ids": R, "weight": S(0)},
    ),
    "loss": (
        LOSS,
        (draw(1, 6, 8), IDS, VOCABULARY, "tp", False),
        {"logits": S(1), "labels": R},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_typing_rules_hold_numerically(name: str) -> None:
    """The documented types are accepted and the derived type is true; so is all else accepted."""
    function, args, documented = CASES[name]
    rulecheck(function, args, {k: {"tp": v} for k, v in documented.items()}, mesh={"tp": 2})
    # Without the bias, because placements that mix S with I are not enumerated.
    args = [None if tuple(getattr(a, "shape", ())) == (10,) else a for a in args]
    report = rulecheck(function, args)
    assert report.checked
    assert report.rejected


def test_typing_rules_hold_on_a_mesh_of_two_axes() -> None:
    function, args, documented = CASES["row, sequence"]
    placements = {k: {"dp": R, "tp": v} for k, v in documented.items()}
    placements["x"]["dp"] = S(0)
    args = (draw(1, 12, 6), draw(2, 10, 6), *args[2:])
    rulecheck(function, args, placements, mesh={"dp": 2, "tp": 3})


def test_every_function_has_a_rule() -> None:
    functions = {
        f
        for module in (tensor.linear, tensor.embedding, tensor.loss)
        for _, f in inspect.getmembers(module, inspect.isclass)
        if issubclass(f, torch.autograd.Function)
    }
    cases = {function for function, _, _ in CASES.values()}
    assert functions == cases - {COLUMN, ROW, LOSS} | {*RANKED}


class _BiasOnEveryRank(tensor.linear._RowParallelLinear):
    @staticmethod
    def forward(ctx, x, weight, bias, dtype, ranks):
        return ranks.start_sum(F.linear(x, weight, bias)).wait()


def test_a_planted_fault_breaks_the_rule() -> None:
    _, args, documented = CASES["row"]
    with pytest.raises(RuleCheckError, match="differs from the reference"):
        rulecheck(
            over_group(_BiasOnEveryRank),
            args,
            {k: {"tp": v} for k, v in documented.items()},
            mesh={"tp": 2},
        )


def test_a_norm_of_cut_features_is_on_one_rank_the_plain_one() -> None:
    x, w = torch.randn(3, 7, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    wanted = torch.nn.functional.rms_norm(x, (7,), w, 1e-5)
    assert_close_f64(tensor.cut_rms_norm(x, w, 1e-5, group=None), wanted, 1e-14)
    assert tensor.cut_rms_norm(x.half(), w.half(), group=None).dtype == torch.float16
    with pytest.raises(ValueError, match=r"weight\[6\] does not fit x\[3, 7\]"):
        tensor.cut_rms_norm(x, w[:6], group=None)
