"""Ranks that die or hang."""

from __future__ import annotations

import os
import random
import re
import signal
import time

from warpweave.trials.faults import Fault, planted_at
from warpweave.trials.job import Ended, TrainingJob, promised
from warpweave.trials.trial import ELASTIC, FOUR, GRID, SERVED, STEPS, Arena, trial

AT = 4  # the step in which something happens
_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*)")


def named(end: Ended) -> set[int]:
    """The ranks that the lines of ours on stderr name."""
    found = (ranks for line in end.said for ranks in _RANKS.findall(line))
    return {int(rank) for ranks in found for rank in ranks.split(", ")}


def ends_for(arena: Arena, job: TrainingJob, rank: int, within: float) -> str:
    """That the job ends in `within` seconds of its fault, names `rank` alone and keeps the last
    checkpoint; in words."""
    end = job.end()
    seconds = arena.since(job, end)
    promised(end.code not in (0, None), f"ended with {end.code}")
    promised(named(end) == {rank}, f"rank {rank} is at fault, said was: {end.said}")
    promised("Traceback" not in end.stderr, end.stderr)
    promised(job.newest().step >= AT - 1, f"the last checkpoint is of step {job.newest().step}")
    return f"{arena.took(seconds, within)}: {end.said[-1].removeprefix('warpweave: ')}"


@trial("a killed rank alone is named, within 2 s; the last checkpoint opens", *FOUR)
def killed_in_a_step(arena: Arena) -> str:
    """SIGKILL as a step begins."""
    rank = random.Random(arena.layout).randrange(4)
    return ends_for(arena, arena.start(fault=Fault("kill", rank, AT)), rank, 2.0)


@trial("as that, where torchrun has started the ranks")
def killed_under_torchrun(arena: Arena) -> str:
    """SIGKILL; seconds are those to the line, as torchrun takes its own time to end."""
    job = arena.start(fault=Fault("kill", 1, AT), torchrun=2)
    end = job.end()
    promised(named(end) == {1}, end.stderr)
    return end.said[-1]


@trial("a rank that leaves with 0 alone is named, within 2 s")
def left_with_0(arena: Arena) -> str:
    """``os._exit(0)`` in a step."""
    return ends_for(arena, arena.start(fault=Fault("leave", 1, AT)), 1, 2.0)


@trial("the error is told once, with its traceback and its rank")
def raised(arena: Arena) -> str:
    """An ordinary exception on one rank."""
    job = arena.start(fault=Fault("raise", 1, AT))
    end = job.end()
    promised(end.stderr.count("Traceback") == 1, end.stderr)
    promised(named(end) == {1}, end.said)
    return end.said[-1]


def _hangs(act: str, arena: Arena) -> str:
    arena.timeout = 6.0
    return ends_for(arena, arena.start(fault=Fault(act, 1, AT)), 1, arena.timeout + 5.0)


@trial("a hung rank alone is named, within the timeout + 5 s", FOUR[0])
def hung(arena: Arena) -> str:
    """It sleeps."""
    return _hangs("sleep", arena)


@trial("a rank stuck in Python code alone is named, within the timeout + 5 s")
def spinning(arena: Arena) -> str:
    """``while True``."""
    return _hangs("spin", arena)


@trial("a rank that holds Python's lock alone is named, within the timeout + 5 s")
def holding_the_lock(arena: Arena) -> str:
    """As a C extension that does not come back."""
    return _hangs("hold the lock", arena)


@trial("a stopped rank alone is named, within the timeout + 5 s")
def stopped(arena: Arena) -> str:
    """SIGSTOP."""
    return _hangs("stop", arena)


def _launcher_dies(act: str, arena: Arena) -> str:
    job = arena.start(fault=Fault(act, 1, AT))
    job.wait_for(lambda: planted_at(job.out))
    time.sleep(0.2)
    return _ends_with_launcher(job)


def _ends_with_launcher(job: TrainingJob) -> str:
    os.kill(job.process.pid, signal.SIGKILL)
    began = time.monotonic()
    job.end()  # nobody may be left after five seconds
    return f"nobody left after {time.monotonic() - began:.1f} s"


