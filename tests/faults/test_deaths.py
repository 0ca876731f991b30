"""Ranks that die or hang."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time

import pytest
from arena import AT, ELASTIC, FOUR, GRID, SERVED, STEPS, Arena, named, on
from fault_acts import Fault, planted_at
from jobs import TrainingJob

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


def _fails(arena: Arena, fault: Fault, within: float) -> None:
    """Start a job that must end soon, name the rank at fault alone, and keep its checkpoint."""
    job = arena.start(fault=fault)
    end = job.end()
    seconds = arena.since_fault(job, end)
    assert end.code != 0
    assert named(end) == {fault.rank}
    assert "Traceback" not in end.stderr
    assert job.newest().step >= AT - 1
    arena.note(f"{arena.took(seconds, within)}: {end.last}")


@on(*FOUR)
def test_killed_in_a_step(arena):
    """Only the killed rank is named, within 2 s; the last checkpoint opens."""
    rank = random.Random(arena.layout).randrange(4)
    _fails(arena, Fault("kill", rank, AT), 2.0)


def test_killed_under_torchrun(arena):
    """Under torchrun, only the killed rank is named."""
    end = arena.start(fault=Fault("kill", 1, AT), torchrun=2).end()
    assert named(end) == {1}
    arena.note(end.last)


def test_left_with_0(arena):
    """If one rank exits with status 0, only that rank is named, within 2 s."""
    _fails(arena, Fault("leave", 1, AT), 2.0)


def test_raised(arena):
    """An exception is printed once, with its traceback and its rank."""
    end = arena.start(fault=Fault("raise", 1, AT)).end()
    assert end.stderr.count("Traceback") == 1
    assert named(end) == {1}
    arena.note(end.last)


def _hangs(act: str, arena: Arena) -> None:
    arena.timeout = 6.0
    _fails(arena, Fault(act, 1, AT), arena.timeout + 5.0)


@on(FOUR[0])
def test_hung(arena):
    """Only the hung rank is named, within the timeout + 5 s."""
    _hangs("sleep", arena)


def test_spinning(arena):
    """If one rank is stuck in Python code, only that rank is named, within the timeout + 5 s."""
    _hangs("spin", arena)


def test_holding_the_lock(arena):
    """If one rank holds Python's lock, only that rank is named, within the timeout + 5 s."""
    _hangs("hold the lock", arena)


def test_stopped(arena):
    """Only the stopped rank (SIGSTOP) is named, within the timeout + 5 s."""
    _hangs("stop", arena)


def _ends_with_its_launcher(arena: Arena, job: TrainingJob) -> None:
    os.kill(job.process.pid, signal.SIGKILL)
    began = time.monotonic()
    job.end()  # fails if a process is left after five seconds
    arena.note(f"no process left after {time.monotonic() - began:.1f} s")


@pytest.mark.parametrize("act", ["stop", "hold the lock"])
def test_launcher_killed(arena, act):
    """Ranks end within 5 s of their launcher, even if one is stopped or holds Python's lock."""
    job = arena.start(fault=Fault(act, 1, AT))
    job.wait_for(lambda: planted_at(job.out))
    time.sleep(0.2)
    _ends_with_its_launcher(arena, job)


@on(SERVED)
def test_launcher_of_servers_killed(arena):
    """Servers and workers end within 5 s of their launcher, even a stopped worker."""
    job = arena.start(steps=100_000)
    job.wait_for(lambda: job.steps() >= 2)
    os.kill(job.ranks()[1], signal.SIGSTOP)
    _ends_with_its_launcher(arena, job)


def _restarts(arena: Arena, fault: Fault, *, torchrun: int = 0) -> None:
    """Restart a job after its fault: it must end with the losses of an undisturbed run.

    The folder holds checkpoints of an earlier run, from which the job must not resume.
    """
    wanted = arena.saved().losses()
    job = arena.start(fault=fault, torchrun=torchrun, max_restarts=1)
    end = job.end(0)
    resumed = re.findall(r"resumed at step (\d+)", end.stderr)
    assert len(resumed) == 1, f"it did not resume from a checkpoint: {end.stderr}"
    assert job.losses() == wanted
    took = arena.took(arena.since_fault(job, end), 15.0)
    arena.note(f"resumed at step {resumed[0]}, {STEPS} losses to the bit; ended {took} later")


@on(*GRID)
def test_killed_and_restarted(arena):
    """A restarted run has bitwise the same losses as an undisturbed run."""
    _restarts(arena, Fault("kill", 1, AT))


def test_killed_and_restarted_by_torchrun(arena):
    """A run that torchrun restarts has bitwise the same losses as an undisturbed run."""
    _restarts(arena, Fault("kill", 1, AT), torchrun=2)


@pytest.mark.parametrize(
    "fault", [Fault("kill", 0, 2, at="within", delay=0.01), Fault("kill", 1, 3, "save", 0.003)]
)
def test_killed_at_any_moment(arena, fault):
    """If a run is killed in a step or a save and restarted, its losses are bitwise the same."""
    _restarts(arena, fault)


@on(ELASTIC)
def test_replica_killed(arena):
    """The other replicas continue with the same step; the killed replica joins again."""
    job = arena.start("--save-every", "0", steps=4000)
    job.wait_for(lambda: job.steps() >= 3)
    os.kill(job.ranks()[1], signal.SIGKILL)
    job.wait_for(lambda: {(0, 2), (0, 1, 2)} <= {(*row["replicas"],) for row in _since_away(job)})
    os.kill(job.process.pid, signal.SIGTERM)
    job.end(128 + signal.SIGTERM)
    rows = [row for row in job.rows() if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, len(rows) + 1)]
    away = sum(row["replicas"] == [0, 2] for row in rows)
    arena.note(f"away for {away} of {len(rows)} steps, no row is missing")


def _since_away(job: TrainingJob) -> list[dict]:
    """Return the rows of steps since a replica was first away."""
    rows = [row for row in job.rows() if "loss" in row]
    first = next((i for i, row in enumerate(rows) if len(row["replicas"]) < 3), len(rows))
    return rows[first:]
