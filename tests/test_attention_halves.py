"""The forward and backward of attention as separate functions: every option is used, tensors have
any strides, and float32 results of 16-bit inputs are not rounded on the way."""

import pytest
import torch
from attention_cases import F64, draw
from close import assert_all_close, assert_close_f64, assert_same_bits, relative_error

from warpweave.kernels import reference
from warpweave.kernels.attention import (
    attention,
    attention_bwd,
    attention_delta,
    attention_dsinks,
    attention_fwd,
    torch_path,
)
from warpweave.kernels.attention.visible import packed

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])
DROP = {"dropout": 0.4, "dropout_seed": 7, "dropout_origin": (5, 9)}
PLAIN = {
    "causal": True, "window": None, "documents": None, "scale": None, "softcap": None,
    "q_runs": None, "k_runs": None, "dropout": 0.0, "dropout_seed": 0, "dropout_origin": (0, 0),
}  # fmt: skip
OPTIONS = {  # each changes the result given the others
    "causal": {"causal": False},
    "window": {"window": 3},
    "documents": {"documents": torch.tensor([0, 4, 11])},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 0.5},
    "q_runs": {"q_runs": ((0, 3), (20, 8))},
    "k_runs": {"k_runs": ((3, 11),)},
    "dropout": DROP,
    "dropout_seed": DROP | {"dropout_seed": 8},
    "dropout_origin": DROP | {"dropout_origin": (9, 5)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_halves_take_every_option_and_have_the_defaults_of_the_whole(name) -> None:
    qkv, do = draw(B=2, Sq=11, Sk=11, Hq=4, Hkv=2, D=8), torch.randn(2, 11, 4, 8, dtype=F64)
    halves = [x.detach() for x in qkv]

    def both(options) -> list[tuple[torch.Tensor, ...]]:
        o, lse = attention(*qkv, return_lse=True, **options)
        whole = o, lse, *torch.autograd.grad(o, qkv, do)
        o, lse = attention_fwd(*halves, **options)
        back = attention_bwd(do, *halves, lse, attention_delta(o, do), **options)
        return [whole, (o, lse, *back)]

    whole, found = both(OPTIONS[name])
    assert_all_close(found, whole)
    assert_all_close(whole[:2], reference.attention(*halves, **OPTIONS[name]))
    others = OPTIONS["dropout"] if name.startswith("dropout_") else {}
    for a, b in zip(both(others), (whole, found), strict=True):
        assert min(relative_error(x, y) for x, y in zip(a, b) if x is not a[1]) > 1e-3, name
    for results in both(PLAIN | OPTIONS[name]):
        assert_all_close(results, whole)


@IMPLS
@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 2.0}], ids=["plain", "rows"])
def test_the_backward_takes_statistics_of_any_strides(options, impl) -> None:
    """The backward accepts views of o, do, lse and delta, of which a rank may hold parts."""
    q, k, v = (x.detach() for x in draw(B=2, Sq=19, Sk=19, Hq=4, Hkv=2, D=8))
    do = torch.randn_like(q)
    o, lse = attention_fwd(q, k, v, **options)
    delta = attention_delta(o, do)
    want = attention_bwd(do, q, k, v, lse, delta, **options)

    def turned(x: torch.Tensor) -> torch.Tensor:
        order = [*range(x.ndim)][::-1]
        return x.permute(order).contiguous().permute(order)

    given, options = {"impl": impl}, {**options, "impl": impl}
    assert_close_f64(attention_delta(turned(o), turned(do), turned(delta), **given), 0 * delta)
    for args, more in (
        ((turned(do), q, k, v, turned(lse), turned(delta)), {}),
        ((turned(do), q, k, v, turned(lse), None), {"o": turned(o)}),
        ((do, turned(q), turned(k), turned(v), lse, turned(delta)), {"o": turned(o)}),
        ((do, q, k, v, torch.stack((lse, lse), -1)[..., 0], delta), {}),
    ):
        assert not all(x is None or x.is_contiguous() for x in args)
        assert_all_close(attention_bwd(*args, **more, **options), want)


