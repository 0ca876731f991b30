"""Softcap, sinks and dropout of attention, and sums accumulated over blocks of keys."""

import math

import pytest
import torch
from attention_cases import (
    F64,
    ZIGZAG,
    check,
    check_roundings,
    draw,
    tiles_of,
    with_grads,
)
from close import assert_all_close, assert_close_f64, assert_same_bits, relative_error
from einops import rearrange
from well_formed import well_formed

from warpweave.kernels import reference
from warpweave.kernels.attention import (
    attention,
    attention_bwd,
    attention_delta,
    attention_dsinks,
    attention_fwd,
    launch,
)
from warpweave.kernels.attention.function import attention_op
from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.merge import merge
from warpweave.kernels.reference import Run
from warpweave.kernels.runtime.tile_table import AttentionTile

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])
DROP = {"dropout": 0.3, "dropout_seed": 2**40 + 7, "dropout_origin": (2**31 + 5, 3)}
DOCUMENTS = torch.tensor([0, 13, 13, 75, 87, 150])
EACH = torch.tensor([[0, 13, 13, 75, 150], [0, 40, 44, 60, 150]])  # one row per sample
APART = torch.stack((EACH, EACH.clamp(torch.tensor([[4], [0]]), torch.tensor([[70], [61]]))), 1)
TWO_STRIPED = ((3, 20, 3), (82, 17, 3))


# ---------------------------------------------------------------- 1. softcap


@IMPLS
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 0.5},
        {"softcap": 30.0, "causal": False, "window": 9},
        {"softcap": 2.0, "q_runs": ZIGZAG, "k_runs": ZIGZAG, "documents": DOCUMENTS},
    ],
)
def test_a_softcap_equals_the_reference(impl, options) -> None:
    check(impl, {}, **options)


@IMPLS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_softcap_and_sinks_err_no_more_than_their_roundings(impl, dtype) -> None:
    """A cap far above the scores, for which 2 sigmoid(2x) - 1 alone would cancel in float32."""
    low, sinks = draw(dtype=dtype), torch.randn(2, dtype=dtype).requires_grad_()
    do, options = torch.randn_like(low[0]), {"sinks": sinks, "softcap": 50.0}
    got, *_ = check_roundings(impl, low, do, **options)
    sinks.grad_dtype = torch.float32  # as its parameter requests: not rounded on the way
    wide = with_grads(attention, low, do, **options, return_lse=True, impl=impl)[-1]
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), got[-1])
    assert dtype == torch.float32 or not torch.equal(wide, got[-1].float())


# ---------------------------------------------------------------- 2. sinks


@IMPLS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "window": 9, "softcap": 3.0},
        {"q_runs": ZIGZAG, "k_runs": ((0, 37),), "documents": DOCUMENTS},
    ],
)
def test_sinks_equal_the_reference(impl, options) -> None:
    sinks = torch.randn(2, dtype=F64).requires_grad_()
    check(impl, {"B": 2}, sinks=sinks, **options)
    check(impl, {"B": 2}, with_dlse=False, sinks=sinks, **options)


@IMPLS
def test_rows_that_see_no_key_have_their_sink_for_lse(impl) -> None:
    sinks = torch.tensor([0.5, -math.inf], dtype=F64).requires_grad_()
    options = {"q_runs": ZIGZAG, "k_runs": ((70, 20),)}
    o, lse, *_ = check(impl, {"Sk": 20}, sinks=sinks, **options)
    assert not o[:, :20].any()
    assert_close_f64(lse[0, 0, :20], torch.full((20,), 0.5, dtype=F64), 1e-15)
    assert lse[0, 1, :20].isneginf().all()
    q, k, v = (x.detach() for x in draw(Sk=20))  # a sink of -inf is no sink
    none = attention(q, k, v, sinks=torch.full((2,), -math.inf), **options, impl=impl)
    assert_close_f64(none, attention(q, k, v, **options, impl=impl), 1e-15)
    for empty in ({"Sk": 0}, {"B": 0}, {"Sq": 0}):
        check(impl, {"Sq": 3, "Sk": 4, **empty}, causal=False, sinks=sinks)


@IMPLS
def test_a_sink_counts_once_when_blocks_of_keys_are_merged(impl) -> None:
    q, k, v = (x.detach() for x in draw())
    sinks = torch.randn(2, dtype=F64)
    want = reference.attention(q, k, v, causal=False, sinks=sinks)
    options = {"causal": False, "impl": impl}
    one = attention_fwd(q, k[:, :20], v[:, :20], sinks=sinks, **options)
    two = attention_fwd(q, k[:, 20:], v[:, 20:], **options)
    assert_all_close(merge(*one, *two), want, 1e-13)
    twice = attention_fwd(q, k[:, 20:], v[:, 20:], sinks=sinks, **options)
    assert relative_error(merge(*one, *twice)[0], want[0]) > 1e-2
    o, lse = torch.zeros_like(q), sinks[:, None].expand(1, 2, 37).clone()
    for rows in (slice(20, 37), slice(20)):
        attention_fwd(q, k[:, rows], v[:, rows], into=(o, lse), **options)
    assert_all_close((o, lse), want, 1e-13)


