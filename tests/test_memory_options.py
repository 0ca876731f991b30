"""The estimate of memory by option: optimizers, ordered sums, uneven sizes, long pipelines, groups
on GPUs; its lower bound; and the flags that an error suggests."""

from __future__ import annotations

import dataclasses
import itertools
import re
from dataclasses import replace

import pytest
from test_memory import GIB, _check

from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.schedule import FAMILIES, find_family, placement, to_csv
from warpweave.parallel.schedule.actions import I, W
from warpweave.plan.fits import check_memory
from warpweave.plan.memory import (
    MemoryEstimate,
    TrainingStep,
    estimate,
    least_memory,
    live_blocks,
    pipeline_shape,
    units_of,
)

MODEL = GPTConfig(96, 64, 5, 32, 4, kv_heads=2, hidden=96, positions="rope", activation="swiglu")
MESHES = [Mesh(), Mesh(tp=2), Mesh(dp=4), Mesh(dp=4, dp_shard=2), Mesh(dp=2, cp=2, tp=2, pp=2)]
SHARDED = [(mesh, zero) for mesh in MESHES for zero in (range(4) if mesh.data > 1 else (0, 1))]


def _step(mesh: Mesh, dtype: str = "fp32", batch: int = 2, **given) -> TrainingStep:
    """Return a step of `MODEL`; `given` are fields of the step and of its plan."""
    names = {field.name for field in dataclasses.fields(ParallelPlan)}
    plan = ParallelPlan(**{n: given.pop(n) for n in [*given] if n in names})
    return TrainingStep(given.pop("config", MODEL), mesh, plan, batch, dtype, **given)


