"""`explain`: predicted bytes and messages equal those sent, and memory is ordered as measured."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from refused import check
from test_memory import Peak
from test_ring import Case

from warpweave.kernels.devices import A100
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel import messages
from warpweave.parallel.context import Links, attention, context_attention, gather, measure_links
from warpweave.parallel.context.explain import StrategyCost, explain, table
from warpweave.parallel.layout import SequenceLayout, balance
from warpweave.parallel.mesh import Mesh
from warpweave.plan.device import Efficiency, Hardware
from warpweave.plan.memory import SIZES
from warpweave.plan.time import Job, block_parts, context_bytes


def _costs(case: Case, links: Links | None = None) -> dict[str, StrategyCost]:
    costs = explain(
        case.layout, heads=case.heads, kv_heads=case.kv_heads, head_dim=case.dim, batch=case.batch,
        itemsize=case.dtype.itemsize, causal=case.causal, window=case.window, links=links,
    )  # fmt: skip
    return {cost.strategy: cost for cost in costs}


def _run(
    case: Case, rank: int, strategy: str, pair: tuple | None = None
) -> tuple[list[int], list[int], int]:
    """Return the bytes that this rank sends in each message of forward and
    backward, and the memory peak."""
    sent: list[int] = []
    world, peak = dist.get_world_size(), Peak()

    def hop(sends, receives, group):
        sent.append(sum(x.numel() * x.element_size() for x, _ in sends))
        return exchange(sends, receives, group)

    def swap(send, recv, sizes, recv_sizes, group):
        sent.append((send.numel() - sizes[dist.get_rank(group)]) * send.element_size())
        return all_to_all(send, recv, sizes, recv_sizes, group)

    def collect(x, group):
        sent.append((world - 1) * x.numel() * x.element_size())
        return all_gather(x, group)

    def scatter(x, group):
        sent.append((world - 1) * x.numel() // world * x.element_size())
        return reduce_scatter(x, group)

    exchange, all_to_all = messages.start_batch, messages.start_all_to_all
    all_gather, reduce_scatter = gather.start_all_gather, gather.start_reduce_scatter
    inputs, (do, _) = case.shard(rank)
    inputs = [x.clone().requires_grad_() for x in inputs]
    with (
        mock.patch.multiple(messages, start_batch=hop, start_all_to_all=swap),
        mock.patch.multiple(gather, start_all_gather=collect, start_reduce_scatter=scatter),
        peak,
    ):
        o = context_attention(
            *inputs, layout=case.layout, group=pair or dist.group.WORLD, strategy=strategy,
            causal=case.causal, window=case.window,
        )  # fmt: skip
        forward = len(sent)
        torch.autograd.grad(o, inputs, do)
    return sent[:forward], sent[forward:], peak.most


def _counted(rank: int, world: int) -> None:
    grouped = ((8, 4), (8, 8), (6, 3), (12, 2))  # the last two: uneven on 4 ranks, copied
    ways = (("zigzag", None), ("contiguous", 3)), (("contiguous", None), ("zigzag", 3))
    for (kind, window), heads in (  # every pair of the three occurs
        (way, heads) for i, heads in enumerate(grouped) for way in ways[i % 2]
    ):
        layout = SequenceLayout(8 * world, world, kind)
        case = Case(layout, window=window, heads=heads[0], kv_heads=heads[1], dtype=torch.bfloat16)
        costs = _costs(case)
        assert set(costs) == {"ring", "gather", "stream", "ulysses"}
        for strategy, cost in costs.items():
            forward, backward, _ = _run(case, rank, strategy)
            own = found = sum(forward), sum(backward), len(forward + backward)
            # few ranks see some blocks; heads are not divisible by the ranks
            if strategy in ("ring", "ulysses"):
                mean = torch.tensor(own) / world
                dist.all_reduce(mean)
                found = tuple(mean.tolist())
            assert found == (cost.forward, cost.backward, cost.messages), (strategy, case)
            if strategy == "ring" and kind == "contiguous" and window and world > 2:
                forward, backward, _ = _run(case, rank, "auto")  # the one that sends least
                assert cost.auto == "by bytes: no link speeds were given"
                assert own == (sum(forward), sum(backward), len(forward + backward))


@pytest.mark.parametrize("world", [2, 4])
def test_bytes_and_messages_are_those_that_leave_a_rank(world: int) -> None:
    run_ranks(world, _counted, world)


def _hybrid(rank: int) -> None:
    rings, groups = [[0, 2], [1, 3]], [[0, 1], [2, 3]]
    pair = tuple(dist.new_subgroups_by_enumeration(of)[0] for of in (rings, groups))
    case = Case(SequenceLayout(32, 4), heads=8, kv_heads=4, dtype=torch.bfloat16)
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": case.dim, "batch": case.batch}
    (cost,) = explain(case.layout, **sizes, ulysses=2)
    forward, backward, _ = _run(case, rank, "hybrid", pair)
    found = sum(forward), sum(backward), len(forward + backward)
    assert found == (cost.forward, cost.backward, cost.messages)
    assert cost.strategy == "hybrid"
    speeds = Links(1e6, 1e14), Links(1e20, 1e14)
    slow, fast = (explain(case.layout, **sizes, ulysses=2, links=x)[0] for x in speeds)
    assert slow.exposed > sum(sum(x) for x in (forward[:1], backward[:1])) / 1e6 > fast.exposed


def test_the_hybrid_sends_what_its_row_says() -> None:
    run_ranks(4, _hybrid)


@pytest.mark.parametrize("layout", [balance(96, 4), SequenceLayout(96, 4, "striped")])
def test_a_layout_without_a_hybrid_has_no_row_for_a_pair(layout: SequenceLayout) -> None:
    """In that case `resolve_strategy` reports to "auto" what does not fit."""
    sizes = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    for links in (None, Links(1e9, 1e14)):
        assert explain(layout, **sizes, ulysses=2, links=links) == ()
    for degree in (1, 4):  # one of the two alone
        assert explain(SequenceLayout(96, 4, "striped"), **sizes, ulysses=degree)


def test_a_hybrid_needs_a_head_for_each_rank_of_a_group_and_whole_groups() -> None:
    rows, sizes = {}, {"kv_heads": 1, "head_dim": 8}
    for heads, degree in itertools.product(range(1, 5), repeat=2):
        costs = explain(SequenceLayout(96, 4), heads=heads, **sizes, ulysses=degree)
        rows[heads, degree] = len(costs)
    fit = {(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (4, 2), (4, 4)}
    assert rows == {given: int(given in fit) for given in rows}


@pytest.mark.parametrize("causal", [True, False])
def test_a_window_as_long_as_the_sequence_is_none(causal: bool) -> None:
    layout, sizes = SequenceLayout(4096, 4), {"heads": 8, "kv_heads": 2, "head_dim": 64}
    whole, *others = (
        explain(layout, **sizes, causal=causal, window=window, links=Links(1e9, 1e13))
        for window in (None, 4096, 3 * 4096)
    )
    assert others == [whole, whole]


def _measured(rank: int, world: int, length: int) -> dict[str, int]:
    layout = SequenceLayout(length, world, "contiguous")
    case = Case(layout, heads=4, kv_heads=4, batch=1, dim=64, dtype=torch.float32)
    return {s: _run(case, rank, s)[2] for s in ("ring", "stream", "gather")}


def test_memory_falls_with_ranks_in_a_ring_and_by_heads_in_a_stream() -> None:
    """Peaks of all tensors on a rank, including what is reported as extra."""
    two, four = (run_ranks(world, _measured, world, 2048)[-1] for world in (2, 4))
    assert four["ring"] < four["stream"] < four["gather"]
    assert four["ring"] < 0.6 * two["ring"]  # everything that it holds is sharded
    assert four["gather"] > 0.8 * two["gather"]  # the whole K‖V is not
    for world, measured in ((2, two), (4, four)):
        layout = SequenceLayout(2048, world, "contiguous")
        costs = _costs(Case(layout, heads=4, kv_heads=4, batch=1, dim=64, dtype=torch.float32))
        stated = costs["gather"].memory - costs["stream"].memory
        saved = measured["gather"] - measured["stream"]  # including torch's own copy of dK‖dV
        assert stated <= saved < 1.45 * stated
        assert costs["ring"].memory < measured["ring"]


def test_the_table_names_every_strategy_that_fits() -> None:
    sizes, layout = {"heads": 32, "kv_heads": 8, "head_dim": 128}, SequenceLayout(131072, 8)
    text, every = table(explain(layout, **sizes)), {"ring", "gather", "stream", "ulysses"}
    assert {line.split()[0] for line in text.splitlines()[1:]} == every
    assert next(line for line in text.splitlines() if "auto (by bytes" in line).startswith("ring")
    assert text.count("unknown") == 4  # the seconds, without speeds
    one_head, too_many = (
        {cost.strategy for cost in explain(SequenceLayout(131072, ranks), **sizes)}
        for ranks in (32, 64)
    )
    assert "ulysses" in one_head - too_many  # of each rank; more ranks than heads
    near, far = (explain(layout, **sizes, links=Links(n, 4e14)) for n in (1e13, 1e9))
    assert sum(c.exposed for c in near) < sum(c.exposed for c in far)
    assert table(far).count("auto (least exposed time)") == 1


@pytest.mark.parametrize("links", [None, Links(5e10, 4e14)])
def test_the_table_has_the_numbers_of_its_rows(links: Links | None) -> None:
    costs = explain(SequenceLayout(131072, 8), heads=32, kv_heads=8, head_dim=128, links=links)
    for cost, line in zip(costs, table(costs).splitlines()[1:], strict=True):
        name, *numbers, exposed = line.partition("  auto")[0].split()
        assert name == cost.strategy
        megabytes = [n / 1e6 for n in (cost.forward, cost.backward, cost.memory)]
        expected = [*megabytes[:2], cost.messages, megabytes[2]]
        assert [*map(float, numbers)] == pytest.approx(expected, abs=0.006)
        assert exposed == ("unknown" if links is None else f"{cost.exposed * 1e3:.3f}")


def test_exposed_is_what_compute_does_not_hide() -> None:
    """4,096 tokens on 4 ranks, computed by hand: K‖V of a rank is 0.5 MiB, its gradient 1 MiB."""
    kv, link, flops = 2**19, 1e9, 1e13
    pairs = {"causal": 4096 * 4096 / 2, "full": 4096 * 4096, "window": 4096 * 256}
    pairs["both sides"] = 4096 * 2 * 256  # for a window that also looks ahead
    for mask, seen in pairs.items():
        causal, windowed = mask in ("causal", "window"), mask in ("window", "both sides")
        given = {"causal": causal, "window": 256 if windowed else None}
        costs = explain(
            SequenceLayout(4096, 4, "contiguous"), heads=8, kv_heads=2, head_dim=64,
            links=Links(link, flops), **given,
        )  # fmt: skip
        found = {cost.strategy: cost.exposed for cost in costs}
        assert [*found.values()] == sorted(found.values())
        compute = 3.5 * (4 * 64 * 8 * seen / 4) / flops  # of forward and backward
        hops = {"window": 1, "both sides": 2}.get(mask, 3)
        sent = 4 * kv / link  # K‖V twice, and a gradient in fp32, for each hop
        assert found["gather"] == pytest.approx(3 * sent)
        assert found["ring"] == pytest.approx(hops * sent - hops / (hops + 1) * compute)
        assert found["stream"] == pytest.approx(3 * sent - 0.25 * compute)


def test_a_ulysses_group_of_a_hybrid_is_near_and_one_of_all_ranks_is_not() -> None:
    """A rank has 8 rows, each of 8 and 4 heads of 16, in bf16, two ranks to
    a group and two to a ring."""
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 16}
    bare = (2 * 8 + 2 * 4) * 16 * 8 // 2 * 2 + 8 * 8 // 2 * 4  # an all-to-all, and its inverse
    kv = 2 * 16 * 2 * 16  # the two KV heads that a rank attends, 16 rows of each
    for near in (None, 2e6, 1e5):
        links = Links(1e6, 1e30, near)
        (hybrid,) = explain(SequenceLayout(32, 4), **sizes, ulysses=2, links=links)
        expected = 2 * bare / (near or 1e6) + kv * (2 + 2 + 4) / 1e6
        assert hybrid.exposed == pytest.approx(expected)
        swapped, ring = 2 * 2 * (2 * 1024 + 1024), 2 * kv * (2 + 4) + kv * 4
        assert hybrid.memory == swapped + ring
        costs = explain(SequenceLayout(32, 4), **sizes, links=links)
        (ulysses,) = (cost for cost in costs if cost.strategy == "ulysses")
        assert ulysses.exposed == pytest.approx((ulysses.forward + ulysses.backward) / 1e6)


def test_sums_under_way_are_float32_or_as_wide_as_their_terms() -> None:
    """K‖V twice and its gradient once, in a ring of every block and in a gather."""
    for itemsize, times in ((2, 4), (4, 3), (8, 3)):
        sizes = {"heads": 8, "kv_heads": 4, "head_dim": 16, "itemsize": itemsize}
        costs = explain(SequenceLayout(64, 4), **sizes, causal=False)
        found = {cost.strategy: cost for cost in costs}
        kv = 2 * 16 * 4 * 16 * itemsize
        for name in ("ring", "gather", "stream"):
            both = found[name].forward, found[name].forward + found[name].backward
            assert both == (3 * kv, 3 * times * kv), name
        lse, q = 16 * 8 * max(4, itemsize), 16 * 8 * 16 * itemsize
        assert found["ulysses"].forward == (2 * q + kv + lse) * 3 // 4
        assert found["ulysses"].memory == 2 * (2 * q + kv)  # the send and receive buffers
        wide = kv // itemsize * max(4, itemsize)  # a rank's dK‖dV
        assert found["ring"].memory == 2 * kv + 3 * wide
        assert found["gather"].memory == 4 * (2 * kv + 3 * wide)
        assert found["stream"].memory == 4 * (3 * kv + 3 * wide) // 4  # one KV head of four
        by = [(cost.forward + cost.backward, cost.memory) for cost in costs]
        assert by == sorted(by)


@pytest.mark.parametrize("cp", [2, 3, 8])
@pytest.mark.parametrize(("tp", "dtype", "flops"), [(1, "fp32", 1e9), (2, "bf16", 1e12)])
def test_the_planners_ring_is_this_one(cp: int, tp: int, dtype: str, flops: float) -> None:
    """Compares bytes and exposed seconds of a block, on links and kernels without latency, with
    messages longer than tiles and vice versa."""
    config, link = GPTConfig(11, 48 * cp, 2, 96, 12, kv_heads=4), 1e9
    device = replace(A100, half=flops, memory=math.inf, nvlink=link, network=link)
    hardware = Hardware("ideal", device, 80e9, Efficiency(1, 1, 1, 1, 1, 0))
    job = Job(config, Mesh(cp=cp, tp=tp), ParallelPlan(), 3, dtype, hardware=hardware)
    costs = explain(
        SequenceLayout(config.seq_len, cp), heads=12 // tp, kv_heads=4 // tp, head_dim=8, batch=3,
        itemsize=SIZES[dtype], links=Links(link, flops),
    )  # fmt: skip
    (ring,) = (cost for cost in costs if cost.strategy == "ring")
    assert context_bytes(job) == (ring.forward, ring.backward)
    exposed = block_parts(job)["context"]
    assert exposed.forward + exposed.backward == pytest.approx(ring.exposed)


# ------------------------------------------------------------------ the choice of "auto"

ZIGZAG = SequenceLayout(32, 4)
# this layout has no ring
BALANCED = SequenceLayout(32, 4, "balanced", chunks=((0, 7), (1, 6), (2, 5), (3, 4)))
HIDING, FAST = 1e8, 1e20  # FLOP/s of kernels whose tiles hide all hops, and none
WINS = [  # cases in which each strategy has the least exposed time
    ("ring", ZIGZAG, 1, Links(1e9, HIDING)),  # its tiles hide all hops
    ("stream", BALANCED, 8, Links(1e9, HIDING)),  # so do those of the previous head
    ("ulysses", ZIGZAG, 8, Links(1e9, FAST)),  # nothing is hidden: the fewest bytes win
    ("gather", BALANCED, 1, Links(1e9, FAST)),  # one KV head, which Ulysses would copy
    ("stream", ZIGZAG, 8, Links(1e9, FAST, memory=30_000)),  # too little for Ulysses' buffers
]


def _taken(rank: int) -> None:
    """Assert that the strategy that runs is the least exposed of `explain`'s own rows that fit."""
    for name, layout, kv_heads, links in WINS:
        case = Case(layout, heads=8, kv_heads=kv_heads, batch=1)
        costs = _costs(case, links)
        fit = [c for c in costs.values() if links.memory is None or c.memory <= links.memory]
        assert min(fit, key=lambda cost: (cost.exposed, cost.messages)).strategy == name, costs
        assert [c.strategy for c in costs.values() if c.auto] == [name]
        assert _ran(case, rank, links) == name


