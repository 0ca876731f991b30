"""Every benchmark in its quick mode: outputs are equal, and the report has the agreed form.

Nothing is said about times here: the shapes are too small and the machine is busy.
"""

import importlib
import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
HEADER = {"kind", "device", "cpu_count", "torch", "triton", "commit", "dirty", "command"}
ROW = {"name", "shape", "dtype", "ms", "p20", "p80", "tokens_per_s", "ratios"}


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.mark.parametrize(
    ("script", "variants"),
    [
        ("train_step", {"warpweave": "transformers", "transformers": None}),
        ("data_parallel", {"warpweave zero=0": "torch DDP", "warpweave zero=1": "torch DDP",
                           "torch DDP": None,
                           "warpweave zero=3": "torch FSDP2", "torch FSDP2": None}),
        ("pipeline_1f1b", {"warpweave 1f1b": "torch Schedule1F1B", "torch Schedule1F1B": None}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_quick_run_compares_outputs_and_reports(load, script, variants, tmp_path, capsys):
    if script == "train_step":
        pytest.importorskip("transformers", reason="the baseline, an extra of its own")
    load(script).main(["--quick", "--results", str(tmp_path)])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads((tmp_path / "cpu" / f"{script}.json").read_text())
    assert last["script"] == script
    assert set(last["header"]) >= HEADER
    assert len(last["checks"]) >= 2
    assert all(check["error"] <= check["limit"] <= 1e-3 for check in last["checks"])
    assert [row["name"] for row in last["rows"]] == list(variants)
    for row in last["rows"]:
        assert set(row) == ROW
        assert 0 < row["p20"] <= row["ms"] <= row["p80"]
        assert set(row["ratios"]) == {b for b in [variants[row["name"]]] if b is not None}
    assert str(BENCHMARKS.parent) not in json.dumps(last)  # no path of this machine


def test_unequal_outputs_stop_a_benchmark(load):
    harness = load("harness")
    a = torch.randn(3, 5)
    assert harness.assert_equal("x", {"a": (a, a.clone())}, 1e-6).error == 0
    wrong = a.clone()
    wrong[0, 0] += 1e-3
    for other in (wrong, a * float("nan"), a[:2]):
        with pytest.raises(AssertionError, match="gradients: a differs"):
            harness.assert_equal("gradients", {"b": (a, a), "a": (other, a)}, 1e-6)


def test_rounds_are_interleaved_and_ratios_are_paired(load):
    harness = load("harness")
    calls: list[str] = []
    times = harness.interleave(
        {name: lambda name=name: calls.append(name) for name in "abc"}, rounds=40, warmup=1
    )
    rounds = ["".join(calls[i : i + 3]) for i in range(3, len(calls), 3)]
    assert len(rounds) == 40
    assert {"".join(sorted(r)) for r in rounds} == {"abc"}, "every variant once a round"
    assert len(set(rounds)) == 6, "in an order that is drawn anew"
    assert {name: len(ms) for name, ms in times.items()} == {"a": 40, "b": 40, "c": 40}

    report = harness.Report("x", "claim", {})
    drift = {"ours": [1.0, 2.0, 4.0], "theirs": [2.0, 4.0, 8.0]}
    report.add(drift, ["theirs"], shape="s", dtype="float32", tokens=1000)
    ours, theirs = report.rows
    assert ours.ratios == {"theirs": harness.Ratio(2.0, 2.0, 2.0)}
    assert theirs.ratios == {}
    assert (ours.ms, ours.tokens_per_s) == (2.0, 500_000)


def test_weights_go_to_transformers_in_its_own_order(load):
    step = load("train_step")
    heads, dim, width = 2, 3, 6
    qkv = torch.randn(3 * width, width)
    theirs = step.to_theirs("blocks.0.attention.qkv.weight", qkv, heads)
    assert theirs.shape == (width, 3 * width)  # Conv1D is (in, out)
    x = torch.randn(4, width)
    q, k, v = (x @ theirs).split(width, 1)
    ours = (x @ qkv.t()).view(4, heads, 3, dim)
    for i, part in enumerate((q, k, v)):
        torch.testing.assert_close(part.view(4, heads, dim), ours[:, :, i])
