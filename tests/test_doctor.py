"""The doctor: every check passes, each fails if its subject is broken, and the page reports it.

Faults are planted in what a check calls: in one element of a result, or in the gradient only.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from plants import Plant, planted
from ranks import run_ranks

from warpweave.kernels import cases
from warpweave.launch import devices as gpus
from warpweave.launch.interrupt import Stopped
from warpweave.launch.session import Session
from warpweave.machine.doctor import command, kernels, machine, options, ranks, times
from warpweave.machine.doctor.check import Check, Measured, Verdict, run
from warpweave.machine.doctor.options import DoctorConfig
from warpweave.parallel.mesh import Mesh
from warpweave.prove.proof import KINDS

CPU = torch.device("cpu")
LATER = math.inf


def _off(y: torch.Tensor) -> torch.Tensor:
    """Return `y` with an error of a thousandth of the largest element in one element."""
    at = torch.zeros_like(y)
    at.view(-1)[-1] = 1e-3 * y.detach().abs().max()
    return y + at


def _wrong(right):
    """Make the first result wrong."""

    def call(*args, **how):
        found = right(*args, **how)
        return (_off(found[0]), *found[1:]) if isinstance(found, tuple) else _off(found)

    return call


def _wrong_gradient(right):
    """Keep the first result, but make its gradient a thousandth too large."""

    def call(*args, **how):
        found = right(*args, **how)
        first, *rest = found if isinstance(found, tuple) else (found,)
        first = 1.001 * first - 0.001 * first.detach()
        return (first, *rest) if rest else first

    return call


def _wrong_in_place(right):
    def call(master, *args, **how):
        right(master, *args, **how)
        master.copy_(_off(master))

    return call


def _wrong_steps(right):
    def steps(*args):
        found = yield from right(*args)
        return (_off(found[0]), *found[1:]) if isinstance(found, tuple) else _off(found)

    return steps


# What is planted in `kernels.cases` -> the fault, and the beginning of the rows that call it.
KERNELS = {
    "rms_norm": (_wrong, "rms_norm"), "layer_norm": (_wrong_gradient, "layer_norm"),
    "activate": (_wrong, "activation"), "dropout": (_wrong_gradient, "dropout"),
    "adamw_step": (_wrong_in_place, "adamw"), "gemm": (_wrong, "gemm,"),
    "fused_gemm": (_wrong, "gemm with"), "mlp": (_wrong_gradient, "mlp"),
    "qkv_rope": (_wrong, "qkv"), "apply_rope": (_wrong_gradient, "rope"),
    "attention": (_wrong, "attention"), "cross_entropy": (_wrong, "cross entropy"),
    "linear_cross_entropy": (_wrong_gradient, "linear cross entropy"),
    "all_gather_gemm_steps": (_wrong_steps, "all-gather"),
    "gemm_reduce_scatter_steps": (_wrong_steps, "gemm -> reduce"),
    "gemm_all_reduce_steps": (_wrong_steps, "gemm -> all"),
}  # fmt: skip


def test_every_kernel_family_is_right_in_the_interpreter():
    verdicts = [*run(kernels.family_checks(CPU, ("fp32",)), LATER)]
    assert len(verdicts) == 23
    assert [v for v in verdicts if not v.passed] == []
    assert all(0 < v.error <= v.limit < 2e-6 for v in verdicts)


def test_a_fault_in_one_family_fails_its_rows_and_no_others():
    def failed(*plants: Plant) -> set[str]:
        """Return failures on the torch path, which is fast; fused products always use Triton."""
        steps = any(place.name.endswith("_steps") for place in plants)
        with planted(*plants):
            every = kernels.family_checks(CPU, ("fp32",), "torch")
            checks = [check for check in every if steps == ("->" in check.name)]
            assert len(checks) == (3 if steps else 20)
            return {verdict.name for verdict in run(checks, LATER) if not verdict.passed}

    assert failed() == set()
    for name, (plant, begin) in KERNELS.items():
        wrong = failed(Plant(cases, name, plant))
        families = {check.name for check in kernels.family_checks(CPU, ("fp32",), "torch")}
        assert wrong == {row for row in families if row.startswith(begin)} != set(), name


# -------------------------------------------------------------------------- over ranks

ITEMS = [(name, "fp32") for name in (*ranks.PRODUCTS, *ranks.COLLECTIVES)]


def _pending(right):
    """Make the result of a wait wrong."""

    def start(*args):
        pending = right(*args)
        return SimpleNamespace(wait=lambda: _off(pending.wait()))

    return start


ON_RANKS = {
    "all_gather_gemm": (_wrong, "all-gather -> gemm"),
    "gemm_reduce_scatter": (_wrong, "gemm -> reduce-scatter"),
    "gemm_all_reduce": (_wrong, "gemm -> all-reduce"),
    "start_all_reduce_": (_pending, "all-reduce"), "start_all_gather": (_pending, "all-gather"),
    "start_reduce_scatter": (_pending, "reduce-scatter"),
    "start_exchange": (_pending, "send and receive"),
}  # fmt: skip


def _measured(rank: int, folder: str) -> None:
    """Measure all items on two ranks, and again with each fault on the second of them."""
    store = dist.distributed_c10d._get_default_store()
    session = Session(CPU, rank, 2, store, 60.0, Mesh(tp=2))
    for name, (plant, _) in ({"healthy": (None, "")} | ON_RANKS).items():
        with planted(*([Plant(ranks, name, plant)] if plant and rank == 1 else [])):
            ranks.measure_items(session, ITEMS, f"{folder}/{name}")


def test_a_fault_of_one_rank_in_a_product_or_a_collective_fails_its_row(tmp_path):
    run_ranks(2, _measured, str(tmp_path))
    for name, (_, of) in ({"healthy": (None, "")} | ON_RANKS).items():
        text = (tmp_path / name).read_text()
        rows = [Measured(**json.loads(line)) for line in text.splitlines()]
        assert len(rows) == len(ITEMS)
        wrong = [item for (item, _), row in zip(ITEMS, rows) if not row.error <= row.limit]
        assert wrong == [of] * bool(of), name


def _forgets(**options):
    """Plant: an option of the caller is replaced."""
    return lambda right: lambda *given, **how: right(*given, **(how | options))


def _ignored_is_zero(right):
    """Plant: tokens without a label have the first class."""
    return lambda *x, labels, **how: right(*x, labels=labels.clamp(min=0), **how)


def _short_numbers(right):
    """Plant: token numbers are truncated to 32 bits."""

    def call(x, drop, **how):
        return right(x, drop._replace(tokens=drop.tokens % 2**32), **how)

    return call


@pytest.mark.parametrize(
    ("name", "plant", "begin"),
    [
        ("rms_norm", _forgets(eps=1e-4), "rms_norm"),
        ("layer_norm", _forgets(eps=1e-4), "layer_norm"),
        ("dropout", _short_numbers, "dropout"),
        ("adamw_step", _forgets(weight_decay=0.0), "adamw"),
        ("adamw_step", _forgets(eps=0.0), "adamw"),
        ("adamw_step", _forgets(step=torch.tensor(5.0)), "adamw"),
        ("fused_gemm", _forgets(activation=None), "gemm with"),
        ("fused_gemm", _forgets(residual=None), "gemm with"),
        ("attention", _forgets(window=None), "attention of documents"),
        ("attention", _forgets(documents=None), "attention of documents"),
        ("attention", _forgets(softcap=None), "attention softcap"),
        ("attention", _forgets(dropout=0.0), "attention softcap"),
        ("attention", _forgets(causal=True), "attention softcap"),
        ("attention", _forgets(causal=False), "attention causal"),
        *[
            (name, plant, begin)
            for name, begin in (
                ("cross_entropy", "cross entropy"), ("linear_cross_entropy", "linear cross"),
            )
            for plant in (_ignored_is_zero, _forgets(label_smoothing=0.0), _forgets(z_loss=0.0))
        ],
    ],
)  # fmt: skip
def test_an_option_that_is_forgotten_fails_its_row(name, plant, begin):
    with planted(Plant(cases, name, plant)):
        every = kernels.family_checks(CPU, ("fp32",), "torch")
        (verdict,) = run([check for check in every if check.name.startswith(begin)], LATER)
    assert (verdict.passed, verdict.error is not None) == (False, True), verdict


def _axes(monkeypatch, dies_at=(), wrong=(), refuses=False) -> tuple[list[Verdict], list[int]]:
    """Return the axes' verdicts by name, with ranks that die before some layouts and are wrong in
    others, and how many layouts each start of the ranks was given."""
    starts: list[int] = []

    def launch(entry, args, mesh, **_):
        layouts, _, path = args
        starts.append(len(layouts))
        if refuses and len(starts) == 1:
            raise OSError("no port")
        for layout in layouts:
            name = names[str(layout)]
            if name in dies_at:
                raise SystemExit(7)
            errors = dict.fromkeys(KINDS, 99.0 if name in wrong else 1.0)
            row = {"layout": str(layout), "errors": errors | {"where": "w", "relative": {}}}
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")

    monkeypatch.setattr(ranks, "launch", launch)
    checks = [*ranks.axes("cpu", 2, ("fp32",))]
    names = {str(check.measure.args[2]): check.name for check in checks}
    return [*run(checks, LATER)], starts


def test_wrong_or_crashing_axis_fails_and_the_other_axes_are_still_proven(monkeypatch):
    healthy, starts = _axes(monkeypatch)
    assert all(v.passed and v.error == 1.0 for v in healthy)
    assert starts == [8]
    found, starts = _axes(monkeypatch, {"tp, fp32", "pp, 1F1B, fp32"}, {"cp, ring, fp32"})
    failed = {v.name: v.said for v in found if not v.passed}
    assert list(failed) == ["tp, fp32", "cp, ring, fp32", "pp, 1F1B, fp32"]
    assert "exit status 7" in failed["tp, fp32"]
    assert starts == [8, 6, 2]
    first, *others = _axes(monkeypatch, refuses=True)[0]
    assert (first.passed, first.said) == (False, "OSError: no port")
    assert all(verdict.passed for verdict in others)


def test_one_rank_has_no_axes_and_no_fused_products():
    assert [c.name for c in ranks.axes("cpu", 1, ("fp32",))] == ["one device, fp32"]
    assert [*ranks.fused("cpu", 1, ("fp32",))] == []


# -------------------------------------------------------------------------- the machine, times


def test_a_copy_that_arrives_wrong_fails():
    assert machine._copy(CPU, CPU, 1 << 12).error == 0.0
    copy = torch.Tensor.copy_
    with mock.patch.object(torch.Tensor, "copy_", lambda x, y: copy(x, y)[-1:].add_(1)):
        assert machine._copy(CPU, CPU, 1 << 12).error == 8 / (1 << 12)


def test_what_is_odd_about_gpus_is_said_in_a_line_each(monkeypatch):
    names = ["A100", "H100 MIG 1g.10gb", "A100"]
    monkeypatch.setattr(machine, "gpu_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda n: names[n])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda n: (79e9 if n else 20e9, 80e9))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    kinds, *others = machine.remarks()
    assert "different kinds" in kinds
    for remark, begin in zip(others, (
        "GPU 0 is busy (60.0 of 80.0 GB", "GPU 0 has no peer access to [2]",
        "GPU 1 is a MIG slice", "GPU 2 has no peer access to [0]",
    ), strict=True):  # fmt: skip
        assert remark.startswith(begin)


def test_every_kernel_is_timed_beside_what_else_computes_it():
    def timer(call):
        call()
        return 0.5

    rows = [*times.time_ops(CPU, timer, times.LayerSizes(8, 32, 16, 24, 2), rounds=1)]
    assert len(rows) == 8
    for row in rows:
        assert len(row) >= 3
        assert {k: v for k, v in row.items() if k != "op" and v != 0.5} == {}, row


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError])
def test_a_call_that_cannot_run_here_stands_in_its_row(monkeypatch, error):
    def refuses():
        raise error("not on\nthis machine")

    ops = iter([("one", {"ours": refuses, "torch": list}), ("two", {"ours": list})])
    monkeypatch.setattr(times, "timed_ops", lambda *_: ops)
    assert [*times.time_ops(CPU, lambda call: 0.5, times.LayerSizes(), rounds=1)] == [
        {"op": "one", "ours": "not on this machine", "torch": 0.5}, {"op": "two", "ours": 0.5},
    ]  # fmt: skip


# -------------------------------------------------------------------------- the command


def _check(name: str, found) -> Check:
    def measure():
        if isinstance(found, BaseException):
            raise found
        return Measured(found, 1.0, "in words")

    return Check(name, "the truth", measure)


def _main(monkeypatch, capsys, *argv: str, checks=(), left=LATER):
    """Return exit status, page and JSON of the command with these checks."""
    monkeypatch.setattr(command, "checks", lambda *of: iter(checks))
    monkeypatch.setattr(command, "MINUTES", left / 60)
    with pytest.raises(SystemExit) as caught:
        command.run(options.parse([*argv]))
    *page, line = capsys.readouterr().out.splitlines()
    return caught.value.code, "\n".join(page), json.loads(line)


def test_the_page_and_the_line_say_what_failed_and_the_exit_status_is_one(
    monkeypatch, capsys, tmp_path
):
    checks = [_check("good", 0.5), _check("bad | one", 2.0)]
    out = ("--out", str(tmp_path / "new"))
    code, page, line = _main(monkeypatch, capsys, *out, checks=checks)
    assert (code, line["passed"], line["failed"]) == (1, False, ["bad | one"])
    assert "| good | the truth | 0.5 | 1 | ok |" in page
    assert "| bad / one | the truth | 2 | 1 | **FAILED** |" in page
    assert "**1 of 2 checks passed**, 1 failed, 0 left out. cpu, 2 ranks." in page
    assert (tmp_path / "new" / "doctor.md").read_text().rstrip() == page.rstrip()
    assert json.loads((tmp_path / "new" / "doctor.json").read_text()) == line
    code, _, line = _main(monkeypatch, capsys, checks=checks[:1])
    assert (code, line["passed"], line["times"]) == (0, True, [])
    code, page, line = _main(monkeypatch, capsys, checks=checks, left=-1)
    assert (code, line["passed"], line["left_out"]) == (0, None, 2)
    good, bad, stops = *checks, _check("stopped", Stopped(2))
    for begun, passed in ((good, None), (bad, False)):  # a failure remains a failure
        code, _, line = _main(monkeypatch, capsys, checks=[begun, stops, good])
        assert (code, line["stopped"], line["passed"], line["left_out"]) == (130, True, passed, 2)


def _refused(config: DoctorConfig, capsys) -> str:
    with pytest.raises(SystemExit) as caught:
        command.run(config)
    error = capsys.readouterr().err
    assert (caught.value.code, error.strip().count("\n")) == (2, 0)
    return error


def test_what_this_machine_does_not_have_is_said_in_one_line(monkeypatch, capsys, tmp_path):
    assert "sees no GPU" in _refused(DoctorConfig(device="cuda"), capsys)
    assert "ranks must be 1..8, got 9" in _refused(DoctorConfig(ranks=9), capsys)
    (tmp_path / "file").touch()
    assert "file" in _refused(DoctorConfig(out=tmp_path / "file"), capsys)
    with mock.patch.dict(os.environ, RANK="0", WORLD_SIZE="2"):
        assert "without torchrun" in _refused(DoctorConfig(), capsys)
    for module in (command, gpus):
        monkeypatch.setattr(module, "gpu_count", lambda: 2)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    assert "2 GPU(s) are too few for 4 ranks" in _refused(DoctorConfig(ranks=4), capsys)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert "no NCCL, which 2 ranks on GPUs need" in _refused(DoctorConfig(), capsys)
    assert command.half(DoctorConfig(ranks=1)) == ("cuda", 1)
    assert command.half(DoctorConfig(device="cpu", quick=True)) == ("cpu", 2)


def test_a_quick_check_is_of_one_dtype_and_the_kernels_are_interpreted(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    quick = [check.name for check in command.checks("cpu", 2, True)]
    assert os.environ["TRITON_INTERPRET"] == "1"
    every = [check.name for check in command.checks("cpu", 2, False)]
    assert not [name for name in quick if "fp16" in name]
    assert set(quick) < set(every)
    assert len(every) == 23 * 2 + 3 * 2 + 4 + 8


@pytest.mark.parametrize("arguments", [[], ["--device", "cpu"]])
def test_the_command_on_a_cpu_has_its_kernels_interpreted(arguments):
    """It does so without the user's TRITON_INTERPRET, which other processes of the tests have."""
    code = (
        "import sys\n"
        "from warpweave.machine.doctor.options import parse\n"
        "parse(sys.argv[1:])\n"
        "import warpweave.machine.doctor.command\n"
        "from warpweave.kernels.runtime import dispatch\n"
        "sys.exit(not dispatch.INTERPRET)\n"
    )
    environment = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-P", "-c", code, *arguments], env=environment)
    assert found.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "driver", "interpreted"),
    [
        ([], False, True), ([], True, False),
        (["--device", "cpu"], False, True), (["--device", "cpu"], True, True),
        (["--device", "cuda"], False, False), (["--device", "cuda"], True, False),
    ],
)  # fmt: skip
def test_kernels_are_interpreted_on_a_cpu_unless_the_user_says_otherwise(
    arguments, driver, interpreted, monkeypatch
):
    monkeypatch.setattr(options, "DRIVER", SimpleNamespace(exists=lambda: driver))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    options.parse(arguments)
    assert os.environ.get("TRITON_INTERPRET") == ("1" if interpreted else None)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    options.parse(arguments)
    assert os.environ["TRITON_INTERPRET"] == "0"