def _ran(case: Case, rank: int, links: Links | None) -> str:
    """Return the strategy that "auto" runs."""
    inputs, spies = case.shard(rank)[0], {}
    for name, strategy in attention._STRATEGIES.items():
        spies[name] = strategy._replace(forward=mock.Mock(wraps=strategy.forward))
    how = {"layout": case.layout, "group": dist.group.WORLD, "window": case.window}
    with mock.patch.object(attention, "_STRATEGIES", spies):
        context_attention(*inputs, **how, strategy=links)
    (ran,) = (name for name, spy in spies.items() if spy.forward.called)
    return ran


def test_auto_takes_what_explain_says() -> None:
    run_ranks(4, _taken)


def _too_much(rank: int) -> None:
    case = Case(SequenceLayout(16, 2), batch=1)
    links = Links(1e9, 1e12, memory=10)
    words = r"no strategy fits .* = 10 bytes; '\w+' needs the least, \d"
    check(lambda: _ran(case, rank, links), words)
    measured = measure_links(dist.group.WORLD, torch.randn(1, 64, 4, 8), size=2**12, rounds=2)
    found = [None, None]
    dist.all_gather_object(found, measured)
    assert found[0] == found[1] == measured
    assert _ran(case, rank, measured) in ("ring", "gather", "stream", "ulysses")


