"""The vocab-parallel linear cross entropy equals plain torch on 1 to 4 ranks, both ways it works.

Each check makes the whole problem on every rank and compares this rank's part of the loss and of
both gradients with plain torch in float64. Blocks are made so small that there are many.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64
from ranks import run_ranks
from rules import over_group, rulecheck
from sharded import draw, fused, noticed, on_first, world
from spmd_types import I, R, S
from spmd_types.rulecheck import RuleCheckError
from threads import run_threads

from warpweave.kernels.cross_entropy import blocks, in_forward, linear
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect
from warpweave.layers.loss import VocabParallelLinearCrossEntropy
from warpweave.parallel import collectives, tensor
from warpweave.parallel.collectives import Pending
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.tensor import linear_loss
from warpweave.parallel.tensor.linear_loss import vocab_parallel_linear_cross_entropy
from warpweave.parallel.tensor.ranks import TensorRanks

T, E, VOCAB, PADDED = 12, 5, 301, 1200  # 4 ranks of 300: one whole, one of one row, two of padding
RTOL = 1e-12
SMALL = blocks.Sizes(elements=512, most_rows=4, fewest_rows=5)  # 3 x 3 blocks, or 3 of whole rows


def labels() -> torch.Tensor:
    return torch.tensor([0, 300, 299, -100, 3, 0, 5, 6, 7, 300, -100, 9])


def problem(sequence: bool, padded: int, dtype: torch.dtype = torch.float64):
    """(x, weight, labels) of this rank, and the whole x and weight."""
    _, rank, ranks = world()
    x, w = draw(1, T, E) * 2, draw(2, padded, E) * 2
    w[VOCAB:] = 1e3  # padding that takes part in anything is seen at once
    x, w = x.to(dtype), w.to(dtype)
    own = x.chunk(ranks)[rank] if sequence else x
    part = w.chunk(ranks)[rank]
    return own.clone().requires_grad_(), part.clone().requires_grad_(), x, w


def truth(x, w, reduction, dloss, smoothing, z_loss, softcap=None):
    """[loss, dx, dw] of the whole problem by plain torch."""
    x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    z = x @ w[:VOCAB].t()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    losses = F.cross_entropy(z, labels(), reduction="none", label_smoothing=smoothing)
    losses = losses + (z_loss * z.logsumexp(1).square()).masked_fill(labels() == -100, 0)
    loss = losses if reduction == "none" else losses.sum()
    return [loss.detach(), *torch.autograd.grad(loss, (x, w), dloss)]


def check(
    loss=vocab_parallel_linear_cross_entropy,
    *,
    sequence: bool = False,
    recompute: bool = True,
    reduction: str = "sum",
    padded: int | None = PADDED,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    store: WeightGradients | None = None,
    within=accumulate,
    impl: str | None = None,
    **overlapped,
) -> list[torch.Tensor]:
    group, rank, ranks = world()
    size = padded or -(-VOCAB // ranks) * ranks
    own, part, x, w = problem(sequence, size)
    dloss = draw(3, T) if reduction == "none" else torch.tensor(0.7, dtype=torch.float64)
    with mock.patch.object(blocks, "CPU", SMALL):
        result = loss(
            own,
            part,
            labels(),
            group=group,
            vocab_size=VOCAB,
            sequence_parallel=sequence,
            reduction=reduction,
            recompute=recompute,
            label_smoothing=smoothing,
            z_loss=z_loss,
            padded_vocab_size=padded,
            impl=impl,
            **overlapped,
        )
        if store is None:
            result.backward(dloss)
        else:
            with within(store):
                result.backward(dloss)
            store.run()
    cap = overlapped.get("softcap")
    expected = truth(x, w, reduction, dloss, smoothing, z_loss, cap)
    results = [result.detach(), own.grad, part.grad]
    expected[1] = expected[1].chunk(ranks)[rank] if sequence else expected[1]
    expected[2] = expected[2].chunk(ranks)[rank]
    for ours, theirs in zip(results, expected, strict=True):
        assert ours.dtype == torch.float64
        assert_close_f64(ours, theirs, RTOL)
    first = rank * len(part)
    assert part.grad[max(0, VOCAB - first) :].count_nonzero() == 0
    if not sequence:
        assert own.grad[[3, 10]].count_nonzero() == 0  # ignored
    return results


def on_small_blocks(ranks: int, fn: Callable[[int], None]) -> None:
    """`fn` on threads, which have one size of blocks."""
    with mock.patch.object(blocks, "CPU", SMALL):
        run_threads(ranks, fn)


WAYS = [(True, "none"), (True, "sum"), (False, "sum")]


def unfused(x, w, labels, *, group, sequence_parallel, reduction, recompute, vocab_size, **options):
    """The same from its two parts, which hold the logits."""
    z = tensor.column_parallel_linear(x, w, group=group, sequence_parallel=sequence_parallel)
    losses = tensor.vocab_parallel_cross_entropy(
        z, labels, group=group, vocab_size=vocab_size, **options
    )
    return losses if reduction == "none" else losses.sum()


def several_dims(x, w, labels, **options):
    """The same of tokens that have two dims, the first of which is cut."""
    inner = 3 if len(x) % 3 == 0 else 2
    x, labels = (t.unflatten(0, (-1, inner)) for t in (x, labels))
    losses = vocab_parallel_linear_cross_entropy(x, w, labels, **options)
    if options["reduction"] == "none":
        assert losses.shape == labels.shape
        return losses.flatten()
    return losses


def _everything(rank: int) -> None:
    group, _, ranks = world()
    for sequence in (False, True):
        for recompute, reduction in WAYS:
            for padded, smoothing, z_loss in ((None, 0.0, 0.0), (PADDED, 0.3, 0.1)):
                options = {"sequence": sequence, "recompute": recompute, "reduction": reduction}
                loss, *_ = check(**options, padded=padded, smoothing=smoothing, z_loss=z_loss)
                for same in (unfused, several_dims):
                    check(same, **options, padded=padded, smoothing=smoothing, z_loss=z_loss)
                every = collectives.start_all_gather(loss.reshape(1, -1), group).wait()
                assert torch.equal(every, loss.reshape(1, -1).expand(ranks, -1))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_losses_and_gradients_equal_plain_torch(ranks: int) -> None:
    on_small_blocks(ranks, _everything)


def _capped(rank: int) -> None:
    for sequence, reduction in itertools.product((False, True), ("none", "sum")):
        options = {"sequence": sequence, "reduction": reduction, "softcap": 3.0}
        check(**options)
        check(several_dims, **options, padded=None, smoothing=0.3, z_loss=0.1)
        check(**options, overlap="chunked")


def _not_that_cap(rank: int) -> None:
    with pytest.raises(AssertionError, match="relative error"):
        check(lambda *args, softcap, **more: vocab_parallel_linear_cross_entropy(
            *args, softcap=softcap + 0.01, **more), softcap=3.0)  # fmt: skip
    with pytest.raises(ValueError, match=r"softcap must be positive or None, got 0.0"):
        check(softcap=0.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_may_have_a_softcap(ranks: int) -> None:
    for most in ((2, 2**26), (1024, 600), (1024, 2**26)):  # 600 logits are two rows of one rank
        with mock.patch.object(linear_loss, "CAPPED", most):
            on_small_blocks(ranks, _capped)
    on_small_blocks(ranks, _not_that_cap)


def _overlapped(rank: int) -> None:
    """Whatever hides what; the typing rule is that of all of them, as they inherit it."""
    for overlap in ("none", "chunked"):
        _one_way(overlap=overlap)


def _one_way(**options) -> None:
    for sequence in (False, True):
        for recompute, reduction in WAYS:
            given = options | {"recompute": recompute, "reduction": reduction}
            for terms in ({"padded": None}, {"smoothing": 0.3, "z_loss": 0.1}):
                check(sequence=sequence, **given, **terms)


def _fused(rank: int) -> None:
    """What moves within the products, by kernels that share memory."""
    options = fused() | {"impl": "triton"}
    _one_way(**options)
    # rows of two blocks of columns, of which one gathers, and of one
    wide = blocks.Sizes(elements=150 * T, most_rows=T, fewest_rows=T)
    with mock.patch(f"{__name__}.SMALL", wide):
        for recompute in (True, False):
            check(sequence=True, recompute=recompute, smoothing=0.3, **options)


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_overlap_equals_plain_torch(ranks: int) -> None:
    on_small_blocks(ranks, _overlapped)


def test_so_does_what_moves_within_the_products() -> None:
    run_ranks(3, on_first, (1, 3), _fused)


def _layer(rank: int) -> None:
    """The layer hands its mesh's workspace down, and is not made where nothing can be fused."""
    mesh = Mesh(tp=2).connect()
    options = {"mesh": mesh, "sequence_parallel": True, "overlap": "fused"}
    layer = VocabParallelLinearCrossEntropy(VOCAB, impl="triton", **options)
    own, part, x, w = problem(True, 302)
    loss = layer(own, part, labels(), 17)
    assert_close_f64(loss, truth(x, w, "sum", torch.tensor(1.0), 0.0, 0.0)[0] / 17, RTOL)
    assert mesh.workspace("tp")._memory.epoch.item() == 1
    with pytest.raises(ValueError, match="pass impl='triton', or another overlap"):
        VocabParallelLinearCrossEntropy(VOCAB, impl="torch", **options)
    with pytest.raises(ValueError, match="one of none, bulk, chunked, fused, got 'fast'"):
        VocabParallelLinearCrossEntropy(VOCAB, overlap="fast")


