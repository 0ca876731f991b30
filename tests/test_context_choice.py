"""The choice of a context-parallel strategy: the arithmetic, measured speeds, recomputation,
padding. No test here needs a rank that is a process."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from refused import check
from threads import Group, on_mesh, on_threads

from warpweave.kernels.attention.options import AttentionOptions
from warpweave.kernels.attention.visible import packed
from warpweave.parallel.context import Links, attention, context_attention, links
from warpweave.parallel.context.attention import resolve_strategy
from warpweave.parallel.context.explain import StrategyCost, explain, table
from warpweave.parallel.context.kept import Kept, attend_once
from warpweave.parallel.context.ring import distances, reaches
from warpweave.parallel.layout import SequenceLayout, balance
from warpweave.parallel.mesh import ConnectedMesh, Mesh

ZIGZAG, STRIPED, CONTIGUOUS = (
    SequenceLayout(24, 4, k) for k in ("zigzag", "striped", "contiguous")
)
BALANCED = balance(24, 4)
KV = 2**20  # bytes of a rank's K‖V below


def costs(layout: SequenceLayout = CONTIGUOUS, **options) -> dict[str, StrategyCost]:
    """Return costs of 4,096 tokens, 16 heads of 64 that read 4 KV heads, in 16 bits, on 4 ranks."""
    layout = dataclasses.replace(layout, seq_len=4096)
    sizes = {"heads": 16, "kv_heads": 4, "head_dim": 64} | options
    return {cost.strategy: cost for cost in explain(layout, **sizes)}


# ---------------------------------------------------------------- a row of the table


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        ({"causal": True}, 2048),
        ({"causal": False}, 4096),
        ({"causal": True, "window": 256}, 256),
        ({"causal": False, "window": 256}, 512),  # as many behind as ahead
        ({"causal": True, "window": 4000}, 2048),
        ({"causal": False, "window": 4000}, 4096),
    ],
)
def test_tiles_are_those_of_the_keys_that_a_query_sees(mask: dict, keys: int) -> None:
    """In the stream, whose first head has nothing to hide under and hides half of the others'."""
    compute = 4 * 64 * 16 * 1024 * keys / 1e15
    slow = costs(**mask, links=Links(1e9, 1e15))["stream"].exposed
    assert slow == pytest.approx((3 * KV + 3 * 3 * KV) / 1e9 - 0.5 * 3 / 4 * 3.5 * compute)


def test_memory_is_that_of_the_buffers() -> None:
    """These are two messages of K‖V and fp32 dK‖dV and a tile's gradient; all K‖V or two heads of
    it; and the send and receive buffers of all-to-alls."""
    found = {name: cost.memory for name, cost in costs().items()}
    assert found["ring"] == 2 * (KV + 2 * KV) + 2 * KV
    assert found["gather"] == 4 * (2 * KV + 3 * 2 * KV)
    assert found["stream"] == 4 * (3 * KV + 3 * 2 * KV) // 4
    assert found["ulysses"] == 2 * (2 * 1024 * 16 * 64 * 2 + KV)
    (pair,) = costs(ulysses=2).values()
    assert pair.memory == found["ulysses"] + found["ring"]
    wide = {name: cost.memory for name, cost in costs(itemsize=8).items()}
    assert wide["ring"] == 2 * (4 * KV + 4 * KV) + 4 * KV  # in fp64 gradients are equally wide
    assert all(wide[name] > found[name] for name in wide)


def test_least_exposed_that_fits_is_chosen_and_ties_prefer_fewer_messages() -> None:
    free = Links(1e9, 1.0)  # every tile hides every hop
    found = list(costs(links=free).values())
    assert [c.exposed for c in found] == sorted(c.exposed for c in found)
    assert found[0].strategy == "ring"
    assert [bool(c.auto) for c in found] == [True, False, False, False]
    for memory, marked in ((found[0].memory, 0), (found[0].memory - 1, None)):
        rows = list(costs(links=dataclasses.replace(free, memory=memory)).values())
        fit = [i for i, c in enumerate(rows) if c.memory <= memory]
        assert [i for i, c in enumerate(rows) if c.auto] == fit[:1]
        assert marked is None or fit[0] == marked
    alone = list(costs(BALANCED, links=Links(1e9, 1e30)).values())
    tied = [c for c in alone if c.strategy in ("gather", "stream")]  # as many bytes, nothing hidden
    assert tied[0].exposed == pytest.approx(tied[1].exposed)
    assert [c.strategy for c in tied] == ["gather", "stream"]


