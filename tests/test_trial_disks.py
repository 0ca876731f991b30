"""Trials of damaged files and full disks, with runs that are made up: what they damage, and which
ends of a run break their promise."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_trial_promises import LOSSES, Here, Job

from warpweave.trials import disk
from warpweave.trials.job import BrokenPromiseError
from warpweave.trials.trial import STEPS, Trial

ON = {STEPS + 1: 0.125}


class Folder(Here):
    """An arena whose saved run has the checkpoint `step`, and in which a run goes on from it."""

    def __init__(self, folder: Path, job: Job, step: Path, begun: Any = None) -> None:
        super().__init__(folder, job)
        self.step, self.begun = step, begun

    def start(self, *options, **given):
        job = super().start(*options, **given)
        if self.begun is not None:
            self.begun()
        return job

    def saved(self):
        return SimpleNamespace(newest=lambda: SimpleNamespace(path=self.step))


def _tried(one: Trial, folder: Path, at: Path, begun: Any = None, **said: Any) -> str | None:
    """What a trial says of a run that has said this; None for a broken promise."""
    arena = Folder(folder, Job(**said), at, begun)
    try:
        words = one.run(arena)
    except BrokenPromiseError:
        return None
    finally:
        assert arena.given == [(("--resume",), {"steps": STEPS + 1})]
    return words


def test_a_checkpoint_that_is_cut_short_must_be_passed_over_by_name(tmp_path):
    step = tmp_path / "step_00000008"
    step.mkdir()
    shard = step / "rank0.safetensors"
    said = "warpweave: passed over: step_00000008\nwarpweave: the end\n"
    for given, words in (
        ({"code": 0, "stderr": said}, "passed over: step_00000008"),
        ({"code": 1, "stderr": said}, None),
        ({"code": 0, "stderr": "warpweave: step_00000007\n"}, None),
        ({"code": 0, "stderr": "step_00000008\n"}, None),
    ):
        shard.write_bytes(b"abcd")
        assert _tried(disk.damaged_checkpoint, tmp_path, step, **given) == words
        assert shard.read_bytes() == b"abc"


def test_rows_of_damaged_metrics_must_all_be_there(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    rows = [json.dumps({"step": step}).encode() for step in range(1, 5)]
    said = {"code": 0, "stderr": "warpweave: x\nwarpweave: damaged rows (4)\n"}
    for changes, words in (
        ({"losses": LOSSES | ON}, "damaged rows (4)"),
        ({"losses": LOSSES}, None),
        ({"losses": ON | LOSSES}, None),  # in another order
        ({"losses": LOSSES | ON, "code": 1}, None),
    ):
        path.write_bytes(b"\n".join(rows) + b"\n")
        assert _tried(disk.damaged_metrics, tmp_path, tmp_path, **said | changes) == words
        lines = path.read_bytes().split(b"\n")
        assert [line for line in lines if line in rows] == rows
        assert len(lines) == len(rows) + 4
        assert lines[-1] == b'{"step": '


def test_other_data_must_be_refused_though_both_ends_are_the_same(tmp_path):
    text = tmp_path / "text"
    for code, words in ((2, "rank 1 (tp=1) is at fault"), (0, None), (1, None)):
        text.write_bytes(bytes(range(100)))
        assert _tried(disk.other_data, tmp_path, tmp_path, code=code) == words
        now = text.read_bytes()
        assert (now[:25], now[-25:]) == (bytes(range(25)), bytes(range(75, 100)))
        assert now[25:75] == bytes(reversed(range(25, 75)))


@pytest.mark.parametrize("fails", [False, True])
def test_a_full_disk_must_leave_the_step_before_and_no_part(tmp_path, fails):
    """Only the job's files are limited, and no longer than it takes to start it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    out = tmp_path / "run"
    (out / "checkpoints").mkdir(parents=True)
    step = tmp_path / "step"
    limits: list[int] = []

    def begun() -> None:
        limits.append(resource.getrlimit(resource.RLIMIT_FSIZE)[0])
        if fails:
            raise ArithmeticError

    for changes, words in (
        ({"step": STEPS - 1}, "rank 1 (tp=1) is at fault"),
        ({"step": STEPS}, None),
        ({"step": STEPS - 2}, None),
        ({"step": STEPS - 1, "code": 0}, None),
        ({"step": STEPS - 1, "part": True}, None),
    ):
        step.mkdir()
        for name, size in (("a", 10), ("b", 4000), ("c", 99)):
            (step / name).write_bytes(bytes(size))
        if changes.pop("part", False):
            (out / "checkpoints" / "step_00000009.tmp-1").mkdir()
        given = {"out": out, "code": 1} | changes
        if fails:
            with pytest.raises(ArithmeticError):
                _tried(disk.full_disk, tmp_path, step, begun, **given)
        else:
            assert _tried(disk.full_disk, tmp_path, step, begun, **given) == words
        assert not step.exists()
        assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
        assert limits.pop() == 2000
