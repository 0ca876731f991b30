"""Each term of the planner's step time, in steps that are computed by hand.

A GPU here computes and moves everything in no time, except what a test sets to 1 FLOP or byte per
second. It reaches a different fraction of each such speed, which gives each unit its own price.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from warpweave.kernels.devices import A100
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.plan.device import Efficiency, Hardware
from warpweave.plan.time import (
    Job,
    Work,
    block_parts,
    gradient_sum,
    least_time,
    message,
    predict,
    stage_work,
    step_traffic,
)

# seconds of a FLOP (in products or attention), of a byte of memory, and of a byte sent
PRODUCT, ATTENTION, MEMORY, NVLINK, NETWORK = 2, 4, 8, 16, 128
FIGURES = dict.fromkeys(("half", "memory", "nvlink", "network"), math.inf)

# 2 layers, E = 32, 4 heads of D = 8, F = 128. A micro-batch has 2 sequences of 64 tokens: T = 128.
PLAIN = GPTConfig(100, 64, 2, 32, 4)
# 2 heads of keys and values, F = 48; one layer sees a window of 16 tokens, the other one all 64.
GATED = GPTConfig(100, 64, 2, 32, 4, kv_heads=2, hidden=48, positions="rope", norm="rms",
                  activation="swiglu", norm_place="sandwich", bias=False, tied=False,
                  windows=(16, 0))  # fmt: skip


def _job(config: GPTConfig = PLAIN, **given: Any) -> Job:
    """Make a bf16 job on nodes of 4 GPUs. `given` are fields of `Mesh`, `ParallelPlan`, `Device`
    and `Job`, and `latency`."""

    def part(names: Any, **default: Any) -> dict[str, Any]:
        return default | {name: given.pop(name) for name in names if name in given}

    mesh = Mesh(**part(["dp", "cp", "tp", "pp", "outer", "dp_shard"]))
    named = [field.name for field in dataclasses.fields(ParallelPlan)]
    plan = ParallelPlan(**part(named, overlap="none"))
    device = dataclasses.replace(A100, **part(FIGURES, **FIGURES))
    prices = (PRODUCT, ATTENTION, MEMORY, NVLINK, NETWORK)
    efficiency = Efficiency(*(1 / price for price in prices), given.pop("latency", 0))
    hardware = Hardware("priced", device, 1e9, efficiency, node=4)
    like = {"batch": 2, "dtype": "bf16", "device_type": "cuda", "hardware": hardware} | given
    return Job(config, mesh, plan, **like)


def _parts(config: GPTConfig = PLAIN, **given: Any) -> dict[str, tuple[float, ...]]:
    """Return what the parts of a block take: forward, backward, and its part for the weights."""
    parts = block_parts(_job(config, **given))
    return {name: tuple(part) for name, part in parts.items() if any(part)}


# GATED over tp = cp = 2 has 64 tokens, and on a tensor rank 2 heads, 1 of keys, and F = 24.
HALVED = {"config": GATED, "tp": 2, "cp": 2}


def test_a_block_computes_its_flops() -> None:
    products = 2 * 128 * (3 + 1 + 4 + 4) * 32**2 * PRODUCT  # qkv, output, up, down
    pairs = 2 * 4 * 64**2 * 8 * ATTENTION  # batch, heads, S^2, D; 2 products of 2 FLOPs, causal
    assert _parts(half=1) == {
        "products": (products, 2 * products, products),
        "attention": (2 * pairs, 5 * pairs, 0),
    }
    products = 2 * 64 * 32 * ((16 + 2 * 8) + 16 + 2 * 24 + 24) * PRODUCT
    seen = (2 * 64 * 16 - 16**2 + 64**2) / 2  # the mean of both layers
    pairs = 2 * 2 * seen * 8 * ATTENTION / 2  # batch, heads, pairs, D; over 2 context ranks
    assert _parts(half=1, **HALVED) == {
        "products": (products, 2 * products, products),
        "attention": (2 * pairs, 5 * pairs, 0),
    }
    pairs = 2 * 4 * 64**2 * 8 * PRODUCT  # scores in memory: two plain products of all pairs
    assert _parts(half=1, scores=True)["attention"] == (4 * pairs, 8 * pairs, 0)


def test_a_block_moves_its_bytes() -> None:
    # T E = 4096 and T F = 16384; weights of 3, 1, 4 and 4 times E^2 = 1024
    products = 2 * ((4 + 2 + 5 + 5) * 4096 + 12 * 1024) * MEMORY
    heads = 2 * 64 * 4 * 8 * 2  # bytes of q, of k and of v
    lse = 2 * 4 * 64 * 4
    elements, statistics = 128 * 32, 128 * 2 * 4  # mean and rstd; two norms
    forward = 4 * 2 * elements + 2 * 2 * 32 + statistics  # x, residual, sum, y; w, b
    backward = 4 * 2 * elements + 3 * 2 * 32 + statistics  # dy, sum, dsum, dx; w, dw, db
    parts = _parts(memory=1)
    assert parts == {
        "products": (products, 2 * products, products),
        "attention": ((4 * heads + lse) * MEMORY, (8 * heads + lse) * MEMORY, 0),
        "elementwise": (2 * forward * MEMORY, 2 * backward * MEMORY, 0),
    }
    scores = 2 * 4 * 64**2 * (5 * 2 + 1) * MEMORY  # five passes in bf16, and a mask
    assert _parts(memory=1, scores=True)["attention"] == (scores, 2 * scores, 0)
    # of a context rank: half of 2 x 64 tokens of 2 heads and 1 of keys
    heads, lse = 2 * 64 * 8 * 2, 2 * 2 * 64 * 4
    attention = (2 * 3 * heads + lse) / 2 * MEMORY, (4 * 3 * heads + lse) / 2 * MEMORY, 0
    assert _parts(memory=1, **HALVED)["attention"] == attention
    # fp32 doubles everything but lse and statistics
    wide = _parts(memory=1, dtype="fp32")
    assert wide["products"] == (2 * products, 4 * products, 2 * products)
    assert wide["elementwise"][0] == 2 * (2 * forward - statistics) * MEMORY


def test_separate_kernels_and_casts_move_their_bytes_too() -> None:
    x = 2 * 128 * 32
    config = dataclasses.replace(PLAIN, dropout=0.1)
    norm, back = 2 * x + 2 * 64 + 1024, 3 * x + 3 * 64 + 1024  # x, y; dy, x, dx
    hidden = 2 * 128 * 128  # GELU reads one and writes one, backward reads two
    around = 2 * 3 * x + 2 * (2 * x + 8 * 128) + 4 * 2 * x  # sums, dropout, layout of q, k, v, o
    assert _parts(config, memory=1, fused=False)["elementwise"] == (
        (2 * norm + 2 * hidden + around) * MEMORY,
        (2 * back + 3 * hidden + around) * MEMORY,
        0,
    )
    # over tensor ranks with 128 tokens, of which a rank has 64 rows
    x = 2 * 64 * 32
    norm, back = 2 * x + 64 + 4 * 64, 3 * x + 2 * 64 + 4 * 64  # RMSNorm has no b and no mean
    hidden = 2 * 128 * 24
    heads = 2 * 128 * 3 * 8  # of 2 heads and 1 of keys
    around = 2 * 3 * x + 4 * heads + (2 * heads + 4 * 128 * 8)  # sums, layout, cos and sin
    assert _parts(GATED, memory=1, fused=False, tp=2)["elementwise"] == (
        (4 * norm + 3 * hidden + around) * MEMORY,
        (4 * back + 5 * hidden + around) * MEMORY,
        0,
    )
    plain, cast = (_parts(memory=1, casts=casts)["elementwise"] for casts in (False, True))
    inputs, outputs = 128 * (32 + 32 + 32 + 128), 128 * (96 + 32 + 128 + 32)  # of four products
    more = [after - before for before, after in zip(plain, cast)]
    assert more == [(2 + 2) * inputs * MEMORY, (2 + 2) * outputs * MEMORY, 0]  # read; 8 bits, twice


def test_each_kernel_and_each_hop_has_a_latency() -> None:
    assert _parts(latency=1) == {
        "products": (4, 8, 4), "attention": (1, 1, 0), "elementwise": (2, 2, 0),
    }  # fmt: skip
    dropped = _parts(dataclasses.replace(PLAIN, dropout=0.1), latency=1, fused=False)
    assert dropped["elementwise"] == (8, 8, 0)  # 2 norms, GELU, 2 sums, 2 dropouts, layout
    # 4 norms, SwiGLU, 2 sums, layout, rope, casts; 8 tensor ranks are 3 hops, 4 context ranks 2,
    # of which attention hides 3/4 of a kernel
    everything = {"fused": False, "casts": True, "scores": True, "tp": 8, "cp": 4}
    assert _parts(dataclasses.replace(GATED, heads=8, kv_heads=8), latency=1, **everything) == {
        "products": (4, 8, 4), "attention": (4, 4, 0), "elementwise": (10, 10, 0),
        "tensor": (4 * 3, 6 * 3, 0),
    }  # fmt: skip
    assert _parts(latency=1, cp=4)["context"] == (2 - 3 / 4, 2 - 3 / 4, 0)


@pytest.mark.parametrize(
    ("tp", "price"),
    [(2, NVLINK), (4, NVLINK), (8, NETWORK / 4)],  # eight share the adapters of a node's four
)
def test_tensor_ranks_exchange_ten_passes_or_eight(tp: int, price: float) -> None:
    given = {"config": dataclasses.replace(PLAIN, heads=8), "nvlink": 1, "network": 1, "tp": tp}
    each = 2 * 128 * 32 * (tp - 1) / tp * price
    assert _parts(**given) == {"tensor": (4 * each, 6 * each, 0)}
    assert _parts(**given, sequence_parallel=False) == {"tensor": (4 * each, 4 * each, 0)}


def test_overlap_hides_passes_behind_products() -> None:
    each, work = 2 * 128 * 32 / 2 * NVLINK, 2 * 128 * 12 * 32**2 / 2 * PRODUCT

    def found(overlap: str, passes: float = 2, **given: Any) -> list[float]:
        """Return the exposed passes if the forward's products take as long as `passes`; the
        backward's take twice that."""
        speed = work / (passes * each)
        tensor = _parts(tp=2, half=speed, nvlink=1, overlap=overlap, **given)["tensor"]
        return [seconds / each for seconds in tensor]

    assert found("none") == pytest.approx([4, 6, 0])
    assert found("bulk") == pytest.approx([4, 2, 0])  # four of six are concurrent with a product
    assert found("bulk", 0.5) == pytest.approx([4, 2 + (4 - 1), 0])
    assert found("bulk", sequence_parallel=False) == pytest.approx([4, 0, 0])
    assert found("chunked") == found("fused") == pytest.approx([1 + (3 - 2), 1.5 + (4.5 - 4), 0])


