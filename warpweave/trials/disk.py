"""What is on the disk, damaged, and disks that are full."""

from __future__ import annotations

import random
import resource
import shutil

from warpweave.checkpoint import CheckpointError, open_checkpoint
from warpweave.train.options import CHECKPOINTS
from warpweave.trials.job import promised
from warpweave.trials.trial import STEPS, Arena, trial


@trial("100 of 100 flipped bits are found, wherever they are")
def flipped_bits(arena: Arena) -> str:
    """One at a time, in any file of a checkpoint."""
    path, draw, found = arena.saved().newest().path, random.Random(0), 0
    files = sorted(path.iterdir())
    for _ in range(100):
        file = draw.choice(files)
        whole = file.read_bytes()
        data, at = bytearray(whole), draw.randrange(len(whole))
        data[at] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        try:
            open_checkpoint(path)
        except CheckpointError:
            found += 1
        file.write_bytes(whole)
    promised(found == 100, f"{found} of 100")
    open_checkpoint(path)
    return "100 of 100"


@trial("a damaged checkpoint is passed over, the one before is taken and said")
def damaged_checkpoint(arena: Arena) -> str:
    """A file of the last step is cut short."""
    path = arena.saved().newest().path
    shard = next(path.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    job = arena.start("--resume", steps=STEPS + 1)
    end = job.end(0)
    promised(any(path.name in line for line in end.said), end.said)
    return next(line for line in end.said if path.name in line).removeprefix("warpweave: ")


@trial("damaged metrics do not stop a run that goes on; what was damaged is kept")
def damaged_metrics(arena: Arena) -> str:
    """Rubbish, half a row, a row that is none."""
    arena.saved()
    job_rows = arena.folder / "run" / "metrics.jsonl"
    rows = job_rows.read_bytes().splitlines()
    rows[2:2] = [b"\xff\x00rubbish", b"[1, 2]", rows[2][:-7]]
    job_rows.write_bytes(b"\n".join(rows) + b'\n{"step": ')
    job = arena.start("--resume", steps=STEPS + 1)
    end = job.end(0)
    promised([*job.losses()] == [*range(1, STEPS + 2)], f"rows of steps {[*job.losses()]}")
    return next(line for line in end.said if "damaged" in line).removeprefix("warpweave: ")


@trial("other data are refused")
def other_data(arena: Arena) -> str:
    """The middle half of the text is another one."""
    arena.saved()
    text = arena.folder / "text"
    data = text.read_bytes()
    quarter = len(data) // 4
    text.write_bytes(data[:quarter] + bytes(reversed(data[quarter:-quarter])) + data[-quarter:])
    end = arena.start("--resume", steps=STEPS + 1).end(2)
    return end.said[-1].removeprefix("warpweave: ")


@trial("a full disk ends the run with the path; earlier steps are whole")
def full_disk(arena: Arena) -> str:
    """No file may be larger than a shard's half, from step 3 on."""
    path = arena.saved().newest().path
    most = max(file.stat().st_size for file in path.iterdir())
    shutil.rmtree(path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most // 2, old[1]))
    try:
        job = arena.start("--resume", steps=STEPS + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    end = job.end(1)
    promised(job.newest().step == STEPS - 1, f"the last checkpoint is of step {job.newest().step}")
    promised(not list((job.out / CHECKPOINTS).glob("*.tmp*")), "a part of a step is left")
    return end.said[-1].removeprefix("warpweave: ")


@trial("a checkpoint goes on on any other mesh")
def another_mesh(arena: Arena) -> str:
    """Saved by tensor ranks, resumed by data ranks with ZeRO 3."""
    arena.saved()
    there = Arena(arena.folder, "tp2 dp2, ZeRO 3", arena.references)
    try:
        job = there.start("--resume", "--batch", "1", steps=STEPS + 2)
        job.end(0)
        return f"trained on to a loss of {job.losses()[STEPS + 2]:.3f}"
    finally:
        for each in there._jobs:
            each.stop()
