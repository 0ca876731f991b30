"""Every operation over tensor ranks equals one device: results, gradients, and frozen, deferred,
accumulated and low-precision cases.

Each check makes the whole problem on every rank from the same seeds, runs the function on this
rank's shards and compares its parts of the results and of all gradients with plain torch. The rows
are in `sharded_ops.py`; faults planted into them must fail the same checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64, assert_error_budget
from plants import instead, noticed, planted
from ranks import run_ranks
from sharded import (
    RTOL,
    Given,
    Op,
    agrees,
    beside_replicas,
    fused,
    gradients,
    on_first,
    own_tokens_again,
    part,
    without_the_sum_of_dx,
    world,
)
from sharded import run as results_of
from sharded_ops import IDS, OPS, PADDED, each
from threads import run_threads

from warpweave.kernels.cross_entropy.vocabulary import Vocabulary
from warpweave.kernels.qkv import function as qkv
from warpweave.kernels.runtime.wgrad import WeightGradients, accumulate, collect
from warpweave.parallel import collectives, tensor
from warpweave.parallel.collectives import own_slice
from warpweave.parallel.tensor.ranks import TensorRanks

FUSED = [name for name, op in OPS.items() if op.fused]
DEFERRED = [name for name, op in OPS.items() if op.ways]
LOW = [name for name, op in OPS.items() if op.low]


def _on_threads(ranks: int, name: str, check: Callable[[Op], None]) -> None:
    with OPS[name].within():  # for all threads
        run_threads(ranks, lambda rank: check(OPS[name]))


# ---------------------------------------------------------------- results and gradients


def _agree(op: Op) -> None:
    for given in op.agree:
        for sequence in given.sequences:
            agrees(op, given, sequence)
    for group in op.twins:
        for sequence in (False, True):
            first, *others = (agrees(op, given, sequence) for given in group)
            for other in others:
                assert all(torch.equal(other[name], t) for name, t in first.items())


@pytest.mark.parametrize("ranks", [1, 3, 4])  # and 2 of 4, where the group is not the world
@pytest.mark.parametrize("name", OPS)
def test_results_and_gradients_equal_plain_torch(name: str, ranks: int) -> None:
    _on_threads(ranks, name, _agree)


@pytest.mark.parametrize("name", OPS)
def test_without_a_group_too(name: str) -> None:
    with OPS[name].within():
        _agree(OPS[name])
        _agree_within(OPS[name])


def _agree_within(op: Op) -> None:
    how = fused()
    for given in op.fused:
        for sequence in given.sequences:
            agrees(op, given._replace(how=given.how | how), sequence)


def _within_products(rank: int, name: str) -> None:
    op = OPS[name]
    layer = name in ("column", "row")
    with op.within():
        if layer:
            beside_replicas(rank, lambda rank: _agree_within(op))
            beside_replicas(rank, lambda rank: _deferred(op, fused()))
        on_first(rank, (1, 3, 4) if layer else (2, 3), lambda rank: _agree_within(op))
        if layer:
            on_first(rank, (1, 2), lambda rank: _deferred(op, fused()))
            on_first(rank, (2,), lambda rank: _frozen(op, fused()))


def _within_all_products(rank: int) -> None:
    for name in FUSED:
        try:
            _within_products(rank, name)
        except AssertionError as error:
            raise AssertionError(f"{name} is wrong") from error


def test_so_they_do_where_data_moves_within_the_products() -> None:
    """Covers several numbers of ranks, and a group that is not the world."""
    run_ranks(4, _within_all_products)


@pytest.mark.parametrize("name", OPS)
def test_the_group_need_not_be_the_world(name: str) -> None:
    op = OPS[name]

    def beside(rank: int) -> None:
        beside_replicas(rank, lambda rank: _agree(op))
        if name in ("column", "row"):
            beside_replicas(rank, lambda rank: _deferred(op, {}))

    with op.within():  # for all threads
        run_threads(4, beside)


# ---------------------------------------------------------------- frozen, deferred, accumulated


def _everywhere(op: Op, how: dict[str, object]) -> Iterator[tuple[Given, bool]]:
    for given in op.ways:
        for sequence in given.sequences:
            yield given._replace(how=given.how | how), sequence


def _problem(op: Op, given: Given, sequence: bool) -> tuple:
    """Return (the function, its tensors, results and gradients by name, those of the results)."""
    apply = partial(op.on_ranks, given, sequence)
    mine = op.mine(op.whole(given.shape), sequence)
    return apply, mine, *gradients(op, apply, mine)


def _frozen(op: Op, how: dict[str, object]) -> None:
    """Test that only requested gradients are made, and that they are unchanged."""
    for given, sequence in _everywhere(op, how):
        apply, mine, expected, dy = _problem(op, given, sequence)
        subsets = (itertools.compress(mine, x) for x in itertools.product((0, 1), repeat=len(mine)))
        for wanted in map(tuple, subsets) if op.wishes is None else op.wishes:
            leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in mine.items()}
            found = apply(**leaves)
            if wanted:
                torch.autograd.backward(found, dy)
            for name, t in leaves.items():
                assert (t.grad is not None) == (name in wanted)
                if t.grad is not None:
                    _same(t.grad, expected[name], again=how and name == "x")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", DEFERRED)
def test_frozen_parameters_cost_and_change_nothing(name: str, ranks: int) -> None:
    _on_threads(ranks, name, lambda op: _frozen(op, {}))


def _same(found: torch.Tensor, expected: torch.Tensor, again: object) -> None:
    """Compare every bit; or approximately, if a different product adds in another order."""
    if again:
        assert_close_f64(found, expected, RTOL)
    else:
        assert torch.equal(found, expected)


def _waits(op: Op, given: Given, leaves: dict[str, torch.Tensor]) -> list[str]:
    """Return the names with deferred gradients: not of a head that recomputes the logits."""
    again = "recompute" in given.shape and given.shape["recompute"] is not False
    return [] if again else [name for name in op.weights if name in leaves]


def _deferred(op: Op, how: dict[str, object]) -> None:
    """With a collector, backward makes only dx, and the store makes the same weight gradients."""
    for given, sequence in _everywhere(op, how):
        apply, mine, expected, dy = _problem(op, given, sequence)
        store, (leaves, results, _) = WeightGradients(), results_of(apply, mine, dy)
        with collect(store):
            torch.autograd.backward(results, dy)
        waiting = _waits(op, given, leaves)
        assert len(store) == len(waiting)
        assert {n for n, t in leaves.items() if t.grad is None} == {*waiting}
        store.run()
        for name, t in leaves.items():
            _same(t.grad, expected[name], again=how and name == "x")
        for frozen in waiting if len(mine) > 1 else ():
            leaves = {n: t.clone().requires_grad_(n != frozen) for n, t in mine.items()}
            with collect(store):
                torch.autograd.backward(apply(**leaves), dy)
            assert len(store) == len(waiting) - 1, frozen
            store.run()
            assert leaves[frozen].grad is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", DEFERRED)
def test_weight_gradients_can_be_deferred(name: str, ranks: int) -> None:
    _on_threads(ranks, name, lambda op: _deferred(op, {}))


def _added(op: Op) -> None:
    """A step's first backward pass overwrites a gradient buffer; later ones accumulate."""
    for given, sequence in _everywhere(op, {}):
        apply, mine, expected, dy = _problem(op, given, sequence)
        for within in (accumulate, collect):
            leaves = {name: t.clone().requires_grad_() for name, t in mine.items()}
            weights = {n: t for n, t in leaves.items() if n in op.weights}
            buffers = {w: torch.full_like(w, float("nan")) for w in weights.values()}
            store = WeightGradients(buffers)
            for scale, total in ((1.0, 1.0), (3.0, 4.0)):
                found = apply(**leaves)
                with within(store):
                    torch.autograd.backward(found, [scale * t for t in dy])
                waiting = _waits(op, given, leaves) if within is collect else []
                assert len(store) == len(waiting)
                store.run()
                for name, w in weights.items():
                    assert w.grad is buffers[w]
                    first = total == 1.0
                    assert not first or torch.equal(w.grad, expected[name]), (given, name)
                    assert_close_f64(w.grad, total * expected[name], 1e-14)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", DEFERRED)