def test_the_layer_shares_the_meshs_workspace() -> None:
    run_ranks(2, _layer)


# ---------------------------------------------------------------- what is moved, and when


def _moves(overlap: str, recompute: bool) -> tuple[str, int]:
    """(what a forward on 2 ranks that cut the tokens does, the bytes that collectives bring):
    (g)ather of x begun, it is (w)aited for, a product, (l)ogits or (d)z, (s)um of dx begun."""
    events, brought, (group, _, ranks) = [], [], world()

    def noted(start: Callable, event: str) -> Callable:
        def begin(x, *rest):
            brought.append(x.nbytes * (ranks - 1) // (ranks if event == "s" else 1))
            pending = start(x, *rest)
            if x.dim() != 2 or x.shape[1] != E:  # statistics
                return pending
            events.append(event)
            return Pending(None, lambda: (events.append("w"), pending.wait())[1])

        return begin

    def told(op: Callable, event: str) -> Callable:
        return lambda *arguments: (events.append(event), op(*arguments))[1]

    gather, reduce = collectives.start_all_gather, collectives.start_reduce_scatter
    with ExitStack() as patches:
        for module, name, instead in (
            (tensor.ranks, "start_all_gather", noted(gather, "g")),
            (tensor.ranks, "start_reduce_scatter", noted(reduce, "s")),
            (tensor.chunked, "start_exchange", noted(tensor.chunked.start_exchange, "g")),
            (in_forward, "_rows_fwd_op", told(in_forward._rows_fwd_op, "l")),
            (in_forward, "_rows_bwd_op", told(in_forward._rows_bwd_op, "d")),
            (linear, "linear_cross_entropy_fwd", told(linear.linear_cross_entropy_fwd, "l")),
        ):
            patches.enter_context(mock.patch.object(module, name, instead))
        own, part, *_ = problem(True, 302)
        vocab_parallel_linear_cross_entropy(
            own, part, labels(), group=group, vocab_size=VOCAB, sequence_parallel=True,
            recompute=recompute, overlap=overlap,
        )  # fmt: skip
    return "".join(events), sum(brought)


def _moved(rank: int) -> None:
    whole = 8 * E * T // 2  # what a rank has not of x, and is sent of dx
    stats = 8 * 2 * T
    assert _moves("none", True) == ("gwl", whole + stats)
    assert _moves("chunked", True) == ("glwl", whole + stats)
    assert _moves("none", False) == ("gwldsw", 2 * whole + stats)
    assert _moves("chunked", False) == ("gwgldswldsww", 2 * whole + stats)


def test_a_piece_is_on_its_way_under_another_and_no_more_is_moved() -> None:
    run_ranks(2, _moved)


def test_without_a_group_too() -> None:
    for recompute, reduction in WAYS:
        check(recompute=recompute, reduction=reduction, padded=None, smoothing=0.3, z_loss=0.1)


def _triton(rank: int) -> None:
    for recompute in (True, False):
        check(recompute=recompute, smoothing=0.3, z_loss=0.1, impl="triton")


def _frozen(rank: int) -> None:
    """Only what is wanted is made, and it is the same."""
    group, *_ = world()
    for sequence, (recompute, reduction) in itertools.product((False, True), WAYS):
        own, part, *_ = problem(sequence, PADDED)
        options = {"sequence_parallel": sequence, "recompute": recompute, "reduction": reduction}

        def grads(x, weight, options=options):
            losses = vocab_parallel_linear_cross_entropy(
                x, weight, labels(), group=group, vocab_size=VOCAB,
                padded_vocab_size=PADDED, **options,
            )  # fmt: skip
            losses.sum().backward()
            return x.grad, weight.grad

        dx, dw = (g.clone() for g in grads(own, part))
        own.grad = part.grad = None
        for alone, other, expected in ((own, part, dx), (part, own, dw)):
            other.requires_grad_(False)
            found, none = grads(own, part) if alone is own else grads(own, part)[::-1]
            assert none is None
            assert_close_f64(found, expected, RTOL)
            other.requires_grad_()
            own.grad = part.grad = None


def test_a_frozen_head_passes_its_gradient_on_and_a_frozen_input_trains_the_head() -> None:
    run_threads(2, _frozen)


def test_the_triton_kernels_agree() -> None:
    on_small_blocks(2, _triton)


# ---------------------------------------------------------------- weight gradients


def _deferred(rank: int) -> None:
    """What a store collects or accumulates is what autograd would have got."""
    for sequence in (False, True):
        for recompute in (True, False):
            options = {"sequence": sequence, "recompute": recompute}
            direct = check(**options)
            for within in (collect, accumulate):
                later = check(**options, store=WeightGradients(), within=within)
                assert all(torch.equal(a, b) for a, b in zip(direct, later, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_gradients_can_be_deferred(ranks: int) -> None:
    on_small_blocks(ranks, _deferred)


def _added(rank: int) -> None:
    """A second backward pass adds to the home of the first, now or later."""
    group, _, _ = world()
    own, part, _, _ = problem(False, PADDED)
    for recompute in (True, False):
        results = []
        for within in (None, accumulate, collect):
            part.grad, home = None, torch.full_like(part, float("nan"))
            store = WeightGradients({part: home})
            for scale in (1.0, 3.0):
                with mock.patch.object(blocks, "CPU", SMALL):
                    loss = vocab_parallel_linear_cross_entropy(
                        own,
                        part,
                        labels(),
                        group=group,
                        vocab_size=VOCAB,
                        padded_vocab_size=PADDED,
                        recompute=recompute,
                    )
                    if within is None:
                        (loss * scale).backward()
                        continue
                    with within(store):
                        (loss * scale).backward()
                    assert len(store) == (within is collect and not recompute)
                    store.run()
                    assert part.grad is home
            results.append(part.grad.clone())
        assert_close_f64(results[1], results[0], 1e-14)
        assert torch.equal(results[1], results[2])


def test_gradients_of_micro_batches_add_up_in_their_home() -> None:
    on_small_blocks(2, _added)


# ---------------------------------------------------------------- errors come before any launch


def _refused(rank: int) -> None:
    """None of these may start a collective: the ranks would wait for each other."""
    group, _, ranks = world()
    own, part, x, w = problem(False, PADDED)
    options = {"group": group, "vocab_size": VOCAB, "padded_vocab_size": PADDED}
    for arguments, more, words in (
        ((x, w, labels()), {}, rf"rank {rank}: 1200 weight rows on each of {ranks}"),
        ((x, part, labels()[:3]), {}, r"labels int64\[12\], got torch.int64 \[3\]"),
        ((x[:6], part, labels()), {}, r"labels int64\[6\], got torch.int64 \[12\]"),
        ((x, part, labels()), {"sequence_parallel": True}, r"labels int64\[24\]"),
        ((x[:, :4], part, labels()), {}, r"got \[12, 4\] and \[600, 5\]"),
        ((x.float(), part, labels()), {}, "x torch.float32, weight torch.float64"),
        ((x, part, labels()), {"reduction": "mean"}, "no rank knows all tokens"),
        ((x, part, labels()), {"reduction": "none", "recompute": False}, "one gradient for all"),
        ((x, part, labels()), {"z_loss": -1.0}, "z_loss must be finite and not negative, got -1"),
        ((x, part, labels()), {"label_smoothing": 1.5}, r"must be in \[0, 1\], got 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            vocab_parallel_linear_cross_entropy(*arguments, **(options | more))
    with pytest.raises(ValueError, match=rf"rank {rank}: z_loss must not be negative, got -1.0"):
        tensor.vocab_parallel_cross_entropy(x @ part.t(), labels(), z_loss=-1.0, **options)
    wrong = labels().clamp(min=1000)
    for recompute in (True, False):  # a label is looked at on every rank, before they talk
        with pytest.raises(ValueError, match=r"labels must be in \[0, 301\) or -100, got 1000"):
            vocab_parallel_linear_cross_entropy(own, part, wrong, recompute=recompute, **options)


def test_what_does_not_fit_is_refused() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- planted faults


def _plant(name: str, value) -> mock._patch:
    return mock.patch.object(TensorRanks, name, value)


def _no_sum_of_dx():
    def own_terms(ranks, dx):
        return collectives.own_slice(dx, ranks.group) if ranks.sequence_parallel else dx

    return _plant("sum", own_terms)


def _no_merge():
    return _plant("merge", lambda ranks, stats: stats)


def _merge_of_the_maximum():
    right = TensorRanks.merge

    def merge(ranks, stats):
        return torch.cat((stats[:1], right(ranks, stats)[1:]))

    return _plant("merge", merge)


def _everybody_is_the_first_shard():
    return _plant("first_column", lambda ranks, width: 0)


def _padding_takes_part():
    right = linear_loss.Vocabulary

    def vocabulary(start, size, *rest):
        return right(start, PADDED, *rest)

    return mock.patch.object(linear_loss, "Vocabulary", vocabulary)


FAULTS = [
    _no_sum_of_dx,
    _no_merge,
    _merge_of_the_maximum,
    _everybody_is_the_first_shard,
    _padding_takes_part,
]


def _planted(rank: int) -> None:
    for fault in FAULTS:
        for sequence in (False, True):
            for recompute in (True, False):
                options = {"sequence": sequence, "recompute": recompute}
                with fault():
                    where = noticed(check, **options, smoothing=0.3)
                assert where > 0, f"{fault.__name__} {options} was not noticed on any rank"


def test_planted_faults_are_noticed() -> None:
    run_ranks(2, _planted)


# ---------------------------------------------------------------- typing rules

VOCABULARY = Vocabulary(0, 7, -100, 0.1, 0.01, "torch")
FUNCTIONS = [linear._Recomputed, linear._InForward]


def _case(function: type, sequence: bool):
    """(function, arguments, documented types)."""
    ids = torch.tensor([0, 3, 2, 1, 4, 2, -100, 6])  # as many as rows of the weight: only dims of
    args = draw(1, 8, 4), draw(2, 8, 4), ids  # one size are cut together where all is tried
    args = *args, VOCABULARY, torch.float64, "tp", sequence
    function = over_group(function)
    return function, args, {"x": S(0) if sequence else I, "weight": S(0), "labels": R}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_typing_rules_hold_numerically(function: type, sequence: bool) -> None:
    """The documented types are accepted and the derived type is true; so is all else accepted."""
    function, args, documented = _case(function, sequence)
    rulecheck(function, args, {k: {"tp": v} for k, v in documented.items()}, mesh={"tp": 2})
    report = rulecheck(function, args)
    assert report.rejected


@pytest.mark.parametrize("function", FUNCTIONS)
def test_typing_rules_hold_where_another_axis_cuts_tokens(function: type) -> None:
    function, args, documented = _case(function, False)
    placements = {k: {"cp": R, "tp": v} for k, v in documented.items()}
    placements["x"]["cp"] = placements["labels"]["cp"] = S(0)
    rulecheck(function, args, placements, mesh={"cp": 2, "tp": 2})


def test_every_function_has_a_rule() -> None:
    functions = [
        f
        for _, f in inspect.getmembers(linear, inspect.isclass)
        if issubclass(f, torch.autograd.Function)
    ]
    assert set(functions) == set(FUNCTIONS)


def test_a_planted_fault_breaks_the_rule() -> None:
    with _no_merge():
        function, args, documented = _case(linear._Recomputed, False)
        with pytest.raises(RuleCheckError, match="hold different values"):
            rulecheck(function, args, {k: {"tp": v} for k, v in documented.items()}, mesh={"tp": 2})