WIDE = {
    "plain": {},
    "full": {"causal": False},
    "runs": {"q_runs": ((7, 19),), "k_runs": ((0, 19),)},
    "documents": {"documents": torch.tensor([0, 6, 19])},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", WIDE)
def test_float32_results_of_16_bit_inputs_are_those_of_float32_inputs(name, dtype) -> None:
    """They are partial results of the CPU path that are added later, and
    the sums they are added to."""
    low = [x.detach() for x in draw(Sq=19, Sk=19, Hq=4, Hkv=2, D=8, dtype=dtype)]
    options = WIDE[name]
    do, wide = torch.randn_like(low[0]), [x.float() for x in low]
    want = attention_fwd(*wide, **options)
    assert_same_bits(attention_fwd(*low, out_dtype=torch.float32, **options), want)
    sums = torch.zeros_like(wide[0]), torch.full_like(want[1], -torch.inf)
    assert_all_close(attention_fwd(*low, into=sums, **options), want, 1e-6)
    delta = attention_delta(want[0], do)
    for stats in ({"delta": delta}, {"delta": None, "o": want[0]}):
        exact = attention_bwd(do.float(), *wide, want[1], **stats, **options)
        found = attention_bwd(do, *low, want[1], grad_dtype=torch.float32, **stats, **options)
        assert_same_bits(found, exact)
        sums = tuple(torch.zeros_like(x) for x in wide)
        assert_all_close(attention_bwd(do, *low, want[1], into=sums, **stats, **options), exact, 0)
    # With delta, everything stays float32 until the end.
    rounded = attention_bwd(do, *low, want[1], delta, **options)
    exact = attention_bwd(do.float(), *wide, want[1], delta, **options)
    assert_same_bits(rounded, [x.to(dtype) for x in exact])


@IMPLS
@pytest.mark.parametrize("options", [{}, {"window": 5, "softcap": 2.0} | DROP], ids=str)
def test_autocast_leaves_the_halves_alone(options, impl) -> None:
    q, k, v = (x.detach() for x in draw(Sq=19, Sk=19, Hq=4, Hkv=2, D=8, dtype=torch.float32))
    do, options = torch.randn_like(q), {**options, "impl": impl}

    def run():
        o, lse = attention_fwd(q, k, v, **options)
        delta = attention_delta(o, do, impl=impl)
        by_delta = attention_bwd(do, q, k, v, lse, delta, **options)
        by_o = attention_bwd(do, q, k, v, lse, None, o=o, **options)
        return o, lse, delta, *by_delta, *by_o

    want = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run(), want)


@IMPLS
def test_packed_documents_give_the_results_of_their_boundaries(impl) -> None:
    """Queries and keys are different rows of the sequence that the table describes."""
    runs = {"q_runs": ((4, 9), (30, 8)), "k_runs": ((0, 12), (24, 13))}
    qkv, do = draw(B=2, Sq=17, Sk=25, D=8), torch.randn(2, 17, 2, 8, dtype=F64)
    for documents in ([0, 7, 26, 40], [[0, 7, 26, 40], [0, 31, 31, 40]]):
        documents = torch.tensor(documents)
        for causal in (True, False):
            options = {**runs, "causal": causal}
            truth, _ = reference.attention(*qkv, documents=documents, **options)
            found = attention(*qkv, documents=packed(documents, 40), impl=impl, **options)
            assert_close_f64(found, truth)
            assert_all_close(*(torch.autograd.grad(y, qkv, do) for y in (found, truth)))


@IMPLS
@pytest.mark.parametrize("q_run", [(4, 5), (1, 5, 7)], ids=str)
def test_float32_rows_of_one_run_are_taken_from_the_table_of_the_sequence(q_run, impl) -> None:
    """For float64, kernels get a copy of it."""
    qkv = [x.detach().float().requires_grad_() for x in draw(B=2, Sq=5, Sk=7, D=8)]
    documents = torch.tensor([[0, 7, 26, 40], [0, 31, 31, 40]])
    options = {"q_runs": (q_run,), "k_runs": ((2, 7),), "causal": False}
    truth, _ = reference.attention(*(x.double() for x in qkv), documents=documents, **options)
    found = attention(*qkv, documents=packed(documents, 40), impl=impl, **options)
    assert_close_f64(found, truth, 1e-5)
    do = torch.randn(truth.shape, dtype=F64)
    grads = (torch.autograd.grad(o, qkv, do.to(o.dtype)) for o in (found, truth))
    assert_all_close(*grads, 1e-5)


@IMPLS
def test_dropout_of_almost_1_gives_zeros_and_no_gradient(impl) -> None:
    """1 - 1e-12 rounds to 1 in units of 2^-32, in which kernels draw."""
    qkv = draw(Sq=7, Sk=7, D=8)
    o, lse = attention(*qkv, dropout=1 - 1e-12, return_lse=True, impl=impl)
    assert not o.any()
    assert_close_f64(lse, attention(*qkv, return_lse=True)[1])
    assert not any(x.any() for x in torch.autograd.grad(o.sum(), qkv))


