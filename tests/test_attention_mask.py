"""Windows and packed documents on both paths, against the reference, alone and with any runs."""

import math
import re
from itertools import pairwise

import pytest
import torch
from attention_cases import (
    F64,
    STRIPED,
    ZIGZAG,
    check,
    check_roundings,
    draw,
    with_grads,
)
from close import assert_all_close, assert_close_f64, assert_same_bits, relative_error
from torch import Tensor
from torch._subclasses import FakeTensorMode
from well_formed import well_formed

from warpweave.kernels import reference
from warpweave.kernels.attention import (
    attention,
    attention_bwd,
    attention_delta,
    attention_fwd,
    function,
)
from warpweave.kernels.attention.function import attention_op
from warpweave.kernels.attention.options import (
    AttentionOptions,
    check_boundaries,
    check_packed,
    checked,
)
from warpweave.kernels.attention.visible import document_table, packed, rows_before, rows_of
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.layers.attention import Attention
from warpweave.layers.context import TokenContext
from warpweave.parallel.context import context_attention
from warpweave.parallel.layout import SequenceLayout

IMPLS = pytest.mark.parametrize("impl", ["torch", "triton"])


def _documents(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


# One token, none, several tiles; and one sample of each kind if samples differ.
PACKED = _documents(1, 0, 40, 3, 0, 0, 22, 1)
EACH = torch.stack((_documents(67, 0, 0), _documents(30, 7, 30)))


@IMPLS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 5, 33])
def test_a_window_equals_the_reference(impl, causal, window) -> None:
    check(impl, {"Sq": 67, "Sk": 67, "Hq": 1, "D": 40}, causal=causal, window=window)


@IMPLS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("documents", "window"), [(PACKED, None), (PACKED, 30), (EACH, 5)])
def test_packed_documents_equal_the_reference(impl, causal, documents, window) -> None:
    sizes = {"B": 2, "Sq": 67, "Sk": 67, "Hq": 2, "D": 16}
    check(impl, sizes, with_dlse=causal, causal=causal, window=window, documents=documents)


@IMPLS
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("q_runs", "k_runs"),
    [
        (ZIGZAG, ZIGZAG),
        (ZIGZAG, ((0, 30), (80, 20))),  # a ring hop
        (ZIGZAG, ((0, 97),)),  # all keys gathered
        (((70, 17), (10, 20)), ((15, 60), (0, 15))),  # descending
        (STRIPED, STRIPED),
        (STRIPED, ((3, 25, 4),)),  # a ring hop
        (STRIPED, ((0, 97),)),  # all keys gathered
        (((60, 37),), ((1, 40, 3),)),
    ],
)
def test_any_pair_of_runs_equals_the_reference(impl, causal, q_runs, k_runs) -> None:
    sizes = {"Sk": sum(n for _, n, *_ in k_runs), "Hq": 1 + causal, "D": 8}
    options = {"causal": causal, "q_runs": q_runs, "k_runs": k_runs, "window": 12}
    with_documents = {"documents": _documents(13, 0, 10, 50, 3, 21, 54).int()}
    # a kernel is slow: test one value of causal or the other
    which = causal ^ (len(q_runs) + len(k_runs)) % 2
    for more in ({}, with_documents) if impl == "torch" else (({}, with_documents)[which],):
        check(impl, sizes, **options, **more)


@pytest.mark.parametrize("causal", [True, False])
def test_striped_keys_of_neighbouring_queries_equal_the_reference(causal) -> None:
    """Test without a window, for which torch's own kernel might be called."""
    runs = {"q_runs": ((60, 37),), "k_runs": ((1, 40, 3),)}
    check("torch", {"Sk": 40, "D": 8}, causal=causal, **runs)


