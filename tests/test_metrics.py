"""A run's data on its boards, if it completes, and if it dies and is resumed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from test_train import _config, _replace, _trainer

from warpweave.launch.interrupt import Interrupt
from warpweave.launch.session import Session
from warpweave.train import boards
from warpweave.train import metrics as metrics_module
from warpweave.train.boards import TensorBoard, WeightsAndBiases, check_boards
from warpweave.train.metrics import Metrics


class Wandb(ModuleType):
    """A mock of Weights & Biases as documented: a run drops steps below the last one it received,
    and continues under its id. `history` is what the site would show: {run: {step: row}}."""

    class Error(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("wandb")
        self.history: dict[str, dict[int, dict]] = {}
        self.configs: dict[str, dict] = {}
        self.finished: list[str] = []

    def init(self, *, project, dir, id, resume, config, allow_val_change):
        if project == "forbidden":
            raise Wandb.Error("No API key\nconfigured")
        assert Path(dir).is_dir()
        assert (resume == "allow") == (id is not None)
        name = id or f"run{len(self.history)}"
        rows = self.history.setdefault(name, {})
        self.configs[name] = config
        last = max(rows, default=-1)

        def log(row, *, step):
            assert step >= max(rows, default=0), "W&B would drop this row"
            rows.setdefault(step, {}).update(row)

        def finish():
            self.finished.append(name)

        return SimpleNamespace(id=name, starting_step=last + 1, log=log, finish=finish)


@pytest.fixture
def wandb(monkeypatch):
    fake = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


def _events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return {scalar: (step, value) of every event that TensorBoard shows}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    scalars = {name: board.Scalars(name) for name in board.Tags()["scalars"]}
    return {name: [(e.step, e.value) for e in events] for name, events in scalars.items()}


def _lines(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the same from the run's own rows."""
    found = defaultdict(list)
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                found[name].append((row["step"], value))
    return found


def _drawn(trainer, monkeypatch) -> dict[str, list[tuple[int, float]]]:
    """Return the points of the plot."""
    from matplotlib.axes import Axes

    found, plot = {}, Axes.plot
    with monkeypatch.context() as patch:
        patch.setattr(Axes, "plot", lambda self, *a, label, **k: (
            found.update({label: list(zip(*a))}), plot(self, *a, label=label, **k))[1])  # fmt: skip
        trainer.metrics.plot()
    return found


SAME = ("loss", "val_loss", "lr", "tokens", "grad_norm")  # equal in every run


def test_boards_of_a_resumed_run_equal_those_of_an_uninterrupted_run(
    tmp_path, wandb, monkeypatch, capsys
):
    """Covers a crash after a checkpoint, Ctrl-C at a step with an evaluation,
    and a run that has ended."""
    pytest.importorskip("tensorboard", reason="an extra that only event files need")
    config = _config(tmp_path, steps=6, save_every=2, tensorboard=True, wandb="project", layers=1)
    _trainer(config).run()
    whole = _lines(config.out)
    assert [step for step, _ in whole["val_loss"]] == [2, 4, 6]
    assert whole["tokens"] == [(i, 64 * i) for i in range(1, 7)]
    (site,) = wandb.history.values()

    again = _replace(config, out=tmp_path / "again")
    interrupt = Interrupt()
    trainer = _trainer(again, interrupt=interrupt)
    while trainer.step < 3:  # a crash after step 3: step 2 is saved
        row, took, _ = trainer._train_step()
        trainer.metrics.trained(row, took)
        trainer._after_step()
    trainer.saver.wait()  # a trainer that continues saves in the background
    trainer.metrics.flush()
    again = _replace(again, resume=True)
    trainer = _trainer(again, interrupt=interrupt)
    step = trainer._train_step
    monkeypatch.setattr(
        trainer, "_train_step",
        lambda: (setattr(interrupt, "number", 2 if trainer.step == 3 else None), step())[1],
    )  # fmt: skip
    trainer.run()
    assert trainer.step == 4
    for _ in range(2):  # to the end, and once more at the end
        trainer = _trainer(again)
        trainer.run()
    (_, resumed) = wandb.history.values()
    assert wandb.configs["run1"]["layers"] == 1
    assert set(wandb.finished) == {"run0", "run1"}
    ours, events = _lines(again.out), _events(again.out)
    for name in SAME:
        assert ours[name] == whole[name], name
        if name != "tokens":
            assert events[name] == [(s, pytest.approx(v)) for s, v in whole[name]], name
        assert [(s, r[name]) for s, r in site.items() if name in r] == whole[name], name
        shown = [(4 if name == "val_loss" and s == 5 else s, r[name])
                 for s, r in resumed.items() if name in r]  # fmt: skip
        assert shown == whole[name], name
    drawn = _drawn(trainer, monkeypatch)
    assert drawn == {"training": whole["loss"], "validation": whole["val_loss"]}


