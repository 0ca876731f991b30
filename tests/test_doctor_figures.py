"""The doctor's numbers: limits and errors at their edges, device and ranks, requested checks, the
description of a machine, and the speed of links."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from threads import run_threads
from torch import Tensor

from warpweave.kernels.cases import Case
from warpweave.launch import devices as gpus
from warpweave.launch.interrupt import Stopped
from warpweave.launch.session import Session
from warpweave.machine.doctor import check, command, kernels, machine, ranks, times
from warpweave.machine.doctor.check import (
    Check,
    Measured,
    Verdict,
    relative_error,
    within_budget,
    worst,
)
from warpweave.machine.doctor.options import DoctorConfig
from warpweave.parallel.mesh import Mesh
from warpweave.prove.proof import KINDS, LIMITS

CPU = torch.device("cpu")
INF = math.inf


# ---------------------------------------------------------------- errors and limits


def test_relative_error_is_by_the_largest_element_and_infinite_on_mismatch() -> None:
    t = torch.tensor
    for actual, expected, error in (
        ([1.0, -4.0], [1.0, -4.0], 0.0),
        ([1.0, -4.0], [2.0, -4.0], 0.25),
        ([1.5, -4.0], [1.0, -5.0], 0.2),
        ([0.5], [0.0], 0.5),  # if all elements are zero, the absolute error
        ([0.0], [0.5], 1.0),
        ([1.0, 1.0], [1.0], INF),
        ([math.nan, 1.0], [1.0, 1.0], INF),
        ([1.0, 1.0], [math.nan, 1.0], INF),
    ):
        assert relative_error(t(actual), t(expected)) == pytest.approx(error)
    assert relative_error(torch.ones(1, 2), torch.ones(2)) == INF
    tiny = t([1.0 + 2**-40], dtype=torch.float64)
    assert relative_error(tiny, t([1.0])) == pytest.approx(2**-40, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_budget_is_twice_torchs_own_error_and_one_rounding(dtype: torch.dtype) -> None:
    """In float32 at least five roundings, or as many as a sequential sum of n terms makes."""
    eps = torch.finfo(dtype).eps
    truth = torch.tensor([1.0, 8.0], dtype=torch.float64)
    for plain_off, off in itertools.product((0.0, 0.5, 3.0, 64.0), (0.0, 7.0)):
        plain = truth + torch.tensor([8 * plain_off * eps, 0.0], dtype=torch.float64)
        actual = (truth + torch.tensor([8 * off * eps, 0.0], dtype=torch.float64)).to(dtype)
        found = within_budget(actual, plain, truth)
        least = 2.0 if dtype == torch.float32 else 0.0
        assert found.limit == pytest.approx((2 * max(plain_off, least) + 1) * eps, rel=1e-6)
        assert found.error == pytest.approx(off * eps)
        assert found.said == ""
        long = within_budget(actual, plain, truth, 1024)
        least = 8.0 if dtype == torch.float32 else 0.0
        assert long.limit == pytest.approx((2 * max(plain_off, least) + 1) * eps, rel=1e-6)


def test_the_worst_is_nearest_to_its_own_limit() -> None:
    rows = {"a": Measured(5.0, 10.0), "b": Measured(3.0, 4.0, "x"), "c": Measured(0.7, 1.0)}
    for order in itertools.permutations(rows):
        assert worst({name: rows[name] for name in order}) == Measured(3.0, 4.0, "largest: b")
    rows |= {"d": Measured(0.5, 0.1), "e": Measured(10.0, 9.0)}
    assert worst(rows) == Measured(0.5, 0.1, "largest: d")
    rows["f"] = Measured(INF, 1e9)
    assert worst(rows) == Measured(INF, 1e9, "largest: f")


@pytest.mark.parametrize("place", ["output 1", "output 2", "gradient 1", "gradient 2"])
def test_what_is_furthest_off_in_a_case_is_named_by_its_place(place: str) -> None:
    def truth(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a * b, a + b

    def ours(a: Tensor, b: Tensor, impl: str) -> tuple[Tensor, Tensor]:
        assert impl == "an impl"
        first, second = truth(a, b)
        if place == "output 1":
            first = first + 0.01 * first.detach()
        elif place == "output 2":
            second = second + 0.01 * second.detach()
        else:
            x = (a, b)[place == "gradient 2"]
            first = first + 0.01 * (x - x.detach())
        return first, second

    case = Case("x", [(4, 5), (4, 5)], ours, truth)
    found = kernels._measure(case, torch.float32, CPU, "an impl")
    assert found.said == f"largest: {place}"
    assert found.error > 100 * found.limit
    plain = case._replace(ours=lambda a, b, impl: truth(a, b), differentiable="out" not in place)
    right = kernels._measure(plain, torch.float32, CPU, "an impl")
    assert right.error <= right.limit < 1e-6


def test_a_verdict_has_all_that_was_found(monkeypatch) -> None:
    """No check begins after the end; at the very end one does."""
    times = (10.0, 12.346, 20.0, 20.5, 30.0, 31.0, 40.0, 41.25, 40.0, 40.5, 40.0, 41.0, 50.001)
    clock = iter(times)
    monkeypatch.setattr(check, "time", SimpleNamespace(monotonic=lambda: next(clock)))

    def raises(error: BaseException) -> Measured:
        raise error

    subjects: dict[str, Any] = {
        "right": lambda: Measured(0.5, 0.5, "in words"),
        "over": lambda: Measured(0.6, 0.5),
        "nan": lambda: Measured(math.nan, 0.5, "w"),
        "raises": lambda: raises(LookupError("two\nlines")),
        "exits": lambda: raises(SystemExit(3)),
        "infinite": lambda: Measured(INF, 0.25),
        "late": lambda: raises(LookupError()),
    }
    found = [*check.run([Check(n, f"of {n}", m) for n, m in subjects.items()], 50.0)]
    assert found == [
        Verdict("right", "of right", True, 0.5, 0.5, 2.35, "in words"),
        Verdict("over", "of over", False, 0.6, 0.5, 0.5, ""),
        Verdict("nan", "of nan", False, None, 0.5, 1.0, "w"),
        Verdict("raises", "of raises", False, None, None, 1.25, "LookupError: two lines"),
        Verdict("exits", "of exits", False, None, None, 0.5, "SystemExit: 3"),
        Verdict("infinite", "of infinite", False, None, 0.25, 1.0, ""),
        Verdict("late", "of late", None),
    ]
    clock = iter([50.0, 50.5])
    (last,) = check.run([Check("last", "x", lambda: Measured(0, 0))], 50.0)
    assert (last.passed, last.seconds) == (True, 0.5)
    assert Verdict("a", "b", None).said == "no time left"


@pytest.mark.parametrize("error", [Stopped(15), KeyboardInterrupt()])
def test_what_ends_the_doctor_is_no_verdict(error: BaseException) -> None:
    def ends() -> Measured:
        raise error

    with pytest.raises(type(error)):
        [*check.run([Check("x", "y", ends)], INF)]


# ---------------------------------------------------------------- requested checks


def _shown(monkeypatch, count: int) -> None:
    for module in (command, gpus, machine):
        monkeypatch.setattr(module, "gpu_count", lambda: count)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(
    ("gpus", "options", "found"),
    [
        (0, {}, ("cpu", 2)), (0, {"quick": True}, ("cpu", 2)), (0, {"ranks": 8}, ("cpu", 8)),
        (0, {"ranks": 1}, ("cpu", 1)), (0, {"ranks": 3, "quick": True}, ("cpu", 3)),
        (1, {}, ("cuda", 1)), (1, {"quick": True}, ("cuda", 1)), (6, {}, ("cuda", 6)),
        (8, {}, ("cuda", 8)), (9, {}, ("cuda", 8)), (9, {"quick": True}, ("cuda", 2)),
        (9, {"ranks": 5, "quick": True}, ("cuda", 5)), (9, {"device": "cpu"}, ("cpu", 2)),
        (8, {"ranks": 8}, ("cuda", 8)),
    ],
)  # fmt: skip
def test_the_device_and_the_ranks_are_those_that_there_are(
    monkeypatch, gpus: int, options: dict, found: tuple
) -> None:
    _shown(monkeypatch, gpus)
    assert command.half(DoctorConfig(**options)) == found
    for wrong in (0, 9, -1):
        with pytest.raises(ValueError, match=rf"ranks must be 1\.\.8, got {wrong}$"):
            command.half(DoctorConfig(**options | {"ranks": wrong}))


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_kind_of_check_is_asked_for_in_its_precisions(
    monkeypatch, device: str, quick: bool
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked: dict[str, tuple] = {}
    monkeypatch.setattr(machine, "copies", lambda: iter(["copy"]))
    monkeypatch.setattr(kernels, "family_checks", lambda *of: asked.update(families=of) or ["f"])
    monkeypatch.setattr(ranks, "fused", lambda *of: asked.update(fused=of) or ["p"])
    monkeypatch.setattr(ranks, "axes", lambda *of: asked.update(axes=of) or ["a"])
    assert [*command.checks(device, 5, quick)] == ["copy", "f", "p", "a"]
    every = ("bf16", "fp16", "fp32") if device == "cuda" else ("fp32", "fp16")
    low = every[:1] if quick else every
    where = torch.device("cuda", 0) if device == "cuda" else CPU
    both = ("fp32", "bf16") if device == "cuda" and not quick else ("fp32",)
    assert asked == {"families": (where, low), "fused": (device, 5, low),
                     "axes": (device, 5, both)}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_axis_is_proven_by_a_layout_of_its_name(monkeypatch, device: str) -> None:
    monkeypatch.setattr("warpweave.launch.devices.choose_backend", lambda *_: "nccl")
    found = {c.name: c for c in ranks.axes(device, 3, ("fp32", "bf16"))}
    layouts = {name: c.measure.args[2] for name, c in found.items()}
    words = ["one device", "dp, ZeRO 3", "tp", "tp, sequence parallel, chunked", "cp, ring",
             "cp, Ulysses", "pp, 1F1B", "pp, interleaved"]  # fmt: skip
    words += ["tp, fused"] * (device == "cuda")
    assert set(layouts) == {f"{w}, {dtype}" for w in words for dtype in ("fp32", "bf16")}
    for name, layout in layouts.items():
        assert f"{layout.dtype}" in name
        assert (layout.device, layout.impl) == (device, "triton" if device == "cuda" else "torch")
        assert found[name].against == f"the plain model on one {device}"
        axis = name[:2]
        sizes = {a: layout.mesh.size(a) for a in ("dp", "tp", "cp", "pp")}
        assert sizes == {a: 3 if a == axis else 1 for a in sizes}
        assert (layout.zero == 3) == ("ZeRO 3" in name)
        assert layout.sequence_parallel == name.startswith(("tp, sequence", "tp, fused"))
        overlap = next((w for w in ("chunked", "fused") if w in name), "bulk")
        assert layout.overlap == overlap
        strategies = {"ring": "ring", "Ulysses": "ulysses"}
        assert layout.strategy == strategies.get(name.split(", ")[1], "auto")
        assert layout.packed == ("Ulysses" in name)
        assert layout.schedule == ("interleaved" if "interleaved" in name else "1f1b")
    numbers = [c.measure.args[1] for c in found.values()]
    assert numbers == [*range(len(found))]
    worlds = [layout.mesh.world for layout in layouts.values()]
    assert worlds == sorted(worlds, reverse=True)


def test_fused_products_are_checked_in_every_dtype_and_collectives_in_one() -> None:
    names = [(c.name, c.against) for c in ranks.fused("cpu", 4, ("fp32", "fp16"))]
    assert names == [
        *((f"{n} on 4 ranks, {d}", "reference, all ranks' terms") for d in ("fp32", "fp16")
          for n in ranks.PRODUCTS),
        *((f"{n} on 4 ranks, fp32", "its sum or parts") for n in ranks.COLLECTIVES),
    ]  # fmt: skip


def test_each_check_of_several_ranks_has_the_row_of_its_own_item(monkeypatch) -> None:
    class Rows:
        def __init__(self, items: list, start: object) -> None:
            self.items = items

        def __getitem__(self, number: int) -> dict:
            said = "; ".join(self.items[number])
            return {"error": number, "limit": len(self.items), "said": said}

    monkeypatch.setattr(ranks, "_RankRows", Rows)
    made = [*ranks.fused("cpu", 3, ("fp32", "fp16"))]
    for number, one in reversed([*enumerate(made)]):  # in any order, once all are made
        error, limit, said = one.measure()
        assert (error, limit) == (number, 3 * 2 + 4)
        name, dtype = said.split("; ")
        assert one.name == f"{name} on 3 ranks, {dtype}"


def test_nothing_is_begun_after_ten_minutes_or_one(monkeypatch) -> None:
    """Times are measured if everything was checked, and not in a quick run."""
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    ends: list[float] = []
    passed: list[bool | None] = [True, True]
    monkeypatch.setattr(command, "checks", lambda *_: iter(["one", "two"]))
    monkeypatch.setattr(command, "times", lambda device: [{"op": device}])

    def run(todo, until):
        ends.append(until)
        return (Verdict(name, "x", p) for name, p in zip(todo, passed, strict=True))

    monkeypatch.setattr(command, "run_checks", run)
    for quick, seconds in ((False, 600.0), (True, 60.0)):
        clock = itertools.count(100.0, 7.25)
        found = command.examine("cuda", 3, quick)
        assert ends.pop() == 100.0 + seconds
        assert (found["half"], found["ranks"], found["passed"]) == ("cuda", 3, True)
        assert found["times"] == ([] if quick else [{"op": "cuda"}])
        assert found["seconds"] == 7.2
        assert [row["name"] for row in found["checks"]] == ["one", "two"]
    passed[:] = [True, None]
    found = command.examine("cuda", 3, False)
    assert (found["passed"], found["left_out"], found["failed"]) == (None, 1, [])
    assert found["times"] == []
    passed[:] = [False, True]
    found = command.examine("cuda", 3, False)
    assert (found["passed"], found["left_out"], found["failed"]) == (False, 0, ["one"])
    assert found["times"] == [{"op": "cuda"}]
    monkeypatch.undo()
    assert command.times("cpu") == []


def test_truncated_line_is_no_result_and_ranks_restart_for_the_rest() -> None:
    starts: list[str] = []

    def start(items, path) -> None:
        starts.append("".join(items))
        whole = items[:1] if len(starts) == 1 else items
        with open(path, "a") as file:
            file.write("".join(json.dumps({"name": item}) + "\n" for item in whole))
            if len(starts) == 1:
                file.write('{"name": "b"}')
                raise SystemExit(3)

    rows = ranks._RankRows("abcd", start)
    assert rows[0] == {"name": "a"}
    words = r"before they produced this result \(exit status 3, see above\)"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=words):
            rows[1]
    assert [rows[2], rows[3], rows[0]] == [{"name": "c"}, {"name": "d"}, {"name": "a"}]
    assert starts == ["abcd", "cd"]
    late = ranks._RankRows("abcd", start)  # the first ones were not requested
    assert (late[2], starts[-1]) == ({"name": "c"}, "cd")


def test_a_proof_of_another_layout_than_was_asked_for_is_an_error() -> None:
    (first, *_) = ranks.axes("cpu", 2, ("fp32",))
    _, _, layout = first.measure.args
    errors = dict.fromkeys(KINDS, 1.0) | {"norm": 3.0, "where": "x on rank 1", "relative": {}}
    row = {"layout": str(layout), "errors": errors}
    assert ranks._axis({7: row}, 7, layout) == Measured(3.0, LIMITS["fp32"], "largest: x on rank 1")
    with pytest.raises(RuntimeError, match=r"layout dp=2 .*, got results for another$"):
        ranks._axis({7: row | {"layout": "another"}}, 7, layout)


def test_a_rank_says_why_it_fails_and_leaves_its_group_when_it_is_done(monkeypatch, capsys):
    session = Session(torch.device("cpu"), 0, 1, None, 60.0, Mesh())
    told: list = []
    monkeypatch.setattr(ranks, "join", lambda *of, **how: told.append((of, how)) or session)
    monkeypatch.setattr(session, "close", lambda: told.append("closed"))
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    monkeypatch.setattr("warpweave.launch.session.leave", sys.exit)
    joined = (Mesh(tp=2),), {"timeout": ranks.TIMEOUT, "backend": "gloo", "port": 7}
    items = [("all-reduce", "fp32")]
    monkeypatch.setattr(ranks, "measure_items", lambda *of: told.append(of))
    ranks.measure_rank("cpu", 2, items, "path", 7)
    assert told == [joined, 1, (session, items, "path"), "closed"]
    monkeypatch.setattr(ranks, "measure_items", lambda *_: {}["all-reduce"])
    with pytest.raises(SystemExit) as ended:
        ranks.measure_rank("cpu", 2, items, "path", 7)
    assert ended.value.code == 1
    assert "warpweave: KeyError: 'all-reduce'" in capsys.readouterr().err


@pytest.mark.parametrize("worst", [0, 1, 2])
@pytest.mark.parametrize("error", [5.0, math.nan, INF])
def test_the_row_of_an_item_is_that_of_the_rank_which_is_worst(
    monkeypatch, tmp_path, error: float, worst: int
) -> None:
    found = [[0.5, 1.0, f"rank {rank}"] for rank in range(3)]
    found[worst][0] = error
    monkeypatch.setattr(ranks, "_collective", lambda *of: Measured(*found[0]))
    monkeypatch.setattr(ranks, "exchange", lambda own, group: found)
    mesh = SimpleNamespace(connect=lambda kind: SimpleNamespace(group=lambda axis: None))
    session = SimpleNamespace(rank=0, mesh=mesh, device=CPU, beat=lambda *of: None)
    ranks.measure_items(session, [("all-reduce", "fp32")], str(tmp_path / "rows"))
    assert json.loads((tmp_path / "rows").read_text())["said"] == f"rank {worst}"


# ---------------------------------------------------------------- the page


@pytest.mark.parametrize("half", ["cpu", "cuda"])
def test_the_page_says_all_that_was_found(monkeypatch, half: str) -> None:
    monkeypatch.setattr(machine, "topology", lambda: "GPU0 X\nGPU1 NV18")
    rows = [
        Verdict("a", "of a", True, 0.0123, 1e-07, 1.5, "12 GB/s"),
        Verdict("b|c", "of b", False, None, 0.5, 2.25, "largest: x"),
        Verdict("d", "of d", None),
    ]
    found = {
        "command": "warpweave doctor --quick", "half": half, "ranks": 4, "seconds": 61.6,
        "versions": {"torch": "2.9", "liger-kernel": None}, "devices": ["GPU 0: x", "GPU 1: y"],
        "remarks": ["odd"], "failed": ["b|c"], "left_out": 1,
        "checks": [vars(row) for row in rows],
        "times": [{"op": "gemm", "ours": 1.25, "cuBLAS": "no"}, {"op": "adamw", "fused": 2.0}],
    }  # fmt: skip
    lines = command.page(found).splitlines()
    cpu = ["CPU only: kernels were interpreted, ranks used gloo, no kernel was timed.", ""]
    gpu = ["", "```", "GPU0 X", "GPU1 NV18", "```"]
    assert lines == [
        "# warpweave doctor", "",
        "`warpweave doctor --quick`, 62 s: **1 of 3 checks passed**, 1 failed, 1 left out. "
        f"{half}, 4 ranks.", "",
        *(cpu if half == "cpu" else []),
        "torch 2.9, liger-kernel -", "", "* GPU 0: x", "* GPU 1: y", "* **odd**",
        *(gpu if half == "cuda" else []), "",
        "| check | compared with | error | limit |  | s |  |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| a | of a | 0.012 | 1e-07 | ok | 1.5 | 12 GB/s |",
        "| b/c | of b |  | 0.5 | **FAILED** | 2.25 | largest: x |",
        "| d | of d |  |  | left out | 0.0 | no time left |", "",
        "Milliseconds, forward, bf16 (AdamW: fp32), L2 flushed before each call:", "",
        "| op | ours | cuBLAS | fused |", "| --- | --- | --- | --- |",
        "| gemm | 1.25 | no |  |", "| adamw |  |  | 2.0 |",
    ]  # fmt: skip
    assert "Milliseconds" not in command.page(found | {"times": []})
    monkeypatch.setattr(machine, "topology", lambda: "")
    assert "```" not in command.page(found)


# ---------------------------------------------------------------- the machine


def test_what_a_machine_is_is_said_in_words(monkeypatch) -> None:
    _shown(monkeypatch, 2)
    chips = [SimpleNamespace(name=f"H{n}", major=9 + n, minor=n, multi_processor_count=132 + n)
             for n in range(2)]  # fmt: skip
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "get_device_properties", lambda n: chips[n])
    monkeypatch.setattr(cuda, "mem_get_info", lambda n: (70.04e9 + n * 1e9, 80e9))
    monkeypatch.setattr(cuda, "nccl", SimpleNamespace(version=lambda: (2, 27, 3)))
    monkeypatch.setattr(machine, "_said", lambda *words: f"{words[0]} {words[1]}\nsecond")
    assert machine.devices() == [
        "GPU 0: H0, sm_90, 132 multiprocessors, 70.0 of 80.0 GB free",
        "GPU 1: H1, sm_101, 133 multiprocessors, 71.0 of 80.0 GB free",
    ]
    found = machine.versions()
    assert (found["NCCL"], found["CUDA"]) == ("2.27.3", torch.version.cuda)
    assert found["driver"] == "nvidia-smi --query-gpu=driver_version"
    assert machine.topology() == "nvidia-smi topo\nsecond\nnvidia-smi topo\nsecond"
    for known, said in ((("-m",), "-m"), (("a",), "a"), ((), ""), (("-m", "a"), "-m\na")):
        shown = {word: word for word in known}
        monkeypatch.setattr(machine, "_said", lambda *words, of=shown: of.get(words[-1], ""))
        assert machine.topology() == said
    checks = [(c.name, c.measure.args) for c in machine.copies(64)]
    ends = [torch.device("cuda", n) for n in range(2)]
    assert checks == [("copy GPU 0 -> 1", (*ends, 64)), ("copy GPU 1 -> 0", (*ends[::-1], 64))]
    _shown(monkeypatch, 4)
    pairs = ["0 -> 1", "1 -> 0", "0 -> 2", "2 -> 0", "0 -> 3", "3 -> 0"]
    assert [c.name[9:] for c in machine.copies()] == pairs
    _shown(monkeypatch, 0)
    (line,) = machine.devices()
    assert line.startswith("CPU: ")
    assert machine.versions()["NCCL"] is None
    assert [*machine.copies()] == []
    monkeypatch.setattr(machine, "PACKAGES", ("no-such-package-here", "torch"))
    monkeypatch.setattr(machine, "_said", lambda *words: "")
    found = machine.versions()
    assert (found["no-such-package-here"], found["driver"], found["commit"]) == (None, None, None)
    assert [*found][:4] == ["warpweave", "commit", "python", "torch"]
    monkeypatch.setattr("sys.argv", ["/bin/warpweave", "doctor", "--quick"])
    summary = machine.summary()
    assert summary["command"] == "warpweave doctor --quick"
    assert [*summary] == ["command", "versions", "devices", "remarks"]


@pytest.mark.parametrize(("taken", "busy"), [(0.0, False), (7.9e9, False), (8.1e9, True)])
def test_a_gpu_is_busy_when_others_hold_more_than_a_tenth(monkeypatch, taken, busy) -> None:
    _shown(monkeypatch, 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (80e9 - taken, 80e9))
    assert bool(machine.remarks()) == busy


def test_a_command_that_fails_or_is_not_there_says_nothing(monkeypatch) -> None:
    assert machine._said("echo", " a ", "b") == "a  b"
    assert machine._said("printf", r"\033[4mGPU0\033[0m X [1m") == "GPU0 X [1m"  # no colors
    assert machine._said("false") == machine._said("no-such-command-here") == ""
    failed = subprocess.CompletedProcess([], 1, stdout="half an answer")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert machine._said("echo") == ""


def _speeds(rank: int) -> list[tuple[float, str]]:
    return [ranks._collective(name, CPU, dist.group.WORLD)[::2] for name in ranks.COLLECTIVES]


@pytest.mark.parametrize("world", [2, 3])
def test_the_speed_of_a_link_is_by_the_bytes_that_leave_a_rank(monkeypatch, world: int) -> None:
    """Each message takes a microsecond here, so GB/s are kilobytes."""
    clocks: dict[int, itertools.count] = defaultdict(itertools.count)  # one per rank
    clock = SimpleNamespace(perf_counter=lambda: next(clocks[threading.get_ident()]) * 1e-6)
    monkeypatch.setattr(ranks, "time", clock)
    whole = 4 * (2**18 // world * world) / 1e3
    shares = (2 * (world - 1) / world, (world - 1) / world, (world - 1) / world, 1)
    for found in run_threads(world, _speeds):
        for (wrong, said), share in zip(found, shares, strict=True):
            assert wrong == 0
            number, unit = said.split()
            assert (float(number), unit) == (pytest.approx(share * whole, abs=0.02), "GB/s")


def _cut_short(rank: int) -> list[float]:
    return [ranks._collective(name, CPU, dist.group.WORLD).error for name in ranks.COLLECTIVES[:3]]


def test_a_collective_that_is_cut_short_is_all_wrong(monkeypatch) -> None:
    for name in ("start_all_reduce_", "start_all_gather", "start_reduce_scatter"):
        start = getattr(ranks, name)

        def cut(x: Tensor, group: dist.ProcessGroup, start=start) -> SimpleNamespace:
            pending = start(x, group)
            return SimpleNamespace(wait=lambda: pending.wait()[:-1])

        monkeypatch.setattr(ranks, name, cut)
    assert run_threads(2, _cut_short) == [[1.0] * 3] * 2


# ---------------------------------------------------------------- times


def test_what_is_timed_side_by_side_computes_the_same() -> None:
    """In bfloat16 they agree to a few hundredths of the largest element."""
    torch.manual_seed(0)
    names = {}
    with torch.no_grad():
        for op, calls in times.timed_ops(CPU, times.LayerSizes(8, 32, 48, 24, 2)):
            names[op] = [*calls]
            if op == "adamw":
                continue  # works in place
            ours, other = (calls[name]() for name in [*calls][:2])
            ours = ours[0] if isinstance(ours, tuple) else ours
            if op == "attention causal":
                other = other.transpose(1, 2)
            assert relative_error(ours.float(), other.float().reshape(ours.shape)) < 0.05, op
    assert {op: of[1] for op, of in names.items()} == {
        "rms_norm": "torch", "swiglu": "torch", "gemm": "cuBLAS", "mlp swiglu": "cuBLAS",
        "attention causal": "SDPA", "cross entropy": "torch", "linear cross entropy": "torch",
        "adamw": "torch fused",
    }  # fmt: skip
    assert all(of[0] == "warpweave" for of in names.values())


def test_a_time_is_the_median_of_its_rounds(monkeypatch) -> None:
    taken = iter([3.0, 1.0, 2.00004, 9.0, 0.5] * 2)
    ops = iter([("one", {"ours": list}), ("two", {"ours": list})])
    monkeypatch.setattr(times, "timed_ops", lambda device, sizes: ops)
    rows = times.time_ops(CPU, lambda call: next(taken), times.LayerSizes(), rounds=5)
    assert [*rows] == [{"op": "one", "ours": 2.0}, {"op": "two", "ours": 2.0}]
    assert json.dumps(times.LayerSizes()) == "[4096, 4096, 14336, 32000, 32]"