# Documents of non-contiguous keys: padding before and after tokens is hidden; and others.
BEGINS, ENDS = torch.tensor([[0], [20]]), torch.tensor([[41], [67]])
PADDED = torch.tensor([[0, 67]] * 2)
KEYS_APART = [
    torch.stack((PADDED, PADDED.clamp(BEGINS, ENDS)), 1),
    torch.stack((EACH, EACH.clamp(BEGINS, ENDS)), 1),
    torch.stack((EACH, EACH.flip(0)), 1),
    torch.stack((PACKED, _documents(9, 0, 3, 30, 0, 1, 9, 9))).expand(2, -1, -1),
    torch.stack((PADDED, PADDED.clamp(max=torch.tensor([[67], [0]]))), 1),  # one sample sees no key
]


@IMPLS
@pytest.mark.parametrize(
    ("documents", "causal", "window"),  # every two of them occur together
    [(documents, c, 9 if (c + i) % 2 else None) for i, documents in enumerate(KEYS_APART)
     for c in (True, False)],
)  # fmt: skip
def test_keys_may_have_boundaries_of_their_own(impl, causal, window, documents) -> None:
    sizes = {"B": 2, "Sq": 67, "Sk": 67, "Hq": 2, "D": 16}
    check(impl, sizes, with_dlse=causal, causal=causal, window=window, documents=documents)


@IMPLS
@pytest.mark.parametrize(
    ("causal", "q_runs"),
    [(True, ZIGZAG), (False, STRIPED), (True, ((130, 37, 2),)), (False, ((130, 37, 2),))],
)
def test_hidden_keys_leave_no_tile_of_another_run_out(impl, causal, q_runs) -> None:
    """This includes runs of which no row of a tile sees a key, whose tile counts are below zero."""
    ends = torch.tensor([0, 40, 150, 204])
    documents = torch.stack((ends, ends.clamp(100, 190)))[None]
    for k_runs in (((110, 40), (3, 90)), ((3, 90), (110, 90)), ((0, 70, 3),)):
        sizes = {"Sk": sum(n for _, n, *_ in k_runs), "D": 8}
        check(impl, sizes, causal=causal, documents=documents, q_runs=q_runs, k_runs=k_runs)


@IMPLS
def test_packed_documents_are_separate_calls(impl) -> None:
    """Compare each document alone, without the reference; only the order of sums may differ."""
    qkv, do = draw(Sq=67, Sk=67), torch.randn(1, 67, 2, 16, dtype=F64)
    got = with_grads(attention, qkv, do, documents=PACKED, return_lse=True, impl=impl)
    for start, stop in pairwise(PACKED):
        part = [x[:, start:stop].detach().requires_grad_() for x in qkv]
        alone = with_grads(attention, part, do[:, start:stop], return_lse=True, impl=impl)
        for whole, x, dim in zip(got, alone, (1, 2, 1, 1, 1)):
            assert_close_f64(whole.narrow(dim, start, stop - start), x, 1e-13)


@IMPLS
def test_a_window_beyond_every_key_and_one_document_are_plain_attention(impl) -> None:
    q, k, v = (x.detach() for x in draw())
    for causal in (True, False):
        options = {"causal": causal, "impl": impl}
        plain = attention(q, k, v, **options)
        assert torch.equal(attention(q, k, v, window=37, **options), plain)
        check(impl, {}, causal=causal, window=36)  # the last row sees all keys except the first
        assert torch.equal(attention(q, k, v, window=2**40, **options), plain)
        assert_close_f64(attention(q, k, v, documents=_documents(37), **options), plain, 1e-14)


@IMPLS
def test_positions_beyond_the_last_boundary_are_one_more_document(impl, monkeypatch) -> None:
    """Their values are not checked on a GPU, and padding of a layout has such positions."""
    monkeypatch.setattr(function, "check_boundaries", lambda *_: None)
    check(impl, {}, documents=_documents(9, 11))
    check(impl, {}, documents=torch.tensor([0]))  # no documents at all