def test_tokens_are_counted_on_when_the_batch_is_another(tmp_path):
    config = _config(tmp_path, steps=3)
    _trainer(config).run()
    _trainer(_replace(config, steps=5, resume=True, batch=3)).run()
    assert [n for _, n in _lines(config.out)["tokens"]] == [64, 128, 192, 288, 384]


def test_a_board_that_is_not_installed_is_one_line_before_anything_starts(monkeypatch):
    for name, asked in {"wandb": (False, "p"), "tensorboard": (True, None)}.items():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, None)
            patch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
            with pytest.raises(ImportError) as caught:
                check_boards(*asked)
        assert str(caught.value) == (
            f"--{name} needs {name}, which is not installed: pip install 'warpweave[{name}]'"
        )
    with monkeypatch.context() as patch:  # the other of the two boards is present
        patch.setitem(sys.modules, "tensorboard", None)
        patch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        with pytest.raises(ImportError, match="--tensorboard needs tensorboard"):
            check_boards(True, "p")
    monkeypatch.setitem(sys.modules, "wandb", ModuleType("wandb"))  # a folder of that name
    with pytest.raises(ImportError, match="--wandb needs wandb"):
        check_boards(False, "p")


def test_what_weights_and_biases_refuses_is_one_line(tmp_path, wandb):
    with pytest.raises(ValueError, match=r"^--wandb forbidden: No API key configured$"):
        WeightsAndBiases(tmp_path, 0, "forbidden", {})


def test_wandb_gets_every_number_once_at_its_step_and_options_as_json(tmp_path, wandb):
    """This includes integers. A resumed run does not send again what the site has, except an
    evaluation that was missing at its first step."""
    options = {"out": Path("runs/a"), "layers": 3, "lr": 0.5, "data": None, "betas": (0.9, 0.95)}
    board = WeightsAndBiases(tmp_path, 0, "p", options)
    for step in (1, 2, 3):
        board.row({"step": step, "loss": 1.0 / step, "tokens": 64 * step, "place": "here"})
    board.row({"step": 3, "val_loss": 0.5})
    board.close()
    assert json.loads(json.dumps(wandb.configs["run0"])) == {
        "out": "runs/a", "layers": 3, "lr": 0.5, "data": None, "betas": [0.9, 0.95],
    }  # fmt: skip
    rows = [{"loss": 1.0 / step, "tokens": 64 * step} for step in (1, 2, 3)]
    first = dict(enumerate([*rows[:2], rows[2] | {"val_loss": 0.5}], 1))
    assert wandb.history == {"run0": first}
    again = WeightsAndBiases(tmp_path, 2, "p", options)
    again.row({"step": 2, "val_loss": 0.7})
    again.row({"step": 3, "loss": 9.0})
    again.row({"step": 4, "loss": 0.25})
    again.close()
    assert wandb.history == {"run0": first | {4: {"val_loss": 0.7, "loss": 0.25}}}
    assert wandb.finished == ["run0", "run0"]