def test_context_ranks_send_keys_and_values_behind_attention() -> None:
    keys = 2 * 2 * 64 * 8  # bytes of K and V of 64 tokens, one head
    sent = {"nvlink": 1, "network": 1}
    context = keys * NVLINK, (keys + 2 * keys) * NVLINK, 0  # and gradients in fp32
    assert _parts(**HALVED, **sent)["context"] == context
    wide = _parts(**HALVED, **sent, dtype="fp64")["context"]
    assert wide == (4 * context[0], (4 + 4) * context[0], 0)
    # eight ranks in two nodes have 16 tokens each, and one adapter for each of a node's two rings
    keys = 2 * 2 * 32 * 8
    far = _parts(GATED, tp=2, cp=4, **sent)["context"]
    assert far == (3 * keys * NETWORK / 2, 9 * keys * NETWORK / 2, 0)
    attention = _parts(**HALVED, half=1)["attention"]
    hidden = _parts(**HALVED, half=1, nvlink=1e-3)["context"]  # half of attention hides it
    assert hidden == pytest.approx([1e3 * context[i] - attention[i] / 2 for i in range(2)] + [0])


def test_recompute_repeats_the_forward_or_its_product_up() -> None:
    given = {"half": 1, "memory": 1, "nvlink": 1e-3, **HALVED}
    parts = _parts(**given)
    forward = sum(part[0] for part in parts.values())
    assert len(parts) == 5
    assert _parts(**given, recompute="full") == parts | {"recompute": (0, forward, 0)}
    down = 2 * 64 * 32 * 24 * PRODUCT
    stopped = _parts(**given, recompute="full", stops_early=True)["recompute"]
    assert stopped == (0, forward - down, 0)
    up = 2 * 64 * 32 * 2 * 24 * PRODUCT
    assert _parts(**given, recompute="selective") == parts | {"recompute": (0, up, 0)}
    again = _parts(**given, recompute="selective", scores=True)
    assert again["recompute"][1] == again["attention"][0]