def _shards(mesh: Mesh) -> int:
    return (mesh.dp_shard or mesh.dp) * mesh.cp


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
def test_every_optimizer_holds_its_states_and_muon_its_messages(dtype: str) -> None:
    """Compared with the states of AdamW, which in turn are compared with a model's."""
    b = {"fp64": 8, "fp32": 4, "bf16": 2}[dtype]
    m = max(b, 4)
    for mesh, zero in SHARDED:
        D = _shards(mesh) if zero else 1
        found = {
            name: estimate(_step(mesh, dtype, zero=zero, optimizer=name))
            for name in ("adamw", "nadamw", "sgd", "muon")
        }
        for rank, of in enumerate(zip(*found.values(), strict=True)):
            units = units_of(MODEL, mesh, ParallelPlan(), rank)
            P = sum(units.values())
            blocks = sum(name.isdigit() for name in units)
            assert blocks == (5 if mesh.pp == 1 else (2, 3)[rank])
            W_, largest = blocks * 32 * (32 + 2 * 16 + 32 + 3 * 96) // mesh.tp, 32 * 96
            wanted = {"adamw": 2 * P, "nadamw": 2 * P, "sgd": P, "muon": 2 * P - W_}
            for (name, elements), told in zip(wanted.items(), of):
                assert told.optimizer == pytest.approx((elements + (b != m) * P) * m / D), name
                update = 4 * (W_ / D + largest) * m if name == "muon" else 0
                assert told.update == pytest.approx(update)
                rest = replace(told, optimizer=0, update=0)
                assert rest == replace(of[0], optimizer=0, update=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("fragments", [1, 3, 5])
def test_an_outer_optimizer_holds_its_states_and_the_largest_sum(
    fragments: int, momentum: float
) -> None:
    """Layers sync in turns, the embedding with the first of them, head and norm with the last."""
    outer = OuterRule(15, momentum=momentum, fragments=fragments)
    for config in (MODEL, replace(MODEL, vocab_size=7, tied=False)):
        for mesh, zero in SHARDED:
            D = _shards(mesh) if zero else 1
            of = {"config": config, "zero": zero}
            with_it, without = (estimate(_step(mesh, outer=rule, **of)) for rule in (outer, None))
            for rank, (more, less) in enumerate(zip(with_it, without, strict=True)):
                sums = [0] * fragments
                for name, size in units_of(config, mesh, ParallelPlan(), rank).items():
                    layer = {"embedding": 0, "final_norm": 4, "head": 4}.get(name, name)
                    sums[int(layer) % fragments] += size
                held = (2 if momentum else 1) * sum(sums) + max(sums)
                grown = more.optimizer - less.optimizer  # each rounded down
                assert grown == pytest.approx(held * 4 / D, abs=2)
                assert replace(more, optimizer=0) == replace(less, optimizer=0)


def test_older_versions_are_whole_copies_in_the_parameters_own_dtype() -> None:
    """PipeDream keeps as many as there are ranks after this one; 2BW keeps one."""
    for dtype, b in (("fp64", 8), ("fp32", 4), ("bf16", 2)):
        for schedule, older in (("pipedream", (2, 1, 0)), ("pipedream-2bw", (1, 1, 1))):
            found, without = (
                estimate(_step(Mesh(dp=2, pp=3), dtype, microbatches=6, schedule=name))
                for name in (schedule, "1f1b")
            )
            for rank, ages in enumerate(older):
                P = sum(units_of(MODEL, Mesh(pp=3), ParallelPlan(), rank).values())
                assert found[rank].weights - without[rank].weights == ages * P * b


def test_an_ordered_sum_holds_its_blocks_in_flight() -> None:
    for (mesh, zero), dtype in itertools.product(SHARDED, ("fp64", "bf16")):
        if mesh.dp_shard is not None or mesh.pp > 1:
            continue
        m, D = {"fp64": 8, "bf16": 4}[dtype], _shards(mesh)
        (told,) = estimate(_step(mesh, dtype, zero=zero, reduce="ordered"))
        (plain,) = estimate(_step(mesh, dtype, zero=zero))
        units = units_of(MODEL, mesh, ParallelPlan(), 0).values()
        P, U = sum(units), max(units)
        whole = P * m if D > 1 and not zero else 0
        assert told.gradients == pytest.approx(P * m / D + whole + (4 if D > 1 else 2) * U * m)
        assert replace(told, gradients=plain.gradients) == plain


def test_the_peak_counts_the_largest_of_activations_loading_and_update() -> None:
    for activations, loading, update in itertools.permutations((10, 200, 3000)):
        held = MemoryEstimate(1, 20, 300, activations, loading, 50_000, update)
        assert held.total == 321 + 3000 + 50_000


def test_sizes_that_do_not_divide_are_rounded_up() -> None:
    """A vocabulary over tensor ranks, a sequence over context ranks in one chunk or two."""

    def sizes(vocab: int, device: str) -> tuple[int, int]:
        config = replace(MODEL, kv_heads=4, vocab_size=vocab)
        (told,) = estimate(_step(Mesh(tp=4), config=config, device_type=device))
        return told.weights, told.activations

    for device in ("cpu", "cuda"):
        less, *same, more = (sizes(vocab, device) for vocab in (4000, 4001, 4003, 4004, 4005))
        assert len({*same}) == 1
        for kind in range(2):
            assert less[kind] < same[0][kind] < more[kind]
    for length, layout, rows in (
        (10, "contiguous", 3), (10, "striped", 3), (10, "zigzag", 4), (64, "zigzag", 16),
        (64, "contiguous", 16), (65, "zigzag", 18), (65, "contiguous", 17),
    ):  # fmt: skip
        config = replace(MODEL, seq_len=length)
        assert _step(Mesh(cp=4), config=config, layout=layout, batch=3).tokens == 3 * rows


@pytest.mark.parametrize("name", FAMILIES)
def test_pipeline_shape_equals_that_of_its_lists_for_any_micro_batches(name: str) -> None:
    """A large number of micro-batches is replaced by a smaller one with
    the same stages and errors."""
    chunks = FAMILIES[name].chunks or 2
    for ranks, m in itertools.product((2, 3, 4), range(1, 27)):
        plan = ParallelPlan(schedule=name, chunks=chunks, microbatches=m)
        try:
            lists = find_family(name).make(ranks, m, chunks)
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                pipeline_shape(plan, ranks)
            continue
        split = any(action.op in (I, W) for actions in lists for action in actions)
        assert pipeline_shape(plan, ranks) == (tuple(placement(lists)), split), (ranks, m)


def test_the_bound_of_memory_is_below_every_estimate() -> None:
    """This covers every optimizer. The bound is close if there is only one micro-batch."""
    config = replace(MODEL, layers=8)
    for mesh, zero, optimizer, dtype, recompute, device in itertools.product(
        MESHES, range(4), ("adamw", "sgd", "muon"), ("fp32", "bf16"), ("none", "full"),
        ("cpu", "cuda"),
    ):  # fmt: skip
        step = _step(
            mesh, dtype, zero=zero, optimizer=optimizer, recompute=recompute, device_type=device,
            config=config, microbatches=1,
        )  # fmt: skip
        most = max(rank.total for rank in estimate(step))
        least = least_memory(step)
        assert 0 < least <= most, step
        if optimizer == "adamw" and zero < 2 and mesh.data == 1:
            assert least > 0.8 * most


def test_the_bound_of_memory_is_what_a_rank_between_the_ends_needs() -> None:
    """It is the estimate of such a rank, minus the buffers of a unit in which ZeRO works."""
    config, mesh = replace(MODEL, layers=8), Mesh(dp=2, cp=2, tp=2, pp=4)
    for zero, optimizer, dtype, recompute, device in itertools.product(
        range(4), ("adamw", "sgd"), ("fp64", "fp32", "bf16"), ("none", "selective", "full"),
        ("cpu", "cuda"),
    ):  # fmt: skip
        step = _step(
            mesh, dtype, zero=zero, optimizer=optimizer, recompute=recompute, device_type=device,
            config=config, microbatches=1, batch=8,
        )  # fmt: skip
        middle = estimate(step)[1]
        units = units_of(config, mesh, step.plan, 1).values()
        P, U, b = sum(units), max(units), {"fp64": 8, "fp32": 4, "bf16": 2}[dtype]
        m = max(b, 4)
        beside = {0: 0, 1: P * m // 4, 2: 2 * U * m, 3: 2 * U * (b + m)}[zero]
        held = middle.weights + middle.gradients + middle.optimizer + middle.activations
        assert least_memory(step) == held + middle.gpu - beside, step


def test_communicators_on_a_gpu_are_the_groups_of_ranks_that_a_mesh_makes() -> None:
    """The world, one for each other set of ranks along an axis, and four between stages."""
    meshes = [
        *MESHES, Mesh(dp=2, cp=4, ulysses=2), Mesh(outer=2), Mesh(dp=2, outer=2),
        Mesh(dp=4, dp_shard=2, tp=2, outer=3), Mesh(dp=2, cp=2, tp=2, pp=2, outer=2),
    ]  # fmt: skip
    for mesh in meshes:
        (told, *_) = estimate(_step(mesh, device_type="cuda", optimizer="sgd"))
        axes = {*mesh.seen_from(0).groups} - {"world"}
        sets = {
            frozenset(group)
            for axis in axes - (set() if mesh.outer > 1 else {"inner"})
            for group in mesh.members(axis)
            if 0 in group and len(group) > 1
        }
        count = 0 if mesh.world == 1 else 1 + len(sets) + 4 * (mesh.pp > 1)
        term = 2 * 64 // mesh.cp * 32 * 4 if mesh.tp > 1 else 0
        assert told.gpu == (400 + 64 + 200 * count) * 2**20 + 2 * term, mesh


def test_each_rank_of_a_pipeline_is_counted_by_its_own_list_of_actions() -> None:
    """Covers blocks split unevenly over stages, in schedules of one and
    of several stages per rank."""
    config = replace(MODEL, layers=7)
    for name, chunks, m in (("1f1b", 1, 8), ("gpipe", 1, 5), ("interleaved", 2, 6)):
        plan = ParallelPlan(schedule=name, chunks=chunks, microbatches=m)
        found = live_blocks(plan, 3, config)
        stages = 3 * chunks
        each = [7 * (s + 1) // stages - 7 * s // stages for s in range(stages)]
        for rank, actions in enumerate(find_family(name).make(3, m, chunks)):
            held = most = 0
            for action in actions:
                sign = {"F": 1, "B": -1}.get(str(action.op), 0)
                held += sign * each[action.stage]
                most = max(most, held)
            assert found[rank] == most, (name, rank)


def test_a_schedule_in_a_file_is_read_each_time(tmp_path) -> None:
    """It may have changed since the last time."""
    path, config = tmp_path / "mine.csv", replace(MODEL, layers=8)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("gpipe", 1)):
        lists = find_family(name).make(2, 12, chunks)
        path.write_text(to_csv(lists))
        known, mine = (
            ParallelPlan(schedule=schedule, microbatches=12, chunks=chunks)
            for schedule in (name, str(path))
        )
        assert pipeline_shape(mine, 2) == (tuple(placement(lists)), name == "zb-h1")
        assert live_blocks(mine, 2, config) == live_blocks(known, 2, config)


# ---------------------------------------------------------------- errors


def _refusal(free_gib: float, mesh: Mesh, plan: ParallelPlan = ParallelPlan(), **options) -> str:
    with pytest.raises(ValueError, match="training needs about") as refusal:
        _check(free_gib, mesh, plan, **options)
    return str(refusal.value)


def _ways(text: str) -> dict[str, float]:
    named = text.split("options that reduce memory use: ")[1].split("; combined: ")[0]
    found = re.findall(r"(--[a-z-]+ \w+) \((\d+\.\d) GiB\)", named)
    return {flag: float(size) for flag, size in found}


def test_a_refusal_names_the_flags_that_help_and_what_each_would_need() -> None:
    """Each flag with its number, smallest first; tensor ranks only on GPUs,
    if they divide the heads."""
    gpu = {"device_type": "cuda", "ranks": 1}
    text = _refusal(0.2, Mesh(dp=2, tp=2), **gpu)
    ways = _ways(text)
    assert [*ways.values()] == sorted(ways.values())
    assert {flag for flag in ways if "--tp" in flag} == {"--tp 4"}  # the model has 12 heads
    wider = {flag for flag in _ways(_refusal(0.1, Mesh(tp=3), **gpu)) if "--tp" in flag}
    assert wider == {"--tp 6", "--tp 12"}
    assert "--zero 3" in _ways(_refusal(0.2, Mesh(cp=4), batch=1, **gpu))
    assert "--tp 8" not in _refusal(0.2, Mesh(), **gpu)
    assert not [flag for flag in _ways(_refusal(0.2, Mesh(dp=2, tp=2))) if "--tp" in flag]
    before = float(re.findall(r"needs about (\S+) GiB", text)[0])
    # A flag that saves less than a twentieth is omitted; numbers are rounded to a tenth.
    assert all(size < 0.95 * before + 0.1 for size in ways.values())
    assert "--zero 3" not in _refusal(0.2, Mesh())
    assert "--dp-shard" not in _refusal(0.2, Mesh(dp=4), ParallelPlan(zero=3))
    assert "--batch" not in _refusal(0.2, Mesh(), batch=1)
    assert "--dtype" not in _refusal(0.2, Mesh(), dtype="bf16")
    least = _refusal(0.05, Mesh(), ParallelPlan(recompute="full"), batch=1, dtype="bf16")
    assert least.endswith("choose a smaller --model")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_refusal_names_all_flags_together_where_none_is_enough_alone(device: str) -> None:
    mesh, plan = Mesh(dp=4, dp_shard=2), ParallelPlan(zero=1)
    options = {"device_type": device, "ranks": 1 if device == "cuda" else 4}
    text = _refusal(0.2, mesh, plan, **options)
    more = " --dp-shard 4" if device == "cuda" else ""
    (named,) = re.findall(
        rf"; combined: --batch 1 --recompute full --dtype bf16{more} \((\d+\.\d) GiB\)$", text
    )
    apart = Mesh(dp=4) if device == "cuda" else mesh  # only there --dp-shard 4 is suggested
    best = ParallelPlan(zero=1, recompute="full")  # alone, --zero 3 saves too little
    step = TrainingStep(PRESETS["gpt2"], apart, best, 1, "bf16", device)
    total = estimate(step)[0].total * options["ranks"]
    assert float(named) == pytest.approx(total / GIB, abs=0.051)  # rounded to a tenth
    least = min(_ways(text).values())
    assert "; combined" not in _refusal(least + 0.1, mesh, plan, **options)
    assert "; combined" in _refusal(least - 0.1, mesh, plan, **options)


def test_what_does_not_help_beside_the_others_is_not_added_to_them() -> None:
    """On a CPU, bf16 adds an fp32 copy of the weights, which is more than it
    saves on few activations."""
    config = replace(PRESETS["llama-8b"], seq_len=512)
    three = {"--zero 3", "--recompute full", "--batch 1"}
    for batch, named, plan, words in (
        (4, three | {"--dtype bf16"}, ParallelPlan(), "--zero 3 --recompute full --batch 1"),
        (2, {"--zero 3", "--recompute full"}, ParallelPlan(), "--zero 3 --recompute full"),
        (2, {"--zero 3"}, ParallelPlan(recompute="full"), None),  # nothing to add to it
    ):
        step = TrainingStep(config, Mesh(dp=2), plan, batch, "fp32", "cpu")
        with pytest.raises(ValueError, match="training needs about") as refusal:
            check_memory(step, free=GIB, ranks=2)
        text = str(refusal.value)
        assert {*_ways(text)} == named
        assert (words is None) == ("; combined" not in text)
        if words is not None:
            best = replace(
                step, batch=1 if "--batch" in words else batch,
                plan=ParallelPlan(zero=3, recompute="full"),
            )  # fmt: skip
            total = 2 * estimate(best)[0].total
            assert text.endswith(f"; combined: {words} ({total / GIB:.1f} GiB)")


def test_a_refusal_lists_the_parts_of_the_fullest_rank() -> None:
    """The parts exclude loading, and include the update and the GPU's
    own only if they are not 0."""
    schedules, seen = ("1f1b", "gpipe"), set()
    for name, optimizer, device in itertools.product(schedules, ("adamw", "muon"), ("cpu", "cuda")):
        plan = ParallelPlan(schedule=name, microbatches=4)
        step = TrainingStep(PRESETS["gpt2"], Mesh(pp=4), plan, 8, "fp32", device, optimizer)
        ranks = estimate(step)
        fullest = max(ranks, key=lambda rank: rank.total)
        seen.add((name, ranks.index(fullest)))
        assert fullest.total > 1.1 * min(rank.total for rank in ranks)
        with pytest.raises(ValueError, match="per rank") as refusal:
            check_memory(step, free=GIB // 5, ranks=1, total=7 * GIB)
        text = str(refusal.value)
        named = dict(re.findall(r"(\w+) (\d+\.\d)[,)]", text.split("(per rank: ")[1]))
        kinds = ["weights", "gradients", "optimizer", "activations"]
        kinds += ["gpu"] * (device == "cuda") + ["update"] * (optimizer == "muon")
        assert named == {kind: f"{getattr(fullest, kind) / GIB:.1f}" for kind in kinds}
        where = "this GPU" if device == "cuda" else "this machine"
        assert f"), but {where} has 0.2 of 7.0 GiB free; " in text
    assert seen == {("1f1b", 0), ("gpipe", 3)}