@trial("ranks end within 5 s of their launcher, one that is stopped, too")
def launcher_killed_with_a_stopped_rank(arena: Arena) -> str:
    """SIGKILL of the launcher."""
    return _launcher_dies("stop", arena)


@trial("ranks end within 5 s of their launcher, one that holds Python's lock, too")
def launcher_killed_with_a_stuck_rank(arena: Arena) -> str:
    """SIGKILL of the launcher."""
    return _launcher_dies("hold the lock", arena)


@trial("servers and workers end within 5 s of the process that started them", SERVED)
def launcher_of_servers_killed(arena: Arena) -> str:
    """SIGKILL of it, with a worker that is stopped."""
    job = arena.start(steps=100_000)
    job.wait_for(lambda: job.steps() >= 2)
    os.kill(job.ranks()[1], signal.SIGSTOP)
    return _ends_with_launcher(job)


def _goes_on(arena: Arena, fault: Fault, *, torchrun: int = 0) -> str:
    """That a run with `fault` that is started again has the losses of an undisturbed one, and goes
    on from no checkpoint of an earlier run in its folder."""
    wanted = arena.saved().losses()
    job = arena.start(fault=fault, torchrun=torchrun, max_restarts=1)
    end = job.end(0)
    resumed = re.findall(r"resumed at step (\d+)", end.stderr)
    promised(len(resumed) == 1, f"it did not go on from a checkpoint: {end.stderr}")
    promised(job.losses() == wanted, "other losses than those of an undisturbed run")
    took = arena.took(arena.since(job, end), 15.0)
    return f"went on at step {resumed[0]}, {STEPS} losses to the bit; {took} from kill to end"


@trial("started again, a run has the losses of an undisturbed one, to the bit", *GRID)
def killed_and_restarted(arena: Arena) -> str:
    """SIGKILL of a rank, in a step."""
    return _goes_on(arena, Fault("kill", 1, AT))


@trial("as that, where torchrun starts the ranks again")
def killed_and_restarted_by_torchrun(arena: Arena) -> str:
    """SIGKILL of a rank, in a step."""
    return _goes_on(arena, Fault("kill", 1, AT), torchrun=2)


@trial("killed at any moment, also while it saves, a run goes on to the bit")
def killed_at_any_moment(arena: Arena) -> str:
    """Within a step, and within a save."""
    said = ""
    for number, (at, delay) in enumerate((("within", 0.01), ("save", 0.003))):
        rank, step = number, 2 + number
        moment = Fault("kill", rank, step, at=at, delay=delay)  # type: ignore[arg-type]
        inside = Arena(arena.folder / str(number), arena.layout, arena.references)
        try:
            said = _goes_on(inside, moment)
        finally:
            inside.leave()
    return f"2 of 2: {said}"


@trial(
    "a replica that dies leaves, the others train on from the same step; it joins again", ELASTIC
)
def replica_killed(arena: Arena) -> str:
    """SIGKILL of the middle one of three replicas."""
    job = arena.start("--save-every", "0", steps=4000)
    job.wait_for(lambda: job.steps() >= 3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    job.wait_for(lambda: {(0, 2), (0, 1, 2)} <= {(*row["replicas"],) for row in _away(job)})
    os.kill(job.process.pid, signal.SIGTERM)
    job.end(128 + signal.SIGTERM)
    rows = [row for row in job.rows() if "loss" in row]
    promised([row["step"] for row in rows] == [*range(1, len(rows) + 1)], "steps are missing")
    away = sum(row["replicas"] == [0, 2] for row in rows)
    return f"away for {away} of {len(rows)} steps, no row is missing"


def _away(job: TrainingJob) -> list[dict]:
    """The rows of steps since a replica was first away."""
    rows = [row for row in job.rows() if "loss" in row]
    first = next((i for i, row in enumerate(rows) if len(row["replicas"]) < 3), len(rows))
    return rows[first:]
