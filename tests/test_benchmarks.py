"""Every benchmark in its quick mode: outputs are equal, and the report has the agreed form.

Times are not checked: the shapes are too small and the machine is busy.
"""

import dataclasses
import gc
import importlib
import json
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from clock import HotLoop
from ranks import run_ranks

from warpweave.model.gpt import GPTConfig
from warpweave.model.plain import plain_gpt_loss
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.network import Network, traffic
from warpweave.parallel.layout import SequenceLayout
from warpweave.prove.expected import plain_config

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
HEADER = {"kind", "device", "cpu_count", "torch", "triton", "commit", "dirty", "command"}
ROW = {"name", "shape", "dtype", "ms", "p20", "p80", "tokens_per_s", "ratios"}


@pytest.fixture(scope="module", autouse=True)
def _ranks_are_prepared():
    """Use the tests' forkserver in this process, which has imported everything that ranks need."""
    run_ranks(1, int)


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def last(capsys):
    """Return a function for the last line printed so far, a JSON object."""
    return lambda: json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture
def reported(load, last, tmp_path):
    """Run a script and return its report, which it prints and writes."""

    def run(script, how="--quick", folder="cpu"):
        load(script).main([how, "--results", str(tmp_path)])
        report = last()
        assert report == json.loads((tmp_path / folder / f"{script}.json").read_text())
        return report

    return run


@pytest.fixture
def refused(capsys):
    """Assert that a script ends with status 2 and one line with these words."""

    def check(main, words, arguments=()):
        with pytest.raises(SystemExit) as end:
            main([*arguments])
        assert end.value.code == 2
        assert words in capsys.readouterr().err

    return check