def _ends(config: GPTConfig = PLAIN, **given: Any) -> list[list[float]]:
    """Return what the first and the last of two stages take, apart from their block."""
    job = _job(config, pp=2, **given)
    block = [sum(each) for each in zip(*block_parts(job).values())]
    return [[all - own for all, own in zip(work, block)] for work in stage_work(job)]


def test_the_first_stage_embeds_and_the_last_has_the_head() -> None:
    product = 2 * 128 * 100 * 32 * PRODUCT
    assert _ends(half=1) == [[0, 0, 0], [product, 2 * product, product]]
    assert _ends(latency=1) == [[1, 1, 0], [1 + 2, 2 + 2, 1]]  # with the norm and the loss
    # over two tensor ranks, with 64 rows: 2 (of 3) passes without sequence parallelism
    each = 2 * 128 * 32 / 2 * NVLINK
    assert _ends(nvlink=1, tp=2) == [[each, each, 0], [each, each, 0]]
    found = _ends(nvlink=1, tp=2, sequence_parallel=False)
    assert found == [[2 * each, 2 * each, 0], [each, each, 0]]
    x, V = 2 * 128 * 32, 101 // 2 + 1  # an odd vocabulary is padded
    product = 2 * (128 * 32 + 32 * V + 128 * V) * MEMORY
    norm, back = x + 2 * 64 + 8 * 64, 3 * x / 2 + 3 * 64 + 8 * 64
    losses = [16 * 128 + 128 * V * 2, 16 * 128 + 128 * V * 4]  # labels, lse and a loss of each row
    config = dataclasses.replace(PLAIN, vocab_size=101)
    assert _ends(config, memory=1, tp=2) == [
        [2 * x * MEMORY, 4 * x * MEMORY, 0],
        [product + (norm + losses[0]) * MEMORY, 2 * product + (back + losses[1]) * MEMORY, product],
    ]
    plain = 128 * V * (2 + 4 + 4 + 4)  # logits, their fp32 copy twice, its log-softmax
    assert _ends(config, memory=1, tp=2, fused=False)[1] == [
        product + (norm + plain) * MEMORY, 2 * product + (back + plain) * MEMORY, product,
    ]  # fmt: skip


