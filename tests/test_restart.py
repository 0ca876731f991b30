"""A restarted run continues where it was saved, with `--resume auto` and by time."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import exits, one_line
from test_background_saver import Gate, _before
from test_checkpoint import rewrite
from test_train import _config, _one_step, _replace, _rows, _same, _saved, _trainer
from threads import run_threads

from warpweave.checkpoint import CheckpointError, open_checkpoint
from warpweave.data import write_token_file
from warpweave.train.options import CHECKPOINTS, TrainConfig, parse
from warpweave.train.resume import open_run


def _listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# ---- bitwise equality ----------------------------------------------------------------------------


def test_run_restarted_after_each_of_40_steps_is_bitwise_identical(tmp_path):
    """By induction a run may be stopped at any step."""
    config = _config(tmp_path, steps=40, keep=99, eval_every=0, layers=1, dtype="bf16")
    _trainer(config).run()
    again = _replace(config, out=tmp_path / "again", resume="auto")
    for step in range(40):
        trainer = _trainer(again)
        assert trainer.step == step
        row, took, _ = trainer._train_step()
        trainer.metrics.trained(row, took)
        trainer.save()
        trainer.saver.wait()
    rows = [row for row in _rows(config.out) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert _rows(again.out) == rows
    for step in range(1, 41):
        paths = (c.out / CHECKPOINTS / f"step_{step:08d}" for c in (again, config))
        ours, truth = map(open_checkpoint, paths)
        assert ours.state == truth.state, step
        assert _same(*({n: r.tensor(n) for n in r.names} for r in (ours, truth))), step


# ---- auto ----------------------------------------------------------------------------------------


def test_resume_stands_alone_or_before_its_value_and_in_a_file(tmp_path, capsys):
    for words, value in (
        ([], False), (["--resume"], True), (["--resume", "--steps", "4"], True),
        (["--resume", "auto"], "auto"), (["--resume", "False"], False),
    ):  # fmt: skip
        assert parse(words).resume is value or parse(words).resume == value == "auto", words
    file = tmp_path / "options.toml"
    for text, value in (("true", True), ('"auto"', "auto"), ("false", False)):
        file.write_text(f"resume = {text}\n")
        assert parse(["--config", str(file)]).resume == value
        assert parse(["--config", str(file), "--resume", "False"]).resume is False
    for words in (["--resume", "automatic"], ["--config", str(file)]):
        file.write_text('resume = "Auto"\n')
        error = exits(partial(parse, words), capsys)
    assert "resume must be true or false or one of auto, got 'Auto'" in error


def _twice(rank: int, config: TrainConfig) -> list[int]:
    """Return the first steps of a run that is started three times and stopped after one step."""
    found = []
    for _ in range(3):
        trainer = _one_step(config, rank)
        found.append(trainer.step - 1)
    return found


@pytest.mark.usefixtures("saved_at_once")
def test_auto_begins_where_there_is_nothing_and_else_goes_on_on_all_ranks(tmp_path, capsys):
    config = _config(tmp_path, dp=2, resume="auto")
    assert run_threads(2, _twice, config) == [[0, 1, 2]] * 2
    assert [row["step"] for row in _rows(config.out) if "loss" in row] == [1, 2, 3]
    assert not list(config.out.glob("earlier-*"))


def test_auto_begins_a_pretrained_model_only_once(tmp_path):
    first = _config(tmp_path, steps=1)
    _trainer(first).run()
    config = _replace(first, out=tmp_path / "more", init_from=first.out, resume="auto", steps=2)
    _one_step(config)
    weights = _saved(config.out, 1)
    trainer = _trainer(config)
    assert trainer.step == 1
    for record, tensor, _ in trainer.engine.read("param"):
        assert torch.equal(tensor, weights[record.name]), record.name


@pytest.mark.parametrize("other", [{"width": 32}, {"seed": 1}, {"optimizer": "sgd"}, "text"])
def test_auto_refuses_another_run_and_moves_nothing(tmp_path, other):
    config = _config(tmp_path, steps=1)
    _trainer(config).run()
    if other == "text":
        config.data.write_bytes(config.data.read_bytes()[::-1])
        other = {}
    before = _listing(config.out)
    with pytest.raises(CheckpointError) as caught:
        _trainer(_replace(config, resume="auto", **other))
    assert "was trained " in one_line(caught) or "a different config" in one_line(caught)
    assert _listing(config.out) == before


def test_auto_does_not_begin_anew_where_all_checkpoints_are_damaged(tmp_path):
    config = _config(tmp_path, steps=1)
    _trainer(config).run()
    (config.out / CHECKPOINTS / "step_00000001" / "manifest.json").write_bytes(b"")
    before = _listing(config.out)
    with pytest.raises(CheckpointError, match="1 steps, none of them valid"):
        _trainer(_replace(config, resume="auto"))
    assert _listing(config.out) == before


def test_a_run_that_died_before_its_first_checkpoint_is_begun_anew(tmp_path, capsys):
    config = _config(tmp_path, steps=1, resume="auto")
    config.out.mkdir()
    (config.out / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert _trainer(config).run()["steps"] == 1
    assert (config.out / "earlier-1" / "metrics.jsonl").exists()
    assert "would have continued" not in capsys.readouterr().err


def test_a_token_file_of_which_half_was_replaced_is_refused(tmp_path, capsys):
    """If an earlier version compared only its ends, the run continues, and prints a message."""
    tokens = np.arange(2**19) * 7919 % 251
    config = _config(tmp_path, steps=1, layers=1, eval_every=0, data=tmp_path / "tokens.bin")
    write_token_file(config.data, tokens, vocab_size=256)
    _trainer(config).run()
    config = _replace(config, resume=True, steps=2)
    assert _trainer(config).step == 1
    assert "fingerprint" not in capsys.readouterr().err
    tokens[2**17 : 3 * 2**17] = 7
    write_token_file(config.data, tokens, vocab_size=256)
    with pytest.raises(CheckpointError, match=r"was trained on different data: .*tokens.bin"):
        _trainer(config)
    ends = lambda manifest: manifest["state"]["data"].update(fingerprint="ab" * 32)  # noqa: E731
    rewrite(config.out / CHECKPOINTS / "step_00000001", ends)
    assert _trainer(config).step == 1
    words = "fingerprint: saved ends of the file, now whole file"
    assert words in capsys.readouterr().err
    config = _replace(config, data=config.data.rename(tmp_path / "other.bin"))
    (tmp_path / "tokens.bin.json").rename(tmp_path / "other.bin.json")
    with pytest.raises(CheckpointError, match="was trained on different data"):
        _trainer(config)


# ---- by time -------------------------------------------------------------------------------------

ALWAYS = {"save_every": 0, "save_minutes": 1e-9}  # after every step


def _steps(config: TrainConfig) -> list[int]:
    return sorted(int(path.name[5:]) for path in (config.out / CHECKPOINTS).glob("step_*"))


def _run(rank: int, config: TrainConfig) -> int:
    trainer = _trainer(config, rank)
    trainer.ahead = config.out.name == "ahead"
    return trainer.run()["steps"]


@pytest.mark.usefixtures("saved_at_once")
@pytest.mark.parametrize("ahead", [False, True], ids=["apart", "ahead"])
def test_the_first_ranks_clock_saves_on_all_ranks_and_changes_nothing(tmp_path, capsys, ahead):
    """A step that was launched before the previous one is read is finished first."""
    plain = _config(tmp_path, dp=2, zero=2, steps=6)
    config = _replace(plain, out=tmp_path / ("ahead" if ahead else "apart"), eval_every=0, **ALWAYS)
    assert run_threads(2, _run, plain) == run_threads(2, _run, config) == [6, 6]
    steps = [2, 4, 6] if ahead else [1, 2, 3, 4, 5, 6]
    assert _steps(config) == steps
    for step in steps:
        paths = (c.out / CHECKPOINTS / f"step_{step:08d}" for c in (config, plain))
        ours, truth = map(open_checkpoint, paths)
        assert ours.state["optimizer"] == truth.state["optimizer"]
        assert _same(*({n: r.tensor(n) for n in r.names} for r in (ours, truth))), step
    losses = [[row for row in _rows(c.out) if "loss" in row] for c in (config, plain)]
    assert losses[0] == losses[1]


def test_a_save_by_time_waits_for_no_save_in_flight(tmp_path):
    trainer = _trainer(_config(tmp_path, steps=6, eval_every=0, keep=9, **ALWAYS))
    with Gate(1) as gate:

        def done() -> None:
            gate.open.set()
            trainer.saver._thread.join()

        _before(trainer, 4, done)
        trainer.run()
    assert _steps(trainer.config)[:2] == [1, 5]


def test_no_save_by_time_without_minutes_or_before_they_have_passed(tmp_path):
    for minutes in (0.0, 10.0):
        config = _config(tmp_path, steps=3, save_every=0, save_minutes=minutes, layers=1)
        config = _replace(config, out=tmp_path / str(minutes))
        _trainer(config).run()
        assert _steps(config) == [3]


def test_a_save_by_time_counts_from_the_last_save(tmp_path, monkeypatch):
    """On this clock a step takes a minute. Step 6 is saved by its number."""
    now = [-60.0]
    monkeypatch.setattr("warpweave.train.trainer.time", _Clock(now))
    trainer = _trainer(_config(tmp_path, steps=12, save_every=6, save_minutes=2.5, eval_every=0))
    wishes, trainer._saved = trainer._wishes, 0.0

    def wished() -> float:
        trainer.saver.wait()  # a save in flight would delay a save by time
        now[0] += 60.0
        return wishes()

    trainer._wishes = wished
    trainer.run()
    assert _steps(trainer.config) == [4, 6, 9, 12]


class _Clock:
    """The module `time` with a different monotonic clock."""

    def __init__(self, now: list[float]) -> None:
        self._now = now

    def __getattr__(self, name: str):
        return (lambda: self._now[0]) if name == "monotonic" else getattr(time, name)


# ---- forged states -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        ("step", True), ("step", 2), ("step", 1.0), ("seed", False), ("seed", "0"), ("seed", -1),
        ("data", []), ("data", {}), ("settings", None), ("optimizer", 3), ("outer", "none"),
        ("data.name", 3), ("data.fingerprint", None), ("data.sequences_per_step", 4.0),
        ("data.sequences_per_step", -4), ("data.tokenizer", 1), ("progress", None),
        ("progress.tokens", "5"), ("progress.tokens", True), ("progress.best", 3),
        ("progress.evaluated", 1.0), ("progress.since", -1), ("optimizer.count", True),
        ("optimizer.count", "1"), ("optimizers.0.count", 1), ("optimizers", {}),
        ("optimizers", [0]), ("mesh.tp", "2"), ("mesh.dp", True), ("mesh.pp", -1),
        ("optimizers", [{"count": 1.0}, {"count": 2}]), ("optimizer.loss_scale", 1),
        ("asynchronous", 1), ("server", []), ("data.validation", 0), ("progress.best_step", 2.0),
        ("step", 0), *((name, ...) for name in ("data", "seed", "optimizer", "settings")),
        *((f"data.{name}", ...) for name in ("name", "fingerprint", "sequences_per_step")),
    ],
    ids=lambda pair: f"{pair[0]}={pair[1]}",
)  # fmt: skip
def test_a_state_of_another_type_is_refused_by_name(tmp_path, path):
    """So is a state with a missing field (...)."""
    config = _config(tmp_path, steps=1, eval_every=0, layers=1)
    source = tmp_path.parent / "forged"
    if not source.exists():
        _trainer(_replace(config, out=source)).run()
    shutil.copytree(source, config.out)

    def change(manifest: dict) -> None:
        words, value = path
        *names, last = words.split(".")
        at = manifest if names[:1] == ["mesh"] else manifest["state"]
        for name in names:
            at = at[int(name)] if name.isdigit() else at[name]
        at[last] = value
        if value is ...:
            del at[last]

    rewrite(config.out / CHECKPOINTS / "step_00000001", change)
    with pytest.raises(CheckpointError) as caught:
        open_run(config.out / CHECKPOINTS, config.model_config(256), None)
    said = one_line(caught)
    assert "state" in said or "by the trainer" in said
