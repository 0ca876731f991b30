"""The planner: memory and time by closed forms, and the chosen layout."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
from refused import check, one_line

from warpweave.cli import toml as config_file
from warpweave.convert.families import canonical
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.model.gpt import GPT
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.schedule import FAMILIES
from warpweave.plan.choose import Search, branches, choose_layouts, layouts_of
from warpweave.plan.command import run
from warpweave.plan.device import Efficiency, Hardware, find_hardware
from warpweave.plan.layout import read_layout
from warpweave.plan.memory import (
    SIZES,
    States,
    TrainingStep,
    block_activations,
    estimate,
    live_blocks,
    sharded,
    units_of,
)
from warpweave.plan.options import parse
from warpweave.plan.time import (
    Job,
    block_parts,
    least_time,
    message,
    predict,
    step_time,
    step_traffic,
)
from warpweave.prove import options as prove_options
from warpweave.train import options as train_config

# ---------------------------------------------------------------- memory

TINY = {"vocab_size": 101, "seq_len": 16, "layers": 5, "width": 32, "heads": 4}
STYLES = [
    {},
    {"tied": False, "bias": False, "kv_heads": 2, "activation": "swiglu", "norm": "rms"},
    {"positions": "rope", "qk_norm": True, "norm_place": "sandwich", "head_size": 16},
    {"positions": "rope", "qk_norm": True, "qk_norm_whole": True, "sinks": True, "hidden": 88},
    {"qkv_bias": False, "norm_bias": False, "norm_place": "post", "activation": "geglu"},
    {"qkv_bias": True, "bias": False, "kv_heads": 2, "activation": "relu2"},
]


@pytest.mark.parametrize("style", STYLES)
def test_parameters_are_counted_as_the_model_has_them(style: dict) -> None:
    """Compare each unit's closed form with the parameters of the model on the meta device."""
    config = GPTConfig(**TINY | style)
    for mesh, plan in (
        (Mesh(), ParallelPlan()),
        (Mesh(tp=2), ParallelPlan()),
        (Mesh(tp=2, pp=2, dp=2), ParallelPlan(schedule="interleaved", chunks=2, microbatches=2)),
        (Mesh(pp=2), ParallelPlan(schedule="zb-v", chunks=2, microbatches=4)),  # both on one rank
    ):
        for rank in range(mesh.pp):
            at = mesh.seen_from(mesh.rank_at(pp=rank))
            found: dict[str, int] = {}
            for name, param in GPT(config, mesh=at, plan=plan, device="meta").named_parameters():
                parts = name.split(".")
                unit = parts[1] if parts[0] == "blocks" else parts[0]
                found[unit] = found.get(unit, 0) + param.numel()
            assert units_of(config, mesh, plan, rank) == found


def test_sizes_are_those_of_the_dtypes() -> None:
    assert {name: dtype.itemsize for name, dtype in NAMED_DTYPES.items()} == SIZES


def test_zero_is_that_of_the_papers_first_figure() -> None:
    """arXiv:1910.02054: 7.5 B parameters, 64 ranks, K = 12, in GB as printed there."""
    whole = States(*(7_500_000_000 * each for each in (2, 2, 12)))
    found = [sum(sharded(whole, zero, 64)) / 1e9 for zero in range(4)]
    assert [round(gb, 1) for gb in found] == [120.0, 31.4, 16.6, 1.9]
    assert found == pytest.approx([120, 30 + 90 / 64, 15 + 105 / 64, 120 / 64])


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_activations_without_fusion_are_korthikantis(tp: int, sequence_parallel: bool) -> None:
    """arXiv:2205.05198, table 2: what a layer of Megatron-LM saves of a micro-batch."""
    s, b, h, a = 2048, 4, 6144, 64
    config = GPTConfig(51200, s, 48, h, a)
    plan = ParallelPlan(sequence_parallel=sequence_parallel)
    step = TrainingStep(config, Mesh(tp=tp), plan, b, "bf16", "cuda")
    kept, spared = block_activations(step, fused=False)
    sbh, scores = s * b * h, 5 * a * s * s * b
    if sequence_parallel:
        assert kept == (34 * sbh + scores) // tp
    else:
        assert kept == 10 * sbh + (24 * sbh + scores) // tp
    assert spared == scores // tp
    assert block_activations(step)[0] < kept - spared  # no masks, no second hidden activations