def _wrong_ends() -> dict[str, tuple[dict, list, str]]:
    """List invalid documents of 2 samples of 8 tokens, each with the error message."""
    early, late = r"must end at 8, the end .* got {}", r"must end at or after 8, the .* got {}"
    queries, keys = ((3, 5), (0, 3)), ((0, 4), (4, 4))
    return {
        "short": ({}, [0, 3], early),
        "of one sample": ({}, [[0, 8, 8], [0, 3, 7]], early),
        "none": ({}, [0], early),
        "of a flat batch": ({}, [0, 5, 16], early),
        "beyond one sample": ({}, [[0, 4, 8], [0, 4, 9]], early),
        "short of a run of queries": ({"q_runs": queries}, [0, 5, 7], late),
        "short of a run of keys": ({"k_runs": keys}, [[0, 7], [0, 8]], late),
        "short of stripes": ({"q_runs": ((1, 8, 4),)}, [0, 29], "must end at or after 30"),
        "queries apart": ({}, [[[0, 3, 8], [0, 3, 8]], [[0, 3, 7], [0, 3, 8]]], early),
        "queries apart, late": ({}, [[[0, 9], [0, 8]]] * 2, early),
        "keys apart": ({}, [[[0, 8], [0, 16]]] * 2, r"not extend past the 8 keys, got \[\[0, 16"),
    }  # fmt: skip


@pytest.mark.parametrize("name", _wrong_ends())
def test_documents_begin_at_0_and_end_where_the_sequence_does(name) -> None:
    """Every entry point checks this. Otherwise wrong boundaries would cut
    or join documents silently."""
    options, given, message = _wrong_ends()[name]
    documents = torch.tensor(given)
    message = message.format(re.escape(str(given)))
    q, k, v = (x.detach() for x in draw(B=2, Sq=8, Sk=8))
    options = {**options, "documents": documents}
    rows = torch.zeros(2, 2, 8, dtype=F64)
    calls = {
        "attention": lambda: attention(q, k, v, **options),
        "fwd": lambda: attention_fwd(q, k, v, **options),
        "bwd": lambda: attention_bwd(q, q, k, v, rows, None, o=q, **options),
    }
    if set(options) == {"documents"}:
        whole = {"layout": SequenceLayout(8, 1), "group": None}
        layer = Attention(8, 2)
        context = TokenContext(2, documents=documents)
        calls |= {
            "context": lambda: context_attention(q, k, v, documents=documents, **whole),
            "layer": lambda: layer(torch.zeros(16, 8), context),
        }
    for call in calls.values():
        with pytest.raises(ValueError, match=message):
            call()


def test_documents_of_the_whole_sequence_pass_whatever_a_call_sees_of_it() -> None:
    check("torch", {"Sq": 3, "Sk": 8}, documents=_documents(2, 6))
    apart = torch.tensor([[[0, 1, 3], [0, 2, 5]], [[0, 0, 3], [4, 8, 8]]])
    check("torch", {"B": 2, "Sq": 3, "Sk": 8}, documents=apart, causal=False)
    for end in (8, 9, 2**31 + 5):
        documents = torch.tensor([0, 6, end])
        check("torch", {"Sq": 3, "Sk": 8}, documents=documents, q_runs=((5, 3),))
    with FakeTensorMode():  # no values
        q, documents = torch.empty(2, 8, 2, 16), torch.empty(3, dtype=torch.int64)
        attention(q, q, q, documents=documents)
        check_packed(documents, q)


@IMPLS
def test_rows_that_see_no_key_are_zero_with_lse_minus_infinity(impl) -> None:
    k_runs = ((30, 20),)
    o, lse, dq, dk, _ = check(impl, {"Sk": 20}, q_runs=ZIGZAG, k_runs=k_runs, window=30)
    assert lse[..., :20].isneginf().all()
    assert lse[..., 20:29].isfinite().all()  # 70 - 49 < 30
    assert lse[..., 29:].isneginf().all()
    assert not any(x[:, rows].any() for x in (o, dq) for rows in (slice(20), slice(29, 37)))
    assert not dk[:, :11].any()
    check(impl, {"Sk": 20}, q_runs=ZIGZAG, k_runs=k_runs, documents=_documents(40, 31, 20))


