"""flash-attention's calls against its public description, written out in plain float64 torch."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from refused import one_line
from torch import Tensor

from warpweave.compat import flash_attn as fa

B, H, HKV, D = 2, 4, 2, 8
TOLERANCE = 1e-12


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _qkv(queries: int, keys: int, batch: int = B) -> list[Tensor]:
    shapes = ((batch, queries, H, D), (batch, keys, HKV, D), (batch, keys, HKV, D))
    return [_draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def _truth(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0):
    """Return (o, lse): a query at i + Sk - Sq sees the keys of the window around it, up to itself
    if causal."""
    queries, keys = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (scale or q.shape[3] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window
    away = torch.arange(keys) - (torch.arange(queries)[:, None] + keys - queries)
    hidden = (causal & (away > 0)) | ((left >= 0) & (away < -left))
    seen = ~(hidden | ((right >= 0) & (away > right)))
    empty = ~seen.any(-1, keepdim=True)  # keeps scores finite, so that autograd has no NaN
    scores = scores.masked_fill(~seen & ~empty, -torch.inf)
    lse = scores.logsumexp(-1).masked_fill(empty[:, 0], -torch.inf)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def _agree(ours, truth) -> None:
    assert ours.shape == truth.shape
    assert torch.equal(ours.isfinite(), truth.isfinite())
    torch.testing.assert_close(ours, truth, rtol=0, atol=TOLERANCE)


def _check(call, inputs, truth) -> None:
    """Compare output, lse and the gradients through both."""
    o, lse, none = call
    _agree(o, truth[0])
    _agree(lse, truth[1])
    assert none is None
    do, dlse = _draw(*o.shape, seed=8), _draw(*lse.shape, seed=9)
    finite = truth[1].detach().isfinite()

    def gradients(o, lse):
        loss = (o * do).sum() + (lse.masked_fill(~finite, 0.0) * dlse).sum()
        return torch.autograd.grad(loss, inputs)

    for ours, theirs in zip(gradients(o, lse), gradients(*truth)):
        _agree(ours, theirs)


WINDOWS = [(-1, -1), (3, 3), (0, 0), (2, 0), (0, 2), (4, 1), (-1, 2), (-1, 0), (3, -1), (99, 5)]
SIZES = [(7, 7), (3, 11), (11, 3), (1, 9), (5, 0)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_every_mask_is_that_of_the_description(queries, keys, causal, window):
    inputs = _qkv(queries, keys)
    found = fa.flash_attn_func(*inputs, causal=causal, window_size=window, return_attn_probs=True)
    _check(found, inputs, _truth(*inputs, causal=causal, window=window))


def test_a_side_that_is_wider_than_any_number_of_rows_has_no_bound():
    q, k, v = _qkv(4, 7)
    for window, same in (
        ((2**70, 2**70), (-1, -1)), ((2**63, 2), (-1, 2)), ((1, 2**63), (1, -1)),
        ((2**62, 2**62), (99, 99)), ((11, 1), (10, 1)), ((2, 11), (2, 6)),
    ):  # fmt: skip
        for causal in (False, True):
            found, wanted = (
                fa.flash_attn_func(q, k, v, causal=causal, window_size=sides)
                for sides in (window, same)
            )
            assert torch.equal(found, wanted), (window, causal)


SIGNATURES = {
    "flash_attn_func": "q k v {}",
    "flash_attn_kvpacked_func": "q kv {}",
    "flash_attn_qkvpacked_func": "qkv {}",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {} "
    "block_table=None",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "{}",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen {}",
    "flash_attn_with_kvcache": "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None "
    "cache_seqlens=None cache_batch_idx=None cache_leftpad=None block_table=None "
    "softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 rotary_interleaved=True "
    "alibi_slopes=None num_splits=0 return_softmax_lse=False",
}
COMMON = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False"
)


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_have_their_order_and_defaults(name):
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default}".replace(" ", "")
        for p in inspect.signature(getattr(fa, name)).parameters.values()
    ]
    assert found == SIGNATURES[name].format(COMMON).split()


ALL = {"softmax_scale": 0.3, "causal": True, "window_size": (3, 1), "softcap": 1.5}
LSE = {"return_attn_probs": True}
ENDS = torch.tensor([0, 5, 10], dtype=torch.int32)
CALLS = {  # called with q[2, 5, H, D], and with k and v of as many tokens, or of 9
    "positional": (5, lambda q, k, v, o: fa.flash_attn_func(
        q, k, v, *[o.get(n) for n in ("dropout_p", *ALL)], None, True, True)),
    "keywords": (9, lambda q, k, v, o: fa.flash_attn_func(q, k, v, **o, **LSE)),
    "kvpacked": (9, lambda q, k, v, o: fa.flash_attn_kvpacked_func(
        q, torch.stack((k, v), 2), **o, **LSE)),
    "qkvpacked": (5, lambda q, k, v, o: fa.flash_attn_qkvpacked_func(
        torch.stack((q, k, v), 2), **o, **LSE)),
    "one tensor of ends": (5, lambda q, k, v, o: fa.flash_attn_varlen_func(
        *_flat(q, k, v), ENDS, ENDS, 5, 5, **o, **LSE)),
    "equal ends": (5, lambda q, k, v, o: fa.flash_attn_varlen_func(
        *_flat(q, k, v), ENDS, ENDS.clone(), 5, 5, **o, **LSE)),
    "other ends": (9, lambda q, k, v, o: fa.flash_attn_varlen_func(
        *_flat(q, k, v), ENDS, ENDS // 5 * 9, 5, 9, **o, **LSE)),
    "varlen kvpacked": (9, lambda q, k, v, o: fa.flash_attn_varlen_kvpacked_func(
        *_flat(q, torch.stack((k, v), 2)), ENDS, ENDS // 5 * 9, 5, 9, **o, **LSE)),
    "varlen qkvpacked": (5, lambda q, k, v, o: fa.flash_attn_varlen_qkvpacked_func(
        *_flat(torch.stack((q, k, v), 2)), ENDS, 5, **o, **LSE)),
    "cache": (9, lambda q, k, v, o: fa.flash_attn_with_kvcache(
        q, k, v, **o, return_softmax_lse=True)),
    "new in a cache": (9, lambda q, k, v, o: fa.flash_attn_with_kvcache(
        q, *(F.pad(x[:, :7], (0, 0, 0, 0, 0, 4)) for x in (k, v)), k[:, 7:], v[:, 7:],
        cache_seqlens=7, **o, return_softmax_lse=True)),
}  # fmt: skip


def _flat(*tensors: Tensor) -> list[Tensor]:
    return [x.flatten(0, 1) for x in tensors]


@pytest.mark.parametrize("window", [(3, 1), (-1, -1), (2, 2)])  # each has a separate path
@pytest.mark.parametrize("name", CALLS)
def test_every_call_passes_every_option_on(name, window):
    keys, call = CALLS[name]
    q, k, v = (_draw(B, n, H, D, seed=i) for i, n in enumerate((5, keys, keys)))
    drops = {} if "cache" in name else {"dropout_p": 0.0}
    for causal in (True, False):
        options = {**drops, **ALL, "window_size": window, "causal": causal}
        o, lse, *_ = call(q, k, v, options)
        truth = _truth(q, k, v, scale=0.3, causal=causal, window=window, softcap=1.5)
        _agree(o.view(B, 5, H, D), truth[0])
        _agree(lse if lse.ndim == 3 else lse.view(H, B, 5).transpose(0, 1), truth[1])
        if drops:
            dropped, same, _ = call(q, k, v, {**options, "dropout_p": 0.5})
            _agree(same, lse)
            assert (dropped - o).abs().mean() > 0.05


LENGTHS = [  # and whether both share one tensor of boundaries
    ([4, 1, 0, 6], [4, 1, 0, 6], True),
    ([4, 1, 0, 6], [4, 1, 0, 6], False),
    ([2, 3, 4], [5, 1, 7], False),
    ([1, 1, 1], [6, 2, 3], False),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (2, 2), (3, 1), (2, 0)])
@pytest.mark.parametrize(("q_lengths", "k_lengths", "shared"), LENGTHS)
def test_packed_sequences_are_each_alone(q_lengths, k_lengths, window, causal, shared):
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (q_lengths, k_lengths))
    inputs = [x.detach()[0] for x in _qkv(sum(q_lengths), sum(k_lengths), 1)]
    inputs[2] = inputs[2][..., : D if causal else 5].clone()  # values of a different head size
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v = inputs
    found = fa.flash_attn_varlen_func(
        q, k, v, cu_q, cu_q if shared else cu_k, max(q_lengths), max(k_lengths),
        causal=causal, window_size=window, return_attn_probs=True,
    )  # fmt: skip
    parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths))
    truth = [_truth(*(x[None] for x in each), causal=causal, window=window) for each in parts]
    o, lse = torch.cat([o[0] for o, _ in truth]), torch.cat([lse[0] for _, lse in truth], 1)
    _check(found, inputs, (o, lse))


@pytest.mark.parametrize(("q_lengths", "rows"), [([1, 1, 1], 4), ([1, 1, 0], 2)])
def test_as_many_boundaries_as_rows_are_boundaries(q_lengths, rows):
    """This holds for a padded batch, and if there are as many keys."""
    q, k, v = (x.detach()[0] for x in _qkv(rows, 4, 1))
    cu_q, cu_k = torch.tensor([0, *q_lengths]).cumsum(0).int(), torch.tensor([0, 1, 3, 4]).int()
    total = sum(q_lengths)
    for values, causal in ((v, False), (v[..., :3], True)):  # also of a head size of their own
        found = fa.flash_attn_varlen_func(q, k, values, cu_q, cu_k, 1, 2, causal=causal)
        assert found.shape == (rows, H, values.shape[2])
        parts = zip(q[:total].split(q_lengths), *(x.split([1, 2, 1]) for x in (k, values)))
        truth = [_truth(*(x[None] for x in each), causal=causal)[0][0] for each in parts]
        _agree(found[:total], torch.cat(truth))


def test_no_sequences_are_nothing():
    none = torch.zeros(1, dtype=torch.int32)
    q = torch.zeros(0, H, D, dtype=torch.float64)
    o, lse, _ = fa.flash_attn_varlen_func(q, q, q, none, none.clone(), 0, 0, return_attn_probs=True)
    assert o.shape == (0, H, D)
    assert lse.shape == (H, 0)


# ---------------------------------------------------------------- the cache


def _turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x[S, H, D] by cos and sin[S, R/2]."""
    R = 2 * cos.shape[1]
    a, b = (x[..., 0:R:2], x[..., 1:R:2]) if interleaved else (x[..., : R // 2], x[..., R // 2 : R])
    c, s = cos[:, None], sin[:, None]
    one, two = a * c - b * s, a * s + b * c
    both = torch.stack((one, two), -1).flatten(-2) if interleaved else torch.cat((one, two), -1)
    return torch.cat((both, x[..., R:]), -1)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("causal", "window"),
    [(True, (-1, -1)), (False, (-1, -1)), (True, (3, 0)), (False, (2, 2)), (False, (-1, 1)),
     (False, (-1, 0)), (False, (0, -1))],
)  # fmt: skip
@pytest.mark.parametrize("filled", [[4, 4], [2, 5]])
def test_a_cache_is_filled_rotated_and_seen(filled, causal, window, interleaved):
    """The cache and the table end with the last new row."""
    new, R = 3, 4
    size = max(filled) + new
    samples = [2, 0]  # of a cache of three
    q, k, v = (x.detach() for x in _qkv(new, new))
    caches = [_draw(3, size, HKV, D, seed=i) for i in (11, 12)]
    before = [cache.clone() for cache in caches]
    angles = _draw(size, R // 2, seed=13)
    cos, sin = angles.cos(), angles.sin()
    found, lse = fa.flash_attn_with_kvcache(
        q, *caches, k, v, cos, sin, torch.tensor(filled, dtype=torch.int32),
        torch.tensor(samples), causal=causal, window_size=window,
        rotary_interleaved=interleaved, return_softmax_lse=True,
    )  # fmt: skip
    expected = [cache.clone() for cache in before]
    for i, (at, sample) in enumerate(zip(filled, samples)):
        rows = slice(at, at + new)
        expected[0][sample, rows] = _turned(k[i], cos[rows], sin[rows], interleaved)
        expected[1][sample, rows] = v[i]
        where = (
            torch.arange(at, at + new) if causal or window != (-1, -1) else torch.full((new,), at)
        )
        turned = _turned(q[i], cos[where], sin[where], interleaved)
        seen = [cache[sample : sample + 1, : at + new] for cache in expected]
        o, each = _truth(turned[None], *seen, causal=causal, window=window)
        _agree(found[i : i + 1], o)
        _agree(lse[i : i + 1], each)
    for ours, theirs in zip(caches, expected):
        _agree(ours, theirs)


def test_a_cache_alone_is_seen_whole_or_as_far_as_it_is_filled():
    q, k, v = (x.detach() for x in _qkv(2, 7))
    _agree(fa.flash_attn_with_kvcache(q, k, v, causal=True), _truth(q, k, v, causal=True)[0])
    part = fa.flash_attn_with_kvcache(q, k, v, cache_seqlens=5, num_splits=3)
    _agree(part, _truth(q, k[:, :5], v[:, :5])[0])
    ten = torch.cat([q] * 5, 1)
    for queries, window in ((q, (-1, -1)), (ten, (4, 2)), (q, (1, 9)), (q, (-1, 5))):
        # 2, 10 of 7 keys; sides that extend beyond all of them
        causal = window == (-1, -1)
        padded = fa.flash_attn_with_kvcache(
            queries, k, v, cache_seqlens=torch.tensor([7, 6]), cache_leftpad=torch.tensor([0, 4]),
            causal=causal, window_size=window,
        )  # fmt: skip
        for i, rows in enumerate((slice(0, 7), slice(4, 6))):
            seen = (x[i : i + 1, rows] for x in (k, v))
            wanted = _truth(queries[i : i + 1], *seen, causal=causal, window=window)[0]
            _agree(padded[i : i + 1], wanted)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found = fa.flash_attn_with_kvcache(*inputs, causal=True, return_softmax_lse=True)
    assert not any(x.requires_grad for x in found)


@pytest.mark.parametrize("filled", [7, [7, 7], (5, 6), torch.tensor([6, 5]), torch.tensor(7)])
@pytest.mark.parametrize("rows", [None, [2, 0], (1, 1), torch.tensor([2, 2])])
def test_samples_may_be_any_rows_of_a_cache_and_begin_anywhere(rows, filled):
    """`cache_leftpad` is in the order of q's samples; one row of the cache may be read twice."""
    q, _, _ = (x.detach() for x in _qkv(2, 2))
    k, v = (_draw(B if rows is None else 3, 7, HKV, D, seed=i) for i in (11, 12))
    names = [0, 1] if rows is None else torch.as_tensor(rows).tolist()
    ends = torch.as_tensor(filled).expand(B).tolist()
    for begins in (None, [3, 1], 2, torch.tensor([0, 4]), [7, 0]):
        starts = [0, 0] if begins is None else torch.as_tensor(begins).expand(B).tolist()
        found, lse = fa.flash_attn_with_kvcache(
            q, k, v, cache_seqlens=filled, cache_batch_idx=rows, cache_leftpad=begins,
            return_softmax_lse=True,
        )  # fmt: skip
        for i, (row, start, end) in enumerate(zip(names, starts, ends)):
            if start >= end:  # a query sees nothing in pure padding
                assert not found[i].any()
                assert lse[i].isneginf().all()
                continue
            seen = (x[row : row + 1, start:end] for x in (k, v))
            o, each = _truth(q[i : i + 1], *seen)
            _agree(found[i : i + 1], o)
            _agree(lse[i : i + 1], each)


# ---------------------------------------------------------------- dropout


def test_dropout_is_repeated_by_torchs_seed_and_keeps_the_mean():
    q, k, v = (x.detach() for x in _qkv(40, 40))

    def drop(seed, p=0.25):
        torch.manual_seed(seed)
        return fa.flash_attn_func(q, k, v, p)

    assert torch.equal(drop(1), drop(1))
    assert not torch.equal(drop(1), drop(2))
    mean = sum(drop(seed) for seed in range(200)) / 200
    assert (mean - _truth(q, k, v)[0]).abs().mean() < 0.02
    assert (drop(1) - _truth(q, k, v)[0]).abs().mean() > 0.05
    state = torch.get_rng_state()
    fa.flash_attn_func(q, k, v)
    assert torch.equal(torch.get_rng_state(), state)  # no unneeded numbers are drawn


def test_packed_sequences_are_not_dropped_alike():
    q, k, v = (x.detach()[0] for x in _qkv(6, 6, 1))
    twice = [torch.cat((x, x)) for x in (q, k, v)]
    cu = torch.tensor([0, 6, 12], dtype=torch.int32)
    for other in (cu, torch.tensor([0, 6, 12])):
        o = fa.flash_attn_varlen_func(*twice, cu, other, 6, 6, 0.5, window_size=(4, 1))
        assert not torch.equal(o[:6], o[6:])


# ---------------------------------------------------------------- errors


def _varlen(q_ends, k_ends, **options):
    q, k, v = (x.detach()[0] for x in _qkv(4, 4, 1))
    ends = (torch.tensor(each, dtype=torch.int32) for each in (q_ends, k_ends))
    return fa.flash_attn_varlen_func(q, k, v, *ends, 4, 4, **options)


def _cached(**options):
    q, k, v = (x.detach() for x in _qkv(2, 6))
    return fa.flash_attn_with_kvcache(q, k, v, **options)


NEW = {name: torch.zeros(B, 2, HKV, D, dtype=torch.float64) for name in "kv"}
TABLE = {"rotary_cos": torch.ones(3, 2), "rotary_sin": torch.ones(3, 2)}
REFUSED = {
    "window": (lambda: fa.flash_attn_func(*_qkv(2, 2), window_size=(3,)), "must be .left, right."),
    "packed": (lambda: fa.flash_attn_qkvpacked_func(torch.ones(1, 2, 2, H, D)),
               r"qkv must be \[B, S, 3, heads, D\], got shape \(1, 2, 2, 4, 8\)"),
    "no tokens": (
        lambda: fa.flash_attn_varlen_func(*_qkv(2, 2), torch.ones(1), torch.ones(1), 1, 1),
        r"q must be \[tokens, heads, D\]",
    ),
    "floats": (
        lambda: fa.flash_attn_varlen_qkvpacked_func(torch.ones(2, 3, H, D), torch.ones(2), 1),
        r"cu_seqlens_q must be a non-empty 1-D int32 or int64 tensor .*, got torch.float32",
    ),
    "too far": (lambda: _varlen([0, 5], [0, 4]),
                r"cu_seqlens_q must ascend .* at most 4, the number of rows, got"),
    "later": (lambda: _varlen([1, 4], [0, 4]), "cu_seqlens_q must ascend from 0 .* got .1, 4"),
    "two dims": (lambda: _varlen([[0, 4]], [0, 4]), r"cu_seqlens_q must be .* \(1, 2\)"),
    "no ends": (lambda: _varlen([0, 4], []), r"cu_seqlens_k must be .* \(0,\)"),
    "descends": (lambda: _varlen([0, 4], [0, 3, 2]), "cu_seqlens_k must ascend from 0"),
    "not as many": (lambda: _varlen([0, 4], [0, 2, 4]), "has 1 sequences, but cu_seqlens_k has 2"),
    "leftpad": (lambda: _cached(cache_leftpad=torch.tensor([0, 7])),
                "cache_leftpad must have 2 values"),
    "k alone": (lambda: _cached(k=NEW["k"], cache_seqlens=1), "k must be passed with v"),
    "cos alone": (lambda: _cached(**NEW, cache_seqlens=1, rotary_cos=torch.ones(3, 2)),
                  "and rotary_cos with rotary_sin"),
    "sin alone": (lambda: _cached(**NEW, cache_seqlens=1, rotary_sin=torch.ones(3, 2)),
                  "and rotary_cos with rotary_sin"),
    "v alone": (lambda: _cached(v=NEW["v"], cache_seqlens=1), "k must be passed with v"),
    "no length": (lambda: _cached(**NEW), "k needs cache_seqlens"),
    "full": (lambda: _cached(**NEW, cache_seqlens=5), r"cache_seqlens must have 2 values in 0..4"),
    "one length": (lambda: _cached(cache_seqlens=torch.ones(3, dtype=torch.int32)),
                   "must have 2 values in 0..6"),
    "twice": (
        lambda: _cached(**NEW, cache_seqlens=1, cache_batch_idx=torch.zeros(B, dtype=torch.int32)),
        "must not list a sample twice",
    ),
    "below": (lambda: _cached(cache_batch_idx=torch.tensor([-1, 0])),
              "must have 2 values in 0..1, got"),
    "negative": (lambda: _cached(cache_seqlens=-1), "cache_seqlens must have 2 values in 0..6"),
    "nobody": (lambda: _cached(cache_batch_idx=torch.tensor([0, 2])),
               "cache_batch_idx must have 2 values"),
    "few heads": (lambda: _cached(k=NEW["k"][:, :, :1], v=NEW["v"], cache_seqlens=1),
                  "k must be "),
    "few values": (lambda: _cached(k=NEW["k"], v=NEW["v"][:, :1], cache_seqlens=1), "v must be "),
    "one sample": (lambda: _cached(k=NEW["k"], v=NEW["v"][:1], cache_seqlens=1), "v must be "),
    "other dtype": (lambda: _cached(k=NEW["k"].half(), v=NEW["v"], cache_seqlens=1),
                    "got torch.float16"),
    "short sines": (
        lambda: _cached(**NEW, **TABLE | {"rotary_sin": torch.ones(1, 2)}, cache_seqlens=0),
        "rotary_cos and rotary_sin must have the same shape",
    ),
    "narrow sines": (
        lambda: _cached(**NEW, **TABLE | {"rotary_sin": torch.ones(3, 1)}, cache_seqlens=0),
        r"rotary_cos and rotary_sin must have the same shape, got \[3, 2\] and \[3, 1\]",
    ),
    "half a row": (lambda: _cached(cache_seqlens=torch.full((B,), 2.5)), "must have 2 values in"),
    "rotates nothing": (lambda: _cached(**TABLE), "rotary_cos needs k and v"),
    "short table": (lambda: _cached(**NEW, **TABLE, cache_seqlens=2, causal=True),
                    "rotary_cos has 3 positions, but position 3 is needed"),
}  # fmt: skip


NEVER = {  # every function, with its arguments before the options
    "flash_attn_func": lambda q, k, v: (q, k, v),
    "flash_attn_kvpacked_func": lambda q, k, v: (q, torch.stack((k, v), 2)),
    "flash_attn_qkvpacked_func": lambda q, k, v: (torch.stack((q, k, v), 2),),
    "flash_attn_varlen_func": lambda q, k, v: (*_flat(q, k, v), ENDS, ENDS, 5, 5),
    "flash_attn_varlen_kvpacked_func": lambda q, k, v: (
        *_flat(q, torch.stack((k, v), 2)), ENDS, ENDS, 5, 5),
    "flash_attn_varlen_qkvpacked_func": lambda q, k, v: (
        *_flat(torch.stack((q, k, v), 2)), ENDS, 5),
    "flash_attn_with_kvcache": lambda q, k, v: (q, k, v),
}  # fmt: skip


@pytest.mark.parametrize("name", NEVER)
def test_alibi_and_paged_caches_are_rejected_by_every_function(name):
    function, q = getattr(fa, name), _draw(B, 5, H, D)
    given = NEVER[name](q, q, q)
    for option, words in (
        ("alibi_slopes", "adds no bias"),
        ("block_table", "reads no paged cache"),
    ):
        if option in inspect.signature(function).parameters:
            function(*given, **{option: None})
            words = f"^{option} is not supported: the kernel {words}"
            with pytest.raises(ValueError, match=words) as refusal:
                function(*given, **{option: torch.ones(H)})
            one_line(refusal)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as refusal:
        call()
    one_line(refusal)
