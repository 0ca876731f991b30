"""Runs that are asked to stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest
from arena import Arena
from jobs import TrainingJob

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]
_ENDLESS = 100_000


def _running(arena: Arena) -> TrainingJob:
    job = arena.start("--save-every", "0", steps=_ENDLESS)
    job.wait_for(lambda: job.steps() >= 3)
    return job


def _saves(arena: Arena, number: signal.Signals, *to: Callable[[int, int], None]) -> None:
    """Send a signal by each of `to`, 0.3 s apart: the run must end as the signal says, saved."""
    job = _running(arena)
    done = job.steps()
    for send in to:
        if job.process.poll() is None:
            send(job.process.pid, number)
            time.sleep(0.3)
    end, kept = job.end(128 + number), job.newest().step
    assert end.result is not None
    assert end.result["stopped"] is True, end.stderr
    assert kept == end.result["steps"] == job.steps() >= done
    arena.note(f"saved at step {kept}, exit status {end.code}")


def test_terminated(arena):
    """SIGTERM to the launcher ends the run after the current step, which is saved."""
    _saves(arena, signal.SIGTERM, os.kill)


def test_hung_up(arena):
    """SIGHUP from a closed terminal ends the run after the current step, which is saved."""
    _saves(arena, signal.SIGHUP, os.killpg)


def test_ctrl_c_twice_at_once(arena):
    """Two signals within 2 s, from a terminal and a launcher, count as one."""
    _saves(arena, signal.SIGINT, os.killpg, os.killpg)


def test_timed_out(arena):
    """`timeout` signals its child and then the group; the run ends and is saved."""
    _saves(arena, signal.SIGTERM, os.kill, os.killpg)


def test_stopped_twice(arena):
    """A second signal more than 2 s later ends the run at once, even with stopped ranks."""
    job = _running(arena)
    for rank in job.ranks():
        os.kill(rank, signal.SIGSTOP)
    os.kill(job.process.pid, signal.SIGINT)
    time.sleep(2.5)
    os.kill(job.process.pid, signal.SIGINT)
    end = job.end(128 + signal.SIGINT)
    assert end.last.endswith("stopped at once, without saving")
    arena.note(end.last)