@IMPLS
@pytest.mark.parametrize("empty", [{"B": 0}, {"Sq": 0}, {"Sk": 0}, {"Sq": 0, "Sk": 0}])
def test_empty_batches_and_sequences_work(impl, empty) -> None:
    sizes = {"Sq": 3, "Sk": 4, **empty}
    length = max(sizes["Sq"], sizes["Sk"])
    documents = torch.tensor([0, min(2, length), length])
    check(impl, sizes, window=2, documents=documents)
    documents = documents.expand(sizes.get("B", 1), -1)
    check(impl, sizes, causal=False, documents=documents)


@triton.jit
def _rows_before_kernel(found_ptr, offset, start, length, stripes, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(found_ptr + i, rows_before(offset + i, start, length, stripes))


@pytest.mark.parametrize("run", [(0, 9, 1), (5, 9, 1), (0, 9, 4), (7, 12, 5), (3, 0, 2)])
@pytest.mark.parametrize("offset", [-32, 2**31 - 128])
def test_rows_before_counts_the_rows_of_a_run_at_smaller_positions(run, offset) -> None:
    """A count that is one too high would visit a fully masked tile; one too low would miss a tile.
    The last, open document ends where one more position would overflow."""
    found = torch.empty(128, dtype=torch.int32)
    _rows_before_kernel[(1,)](found, offset, *run, 128)
    rows = reference.positions([run], run[1])
    assert found.tolist() == [int((rows < offset + i).sum()) for i in range(128)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("options", [{"window": 20}, {"documents": _documents(128, 64, 64)}])
def test_tiles_that_are_wholly_masked_are_never_read(options, causal) -> None:
    """Reading them would show: NaN in keys and queries outside a document or window gives 0 * NaN.
    Tiles are 64 queries by 32 keys, and 32 by 64 for dk and dv."""
    q, k, v = (x.detach() for x in draw(Sq=256, Sk=256, Hq=1, D=4))
    do, options = torch.randn_like(q), {"causal": causal, "impl": "triton", **options}
    o, lse = attention_fwd(q, k, v, **options)
    delta = attention_delta(o, do)
    want = attention_bwd(do, q, k, v, lse, delta, **options)
    rows, runs, far = slice(128, 192), ((128, 64),), [*range(96), *range(224, 256)]
    far_q, far_k, far_v, far_do = (
        x.index_fill(1, torch.tensor(far), math.nan) for x in (q, k, v, do)
    )
    some = {**options, "q_runs": runs}
    got, _ = attention_fwd(q[:, rows], far_k, far_v, **some)
    stats = lse[..., rows], delta[..., rows]
    dq, _, _ = attention_bwd(do[:, rows], q[:, rows], far_k, far_v, *stats, **some)
    some = {**options, "k_runs": runs}
    _, dk, dv = attention_bwd(far_do, far_q, k[:, rows], v[:, rows], lse, delta, **some)
    assert_same_bits((got, dq, dk, dv), [x[:, rows] for x in (o, *want)])


@IMPLS
@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.bfloat16, 17), (torch.float16, None), (torch.float32, 17)]
)
def test_low_precision_errs_no_more_than_its_roundings(impl, dtype, window) -> None:
    low = draw(Sq=70, Sk=70, D=48, dtype=dtype)
    options = {"documents": _documents(45, 25), "window": window}
    check_roundings(impl, low, torch.randn_like(low[0]), **options)


@IMPLS
def test_blocks_of_keys_with_the_final_lse_add_up_to_the_whole(impl) -> None:
    """Run ring attention of packed documents with a window, in one process."""
    q, k, v = (x.detach() for x in draw(Sk=97))
    do = torch.randn_like(q)
    options = {"q_runs": ZIGZAG, "window": 25, "documents": _documents(25, 50, 22)}
    exact = [x.requires_grad_() for x in (q.clone(), k.clone(), v.clone())]
    want = with_grads(reference.attention, exact, do, **options)
    hops = [slice(0, 25), slice(25, 60), slice(60, 97)]
    o, lse = torch.zeros_like(q), torch.full((1, 2, 37), -float("inf"), dtype=F64)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    options["impl"] = impl
    for at in hops:
        runs = ((at.start, at.stop - at.start),)
        attention_fwd(q, k[:, at], v[:, at], k_runs=runs, into=(o, lse), **options)
    delta = attention_delta(o, do)
    for at in hops:
        runs, into = ((at.start, at.stop - at.start),), (dq, dk[:, at], dv[:, at])
        attention_bwd(do, q, k[:, at], v[:, at], lse, delta, k_runs=runs, into=into, **options)
    assert_all_close((o, lse, dq, dk, dv), want, 1e-12)