def test_no_strategy_fits_the_memory_and_ranks_agree_on_measured_speeds() -> None:
    run_ranks(2, _too_much)


def test_a_strategy_may_hold_exactly_as_much_as_is_allowed() -> None:
    sizes = {"heads": 8, "kv_heads": 8, "head_dim": 8}
    costs = explain(ZIGZAG, **sizes, links=Links(1e9, FAST))
    for cost in costs:
        for spare in (0, -1):
            limit = cost.memory + spare
            links = Links(1e9, FAST, memory=limit)
            found = [c.strategy for c in explain(ZIGZAG, **sizes, links=links) if c.auto]
            assert found == [c.strategy for c in costs if c.memory <= limit][:1]
            if spare:
                assert cost.strategy not in found


@pytest.mark.parametrize("name", ["link", "flops", "near", "memory"])
def test_a_speed_is_positive(name: str) -> None:
    check(lambda: Links(**{"link": 1.0, "flops": 1.0, name: 0}), f"{name} must be positive, got 0")


def test_auto_without_speeds_is_by_bytes() -> None:
    """It gathers as long as the whole K‖V is no larger than q, o and K‖V of a rank."""
    for heads, kv_heads, last in ((32, 32, 2), (32, 8, 5), (64, 8, 9)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 64}
        for parts, name in ((last, "gather"), (last + 1, "ring")):
            costs = explain(SequenceLayout(64 * parts, parts), **sizes)
            assert [c.strategy for c in costs if c.auto] == [name]
    layout = SequenceLayout(256, 4, "contiguous")
    spared = explain(layout, heads=32, kv_heads=8, head_dim=64, window=8)
    assert [c.strategy for c in spared if c.auto] == ["ring"] == [spared[0].strategy]
