"""The fused MLP over tensor ranks equals the plain one: outputs, gradients, and what is kept."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64, assert_error_budget
from ranks import run_ranks
from rules import over_group, rulecheck
from sharded import draw, fused, noticed, own_tokens_again, part, without_the_sum_of_dx, world
from spmd_types import I, R, S
from spmd_types.types import SpmdTypeError
from threads import run_threads

from warpweave.kernels import reference
from warpweave.kernels.activation import ACTIVATIONS
from warpweave.kernels.dropout import Drop
from warpweave.kernels.mlp import RECOMPUTE
from warpweave.kernels.mlp.function import _MLP, Options
from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.parallel import collectives
from warpweave.parallel.collectives import own_slice
from warpweave.parallel.tensor.mlp import parallel_mlp
from warpweave.parallel.tensor.ranks import TensorRanks

T, E, HIDDEN, RTOL = 12, 7, 24, 1e-12
NAMES = ("x", "up_weight", "down_weight", "up_bias", "down_bias", "residual")
CUTS = {"up_weight": 0, "down_weight": 1, "up_bias": 0}  # the dim that is cut over the ranks
Tensors = dict[str, torch.Tensor]


def problem(activation: str, dtype: torch.dtype = torch.float64) -> Tensors:
    units = (HIDDEN, 2) if ACTIVATIONS[activation].gated else (HIDDEN,)
    shapes = ((T, E), (*units, E), (E, HIDDEN), units, (E,), (T, E))
    return {n: draw(i, *s).to(dtype) for i, (n, s) in enumerate(zip(NAMES, shapes))}


def drop(sequence: bool) -> Drop:
    return Drop(0.3, 5, 2, part(torch.arange(T) * 3 + 2**33, 0 if sequence else None))


def run(tensors: Tensors, apply, dy: torch.Tensor, **options) -> Tensors:
    """The output and the gradient of every tensor."""
    leaves = {n: t.detach().clone().requires_grad_() for n, t in tensors.items()}
    y = apply(**leaves, **options)
    return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, leaves.values(), dy)))}


def truth(tensors: Tensors, activation: str, dropped: bool) -> Tensors:
    """The plain MLP by the reference, on all tokens and all hidden units."""

    def apply(**tensors):
        return reference.mlp(
            **tensors, activation=activation,
            drop=drop(False)._replace(tokens=torch.arange(T) * 3 + 2**33) if dropped else None,
        )  # fmt: skip

    return run(tensors, apply, draw(9, T, E))


def check(
    apply=parallel_mlp,
    *,
    activation: str = "gelu",
    sequence: bool = False,
    without: tuple[str, ...] = (),
    dropped: bool = False,
    **options,
) -> Tensors:
    whole = {n: t for n, t in problem(activation).items() if n not in without}
    cuts = CUTS | dict.fromkeys(("x", "residual", "y"), 0 if sequence else None)
    mine = {n: part(t, cuts.get(n)) for n, t in whole.items()}
    found = run(
        mine, apply, part(draw(9, T, E), cuts["y"]),
        activation=activation, group=world()[0], sequence_parallel=sequence,
        drop=drop(sequence) if dropped else None, **options,
    )  # fmt: skip
    if sequence and "down_bias" in found:  # documented: each rank's own tokens, the caller sums
        found["down_bias"] = collectives.reduce_from(found["down_bias"], world()[0])
    for name, t in truth(whole, activation, dropped).items():
        assert_close_f64(found[name], part(t, cuts.get(name)), RTOL)
    return found


def _everything(rank: int) -> None:
    workspace = {**fused(), "impl": "triton"}
    for sequence, activation in itertools.product((False, True), ACTIVATIONS):
        check(activation=activation, sequence=sequence)
        check(activation=activation, sequence=sequence, without=("up_bias", "residual"))
    for sequence in (False, True):
        check(sequence=sequence, without=("down_bias",), dropped=True)
        check(activation="swiglu", sequence=sequence, dropped=True, impl="triton")
        check(sequence=sequence, without=("down_bias", "residual"), **workspace)
        for recompute in RECOMPUTE:
            options = {"dropped": True, "recompute": recompute, **workspace}
            check(activation="swiglu", sequence=sequence, **options)
        runs = [
            check(activation="swiglu", sequence=sequence, recompute=recompute, overlap=overlap)
            for recompute in (None, *RECOMPUTE)
            for overlap in ("bulk", "none")
        ]
        for other in runs[1:]:
            assert all(torch.equal(other[name], t) for name, t in runs[0].items())
        for recompute in RECOMPUTE:
            check(sequence=sequence, dropped=True, recompute=recompute, overlap="chunked")
        check(activation="swiglu", sequence=sequence, impl="triton", overlap="chunked")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_outputs_and_gradients_equal_the_plain_mlp(ranks: int) -> None:
    run_ranks(ranks, _everything)


def test_without_a_group_it_is_the_plain_mlp() -> None:
    _everything(0)


def _subsets(rank: int) -> None:
    """Only what is wanted is made, whatever is frozen, and it is the same."""
    mine = {n: part(t, CUTS.get(n)) for n, t in problem("gelu").items()}
    expected = check()
    for recompute, wanted in itertools.product(
        RECOMPUTE, (("x",), ("down_weight",), ("up_bias",), ("up_weight", "down_bias"))
    ):
        leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in mine.items()}
        y = parallel_mlp(**leaves, activation="gelu", group=world()[0], recompute=recompute)
        y.backward(draw(9, T, E))
        for name, t in leaves.items():
            assert (t.grad is None) == (name not in wanted)
            assert t.grad is None or torch.equal(t.grad, expected[name])


def test_frozen_parameters_cost_and_change_nothing() -> None:
    run_threads(2, _subsets)


def _deferred(rank: int) -> None:
    """With a collector, backward makes dx only; the store makes the same weight gradients."""
    for sequence, recompute in itertools.product((False, True), RECOMPUTE):
        options = {"activation": "swiglu", "group": world()[0], "sequence_parallel": sequence,
                   "recompute": recompute}  # fmt: skip
        cuts = CUTS | dict.fromkeys(("x", "residual"), 0 if sequence else None)
        outcomes = []
        for store in (None, WeightGradients()):
            leaves = {
                n: part(t, cuts.get(n)).clone().requires_grad_()
                for n, t in problem("swiglu").items()
            }
            y = parallel_mlp(**leaves, **options)
            if store is None:
                y.backward(draw(9, *y.shape))
            else:
                with collect(store):
                    y.backward(draw(9, *y.shape))
                assert len(store) == 4
                assert leaves["up_weight"].grad is None
                assert leaves["x"].grad is not None
                store.run()
            outcomes.append([t.grad for t in leaves.values()])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_gradients_can_be_deferred(ranks: int) -> None:
    run_threads(ranks, _deferred)


def _kept(rank: int) -> None:
    """What waits for the backward, in elements per token of a gated MLP over two ranks."""
    kept = {}
    mine = {n: part(t, CUTS.get(n)).requires_grad_() for n, t in problem("swiglu").items()}
    weights = {id(mine[n]) for n in ("up_weight", "down_weight", "up_bias")}
    for recompute in (*RECOMPUTE, "inference"):
        sizes = []

        def keep(t, sizes=sizes):
            sizes.append(0 if id(t) in weights else t.numel())
            return t

        options = {"activation": "swiglu", "group": world()[0]}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            if recompute == "inference":
                with torch.no_grad():
                    parallel_mlp(**mine, **options)
            else:
                parallel_mlp(**mine, **options, recompute=recompute)
        kept[recompute] = sum(sizes) / T
    half = HIDDEN // 2
    expected = {"nothing": E + 3 * half, "activation": E + 2 * half, "up": E, "inference": 0}
    assert kept == expected


def test_only_what_is_promised_is_kept() -> None:
    run_threads(2, _kept)


def _low_precision(rank: int) -> None:
    """bfloat16 on several ranks is as good as on one; gradients come in ``grad_dtype``."""
    low = torch.bfloat16
    whole = {n: t.double() for n, t in problem("gelu", low).items() if n != "residual"}
    exact = truth(whole, "gelu", False)
    narrow = {n: t.to(low) for n, t in whole.items()}
    single = run(narrow, lambda **t: reference.mlp(**t, activation="gelu"), draw(9, T, E).to(low))
    for sequence, overlap in itertools.product((False, True), ("bulk", "chunked")):
        cuts = CUTS | dict.fromkeys(("x", "y"), 0 if sequence else None)
        leaves = {n: part(t, cuts.get(n)).clone().requires_grad_() for n, t in narrow.items()}
        options = {"group": world()[0], "sequence_parallel": sequence, "overlap": overlap}
        for name in ("up_weight", "down_weight"):
            leaves[name].grad_dtype = torch.float32
        y = parallel_mlp(**leaves, activation="gelu", **options)
        y.backward(part(draw(9, T, E).to(low), cuts["y"]))
        assert y.dtype == leaves["x"].grad.dtype == low
        assert leaves["up_weight"].grad.dtype == torch.float32
        found = {"y": y} | {n: t.grad for n, t in leaves.items() if n != "down_bias"}
        for name, t in found.items():
            assert_error_budget(
                t, part(single[name], cuts.get(name)), part(exact[name], cuts.get(name))
            )


def test_low_precision_is_as_good_as_on_one_rank() -> None:
    run_threads(4, _low_precision)


def _autocast(rank: int) -> None:
    mine = {n: part(t, CUTS.get(n)).float().requires_grad_() for n, t in problem("gelu").items()}
    residual = mine.pop("residual")
    with torch.autocast("cpu", torch.bfloat16):
        y = parallel_mlp(**mine, activation="gelu", group=world()[0])
        stream = parallel_mlp(**mine, residual=residual, activation="gelu", group=world()[0])
    assert y.dtype == torch.bfloat16
    assert stream.dtype == torch.float32
    assert torch.equal(stream, residual + y)
    stream.sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in mine.values())


def test_autocast_computes_in_its_dtype_and_keeps_wide_streams_and_weights() -> None:
    run_threads(2, _autocast)


def _refused(rank: int) -> None:
    """None of these may start a collective: the ranks would wait for each other."""
    mine = {n: part(t, CUTS.get(n)) for n, t in problem("gelu").items()}
    options = {"activation": "gelu", "group": world()[0]}
    for change, words in (
        ({"activation": "silu"}, "activation must be one of"),
        ({"recompute": "all"}, "recompute must be one of nothing, activation, up, got 'all'"),
        ({"up_weight": mine["up_weight"].float()}, f"parallel_mlp on rank {rank}: dtypes differ"),
        ({"residual": mine["x"][:3]}, "residual must be"),
        ({"down_weight": problem("gelu")["down_weight"]}, r"gelu needs x\[..., E\]"),
        ({"down_bias": mine["down_bias"][:2]}, f"parallel_mlp on rank {rank}: down_bias must be"),
        ({"x": mine["x"][0], "residual": None}, r"need x\[..., E\] of two dims at least"),
    ):
        with pytest.raises(ValueError, match=words):
            parallel_mlp(**(mine | options | change))


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- planted faults


def _bias_before_the_sum(ranks, h, weight, bias, *, residual, **options):
    return ranks.start_sum(F.linear(h, weight, bias)).wait() + residual


def _no_sum(ranks, h, weight, bias, *, residual, **options):
    y = F.linear(h, weight)
    return (own_slice(y, ranks.group) if ranks.sequence_parallel else y) + bias + residual


FAULTS = {
    "bias before the sum": ("row_product", _bias_before_the_sum, (False, True)),
    "no sum of y": ("row_product", _no_sum, (False, True)),
    "no gather of x": ("gather", own_tokens_again, (True,)),
    "no sum of dx": ("column_gradients", without_the_sum_of_dx(), (False, True)),
}


def _planted(rank: int) -> None:
    for name, (place, fault, sequences) in FAULTS.items():
        for sequence in sequences:
            with mock.patch.object(TensorRanks, place, fault):
                where = noticed(check, sequence=sequence)
            assert where == world()[2], f"{name}, sequence {sequence}: noticed on {where} ranks"


def test_planted_faults_are_noticed() -> None:
    run_ranks(2, _planted)


# ---------------------------------------------------------------- the typing rule


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_the_typing_rule_holds_numerically(activation: str, sequence: bool) -> None:
    rows = 8 if activation == "swiglu" else 4
    more = (None, Options(activation, impl="torch"), torch.float64, False, "tp", sequence)
    tensors = draw(1, 6, 5), draw(2, rows, 5), draw(3, rows), draw(4, 5, 4), draw(5, 5)
    places = {"x": S(0) if sequence else I, "up_weight": S(0), "up_bias": S(0),
              "down_weight": S(1), "down_bias": R if sequence else I}  # fmt: skip
    places = {name: {"tp": place} for name, place in places.items()}
    function = over_group(_MLP)
    rulecheck(function, (*tensors, *more), places, mesh={"tp": 2})
    refused = places | {"down_bias": {"tp": I if sequence else R}}
    with pytest.raises(SpmdTypeError):
        rulecheck(function, (*tensors, *more), refused, mesh={"tp": 2})