@IMPLS
def test_planted_faults_are_far_outside_the_tolerance(impl) -> None:
    q, k, v = (x.detach() for x in draw(Sq=23, Sk=23))
    do, documents = torch.randn_like(q), _documents(10, 8, 5)
    exact = [x.clone().requires_grad_() for x in (q, k, v)]
    for right, faults in (
        ({"window": 4}, ({"window": 3}, {"window": 5}, {"window": 4, "causal": False})),
        ({"documents": documents}, ({"documents": documents + torch.tensor([0, 1, 1, 0])},)),
        ({"documents": documents, "window": 4}, ({"documents": documents}, {"window": 4})),
    ):
        found = with_grads(reference.attention, exact, do, **right)
        o, lse, *want = (x.detach() for x in found)
        delta = attention_delta(o, do)
        got = attention_bwd(do, q, k, v, lse, delta, **right, impl=impl)
        assert all(relative_error(g, w) < 1e-13 for g, w in zip(got, want))
        for fault in faults:
            assert relative_error(attention(q, k, v, **fault, impl=impl), o) > 1e-2, fault
            for g, w in zip(attention_bwd(do, q, k, v, lse, delta, **fault, impl=impl), want):
                assert relative_error(g, w) > 1e-2, fault


@IMPLS
def test_gradients_pass_gradcheck(impl) -> None:
    options = {"q_runs": ((2, 2), (7, 2)), "k_runs": ((1, 3), (6, 2)), "impl": impl}

    def f(*x):
        return attention(*x, **options, window=4, documents=_documents(2, 7), return_lse=True)

    # lse = -inf of rows without a key has no derivative
    assert torch.autograd.gradcheck(lambda *x: f(*x)[0], draw(Sq=4, Sk=5, D=3), fast_mode=True)


@IMPLS
def test_the_custom_op_passes_opcheck(impl) -> None:
    qkv, documents = draw(Sq=5, Sk=5, D=4), _documents(2, 3)
    options = AttentionOptions(window=2, documents=documents, impl=impl)
    well_formed(attention_op, *qkv, None, options)


def test_it_follows_autocast_and_checkpointing() -> None:
    q, k, v = draw(Sq=67, Sk=67, dtype=torch.float32)
    options = {"window": 5, "documents": PACKED}
    with torch.autocast("cpu", torch.bfloat16):
        o = attention(q, k, v, **options)
    assert torch.equal(o, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options))
    want = torch.autograd.grad(attention(q, k, v, **options).sum(), q)
    again = torch.utils.checkpoint.checkpoint(
        lambda *x: attention(*x, **options), q, k, v, use_reentrant=False
    )
    assert torch.equal(torch.autograd.grad(again.sum(), q)[0], want[0])


@pytest.mark.parametrize("documents", [PACKED[None], EACH], ids=["packed", "each"])
def test_the_table_has_the_document_of_every_row_and_waits_for_no_device(documents) -> None:
    runs = (reference.Run(52, 5, 3), reference.Run(0, 20, 3))
    position = torch.cat((torch.arange(52, 67, 3), torch.arange(0, 60, 3)))
    table = document_table(documents.int(), runs)
    for boundaries, (first, last) in zip(documents.tolist(), table.tolist()):
        for p, a, b in zip(position.tolist(), first, last):
            assert a <= p <= b
            assert a == max(x for x in (0, *boundaries) if x <= p)
            assert b == min(x for x in (*boundaries, 2**31 - 1) if x > p) - 1
    whole = packed(documents.int(), 70).table
    assert whole.shape == (len(documents), 2, 70)
    assert torch.equal(packed(documents.int(), 61).table, whole[..., :61])
    for some in (runs, runs[:1], (reference.Run(3, 40),)):
        assert torch.equal(rows_of(whole, some), document_table(documents.int(), some))
    meta = document_table(documents.to("meta"), runs)  # there are no values: .item() would fail
    assert (meta.shape, meta.dtype) == (table.shape, table.dtype)


