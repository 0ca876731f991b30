"""The programs of examples/ do what they claim, and their numbers are current."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import QuickProcesses, run_ranks

from warpweave.launch.ranks import launch
from warpweave.parallel.mesh import Mesh

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
HF = pytest.mark.skipif(find_spec("transformers") is None, reason="an extra of its own")


@HF
def test_a_fine_tuned_model_has_transformers_losses_and_loads_without_us(capsys):
    program = runpy.run_path(str(EXAMPLES / "finetune_hf.py"))
    figures = program["main"](program["Config"](steps=20))
    assert "rms_norm" in capsys.readouterr().out
    assert figures["first_loss"] - figures["last_loss"] > 1
    assert figures["from_transformers_losses"] < 1e-5
    assert figures["saved_and_loaded_logits"] < 1e-5


def _fsdp2(rank: int) -> dict[str, float]:
    return runpy.run_path(str(EXAMPLES / "fsdp2_hf.py"))["compare"]()


@HF
def test_fsdp2_around_a_changed_model_is_one_process_with_the_whole_batch():
    for figures in run_ranks(2, _fsdp2):
        assert figures["share_of_parameters"] == pytest.approx(0.5, abs=0.01)
        assert figures["first_loss"] - figures["last_loss"] > 0.5
        assert figures["from_one_process"] < 1e-5


def test_a_long_context_is_trained_on_and_its_strategies_are_listed(capsys, monkeypatch):
    """Uses few tokens, on one rank."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    program = runpy.run_path(str(EXAMPLES / "long_context.py"))
    figures = program["main"](program["Config"](tokens=512, window=80, layers=1, steps=4))
    printed = capsys.readouterr().out
    assert "strategy  forward MB" in printed
    assert "auto (by bytes" in printed  # one rank has no link to measure
    assert "step 3: loss" in printed
    assert figures["losses"] == pytest.approx([4.16] * 4, abs=0.15)  # log 64 at the start
    assert len(figures["memory"]) == 1


def _schedules(rank: int, ranks: int) -> dict[str, list[float]]:
    program = runpy.run_path(str(EXAMPLES / "own_schedule.py"))
    plans = {"folded": program["FoldedPlan"], "1f1b": program["ParallelPlan"]}
    return {name: program["losses"](ranks, plan(microbatches=4)) for name, plan in plans.items()}


def test_a_schedule_of_ones_own_is_drawn_and_trains_as_one_device_does(capsys, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    program = runpy.run_path(str(EXAMPLES / "own_schedule.py"))
    alone = program["main"](4)["1f1b"]
    first, second = capsys.readouterr().out.splitlines()[:2]  # the drawing for two ranks
    assert first.startswith("0F0 0F1 0F2 0F3 .   .   3F0 3F1 3F2 3F3 3B0 -")
    assert second.startswith(".   1F0 1F1 1F2 1F3 2F0 2F1 2F2 2F3 .   .   .   2B0")
    assert alone[0] - alone[-1] > 0.5
    for found in run_ranks(2, _schedules, 2):
        assert found["folded"] == pytest.approx(alone, rel=1e-5)
        assert found["1f1b"] == pytest.approx(alone, rel=1e-5)


def _cut_mlp(port: int) -> None:
    runpy.run_path(str(EXAMPLES / "parallel_mlp.py"))["main"]()


def test_a_module_that_is_cut_has_half_of_its_weights_and_the_same_numbers(tmp_path):
    # The program compares, and fails if the results differ.
    launch(_cut_mlp, (), Mesh(tp=2), processes=QuickProcesses(tmp_path))
    printed = (tmp_path / "stdout").read_text()
    said = re.findall(r"rank \d: \(128, 64\) of \(256, 64\), ok", printed)
    assert sorted(said) == [f"rank {rank}: (128, 64) of (256, 64), ok" for rank in range(2)]


def _loop(**mesh: int) -> None:
    program = runpy.run_path(str(EXAMPLES / "train_gpt.py"))
    program["main"](program["Config"](steps=31, **mesh))


def _losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"step \d+: loss ([\d.]+)", printed)]