# ---------------------------------------------------------------- 3. dropout


@IMPLS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False, "q_runs": ((5, 37),), "k_runs": ((20, 37),)},
        {"q_runs": ZIGZAG, "k_runs": ZIGZAG, "documents": EACH, "window": 15, "softcap": 3.0},
        {"q_runs": TWO_STRIPED, "k_runs": ((3, 37, 4),), "documents": EACH, "causal": False},
        {"q_runs": ((16, 21), (64, 16)), "k_runs": ((0, 7), (32, 30)), "documents": APART},
        # draws are shared along one dim
        {"q_runs": ((16, 37),), "k_runs": ((8, 37),), "dropout": 0.9},
    ],
)
def test_dropout_equals_the_reference(impl, options) -> None:
    """Every sample and query head draws a separate mask, also if several query heads share keys."""
    sinks = torch.randn(6, dtype=F64).requires_grad_()
    check(impl, {"B": 2, "Hq": 6, "Hkv": 2}, **DROP | options, sinks=sinks)


def test_dropout_with_documents_per_sample_equals_that_of_each_sample_alone() -> None:
    """There are more rows than the CPU processes at once: every block knows
    its sample, head and rows."""
    rows = 141
    runs = {"q_runs": ((5, rows, 3),), "k_runs": ((2, 37, 9),)}
    options = {**DROP, **runs, "causal": False}
    qkv, do = draw(B=2, Sq=rows, D=8, Hkv=2), torch.randn(2, rows, 2, 8, dtype=F64)
    documents = torch.tensor([[0, 20, 139, 500], [0, 9, 30, 500]])
    got = with_grads(attention, qkv, do, documents=documents, return_lse=True, **options)
    for sample in range(2):
        for head in range(2):
            part = [x[sample, None, :, head, None].detach().requires_grad_() for x in qkv]
            options["dropout_origin"] = (2**31 + 5 + sample, 3 + head)
            found = with_grads(
                reference.attention, part, do[sample, None, :, head, None],
                documents=documents[sample], **options,
            )  # fmt: skip
            for i, (whole, x) in enumerate(zip(got, found, strict=True)):
                mine = whole[sample, head] if i == 1 else whole[sample, :, head]
                assert_close_f64(mine, x[0, 0] if i == 1 else x[0, :, 0], 1e-12)


@IMPLS
def test_every_layout_draws_the_same_mask(impl) -> None:
    """Half of the rows, heads or samples with their own origin give the same bits."""
    q, k, v = (x.detach() for x in draw(B=2, Hq=4, Hkv=2))
    options = {"dropout": 0.5, "dropout_seed": 3, "impl": impl}
    whole, lse = attention_fwd(q, k, v, **options)
    rows = [*range(3, 9), *range(30, 37)]
    some = attention(q[:, rows], k, v, q_runs=((3, 6), (30, 7)), **options)
    assert_close_f64(some, whole[:, rows], 1e-13)
    stripe = attention(q[:, 2::4], k, v, q_runs=((2, 9, 4),), **options)
    assert_close_f64(stripe, whole[:, 2::4], 1e-13)
    heads = attention(q[:, :, 2:], k[:, :, 1:], v[:, :, 1:], dropout_origin=(0, 2), **options)
    assert_close_f64(heads, whole[:, :, 2:], 1e-13)
    sample = attention(q[1:], k[1:], v[1:], dropout_origin=(1, 0), **options)
    assert_close_f64(sample, whole[1:], 1e-13)
    assert_close_f64(lse, attention_fwd(q, k, v, impl=impl)[1], 1e-15)  # lse ignores dropout
    for other in ({"dropout_seed": 4}, {"dropout_seed": 3 + 2**32}, {"dropout_origin": (0, 1)}):
        assert relative_error(attention(q, k, v, **{**options, **other}), whole) > 0.1


@IMPLS
def test_as_many_are_dropped_as_was_asked_for_and_the_mean_stays(impl) -> None:
    q, k = torch.zeros(1, 64, 1, 1, dtype=F64), torch.zeros(1, 64, 1, 1, dtype=F64)
    o = attention(q, k, k + 1, causal=False, dropout=0.25, dropout_seed=5, impl=impl)
    kept = o * 64 * 0.75  # how many of 64 are kept
    assert_close_f64(kept, kept.round(), 1e-12)
    assert abs(kept.mean() - 48) < 1.5  # of a standard deviation of 0.43
    assert kept.unique().numel() > 5