def test_tensorboard_holds_floats_and_purges_steps_after_the_resumed_step(tmp_path):
    pytest.importorskip("tensorboard", reason="an extra that only event files need")
    board = TensorBoard(tmp_path, 0)
    for step in (1, 2, 3):
        board.row({"step": step, "loss": 0.5 * step, "tokens": 64 * step, "replicas": [0]})
    board.flush()
    assert _events(tmp_path) == {"loss": [(1, 0.5), (2, 1.0), (3, 1.5)]}
    board.close()
    again = TensorBoard(tmp_path, 2)
    again.row({"step": 4, "loss": 7.0})
    again.close()
    assert _events(tmp_path) == {"loss": [(1, 0.5), (2, 1.0), (4, 7.0)]}


def test_a_run_has_the_boards_that_its_options_ask_for(tmp_path, wandb, monkeypatch):
    made = []
    monkeypatch.setattr(boards, "TensorBoard", lambda *given: made.append(given) or "events")
    for tensorboard, project in itertools.product((False, True), (None, "p")):
        options = {"tensorboard": tensorboard, "wandb": project, "seed": 5}
        opened = boards.open_boards(tmp_path, 7, options)
        assert [board for board in opened if board == "events"] == ["events"] * tensorboard
        assert len(opened) == tensorboard + (project is not None)
    assert made == [(tmp_path, 7)] * 2
    assert {config["seed"] for config in wandb.configs.values()} == {5}


def test_rows_and_bar_have_the_utilisation_of_a_gpu(tmp_path, monkeypatch, capsys):
    """6 N + attention's causal half per token, for the parameters that
    multiply; 2 ranks on H100."""
    trainer = _trainer(_config(tmp_path, dtype="bf16", steps=1, save_every=0, tied=False))
    metrics, m = trainer.metrics, trainer.model
    trained = metrics.trained
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    metrics.session = dataclasses.replace(metrics.session, device=torch.device("cuda"), world=2)
    monkeypatch.setattr(metrics, "trained", lambda row, seconds: trained(row, 1e-9))
    for name in ("COLUMNS", "LINES"):  # the rate of a slow step takes more room in the bar
        monkeypatch.setenv(name, "200")
    trainer.run()
    found = trainer.engine.gpt.named_parameters()
    matrices = sum(p.numel() for n, p in found if p.dim() > 1 and n[:5] not in ("embed", "posit"))
    flops = 6 * matrices + 12 * m.layers * m.seq_len * m.heads * m.head_dim / 2
    rate = 64 / 1e-9
    ((_, mfu),) = _lines(tmp_path / "run")["mfu"]
    assert mfu == pytest.approx(rate * flops / (2 * 989e12), rel=1e-3)
    assert f"mfu={mfu:.1%}" in capsys.readouterr().err
    for dtype, said in (("bf16", {"mfu": mfu}), ("fp16", {"mfu": mfu}), ("fp32", {})):
        assert metrics_module.utilisation(rate, m, dtype, metrics.session) == said


def test_the_bar_says_what_the_first_step_waits_for(tmp_path, capsys):
    _trainer(_config(tmp_path, steps=1, save_every=0)).run()
    said = capsys.readouterr().err
    assert "0/1 [00:00<?, ?step/s, first step: compiling and connecting]" in said
    assert "loss=" in said.rsplit("\r", 1)[1]
    assert "compiling" not in said.rsplit("\r", 1)[1]


# ---- damaged and unwritable files ----------------------------------------------------------------


def _metrics(folder: Path, step: int, *, evaluates: bool = False, **changes) -> Metrics:
    """Make the metrics of a run that is resumed at `step`, without its trainer."""
    config = _config(folder, **{"resume": True} | changes)
    session = Session(torch.device("cpu"), 0, 1, None, 60.0, config.mesh)
    how = {"tokens_per_step": 32, "evaluates": evaluates}
    return Metrics(config, session, config.model_config(256), step, **how)


def _row(step: int) -> bytes:
    return json.dumps({"step": step, "loss": 1.5}).encode()