@IMPLS
def test_upstream_gradient_is_cast_to_the_dtype_of_the_queries(impl) -> None:
    q, k, v = (x.detach() for x in draw(Sq=19, Sk=19, Hq=4, Hkv=2, D=8, dtype=torch.bfloat16))
    do, options = torch.randn(q.shape), {"grad_dtype": torch.float32, "impl": impl}
    o, lse = attention_fwd(q, k, v, impl=impl)
    delta = attention_delta(o, do, impl=impl)
    assert delta.dtype == torch.float32
    assert_close_f64(delta, (o.double() * do).sum(-1).transpose(1, 2), 1e-5)
    found, rounded = (attention_bwd(x, q, k, v, lse, delta, **options) for x in (do, do.bfloat16()))
    assert_same_bits(found, rounded)


@IMPLS
def test_sinks_may_have_any_strides_and_a_dtype_of_their_own(impl) -> None:
    q, k, v = draw(B=2, Sq=9, Sk=9, Hq=4, Hkv=2, D=8, dtype=torch.float32)
    for dtype in (torch.float16, torch.float32, F64):
        sinks = torch.randn(2, 8).t().flatten()[::4].to(dtype).repeat_interleave(3)[::3]
        sinks.requires_grad_()
        o, lse = attention(q, k, v, sinks=sinks, return_lse=True, impl=impl)
        truth, rows = reference.attention(q, k, v, sinks=sinks.float())
        assert_close_f64(o, truth, 1e-5)
        assert_close_f64(lse, rows, 1e-6)
        do = torch.randn_like(o)
        found, wanted = (torch.autograd.grad(y, sinks, do)[0] for y in (o, truth))
        assert found.dtype == dtype
        error = 2e-3 if dtype == torch.float16 else 1e-4  # gradients are rounded to its dtype
        assert_close_f64(found, wanted, error)
        delta = attention_delta(o.detach(), do)
        dsinks = attention_dsinks(sinks.detach(), lse.detach(), delta)
        assert dsinks.dtype == torch.float32
        assert_close_f64(dsinks, wanted, error)


@IMPLS
def test_delta_of_several_tiles_takes_any_strides(impl) -> None:
    """The kernel takes 64 rows at a time: two full tiles and a part of one."""
    o, do = torch.randn(2, 130, 3, 5, dtype=F64), torch.randn(2, 130, 3, 5, dtype=F64)
    dlse = torch.randn(2, 3, 130, dtype=F64)
    want = torch.einsum("bshd,bshd->bhs", o, do) - dlse
    for order in ((0, 1, 2, 3), (2, 1, 3, 0)):
        rows = [n for n in order if n != 3]
        laid = [
            x.permute(p).contiguous().permute(torch.tensor(p).argsort().tolist())
            for x, p in ((o, order), (do, order[::-1]), (dlse, rows))
        ]
        delta = attention_delta(*laid, impl=impl)
        assert delta.is_contiguous()
        assert_close_f64(delta, want)


ROWS = {
    "window": {"window": 7},
    "both ways": {"window": 4, "causal": False},
    "documents": {"window": 9, "documents": torch.tensor([0, 5, 19, 44])},
    "softcap": {"softcap": 0.5, "causal": False},
    "dropout": DROP,
}
RUNS = {
    "rows": {"q_runs": ((0, 14),), "k_runs": ((0, 14),)},
    "striped": {"q_runs": ((1, 14, 3),), "k_runs": ((2, 14, 3),)},
    "two": {"q_runs": ((3, 9), (30, 5)), "k_runs": ((0, 6), (26, 8))},
    "two striped": {"q_runs": ((2, 9, 2), (25, 5, 2)), "k_runs": ((1, 6, 2), (20, 8, 2))},
}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("name", ROWS)
def test_blocks_of_any_number_of_rows_give_the_result_of_one(name, runs, monkeypatch) -> None:
    """The blocks of the CPU path, where torch's flash attention is unavailable."""
    qkv, do = draw(B=2, Sq=14, Sk=14, Hq=4, Hkv=2, D=8), torch.randn(2, 14, 4, 8, dtype=F64)
    options = ROWS[name] | RUNS[runs]
    truth = reference.attention(*qkv, **options)
    want = *truth, *torch.autograd.grad(truth[0], qkv, do)
    for rows in (1, 4, 5, 14):
        monkeypatch.setattr(torch_path, "ROWS", rows)
        o, lse = attention(*qkv, return_lse=True, impl="torch", **options)
        assert_all_close((o, lse, *torch.autograd.grad(o, qkv, do)), want)