# PLAIN's parameters: a block's matrices, their biases, two norms; the final norm; both embeddings
BLOCK = 12 * 32**2 + (96 + 32 + 128 + 32) + 2 * 64
FIRST, LAST, WHOLE = BLOCK + 164 * 32, BLOCK + 64 + 100 * 32, 2 * BLOCK + 64 + 164 * 32


def test_zero_2_and_3_exchange_beside_each_micro_batch() -> None:
    """Of two concurrent things the longer one takes a quarter of the shorter one longer."""

    def last(zero: int, speed: float, **given: Any) -> Work:
        return stage_work(_job(half=1, nvlink=speed, pp=2, dp=4, zero=zero, **given))[1]

    def beside(work: float, sent: float) -> float:
        return max(work, sent) + min(work, sent) / 4

    for speed in (1, 1e3):  # the messages take longer than the computation, and less
        ahead, back, weights = last(1, speed)
        gather = 2 * LAST * 3 / 4 * NVLINK / speed
        summed = 2 * gather  # in fp32
        assert last(2, speed) == pytest.approx((ahead, beside(back, summed), weights))
        both = beside(ahead, gather), beside(back, gather + summed), weights
        assert last(3, speed) == pytest.approx(both)
        halves = last(3, speed, summed=2)
        assert halves.backward == pytest.approx(beside(back, gather + gather))
    # each of two stages on a rank exchanges half of the rank's parameters
    config = dataclasses.replace(PLAIN, layers=4)
    two = {"pp": 2, "schedule": "interleaved", "chunks": 2, "microbatches": 2, "dp": 4, "zero": 3}
    gathers = [(2 * BLOCK + ends) * 3 / 4 * NVLINK for ends in (164 * 32, 64 + 100 * 32)]
    work = stage_work(_job(config, nvlink=1, **two))
    assert [each.forward for each in work] == pytest.approx(2 * gathers)
    assert [each.backward for each in work] == pytest.approx([3 * each for each in 2 * gathers])


def test_a_message_between_stages_is_the_rows_of_a_rank() -> None:
    x, sent = 2 * 128 * 32, {"nvlink": 1, "network": 1, "latency": 1}
    assert message(_job(**sent)) == (0, 0)
    assert message(_job(**sent, pp=2)) == (x, 1 + x * NVLINK)
    assert message(_job(**sent, pp=2, tp=2)) == (x / 2, 1 + x / 2 * NVLINK)
    assert message(_job(**sent, pp=2, tp=2, cp=2)) == (x / 4, 1 + x / 4 * NETWORK)  # 5th to 1st
    assert message(_job(**sent, pp=2, tp=4, scattered=True)) == (x / 4, 1 + x / 4 * NETWORK)
    whole = {**sent, "pp": 2, "tp": 4, "sequence_parallel": False}
    assert message(_job(**whole)) == (x, 1 + x * NETWORK)
    gather = 2 + 3 / 4 * x * NVLINK
    assert message(_job(**whole, scattered=True)) == (x / 4, 1 + x / 4 * NETWORK + gather)


