"""The fused projection to heads over tensor ranks equals the plain one, rotation included."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from close import assert_close_f64, assert_error_budget
from ranks import run_ranks
from rules import over_group, rulecheck
from sharded import draw, fused, noticed, own_tokens_again, part, without_the_sum_of_dx, world
from spmd_types import I, R, S
from threads import run_threads

from warpweave.kernels import reference
from warpweave.kernels.qkv import function as qkv
from warpweave.kernels.rope import rope_table
from warpweave.kernels.runtime.wgrad import WeightGradients, collect
from warpweave.parallel.tensor.qkv import parallel_qkv_rope
from warpweave.parallel.tensor.ranks import TensorRanks

B, LENGTH, E, KV, RTOL = 2, 6, 7, 12, 1e-12  # 12 tokens and 12 KV heads divide by 1, 2, 3 and 4
Tensors = list[torch.Tensor | None]


def table(D: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_table(torch.arange(LENGTH) * 7 + 3, D, theta=100.0, dtype=torch.float64)


def problem(G: int, D: int, bias: bool) -> Tensors:
    """x[T, E], weight and bias of all heads."""
    rows = (KV, G + 2, D)
    return [draw(1, B * LENGTH, E), draw(2, *rows, E), draw(3, *rows) if bias else None]


def upstream(G: int, D: int) -> list[torch.Tensor]:
    """The gradients of q, k and v, of all heads."""
    return [draw(4 + i, B, LENGTH, heads, D) for i, heads in enumerate((KV * G, KV, KV))]


def run(apply, tensors: Tensors, dy: list[torch.Tensor]) -> list[torch.Tensor]:
    """q, k, v and the gradients of x, weight and, if there is one, bias."""
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    out = apply(*leaves)
    return [*out, *torch.autograd.grad(out, [t for t in leaves if t is not None], dy)]


def truth(G: int, D: int, bias: bool, rotate: bool) -> list[torch.Tensor]:
    cos, sin = table(D) if rotate else (torch.ones(LENGTH, D // 2), torch.zeros(LENGTH, D // 2))

    def apply(x, weight, bias):
        x = x.unflatten(0, (B, LENGTH))
        return reference.qkv_rope(x, weight, bias, cos, sin)

    return run(apply, problem(G, D, bias), upstream(G, D))


def check(
    *,
    G: int = 1,
    D: int = 4,
    bias: bool = True,
    rotate: bool = True,
    sequence: bool = False,
    **options,
) -> list[torch.Tensor]:
    cuts = [0 if sequence else None, 0, 0]
    mine = [None if t is None else part(t, c) for t, c in zip(problem(G, D, bias), cuts)]
    cos, sin = table(D) if rotate else (None, None)

    def apply(x, weight, bias):
        return parallel_qkv_rope(
            x, weight, bias, cos, sin, shape=(B, LENGTH),
            group=world()[0], sequence_parallel=sequence, **options,
        )  # fmt: skip

    found = run(apply, mine, [part(t, 2) for t in upstream(G, D)])
    expected = truth(G, D, bias, rotate)
    for t, whole, cut in zip(found, expected, [2, 2, 2, *cuts][: len(expected)], strict=True):
        assert_close_f64(t, part(whole, cut), RTOL)
    return found


def _everything(rank: int) -> None:
    workspace = {**fused(), "impl": "triton"}
    for sequence, bias, G in itertools.product((False, True), (False, True), (1, 3)):
        shape = {"sequence": sequence, "bias": bias, "G": G}
        runs = [check(**shape, overlap=overlap) for overlap in ("bulk", "none")]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
        check(**shape, overlap="chunked")  # 3 and 4 ranks cut samples in the middle
        check(**shape, **workspace)
        check(**shape, rotate=False)
        check(**shape, rotate=False, D=5)  # an odd head dim, which nothing can rotate
    check(G=2, D=6, sequence=True, impl="triton")
    check(G=2, D=6, sequence=True, impl="triton", overlap="chunked")
    check(D=5, rotate=False, impl="triton")
    check(D=5, rotate=False, sequence=True, **workspace)
    check(rotate=False, sequence=True, **workspace)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_outputs_and_gradients_equal_the_plain_projection(ranks: int) -> None:
    run_ranks(ranks, _everything)


def test_without_a_group_it_is_the_plain_projection() -> None:
    _everything(0)


def _frozen(rank: int) -> None:
    """Only what is wanted is made, and it is the same."""
    for sequence in (False, True):
        expected = check(sequence=sequence)[3:]
        cuts = (0 if sequence else None, 0, 0)
        for wanted in (("x",), ("weight",), ("bias",), ("x", "bias")):
            leaves = {
                name: part(t, cut).clone().requires_grad_(name in wanted)
                for name, t, cut in zip(("x", "weight", "bias"), problem(1, 4, True), cuts)
            }
            out = parallel_qkv_rope(
                **leaves, **dict(zip(("cos", "sin"), table(4))), shape=(B, LENGTH),
                group=world()[0], sequence_parallel=sequence,
            )  # fmt: skip
            torch.autograd.backward(out, [part(t, 2) for t in upstream(1, 4)])
            for (name, t), gradient in zip(leaves.items(), expected, strict=True):
                assert (t.grad is None) == (name not in wanted)
                assert t.grad is None or torch.equal(t.grad, gradient)


def test_frozen_parameters_cost_and_change_nothing() -> None:
    run_threads(2, _frozen)


def _empty(rank: int) -> None:
    group, *_ = world()
    for shape in ((0, 5), (3, 0)):
        x, weight = draw(1, 0, E).requires_grad_(), draw(2, 1, 3, 4, E).requires_grad_()
        q, k, v = parallel_qkv_rope(x, weight, None, None, None, shape=shape, group=group)
        assert q.shape == k.shape == v.shape == (*shape, 1, 4)
        (q.sum() + k.sum() + v.sum()).backward()
        assert x.grad.shape == x.shape
        assert not weight.grad.any()


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_samples_and_no_positions_have_no_heads_and_gradient_zero(ranks: int) -> None:
    run_threads(ranks, _empty)


def _deferred(rank: int) -> None:
    for sequence in (False, True):
        outcomes = []
        for store in (None, WeightGradients()):
            leaves = [
                part(t, cut).clone().requires_grad_()
                for t, cut in zip(problem(1, 4, True), (0 if sequence else None, 0, 0))
            ]
            out = parallel_qkv_rope(
                *leaves, *table(4), shape=(B, LENGTH),
                group=world()[0], sequence_parallel=sequence,
            )  # fmt: skip
            loss = sum((t * part(d, 2)).sum() for t, d in zip(out, upstream(1, 4)))
            if store is None:
                loss.backward()
            else:
                with collect(store):
                    loss.backward()
                assert len(store) == 2
                assert leaves[1].grad is None
                store.run()
            outcomes.append([t.grad for t in leaves])
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_weight_gradients_can_be_deferred(ranks: int) -> None:
    run_threads(ranks, _deferred)


def _low_precision(rank: int) -> None:
    """bfloat16 on several ranks is as good as on one; gradients come in ``grad_dtype``."""
    low, (x, weight, bias) = torch.bfloat16, problem(1, 4, True)
    x, weight, bias = (t.to(low) for t in (x, weight, bias))
    dy = [t.to(low) for t in upstream(1, 4)]

    def plain(x, weight, bias):
        return reference.qkv_rope(x.unflatten(0, (B, LENGTH)), weight, bias, *table(4))

    single = run(plain, [x, weight, bias], dy)
    exact = run(plain, [x.double(), weight.double(), bias.double()], [t.double() for t in dy])
    cos, sin = (t.float() for t in table(4))
    for sequence in (False, True):
        cuts = [0 if sequence else None, 0, 0]
        leaves = [part(t, c).clone().requires_grad_() for t, c in zip((x, weight, bias), cuts)]
        leaves[1].grad_dtype = torch.float32
        out = parallel_qkv_rope(
            *leaves, cos, sin, shape=(B, LENGTH),
            group=world()[0], sequence_parallel=sequence,
        )  # fmt: skip
        torch.autograd.backward(out, [part(t, 2) for t in dy])
        assert leaves[1].grad.dtype == torch.float32
        found = [*out, *(t.grad for t in leaves)]
        for t, one, whole, cut in zip(found, single, exact, [2, 2, 2, *cuts], strict=True):
            assert_error_budget(t, part(one, cut), part(whole, cut))


def test_low_precision_is_as_good_as_on_one_rank() -> None:
    run_threads(4, _low_precision)


def _refused(rank: int) -> None:
    """None of these may start a collective: the ranks would wait for each other."""
    x, weight, bias = (part(t, cut) for t, cut in zip(problem(1, 4, True), (None, 0, 0)))
    options = {"shape": (B, LENGTH), "group": world()[0]}
    name = f"parallel_qkv_rope on rank {rank}: "
    for arguments, change, words in (
        ((x, weight, bias), {"shape": (B, 5)}, name + r"x must hold the tokens of \[B, S\]"),
        ((x, weight, bias), {"sequence_parallel": True}, name + "x must hold the tokens"),
        ((x[:, :6], weight, bias), {}, r"need x\[B, S, E\]"),
        ((x, weight.flatten(0, 2), bias), {}, "need x"),
        ((x, weight, bias[1:]), {}, "bias must be"),
        ((x.float(), weight, bias), {}, name + "dtypes differ"),
    ):
        with pytest.raises(ValueError, match=words):
            parallel_qkv_rope(*arguments, *table(4), **(options | change))
    with pytest.raises(ValueError, match="a rotary embedding needs an even head_dim, got 1"):
        parallel_qkv_rope(x, weight[:, :, :1], None, *table(4), **options)


def test_what_does_not_fit_is_refused_before_anything_is_sent() -> None:
    run_threads(2, _refused)


# ---------------------------------------------------------------- planted faults


def _turned_on(dq, dk, dv, cos, sin, **options):
    """The gradient turned by the angle of the forward, not back."""
    return RIGHT_BWD(dq, dk, dv, cos, -sin, **options)


RIGHT_BWD = qkv.qkv_bwd
FAULTS = {
    "no gather of x": (TensorRanks, "gather", own_tokens_again, (True,)),
    "no sum of dx": (TensorRanks, "column_gradients", without_the_sum_of_dx(), (False, True)),
    "turned on": (qkv, "qkv_bwd", _turned_on, (False, True)),
}


def _planted(rank: int) -> None:
    for name, (where, place, fault, sequences) in FAULTS.items():
        for sequence in sequences:
            with mock.patch.object(where, place, fault):
                found = noticed(check, sequence=sequence)
            assert found == world()[2], f"{name}, sequence {sequence}: noticed on {found} ranks"


def test_planted_faults_are_noticed() -> None:
    run_ranks(2, _planted)


# ---------------------------------------------------------------- the typing rule


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sequence", [False, True])
def test_the_typing_rule_holds_numerically(sequence: bool, batch: int) -> None:
    tensors = draw(1, 6, 5), draw(2, 2, 3, 4, 5), draw(3, 2, 3, 4), *table(4)
    tensors = tuple(t[: 6 // batch] if i > 2 else t for i, t in enumerate(tensors))
    shape = batch, 6 // batch
    more = (shape, (3, 4), torch.float64, None, "torch", "tp", sequence)
    places = {"x": S(0) if sequence else I, "weight": S(0), "bias": S(0), "cos": R, "sin": R}
    places = {name: {"tp": place} for name, place in places.items()}
    rulecheck(over_group(qkv._QKV), (*tensors, *more), places, mesh={"tp": 2})