@pytest.mark.parametrize(
    ("script", "variants"),
    [
        ("train_step", {"warpweave": "transformers", "transformers": None}),
        ("data_parallel", {"warpweave zero=0": "torch DDP", "warpweave zero=1": "torch DDP",
                           "torch DDP": None,
                           "warpweave zero=3": "torch FSDP2", "torch FSDP2": None}),
        ("pipelines", {"warpweave 1f1b": "torch Schedule1F1B", "torch Schedule1F1B": None,
                       "warpweave zb-h1": "torch ScheduleInterleavedZeroBubble",
                       "torch ScheduleInterleavedZeroBubble": None}),
        ("overlap_timeline", {"chunked": "none", "none": None}),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_quick_run_compares_outputs_and_reports(reported, script, variants):
    if script == "train_step":
        pytest.importorskip("transformers", reason="the baseline, an extra of its own")
    report = reported(script)
    assert report["script"] == script
    assert set(report["header"]) >= HEADER
    assert len(report["checks"]) >= 2
    assert all(check["error"] <= check["limit"] <= 1e-3 for check in report["checks"])
    assert [row["name"] for row in report["rows"]] == list(variants)
    for row in report["rows"]:
        assert set(row) == ROW
        assert 0 < row["p20"] <= row["ms"] <= row["p80"]
        assert set(row["ratios"]) == {b for b in [variants[row["name"]]] if b is not None}
    assert str(BENCHMARKS.parent) not in json.dumps(report)  # no path of this machine


def _first_rank(world, entry, *args):
    """Replace the harness's `run_ranks` with processes that have started already."""
    return run_ranks(world, _without_rank, entry, *args)[0]


def _without_rank(rank, entry, *args):
    return entry(*args)


def test_context_is_compared_with_what_others_do(load, reported, monkeypatch):
    """Each strategy equals one device, as do ring, Ulysses and ring self-attention written by hand.
    In bfloat16 the usual ring and ring self-attention have larger errors."""
    context = load("context")
    monkeypatch.setattr(context, "run_ranks", _first_rank)
    report, names = reported("context"), [*context.OURS, *context.BASELINES]
    assert [row["name"] for row in report["rows"]] == 2 * names  # wall times, and CPU times
    (errors,) = report["errors"].values()
    assert len(errors) == 2 * len([*names, context.EXACT])
    for tensor in ("o", "dq", "dk", "dv"):
        theirs = [errors[f"{name}, bfloat16"][tensor] for name in ("usual ring", context.RSA)]
        assert errors["warpweave ring, bfloat16"][tensor] < 0.9 * min(theirs)


def test_staleness_is_compared_by_six_modes(reported, tmp_path):
    """The bound of each mode is reached; waiting costs time, and no waiting costs staleness."""
    rows = {row["name"]: row for row in reported("server")["rows"]}
    assert [rows[f"ssp {s}"]["staleness"] for s in (0, 2, 4)] == [0, 2, 4]
    assert rows["synchronous"]["delay"] == 0
    assert 8 * rows["synchronous"]["updates"] == rows["ssp 0"]["updates"] == 48
    times = [row["time"] for row in rows.values()]
    assert times == sorted(times, reverse=True)
    assert rows["asynchronous"]["mean_delay"] > rows["ssp 0"]["mean_delay"]
    assert rows["asynchronous"]["val_loss"] != rows["delay-compensated"]["val_loss"]
    assert (tmp_path / "cpu" / "server.svg").exists()


def test_emulated_ranks_kernels_compute_what_one_does(load, last, capsys, monkeypatch):
    """A miniature on a CPU detects a tile with a wrong block. The real benchmark needs a GPU."""
    kernels = load("context_kernels")
    kernels.main(["--device", "cpu"])
    names = [check["name"] for check in last()["checks"]]
    assert names == ["ranks", "ranks and float64", "whole and float64"]
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        kernels.main([])
    assert capsys.readouterr().err.count("\n") == 1
    ranks = kernels.ring_forward
    wrong = lambda layout, q, k, v: ranks(layout, q, k[::-1], v)  # noqa: E731
    monkeypatch.setattr(kernels, "ring_forward", wrong)
    with pytest.raises(AssertionError, match="ranks"):
        kernels.main(["--device", "cpu"])


def test_the_ring_is_drawn_with_what_can_be_hidden(load, reported, tmp_path, monkeypatch):
    timeline = load("context_timeline")
    monkeypatch.setattr(timeline, "run_ranks", _first_rank)
    report = reported("context_timeline")
    assert set(report["hidden"]) == {"overlap cp2", "blocking cp2"}
    assert all(check["error"] == 0 for check in report["checks"])
    assert "rank 1" in (tmp_path / "cpu" / "context_timeline.svg").read_text()
    # Tiles of 1 s in total and messages of 2 s. One of two tiles hides a hop of the forward,
    # 1 / 3.5 of the work and 0.25 of the bytes; the other hides that of the backward.
    can = timeline.predicted(SequenceLayout(64, 2), 1.0, 2.0)
    assert can == pytest.approx((0.5 / 3.5 + 0.5 * 2.5 / 3.5) / 2)
    assert timeline.predicted(SequenceLayout(64, 2), 2.0, 0.5) == 1


def test_local_steps_send_a_part_of_the_bytes(load, reported, tmp_path, monkeypatch):
    monkeypatch.setattr(load("local_steps"), "run_ranks", _first_rank)
    ends = {name: points[-1] for name, points in reported("local_steps")["curves"].items()}
    whole = ends.pop("data parallel")
    assert whole["bytes"] == 4 * whole["most"] > 4 * 4 * 256 * 16  # at least the embedding's, fp32
    for name, end in ends.items():  # they send in two of the four steps
        assert end["bytes"] == whole["bytes"] / 2, name
        assert end["most"] == whole["most"] or name == "streaming DiLoCo"
        assert abs(end["val_loss"] - whole["val_loss"]) < 0.1
    assert ends["streaming DiLoCo"]["most"] < whole["most"]
    assert "DiLoCo" in (tmp_path / "cpu" / "local_steps.svg").read_text()


def test_all_reduces_grow_as_their_closed_forms(load, reported, monkeypatch):
    growth = load("all_reduce")
    network = Network(1e-4, 1e-9, 0.0)

    def launch(_entry, args, mesh, backend):  # ranks that report the network's speed
        return [
            {"algorithm": name, "elements": n, "seconds": traffic(a, mesh.dp, n, network).seconds}
            for n in args[0].elements
            for name, a in all_reduces(mesh.dp).items()
        ]

    monkeypatch.setattr(growth, "launch", launch)
    report = reported("all_reduce")
    found = report["measured"]["2"]
    assert found["network"] == pytest.approx({"alpha": 1e-4, "beta": 1e-9, "gamma": 0}, abs=1e-15)
    assert found["predicted_by_measured"] == [1.0, 1.0]
    assert found["ms"]["parallel"] == [0.104, 0.166]  # 4 and 64 KiB
    at_16 = {row["name"]: row for row in report["simulated"] if row["ranks"] == 16}
    assert at_16["ring"]["rounds"] == at_16["naive"]["rounds"] == 30
    assert at_16["parallel"]["at_once"] == 240
    assert at_16["server"]["busiest"] == 15
    monkeypatch.setitem(growth.CLOSED, "ring", lambda R: (R + 1, 1, 1))
    with pytest.raises(AssertionError, match=r"ring, 2 ranks: \(2, 1\.0, 1\.0\), expected"):
        growth.simulate(2, 16)


def test_muon_is_compared_with_adamw(reported):
    report = reported("muon")
    lowest = {row["optimizer"]: min(row["losses"]) for row in report["rows"]}
    assert report["target"] == pytest.approx(lowest["adamw"], abs=1e-4)
    assert (report["steps"]["muon"] is not None) == (lowest["muon"] <= report["target"])
    assert all(row["losses"][0] - row["lowest"] > 0.1 for row in report["rows"])


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


def test_hidden_is_the_time_of_messages_under_computation(load):
    timeline = load("overlap_timeline")
    assert timeline.union([(3, 5), (0, 1), (4, 6), (6, 7), (3, 4)]) == [(0, 1), (3, 7)]
    assert timeline.both([(0, 4), (2, 6)], [(1, 3), (5, 9), (6, 8)]) == [(1, 3), (5, 6)]
    assert timeline.hidden([(0, 4), (2, 6)], [(1, 3), (5, 9)]) == 0.5  # overlaps count once
    assert timeline.hidden([(0, 1), (2, 3)], [(1, 2), (3, 4)]) == 0
    assert timeline.hidden([(2, 3), (5, 6)], [(1, 4), (4, 7)]) == 1


def test_a_message_lasts_from_its_post_until_it_has_arrived(load, monkeypatch):
    timeline, arrived = load("overlap_timeline"), threading.Event()
    work = types.SimpleNamespace(wait=lambda: arrived.wait(60))
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [work])
    with ThreadPoolExecutor(1) as threads, timeline.Recorder(threads) as recorder:
        (posted,) = dist.batch_isend_irecv([])
        _ = torch.ones(3, 2) @ torch.ones(2, 5) + 1  # one product, and one operator that is none
        arrived.set()
        posted.wait()
        _ = torch.ones(3, 2).addmm(torch.ones(3, 2), torch.ones(2, 2))
    found = recorder.timeline
    (message,), (under, after) = found.messages, found.products
    assert message[0] <= under[0] <= under[1] <= message[1] <= after[0]
    assert {under, after} < set(found.computation)
    kinds = (found.products, found.computation)
    by_products, by_all = (timeline.hidden([message], kind) for kind in kinds)
    assert 0 < by_products < by_all < 1
    assert dist.batch_isend_irecv([]) == [work]  # nothing is watched any longer


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


# ---------------------------------------------------------------- kernels


@pytest.fixture
def harness(load):
    return load("kernel_harness")


FAMILIES = ("attention", "norm", "gemm", "loss", "optimizer", "training")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dry_run_checks_outputs_and_predicts_what_it_cannot_time(reported, family):
    report = reported(f"kernels_{family}", "--dry", "dry")
    assert set(report["header"]) >= HEADER
    assert not report["measured"]
    assert len(report["rows"]) >= 2
    for row in report["rows"]:
        assert row["variant"] == "warpweave"
        assert row["error"] <= row["limit"] < 1  # so zeros would be rejected
        assert row["ms"] is None  # the interpreter is never timed
        a100, h100, b200 = (row["predicted_us"][target] for target in ("sm_80", "sm_90", "sm_100"))
        assert a100 > h100 > b200 > 10
    assert str(BENCHMARKS.parent) not in json.dumps(report)


def test_without_a_gpu_nothing_is_timed(load, refused):
    refused(load("kernels_norm").main, "there is none: pass --dry")


def _problem(harness, **changes):
    def double(x):
        return (2 * x,)

    given = {
        "name": "double", "shape": "n=9", "dtype": torch.float32, "cost": harness.Cost(9, 72),
        "inputs": lambda device: (torch.randn(9, device=device),),
        "variants": {"warpweave": double, "torch": lambda x: (x + x,)}, "truth": double,
    }  # fmt: skip
    return harness.Problem(**given | changes)


def test_a_wrong_variant_is_not_timed(harness):
    inputs = (torch.randn(9),)
    right = _problem(harness)
    assert set(harness.check(right, inputs)) == {"warpweave", "torch"}
    harness.agree(right, inputs)
    wrong = _problem(harness, variants=right.variants | {"torch": lambda x: (2.001 * x,)})
    with pytest.raises(AssertionError, match=r"double n=9: torch is off by 5\.0e-04"):
        harness.check(wrong, inputs)
    with pytest.raises(AssertionError, match="torch and warpweave differ"):
        harness.agree(wrong, inputs)
    short = _problem(harness, variants={"warpweave": lambda x: ()})
    with pytest.raises(AssertionError, match="warpweave returns 0 outputs"):
        harness.check(short, inputs)


def test_a_baseline_that_torch_refuses_is_named_and_ours_never_is(harness):
    refuse = mock.Mock(side_effect=RuntimeError("no kernel for this\nand a long story"))
    variants = _problem(harness).variants | {"cuDNN": refuse}
    problem = harness.able(_problem(harness, variants=variants), (torch.ones(9),))
    assert set(problem.variants) == {"warpweave", "torch"}
    assert problem.absent == {"cuDNN for double n=9": "no kernel for this"}
    ours = harness.able(_problem(harness, variants={"warpweave": refuse}), (torch.ones(9),))
    assert "warpweave" in ours.variants  # the check then raises


def test_variants_that_write_in_place_get_inputs_of_their_own(harness):
    variants = {name: lambda x: (x.mul_(2),) for name in ("warpweave", "torch")}
    problem = _problem(harness, variants=variants)
    x = torch.randn(9)
    before = x.clone()
    harness.check(problem, (x,))
    harness.agree(problem, (x,))
    assert torch.equal(x, before)


def test_measured_rows_pair_rounds_and_use_the_measured_peak(harness):
    ticks = {"warpweave": iter([9.0, 9.0, 9.0, 1.0, 2.0]), "torch": iter([9.0, 9.0, 9.0, 2.0, 4.0])}
    calls = {name: lambda n=name: n for name in ticks}
    times = harness.interleave(calls, lambda call: next(ticks[call()]), rounds=5, warmup=0)
    assert [len(ms) for ms in times.values()] == [5, 5]
    problem = _problem(harness)
    errors = dict.fromkeys(calls, (0.0, 1.0))
    ours, theirs = harness.rows(problem, errors, {n: ms[3:] for n, ms in times.items()}, (1e3, 1e5))
    assert ours.ratios["torch"].median == 2.0
    assert theirs.ratios == {}
    assert ours.gb_s == pytest.approx(72 / ours.ms / 1e6)
    assert ours.of_peak == pytest.approx(max(9 / 1e3, 72 / 1e5) * 1e3 / ours.ms)


def test_what_was_measured_is_written_before_the_next_is(harness, tmp_path, capsys):
    first, second = _problem(harness), _problem(harness, shape="n=10", absent={"x": "not here"})
    table = harness.Table("family", "claim", tmp_path, [first, second])
    table.open(kind="gpu", device="a GPU")
    times = {"warpweave": [1.0, 2.0], "torch": [2.0, 4.0]}
    rows = harness.rows(first, dict.fromkeys(times, (0.0, 1.0)), times, (1e3, 1e5))
    table.add(first, rows, {"y": "no memory"})  # then the time is over
    written = json.loads((tmp_path / "gpu" / "family.json").read_text())
    assert [row["variant"] for row in written["rows"]] == ["warpweave", "torch"]
    assert written["measured"]
    assert written["not_reached_in_time"] == ["double n=10"]
    assert written["absent_baselines"] == {"x": "not here", "y": "no memory"}
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 3
    assert "2.000 x torch" in shown[1]
    table.finish()
    shown = capsys.readouterr().out.splitlines()
    assert "not reached in time: double n=10" in shown
    assert json.loads(shown[-1]) == written


def test_one_command_runs_families_and_says_which_failed(load, last, capsys):
    run_all = load("run_all")
    assert run_all.main(["--dry", "--families", "optimizer"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert any("PREDICTION" in line for line in out)
    assert json.loads(out[-1])["families"] == {"optimizer": "ok"}
    if not torch.cuda.is_available():
        assert run_all.main(["--families", "norm"]) == 1
        assert last()["families"]["norm"].startswith("failed: kernels_norm times a CUDA device")
    assert run_all.main(["--dry", "--families", "norm", "--minutes", "0"]) == 1
    assert last()["families"] == {"norm": "out of time"}


def test_predicted_times_stand_beside_those_of_the_same_problems(
    load, last, refused, tmp_path, capsys, monkeypatch
):
    beside = load("clock_beside")
    launches = beside.launches()
    problems = [p for f in ("attention", "gemm") for p in load(f"kernels_{f}").problems("full")]
    named = {(p.name, p.shape): p.cost for p in problems}
    for launch in launches:  # all are problems of the kernel families, with equal costs
        costs = [cost for _, cost in launch.calls]
        assert sum(costs[1:], costs[0]).flops == named[launch.name, launch.shape].flops
    assert len(launches) == 12
    refused(beside.main, "no GPU to compare with; `--target sm_90`")
    fwd = [x for x in launches if x.name == "attention D=128 full fwd"]
    rows = [{"variant": v, "name": fwd[0].name, "shape": fwd[0].shape, "ms": ms}
            for v, ms in (("warpweave", 0.105), ("SDPA flash", 0.2))]  # fmt: skip
    (tmp_path / "some-gpu").mkdir()
    (tmp_path / "some-gpu" / "kernels_attention.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(beside, "capability", lambda device: 90)
    for predicted, inside in (([100.0, 90.0, 110.0], 1), ([80.0, 70.0, 100.0], 0)):
        monkeypatch.setattr(beside, "outlook", lambda launch, target, us=predicted: us)
        assert beside.main(["--target", "sm_100", "--results", str(tmp_path)]) == 0
        assert last()["measured"] == 0  # other GPU
        assert beside.main(["--results", str(tmp_path)]) == 0
        *lines, told = capsys.readouterr().out.splitlines()
        assert (json.loads(told)["measured"], json.loads(told)["inside"]) == (1, inside)
        (line,) = [line for line in lines if "measured" in line]
        assert line.endswith("1.05 of it" if inside else "1.31 of it, OUTSIDE")
    assert beside.main(["--target", "sm_80", "--results", str(tmp_path)]) == 0
    assert last()["measured"] == 0  # other GPU
    for wrong in (["--target", "sm_75"], ["--only", "no such"]):
        refused(beside.main, wrong[1], wrong)


# ---------------------------------------------------------------- overlapped products


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure")
def test_without_a_gpu_layers_say_which_overlap_is_fastest_of_what_runs(load, tmp_path, capsys):
    load("overlap").main(["--quick", "--rounds", "1", "--results", str(tmp_path)])
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "there is no GPU: layers on 2 gloo ranks, nothing fused"
    last = json.loads(out[-1])
    assert last == json.loads((tmp_path / "cpu" / "overlap.json").read_text())
    assert set(last["header"]) >= HEADER
    sizes = {"gather": "N=12 K=8", "scatter": "N=8 K=12", "reduce": "N=8 K=12"}
    shapes = [f"{moves} M=24 {size} ranks=2" for moves, size in sizes.items()]
    words = ["none", "bulk", "chunked"]
    assert [(r["name"], r["shape"]) for r in last["rows"]] == [
        (word, f"layer {shape}") for shape in shapes for word in words
    ]
    assert [check["name"] for check in last["checks"]] == [f"layer {shape}" for shape in shapes]
    for at, line in enumerate(last["fastest"]):
        ms = {r["name"]: r["ms"] for r in last["rows"][3 * at : 3 * at + 3]}
        best = min(words, key=ms.get)
        assert line.startswith(f"{shapes[at]}: overlap='{best}' is fastest")
        assert line.endswith("x none") == (best != "none")
        assert line in out


def _tiny(overlap):
    return overlap.products(2, overlap.TINY, overlap.TINY_ROWS)


def test_virtual_ranks_are_compared_with_products_before_they_are_timed(load, last, monkeypatch):
    overlap = load("overlap")
    report = overlap.OverlapReport("overlap", "claim", {})
    products = [*_tiny(overlap)]
    assert [p.moves for p in products] == ["gather", "scatter", "reduce"]
    for product in products:
        calls = overlap.virtual_ranks(product, torch.device("cpu"), report)
        report.compare({name: [2.0, 2.0] for name in calls}, product, overlap.WANTED)
    assert len(report.checks) == 3
    assert [row.name for row in report.rows] == ["warpweave", "cuBLAS"] * 3
    report.compare({"warpweave": [2.0], "cuBLAS": [1.8]}, products[0], overlap.WANTED)
    report.finish(None)
    (slow,) = last()["slow"]
    assert slow == "gather M=24 N=12 K=8 ranks=2: 0.900 x cuBLAS, wanted 0.95"

    def wrong(*args, steps=overlap.gemm_reduce_scatter_steps):
        y = yield from steps(*args)
        return y * 1.05

    monkeypatch.setattr(overlap, "gemm_reduce_scatter_steps", wrong)
    with pytest.raises(AssertionError, match="differs by"):
        overlap.virtual_ranks(products[1], torch.device("cpu"), report)


def _real_ranks(rank, folder):
    sys.path.insert(0, folder)
    overlap = importlib.import_module("overlap")
    report = overlap.OverlapReport("overlap", "claim", {})
    workspace, found = overlap.Workspace(torch.distributed.group.WORLD), []
    for product in _tiny(overlap):
        calls = overlap.real_ranks(product, torch.device("cpu"), workspace, report)
        found.append([*calls])
    return found, len(report.checks), report.absent


def test_real_ranks_are_compared_with_nccl_and_absent_baselines_are_named():
    for found, checks, absent in run_ranks(2, _real_ranks, str(BENCHMARKS)):
        assert found == [["warpweave", "cuBLAS + NCCL"]] * 3
        assert checks == 3
        assert set(absent) == {"torch fused gather", "torch fused scatter"}


# ---------------------------------------------------------------- training steps

STYLES = {
    "gpt2": GPTConfig(61, 24, 2, 32, 2),
    "llama": GPTConfig(
        61, 24, 2, 48, 6, 2, 40, positions="rope", norm="rms", activation="swiglu", bias=False,
        rope_theta=500.0,
    ),
}  # fmt: skip


@pytest.fixture
def training(load, monkeypatch):
    """The models at CPU sizes, without torch.compile and Liger; a clock that counts its calls."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    family, harness = load("kernels_training"), load("kernel_harness")

    def missing(*packages, find=family.missing):
        return "liger-kernel not installed" if "liger-kernel" in packages else find(*packages)

    monkeypatch.setattr(family, "missing", missing)
    monkeypatch.setattr(family, "MODELS", {style: (c, 2) for style, c in STYLES.items()})
    ticks = iter(range(1, 10_000))

    def clock(call):
        call()
        return float(next(ticks))

    family.bench = harness.Bench(torch.device("cpu"), clock, (1e12, 1e11), 6, lambda: 1e3)
    gc.freeze()  # each measurement collects garbage, and need not scan what was imported
    yield family
    gc.unfreeze()


def _measure(family, style="gpt2", bench=None, **changes):
    full = dataclasses.replace(family.problem(style, "full"), **changes)
    return family.measure(family.problem(style, "check"), full, bench or family.bench)


@pytest.mark.parametrize("style", STYLES)
def test_the_plain_step_is_the_plain_gpt(load, style):
    """In float64; transformers' gradients come back in its order of rows."""
    baselines, family = load("step_baselines"), load("kernels_training")
    config, device = STYLES[style], torch.device("cpu")
    shapes = family.shapes(config)
    plain = {n: family.drawn(n, s, torch.float64, device) for n, s in shapes.items()}
    tokens = torch.randint(config.vocab_size, (3, 17))

    def gradients(loss, weights):
        return torch.autograd.grad(loss, list(weights.values()))

    leaves = {n: w.clone().requires_grad_() for n, w in plain.items()}
    padded = {n: F.pad(w, (0, 0, 0, 3)) if n == "embedding.weight" else w
              for n, w in leaves.items()}  # fmt: skip
    loss = baselines.plain_loss(padded, tokens, config)
    theirs = gradients(loss, leaves)

    ours = {n: torch.empty_like(w) for n, w in plain.items()}
    for name, w in ours.items():
        w[baselines.order(name, config)] = plain[name]
        w.requires_grad_()
    total, count = plain_gpt_loss(ours, tokens, baselines.shifted(tokens), plain_config(config))
    torch.testing.assert_close(loss, total / count, rtol=1e-12, atol=0)
    for name, a, b in zip(ours, theirs, gradients(total / count, ours), strict=True):
        b = b[baselines.order(name, config)]
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=name)

    pytest.importorskip("transformers", reason="the baseline, an extra of its own")
    model = baselines.Transformers({n: w.float() for n, w in plain.items()}, config, False)
    for name, gradient in model.gradients(tokens)[1].items():
        expected = theirs[list(shapes).index(name)].float()
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("style", STYLES)
def test_training_steps_are_compared_and_then_timed(training, style):
    pytest.importorskip("transformers", reason="the baseline, an extra of its own")
    rows, absent = _measure(training, style)
    others = ["torch.compile model", "transformers"]
    assert [row.variant for row in rows] == ["warpweave", *others]
    assert absent == {"transformers + Liger": "liger-kernel not installed"}
    for row in rows:
        assert row.error <= row.limit
        assert set(row.ratios) == (set(others) if row.variant == "warpweave" else set())
        assert row.tokens_per_s == pytest.approx(2 * 24 * 1000 / row.ms)
        flops = STYLES[style].step_flops(2 * 24)
        assert row.mfu == {"measured peak": pytest.approx(flops / (row.ms / 1000) / 1e12)}
        assert f"{row.tokens_per_s:.0f} tokens/s MFU" in row.words()


def test_a_baseline_that_trains_otherwise_is_not_timed(training, monkeypatch):
    made = training.makers(STYLES["gpt2"], 2, None)
    made = {name: made[name] for name in ("warpweave", "torch.compile model")}
    with monkeypatch.context() as patch:
        patch.setattr(training.step_baselines, "LR", 3e-3)
        with pytest.raises(AssertionError, match=r"gpt2 step of .*: loss of step [1-3] differs"):
            _measure(training, makers=made)

    def acausal(q, k, v, is_causal, enable_gqa, attend=F.scaled_dot_product_attention):
        return attend(q, k, v)

    def seeing_all(weights):
        model = made["torch.compile model"](weights)
        loss = model.loss

        def run(tokens):
            with monkeypatch.context() as patch:
                patch.setattr(F, "scaled_dot_product_attention", acausal)
                return loss(tokens)

        model.loss = run
        return model

    with pytest.raises(AssertionError, match=r"gpt2 step of torch.compile model: .* differs"):
        _measure(training, makers=made | {"torch.compile model": seeing_all})


def test_who_finds_no_memory_or_time_is_named(training):
    plain = training.makers(STYLES["gpt2"], 2, None)["torch.compile model"]
    made = {"warpweave": plain, "torch.compile model": plain}  # one model for both, to save time
    oom = "out of memory. Tried to allocate 2 GiB"
    full = mock.Mock(side_effect=torch.OutOfMemoryError(f"{oom}\nand a long story"))
    rows, absent = _measure(training, makers=made | {"torch.compile model": full})
    assert [row.variant for row in rows] == ["warpweave"]
    assert absent["torch.compile model for gpt2 step"] == oom
    rows, absent = _measure(training, makers=made | {"warpweave": full})
    assert rows == []
    assert "warpweave for gpt2 step" in absent

    calls = iter(range(100))

    def later(call):  # all models exist: the second finds no memory left
        return full() if next(calls) == 1 else 1.0

    for change, why in (({"clock": later}, oom), ({"left": lambda: -1.0}, "out of time")):
        bench = dataclasses.replace(training.bench, **change)
        rows, absent = _measure(training, bench=bench, makers=made)
        assert [row.variant for row in rows] == ["warpweave"]
        assert absent["torch.compile model for gpt2 step"] == why


def test_compiled_reports_facts_and_marks_predictions(load, last, tmp_path):
    arguments = ["--targets", "sm_90", "--only", "gelu tanh fwd", "--results", str(tmp_path)]
    assert load("compiled").main(arguments) == 0
    told = last()
    assert told["ok"]
    assert told["parts"] == {"sm_90": {"kernels": 1, "failures": 0}}
    report = json.loads((tmp_path / "compiled" / "sm_90.json").read_text())
    assert set(report["header"]) >= HEADER
    assert {"busy", "roofline_us", "clock_us", "ideal", "serial"} <= {*report["predictions"]}
    (row,) = report["rows"]
    assert 0 < row["registers"] < 64
    assert row["occupancy"] * row["num_warps"] / 64 == row["warps_active"] > 0.5
    assert str(BENCHMARKS.parent) not in json.dumps(report)


def test_compiled_refuses_to_compile_no_case(load, refused, monkeypatch):
    """A misspelled --only is not a success."""
    compiled = load("compiled")
    monkeypatch.setattr(compiled, "compile_targets", lambda targets, *a, **k: {targets[0]: []})
    arguments = ["--targets", "sm_90", "--only", "misspelt"]
    refused(compiled.main, "no case has 'misspelt'", arguments)


def test_compiled_prices_a_case_by_its_cost(load):
    compiled = load("compiled")
    report = compiled.Report(
        "sm_90", "x", "k", True, False, 8, 128, 0, 0, 2, 400, "wgmma", {"BLOCK_M": 64, "heads": 3},
        {}, (989_000_000, 3_350),
    )  # fmt: skip
    loop = HotLoop(100, 200, 1e6, 512.0, {"tensor": 4}, {"alu": 600.0}, 0.0, 0.0, "P4 W")
    read = compiled.row(dataclasses.replace(report, loops=[loop]))
    assert [read[x] for x in ("ideal", "serial", "bound")] == [0.853, 0.719, "alu"]
    row = compiled.row(report)
    assert row["roofline_us"] == 1.0  # the arithmetic at 989 TFLOP/s; the bytes take 1 ns
    assert row["tiles"] == {"BLOCK_M": 64}
    assert row["waves"] == round(400 / 264, 2)
    assert row["busy"] == round(400 / 264 / 2, 3)
    assert row["warps_active"] == 0.25
