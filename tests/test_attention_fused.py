"""Attention's backward in one kernel: where the tile table has a tile for it, dk's and dv's kernel
also adds dq. The interpreter runs programs one after another, so here its sums have one order."""

from functools import partial
from unittest import mock

import pytest
import torch
import triton.language as tl
from attention_cases import STRIPED, ZIGZAG, assert_within, check, draw, rounding_bounds, with_grads
from close import assert_all_close, assert_close_f64, assert_same_bits, relative_error
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from warpweave.compat import flash_attn
from warpweave.compat.flash_attn import flash_attn_func
from warpweave.kernels import reference
from warpweave.kernels.attention import attention, attention_bwd, attention_fwd, backward, launch
from warpweave.kernels.runtime.tile_table import AttentionTile
from warpweave.kernels.runtime.tiles import pinned
from warpweave.parallel.context.attention import context_attention
from warpweave.parallel.layout import SequenceLayout
from warpweave.parallel.mesh import Mesh

F64 = torch.float64
TILE = AttentionTile(16, 32, 4, 1)


@pytest.fixture
def fused(monkeypatch):
    """Pin a tile of the fused kernel, and let no call run dq's own kernel."""
    monkeypatch.setattr(backward, "_launch_dq", mock.Mock(side_effect=AssertionError("dq's own")))
    with pinned({("attention_bwd", size, D): TILE for size in (2, 4, 8) for D in range(1, 129)}):
        yield


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"Sq": 67, "Sk": 67, "Hq": 3, "Hkv": 1, "D": 40}, {}),
        ({"B": 2, "Sq": 67, "Sk": 41, "Hq": 4, "Hkv": 2, "D": 59}, {"causal": False}),
        ({"Sq": 13, "Sk": 70, "D": 64}, {}),  # keys that no query sees
        ({"B": 2, "Sq": 67, "Sk": 67, "Hq": 4, "Hkv": 2, "D": 96}, {}),
        ({"Sq": 37, "Sk": 30, "D": 96}, {"q_runs": ZIGZAG, "k_runs": ((0, 10), (87, 20))}),
        ({"Sq": 1, "Sk": 1, "Hq": 1, "D": 1}, {}),
        ({"Sq": 37, "Sk": 37}, {"window": 9, "softcap": 2.0, "scale": 0.7}),
        ({"B": 2, "Sq": 37, "Sk": 37}, {"documents": torch.tensor([0, 5, 5, 30, 37])}),
        ({"Sq": 37, "Sk": 37}, {"dropout": 0.3, "dropout_seed": 5, "dropout_origin": (2, 3)}),
        ({"Sq": 32, "Sk": 48}, {"dropout": 0.3, "causal": False}),  # draws of four weights
        ({"Sq": 37, "Sk": 37}, {"q_runs": ZIGZAG, "k_runs": ZIGZAG}),
        ({"Sq": 37, "Sk": 30}, {"q_runs": ZIGZAG, "k_runs": ((0, 10), (87, 20))}),
        ({"Sq": 37, "Sk": 37}, {"q_runs": STRIPED, "k_runs": STRIPED, "window": 30}),
    ],
)
def test_gradients_equal_the_reference(fused, sizes, options) -> None:
    check("triton", sizes, **options)


@pytest.mark.parametrize("D", [60, 64])
def test_gradients_of_half_precision_err_no_more_than_their_roundings(fused, D) -> None:
    """fp16: the interpreter's bf16 arithmetic is not a GPU's. 60 columns are padded to 64."""
    low = draw(B=2, Sq=70, Sk=70, Hq=4, Hkv=2, D=D, dtype=torch.float16)
    do = torch.randn_like(low[0])
    exact = [x.detach().double().requires_grad_() for x in low]
    truth = with_grads(reference.attention, exact, do.double())
    got = with_grads(attention, low, do, return_lse=True, impl="triton")
    for g, t, bound in zip(got, truth, rounding_bounds(low, do), strict=True):
        assert_within(g, t, bound)


@pytest.mark.parametrize("causal", [False, True])
def test_keys_past_the_end_of_a_tile_add_nothing(fused, causal) -> None:
    """They are zero, with scores of 0. Where all others are far below, p of a 0 overflows."""
    q, k, v = (x.detach() for x in draw(Sq=60, Sk=41, D=16))
    q, k = torch.ones_like(q), k - 200
    for x in (q, k, v):
        x.requires_grad_()
    do = torch.randn_like(q)
    options = {"causal": causal, "return_lse": True}
    wanted = with_grads(attention, (q, k, v), do, impl="torch", **options)
    assert wanted[1].max() < -710  # exp(710) overflows in float64
    assert_all_close(with_grads(attention, (q, k, v), do, impl="triton", **options), wanted, 1e-12)


def test_only_dq_may_be_given_as_in_a_ring(fused) -> None:
    q, k, v = (x.detach().float() for x in draw(B=2, Sq=37, Sk=37, Hq=4, Hkv=2, D=20))
    do, dq = torch.randn_like(q), torch.randn_like(q)
    o, lse = attention_fwd(q, k, v, impl="triton")
    delta = (o * do).sum(-1).transpose(1, 2)
    wanted = attention_bwd(do, q, k, v, lse, delta, impl="torch")
    given = dq.clone(), None, None
    found = attention_bwd(
        do, q, k, v, lse, delta, into=given, grad_dtype=torch.float64, impl="triton"
    )
    assert [x.dtype for x in found] == [torch.float32, torch.float64, torch.float64]
    for x, y in zip((found[0] - dq, *found[1:]), wanted, strict=True):
        assert relative_error(x, y) < 1e-5


