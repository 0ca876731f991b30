"""Damaged files, and full disks."""

from __future__ import annotations

import random
import resource
import shutil
import sys

import pytest
from arena import STEPS

from warpweave.checkpoint import CheckpointError, open_checkpoint
from warpweave.train.options import CHECKPOINTS

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def test_flipped_bits(arena):
    """100 of 100 flipped bits are found, whichever checkpoint file they are in."""
    path, draw = arena.saved().newest().path, random.Random(0)
    files = sorted(path.iterdir())
    for _ in range(100):
        file = draw.choice(files)
        whole = file.read_bytes()
        data, at = bytearray(whole), draw.randrange(len(whole))
        data[at] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        with pytest.raises(CheckpointError):
            open_checkpoint(path)
        file.write_bytes(whole)
    open_checkpoint(path)


def test_damaged_checkpoint(arena):
    """A damaged checkpoint is skipped with a message, and the previous one is used."""
    path = arena.saved().newest().path
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    job = arena.start("--resume", steps=STEPS + 1)
    end = job.end(0)
    arena.note(next(line for line in end.said if path.name in line))


def test_damaged_metrics(arena):
    """Damaged metrics do not stop a run that resumes, and the damaged file is kept."""
    arena.saved()
    path = arena.folder / "run" / "metrics.jsonl"
    rows = path.read_bytes().splitlines()
    rows[2:2] = [b"\xff\x00rubbish", b"[1, 2]", rows[2][:-7]]
    path.write_bytes(b"\n".join(rows) + b'\n{"step": ')
    job = arena.start("--resume", steps=STEPS + 1)
    end = job.end(0)
    assert [*job.losses()] == [*range(1, STEPS + 2)]
    arena.note(next(line for line in end.said if "damaged" in line))


def test_other_data(arena):
    """A run does not resume with different data."""
    arena.saved()
    text = arena.folder / "text"
    data = text.read_bytes()
    quarter = len(data) // 4
    text.write_bytes(data[:quarter] + bytes(reversed(data[quarter:-quarter])) + data[-quarter:])
    end = arena.start("--resume", steps=STEPS + 1).end(2)
    arena.note(end.last)


def test_full_disk(arena):
    """A full disk ends the run with an error that names the path; older checkpoints are intact."""
    path = arena.saved().newest().path
    most = max(file.stat().st_size for file in path.iterdir())
    shutil.rmtree(path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most // 2, old[1]))  # of new processes
    try:
        job = arena.start("--resume", steps=STEPS + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    end = job.end(1)
    assert job.newest().step == STEPS - 1
    assert not list((job.out / CHECKPOINTS).glob("*.tmp*"))
    arena.note(end.last)


def test_another_mesh(arena):
    """A run resumes on a different mesh: trained on tp2, resumed on tp2 dp2 with ZeRO 3."""
    arena.saved()
    there = arena.on_layout("tp2 dp2, ZeRO 3")
    try:
        job = there.start("--resume", "--batch", "1", steps=STEPS + 2)
        job.end(0)
    finally:
        there.stop()
    arena.note(f"trained to a loss of {job.losses()[STEPS + 2]:.3f}")
