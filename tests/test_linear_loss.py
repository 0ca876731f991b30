"""The vocab-parallel linear cross entropy: softcap, times of messages, rejected arguments, typing
rules.

`test_sharded_ops.py` tests that it equals plain torch, in both orders of work.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch
from close import assert_close_f64
from ranks import run_ranks
from refused import check
from rules import over_group, rulecheck
from sharded import RTOL, Given, agrees, draw, fused, on_first, world
from sharded_ops import (
    HEAD,
    HEAD_LABELS,
    HEAD_PADDED,
    LINEAR_LOSS,
    WIDTH,
    T,
    head_loss,
    small_blocks,
)
from spmd_types import I, R, S
from spmd_types.rulecheck import RuleCheckError
from threads import run_threads

from warpweave.kernels.cross_entropy import blocks, in_forward, linear
from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.layers.loss import VocabParallelLinearCrossEntropy
from warpweave.parallel import collectives, tensor
from warpweave.parallel.collectives import Pending
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.tensor import linear_loss
from warpweave.parallel.tensor.linear_loss import vocab_parallel_linear_cross_entropy
from warpweave.parallel.tensor.ranks import TensorRanks

VOCAB, PADDED, E = HEAD, HEAD_PADDED, WIDTH


def problem(sequence: bool, padded: int, dtype: torch.dtype = torch.float64):
    """Return (x, weight, labels) of this rank, and the whole x and weight."""
    _, rank, ranks = world()
    x, w = draw(1, T, E) * 2, draw(2, padded, E) * 2
    w[VOCAB:] = 1e3  # padding that takes part in a result is noticed at once
    x, w = x.to(dtype), w.to(dtype)
    own = x.chunk(ranks)[rank] if sequence else x
    part = w.chunk(ranks)[rank]
    return own.clone().requires_grad_(), part.clone().requires_grad_(), x, w


def _capped(rank: int) -> None:
    op = LINEAR_LOSS
    for sequence, reduction in itertools.product((False, True), ("none", "sum")):
        shape = {"reduction": reduction, "softcap": 3.0}
        agrees(op, Given(shape), sequence)
        terms = {"padded": None, "smoothing": 0.3, "z_loss": 0.1}
        agrees(op, Given(shape | terms, {"many_dims": True}), sequence)
        agrees(op, Given(shape, {"overlap": "chunked"}), sequence)


def _not_that_cap(rank: int) -> None:
    def loss(*args, softcap, **more):
        return vocab_parallel_linear_cross_entropy(*args, softcap=softcap + 0.01, **more)

    with pytest.raises(AssertionError, match="relative error"):
        agrees(LINEAR_LOSS, Given({"softcap": 3.0}, {"loss": loss}), False)
    own, part, *_ = problem(False, PADDED)
    with pytest.raises(ValueError, match=r"softcap must be positive or None, got 0.0"):
        head_loss(own, part, softcap=0.0, group=world()[0], sequence_parallel=False)


def _capped_as_told(rank: int) -> None:
    """Test that every argument reaches the product or the loss of its logits,
    with and without a softcap."""
    (own, part, *_), seen = problem(True, PADDED), []
    group = world()[0]

    def told(op: Callable) -> Callable:
        return lambda *args, **options: (seen.append(options), op(*args, **options))[1]

    of_loss = {"ignore_index": -7, "label_smoothing": 0.25, "z_loss": 0.5, "impl": "triton",
               "padded_vocab_size": PADDED, "vocab_size": VOCAB}  # fmt: skip
    of_both = {"sequence_parallel": True, "overlap": "chunked"}
    names = "column_parallel_linear", "vocab_parallel_cross_entropy"
    with mock.patch.multiple(linear_loss, **{n: told(getattr(linear_loss, n)) for n in names}):
        vocab_parallel_linear_cross_entropy(
            own, part, HEAD_LABELS.clamp(min=-7), group=group, softcap=3.0, **of_loss, **of_both
        )
    of_product, found = seen
    assert of_product == of_both | {"group": group, "workspace": None}
    assert found == of_loss | {"group": group}


def test_a_loss_with_a_softcap_hands_every_option_on() -> None:
    run_threads(1, _capped_as_told)


@pytest.mark.parametrize(
    ("most", "rows"),
    [((5, 2**26), [5, 5, 2]), ((1024, 3 * PADDED), [3] * 4), ((1024, 4 * PADDED - 1), [3] * 4),
     ((7, 12 * PADDED), [7, 5]), ((12, 12 * PADDED), [12]), ((11, 12 * PADDED), [11, 1]),
     ((2, 1), [1] * 12)],
)  # fmt: skip
def test_logits_with_a_softcap_are_as_many_at_a_time_as_may_be(most, rows) -> None:
    """There are no more rows than one limit, and no more logits than the other."""
    own, part, *_ = problem(False, PADDED)
    seen: list[int] = []

    def product(x: torch.Tensor, *args, **options) -> torch.Tensor:
        seen.append(len(x))
        return tensor.column_parallel_linear(x, *args, **options)

    with mock.patch.multiple(linear_loss, CAPPED=most, column_parallel_linear=product):
        head_loss(own, part, softcap=3.0, group=None, sequence_parallel=False)
    assert seen == rows


@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_may_have_a_softcap(ranks: int) -> None:
    with small_blocks():
        for most in ((2, 2**26), (1024, 600), (1024, 2**26)):  # 600 logits: two rows of one rank
            with mock.patch.object(linear_loss, "CAPPED", most):
                run_threads(ranks, _capped)
        run_threads(ranks, _not_that_cap)


def _wide_blocks(rank: int) -> None:
    """Test rows of two blocks of columns, one of which gathers, and rows of one."""
    with small_blocks(blocks.BlockSizes(elements=150 * T, most_rows=T, fewest_rows=T)):
        for recompute in (True, False):
            given = Given({"recompute": recompute, "smoothing": 0.3}, {"impl": "triton"} | fused())
            agrees(LINEAR_LOSS, given, True)


def test_rows_are_gathered_under_a_block_of_columns_or_under_all() -> None:
    run_ranks(3, on_first, (1, 3), _wide_blocks)


def _layer(rank: int) -> None:
    """Test that the layer passes its mesh's workspace on, and is rejected if it cannot fuse."""
    mesh = Mesh(tp=2).connect()
    options = {"mesh": mesh, "sequence_parallel": True, "overlap": "fused"}
    layer = VocabParallelLinearCrossEntropy(VOCAB, impl="triton", **options)
    own, part, x, w = problem(True, 302)
    loss = layer(own, part, HEAD_LABELS, 17)
    assert_close_f64(loss, LINEAR_LOSS.alone({}, x=x, weight=w) / 17, RTOL)
    assert mesh.workspace("tp")._memory.epoch.item() == 1
    make = partial(VocabParallelLinearCrossEntropy, VOCAB)
    check(lambda: make(impl="torch", **options), "pass impl='triton', or a different overlap")
    check(lambda: make(overlap="fast"), "one of none, bulk, chunked, fused, got 'fast'")


