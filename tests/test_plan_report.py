"""The planner's output: each number in the text, in --explain, in the JSON and in the HTML is that
of its layout, in its unit and place."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from test_plan import A100
from test_plan import _job as job_of

from warpweave.model.config import GPTConfig
from warpweave.parallel.schedule import one_f_one_b
from warpweave.parallel.simulate import Timeline, simulate
from warpweave.plan import command
from warpweave.plan.choose import Chosen, Found, Search
from warpweave.plan.explain import explained
from warpweave.plan.layout import read_layout
from warpweave.plan.memory import MemoryEstimate, live_blocks, units_of
from warpweave.plan.options import PlanConfig, parse
from warpweave.plan.time import Job, StepTime, block_parts, gradient_sum, stage_work

GIB = 2**30
MODEL = GPTConfig(50304, 8192, 18, 4096, 32, kv_heads=8, hidden=14336, positions="rope",
                  norm="rms", activation="swiglu", bias=False, tied=False)  # fmt: skip


def _job(**given: Any) -> Job:
    """Make a job of `MODEL` on A100s, three sequences per micro-batch, ZeRO 1."""
    return job_of(MODEL, **{"batch": 3, "zero": 1} | given)


def _timeline(ranks: int, m: int) -> Timeline:
    return simulate(one_f_one_b(ranks, m), {"F": 0.25, "B": 0.5})


def _memory(ranks: int, fullest: int) -> list[MemoryEstimate]:
    """Make fake estimates that all differ, the largest on rank `fullest`."""
    found = []
    for rank in range(ranks):
        more = 7 * (rank == fullest) + 0.01 * rank
        sizes = (1.11 + more, 2.22 + more, 3.33, 4.44 + more, 0.55, 0.66, 0.77)
        found.append(MemoryEstimate(*(int(size * GIB) for size in sizes)))
    return found


def _chosen(job: Job, at: int = 1) -> Chosen:
    """Make a fake prediction of a job; its numbers depend on `at`."""
    time = StepTime(
        5.4321 * at, 4.8765 * at, 0.2109 * at, 0.3447 * at, 0.4567 / at,
        _timeline(job.mesh.pp, 2 + 3 * at),
    )  # fmt: skip
    return Chosen(job, time, _memory(job.mesh.pp, (at + job.mesh.pp - 2) % job.mesh.pp))


def _numbers(line: str) -> list[float]:
    """Return the numbers of a line in order, without those that are part of a word."""
    return [float(n) for n in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]\d+)?(?!\w)", line)]


# ---------------------------------------------------------------- --explain

JOBS = {
    "all axes": {"tp": 4, "cp": 2, "pp": 2, "dp": 3, "zero": 1, "schedule": "interleaved",
                 "chunks": 2, "microbatches": 4},
    "no sequence parallelism": {"tp": 2, "pp": 3, "sequence_parallel": False, "batch": 1,
                                "overlap": "chunked", "microbatches": 7},
    "shards": {"dp": 8, "dp_shard": 4, "zero": 3, "dtype": "fp64", "recompute": "full"},
    "fp32": {"cp": 4, "dp": 2, "zero": 2, "dtype": "fp32"},
    "context over nodes": {"tp": 8, "cp": 2, "dp": 2, "microbatches": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_explain_prints_the_figures_of_the_formulas_it_names(name: str) -> None:
    job = _job(**JOBS[name])
    chosen, mesh, plan = _chosen(job), job.mesh, job.plan
    empty, head, *rest = explained(chosen)
    b = {"bf16": 2, "fp32": 4, "fp64": 8}[job.dtype]
    T, E, hidden, latency = job.batch * 8192 // mesh.cp, 4096, 14336, A100.efficiency.latency
    rows = T // mesh.tp if plan.sequence_parallel else T
    assert empty == ""
    assert head == (
        f"one micro-batch in one block: T = {T} tokens per context rank, from {job.batch} "
        f"sequences; a tensor rank has {rows} rows of width 4096"
    )
    shapes = {"qkv": (T, 6144 // mesh.tp, E), "output": (T, E, 4096 // mesh.tp),
              "up": (T, 2 * hidden // mesh.tp, E), "down": (T, E, hidden // mesh.tp)}  # fmt: skip
    for (word, (M, N, K)), line in zip(shapes.items(), rest):
        flops = 2 * M * N * K
        assert line == (
            f"  {word:7} 2 x {M} x {N} x {K} = {flops / 1e12:.4f} TFLOP / (312 TFLOP/s x 0.68) = "
            f"{flops / 312e12 / 0.68 * 1e3:.3f} ms"
        )
    lines = iter(rest[4:])
    if mesh.tp > 1:
        sent = T * E * b * (mesh.tp - 1) / mesh.tp
        near = A100.device.nvlink * A100.efficiency.near
        each = math.log2(mesh.tp) * latency + sent / near
        both = "" if plan.sequence_parallel else " (an all-reduce counts as both)"
        assert next(lines) == (
            f"  tensor: 4 all-gathers or reduce-scatters{both} in the forward and "
            f"{6 if plan.sequence_parallel else 4} in the backward, each {sent / 1e6:.2f} MB = T x "
            f"width x bytes per element x (tp - 1) / tp and {each * 1e3:.3f} ms at "
            f"{near / 1e9:.0f} GB/s; overlap {plan.overlap}"
        )
    if mesh.cp > 1:
        kv = 2 * T * 1024 // mesh.tp * (mesh.cp - 1)
        speed = A100.bandwidth(mesh.tp, mesh.cp)
        assert next(lines) == (
            f"  context: {kv * b / 1e6:.2f} MB forward and {kv * (b + max(b, 4)) / 1e6:.2f} MB "
            f"backward at {speed / 1e9:.0f} GB/s, concurrent with attention"
        )
    assert next(lines).split() == ["exposed", "ms", "forward", "backward", "(weight", "grad)"]
    parts = block_parts(job)
    assert ("recompute" in parts) == (plan.recompute != "none")
    for (word, work), line in zip(parts.items(), lines):
        assert line.split() == [word, *(f"{seconds * 1e3:.3f}" for seconds in work)]
    shown = "\n".join(rest)
    work, (ranks, m) = stage_work(job), (mesh.pp, plan.microbatches)
    sent = rows * E * b if ranks > 1 else 0
    (stages,) = re.findall(r"stages, forward \+ backward: .*", shown)
    ends = [1e3 * x for s in (work[0], work[-1]) for x in (s.forward, s.backward)]
    *four, megabytes, _ = _numbers(stages)  # to two decimal places
    assert four == pytest.approx(ends, abs=0.0051)
    assert megabytes == pytest.approx(sent / 1e6, abs=0.0051)
    assert (
        f"pipeline: {m} micro-batches, {plan.schedule}, simulated: 4.8765 s, "
        f"{chosen.time.timeline.bubble:.1%} idle\n"
    ) in shown
    assert (
        f"gradients: {gradient_sum(job, 0):.4f} s to sum over {mesh.dp * mesh.cp} data ranks, "
        "exposed 0.2109 s; update and gather 0.3447 s\n"
    ) in shown
    flops, world = MODEL.step_flops(mesh.dp * m * job.batch * 8192), mesh.world
    assert (
        f"MFU: {flops:.4g} model FLOPs / (5.4321 s x {world} x 312 TFLOP/s = "
        f"{5.4321 * world * 312e12:.4g}) = 45.7%\n"
    ) in shown
    _memory_is_said(job, chosen, shown)


def _memory_is_said(job: Job, chosen: Chosen, shown: str) -> None:
    mesh, plan = job.mesh, job.plan
    b, held = {"bf16": (2, 12), "fp32": (4, 8), "fp64": (8, 16)}[job.dtype]
    totals = [rank.total for rank in chosen.memory]
    fullest = totals.index(max(totals))
    units = units_of(MODEL, mesh, plan, fullest)
    shards = (mesh.dp_shard or mesh.dp) * mesh.cp
    block = (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336) / mesh.tp + 2 * 4096
    assert (
        f"memory of pipeline rank {fullest}: {sum(units.values()) / 1e6:.1f} M parameters "
        f"({block / 1e6:.1f} M per block); bytes per parameter: {b} for the weight, {max(4, b)} "
        f"for its gradient, and {held} for the optimizer; ZeRO {plan.zero} over {shards} ranks\n"
    ) in shown
    T, tp = job.batch * 8192 // mesh.cp, mesh.tp
    rows = T // tp if plan.sequence_parallel else T
    kept = b * (4 * rows * 4096 + T * (3 * 4096 + 3 * 1024 + 2 * 14336) / tp) + 4 * T * 32 / tp
    scores = (2 * b + 1) * 32 * T * 8192 / tp
    whole = (4 * b + 2) * rows * 4096 + b * T * (2 * 4096 + 2 * 1024 + 3 * 14336) / tp + scores
    flight = live_blocks(plan, mesh.pp, MODEL)[fullest]
    assert (
        f"  activations: {flight} blocks in flight, {kept / 1e6:.1f} MB each without recomputation "
        f"({whole / 1e6:.1f} MB in an implementation that also keeps dropout masks and attention "
        "scores, arXiv:2205.05198)\n"
    ) in shown
    *named, peak = shown.splitlines()[-8:]
    sizes = dataclasses.asdict(chosen.memory[fullest])
    assert [line.split() for line in named] == [
        [kind, f"{size / GIB:.2f}", "GiB"] for kind, size in sizes.items()
    ]
    states = sizes["weights"] + sizes["gradients"] + sizes["optimizer"]
    assert peak.split() == [
        "peak", f"{(states + sizes['activations'] + sizes['gpu']) / GIB:.2f}", "GiB", "of", "74.5"
    ]  # fmt: skip


# ---------------------------------------------------------------- the page, the JSON, the HTML


def _found() -> tuple[PlanConfig, Search, Found]:
    """Make a search with three fake layouts that differ in every number."""
    hardware = dataclasses.replace(A100, node=4)
    jobs = (
        _job(tp=2, cp=2, pp=3, dp=4, batch=2, microbatches=5, zero=2, hardware=hardware),
        _job(tp=4, pp=6, dp=2, batch=1, microbatches=20, schedule="interleaved", chunks=3,
             recompute="full", hardware=hardware),
        _job(cp=4, dp=12, batch=3, microbatches=11, recompute="selective", hardware=hardware),
    )  # fmt: skip
    best = [_chosen(job, at) for at, job in enumerate(jobs, 1)]
    missed = _job(dp=48, microbatches=13, batch=7, zero=3, hardware=hardware)
    refused = Counter({"one reason": 3, "another": 70, "a third": 11})
    found = Found(best, refused, (missed, int(81.23 * GIB)), simulated=17, bounded=2345)
    config = PlanConfig(model="my-model", gpus=48, best=3, sequences=None)
    return config, Search(MODEL, 48, hardware, 40), found


def test_the_text_page_has_a_row_for_each_layout() -> None:
    config, search, found = _found()
    head, _, names, *rows = command.lines(config, search, found)
    P = 18 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14336 + 2 * 4096)
    P += 2 * 50304 * 4096 + 4096
    assert head == (
        f"my-model, {P / 1e9:.3g} B parameters, on 48 a100-80g (4 per node); a step has 40 "
        "sequences of 8192 tokens, 327,680 in total. Predicted, not measured."
    )
    for at, (chosen, row) in enumerate(zip(found.best, rows), 1):
        mesh, plan, job = chosen.job.mesh, chosen.job.plan, chosen.job
        tokens = mesh.dp * plan.microbatches * job.batch * 8192
        most = 1.11 + 2.22 + 3.33 + 4.44 + 0.66 + 3 * 7 if mesh.pp > 1 else 32.76
        fullest = (at + mesh.pp - 2) % mesh.pp
        cells = row.split()  # within half a unit of the last digit printed
        assert float(cells[0]) == pytest.approx(5.4321 * at, abs=6e-4)
        assert cells[1] == f"{0.4567 / at:.1%}"
        assert float(cells[2]) == pytest.approx(tokens / (5.4321 * at) / 48, abs=0.51)
        assert float(cells[3]) == pytest.approx(most + 0.03 * fullest, abs=0.051)
        several = ["x", str(plan.chunks)] if plan.chunks > 1 else []
        assert cells[4:] == [
            *map(str, (mesh.tp, mesh.pp, mesh.cp, mesh.dp, plan.microbatches, job.batch)),
            str(plan.zero), plan.recompute, plan.schedule, *several,
        ]  # fmt: skip
    assert names.split() == [
        "seconds", "MFU", "tokens/s/GPU", "GiB", "tp", "pp", "cp", "dp", "microbatches", "batch",
        "ZeRO", "recompute", "schedule",
    ]  # fmt: skip
    page = "\n".join(rows)
    sent = re.findall(r"  (\w+) +([\d.]+) GB  (NVLink|network)", page)
    traffic = command.as_record(config, search, found)["layouts"][0]["traffic"]
    assert [(a, float(n), w) for a, n, w in sent] == [
        (a, pytest.approx(of["bytes"] / 1e9, abs=0.0051), of["link"]) for a, of in traffic.items()
    ]
    assert [*traffic] == ["tp", "cp", "pp", "dp"]
    searched = (
        "17 layouts were simulated, 2345 were ranked by a lower bound on their step time; why "
        "others were rejected:"
    )
    assert searched in rows
    at = rows.index(searched)
    assert [row.split(maxsplit=1) for row in rows[at + 1 : -1]] == [
        ["70", "another"], ["11", "a third"], ["3", "one reason"],
    ]  # fmt: skip
    assert rows[-1] == (
        "nearest miss: dp 48 cp 1 tp 1 pp 1 zero 3 schedule 1f1b chunks 1 microbatches 13 "
        "sequence_parallel True overlap bulk recompute none batch 7 needs 81.2 GiB per GPU, but "
        "a100-80g has 74.5"
    )
    without = dataclasses.replace(found, miss=None)
    assert [*command.lines(config, search, without)] == [head, "", names, *rows[:-1]]


def test_the_json_holds_everything_found() -> None:
    config, search, found = _found()
    record = command.as_record(config, search, found)
    layouts, missed = record.pop("layouts"), record.pop("nearest_miss")
    assert record == {
        "model": "my-model", "gpus": 48, "hardware": "a100-80g", "sequences": 40, "seq_len": 8192,
        "refused": {"one reason": 3, "another": 70, "a third": 11}, "simulated": 17,
        "bounded": 2345,
    }  # fmt: skip
    assert (missed["memory"], missed["options"]["dp"], missed["options"]["batch"]) == (
        int(81.23 * GIB), 48, 7,
    )  # fmt: skip
    for at, (chosen, row) in enumerate(zip(found.best, layouts, strict=True), 1):
        job = chosen.job
        options = dataclasses.asdict(job.plan) | dataclasses.asdict(job.mesh) | {"batch": job.batch}
        assert row["options"] == {name: options[name] for name in row["options"]}
        assert len(row["options"]) == 12
        assert row["seconds"] == chosen.time.seconds == 5.4321 * at
        assert row["mfu"] == 0.4567 / at
        tokens = job.mesh.dp * job.plan.microbatches * job.batch * 8192
        assert row["tokens_per_second"] == pytest.approx(tokens / (5.4321 * at))
        assert row["bubble"] == chosen.time.timeline.bubble
        assert [rank.pop("total") for rank in row["memory"]] == [r.total for r in chosen.memory]
        assert row["memory"] == [dataclasses.asdict(rank) for rank in chosen.memory]
    assert command.as_record(config, search, Found(found.best))["nearest_miss"] is None


def test_the_html_shows_the_first_layouts_memory_and_timeline(monkeypatch) -> None:
    config, search, found = _found()
    peaks, ranks = ("activations", "loading", "update"), found.best[0].memory
    ranks[:] = [
        dataclasses.replace(rank, **{peak: 99 * GIB})
        for rank, peak in zip(ranks, peaks, strict=True)
    ]
    told: list[Any] = []
    monkeypatch.setattr("warpweave.plan.page.plan_page", lambda *of: told.extend(of) or "")
    command._html(config, search, found)
    record, (title, about, searched), rows, memory, capacity, timeline = told
    assert title == "my-model on 48 a100-80g"
    assert about == next(command.lines(config, search, found))
    assert searched.startswith(
        "17 layouts were simulated, 2345 were ranked by a lower bound on their step time; nearest "
        "miss:"
    )
    assert (capacity, timeline) == (80e9, found.best[0].time.timeline)
    assert record == command.as_record(config, search, found)
    for row, layout in zip(rows, record["layouts"], strict=True):
        gib = max(rank["total"] for rank in layout["memory"]) / GIB
        own = {n: layout[n] for n in ("seconds", "mfu", "tokens_per_second", "bubble")}
        assert row == own | {"GiB": gib} | layout["options"]
    for rank, peak, shown in zip(ranks, peaks, memory, strict=True):
        assert (shown[peak], sum(shown.values())) == (99 * GIB, rank.total)


def test_the_files_are_of_the_first_layout(tmp_path: Path, monkeypatch, capsys) -> None:
    """They contain what --explain prints as well; --out has the options of the first layout."""
    config, _, found = _found()
    paths = {name: tmp_path / name for name in ("out.toml", "page.html", "line.json")}
    config = dataclasses.replace(
        config, model="gpt2", explain=True, out=paths["out.toml"], html=paths["page.html"],
        timeline=paths["line.json"],
    )  # fmt: skip
    asked: list[Any] = []
    monkeypatch.setattr(command, "choose_layouts", lambda *of: asked.extend(of) or found)
    command.run(config)
    search, keep = asked
    assert (search.config, search.gpus, keep) == (config.config, 48, 3)
    assert (search.sequences, search.hardware.name) == (2**22 // 1024, "h100")
    printed = capsys.readouterr().out.splitlines()
    options = json.loads(printed[-1])["layouts"][0]["options"]
    assert read_layout(paths["out.toml"]) == options
    shown = [*command.lines(config, search, found), *explained(found.best[0])]
    assert "\n".join(printed[:-1]) == "\n".join(shown)
    assert "my-model" not in paths["page.html"].read_text()
    events = json.loads(paths["line.json"].read_text())["traceEvents"]
    cells = sum(len(row) for row in found.best[0].time.timeline.cells)
    assert sum(event["ph"] == "X" for event in events) == cells


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeline", "line.pdf"], r"line\.pdf"),
        (["--timeline", "no/line.svg"], "no/line.svg cannot be written"),
        (["--out", "folder.toml"], "folder.toml cannot be written; name a file"),
        (["--out", "plan.json"], "--out must end in .toml, got plan.json"),
    ],
)
def test_an_unwritable_file_is_refused_before_the_search(
    words: list[str], says: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.toml").mkdir()
    monkeypatch.setattr(command, "choose_layouts", None)
    with pytest.raises(SystemExit) as stopped:
        command.run(parse(words))
    assert stopped.value.code == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_step_has_as_many_sequences_as_make_four_million_tokens() -> None:
    for length, sequences in ((8192, 512), (2**22, 1), (2**22 + 1, 1), (1000, 4194),
                              (700, 5991), (2**21 + 1, 1)):  # fmt: skip
        config = PlanConfig(model="llama-8b", seq_len=length)
        assert (config.config.seq_len, config.step_sequences) == (length, sequences)
    for given in (7, 1, 0):  # the search rejects an empty list, and does not use the default
        assert dataclasses.replace(config, sequences=given).step_sequences == given