def _written(folder: Path, rows: bytes) -> Path:
    """Write the rows of an earlier run."""
    path = folder / "run" / "metrics.jsonl"
    path.parent.mkdir()
    path.write_bytes(rows)
    return path


def _fails(*_):
    raise OSError(5, "Input/output error")


DAMAGE = {
    "cut": b'{"step": 4, "lo',
    "binary": bytes(range(1, 10)) + bytes(range(11, 256)),
    "latin1": '{"step": 2, "word": "Maß"}'.encode("latin1"),
    "list": b"[2, 1.5]",
    "number": b"2",
    "no step": b'{"loss": 1.5}',
    "step as text": b'{"step": "2", "loss": 1.5}',
    "step as truth": b'{"step": true, "loss": 1.5}',
    "step as fraction": b'{"step": 2.0, "loss": 1.5}',
    "zeros": bytes(64),
    "zeros before": bytes(8) + _row(2),
    "deep": b"[" * 100_000,
    "long number": b'{"step": ' + b"9" * 5000 + b"}",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("where", [0, 1, 3])
def test_damaged_rows_are_set_aside_and_the_others_stay(tmp_path, capsys, kind, where):
    lines = [_row(1), _row(2), _row(3)]
    lines.insert(where, DAMAGE[kind])
    path = _written(tmp_path, b"\n".join(lines))
    metrics = _metrics(tmp_path, 2)
    metrics.write({"step": 3, "loss": 2.5})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.5), (2, 1.5), (3, 2.5)]
    aside, said = path.with_name("metrics.jsonl.damaged-1"), capsys.readouterr().err.strip()
    if not DAMAGE[kind]:
        assert (aside.exists(), said) == (False, "")
        return
    assert aside.read_bytes() == DAMAGE[kind] + b"\n"
    assert said == f"warpweave: {path}: moved damaged rows (1) to {aside}"


@pytest.mark.parametrize("kind", ["folder", "link", "dangling", "pipe", "empty", "absent"])
def test_what_is_no_file_of_metrics_is_moved_and_no_link_is_followed(tmp_path, capsys, kind):
    path, other = tmp_path / "run" / "metrics.jsonl", tmp_path / "other"
    path.parent.mkdir()
    other.write_bytes(_row(1) + b"\n")
    make = {
        "folder": path.mkdir, "link": lambda: path.symlink_to(other), "empty": path.touch,
        "dangling": lambda: path.symlink_to("nowhere"), "pipe": lambda: os.mkfifo(path),
    }  # fmt: skip
    make.get(kind, lambda: None)()
    _metrics(tmp_path, 1).write({"step": 2})
    assert path.read_text() == '{"step": 2}\n'
    assert path.is_file()
    assert not path.is_symlink()
    assert other.read_bytes() == _row(1) + b"\n"
    assert not (path.parent / "nowhere").exists()
    aside, said = path.with_name("metrics.jsonl.damaged-1"), capsys.readouterr().err
    assert os.path.lexists(aside) == (kind not in ("empty", "absent"))
    assert (f"{path} is " in said and f"moved {path} to {aside}" in said) == os.path.lexists(aside)


@pytest.mark.parametrize("resume", [False, True])
def test_files_of_a_run_are_written_beside_links_of_their_names(tmp_path, capsys, resume):
    config, other = _config(tmp_path, steps=1), tmp_path / "other"
    if resume:
        _trainer(config).run()
    config.out.mkdir(exist_ok=True)
    other.write_text("mine")
    names = ("config.toml", "loss.png", "metrics.tmp", "metrics.jsonl")
    for name in names:
        (config.out / name).unlink(missing_ok=True)
        (config.out / name).symlink_to(other)
    result = _trainer(_replace(config, resume=resume)).run()
    assert other.read_text() == "mine"
    assert all((config.out / n).is_file() and not (config.out / n).is_symlink() for n in names[:2])
    assert result["plot"] == str(config.out / "loss.png")