@pytest.mark.parametrize(("flops", "near"), [(1e30, None), (4e12, None), (4e12, 3e9), (1e9, 3e9)])
def test_compute_hides_a_hybrids_ring_but_not_its_all_to_alls(flops, near):
    """The only message of a ring of two hides under the first of its two tiles. The all-to-alls use
    the near link. Under a causal mask the mean rank of the ring sends half a message."""
    (cost,) = costs(ulysses=2, links=Links(1e9, flops, near)).values()
    bare = cost.forward - KV // 2, cost.backward - 3 * KV // 2
    common = 2 * 1024 * 16 * 64 * 2 + 1024 * 16 * 4  # q, o and lse; dq, do and delta
    assert bare == ((common + KV) // 2,) * 2
    tile = 4 * 64 * 16 * 1024 * 2048 / flops / 2
    expected = sum(bare) / (near or 1e9)
    expected += max(0, KV / 1e9 - tile) + max(0, 3 * KV / 1e9 - 2.5 * tile)
    assert cost.exposed == pytest.approx(expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 16])
def test_ulysses_and_gather_are_exposed_in_full(kv_heads: int) -> None:
    """Tiles do not matter, however slow, and there is one link. Gradients of
    copied KV heads are wider."""
    found = costs(kv_heads=kv_heads, links=Links(2e9, 1.0, 5e8))
    for name in ("ulysses", "gather"):
        cost = found[name]
        assert cost.exposed == pytest.approx((cost.forward + cost.backward) / 2e9)
    assert (found["ulysses"].backward > found["ulysses"].forward) == (kv_heads < 4)


@pytest.mark.parametrize("name", ["kv", "rows"])
def test_a_hybrids_ring_carries_the_heads_that_its_ranks_attend(name: str) -> None:
    """Of 6 heads that read 2: two ranks attend 3 each, of one KV head. Of 6 that read 3: two ranks
    attend 3 each, of two KV heads unevenly, for which each query head has a separate copy."""
    heads, kv_heads, carried = {"kv": (6, 2, 1), "rows": (6, 3, 3)}[name]
    sizes = {"heads": heads, "kv_heads": kv_heads, "itemsize": 4}
    ring = costs(SequenceLayout(0, 2), **sizes | {"heads": carried, "kv_heads": carried})["ring"]
    one = 2 * 2048 * 64 * carried * 4  # K‖V of the heads, for two ranks' rows
    assert (ring.forward, ring.backward) == (one, 2 * one)
    (pair,) = costs(ZIGZAG, ulysses=2, **sizes).values()
    copies = {"kv": 2, "rows": 4}[name]
    common = 2 * 1024 * heads * 64 * 4 + 1024 * heads * 4
    bare = (common + 2 * 1024 * copies * 64 * 4) // 2
    assert (pair.forward, pair.backward) == (bare + one, bare + 2 * one)
    held = 2 * (2 * 1024 * heads * 64 + 2 * 1024 * copies * 64) * 4
    assert pair.memory == held + ring.memory
    assert pair.messages == 4 + ring.messages