def test_the_layer_shares_the_meshs_workspace() -> None:
    run_ranks(2, _layer)


# ---------------------------------------------------------------- messages and their times


def _moves(overlap: str, recompute: bool) -> tuple[str, int]:
    """Return (the events of a forward on 2 ranks with sharded tokens, the bytes of its
    collectives). Events: (g)ather of x begins, it is (w)aited for, a product, (l)ogits or (d)z,
    (s)um of dx begins."""
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
            own, part, HEAD_LABELS, group=group, vocab_size=VOCAB, sequence_parallel=True,
            recompute=recompute, overlap=overlap,
        )  # fmt: skip
    return "".join(events), sum(brought)


def _moved(rank: int) -> None:
    whole = 8 * E * T // 2  # the part of x that a rank lacks, and of dx that it is sent
    stats = 8 * 2 * T
    assert _moves("none", True) == ("gwl", whole + stats)
    assert _moves("chunked", True) == ("glwl", whole + stats)
    assert _moves("none", False) == ("gwldsw", 2 * whole + stats)
    assert _moves("chunked", False) == ("gwgldswldsww", 2 * whole + stats)


def test_a_chunk_is_on_its_way_under_another_and_no_more_is_moved() -> None:
    run_ranks(2, _moved)


# ---------------------------------------------------------------- errors come before any launch