@pytest.mark.parametrize(
    ("zero", "seconds"),
    [
        (0, 2 * 4 * 7 / 8 * NETWORK / 4),  # all-reduce over 8 ranks in two nodes
        (1, 4 * 3 / 4 * NVLINK + 2 * 4 / 4 * 1 / 2 * NETWORK),  # over 4 shards, then 2 replicas
        (2, 2 * 4 / 4 * 1 / 2 * NETWORK),  # the shards' sums are in the micro-batches
        (3, 2 * 4 / 4 * 1 / 2 * NETWORK),
    ],
)
def test_gradients_are_summed_over_shards_and_replicas(zero: int, seconds: float) -> None:
    given = {"nvlink": 1, "network": 1, "zero": zero, "dp_shard": 4 if zero else None}
    assert gradient_sum(_job(**given, dp=8), 0) == pytest.approx(WHOLE * seconds)
    assert gradient_sum(_job(**given, dp=8, summed=2), 0) == pytest.approx(WHOLE * seconds / 2)
    wide = gradient_sum(_job(**given, dp=8, summed=2, dtype="fp32"), 0)
    assert wide == pytest.approx(WHOLE * seconds)
    two = {"dp": 4, "cp": 2, "pp": 2, **given, "dp_shard": None}
    for rank, count in enumerate((FIRST, LAST)):  # context ranks are data ranks for parameters
        found = gradient_sum(_job(**two), rank)
        share = {0: 2, 1: 1}.get(zero, 0)
        assert found == pytest.approx(share * 4 * count * 7 / 8 * NETWORK / 4)


def test_the_update_moves_states_and_gathers_weights_behind_a_forward() -> None:
    def update(**given: Any) -> float:
        return predict(_job(memory=1, pp=2, dp=4, **given)).update

    # of a parameter: master and moments, read and written; an fp32 gradient; a bf16 copy
    states = (2 * 3 * 4 + 4 + 2) * MEMORY
    most = max(FIRST, LAST)
    assert update(zero=0) == most * states
    assert update(zero=0, dtype="fp32") == most * (states - 2 * MEMORY)
    assert update(zero=3) == update(zero=1) == most // 4 * states  # the forward hides the gather
    for zero in (1, 2):
        work = stage_work(_job(memory=1, nvlink=1e-3, pp=2, dp=4, zero=zero))
        wanted = [
            count // 4 * states + 2 * count * 3 / 4 * NVLINK * 1e3 - stage.forward
            for count, stage in zip((FIRST, LAST), work)
        ]
        assert update(zero=zero, nvlink=1e-3) == pytest.approx(max(wanted))


def _ticks(layers: int, count: int, wait: float, **given: Any) -> Job:
    """Make a step where each kernel and hop takes 1 s, and the sum of `count` gradients `wait`.

    A block takes 4 products, 1 attention and 2 norms, backward 8 + 1 + 2; the embedding takes 1 and
    1, the head 3 and 4 (its norm, product and loss; two products). The update takes 1.
    """
    config = dataclasses.replace(PLAIN, layers=layers)
    speed = 2 * 4 * count * 3 / 4 * NVLINK / (wait - 2 * 2)  # two times two hops of four ranks
    return _job(config, latency=1, half=1e18, nvlink=speed, pp=2, dp=4, microbatches=2, **given)


def _spans(job: Job) -> list[list[tuple[str, int, int]]]:
    cells = predict(job).timeline.cells
    return [[(c.action.op, round(c.start), round(c.end)) for c in row] for row in cells]


