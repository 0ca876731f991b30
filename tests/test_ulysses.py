"""Ulysses and its hybrid with a ring: exact for every number of ranks and heads, counted messages,
and planted faults that must show.

All ranks run in one process (`run_in_process`). test_context.py tests process groups with the other
strategies; here they are tested for the hybrid's two groups.
"""

import itertools
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from close import relative_error
from plants import instead, planted
from ranks import run_ranks
from test_ring import Case, assert_equal_to_whole

from warpweave.kernels import reference
from warpweave.kernels.attention import attention_delta
from warpweave.kernels.attention.options import AttentionOptions, checked
from warpweave.parallel import messages
from warpweave.parallel.context import Links, context_attention, ulysses
from warpweave.parallel.layout import SequenceLayout, balance

Tensors = tuple[torch.Tensor, ...]


def emulate(case: Case, degree: int, options=None, sinks=None, *, overlap=True) -> Tensors:
    """Return the whole o, lse, dq, dk, dv of ranks, with a Ulysses degree of `degree`."""
    ranks = range(case.layout.parts)
    shards = [case.shard(rank) for rank in ranks]
    options = checked(options or AttentionOptions(case.causal), *shards[0][0], sinks)
    split = ulysses.HeadSplit(case.layout, degree, case.heads, case.kv_heads)
    given = {"split": split, "options": options}
    how = {"inner": degree, "overlap": overlap}
    forward = messages.run_in_process(
        [ulysses.ulysses_forward(r, *shards[r][0], sinks=sinks, **given) for r in ranks], **how
    )
    backward = []
    for rank, (o, lse, saved) in enumerate(forward):
        do, dlse = shards[rank][1]
        delta = attention_delta(o, do, dlse.where(lse.isfinite(), 0))
        backward.append(ulysses.ulysses_backward(rank, do, saved, delta, **given, through_lse=True))
    grads = messages.run_in_process(backward, **how)
    return case.unshard([(o, lse, *g) for (o, lse, _), g in zip(forward, grads)])


# ------------------------------------------------------------------ 1. exactness


OTHER_HEADS = (8, 8), (8, 1), (10, 2), (12, 4)
RANKS = [(1, 1), (1, 2), (1, 3), (1, 4), (1, 6), (1, 8), (2, 2), (2, 3), (3, 2), (2, 4), (4, 2)]


@pytest.mark.parametrize(
    ("ring", "degree", "heads", "kv_heads"),
    [(*ranks, *heads) for ranks in RANKS for heads in ((8, 2), (9, 3))]
    + [(*ranks, *heads) for ranks in ((1, 4), (2, 3), (3, 2)) for heads in OTHER_HEADS],
)
def test_it_equals_whole_attention(ring: int, degree: int, heads: int, kv_heads: int) -> None:
    """Covers heads divisible by the Ulysses degree, and heads that are not; copied KV heads."""
    for kind in ("zigzag", "contiguous", "striped"):
        if kind == "striped" and min(ring, degree) > 1:
            continue
        layout = SequenceLayout(6 * ring * degree, ring * degree, kind)
        case = Case(layout, causal=kind != "contiguous", heads=heads, kv_heads=kv_heads)
        assert_equal_to_whole(case, emulate(case, degree))


@pytest.mark.parametrize(("ring", "degree"), [(1, 3), (2, 2), (3, 2), (2, 3)])
@pytest.mark.parametrize("length", [2, 13, 29])
def test_a_length_that_does_not_divide(ring: int, degree: int, length: int) -> None:
    for kind in ("zigzag", "contiguous"):
        case = Case(SequenceLayout(length, ring * degree, kind), heads=6, kv_heads=3)
        assert_equal_to_whole(case, emulate(case, degree))


SINKS = torch.tensor([0.3, -2.0, 1.0, -torch.inf, 0.0, 0.1], dtype=torch.float64)