def _refused(rank: int) -> None:
    """Test that errors come before any collective: otherwise the ranks
    would wait for each other."""
    group, _, ranks = world()
    (own, part, x, w), labels = problem(False, PADDED), HEAD_LABELS
    options = {"group": group, "vocab_size": VOCAB, "padded_vocab_size": PADDED}
    for arguments, more, words in (
        ((x, w, labels), {}, rf"rank {rank}: 1200 weight rows on each of {ranks}"),
        ((x, part, labels[:3]), {}, r"labels int64\[12\], got torch.int64 \[3\]"),
        ((x[:6], part, labels), {}, r"labels int64\[6\], got torch.int64 \[12\]"),
        ((x, part, labels), {"sequence_parallel": True}, r"labels int64\[24\]"),
        ((x[:, :4], part, labels), {}, r"got \[12, 4\] and \[600, 5\]"),
        ((x.float(), part, labels), {}, "x torch.float32, weight torch.float64"),
        ((x, part, labels), {"reduction": "mean"}, "no rank has all tokens"),
        ((x, part, labels), {"reduction": "none", "recompute": False},
         "same incoming gradient for every"),
        ((x, part, labels), {"z_loss": -1.0}, "z_loss must be finite and not negative, got -1"),
        ((x, part, labels), {"label_smoothing": 1.5}, r"must be in \[0, 1\], got 1.5"),
    ):  # fmt: skip
        check(partial(vocab_parallel_linear_cross_entropy, *arguments, **options | more), words)
    whole = partial(tensor.vocab_parallel_cross_entropy, x @ part.t(), labels, **options)
    check(partial(whole, z_loss=-1.0), f"rank {rank}: z_loss must not be negative, got -1.0")
    wrong = labels.clamp(min=1000)
    for recompute in (True, False):  # every rank checks labels before any communication
        with pytest.raises(ValueError, match=r"labels must be in \[0, 301\) or -100, got 1000"):
            vocab_parallel_linear_cross_entropy(own, part, wrong, recompute=recompute, **options)


def test_what_does_not_fit_is_refused() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- typing rules

VOCABULARY = Vocabulary(0, 7, -100, 0.1, 0.01, "torch")
FUNCTIONS = [linear._Recomputed, linear._InForward]


def _case(function: type, sequence: bool):
    """Return (function, arguments, documented types)."""
    ids = torch.tensor([0, 3, 2, 1, 4, 2, -100, 6])  # as many as rows of the weight, because
    args = draw(1, 8, 4), draw(2, 8, 4), ids  # dims of one size are cut together
    args = *args, VOCABULARY, torch.float64, "tp", sequence
    function = over_group(function)
    return function, args, {"x": S(0) if sequence else I, "weight": S(0), "labels": R}


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_typing_rules_hold_numerically(function: type, sequence: bool) -> None:
    """The documented types are accepted and the derived type is correct; so is
    every other accepted one."""
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
    classes = [f for _, f in inspect.getmembers(linear, inspect.isclass)]
    assert {f for f in classes if issubclass(f, torch.autograd.Function)} == set(FUNCTIONS)


def test_a_planted_fault_breaks_the_rule() -> None:
    with mock.patch.object(TensorRanks, "merge", lambda ranks, stats: stats):
        function, args, documented = _case(linear._Recomputed, False)
        with pytest.raises(RuleCheckError, match="hold different values"):
            rulecheck(function, args, {k: {"tp": v} for k, v in documented.items()}, mesh={"tp": 2})
