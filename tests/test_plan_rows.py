"""benchmarks/plan_rows.py and published.py: the meaning of a printed number, invalid rows, and a
fit that recovers the efficiencies of generated rows."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def rows(load):
    return load("published").read()


def _row(rows, **given):
    (found,) = (r for r in rows if all(getattr(r, k) == v for k, v in given.items()))
    return found


def test_there_are_rows_of_several_tables(rows) -> None:
    assert len(rows) >= 120
    assert len({row.library for row in rows}) >= 8
    assert all(row.value > 0 for row in rows)
    assert {row.kind for row in rows} == {"step_s", "tokens_s", "tflops", "tflops_recompute", "mfu"}


def test_rows_that_cannot_be_are_flagged_with_the_numbers(rows) -> None:
    problems = [row.problem for row in rows if row.problem]
    llama = [row for row in rows if row.library == "Llama 3 report"]
    wrong = "tp x pp x cp x dp = 8192, not 16384"
    assert [row.problem for row in llama] == [None, None, wrong]
    assert "tp x pp x cp x dp = 2, not 8" in problems
    narrow = [row for row in rows if row.precision == "nvfp4"]
    assert problems.count("no figure for nvfp4") == len(narrow)
    assert 5 < len(problems) < 0.1 * len(rows)


def test_what_a_printed_figure_means_in_seconds(rows, load) -> None:
    """One configuration, whose sources print it in several ways."""
    seconds = load("published").seconds_printed
    # arXiv:2104.04473, equation of section 5.1: F = 96 B s l h^2 (1 + s / 6h + V / 16 l h)
    row = _row(rows, model="gpt-145b", kind="tflops_recompute")
    B, s, L, h, V = 2304, 2048, 80, 12288, 51200
    flops = 96 * B * s * L * h**2 * (1 + s / (6 * h) + V / (16 * L * h))
    assert seconds(row) == pytest.approx(flops / (1536 * 148e12), rel=1e-12)
    # arXiv:2205.05198, equation 7: 72 B l s h^2 (1 + s / 6h + V / 12 h l), of 312 TFLOP/s; 2,240
    # GPUs at 54.2 % take 39.15 s
    row = _row(rows, kind="mfu", recompute="selective")
    flops = 72 * 2240 * 105 * s * 20480**2 * (1 + s / (6 * 20480) + V / (12 * 20480 * 105))
    assert seconds(row) == pytest.approx(flops / (2240 * 0.542 * 312e12), rel=1e-12)
    assert seconds(row) == pytest.approx(39.15, rel=0.01)
    row = _row(rows, library="Megatron-Bridge", value=326)
    assert seconds(row) == pytest.approx(1536 * 8192 / (326 * 1024), rel=1e-12)
    # the same page prints 822 model TFLOP/s, with half of the attention
    assert seconds(_row(rows, model="gpt-22b", recompute="full", kind="step_s")) == 1.42


def test_halves_part_no_layout_and_every_library(rows, load) -> None:
    good = [row for row in rows if row.problem is None]
    fitted, tested = load("plan_rows").halves(good)
    assert sorted(map(id, fitted + tested)) == sorted(map(id, good))
    assert not {row.same() for row in fitted} & {row.same() for row in tested}
    assert 0.4 < len(fitted) / len(good) < 0.6
    for library in {row.library for row in good}:
        assert any(row.library == library for row in fitted)


def test_a_fit_finds_what_rows_were_made_with(rows, load) -> None:
    """The values of the rows are predictions with other efficiencies; two of
    them are wrong by a half."""
    published, script = load("published"), load("plan_rows")
    made = replace(published.START, product=0.8, attention=0.3, elementwise=0.5)
    chosen = [r for r in rows if r.gpu == "A100-40G" and r.n_gpus == 8 and r.problem is None][::2]
    assert len(chosen) > 10
    fake = []
    for at, row in enumerate(chosen):
        seconds = published.seconds_predicted(row, made) * (1.5 if at < 2 else 1)
        value = row.global_batch * row.seq_len / (seconds * row.n_gpus)
        fake.append(published.Row(row.words, row.numbers | {"value": value}))
    found = script.Fit(fake).run(2)
    for name in ("product", "attention", "elementwise"):
        assert getattr(found, name) == pytest.approx(getattr(made, name), rel=0.08)
    errors = [
        published.seconds_predicted(row, found) / published.seconds_printed(row) - 1 for row in fake
    ]
    assert max(map(abs, errors[2:])) < 0.03
    assert script.summary([0.1, -0.2, 0.3, 0.0]) == {
        "rows": 4, "median": 0.15, "p90": 0.3, "within_15_percent": 0.5, "bias": 0.05
    }  # fmt: skip


def test_a_quick_run_writes_table_picture_and_json(load, tmp_path, capsys) -> None:
    load("plan_rows").main(["--quick", "--results", str(tmp_path)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    written = json.loads((tmp_path / "plan" / "rows.json").read_text())
    assert {key: written[key] for key in last} == last
    page = (tmp_path / "plan" / "rows.md").read_text().splitlines()
    numbers = tuple(f"| {n} |" for n in range(1, 999))
    assert sum(line.startswith(numbers) for line in page) == len(written["rows"])
    assert sum("problem" in row for row in written["rows"]) == last["flagged"] > 5
    assert (tmp_path / "plan" / "rows.svg").read_text().startswith("<?xml")
    for half in ("fit", "test"):
        sizes = sorted(abs(r["error"]) for r in written["rows"] if r["half"] == half)
        assert len(sizes) == last["summary"][half]["rows"] > 0
        assert sizes[0] <= last["summary"][half]["median"] <= sizes[-1]


def test_the_results_that_stand_are_of_these_rows(rows) -> None:
    """The table in benchmarks/results is not older than the CSV."""
    written = json.loads((BENCHMARKS / "results" / "plan" / "rows.json").read_text())
    assert [(r["source"], r["model"], r["value"]) for r in written["rows"]] == [
        (row.source, row.model, row.value) for row in rows
    ]
    assert set(asdict_names()) == set(next(iter(written["efficiencies"].values())))


def asdict_names() -> list[str]:
    from warpweave.plan.device import HARDWARE

    return [*asdict(HARDWARE["h100"].efficiency), "product8"]