@pytest.mark.parametrize(
    ("layout", "window"),
    [
        (SequenceLayout(98, 7), 30),  # 41 / 7 blocks of 672 elements: 3,936, or less as a float
        (SequenceLayout(15, 5, "contiguous"), 4),  # 3 / 5 blocks of 144
        (SequenceLayout(90, 9), 11),
    ],
)
def test_the_mean_rank_of_a_ring_sends_exactly_its_part(layout, window) -> None:
    """A block travels to the last rank that sees any of it, by every rank that sees any block."""
    ranks, runs = range(layout.parts), [layout.positions(r).tolist() for r in range(layout.parts)]

    def sees(rank: int, block: int) -> bool:
        return any(0 <= i - j < window for i in runs[rank] for j in runs[block % layout.parts])

    visits = [d for d in ranks if not d or any(sees(r, r - d) for r in ranks)]
    hops = [
        max(i for i, d in enumerate(visits) if not d or sees((b + d) % layout.parts, b))
        for b in ranks
    ]
    assert len({*hops}) > 1, "the mean is of different ranks"
    sizes = {"heads": 6, "kv_heads": 3, "head_dim": 8, "window": window, "itemsize": 2}
    kv = 2 * layout.local_len * 3 * 8
    found = {cost.strategy: cost for cost in explain(layout, **sizes)}["ring"]
    sent = found.forward, found.backward
    assert sent == tuple(sum(hops) * kv * width // layout.parts for width in (2, 2 + 4))
    # As in the ring of a hybrid, over groups of two: of 6 heads that read 3 each rank attends 3.
    whole = dataclasses.replace(layout, seq_len=2 * layout.seq_len)
    ring = {cost.strategy: cost for cost in explain(whole, **sizes)}["ring"]
    (pair,) = explain(dataclasses.replace(whole, parts=2 * layout.parts), **sizes, ulysses=2)
    bare = (2 * 6 * 8 * 2 + 6 * 4 + (2 + 2) * 2 * 8 * 2) * layout.local_len // 2
    assert pair.forward == bare + ring.forward


def test_rows_are_sorted_by_bytes_in_both_directions_and_then_by_memory() -> None:
    """Ulysses sends more forward and less in total than a ring, which sends as much as a gather."""
    found = costs(ZIGZAG)
    assert [*found] == ["ulysses", "ring", "stream", "gather"]
    assert found["ulysses"].forward > found["ring"].forward
    sent = {name: cost.forward + cost.backward for name, cost in found.items()}
    assert sent["ring"] == sent["stream"] == sent["gather"] > sent["ulysses"]
    assert found["ring"].memory < found["stream"].memory < found["gather"].memory


def test_the_reason_names_the_memory_that_was_asked_for() -> None:
    for memory, shown in ((12_345_678, "12.35"), (2_000_000_000, "2000.00")):
        rows = explain(ZIGZAG, heads=4, kv_heads=2, head_dim=8, links=Links(1e9, 1e9, None, memory))
        (why,) = (cost.auto for cost in rows if cost.auto)
        assert why == f"least exposed time among the strategies that hold at most {shown} MB"
        assert f"  auto ({why})" in table(rows)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_ring_visits_exactly_the_blocks_of_which_any_position_is_seen(kind, causal) -> None:
    """Checked for every pair, including sequences shorter than the ring."""
    for parts, length in itertools.product(range(1, 6), (0, 1, 2, 3, 7, 12, 25)):
        layout = SequenceLayout(length, parts, kind)
        rows = [layout.positions(rank).tolist() for rank in range(parts)]
        for window in (None, 1, 2, 3, 5, 8):
            back, ahead = window or length + parts, 1 if causal else window or length + parts
            seen = [
                [d for d in range(parts)
                 if not d or any(-ahead < q - k < back
                                 for q in rows[(b + d) % parts] for k in keys)]
                for b, keys in enumerate(rows)
            ]  # fmt: skip
            found = distances(layout, causal, window), reaches(layout, causal, window)
            assert found == (tuple(sorted(set().union(*seen))), tuple(map(max, seen)))


# ---------------------------------------------------------------- the strategy that runs


@pytest.mark.parametrize(
    ("strategy", "layout", "ulysses", "heads", "refusal"),
    [
        ("ring", BALANCED, None, 4, "balanced layout supports .* not 'ring'"),
        ("hybrid", BALANCED, 2, 4, "balanced layout supports .* not 'hybrid'"),
        ("gather", BALANCED, None, 4, None),
        ("ulysses", BALANCED, None, 4, None),
        ("ring", STRIPED, None, 1, None),
        ("hybrid", STRIPED, 2, 4, "needs a zigzag or contiguous layout, got striped"),
        ("hybrid", STRIPED, 1, 4, None),  # a ring alone
        ("hybrid", STRIPED, 4, 4, None),  # Ulysses alone
        ("hybrid", ZIGZAG, 2, 2, None),
        ("hybrid", ZIGZAG, 2, 1, "Ulysses over 2 ranks .* got 1"),
        ("ulysses", STRIPED, None, 4, None),
        ("ulysses", ZIGZAG, None, 3, "Ulysses over 4 ranks .* got 3"),
        ("stream", ZIGZAG, None, 1, None),
        ("stream", ZIGZAG, 2, 4, "'stream' needs one process group, got a pair"),
    ],
)  # fmt: skip
def test_each_strategy_runs_where_it_fits(strategy, layout, ulysses, heads, refusal) -> None:
    found = []
    check(lambda: found.append(resolve_strategy(strategy, layout, (heads, 1), ulysses)), refusal)
    assert found == ([strategy] if refusal is None else [])


def test_what_is_weighed_is_what_is_attended() -> None:
    """Every size and option of a call reaches `explain`, and the mask affects the bytes."""
    given = Links(1.0, 1.0)
    row = StrategyCost("gather", 0, 0, 0, 0, 0.0, "least exposed time")
    q, k = torch.randn(3, 6, 10, 7).bfloat16(), torch.randn(3, 6, 5, 7).bfloat16()
    seen = {
        "heads": 10, "kv_heads": 5, "head_dim": 7, "batch": 3, "itemsize": 2, "causal": False,
        "window": 5, "ulysses": None, "links": given,
    }  # fmt: skip

    def call(group: Group, strategy) -> None:
        context_attention(
            q, k, k, layout=ZIGZAG, group=group, causal=False, window=5, strategy=strategy
        )

    with mock.patch.object(attention, "explain", return_value=(row,)) as asked:
        on_threads(4, call, given)
    assert asked.call_args_list == [mock.call(ZIGZAG, **seen)] * 4
    with mock.patch.object(attention, "by_bytes", return_value="gather") as asked:
        on_threads(4, call, "auto")
    assert asked.call_args_list == [mock.call(ZIGZAG, 10, 5, False, 5, None)] * 4


def test_what_holds_least_is_named_where_nothing_fits() -> None:
    q = torch.zeros(1, 6, 4, 8)

    def call(group: Group) -> None:
        context_attention(q, q, q, layout=ZIGZAG, group=group, strategy=Links(1.0, 1.0, memory=1))

    sizes = {"heads": 4, "kv_heads": 4, "head_dim": 8, "batch": 1, "itemsize": 4}
    least = min(explain(ZIGZAG, **sizes), key=lambda cost: cost.memory)
    words = f"memory = 1 bytes; '{least.strategy}' needs the least, {least.memory}"
    with pytest.raises(ValueError, match=words):
        on_threads(4, call)


def test_errors_name_the_rank_over_both_groups_of_a_pair() -> None:
    """For any strategy and any speeds: a pair of groups means the hybrid."""
    q, striped = torch.zeros(1, 4, 4, 8), SequenceLayout(24, 6, "striped")
    words = "strategy 'hybrid' needs a zigzag or contiguous layout, got striped"

    def call(mesh: ConnectedMesh) -> None:
        for strategy in ("hybrid", "auto", Links(1.0, 1.0)):
            with pytest.raises(ValueError, match=f"cp rank {mesh.rank} of 6: {words}$"):
                context_attention(q, q, q, layout=striped, group=mesh.context, strategy=strategy)
        words_of_layout = "the layout has 4 parts but the group has 6 ranks"
        with pytest.raises(ValueError, match=f"cp rank {mesh.rank} of 6: {words_of_layout}$"):
            context_attention(q, q, q, layout=ZIGZAG, group=mesh.context)

    for ulysses in (2, 3):
        on_mesh(Mesh(cp=6, ulysses=ulysses), call)


# ---------------------------------------------------------------- speeds


def test_the_slowest_ranks_speeds_count() -> None:
    """The speeds are those of the group: a message of that many bytes to the next rank, and 4 B H
    S^2 D of attention."""
    taken = [(2.0, 1.0), (0.5, 8.0), (1.0, 4.0), (0.25, 2.0), (0.5, 1.0), (0.25, 1.0)]
    x = torch.zeros(2, 6, 3, 5)

    of_thread = threading.local()

    def seconds(run, device, rounds) -> float:
        run()
        assert rounds == 3
        return next(of_thread.times)

    def measure(mesh: ConnectedMesh) -> Links:
        of_thread.times = iter(taken[mesh.rank])
        return links.measure_links(mesh.group("cp"), x, size=1000, rounds=3)

    with (
        mock.patch.object(links, "_seconds", seconds),
        mock.patch.object(links, "attention") as attended,
        mock.patch.object(links, "start_exchange", wraps=links.start_exchange) as sent,
    ):
        found = on_mesh(Mesh(dp=2, cp=3), measure)
    assert all(call.args[0].nbytes == 1000 for call in sent.call_args_list)
    ends = sorted(call.args[2:4] for call in sent.call_args_list)
    assert ends == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 0), (2, 0)]
    assert len(attended.call_args_list) == 6
    assert attended.call_args.kwargs == {"causal": False}
    flops = 4 * 2 * 3 * 6 * 6 * 5
    assert found == [Links(500.0, flops / 8)] * 3 + [Links(2000.0, flops / 2)] * 3