def _options(length: int) -> list[tuple[AttentionOptions, torch.Tensor | None]]:
    documents = torch.tensor([0, 3, 3, length // 2 + 1, length])
    dropout = {"dropout": 0.3, "dropout_seed": 7, "dropout_origin": (3, 2)}
    return [
        (AttentionOptions(window=5), None),
        (AttentionOptions(False, window=length // 2), None),
        (AttentionOptions(softcap=2.0, scale=0.7), SINKS),
        (AttentionOptions(documents=documents), None),
        (AttentionOptions(False, documents=torch.stack((documents, documents.clamp(max=7)))), None),
        (AttentionOptions(**dropout), None),
        (AttentionOptions(window=9, documents=documents, softcap=3.0, **dropout), SINKS),
    ]


@pytest.mark.parametrize("option", range(7))
@pytest.mark.parametrize(("ring", "degree"), [(1, 2), (1, 4), (2, 2), (3, 2), (2, 3)])
def test_masks_scores_sinks_and_dropout(ring: int, degree: int, option: int) -> None:
    case = Case(SequenceLayout(8 * ring * degree, ring * degree), heads=6, kv_heads=3)
    options, sinks = _options(case.layout.seq_len)[option]
    whole, (do, dlse) = case.draw()
    whole = [x.clone().requires_grad_() for x in whole]
    apart = ("q_runs", "k_runs", "table", "impl", "deterministic")
    told = {k: v for k, v in options._asdict().items() if k not in apart}
    o, lse = reference.attention(*whole, sinks=sinks, **told)
    seen = lse.detach().isfinite()
    grads = torch.autograd.grad((o, lse.where(seen, 0)), whole, (do, dlse.where(seen, 0)))
    got = emulate(case, degree, options, sinks)
    assert torch.equal(got[1].isfinite(), seen)
    truth = (o.detach(), lse.detach().where(seen, 0), *grads)
    for a, b in zip((got[0], got[1].where(seen, 0), *got[2:]), truth):
        assert relative_error(a, b) <= 1e-11


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
def test_without_a_ring_rows_and_heads_keep_every_bit(kind: str) -> None:
    """Each head's attention is that of one device; only copied KV heads have sums over ranks."""
    case = Case(SequenceLayout(24, 4, kind), heads=8, kv_heads=4)
    alone = emulate(replace(case, layout=SequenceLayout(24, 1)), 1)
    for got, expected in zip(emulate(case, 4), alone):
        assert relative_error(got, expected) <= 1e-15
    for waited, hidden in zip(emulate(case, 2, overlap=False), emulate(case, 2)):
        assert torch.equal(waited, hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_error_does_not_grow_with_ranks(dtype: torch.dtype, kv_heads: int) -> None:
    """Copied KV heads are the hard case: their gradients are sums over ranks, in fp32."""
    case = Case(SequenceLayout(64, 1), heads=8, kv_heads=kv_heads, dim=16, dtype=dtype)
    truth = case.truth()

    def errors(got: Tensors) -> list[float]:
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, truth)]

    alone, limit = errors(emulate(case, 1)), 2.0 if dtype == torch.float32 else 1.1
    for ring, degree in ((1, 8), (2, 4), (4, 2), (4, 8)):
        cut = replace(case, layout=SequenceLayout(64, ring * degree))
        ratios = [e / a for e, a in zip(errors(emulate(cut, degree)), alone)]
        assert all(ratio <= limit for ratio in ratios), (ring, degree, ratios)


def test_messages_hold_an_odd_number_of_16_bit_elements_beside_fp32() -> None:
    layout = SequenceLayout(9, 3, "contiguous")
    case = Case(layout, heads=3, kv_heads=3, batch=1, dim=5, dtype=torch.bfloat16)
    for got, expected in zip(emulate(case, 3), case.truth()):
        assert relative_error(got, expected) <= 2**-6


# ------------------------------------------------------------------ 2. messages


@dataclass
class _Sent:
    """A counter of elements that ranks send one another by all-to-all, except to themselves."""

    sizes: list[int]

    def ends(self, rank: int, message, inner: int) -> messages._Ends:
        if isinstance(message, messages.AllToAll):
            me = rank % inner
            n = sum(s for other, s in enumerate(message.send_sizes) if other != me)
            self.sizes[rank] += n * message.send.element_size()
        return _ends(rank, message, inner)


_ends = messages._ends


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 2), (4, 4), (8, 8), (2, 4)])
def test_bytes_are_those_of_the_formula(kv_heads: int, ranks: int) -> None:
    """(2 H + 2 Hkv) D S/P (P-1)/P and lse forward, do, dq, dK‖dV and delta backward. A KV head that
    several ranks read is sent once to each, and its gradient in fp32."""
    case = Case(SequenceLayout(6 * ranks, ranks), heads=8, kv_heads=kv_heads, dtype=torch.bfloat16)
    sent = _Sent([0] * ranks)
    with mock.patch.object(messages, "_ends", sent.ends):
        emulate(case, ranks)
    rows, others = case.batch * 6, ranks - 1
    copies = max(kv_heads, ranks) // ranks  # KV heads per rank
    wide = 4 if kv_heads < ranks else 2
    for n in sent.sizes:
        q, kv, numbers = (8 // ranks) * case.dim * others, copies * case.dim * others, 8 // ranks
        forward = 2 * (2 * q + 2 * kv) + 4 * numbers * others
        backward = 2 * 2 * q + wide * 2 * kv + 4 * numbers * others
        assert n == rows * (forward + backward)


# ------------------------------------------------------------------ 3. planted faults


def _contiguous(split: ulysses.HeadSplit) -> SequenceLayout:
    return SequenceLayout(split.layout.local_len * split.ranks, split.ranks, "contiguous")


_read = ulysses.HeadSplit.read
FAULTS = {
    "dropout keyed by local heads": ("of_heads", lambda split, options, rank: options),
    "rows in the order of ranks": ("rows", property(_contiguous)),
    "query heads read each other's KV heads": ("read", lambda *rank: _read(*rank)[::-1]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_show(fault: str) -> None:
    case = Case(SequenceLayout(24, 3), heads=8, kv_heads=2)  # rank 1 reads both KV heads unevenly
    options = AttentionOptions(dropout=0.3, dropout_seed=7)
    right = emulate(case, 3, options)
    with planted(instead(ulysses.HeadSplit, *FAULTS[fault])):
        wrong = emulate(case, 3, options)
    assert max(relative_error(a, b) for a, b in zip(wrong, right)) > 1e-2


# ------------------------------------------------------------------ 4. on two groups


def _hybrid(rank: int, world: int, degree: int) -> None:
    groups = [list(range(i, i + degree)) for i in range(0, world, degree)]
    rings = [list(range(i, world, degree)) for i in range(degree)]
    pair = tuple(dist.new_subgroups_by_enumeration(of)[0] for of in (rings, groups))
    for kind, kv_heads in itertools.product(("zigzag", "contiguous"), (4, 1)):
        case = Case(SequenceLayout(8 * world, world, kind), heads=4, kv_heads=kv_heads)
        inputs, cotangents = case.shard(rank)
        inputs = [x.clone().requires_grad_() for x in inputs]
        for strategy in ("hybrid", "auto"):
            how = {"group": pair, "strategy": strategy, "return_lse": True}
            out = context_attention(*inputs, layout=case.layout, **how)
            got = *out, *torch.autograd.grad(out, inputs, cotangents)
            for a, b, dim in zip(got, case.truth(), (1, 2, 1, 1, 1)):
                assert relative_error(a.detach(), case.layout.shard(b, rank, dim)) <= 1e-11
    striped = replace(case, layout=replace(case.layout, kind="striped"))
    with pytest.raises(ValueError, match="'hybrid' needs a zigzag or contiguous layout"):
        context_attention(*striped.shard(rank)[0], layout=striped.layout, group=pair)
    cut = replace(case, layout=balance(8 * world, world))
    given = {"layout": cut.layout, "group": pair, "strategy": Links(1e9, 1e14)}
    with pytest.raises(ValueError, match=r"balanced layout supports .* not 'hybrid'"):
        context_attention(*cut.shard(rank)[0], **given)


@pytest.mark.parametrize(("world", "degree"), [(4, 2), (6, 2), (6, 3)])
def test_the_hybrid_on_a_pair_of_groups(world: int, degree: int) -> None:
    run_ranks(world, _hybrid, world, degree)
