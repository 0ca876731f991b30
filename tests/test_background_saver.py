"""Background saving: steps continue during a save, and the checkpoint holds the
state at its start."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import run_ranks
from refused import one_line
from test_train import _config, _same, _trainer

from warpweave.checkpoint import (
    BackgroundSaver,
    CheckpointError,
    background,
    files,
    open_checkpoint,
    open_latest,
    save_checkpoint,
)
from warpweave.train.options import TrainConfig

WITH = {"config": {"a": 1}, "state": {"b": 0.1}}
LONG = 60.0  # in seconds: not part of the verdict, only an end for hangs


class Gate:
    """A disk that blocks on files of `step` until it is `open`, and then
    fails with `error`, if any."""

    def __init__(self, step: int, error: OSError | None = None) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self._step, self._error = f"step_{step:08d}", error
        self._patch = mock.patch("warpweave.checkpoint.save.write", self._write)

    def _write(self, path: Path, *parts) -> str:
        if path.parent.name.startswith(self._step):
            self.reached.set()
            assert self.open.wait(LONG), "nobody opened the gate: steps wait for the disk"
            if self._error is not None:
                raise self._error
        return files.write(path, *parts)

    def __enter__(self) -> Gate:
        self._patch.start()
        return self

    def __exit__(self, *_) -> None:
        self.open.set()
        self._patch.stop()


def tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(35.0).view(7, 5)
    return {"a": base, "view": base.t()[1:3], "half": base.bfloat16(), "n": torch.tensor(3.0)}


def read(folder: Path, step: int) -> dict[str, torch.Tensor]:
    reader = open_checkpoint(folder / f"step_{step:08d}")
    return {name: reader.tensor(name) for name in reader.names}


def test_saved_step_is_byte_identical_although_the_next_step_has_begun(tmp_path):
    given, saver = tensors(), BackgroundSaver(None)
    plain = save_checkpoint(tmp_path / "plain", 7, tensors().items(), **WITH)
    with Gate(7) as gate:
        saver.save(tmp_path / "ours", 7, given.items(), **WITH)
        assert gate.reached.wait(LONG)
        given["a"].add_(1.0)
        given["n"].zero_()
        assert (saver.path, open_latest(tmp_path / "ours")) == (None, None)
        gate.open.set()
        path = saver.wait()
    assert path == saver.path == tmp_path / "ours" / "step_00000007"
    ours, truth = ({f.name: f.read_bytes() for f in at.iterdir()} for at in (path, plain))
    assert ours == truth


def test_a_save_waits_for_the_one_before_and_uses_its_memory(tmp_path, monkeypatch):
    saver, given, active, held = BackgroundSaver(None), tensors(), [], []

    def save(folder, step, snapshot, **options):
        assert not active, "two saves at once"
        active.append(step)
        time.sleep(0.1)  # the next save is requested now
        held.append([tensor.data_ptr() for _, tensor in snapshot])
        path = save_checkpoint(folder, step, snapshot, **options)
        active.clear()
        return path

    monkeypatch.setattr(background, "save_checkpoint", save)
    with saver:
        for step in (1, 2, 3):
            given["a"].fill_(step)
            saver.save(tmp_path, step, given.items(), **WITH)
    assert held[0] == held[1] == held[2]
    for step in (1, 2, 3):
        assert torch.equal(read(tmp_path, step)["a"], torch.full((7, 5), float(step)))


def test_saving_ranks_get_a_separate_group_with_the_timeout_of_the_saver() -> None:
    group = mock.sentinel.group
    with mock.patch.object(background, "dist") as dist:
        dist.get_process_group_ranks.side_effect = {group: [1, 3]}.get
        assert BackgroundSaver(group, timeout=7.5)._group is dist.new_group.return_value
        BackgroundSaver(group)
    seconds = [timedelta(seconds=x) for x in (7.5, 300.0)]
    assert dist.new_group.call_args_list == [mock.call([1, 3], x, backend="gloo") for x in seconds]


def test_a_kill_while_a_step_is_written_leaves_the_one_before(tmp_path):
    folder, killed, saver = tmp_path / "run", tmp_path / "killed", BackgroundSaver(None)
    saver.save(folder, 1, tensors().items(), **WITH)
    with Gate(2) as gate:
        saver.save(folder, 2, tensors().items(), **WITH)
        assert gate.reached.wait(LONG)
        shutil.copytree(folder, killed)  # the state that a killed process would leave
    saver.wait()
    assert len(list(killed.glob("step_00000002.tmp-*"))) == 1
    assert open_latest(killed).step == 1
    with BackgroundSaver(None) as resumed:
        resumed.save(killed, 3, tensors().items(), **WITH)
    names = {path.name for path in killed.iterdir()}
    assert names == {"latest", "step_00000001", "step_00000003"}


@pytest.mark.parametrize("error", [None, ArithmeticError, KeyboardInterrupt])
def test_step_is_saved_however_the_block_ends_except_by_a_second_ctrl_c(tmp_path, error):
    saver = BackgroundSaver(None)

    def block() -> None:
        with saver:
            saver.save(tmp_path, 4, tensors().items(), **WITH)
            threading.Timer(0.2, gate.open.set).start()
            if error is not None:
                raise error

    with Gate(4) as gate:
        with pytest.raises(error) if error else nullcontext():
            block()
        assert (open_latest(tmp_path) is None) == (error is KeyboardInterrupt)
    saver.wait()


# ---- the trainer ---------------------------------------------------------------------------------


def _before(trainer, step: int, do) -> None:
    """Call ``do()`` when `step` steps are done and the next one begins."""
    begin = trainer._begin

    def spied(at, *before):
        if at == step:
            do()
        return begin(at, *before)

    trainer._begin = spied


def test_steps_go_on_while_a_checkpoint_is_written(tmp_path):
    config = _config(tmp_path, save_every=3)
    _trainer(config).run()
    slow = _trainer(_config(tmp_path, save_every=3, out=tmp_path / "slow"))
    with Gate(3) as gate:
        _before(slow, 4, gate.open.set)
        slow.run()
    for step in (3, 5):
        ours, truth = (read(at / "checkpoints", step) for at in (slow.config.out, config.out))
        assert _same(ours, truth), step


def _fails(rank: int, config: TrainConfig) -> tuple[int, str, int]:
    """Run until the last rank cannot write step 6, which it notices in step 7. Return the steps,
    the messages, and the step that is left."""
    trainer, last = _trainer(config, rank), rank == config.mesh.world - 1
    with Gate(6, OSError(28, "disk full", "the file") if last else None) as gate:

        def find_out() -> None:
            gate.open.set()
            if last:
                trainer.saver._thread.join()

        _before(trainer, 6, find_out)
        with pytest.raises(CheckpointError) as caught:
            trainer.run()
    return trainer.step, one_line(caught), open_latest(config.out / "checkpoints").step


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_disk_that_fails_ends_the_run_after_the_step_on_all_ranks(tmp_path, ranks):
    config = _config(tmp_path, dp=ranks, steps=9, save_every=3, eval_every=0)
    results = [_fails(0, config)] if ranks == 1 else run_ranks(2, _fails, config)
    assert results == [(7, f"rank {ranks - 1}: the file: disk full", 3)] * ranks