def test_blocks_in_flight_are_the_schedules() -> None:
    """1F1B holds p - r micro-batches of rank r's layers, GPipe all of them."""
    eight = GPTConfig(**TINY | {"layers": 8})
    ofob, gpipe = (ParallelPlan(schedule=name, microbatches=7) for name in ("1f1b", "gpipe"))
    assert live_blocks(ofob, 4, eight) == (8, 6, 4, 2)
    assert live_blocks(gpipe, 4, eight) == (14, 14, 14, 14)
    looped = dataclasses.replace(ofob, schedule="interleaved", chunks=2, microbatches=8)
    assert live_blocks(looped, 4, eight) == (11, 9, 7, 5)  # 2 (p - 1 - r) + (c - 1) p + 1


# ---------------------------------------------------------------- time

A100, H100 = find_hardware("a100-80g"), find_hardware("h100")
SMALL = GPTConfig(64, 256, 8, 512, 8)


def _job(config: GPTConfig = SMALL, hardware: Hardware = A100, **given: Any) -> Job:
    """Make a bf16 job; `given` are fields of `Job`, `Mesh` and `ParallelPlan`."""
    parts: dict[type, dict] = {Job: {"batch": 1}, Mesh: {}, ParallelPlan: {"zero": 0}}
    for (name, value), kind in itertools.product(given.items(), parts):
        if name in {f.name for f in dataclasses.fields(kind)}:
            parts[kind][name] = value
    mesh, plan = Mesh(**parts[Mesh]), ParallelPlan(**parts[ParallelPlan])
    more = {"dtype": "bf16", "device_type": "cuda", "hardware": hardware} | parts[Job]
    return Job(config, mesh, plan, **more)


def _ideal(**figures: float) -> Hardware:
    """Make A100s that reach all their peaks, with memory, links and launches that take no time."""
    free = {"memory": math.inf, "nvlink": math.inf, "network": math.inf} | figures
    device = dataclasses.replace(A100.device, **free)
    return Hardware("ideal", device, 80e9, Efficiency(1, 1, 1, 1, 1, 0))


def test_free_memory_and_links_leave_the_flops() -> None:
    """All products, with attention 3.5 times its forward; the model's FLOPs count 3 times."""
    job = _job(hardware=_ideal(), microbatches=3, batch=2)
    c = job.config
    attention = 2 * c.layers * job.sequences * c.heads * c.seq_len**2 * c.head_dim
    flops = c.step_flops(job.sequences * c.seq_len) + attention / 2
    assert step_time(job) == pytest.approx(flops / A100.device.half, rel=1e-12)
    assert predict(job).mfu == pytest.approx(1 - attention / 2 / flops, rel=1e-12)
    full = step_time(dataclasses.replace(job, plan=dataclasses.replace(job.plan, recompute="full")))
    forward = 2 * c.layers * job.sequences * c.seq_len * 12 * c.width**2 + attention
    assert full - step_time(job) == pytest.approx(forward / A100.device.half, rel=1e-9)


@pytest.mark.parametrize(("pp", "m", "chunks"), [(4, 8, 1), (2, 4, 2), (4, 8, 2)])
def test_the_pipelines_bubble_is_the_papers(pp: int, m: int, chunks: int) -> None:
    """arXiv:2104.04473: (p - 1) / (m c) of the ideal time, if the head costs nothing."""
    config = dataclasses.replace(SMALL, vocab_size=1, seq_len=8192)
    given: dict[str, Any] = {"hardware": _ideal(), "microbatches": m}
    name = "1f1b" if chunks == 1 else "interleaved"
    one = predict(_job(config, **given))
    many = predict(_job(config, pp=pp, schedule=name, chunks=chunks, **given))
    expected = one.pipeline / pp * (1 + (pp - 1) / m / chunks)
    assert many.pipeline == pytest.approx(expected, rel=1e-4)


