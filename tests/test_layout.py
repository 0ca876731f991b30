"""Sequence layouts: each position once, balanced causal work, labels shifted before sharding."""

import dataclasses
import random
from functools import partial
from typing import get_args

import pytest
import torch
from refused import check

from warpweave.kernels import reference
from warpweave.kernels.reference import Run
from warpweave.parallel.layout import SequenceLayout, balance, cut, shift_labels
from warpweave.parallel.words import Kind, chunks_of, local_rows

KINDS = ["zigzag", "contiguous", "striped"]


def _pairs(layout: SequenceLayout, q_rank: int, k_rank: int) -> int:
    """Count visible (query, key) pairs of one rank's queries with one rank's
    keys under a causal mask."""
    q, k = layout.positions(q_rank), layout.positions(k_rank)
    return int((k[None, :] <= q[:, None]).sum())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("chunk", [1, 3, 5])
def test_every_position_is_on_exactly_one_rank(kind: str, parts: int, chunk: int) -> None:
    layout = SequenceLayout(2 * parts * chunk, parts, kind)
    positions = [layout.positions(rank) for rank in range(parts)]
    assert torch.cat(positions).sort().values.tolist() == list(range(layout.seq_len))
    for rank, local in enumerate(positions):
        assert local.dtype == torch.int64
        assert len(local) == layout.local_len == 2 * chunk
        assert (local.diff() > 0).all()
        runs = layout.runs(rank)
        assert len(runs) <= 2
        assert reference.positions(runs, 0).tolist() == local.tolist()
        assert all(layout.owner(p) == rank for p in local.tolist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shape", "dim"), [((2, 24, 3), 1), ((24,), 0), ((5, 24), -1)])
def test_unshard_undoes_shard(kind: str, shape: tuple[int, ...], dim: int) -> None:
    layout = SequenceLayout(24, 4, kind)
    x = torch.randn(shape)
    shards = [layout.shard(x, rank, dim) for rank in range(4)]
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, x.index_select(dim, layout.positions(rank)))
    assert torch.equal(layout.unshard(shards, dim), x)
    assert not torch.equal(layout.unshard(shards[::-1], dim), x)


def test_zigzag_gives_each_rank_the_two_mirrored_chunks() -> None:
    layout = SequenceLayout(12, 3)
    assert [layout.runs(rank) for rank in range(3)] == [
        (Run(0, 2), Run(10, 2)),
        (Run(2, 2), Run(8, 2)),
        (Run(4, 4),),
    ]


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_zigzag_balances_causal_work_and_contiguous_does_not(parts: int) -> None:
    layout = SequenceLayout(6 * parts, parts)
    ranks = range(parts)
    assert len({sum(_pairs(layout, q, k) for k in ranks) for q in ranks}) == 1
    for hop in range(parts):  # in every hop a ring waits for its busiest rank
        assert len({_pairs(layout, q, (q - hop) % parts) for q in ranks}) == 1
    striped = SequenceLayout(6 * parts, parts, "striped")
    for hop in range(parts):  # up to one query
        pairs = {_pairs(striped, q, (q - hop) % parts) for q in ranks}
        assert max(pairs) - min(pairs) <= striped.local_len
    plain = SequenceLayout(6 * parts, parts, "contiguous")
    work = [sum(_pairs(plain, q, k) for k in ranks) for q in ranks]
    assert max(work) > 2 * min(work)


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_shifted_over_the_whole_sequence(kind: str) -> None:
    tokens = torch.arange(100, 112).expand(2, 12)
    layout = SequenceLayout(12, 3, kind)
    labels = shift_labels(tokens)
    for rank in range(3):
        local = layout.shard(labels, rank, 1)[0].tolist()
        assert local == [101 + p if p < 11 else -100 for p in layout.positions(rank).tolist()]
        # The mistake this prevents: shifting the shard pairs a run's last token with an unrelated
        # token.
        mistake = shift_labels(layout.shard(tokens, rank, 1))[0].tolist()
        assert (mistake == local) == (kind == "contiguous" and rank == 2)
    assert shift_labels(tokens.T, dim=0, ignore_index=-1)[:, 0].tolist() == [*range(101, 112), -1]
    for n in (0, 1):  # nothing, and one token without a next
        assert shift_labels(tokens[:, :n]).tolist() == [[-100] * n] * len(tokens)
        assert shift_labels(tokens.T[:n], dim=0).tolist() == [[-100] * len(tokens)] * n