@IMPLS
def test_the_four_probabilities_of_a_draw_are_independent(impl) -> None:
    """Each pair is dropped together as often as by chance: no random word is used twice."""
    S, p = 64, 0.5
    q, k = torch.zeros(1, S, 16, 1, dtype=F64), torch.zeros(1, S, 16, 1, dtype=F64)
    v = torch.eye(S, dtype=F64)[None, :, None, :].expand(1, S, 16, S)
    o = attention(q, k, v, causal=False, dropout=p, dropout_seed=11, impl=impl)
    kept = (o > 0).double()
    four = rearrange(kept, "b (q i m) h (k j n) -> (i j) (b h q m k n)", i=2, j=2, m=8, n=8)
    limit = 5 / four.shape[1] ** 0.5  # of a correlation's standard deviation
    assert (torch.corrcoef(four) - torch.eye(4, dtype=F64)).abs().max() < limit
    assert (four.mean(1) - (1 - p)).abs().max() < limit * p


# ---------------------------------------------------------------- 4. into


@IMPLS
def test_carried_sums_start_from_nothing_and_add_where_they_lie(impl) -> None:
    q, k, v = (x.detach() for x in draw(Sk=20))
    options = {"q_runs": ZIGZAG, "k_runs": ((16, 20),), "impl": impl}  # 6 rows see no key
    want = attention_fwd(q, k, v, **options)
    memory = torch.full((1, 37, 2, 40), 7.0, dtype=F64)
    o, lse = memory[..., 3:19], torch.full((1, 2, 37), -math.inf, dtype=F64)
    o.fill_(math.nan)  # must not be read where lse is -inf
    got = attention_fwd(q, k, v, into=(o, lse), **options)
    assert got[0] is o
    assert got[1] is lse
    assert_all_close((o, lse), want, 1e-15)
    assert (memory[..., [0, 1, 2, *range(19, 40)]] == 7).all()
    do, delta = torch.randn_like(q), attention_delta(o, torch.randn_like(q))
    for which in ((0,), (1, 2), (0, 1, 2)):
        parts = attention_bwd(do, q, k, v, lse, delta, **options)
        into = [None] * 3
        for n in which:
            into[n] = torch.randn(*parts[n].shape[:3], 40, dtype=F64)[..., 5:21]
        before = [None if x is None else x.clone() for x in into]
        got = attention_bwd(do, q, k, v, lse, delta, into=tuple(into), **options)
        for n, (g, part) in enumerate(zip(got, parts)):
            assert_close_f64(g, part if n not in which else before[n] + part, 1e-14)
            assert n not in which or g is into[n]


