"""Rows of metrics and their recipients; files of an earlier run, and permissions. `test_metrics.py`
covers boards, damage and unwritable files."""

from __future__ import annotations

import errno
import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from refused import check
from test_metrics import _metrics, _row, _written
from threads import on_mesh

from warpweave.parallel.mesh import Mesh
from warpweave.train import metrics as metrics_module
from warpweave.train.metrics import Metrics, peak_memory, set_aside


class Told:
    """A board that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def row(self, row: dict) -> None:
        self.calls.append(dict(row))

    def flush(self) -> None:
        self.calls.append("flush")

    def close(self) -> None:
        self.calls.append("close")


def _rows(metrics: Metrics) -> list[dict]:
    return [json.loads(line) for line in metrics.path.read_text().splitlines()]


def test_rows_of_steps_and_evaluations_have_their_figures_on_every_board(tmp_path, monkeypatch):
    told = [Told(), Told()]
    monkeypatch.setattr(metrics_module, "open_boards", lambda *_: told)
    metrics = _metrics(tmp_path, 0, resume=False)
    row = {"step": 1, "loss": 2.0}
    assert metrics.trained(row, 0.25) == row | {"tokens_per_second": 32 / 0.25}
    metrics.trained({"step": 2, "loss": 1.5}, 3.0)
    metrics.evaluated(2, 1.75, [1.4, 2.6, 100.49, 9.0])
    metrics.flush()
    metrics.close()
    rows = [
        {"step": 1, "loss": 2.0, "tokens_per_second": 128.0},
        {"step": 2, "loss": 1.5, "tokens_per_second": 10.7},
        {"step": 2, "val_loss": 1.75, "peak_memory_mib": [1, 3, 100, 9]},
    ]
    assert _rows(metrics) == rows
    assert [board.calls for board in told] == [[*rows, "flush", "close"]] * 2


def _failing(name: str) -> Any:
    def call(self: Told, *given: Any) -> None:
        getattr(Told, name)(self, *given)
        raise RuntimeError("gone")

    return call


class Broken(Told):
    """A board that fails at every call after its creation."""

    row, flush, close = map(_failing, ("row", "flush", "close"))


class Torn(Broken):
    """Another failing board."""


def test_a_board_that_fails_takes_nothing_from_others_and_each_is_said_once(
    tmp_path, capsys, monkeypatch
):
    boards = [Told(), Broken(), Told(), Torn(), Told()]
    monkeypatch.setattr(metrics_module, "open_boards", lambda *_: boards)
    metrics = _metrics(tmp_path, 0, resume=False)
    rows = [{"step": step, "loss": 1.0} for step in (1, 2)]
    for row in rows:
        metrics.write(row)
    metrics.flush()
    metrics.close()
    assert [board.calls for board in boards] == [[*rows, "flush", "close"]] * 5
    said = [line for line in capsys.readouterr().err.splitlines() if line]
    assert said == [
        f"warpweave: {metrics.folder} cannot be written by {name}: gone; the run continues and "
        "will try again"
        for name in ("Broken", "Torn")
    ]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_that_is_made_again_is_shown_if_it_was_not_yet(
    tmp_path, monkeypatch, there, evaluates
):
    """The file has it once, and boards get it once."""
    told, of_step = Told(), {"step": 2, "val_loss": 1.5}
    monkeypatch.setattr(metrics_module, "open_boards", lambda *_: [told])
    before = [{"step": 2, "loss": 1.0}, *([of_step] if there else []), {"step": 3, "loss": 1.0}]
    _written(tmp_path, "".join(json.dumps(row) + "\n" for row in before).encode())
    metrics = _metrics(tmp_path, 2, evaluates=evaluates)
    kept = [row for row in before[:-1] if "loss" in row or not evaluates]
    assert _rows(metrics) == kept
    again, later = {"step": 2, "val_loss": 1.5}, {"step": 4, "val_loss": 1.0}
    metrics.write(again)
    metrics.write(later)
    assert _rows(metrics) == [*kept, again, later]
    assert told.calls == ([later] if there and evaluates else [again, later])


def test_the_peaks_of_all_ranks_are_in_their_order(monkeypatch):
    for platform, unit in (("darwin", 2**20), ("linux", 2**10)):
        monkeypatch.setattr(metrics_module, "sys", SimpleNamespace(platform=platform))
        monkeypatch.setattr(
            metrics_module.resource,
            "getrusage",
            lambda who, unit=unit: SimpleNamespace(ru_maxrss=(5 - dist.get_rank()) * unit),
        )
        found = on_mesh(Mesh(dp=2, tp=2), lambda mesh: peak_memory(torch.device("cpu"), mesh))
        assert found == [[5.0, 4.0, 3.0, 2.0]] * 4


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_of_a_run_have_the_permissions_that_the_umask_leaves(tmp_path, umask):
    _written(tmp_path, _row(1) + b"\nrubbish\n")
    old = os.umask(umask)
    try:
        metrics = _metrics(tmp_path, 1)
        metrics.write({"step": 2, "loss": 1.0})
        metrics.plot()
        fresh = _metrics(tmp_path, 0, resume=False, out=tmp_path / "new")
        fresh.write({"step": 1})
    finally:
        os.umask(old)
    names = ["config.toml", "loss.png", "metrics.jsonl", "metrics.jsonl.damaged-1"]
    found = [*metrics.folder.iterdir(), *fresh.folder.iterdir()]
    assert sorted(path.name for path in metrics.folder.iterdir()) == names
    assert {path.stat().st_mode & 0o777 for path in found} == {0o666 & ~umask}


RUNS = ("metrics.jsonl", "loss.png", "checkpoints", "tensorboard", "wandb", "config.toml",
        "updates.jsonl", "staleness.png")  # fmt: skip
WITH_THEM = ("origin", "metrics.jsonl.damaged-1", "metrics.jsonl.damaged-12")
NOT_OURS = ("tokens", "lock", "notes.txt", "metrics.jsonl.old", "earlier-1")


@pytest.mark.parametrize("name", [*RUNS, None])
def test_any_file_of_an_earlier_run_takes_the_others_aside_and_nothing_else(tmp_path, capsys, name):
    for other in (*WITH_THEM, *NOT_OURS, *([name] if name else [])):
        (tmp_path / other).mkdir()
    set_aside(tmp_path)
    said = capsys.readouterr().err.strip()
    left = {path.name for path in tmp_path.iterdir()}
    if name is None:
        assert (left, said) == ({*WITH_THEM, *NOT_OURS}, "")
        return
    assert left == {*NOT_OURS, "earlier-2"}
    moved = {path.name for path in (tmp_path / "earlier-2").iterdir()}
    assert moved == {name, *WITH_THEM}
    hint = " (--resume would have continued it)" if name == "checkpoints" else ""
    aside = tmp_path / "earlier-2"
    assert said == f"warpweave: moved the files of an earlier run in {tmp_path} to {aside}{hint}"


def test_damaged_rows_are_not_written_through_a_dangling_link(tmp_path, capsys):
    folder = _written(tmp_path, b"rubbish\n").parent
    (folder / "metrics.jsonl.damaged-1").symlink_to("nowhere")
    _metrics(tmp_path, 0)
    assert (folder / "metrics.jsonl.damaged-2").read_bytes() == b"rubbish\n"
    assert not (folder / "nowhere").exists()
    assert f"damaged rows (1) to {folder}/metrics.jsonl.damaged-2" in capsys.readouterr().err


def test_plot_shows_losses_and_the_staleness_of_each_stage_by_step(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt

    figures: list[Any] = []
    monkeypatch.setattr(plt, "close", figures.append)
    metrics = _metrics(tmp_path, 0)
    for step in (1, 2, 3):
        metrics.write({"step": step, "loss": 9.0 - step, "staleness": [2, step]})
    metrics.write({"step": 2, "val_loss": 7.5})
    assert metrics.plot() == metrics.folder / "loss.png"
    monkeypatch.undo()
    axes, other = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    assert lines == {"training": [[1, 8], [2, 7], [3, 6]], "validation": [[2, 7.5]]}
    assert [line.get_xydata().tolist() for line in other.lines] == [
        [[1, 2], [2, 2], [3, 2]], [[1, 1], [2, 2], [3, 3]]
    ]  # fmt: skip
    assert {text.get_text() for text in axes.get_legend().get_texts()} == set(lines)
    assert (axes.get_xlabel(), other.get_ylabel()[:9]) == ("step", "staleness")
    plt.close(figures[0])


def test_a_folder_on_a_file_system_without_locks_is_trained_into(tmp_path, monkeypatch):
    import fcntl

    asked: list[int] = []
    errors = iter((errno.ENOLCK, errno.ENOTSUP, errno.EAGAIN))

    def refuse(file: Any, how: int) -> None:
        asked.append(how)
        raise OSError(next(errors), "no lock")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        with metrics_module.locked(tmp_path / "new"):
            assert (tmp_path / "new" / "lock").exists()
    check(metrics_module.locked(tmp_path / "new").__enter__, "another job is writing to")
    assert asked == [fcntl.LOCK_EX | fcntl.LOCK_NB] * 3