@pytest.mark.parametrize("kind", get_args(Kind))
def test_one_rank_holds_any_length_without_padding(kind: str) -> None:
    """Pipeline stages agree on messages of that many rows before they see a batch."""
    for length in (0, 1, 7, 63, 127, 511, 513, 1025, 2049, 4099):
        layouts = [cut(length, 1, kind)]
        layouts += [balance(length, 1, [0, length // 3])] * (kind == "balanced")
        for layout in (*layouts, *(one.for_documents([0, length // 2]) for one in layouts)):
            assert layout.local_len == layout.padded_len == length
            assert layout.runs(0) == (Run(0, length),)
            assert local_rows(length, 1, chunks_of(length, 1, kind)) == length


def test_errors_name_the_numbers() -> None:
    check(lambda: SequenceLayout(16, 4, "spiral"), r"kind must be .* got 'spiral'")
    check(lambda: SequenceLayout(-4, 4), "seq_len=-4")
    for kind in KINDS:
        layout = SequenceLayout(16, 4, kind)
        check(partial(layout.shard, torch.zeros(16), 4, 0), r"rank must be in \[0, 4\), got 4")
    for layout in (*(SequenceLayout(16, 4, kind) for kind in KINDS), balance(16, 4)):
        for n in (0, 15, 17):  # fewer and more
            words = f"full sequence length 16 in dim 1, got {n}$"
            check(partial(layout.shard, torch.zeros(2, n), 0, 1), words)
        for n in (0, 3, 5):
            words = rf"one shard per rank \(4\), got {n}$"
            check(partial(layout.unshard, [torch.zeros(4)] * n, 0), words)
        for rank, n in ((0, 3), (2, 5), (3, 3)):
            shards = [torch.zeros(1, n if r == rank else 4) for r in range(4)]
            words = f"^expected 4 rows in dim -1 of shard {rank}, got {n}$"
            check(partial(layout.unshard, shards, -1), words)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.parts = 2


# ------------------------------------------------------------------ any length, any documents


def _layouts(length: int, parts: int) -> list[SequenceLayout]:
    documents = [0, length // 3, length // 3, 2 * length // 3 + 1]
    layouts = [SequenceLayout(length, parts, kind) for kind in KINDS]
    return [*layouts, balance(length, parts), balance(length, parts, documents)]


@pytest.mark.parametrize("parts", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 29, 53, 97])
def test_a_length_that_does_not_divide_is_padded_behind_its_end(length: int, parts: int) -> None:
    x = torch.randn(2, length, 3)
    for layout in _layouts(length, parts):
        positions = torch.cat([layout.positions(rank) for rank in range(parts)])
        assert positions.sort().values.tolist() == list(range(layout.padded_len))
        chunks = 1 if layout.chunks is None else len(layout.chunks[0])
        most = parts * (2 if layout.kind == "zigzag" and parts > 1 else chunks)
        assert 0 <= layout.padded_len - length < most
        for dim, whole in ((1, x), (-2, x), (0, x[0])):
            shards = [layout.shard(whole, rank, dim, fill=-7) for rank in range(parts)]
            assert torch.equal(layout.unshard(shards, dim), whole)
            padded = torch.nn.functional.pad(whole, (0, 0, 0, layout.padded_len - length), value=-7)
            for rank, shard in enumerate(shards):
                assert torch.equal(shard, padded.index_select(dim, layout.positions(rank)))


def _packed(length: int, draw) -> list[int]:
    """Return boundaries of documents of drawn lengths, the last one cut off."""
    bounds = [0]
    while bounds[-1] < length:
        bounds.append(min(length, bounds[-1] + max(1, int(draw()))))
    return bounds


@pytest.mark.parametrize("parts", [4, 8, 16])
def test_ragged_documents_are_balanced_where_zigzag_is_not(parts: int) -> None:
    """Log-normal and Pareto lengths, like web text and code, and a few documents of half the
    sequence among short ones, as in long-context mixtures: within 5 % of the mean, where zigzag has
    twice the mean."""
    rng, length = random.Random(parts), 16384
    drawn = {
        "log-normal": lambda: rng.lognormvariate(5, 1.4),
        "Pareto": lambda: 50 * rng.paretovariate(1.1),
        "long among short": lambda: length // 2 if rng.random() < 0.02 else 120,
    }
    for name, draw in drawn.items():
        uneven = []
        for documents in (_packed(length, draw) for _ in range(5)):
            ranks, plain = balance(length, parts, documents), SequenceLayout(length, parts)
            begins = torch.tensor(documents)
            for layout in (ranks, plain):  # the pairs, counted in another way
                for rank, pairs in enumerate(layout.pairs(documents)):
                    at = layout.positions(rank)
                    begin = begins[torch.searchsorted(begins, at, right=True) - 1]
                    assert int((at - begin + 1).sum()) == pairs
            pairs = ranks.pairs(documents)
            assert max(pairs) * parts <= 1.05 * sum(pairs), name
            pairs = plain.pairs(documents)
            uneven.append(max(pairs) * parts / sum(pairs))
        assert sorted(uneven)[2] > 1.5, (name, uneven)
    assert [balance(60, 3).runs(rank) for rank in range(3)] == [
        SequenceLayout(60, 3).runs(rank) for rank in range(3)
    ]  # a single document: zigzag


# Document lengths of published corpora. Gao et al. 2020, The Pile (arXiv:2101.00027), Table 1:
# effective GiB and mean KiB of a document of each component. Soldaini et al. 2024, Dolma
# (arXiv:2402.00159, its dataset card): 10^6 documents and 10^9 tokens of each source. A document
# comes from a component in proportion to the component's documents; its length is exponential with
# that mean (the shape within a component is ours: only the mean is published), at 4 bytes per
# token.
PILE = (
    (227.12, 4.33), (180.55, 30.55), (151.44, 538.36), (125.54, 3.85), (112.42, 46.61),
    (95.16, 5.25), (76.73, 15.06), (64.39, 2.16), (45.81, 4.08), (38.53, 1.30), (27.19, 398.73),
    (19.47, 30.48), (19.13, 1.11), (15.49, 8.00), (11.03, 545.48), (9.45, 369.87), (9.17, 68.87),
    (7.80, 4.92), (7.47, 22.55), (4.76, 73.37), (3.79, 2.11), (1.76, 1.78),
)  # fmt: skip
DOLMA = ((4600, 2415), (364, 175), (38.8, 57), (236, 430), (0.052, 4.8), (6.1, 3.6))
# TxT360 (LLM360; the card of its English sample of 5 million documents): minimum, quartiles and
# maximum of tokens. Log-uniform between the quartiles, and above the third a Pareto tail whose
# exponent gives the published mean, 1,004.
TXT360 = (257, 402, 622, 1050, 24574)


def _mixture(rng: random.Random, components: list[tuple[float, float]]):
    counts, means = zip(*components)
    return lambda: rng.expovariate(1 / rng.choices(means, counts)[0])


def _quartiles(rng: random.Random):
    def draw() -> float:
        part, u = rng.randrange(4), rng.random()
        if part == 3:
            return min(TXT360[4], TXT360[3] * rng.paretovariate(1.75))
        return TXT360[part] * (TXT360[part + 1] / TXT360[part]) ** u

    return draw


def test_documents_of_published_lengths_are_balanced_where_zigzag_is_not() -> None:
    """64k tokens on 16 ranks: at most 5 % above the mean, where zigzag has twice the mean. The same
    holds with a number of chunks fixed by a model."""
    rng, length, parts = random.Random(0), 65536, 16
    drawn = {
        "The Pile": _mixture(rng, [(gib / kib, 256 * kib) for gib, kib in PILE]),
        "Dolma": _mixture(rng, [(docs, 1e3 * tokens / docs) for docs, tokens in DOLMA]),
        "TxT360": _quartiles(rng),
    }
    mean = sum(drawn["TxT360"]() for _ in range(20000)) / 20000
    assert mean == pytest.approx(1004, rel=0.05)
    plain, fixed = SequenceLayout(length, parts), cut(length, parts, "balanced")
    for name, draw in drawn.items():
        uneven = []
        for documents in (_packed(length, draw) for _ in range(5)):
            for layout in (balance(length, parts, documents), fixed.for_documents(documents)):
                pairs = layout.pairs(documents)
                assert max(pairs) * parts <= 1.05 * sum(pairs), name
            pairs = plain.pairs(documents)
            uneven.append(max(pairs) * parts / sum(pairs))
        assert sorted(uneven)[2] >= 2, (name, uneven)


def test_a_batch_has_one_balanced_layout_of_as_many_rows_for_any_documents() -> None:
    """Its chunks are chosen for the sum of the samples' work."""
    layout = cut(1031, 3, "balanced")
    assert cut(1031, 3, "striped") == SequenceLayout(1031, 3, "striped")
    assert len(layout.chunks[0]) == 2
    assert [len(cut(n, 4, "balanced").chunks[0]) for n in (1000, 2048, 4096, 1 << 20)] == [
        2, 4, 8, 16,
    ]  # fmt: skip
    samples = torch.tensor([[0, 500, 500, 1031], [0, 17, 900, 1000]])
    found = layout.for_documents(samples)
    assert found.local_len == layout.local_len
    assert found != layout
    assert found == balance(1031, 3, samples.to(torch.int32), each=2)
    each = [found.pairs(row.tolist()) for row in samples]
    assert found.pairs(samples) == [a + b for a, b in zip(*each)]
    worst = [max(other.pairs(samples)) for other in (found, layout, SequenceLayout(1031, 3))]
    assert worst[0] == min(worst)
    zigzag = SequenceLayout(1031, 3)
    assert zigzag.for_documents(samples) is zigzag


def test_the_picture_shows_who_has_queries_who_reads_and_how_much() -> None:
    assert SequenceLayout(8, 2, "contiguous").draw().splitlines() == [
        "  0 ####....  0.56",
        "  1 ----####  1.44",
    ]
    assert SequenceLayout(7, 2).draw([0, 3]).splitlines() == [
        "  0 ##.---#  0.88",
        "  1 --####.  1.12",
    ]
    for length in (1, 49, 50, 51, 99, 1000, 1001):
        line = SequenceLayout(length, 4).draw(width=50).splitlines()[2]
        assert len(line) == 4 + min(length, -(-length // -(-length // 50))) + 6 <= 60


UNLIKE = "kind 'balanced' requires chunks, and other kinds do not allow"
UNEVEN = "expected the same nonzero number of chunks"
ONCE = "expected chunks 0 to 3 exactly once each, in ascending order on each rank"


@pytest.mark.parametrize(
    ("parts", "kind", "chunks", "words"),
    [
        (2, "balanced", ((0, 3), (1, 2)), None),
        (2, "balanced", None, UNLIKE),
        (2, "zigzag", ((0, 3), (1, 2)), UNLIKE),
        (3, "balanced", ((0, 3), (1, 2)), UNEVEN),
        (1, "balanced", ((0, 3), (1, 2)), UNEVEN),
        (2, "balanced", ((0, 1, 2), (3,)), UNEVEN),
        (2, "balanced", ((), ()), UNEVEN),
        (2, "balanced", ((0, 3), (1, 4)), ONCE),
        (2, "balanced", ((1, 4), (2, 3)), ONCE),
        (2, "balanced", ((0, 3), (1, 1)), ONCE),
        (2, "balanced", ((0, 3), (2, 1)), ONCE),
        (2, "balanced", ((3, 0), (1, 2)), ONCE),
        (0, "zigzag", None, "expected parts >= 1 and seq_len >= 0, got parts=0, seq_len=8"),
        (-1, "striped", None, "expected parts >= 1 and seq_len >= 0, got parts=-1, seq_len=8"),
    ],
)
def test_chunks_are_each_on_one_rank_as_many_and_ascending(parts, kind, chunks, words) -> None:
    check(lambda: SequenceLayout(8, parts, kind, chunks), words and f"^{words}")
    assert words or SequenceLayout(8, parts, kind, chunks).local_len == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_padded_layout_has_owners_of_all_rows_and_no_ranks_beyond_its_own(kind: str) -> None:
    layout = SequenceLayout(5, 3, kind)
    for rank in (-1, -3, 3):
        with pytest.raises(ValueError, match=rf"^rank must be in \[0, 3\), got {rank}$"):
            layout.runs(rank)
    assert layout.positions(1, "meta").device.type == "meta"
    assert SequenceLayout(5, 1).positions(0, device="meta").device.type == "meta"
    for rank in range(3):  # including padding
        assert {layout.owner(p) for p in layout.positions(rank).tolist()} == {rank}
    assert layout.padded == SequenceLayout(layout.padded_len, 3, kind)


def test_a_balanced_layout_is_the_best_of_those_that_are_tried() -> None:
    """It tries 2, 4, ... 32 chunks per rank, until no rank has more than 1.02 times the mean, or
    chunks are single tokens."""
    rng = random.Random(1)
    for _ in range(30):
        parts = rng.choice((2, 3, 5, 8))
        length = rng.randrange(1, 40 * parts)
        documents = _packed(length, lambda length=length: rng.expovariate(3 / length))
        tried = []
        for each in (2, 4, 8, 16, 32):
            tried.append(balance(length, parts, documents, each=each))
            worst, mean = max(tried[-1].pairs(documents)), sum(tried[-1].pairs(documents)) / parts
            if worst <= 1.02 * mean or tried[-1].local_len == each:
                break
        most = [max(layout.pairs(documents)) for layout in tried]
        assert balance(length, parts, documents) == tried[most.index(min(most))]
    assert len(balance(5, 2, [0, 2, 4, 5]).chunks[0]) == 2  # 4 would be no better


def test_the_picture_of_no_token_is_empty() -> None:
    assert SequenceLayout(0, 2).draw().splitlines() == ["  0   0.00", "  1   0.00"]
