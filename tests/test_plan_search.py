"""The planner's search: every branch and layout, each reason with its count, the nearest miss; and
the limits of a hardware file's numbers and of a layout's options."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from refused import check

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.schedule import FAMILIES, find_family
from warpweave.plan.choose import Search, branches, choose_layouts, layouts_of
from warpweave.plan.device import HARDWARE, Efficiency, find_hardware
from warpweave.plan.layout import options_of_job, read_layout, write_layout
from warpweave.plan.memory import estimate, least_memory
from warpweave.plan.time import Job, step_time

H100 = find_hardware("h100")
MODEL = GPTConfig(5000, 4096, 6, 192, 12, kv_heads=4)
RECOMPUTE = ("none", "selective", "full")


def _sizes(n: int) -> list[int]:
    return [m for m in range(1, n + 1) if n % m == 0]


@pytest.mark.parametrize(
    ("gpus", "node", "sequences"), [(12, 8, 24), (12, 3, 16), (6, 8, 96), (16, 8, 10), (1, 8, 32)]
)
def test_every_branch_is_looked_at_and_every_reason_is_counted(
    gpus: int, node: int, sequences: int
) -> None:
    wanted, reasons = set(), Counter[str]()
    for tp in (tp for tp in _sizes(gpus) if min(node, gpus) % tp == 0):
        try:
            MODEL.check_tensor(tp)
        except ValueError as error:
            reasons[str(error)] += 1
            continue
        for pp, cp, dp in itertools.product(_sizes(gpus), repeat=3):
            if tp * pp * cp * dp != gpus or pp > 6 or cp > 4:  # of at least 1,024 rows
                continue
            if cp == 3:  # not a power of two, and zigzag's chunks do not fit
                chunks = f"the {2 * cp} chunks of cp = {cp}"
                reasons[f"seq_len = 4096 is not divisible by {chunks}"] += 1
                continue
            if sequences % dp:
                reasons[f"{sequences} sequences are not divisible by dp"] += 1
                continue
            for batch in (1, 2, 4, 8, 16):
                m, rest = divmod(sequences // dp, batch)
                rows = 2 * -(-4096 // (2 * cp)) if cp > 1 else 4096
                if rest:
                    continue
                if batch * rows % tp:
                    reasons[f"{batch * rows} tokens are not divisible by tp = {tp}"] += 1
                    continue
                wanted |= {(Mesh(dp, cp, tp, pp), batch, m, word) for word in RECOMPUTE}
    refused = Counter[str]()
    search = Search(MODEL, gpus, dataclasses.replace(H100, node=node), sequences)
    found = [
        (job.mesh, job.batch, job.plan.microbatches, job.plan.recompute)
        for job in branches(search, refused)
    ]
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert refused == reasons


@pytest.mark.parametrize(
    ("pp", "dp", "m", "layers"),
    [(1, 1, 3, 6), (2, 1, 3, 6), (3, 2, 6, 6), (2, 2, 8, 6), (6, 1, 2, 6), (4, 1, 8, 18),
     (2, 1, 4, 40)],
)  # fmt: skip
def test_every_layout_of_a_branch_is_looked_at(pp: int, dp: int, m: int, layers: int) -> None:
    """Layouts that a schedule does not support are counted."""
    model, plan = dataclasses.replace(MODEL, layers=layers), ParallelPlan(microbatches=m)
    branch = Job(model, Mesh(dp=dp, pp=pp), plan, 2, "bf16", hardware=H100)
    wanted, refusals = set(), Counter[str]()
    for name, family in FAMILIES.items():
        if family.asynchronous or (pp == 1 and name != "1f1b"):
            continue
        most = min(layers // pp, 16)
        looped = [n for n in range(2, most + 1) if n in (2, 4, 8, 16) or layers % (pp * n) == 0]
        fixed = [family.chunks] if family.chunks is not None and family.chunks <= most else []
        for chunks in looped if family.chunks is None else fixed:
            try:
                find_family(name).make(pp, m, chunks)
            except ValueError:
                why = f"schedule {name} does not support this number of micro-batches or chunks"
                refusals[why] += 1
                continue
            wanted |= {(name, chunks, zero) for zero in (range(4) if dp > 1 else (1,))}
    refused = Counter[str]()
    plans = [job.plan for job in layouts_of(branch, refused)]
    found = [(plan.schedule, plan.chunks, plan.zero) for plan in plans]
    assert len(found) == len(set(found))
    assert set(found) == wanted
    assert refused == refusals
    assert len([*layouts_of(branch, refused)]) == len(found)
    assert (pp, m) != (2, 3) or refusals  # too few micro-batches
    assert refused == refusals + refusals  # of a second branch in addition to those of the first


@pytest.mark.parametrize("gib", [0.95, 1.5, 80])
def test_what_was_looked_at_is_counted_and_the_nearest_miss_is_nearest(gib: float) -> None:
    """If as many answers are requested as exist, everything is visited."""
    capacity = gib * 2**30
    hardware = dataclasses.replace(H100, capacity=capacity)
    search = Search(MODEL, 2, hardware, sequences=4)
    reasons, every, far = Counter[str](), [], 0
    for branch in branches(search, reasons):
        zero3 = dataclasses.replace(branch, plan=dataclasses.replace(branch.plan, zero=3))
        if least_memory(zero3) > capacity:
            far += 1
        else:
            every += layouts_of(branch, reasons)
    bounded = [job for job in every if least_memory(job) <= capacity]
    needs = [max(rank.total for rank in estimate(job)) for job in bounded]
    fit = [job for job, needed in zip(bounded, needs) if needed <= capacity]
    found = choose_layouts(search, keep=10**6, families=False)
    assert (found.bounded, found.simulated, len(found.best)) == (len(bounded), len(fit), len(fit))
    assert {chosen.job.plan for chosen in found.best} == {job.plan for job in fit}
    if far:
        reasons["does not fit into memory with any schedule or ZeRO stage"] = far
    if len(fit) < len(every):
        reasons["does not fit into memory"] = len(every) - len(fit)
    assert (far > 0) == (gib < 80)
    assert len(fit) > 2
    assert found.refused == reasons
    misses = [needed for needed in needs if needed > capacity]
    assert (found.miss is None) == (not misses)
    if found.miss is not None:
        job, needed = found.miss
        assert needed == min(misses) == max(rank.total for rank in estimate(job))
    for chosen in found.best[:: max(1, len(fit) // 20)]:
        assert chosen.time.seconds == step_time(chosen.job)
        assert chosen.memory == estimate(chosen.job)


def test_why_nothing_is_possible_is_told_by_the_three_commonest_reasons() -> None:
    model = dataclasses.replace(MODEL, layers=1, seq_len=1024, kv_heads=12)
    hardware = dataclasses.replace(H100, node=30)
    with pytest.raises(ValueError, match="no layout of 30 GPUs is possible") as told:
        choose_layouts(Search(model, 30, hardware, 7))
    text = str(told.value)
    assert ": 7 sequences are not divisible by dp (4), " in text  # tp of 1, 2, 3 and 6
    assert text.count(" (1)") == 2


def test_what_the_smallest_needs_at_least_is_the_least_of_all_bounds() -> None:
    search = Search(MODEL, 4, dataclasses.replace(H100, capacity=1e6, name="a-name"), sequences=16)
    least = min(
        least_memory(dataclasses.replace(job, plan=dataclasses.replace(job.plan, zero=3)))
        for job in branches(search, Counter())
    )
    says = rf"needs more than {least / 2**30:.1f} GiB per GPU, but a-name has 0\.0"
    check(lambda: choose_layouts(search), says)


# ---------------------------------------------------------------- hardware

GIVEN = {"half": 3e14, "memory": 2e12, "nvlink": 3e11, "network": 2e10, "capacity": 6e10}
OWN = {"product": 0.5, "attention": 0.4, "elementwise": 0.3, "near": 0.2, "far": 0.1,
       "latency": 2e-6}  # fmt: skip


@pytest.mark.parametrize("suffix", ["json", "toml"])
@pytest.mark.parametrize("base", [None, "b200"])
def test_every_field_of_a_hardware_file_is_that_of_the_hardware(
    tmp_path: Path, suffix: str, base: str | None
) -> None:
    """A missing field comes from the base, or from an H100 if all numbers are given."""
    path = tmp_path / f"ours.{suffix}"
    like = HARDWARE[base or "h100"]
    every = GIVEN | OWN | {"node": 16}
    needed = () if base else tuple(GIVEN)
    for names in (needed, *((*needed, name) for name in every), tuple(every)):
        given = {name: every[name] for name in names} | ({"base": base} if base else {})
        lines = [f"{name} = {json.dumps(value)}" for name, value in given.items()]
        path.write_text(json.dumps(given) if suffix == "json" else "\n".join(lines))
        found = find_hardware(str(path))
        assert (found.name, found.device.name) == ("ours", "ours")
        for name, value in every.items():
            where = {"node": (found, like), "capacity": (found, like)}.get(
                name, (found.efficiency, like.efficiency) if name in OWN
                else (found.device, like.device),
            )  # fmt: skip
            own, other = (getattr(of, name) for of in where)
            assert own == (value if name in given else other), (name, names)
        assert found.device.arch == like.device.arch


@pytest.mark.parametrize("name", [*GIVEN, *OWN, "node"])
def test_a_figure_of_a_hardware_file_is_positive_and_a_part_at_most_one(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / "ours.json"
    parts = ("product", "attention", "elementwise", "near", "far")
    for value, fits in (
        (1, True), (1.0, True), (1.001 if name != "node" else 2, name not in parts), (0, False),
        (-1, False), (True, False), ("1", False), (float("nan"), False), (float("inf"), False),
        (None, False),
    ):  # fmt: skip
        path.write_text(json.dumps({"base": "h100", name: value}))
        words = None if fits else rf"ours\.json: {name} (must be|is a fraction)"
        check(lambda: find_hardware(str(path)), words)


def test_what_a_row_of_hardware_has_and_what_it_lacks(tmp_path: Path) -> None:
    """Gigabytes by name, as in the data sheets; a missing number is named."""
    sizes = {"a100-40g": 40, "a100-80g": 80, "a40": 48, "l40s": 48, "h100": 80, "h800": 80,
             "h200": 141, "b200": 180}  # fmt: skip
    assert {name: h.capacity / 1e9 for name, h in HARDWARE.items()} == sizes
    assert all(h.name == name and h.node == 8 for name, h in HARDWARE.items())
    chips = {name: h.device.name.split()[0].partition("-")[0] for name, h in HARDWARE.items()}
    assert {name: name.partition("-")[0].upper() for name in HARDWARE} == {
        name: chip.upper() for name, chip in chips.items()
    }
    path = tmp_path / "slow.toml"
    path.write_text('base = "l40s"\n')
    lacks = r"no value for nvlink \(bytes/s over NVLink\); .*base = "
    for name, base in (("a40", "a40"), ("l40s", "l40s"), (str(path), "h100")):
        check(partial(find_hardware, name), f'{lacks}"{base}", and pass that file as hw$')
    path.write_text('base = "l40s"\nnvlink = 1e10\nnetwork = 1e9\n')
    assert find_hardware(str(path)).device.nvlink == 1e10
    names = {field.name for field in dataclasses.fields(Efficiency)}
    assert names == set(OWN)


# ---------------------------------------------------------------- a layout's file


@pytest.mark.parametrize(
    "changes",
    [{}, {"schedule": "dualpipe-v", "chunks": 2, "microbatches": 8}, {"recompute": "full"}],
)
def test_a_written_layout_is_read_again(tmp_path: Path, changes: dict) -> None:
    plan = ParallelPlan(**{"zero": 0, "microbatches": 4, **changes})
    job = Job(MODEL, Mesh(dp=2, pp=2), plan, 3, "bf16", hardware=H100)
    write_layout(tmp_path / "plan.toml", job)
    assert read_layout(tmp_path / "plan.toml") == options_of_job(job)