def test_a_time_is_the_median_without_the_first_run() -> None:
    ends = iter([0.0, 0.5, 0.0, 3.0, 0.0, 1.0, 0.0, 7.0])
    clock = SimpleNamespace(perf_counter=lambda: next(ends))
    with mock.patch.object(links, "time", clock):
        assert links._seconds(lambda: None, torch.device("cpu"), 3) == 3.0


@pytest.mark.parametrize(("value", "fits"), [(0, False), (float("nan"), False), (1e-9, True)])
def test_a_speed_is_a_positive_number(value: float, fits: bool) -> None:
    check(lambda: Links(1.0, 1.0, near=value), None if fits else "near must be positive")
    assert Links(1e-9, 1e-9).near is None


# ---------------------------------------------------------------- recomputation


def _call(number: int, *inputs: torch.Tensor):
    """Make a call whose backward needs the second of its inputs, and something else."""
    return lambda: (torch.tensor(number), torch.tensor(-number), [inputs[1], torch.ones(number)])


def test_a_second_run_gets_what_its_calls_were_in_their_order() -> None:
    kept, first, second = Kept(), torch.zeros(3, 2), torch.ones(3, 2)
    ran = []
    with kept.first():
        for n in (1, 2):
            o, lse, saved = attend_once(_call(n, *first), first)
            assert (o.item(), lse.item()) == (n, -n)
            assert saved[0].equal(first[1])
    with kept.second():
        for n in (1, 2):
            inputs = [*second]
            o, lse, saved = attend_once(lambda n=n: ran.append(n), inputs)
            assert (o.item(), lse.item()) == (n, -n)
            assert len(saved[1]) == n
    assert not ran  # attention did not run again
    with pytest.raises(ZeroDivisionError), kept.first():
        1 / 0  # noqa: B018
    assert attend_once(_call(5, *first), first)[0] == 5  # outside, nothing is kept or reused
    assert not kept._calls
    inner = Kept()  # of a block within a block: after it the outer one keeps again
    with kept.first():
        with inner.first():
            attend_once(_call(6, *first), first)
        attend_once(_call(7, *first), first)
    assert [float(of[0]) for store in (inner, kept) for of, _ in store._calls] == [6, 7]
    with kept.second():
        with inner.second():
            assert attend_once(lambda: 1 / 0, [*second])[0] == 6
        assert attend_once(lambda: 1 / 0, [*second])[0] == 7