def test_gradients_of_micro_batches_add_up_in_their_buffer(name: str, ranks: int) -> None:
    _on_threads(ranks, name, _added)


# ---------------------------------------------------------------- low precision (also test_sums.py)


def _low(op: Op) -> None:
    """bfloat16 on several ranks is as accurate as on one; gradients have ``grad_dtype``."""
    low = torch.bfloat16
    for given in op.low:
        whole = {name: t.to(low) for name, t in op.whole(given.shape).items()}
        plain = partial(op.alone, given.shape)
        dy = [t.to(low) for t in gradients(op, plain, whole)[1]]
        single, _ = gradients(op, plain, whole, dy)
        wide = {name: t.double() for name, t in whole.items()}
        exact, _ = gradients(op, plain, wide, [t.double() for t in dy])
        for sequence in given.sequences:
            leaves = {n: t.clone().requires_grad_() for n, t in op.mine(whole, sequence).items()}
            matrices = [name for name in op.weights if name.endswith("weight")]
            for name in matrices:
                leaves[name].grad_dtype = torch.float32
            found = op.on_ranks(given, sequence, **leaves)
            found = found if isinstance(found, tuple) else (found,)
            cut = {name: op.cut(name, sequence) for name in (*op.results, *leaves)}
            torch.autograd.backward(found, [part(t, cut[n]) for n, t in zip(op.results, dy)])
            assert {t.dtype for t in (*found, leaves["x"].grad)} == {low}
            assert {leaves[name].grad.dtype for name in matrices} == {torch.float32}
            results = dict(zip(op.results, found)) | {n: t.grad for n, t in leaves.items()}
            for name in results.keys() - {*op.partial}:
                parts = (part(t[name], cut[name]) for t in (single, exact))
                assert_error_budget(results[name], *parts)