def test_a_link_that_comes_while_a_run_goes_on_is_not_written_through(tmp_path, capsys):
    metrics, other = _metrics(tmp_path, 0), tmp_path / "other"
    other.write_text("mine")
    metrics.path.unlink()
    metrics.path.symlink_to(other)
    metrics.write({"step": 1})
    assert other.read_text() == "mine"
    assert f"{metrics.path} cannot be written: " in capsys.readouterr().err


def test_rows_that_a_full_disk_does_not_take_are_written_when_it_does(tmp_path, capsys):
    """A limit of file size cuts a row in half, like a full disk."""
    metrics = _metrics(tmp_path, 0)
    metrics.write({"step": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (metrics.path.stat().st_size + 5, hard))
    try:
        for step in (2, 3):
            metrics.write({"step": step})
            assert metrics.path.read_text() == '{"step": 1}\n'
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    metrics.write({"step": 4})
    assert metrics.path.read_text() == "".join(f'{{"step": {i}}}\n' for i in range(1, 5))
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert said == (
        f"warpweave: {metrics.path} cannot be written: No space left on device; the run continues "
        "and will try again"
    )


@pytest.mark.parametrize("what", ["replace", "_append"])
def test_a_disk_that_fails_at_a_resume_keeps_the_rows_in_memory(tmp_path, monkeypatch, what):
    path = _written(tmp_path, _row(1) + b"\n" + _row(2) + b"\n" + _row(3) + b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(metrics_module, what, _fails)
        metrics = _metrics(tmp_path, 1)
        metrics.write({"step": 2})
    metrics.write({"step": 3})
    assert path.read_bytes() == _row(1) + b'\n{"step": 2}\n{"step": 3}\n'


def test_rows_that_a_disk_does_not_give_are_moved_and_not_written_over(
    tmp_path, monkeypatch, capsys
):
    path = _written(tmp_path, _row(1) + b"\n")
    monkeypatch.setattr(metrics_module, "open_regular", _fails)
    _metrics(tmp_path, 1).write({"step": 2})
    aside = path.with_name("metrics.jsonl.damaged-1")
    assert (path.read_bytes(), aside.read_bytes()) == (b'{"step": 2}\n', _row(1) + b"\n")
    assert f"; moved {path} to {aside} and will write a new file" in capsys.readouterr().err


def test_a_run_ends_well_whose_metrics_plot_and_boards_all_fail(tmp_path, capsys, monkeypatch):
    class Broken:
        def row(self, row):
            raise RuntimeError("the board\nis gone")

        flush = close = lambda self: self.row({})

    monkeypatch.setattr(metrics_module, "open_boards", lambda *_: [Broken()])
    config = _config(tmp_path, steps=3)
    trainer = _trainer(config)
    for name in ("loss.png", "metrics.jsonl"):
        (config.out / name).unlink(missing_ok=True)
        (config.out / name / "mine").mkdir(parents=True)
    result = trainer.run()
    assert (result["steps"], result["plot"]) == (3, None)
    said = capsys.readouterr().err
    for line in (
        f"{config.out}/metrics.jsonl cannot be written: Is a directory; the run continues",
        f"{config.out}/loss.png cannot be written: {config.out}/metrics.jsonl is not a regular "
        "file; the run continues",
        f"{config.out} cannot be written by Broken: the board is gone; the run continues and will",
    ):
        assert said.count(line) == 1, line


def test_a_folder_that_is_removed_stops_no_run(tmp_path, capsys):
    metrics = _metrics(tmp_path, 0)
    shutil.rmtree(metrics.folder)
    metrics.write({"step": 1})
    assert metrics.plot() is None
    metrics.folder.mkdir()
    metrics.write({"step": 2})
    assert metrics.path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_options_that_cannot_be_written_are_said(tmp_path, capsys):
    (tmp_path / "run" / "config.toml" / "mine").mkdir(parents=True)
    metrics = _metrics(tmp_path, 0)
    said = capsys.readouterr().err
    assert (
        f"{metrics.folder}/config.toml cannot be written: Is a directory; the run continues" in said
    )