@IMPLS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_the_error_of_carried_sums_does_not_grow_with_their_number(impl, dtype) -> None:
    q, k, v = (x.detach() for x in draw(Sq=20, Sk=64, dtype=dtype))
    do, options = torch.randn_like(q), {"causal": False, "impl": impl}
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    truth = with_grads(reference.attention, exact, do.double(), causal=False)
    errors = []
    for hops in (1, 16):
        o, lse = torch.zeros(q.shape), torch.full((1, 2, 20), -math.inf)
        parts = [slice(n, n + 64 // hops) for n in range(0, 64, 64 // hops)]
        for rows in parts:
            attention_fwd(q, k[:, rows], v[:, rows], into=(o, lse), **options)
        dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
        delta = attention_delta(o, do, impl=impl)
        for rows in parts:
            into = (dq, dk[:, rows], dv[:, rows])
            attention_bwd(do, q, k[:, rows], v[:, rows], lse, delta, into=into, **options)
        errors.append([relative_error(g, t) for g, t in zip((o, lse, dq, dk, dv), truth)])
    for one, many in zip(*errors):
        assert many <= 2 * one + 1e-6  # float32 rounds o and lse once per hop


@IMPLS
def test_gradients_pass_gradcheck(impl) -> None:
    sinks = torch.randn(2, dtype=F64).requires_grad_()

    def f(*x):
        return attention(
            *x[:3], sinks=x[3], softcap=1.5, window=3, **DROP, return_lse=True, impl=impl
        )

    qkv = draw(Sq=4, Sk=5, D=3)
    assert torch.autograd.gradcheck(f, (*qkv, sinks), fast_mode=True)
    delta, lse = torch.randn(2, 2, 5, dtype=F64), torch.randn(2, 2, 5, dtype=F64)
    want = -torch.einsum("bhs,bhs->h", (sinks[:, None] - lse).exp(), delta)
    assert_close_f64(attention_dsinks(sinks.detach(), lse, delta), want, 1e-14)


@IMPLS
def test_the_custom_op_passes_opcheck_and_compiles(impl) -> None:
    qkv, sinks = draw(Sq=4, Sk=4, D=4), torch.randn(2, dtype=F64).requires_grad_()
    key = {"dropout": 0.5, "dropout_seed": 7, "dropout_origin": (1, 2)}
    options = AttentionOptions(softcap=2.0, **key, impl=impl)
    well_formed(attention_op, *qkv, sinks, options)

    def loss(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, softcap=2.0, **DROP, impl=impl).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, want = compiled(*qkv, sinks), loss(*qkv, sinks)
    assert torch.equal(got, want)
    inputs = (*qkv, sinks)
    assert_same_bits(torch.autograd.grad(got, inputs), torch.autograd.grad(want, inputs))


@IMPLS
def test_planted_faults_are_far_outside_the_tolerance(impl) -> None:
    q, k, v = (x.detach() for x in draw())
    sinks, do = torch.randn(2, dtype=F64), torch.randn_like(q)
    right = {"softcap": 2.0, "dropout": 0.3, "dropout_seed": 3}
    o, lse = reference.attention(q, k, v, sinks=sinks, **right)
    for fault in ({"softcap": None}, {"dropout": 0.0}, {"dropout": 0.31}, {"dropout_seed": 2}):
        wrong = attention(q, k, v, sinks=sinks, **{**right, **fault}, impl=impl)
        assert relative_error(wrong, o) > 1e-2, fault
    assert relative_error(attention(q, k, v, sinks=sinks.flip(0), **right, impl=impl), o) > 1e-2
    delta = attention_delta(o, do)
    want = attention_bwd(do, q, k, v, lse, delta, **right, impl=impl)
    for fault in ({"softcap": None}, {"dropout": 0.0}, {"dropout_seed": 2}):
        got = attention_bwd(do, q, k, v, lse, delta, **{**right, **fault}, impl=impl)
        assert all(relative_error(g, w) > 1e-2 for g, w in zip(got, want)), fault


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, ""),
        ({"causal": False}, ""),
        ({"window": 3}, "bounded"),
        ({"documents": torch.tensor([[0, 64]])}, "bounded"),
        ({"softcap": 2.0, "into": True}, "softcap into"),
        ({"D": 40}, "masked"),
        ({"D": 40, "dtype": F64}, ""),
        ({"D": 8}, "masked"),
        ({"dropout": 0.1}, "shared"),
        ({"dropout": 0.1, "D": 40}, "shared masked"),
        ({"dropout": 0.1, "window": 3}, "dropout bounded"),
        ({"dropout": 0.1, "q_runs": (Run(16, 32), Run(96, 32))}, "shared"),
        # splits the four probabilities of one draw
        ({"dropout": 0.1, "q_runs": (Run(8, 64),)}, "dropout"),
        ({"q_runs": (Run(1, 64, 2),)}, "striped"),
        ({"dropout": 0.1, "k_runs": (Run(0, 64, 2),)}, "dropout striped"),
    ],
    ids=str,
)
def test_a_variant_is_what_a_call_keeps_beside_plain_attention(given, words) -> None:
    given = dict(given)
    D, into = given.pop("D", 64), given.pop("into", False)
    q = torch.empty(1, 64, 1, D, dtype=given.pop("dtype", torch.float16))
    runs = {"q_runs": (Run(0, 64),), "k_runs": (Run(0, 64),)}
    options = AttentionOptions(**runs | given)
    assert launch.variant_of(q, options, into) == set(words.split())


def test_launches_that_ptxas_would_spill_state_their_registers(monkeypatch) -> None:
    q, tile = torch.empty(1, 1, 1, 64), AttentionTile(64, 32, 8, 2)

    def options(q=q, tile=tile, **call):
        return launch.launch_options(tile, q, frozenset(call))

    plain = {"num_warps": 8, "num_stages": 2}
    assert options() == {**plain, "maxnreg": 255}
    # 65536 registers for 512 threads
    assert options(tile=tile._replace(warps=16))["maxnreg"] == 128
    for low in (q.half(), q.bfloat16(), q.double()):
        assert options(low, dropout=True) == plain
    assert options(q.half(), masked=True) == {**plain, "maxnreg": 255}
    tiles_of(monkeypatch, 100)
    assert options(q.half()) == plain
    for drawn in ("dropout", "shared"):
        assert options(q.half(), **{drawn: True}) == {**plain, "maxnreg": 255}
    assert options(torch.empty(1, 1, 1, 128).half()) == {**plain, "maxnreg": 255}