@IMPLS
def test_the_document_of_each_token_is_no_boundary(impl) -> None:
    q, k, v = (x.detach() for x in draw(B=2, Sq=5, Sk=5))
    ids = torch.tensor([0, 0, 0, 1, 1])
    told = r"boundaries, not one document id for each of the 5 tokens, got \["
    for documents in (ids, ids[None].expand(2, 5), torch.zeros(5, dtype=torch.int32)):
        for call in (attention, attention_fwd):
            with pytest.raises(ValueError, match=told):
                call(q, k, v, documents=documents, impl=impl)
    with pytest.raises(ValueError, match=told):
        context_attention(q, k, v, documents=ids, layout=SequenceLayout(5, 1), group=None)
    runs = ((7, 5),)
    with pytest.raises(ValueError, match=told):  # of these rows only
        attention(q, k, v, documents=ids, q_runs=runs, k_runs=runs, impl=impl)
    # five of them, but they are boundaries
    check(impl, {"Sq": 5, "Sk": 5}, documents=torch.tensor([0, 1, 1, 3, 5]))
    # as many as keys, so they are keys' documents
    pair = torch.tensor([[[0, 1, 2, 2], [0, 1, 3, 4]]])
    check(impl, {"B": 1, "Sq": 2, "Sk": 4}, documents=pair, causal=False)


def test_where_nobody_reads_them_as_many_boundaries_as_tokens_are_refused() -> None:
    meta = torch.empty(1, 5, 1, 8, device="meta")
    for shape in ((5,), (1, 5)):
        documents = torch.empty(shape, dtype=torch.int64, device="meta")
        with pytest.raises(ValueError, match="not one document id for each of the 5 tokens"):
            check_boundaries(checked(AttentionOptions(documents=documents), meta, meta, meta), 5, 5)
        part = AttentionOptions(documents=documents, q_runs=((3, 5),), k_runs=((0, 5),))
        check_boundaries(checked(part, meta, meta, meta), 5, 5)  # one rank's part of many
    pair = torch.empty(2, dtype=torch.int64, device="meta")  # a pair means the same in either form
    check_boundaries(AttentionOptions(documents=pair), 2, 2)
    documents = documents.new_empty(6, dtype=torch.int64)
    check_boundaries(checked(AttentionOptions(documents=documents), meta, meta, meta), 5, 5)


@IMPLS
def test_positions_at_the_end_of_int32_are_right_or_refused(impl) -> None:
    """A last boundary beyond int32 ends the last document; a position or a
    window may not be that large."""
    q, k, v = (x.detach() for x in draw(Sq=4, Sk=4))
    for causal in (True, False):
        whole = {"q_runs": ((0, 4),), "k_runs": ((0, 4),)}
        for last in (2**31, 2**32 + 2):  # these must not wrap to 0 or 2
            far = torch.tensor([0, 2, last])
            check(impl, {"Sq": 4, "Sk": 4}, causal=causal, documents=far, **whole)
        wide = {"q_runs": ((0, 4, 2**29),), "k_runs": ((1, 4, 2**28),), "window": 2**28}
        check(impl, {"Sq": 4, "Sk": 4}, causal=causal, **wide)
    for options in (
        {"q_runs": ((2**31 - 3, 4),)},
        {"q_runs": ((0, 4, 2**30),)},
        {"q_runs": ((2**30 + 5, 4),), "k_runs": ((2**30 + 5, 4),), "window": 2**30},
    ):
        with pytest.raises(ValueError, match="must be below 2147483646, got position"):
            attention_fwd(q, k, v, impl=impl, **options)