def test_a_step_is_its_pipeline_its_last_sum_and_its_update() -> None:
    job = _ticks(2, FIRST, 24, zero=0, outer=2)
    assert [tuple(map(round, work)) for work in stage_work(job)] == [(8, 12, 4), (10, 15, 5)]
    assert _spans(job) == [
        [("F", 0, 8), ("F", 8, 16), ("B", 35, 47), ("B", 60, 72)],
        [("F", 9, 19), ("B", 19, 34), ("F", 34, 44), ("B", 44, 59)],
    ]
    time = predict(job)
    # the sum starts with the last backward, and ends at 60 + 24
    found = time.pipeline, time.reduction, time.update, time.seconds
    assert found == pytest.approx((72, 84 - 72, 1, 85), rel=1e-9)
    # the FLOPs of 32 sequences on 16 GPUs: products and attention's causal half, forward, and twice
    # that backward
    flops = 2 * 64 * (2 * 12 * 32**2 + 100 * 32) + 2 * 4 * 4 * 64**2 * 8 / 2
    assert time.mfu * 85 * 16 * 1e18 == pytest.approx(3 * 32 * flops, rel=1e-9)
    halves = predict(_job(half=1, tp=2))
    assert halves.mfu * halves.seconds * 2 == pytest.approx(3 * 2 * flops, rel=1e-9)
    # the second rank starts at 9, works for 2 (10 + 15), and the first one's last backward follows
    assert least_time(job) == pytest.approx(9 + 50 + 12 + 1, rel=1e-9)


def test_a_split_backward_may_leave_the_weights_for_later() -> None:
    job = _ticks(2, FIRST, 5, zero=0, schedule="zb-h1")
    assert _spans(job) == [
        [("F", 0, 8), ("F", 8, 16), ("I", 30, 38), ("W", 38, 42), ("I", 50, 58), ("W", 58, 62)],
        [("F", 9, 19), ("I", 19, 29), ("F", 29, 39), ("I", 39, 49), ("W", 49, 54), ("W", 54, 59)],
    ]
    assert predict(job).seconds == pytest.approx(58 + 5 + 1, rel=1e-9)
    assert least_time(job) == pytest.approx(9 + 50 + 1, rel=1e-9)


def test_each_stage_of_a_rank_sums_after_its_own_last_backward() -> None:
    """The first rank's second stage starts its sum at 76 and takes 30, the first stage at 106."""
    both = 2 * BLOCK + 164 * 32
    job = _ticks(4, both, 60, zero=0, schedule="interleaved", chunks=2)
    first, last = _spans(job)
    assert first[4:] == [("B", 51, 62), ("B", 76, 87), ("B", 87, 99), ("B", 100, 112)]
    assert last[-1] == ("B", 88, 99)
    found = predict(job)
    assert (found.pipeline, found.reduction) == pytest.approx((112, 136 - 112), rel=1e-9)


def test_traffic_is_counted_for_each_axis_and_its_link() -> None:
    def traffic(**given: Any) -> dict[str, tuple[str, float]]:
        job = _job(**{"tp": 2, "cp": 2, "pp": 2, "dp": 2, "microbatches": 3, **given})
        return {axis: (link, moved) for axis, link, moved in step_traffic(job)}

    # 64 tokens, and one layer for each rank: 4 + 6 passes of half of them; K and V of 2 heads and
    # their fp32 gradients; 32 rows in and out; half of a block, of the embedding, and positions
    x, keys = 2 * 64 * 32, 2 * 64 * 2 * 8
    count = 12 * 32**2 // 2 + (96 + 128) // 2 + 2 * 32 + 2 * 64 + 50 * 32 + 64 * 32
    assert traffic(zero=0) == {
        "tp": ("NVLink", 3 * 10 * x / 2),
        "cp": ("NVLink", 3 * keys * (2 + 2 + 4)),
        "pp": ("network", 2 * 3 * x / 2),
        "dp": ("network", count * 2 * 4 * 3 / 4),
    }
    for zero, size in ((1, 4 + 2), (2, 3 * 4 + 2), (3, 3 * (4 + 2 + 2))):
        assert traffic(zero=zero)["dp"] == ("network", count * size * 3 / 4)
    assert traffic(recompute="full")["tp"][1] == 3 * 14 * x / 2
    assert traffic(sequence_parallel=False)["tp"][1] == 3 * 8 * x / 2
    assert traffic(zero=3, cp=1, dp=4, dp_shard=2)["dp"][1] == count * (24 / 2 + 2 * 4 / 2 / 2)
    assert traffic(tp=1, cp=1, dp=4, pp=1) == {"dp": ("NVLink", WHOLE * 6 * 3 / 4)}
    assert traffic(tp=1, dp=1, pp=1, cp=8)["cp"][0] == "network"
    assert traffic(tp=1, dp=1, cp=1)["pp"][0] == "NVLink"