def test_blocks_of_keys_add_up_into_given_gradients(fused) -> None:
    q, k, v = (x.detach() for x in draw(B=2, Sq=37, Sk=50, Hq=4, Hkv=2))
    do, start = torch.randn_like(q), [torch.randn_like(x) for x in (q, k, v)]
    runs, cut = {"q_runs": ((13, 37),)}, 20
    o, lse = attention_fwd(q, k, v, **runs, impl="triton")
    delta = (o * do).sum(-1).transpose(1, 2)
    whole = attention_bwd(do, q, k, v, lse, delta, **runs, impl="torch")
    dq, dk, dv = (x.clone() for x in start)
    for part, first in ((slice(cut), 0), (slice(cut, 50), cut)):
        into = dq, dk[:, part], dv[:, part]
        rows = {**runs, "k_runs": ((first, k[:, part].shape[1]),)}
        attention_bwd(do, q, k[:, part], v[:, part], lse, delta, into=into, **rows, impl="triton")
    for sums, before, grad in zip((dq, dk, dv), start, whole, strict=True):
        assert_close_f64(sums - before, grad, 1e-12)


def _use_copy_engine(monkeypatch) -> list[object]:
    """As on a Hopper GPU, add to a tensor descriptor; the list grows by one for each tile."""
    added = []

    def reduce(self, kind, descriptor, value, at) -> None:
        assert kind == ir.DESCRIPTOR_REDUCE_KIND.ADD
        ptrs, inside = descriptor.materialize_pointers(at)
        inside = TensorHandle(inside, tl.int1)
        how = ir.ATOMIC_OP.FADD, ptrs, value, inside, ir.MEM_SEMANTIC.RELAXED, None
        added.append(self.create_atomic_rmw(*how))

    monkeypatch.setattr(launch, "capability", lambda device: 90)
    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_reduce", reduce, raising=False)
    return added


@pytest.mark.parametrize("D", [16, 40])
def test_the_copy_engine_adds_what_atomics_do(fused, monkeypatch, D) -> None:
    """Its tiles continue past the last row, into another head, and past the last column."""
    q, k, v = (x.detach().float() for x in draw(B=2, Sq=37, Sk=50, Hq=4, Hkv=2, D=D))
    do, rows = torch.randn_like(q), torch.rand(2, 4, 37)
    given = do, q, k, v, rows + 3, rows
    wanted = attention_bwd(*given, impl="triton")
    added = _use_copy_engine(monkeypatch)
    assert_same_bits(attention_bwd(*given, impl="triton"), wanted)
    assert added


def test_atomics_stay_within_the_sums(fused, monkeypatch) -> None:
    """Also where they would add only zeros: on a GPU that memory may not exist."""
    sums, atomic = [], InterpreterBuilder.create_atomic_rmw
    made = launch.added_rows

    def watched(self, op, ptr, value, mask, *rest):
        where, first = ptr.data[mask.data], sums[0].data_ptr()
        assert first <= where.min()
        assert where.max() < first + sums[0].nbytes
        return atomic(self, op, ptr, value, mask, *rest)

    monkeypatch.setattr(launch, "added_rows", lambda x, tile: sums.append(x) or made(x, tile))
    monkeypatch.setattr(InterpreterBuilder, "create_atomic_rmw", watched)
    q, k, v = (x.detach() for x in draw(Sq=37, Sk=50, D=20))
    rows = torch.rand(1, 2, 37, dtype=F64)
    attention_bwd(q, q, k, v, rows + 3, rows, impl="triton")
    assert len(sums) == 1


def _grads(run, qkv, do):
    o = run(*qkv)
    return torch.autograd.grad(o[0] if isinstance(o, tuple) else o, qkv, do)


def _over_one_rank(q, k, v, **options):
    layout, group = SequenceLayout(q.shape[1], 1), Mesh().connect().context
    return context_attention(q, k, v, layout=layout, group=group, impl="triton", **options)


@pytest.mark.parametrize(
    "run",
    [
        partial(attention, impl="triton"),
        torch.compile(partial(attention, impl="triton"), backend="aot_eager"),
        flash_attn_func,
        _over_one_rank,
    ],
    ids=["attention", "compiled", "flash_attn", "context"],
)
def test_results_that_must_be_deterministic_have_their_own_kernels(monkeypatch, run) -> None:
    qkv = draw(B=2, Sq=37, Sk=37, Hq=4, Hkv=2, dtype=torch.float32)
    do = torch.randn_like(qkv[0])
    monkeypatch.setattr(flash_attn, "attention", partial(attention, impl="triton"))
    three = _grads(run, qkv, do)
    seen = mock.Mock(side_effect=backward._launch_fused)
    monkeypatch.setattr(backward, "_launch_fused", seen)
    with pinned({("attention_bwd", 4, 16): TILE}):
        _grads(run, qkv, do)
        assert seen.call_count == 1
        assert_same_bits(_grads(partial(run, deterministic=True), qkv, do), three)
        torch.use_deterministic_algorithms(True)
        try:
            assert_same_bits(_grads(run, qkv, do), three)
        finally:
            torch.use_deterministic_algorithms(False)
    assert seen.call_count == 1


def test_deterministic_is_a_bool() -> None:
    with pytest.raises(ValueError, match="deterministic must be a bool, got 'yes'"):
        attention(*draw(), deterministic="yes")


@pytest.mark.parametrize("empty", [{"Sq": 0}, {"Sk": 0}, {"B": 0}])
def test_empty_tensors_have_empty_or_zero_gradients(empty) -> None:
    q, k, v = (x.detach() for x in draw(**{"Sq": 5, "Sk": 5} | empty))
    rows = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=F64)
    with pinned({("attention_bwd", 8, 16): TILE}):
        grads = attention_bwd(q, q, k, v, rows, rows, impl="triton")
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert not grad.any()