def test_a_training_loop_of_ones_own_prints_one_devices_losses_on_any_mesh(tmp_path, capsys):
    _loop()
    alone = _losses(capsys.readouterr().out)
    assert len(alone) == 4
    assert alone[0] > 2
    assert alone[-1] < 1
    launch(_loop_of_two, (), Mesh(tp=2), processes=QuickProcesses(tmp_path))
    assert _losses((tmp_path / "stdout").read_text()) == pytest.approx(alone, abs=2e-4)


def _loop_of_two(port: int) -> None:
    _loop(tp=2)


def _declared(rank: int) -> tuple[str, float]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        difference = runpy.run_path(str(EXAMPLES / "declared_gpt.py"))["compare"]()
    return printed.getvalue(), difference


def test_a_declared_gpt_lists_what_it_sends_and_has_one_ranks_loss():
    (printed, difference), *_ = run_ranks(4, _declared)
    assert "blocks.1.mlp.down()             [4/dp, 16, 32] {partial tp}" in printed
    assert re.search(r"forward   tp     all_reduce +1 +8192  blocks.0.attention\n", printed)
    assert difference < 1e-12


@contextlib.contextmanager
def _printing_at_once() -> Iterator[None]:
    """Print in one write, because ranks that print at the same time share lines."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        os.write(1, printed.getvalue().encode())


def _own(program: str, *arguments: str | int) -> None:
    with _printing_at_once():
        runpy.run_path(str(EXAMPLES / program))["main"](*arguments[:-1])  # without the port


def _printed(folder: Path, mesh: Mesh, *program: str) -> str:
    """Run a program with its arguments on ranks. Return what they print."""
    launch(_own, program, mesh, processes=QuickProcesses(folder))
    return (folder / "stdout").read_text()


def test_own_modules_train_as_a_pipeline(tmp_path):
    printed = _printed(tmp_path, Mesh(pp=2), "own_pipeline.py")
    losses = re.findall(r"(1f1b|zb-v): loss ([\d.]+) -> ([\d.]+)", printed)
    assert [name for name, _, _ in losses] == ["1f1b", "zb-v"]
    assert all(float(last) < float(first) / 2 for _, first, last in losses)


OWN_MODEL = (EXAMPLES.parent / "docs" / "own_model.md").read_text()
PROGRAMS = re.findall(r"^```py\n(import torch\n.*?)^```", OWN_MODEL, re.DOTALL | re.MULTILINE)


def _program(text: str, port: int) -> None:
    with _printing_at_once():
        exec(text, {"__name__": "__main__"})


def test_programs_of_the_page_train_on_two_ranks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pipeline, zero = PROGRAMS
    launch(_program, (pipeline,), Mesh(pp=2), processes=QuickProcesses(tmp_path))
    losses = re.findall(r"^([\d.]+) [\d.]+$", (tmp_path / "stdout").read_text(), re.MULTILINE)
    assert len(losses) == 2
    assert losses[0] == losses[1]
    launch(_program, (zero,), Mesh(dp=2), processes=QuickProcesses(tmp_path))
    assert (tmp_path / "ckpt" / "step_00000030").is_dir()


def test_own_model_trains_with_zero_3_and_loads_its_checkpoint(tmp_path):
    printed = _printed(tmp_path, Mesh(dp=2), "own_zero.py", str(tmp_path / "ckpt"))
    assert printed.count("loaded outputs differ by 0.0\n") == 2


def test_own_pipeline_with_zero_3_equals_one_device(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    printed = _printed(tmp_path, Mesh(pp=2, dp=2), "own_pipeline_zero.py")
    assert printed.count("differ from one device's") == 4


def test_ring_attention_of_documents_equals_one_device(tmp_path):
    printed = _printed(tmp_path, Mesh(cp=2), "ring_documents.py")
    differences = re.findall(r"differ by at most (\S+)", printed)
    assert len(differences) == 2
    assert all(float(difference) < 1e-11 for difference in differences)