def test_inputs_are_not_kept_but_taken_from_the_second_run() -> None:
    kept, q, k, o = Kept(), *torch.zeros(3, 2)
    with kept.first():
        attend_once(lambda: (o, o, [k, q, None]), [q, k])
    (((_, _, others), _),) = kept._calls
    assert others == [None] * 3  # their memory is free
    again = [torch.full((2,), 7.0), torch.full((2,), 8.0)]
    with kept.second():
        _, _, saved = attend_once(lambda: 1 / 0, again)
    assert saved[0] is again[1]
    assert saved[1] is again[0]
    assert saved[2] is None


# ---------------------------------------------------------------- padding


@pytest.mark.parametrize(
    "documents", [None, [0, 5], [0, 5, 13], [0, 5, 40], [[0, 5, 13], [0, 13, 40]]]
)
def test_padding_is_a_document_of_its_own(documents) -> None:
    """For any contents after the last token: boundaries ascend, end there, and nothing is cut."""
    layout = SequenceLayout(13, 3, "contiguous")
    given = None if documents is None else torch.tensor(documents, dtype=torch.int32)
    marks = None if given is None else packed(given, 13).table
    options = AttentionOptions(causal=False, window=9, documents=given, table=marks)
    found = attention._without_padding(options, layout, torch.device("cpu"))
    hidden = found.documents
    assert found._replace(documents=None) == options._replace(documents=None, table=None)
    rows = torch.atleast_2d(hidden).tolist()
    for row, of in zip(rows, [[0]] if documents is None else torch.atleast_2d(given).tolist()):
        assert row == sorted(row)
        assert row[-1] == 13
        assert sorted({*row} - {13}) == sorted({b for b in of if b < 13})
    assert given is None or hidden.dtype == given.dtype
    causal = options._replace(causal=True)
    assert attention._without_padding(causal, layout, torch.device("cpu")) is causal
    whole = SequenceLayout(12, 3, "contiguous")
    assert attention._without_padding(options, whole, torch.device("cpu")) is options


@pytest.mark.parametrize("name", ["wndow", "table", "q_runs"])  # the layout has the runs
def test_an_unknown_keyword_is_refused(name) -> None:
    x, given = torch.randn(1, 4, 1, 8), {"layout": SequenceLayout(4, 1), "group": None, name: None}
    with pytest.raises(TypeError, match=rf"^context_attention\(\) got an unexpected .* '{name}'$"):
        context_attention(x, x, x, **given)