@pytest.mark.parametrize("name", LOW)
def test_low_precision_is_as_good_as_on_one_rank(name: str) -> None:
    _on_threads(4, name, _low)


# ---------------------------------------------------------------- planted faults


def _share(t: torch.Tensor, group, sequence: bool) -> torch.Tensor:
    return own_slice(t, group) if sequence else t


def _no_sum_of_dx(x, weight, bias, *, group, sequence_parallel):
    whole = collectives.gather(x, group) if sequence_parallel else x
    return F.linear(whole, weight, bias)


def _no_gather_of_x(x, weight, bias, *, group, sequence_parallel):
    return F.linear(x.repeat(2, 1), weight, bias)


def _bias_on_every_rank(x, weight, bias, *, group, sequence_parallel):
    sums = collectives.reduce_scatter if sequence_parallel else collectives.reduce_from
    return sums(F.linear(x, weight, bias), group)


def _no_sum_of_y(x, weight, bias, *, group, sequence_parallel):
    return _share(F.linear(x, weight, bias), group, sequence_parallel)


def _no_sum_of_the_rows(weight, *, group, sequence_parallel):
    local, elsewhere = tensor.embedding._local_ids(IDS, len(weight), group)
    y = F.embedding(local, weight).masked_fill(elsewhere.unsqueeze(-1), 0)
    return _share(y, group, sequence_parallel)


def _foreign_ids_hit_row_zero(weight, *, group, sequence_parallel):
    local, _ = tensor.embedding._local_ids(IDS, len(weight), group)
    sums = collectives.reduce_scatter if sequence_parallel else collectives.reduce_from
    return sums(F.embedding(local, weight), group)


RIGHT_LOSSES, RIGHT_MERGE, RIGHT_BWD = Vocabulary.losses, TensorRanks.merge, qkv.qkv_bwd


