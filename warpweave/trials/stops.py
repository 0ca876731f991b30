"""Runs that are asked to stop."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from warpweave.trials.job import TrainingJob, promised
from warpweave.trials.trial import Arena, trial

_ENDLESS = 100_000


def _running(arena: Arena) -> TrainingJob:
    job = arena.start("--save-every", "0", steps=_ENDLESS)
    job.wait_for(lambda: job.steps() >= 3)
    return job


def _saves(arena: Arena, number: signal.Signals, *to: Callable[[int, int], None]) -> str:
    """That a run to which each of `to` sends `number`, 0.3 s apart, ends as the signal says and its
    last step is saved; in words."""
    job = _running(arena)
    done = job.steps()
    for send in to:
        if job.process.poll() is None:
            send(job.process.pid, number)
            time.sleep(0.3)
    end, kept = job.end(128 + number), job.newest().step
    result = end.result or {}
    promised(result.get("stopped") is True, end.stderr)
    promised(kept == result["steps"] == job.steps() >= done, f"{kept} saved of {job.steps()} steps")
    return f"saved at step {kept}, exit status {end.code}"


@trial("it ends after its step, which is saved")
def terminated(arena: Arena) -> str:
    """SIGTERM to the launcher."""
    return _saves(arena, signal.SIGTERM, os.kill)


@trial("a hung-up terminal is a stop that saves")
def hung_up(arena: Arena) -> str:
    """SIGHUP to all."""
    return _saves(arena, signal.SIGHUP, os.killpg)


@trial("a signal that comes twice within 2 s is one")
def ctrl_c_twice_at_once(arena: Arena) -> str:
    """SIGINT to all and again, as a terminal and a launcher give it."""
    return _saves(arena, signal.SIGINT, os.killpg, os.killpg)


@trial("a stop by `timeout`, which signals its child and then the group, saves")
def timed_out(arena: Arena) -> str:
    """SIGTERM to the launcher, then to all."""
    return _saves(arena, signal.SIGTERM, os.kill, os.killpg)


@trial("a second signal later than 2 s stops at once")
def stopped_twice(arena: Arena) -> str:
    """SIGINT to the launcher of ranks that are stopped, again 2.5 s later."""
    job = _running(arena)
    for rank in job.ranks():
        os.kill(rank, signal.SIGSTOP)
    os.kill(job.process.pid, signal.SIGINT)
    time.sleep(2.5)
    os.kill(job.process.pid, signal.SIGINT)
    end = job.end(128 + signal.SIGINT)
    promised(end.said[-1].endswith("stopped at once, without saving"), end.said)
    return end.said[-1].removeprefix("warpweave: ")