def test_links_cost_their_bytes() -> None:
    """Use a slow link of each kind, with its traffic computed by hand."""
    c, b, speed = dataclasses.replace(SMALL, kv_heads=4), 2, 1e9
    T, layers, m = c.seq_len, c.layers, 2
    P = sum(units_of(c, Mesh(), ParallelPlan(), 0).values())
    pass_of = T * c.width * b / 2
    cases = {  # mesh, plan: bytes per rank
        "tp": (m * layers * 10 * pass_of, {"tp": 2, "overlap": "none"}),
        "tp product again": (m * layers * 10 * pass_of,
                             {"tp": 2, "overlap": "none", "recompute": "selective"}),
        "tp blocks again": (m * layers * 14 * pass_of,
                            {"tp": 2, "overlap": "none", "recompute": "full"}),
        "cp": (m * layers * (T // 2) * 2 * 4 * c.head_dim * (b + b + 4), {"cp": 2}),
        "dp": (P * (2 * 4) * 3 / 4, {"dp": 4}),
        "dp zero 1": (P * (4 + b) * 3 / 4, {"dp": 4, "zero": 1}),
        "dp zero 3": (P * m * (4 + 2 * b) * 3 / 4, {"dp": 4, "zero": 3}),
        "pp": (2 * m * T * c.width * b, {"pp": 2}),
    }  # fmt: skip
    for name, (moved, given) in cases.items():
        found = {axis: rest for axis, *rest in step_traffic(_job(c, microbatches=m, **given))}
        assert found[name[:2]] == ["NVLink", pytest.approx(moved)], name
        fast, slow = (
            step_time(_job(c, _ideal(half=1e30, nvlink=each), microbatches=m, **given))
            for each in (math.inf, speed)
        )
        extra = slow - fast
        if name[:2] == "tp":  # plus the embedding's and the head's
            moved += m * 4 * pass_of
        if name == "cp":  # plus the sum of gradients, except what the last backward hides
            moved += P * (2 * 4) / 2 - layers * (T // 2) * 2 * 4 * c.head_dim * (b + 4)
        if name == "pp":  # there and back: the second micro-batch's overlap the first's
            moved = 2 * T * c.width * b
        assert extra == pytest.approx(moved / speed, rel=0.02), name


def test_a_rank_sends_what_all_of_its_stages_send() -> None:
    """However many stages its layers are split into, their bytes stay the same."""

    def sent(**given: Any) -> dict[str, float]:
        job = _job(microbatches=4, tp=2, cp=2, **given)
        return {axis: moved for axis, _, moved in step_traffic(job) if axis in ("tp", "cp")}

    alone = sent()
    assert len(alone) == 2
    assert {axis: 2 * n for axis, n in sent(pp=2).items()} == pytest.approx(alone)
    for pp, chunks in ((2, 2), (2, 4), (4, 2)):
        found = sent(pp=pp, schedule="interleaved", chunks=chunks)
        assert {axis: pp * n for axis, n in found.items()} == pytest.approx(alone), (pp, chunks)


def test_a_message_that_is_scattered_is_gathered_beside_it() -> None:
    """arXiv:2104.04473, 4.1: each of tp ranks sends a part, and NVLink carries the rest."""
    given: dict[str, Any] = {"tp": 4, "pp": 2, "dp": 2, "overlap": "none"}
    whole = SMALL.seq_len * SMALL.width * 2
    for sequence_parallel in (False, True):
        cut, sent = (
            message(_job(SMALL, A100, sequence_parallel=sequence_parallel, scattered=each, **given))
            for each in (True, False)
        )
        part = whole / 4
        assert cut[0] == part
        assert sent[0] == (part if sequence_parallel else whole)
        latency, far = A100.efficiency.latency, A100.device.network * A100.efficiency.far
        near = 2 * latency + part * 3 / (A100.device.nvlink * A100.efficiency.near)
        seconds = latency + part / far
        assert cut[1] == pytest.approx(seconds if sequence_parallel else seconds + near)


@pytest.mark.parametrize(("dp", "shards", "hops"), [(4, None, (3, 0)), (32, None, (28, 3)),
                                                    (32, 8, (7, 0))])  # fmt: skip
def test_owners_of_whole_tensors_broadcast_one_after_another(dp: int, shards, hops) -> None:
    """Each fills a ring of the shards, with no computation to overlap."""
    gathered, owned, few = (
        predict(_job(SMALL, A100, dp=dp, dp_shard=shards, zero=1, owned=count)).update
        for count in (0, 10**6, 3)
    )
    near, far = hops
    each = near * 3.4e-6 + far * 14e-6
    ranks = dp if shards is None else shards
    assert owned - few == pytest.approx((ranks - 3) * each)
    P = sum(units_of(SMALL, Mesh(), ParallelPlan(), 0).values())
    moved, speed = P * 2 * (ranks - 1) / ranks, A100.bandwidth(1, ranks)
    gather = math.ceil(math.log2(ranks)) * A100.efficiency.latency + moved / speed
    hidden = few - 3 * each - gathered
    assert 0 < hidden <= gather * (1 + 1e-9)


def test_a_group_over_nodes_shares_its_adapters() -> None:
    near = A100.device.nvlink * A100.efficiency.near
    far = A100.device.network * A100.efficiency.far
    assert A100.bandwidth(1, 8) == A100.bandwidth(4, 2) == pytest.approx(near)
    assert A100.bandwidth(8, 2) == pytest.approx(far)
    assert A100.bandwidth(2, 8) == pytest.approx(4 * far)
    assert A100.bandwidth(1, 16) == pytest.approx(min(near, 8 * far))


# arXiv:2104.04473, table 1: heads, width, layers, tp, pp, GPUs, sequences, micro-batch (from the
# authors' script), TFLOP/s of each GPU.
NARAYANAN = [
    (24, 2304, 24, 1, 1, 32, 512, 16, 137), (32, 3072, 30, 2, 1, 64, 512, 16, 138),
    (32, 4096, 36, 4, 1, 128, 512, 16, 142), (48, 6144, 40, 8, 1, 256, 1024, 8, 135),
    (64, 8192, 48, 8, 2, 512, 1536, 4, 138), (80, 10240, 60, 8, 4, 1024, 1792, 2, 140),
    (96, 12288, 80, 8, 8, 1536, 2304, 2, 148), (128, 16384, 96, 8, 16, 1920, 2160, 1, 155),
]  # fmt: skip


@pytest.mark.parametrize("row", NARAYANAN)
def test_megatrons_table_is_predicted(row: tuple[int, ...]) -> None:
    """Within 12 %, counting FLOPs by its formula, with efficiencies fitted to many sources."""
    heads, h, layers, tp, pp, n, sequences, batch, tflops = row
    s, V, dp = 2048, 51200, n // tp // pp
    flops = 96 * sequences * s * layers * h**2 * (1 + s / (6 * h) + V / (16 * layers * h))
    job = _job(
        GPTConfig(V, s, layers, h, heads), tp=tp, pp=pp, dp=dp, batch=batch,
        microbatches=sequences // dp // batch, recompute="full", sequence_parallel=False,
        overlap="none", scores=True, scattered=True,
    )  # fmt: skip
    assert step_time(job) == pytest.approx(flops / n / (tflops * 1e12), rel=0.12)


# arXiv:2205.05198, table 5: heads, width, layers, pp, chunks, sequences, micro-batch, seconds with
# full recompute, and with selective and sequence parallelism.
KORTHIKANTI = [
    (64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10), (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83), (160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
]  # fmt: skip


@pytest.mark.parametrize("row", KORTHIKANTI[:2])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_korthikantis_table_is_predicted(row: tuple, recompute: str) -> None:
    """The error is within 10 %."""
    heads, h, layers, pp, chunks, sequences, batch, full, selective = row
    job = _job(
        GPTConfig(51200, 2048, layers, h, heads), tp=8, pp=pp, chunks=chunks, batch=batch,
        schedule="interleaved" if chunks > 1 else "1f1b", microbatches=sequences // batch,
        recompute=recompute, sequence_parallel=recompute == "selective", scores=True,
        scattered=True,
    )  # fmt: skip
    published = full if recompute == "full" else selective
    assert step_time(job) == pytest.approx(published, rel=0.1)


MESHES = [{}, {"tp": 8}, {"tp": 2, "cp": 2}, {"pp": 4}, {"pp": 2, "chunks": 4},
          {"dp": 8, "zero": 3}, {"tp": 8, "pp": 2, "dp": 4, "zero": 1},
          {"dp": 16, "zero": 2, "pp": 2}]  # fmt: skip


@pytest.mark.parametrize("given", MESHES)
def test_faster_hardware_is_never_slower(given: dict) -> None:
    """More work is never faster, and `least_time` is below the simulated time."""
    config = PRESETS["llama-8b"]
    given = given | {"schedule": "interleaved" if "chunks" in given else "1f1b", "microbatches": 6}
    job = _job(config, H100, **given)
    now = step_time(job)
    assert 0.5 * now < least_time(job) <= now * (1 + 1e-12)
    for figure in ("half", "memory", "nvlink", "network"):
        device = dataclasses.replace(H100.device, **{figure: 2 * getattr(H100.device, figure)})
        faster = dataclasses.replace(H100, device=device)
        assert step_time(dataclasses.replace(job, hardware=faster)) <= now
    for name, value in (("recompute", "full"), ("recompute", "selective"), ("microbatches", 7)):
        plan = dataclasses.replace(job.plan, **{name: value})
        assert step_time(dataclasses.replace(job, plan=plan)) > now
    parts = block_parts(job)
    assert all(p.weights <= p.backward and min(p) >= 0 for p in parts.values())


# ---------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("tpu", None, "hw must be one of a100-40g, .* got 'tpu'"),
        ("no.toml", None, "cannot be read: No such file"),
        ("x.toml", "half = ", "x.toml is not TOML"),
        ("x.json", '{"half": 1e15, "memory": 3e12}',
         "no base; set base to one of a100-40g, .*, or set nvlink, network, capacity"),
        ("x.json", '{"base": "h100", "halves": 1}', "unknown field halves; expected base, half"),
        ("x.json", '{"base": "mi300"}', "base must be one of a100-40g, .* got 'mi300'"),
        ("x.json", '{"base": ["h100"]}', r"base must be one of a100-40g, .* got \['h100'\]"),
        ("x.json", '{"base": "h100", "node": 2.5}', "node must be a whole number of GPUs, got 2.5"),
        ("x.json", "[1]", "x.json must be an object, got \\[1\\]"),
    ],
)  # fmt: skip
def test_hardware_that_cannot_be(tmp_path, name: str, text: str | None, says: str) -> None:
    given = name if "." not in name else str(tmp_path / name)
    if text is not None:
        (tmp_path / name).write_text(text)
    check(lambda: find_hardware(given), says)


# ---------------------------------------------------------------- the search

NARROW = dataclasses.replace(SMALL, seq_len=2048, vocab_size=5000, layers=5)


def _every(search: Search) -> list[Job]:
    """List every layout of a search, by loops that share no code with it."""
    found = []
    sizes = [n for n in range(1, search.gpus + 1) if search.gpus % n == 0]
    for dp, cp, tp, pp in itertools.product(sizes, repeat=4):
        if dp * cp * tp * pp != search.gpus or search.config.seq_len // cp < 1024:
            continue
        for batch, recompute, name, chunks, zero in itertools.product(
            (1, 2, 4, 8), ("none", "selective", "full"), FAMILIES, (1, 2, 4, 5), range(4)
        ):
            m, rest = divmod(search.sequences, dp * batch)
            looped = FAMILIES[name].chunks is None
            if rest or FAMILIES[name].asynchronous or (looped and chunks == 1):
                continue
            if (pp == 1 and name != "1f1b") or (dp * cp == 1 and zero != 1):
                continue
            plan = {"schedule": name, "chunks": chunks, "microbatches": m, "zero": zero}
            job = _job(search.config, search.hardware, dp=dp, cp=cp, tp=tp, pp=pp, batch=batch,
                       recompute=recompute, **plan)  # fmt: skip
            try:
                job.plan.make_schedule(pp)
                job.config.check(job.mesh, job.plan)
            except ValueError:
                continue
            found.append(job)
    return found


@pytest.mark.parametrize(("gpus", "gib"), [(4, 80), (4, 1.4), (8, 1.75)])
def test_the_search_finds_what_brute_force_finds(gpus: int, gib: float) -> None:
    """All layouts are predicted one by one; little memory excludes most of the fast ones."""
    hardware = dataclasses.replace(A100, capacity=gib * 2**30)
    search = Search(NARROW, gpus, hardware, sequences=8)
    every = _every(search)
    fit = [job for job in every if max(r.total for r in estimate(job)) <= hardware.capacity]
    assert len(fit) > 20
    assert (len(fit) < len(every)) == (gib < 80)
    times = sorted(step_time(job) for job in fit)
    found = choose_layouts(search, keep=4, families=False)
    assert [c.time.seconds for c in found.best] == pytest.approx(times[:4], rel=1e-12)
    for chosen in found.best:
        assert dataclasses.replace(chosen.job, hardware=hardware) in fit
        assert chosen.job.mesh.world == gpus
        assert chosen.job.sequences == search.sequences
    assert found.simulated < len(every) / 10
    # An invalid lower bound would give a different order.
    many = choose_layouts(search, keep=200, families=False)
    assert [c.time.seconds for c in many.best] == pytest.approx(times[:200], rel=1e-12)
    fastest: dict[frozenset[str], float] = {}  # for each set of axes
    for time, job in sorted(((step_time(job), job) for job in fit), key=lambda row: row[0]):
        fastest.setdefault(_axes(job), time)
    found = choose_layouts(search, keep=9)
    shown = {_axes(chosen.job): chosen.time.seconds for chosen in found.best}
    assert len(shown) == len(found.best) >= 3
    for axes, time in fastest.items():  # ignore sets with one more axis that gains nothing
        no_gain = any(axes > other and at <= time * (1 + 1e-9) for other, at in shown.items())
        assert shown.get(axes) == pytest.approx(time, rel=1e-9) or (no_gain and axes not in shown)
    for chosen in found.best:  # of equals, the one with the fewest ranks on those axes
        time, mesh = chosen.time.seconds, chosen.job.mesh
        equal = [job.mesh for job in fit if _axes(job) == _axes(chosen.job)
                 and step_time(job) == pytest.approx(time, rel=1e-11)]  # fmt: skip
        assert mesh.dp == max(other.dp for other in equal)


def _axes(job: Job) -> frozenset[str]:
    return frozenset(axis for axis in ("tp", "pp", "cp") if getattr(job.mesh, axis) > 1)


@pytest.mark.parametrize(
    ("layers", "pp"), [(12, 2), (8, 2), (7, 2), (13, 2), (7, 3), (4, 4), (40, 2)]
)
def test_chunks_are_powers_of_two_and_what_divides_a_ranks_layers(layers: int, pp: int) -> None:
    """Up to 16, including all of a rank's layers."""
    config = dataclasses.replace(NARROW, layers=layers)
    job = _job(config, A100, pp=pp, microbatches=4 * pp)
    plans = [each.plan for each in layouts_of(job, Counter())]
    tried = {plan.chunks for plan in plans if plan.schedule == "interleaved"}
    every = range(2, min(layers // pp, 16) + 1)
    assert tried == {n for n in every if n in (2, 4, 8, 16) or layers / pp / n % 1 == 0}


def test_a_large_search_simulates_few() -> None:
    """Of thousands of layouts of 64 GPUs, it simulates less than one in a hundred."""
    found = choose_layouts(Search(PRESETS["llama-8b"], 64, H100, 256), keep=1)
    assert found.bounded > 1000
    assert found.simulated < found.bounded / 100
    assert found.refused["does not fit into memory"] > 100
    assert found.miss is not None
    assert found.miss[1] > H100.capacity


def test_a_refusal_names_what_the_smallest_of_all_layouts_needs() -> None:
    """The number is exact if it almost fits, and a bound if each layout's bound is too much."""
    search = Search(dataclasses.replace(NARROW, vocab_size=500_000), 4, H100, sequences=8)
    least = min(max(rank.total for rank in estimate(job)) for job in _every(search))
    for capacity, exact in ((0.1 * least, False), (0.5 * least, False), (least - 1, True)):
        hardware = dataclasses.replace(H100, capacity=capacity)
        with pytest.raises(ValueError, match="fits: the smallest needs") as caught:
            choose_layouts(dataclasses.replace(search, hardware=hardware))
        ((bound, said),) = re.findall(r"needs (more than )?(\S+) GiB", str(caught.value))
        assert (not bound) == exact
        gib = float(said) * 2**30
        assert gib == pytest.approx(least, abs=0.05 * 2**30) if exact else capacity < gib < least


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"config": PRESETS["llama3-405b"], "gpus": 8},
         r"of 8 GPUs fits: the smallest needs more than \d+\.\d GiB per GPU, but h100 has 74.5"),
        ({"gpus": 7}, "no layout of 7 GPUs is possible: 4 sequences are not divisible by dp"),
        ({"gpus": 0}, "gpus and sequences must be at least 1, got 0 and 4"),
        ({"sequences": 0}, "gpus and sequences must be at least 1, got 8 and 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned(given: dict, says: str) -> None:
    like = {"config": NARROW, "gpus": 8, "hardware": H100, "sequences": 4}
    check(lambda: choose_layouts(Search(**like | given)), says)


# ---------------------------------------------------------------- the command


def test_tensor_ranks_do_not_cross_nodes() -> None:
    """Groups of three are 0 1 2, 3 4 5, 6 7 | 8 if a node has eight; six GPUs are in one."""
    config = dataclasses.replace(SMALL, seq_len=3072, heads=6, kv_heads=6, width=96, hidden=192)

    def degrees(gpus: int) -> set[int]:
        return {job.mesh.tp for job in branches(Search(config, gpus, H100, 24), Counter())}

    assert degrees(6) == {1, 2, 3, 6}
    assert degrees(24) == {1, 2}
    assert H100.bandwidth(2, 4) == H100.bandwidth(1, 8) == H100.bandwidth(1, 2)
    assert H100.bandwidth(1, 3) < H100.bandwidth(1, 2)


def _planned(tmp_path, *words: str) -> tuple[dict[str, Any], str]:
    """Return the record of ``warpweave plan`` on few GPUs, and its output."""
    config = parse([*words, "--out", str(tmp_path / "plan.toml")])
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(config)
    return json.loads(printed.getvalue().splitlines()[-1]), printed.getvalue()


def test_the_page_has_the_numbers_of_its_json(tmp_path) -> None:
    """The last line is the JSON; the HTML page is written; --explain adds up."""
    words = ("--model", "gpt2-xl", "--gpus", "8", "--hw", "a100-80g", "--sequences", "64")
    html = tmp_path / "plan.html"
    told, printed = _planned(tmp_path, *words, "--explain", "--best", "3", "--html", str(html),
                            "--timeline", str(tmp_path / "t.json"))  # fmt: skip
    assert read_layout(tmp_path / "plan.toml") == told["layouts"][0]["options"]
    assert html.read_text().startswith("<!doctype html>")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    span = max(e["ts"] + e["dur"] for e in events if e["ph"] == "X") / 1e6
    assert 0.5 * told["layouts"][0]["seconds"] < span <= told["layouts"][0]["seconds"]
    axes = [{a for a in ("dp", "tp", "pp") if row["options"][a] > 1} for row in told["layouts"]]
    assert axes == [{"dp"}, {"dp", "pp"}]  # 25 heads allow no tensor ranks among 8
    seconds = [row["seconds"] for row in told["layouts"]]
    assert seconds == sorted(seconds)
    for row in told["layouts"]:
        o = row["options"]
        assert o["dp"] * o["cp"] * o["tp"] * o["pp"] == 8
        assert o["dp"] * o["batch"] * o["microbatches"] == 64
        assert f"{row['seconds']:8.3f} {row['mfu']:6.1%}" in printed
        flops = PRESETS["gpt2-xl"].step_flops(64 * 1024)
        assert row["mfu"] == pytest.approx(flops / row["seconds"] / 8 / 312e12)
        assert max(rank["total"] for rank in row["memory"]) <= 80e9
    assert f"MFU: {PRESETS['gpt2-xl'].step_flops(64 * 1024):.4g} model FLOPs" in printed
    for name, most in max(told["layouts"][0]["memory"], key=lambda rank: rank["total"]).items():
        if name != "total":
            assert f"  {name:12} {most / 2**30:8.2f} GiB" in printed


def test_seven_gpus_are_no_seven_context_ranks_and_a_line_says_what_to_do(tmp_path) -> None:
    """This holds unless the sequence has as many equal chunks."""
    told, printed = _planned(tmp_path, "--model", "llama-8b", "--gpus", "7", "--hw", "h200")
    assert [row["options"]["pp"] for row in told["layouts"]] == [7]
    reason = "seq_len = 8192 is not divisible by the 14 chunks of cp = 7"
    assert told["refused"][reason] == 1
    assert reason in printed
    words = "512 sequences are not divisible by 7 data ranks; --sequences 511 allows dp = 7"
    assert words in printed
    words = ("--gpus", "7", "--hw", "h200", "--seq-len", "7168", "--sequences", "511")
    told, printed = _planned(tmp_path, "--model", "llama-8b", *words)
    shapes = [(row["options"]["dp"], row["options"]["cp"]) for row in told["layouts"]]
    assert {(7, 1), (1, 7)} <= {*shapes}
    assert "allows dp" not in printed


def test_train_and_prove_read_a_plan(tmp_path, capsys) -> None:
    told, _ = _planned(tmp_path, "--model", "llama-8b", "--gpus", "32", "--hw", "a100-40g",
                       "--sequences", "64", "--best", "1")  # fmt: skip
    options, path = told["layouts"][0]["options"], str(tmp_path / "plan.toml")
    train = train_config.parse(["--config", path, "--steps", "3"])
    found = config_file.options_of(train)
    assert {name: found[name] for name in options} == options
    assert (train.steps, train.plan.layout, train.config) == (3, "zigzag", None)
    assert train_config.parse(["--config", path, "--dp", "64"]).dp == 64
    proof = prove_options.parse([f"--config={path}"]).given()
    axes = ("dp", "cp", "tp", "pp")
    assert [getattr(proof.mesh, axis) for axis in axes] == [options[axis] for axis in axes]
    assert (proof.zero, proof.schedule) == (options["zero"], options["schedule"])
    assert prove_options.parse(["--config", path, "--typecheck"]).typechecked().mesh == proof.mesh
    for parse_of, words, says in (
        (prove_options.parse, ["--config", path, "--dp", "4096"],
         "ranks, more than the limit of 64 processes; pass --typecheck"),
        (prove_options.parse, ["--config", "missing.toml"], "missing.toml cannot be read"),
        (train_config.parse, ["--config", "missing.toml"], "missing.toml cannot be read"),
        (train_config.parse, ["--layout", "plan.json"], "layout must be one of"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stopped:
            parse_of(words)
        assert stopped.value.code == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ('dp = "2"', "dp must be an integer, got '2'"),
        ("dp = 0", "mesh axis dp must be a positive integer, got 0"),
        ("zero = 7", "zero must be one of 0, 1, 2, 3, got 7"),
        ('schedule = ["1f1b"]', "or a string in quotes, got ['1f1b']"),
        ("microbatches = 0", "microbatches must be at least 1, got 0"),
        ("chunks = 2", "schedule 1f1b requires chunks = 1 stages per rank, got 2"),
        ("batch = true", "batch must be an integer, got True"),
        ("batch = 0", "batch must be at least 1, got 0"),
        ("seed = 1", "unknown option 'seed'"),
        ("{", "is not TOML"),
        ('schedule = "dualpipe-v"\nchunks = 2\npp = 3\nmicrobatches = 4',
         "at least 6 with schedule dualpipe-v on 3 ranks, got 4"),
    ],
)  # fmt: skip
def test_a_layout_with_a_wrong_value_is_one_line(wrong: str, says: str, tmp_path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(wrong)
    with pytest.raises(ValueError, match=rf"plan\.toml.* {re.escape(says)}") as error:
        read_layout(path)
    one_line(error)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--model", "gpt5"], "model must be one of toy, .*, or a config.json, got 'gpt5'"),
        (["--model", "no.json"], "no.json: . is not a transformers model: it has no no.json"),
        (["--hw", "tpu"], "hw must be one of a100-40g"),
        (["--model", "llama3-405b"], "no layout of 8 GPUs fits: the smallest needs"),
        (["--best", "0"], "best must be at least 1, got 0"),
        (["--out", "no/p.toml"], "no/p.toml cannot be written; name a file in an existing"),
        (["--html", "."], r"\. cannot be written; name a file in an existing folder"),
    ],
)
def test_what_the_command_refuses(words: list[str], says: str, capsys) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(parse(words))
    assert stopped.value.code == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_hugging_face_config_is_planned(tmp_path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
              "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
              "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = parse(["--model", str(tmp_path), "--seq-len", "4096"]).config
    assert given == canonical(dataclasses.replace(PRESETS["llama-1b"], seq_len=4096))


def test_planning_imports_no_torch() -> None:
    """Importing torch takes seconds."""
    code = (
        "import sys; from warpweave.__main__ import main\n"
        "sys.argv[1:] = 'plan --model gpt2 --gpus 2 --sequences 4 --best 1'.split(); main()\n"
        "import warpweave.convert.families; assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)


def test_parameters_of_named_models() -> None:
    """They match their names, in billions."""
    for name, billions in (("gpt2-xl", 1.56), ("llama-8b", 8.03), ("llama-70b", 70.55)):
        units = units_of(PRESETS[name], Mesh(), ParallelPlan(), 0)
        assert sum(units.values()) / 1e9 == pytest.approx(billions, rel=0.005)