def _smoothing_over_own_columns(vocabulary, stats, labels):
    return RIGHT_LOSSES(vocabulary._replace(size=PADDED // 2), stats, labels)


def _padding_too(vocabulary, width):
    return width


def _maximum_of_own_columns(ranks, stats):
    return torch.cat((stats[:1], RIGHT_MERGE(ranks, stats)[1:]))


def _own_terms(ranks, dx):
    return _share(dx, ranks.group, ranks.sequence_parallel)


def _bias_before_the_sum(ranks, h, weight, bias, *, residual, **options):
    return ranks.sum(F.linear(h, weight, bias)) + residual


def _terms_for_the_sum(ranks, h, weight, bias, *, residual, **options):
    return _share(F.linear(h, weight), ranks.group, ranks.sequence_parallel) + bias + residual


def _turned_on(dq, dk, dv, cos, sin, **options):
    """Rotate the gradient by the angle of the forward instead of its inverse."""
    return RIGHT_BWD(dq, dk, dv, cos, -sin, **options)


class Fault(NamedTuple):
    """A function that replaces one of an object, or of the row itself, if that is its name."""

    op: str
    where: Any
    name: str
    fault: Callable[..., Any]
    givens: tuple[Given, ...] = (Given(),)
    everywhere: bool = True  # or on a rank: the first has all columns without padding


SMOOTHED = (Given({"smoothing": 0.3}, sequences=(False,)),)
HEADS = tuple(each([{"smoothing": 0.3}], [{"recompute": recompute} for recompute in (True, False)]))
CUT = (Given(sequences=(True,)),)
COLUMN_SUM = "column_gradients", without_the_sum_of_dx()
FAULTS = (
    Fault("column", "column", "sharded", _no_sum_of_dx),
    Fault("column", "column", "sharded", _no_gather_of_x, CUT),
    Fault("row", "row", "sharded", _bias_on_every_rank),
    Fault("row", "row", "sharded", _no_sum_of_y),
    Fault("embedding", "embedding", "sharded", _no_sum_of_the_rows, everywhere=False),
    Fault("embedding", "embedding", "sharded", _foreign_ids_hit_row_zero, everywhere=False),
    Fault("loss", Vocabulary, "losses", _smoothing_over_own_columns, SMOOTHED, False),
    Fault("loss", Vocabulary, "columns", _padding_too, SMOOTHED, everywhere=False),
    Fault("loss", TensorRanks, "merge", lambda ranks, stats: stats, SMOOTHED, False),
    Fault("linear loss", TensorRanks, "sum", _own_terms, HEADS, False),
    Fault("linear loss", TensorRanks, "merge", lambda ranks, stats: stats, HEADS, False),
    Fault("linear loss", TensorRanks, "merge", _maximum_of_own_columns, HEADS, False),
    Fault("linear loss", TensorRanks, "first_column", lambda ranks, width: 0, HEADS, False),
    Fault("linear loss", Vocabulary, "columns", _padding_too, HEADS, False),
    Fault("mlp", TensorRanks, "row_product", _bias_before_the_sum),
    Fault("mlp", TensorRanks, "row_product", _terms_for_the_sum),
    Fault("mlp", TensorRanks, "gather", own_tokens_again, CUT),
    Fault("mlp", TensorRanks, *COLUMN_SUM),
    Fault("qkv", TensorRanks, "gather", own_tokens_again, CUT),
    Fault("qkv", TensorRanks, *COLUMN_SUM),
    Fault("qkv", qkv, "qkv_bwd", _turned_on),
)


def _planted(rank: int) -> None:
    for op, where, name, fault, givens, everywhere in FAULTS:
        row = replace(OPS[op], also=lambda *_: None)  # ranks would wait for one another there
        plants = () if where == op else (instead(where, name, fault),)
        if where == op:
            row = replace(row, **{name: fault})
        for given in givens:
            for sequence in given.sequences:
                with planted(*plants), row.within():
                    found = noticed(world()[0], agrees, row, given, sequence)
                told = f"{op}: {fault.__name__}, {given}, {sequence}: noticed on {found} ranks"
                assert found == 2 if everywhere else found > 0, told


def test_planted_faults_are_noticed() -> None:
    run_ranks(2, _planted)
