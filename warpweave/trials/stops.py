"""Runs that are asked to stop."""

from __future__ import annotations

import os
import signal
import time

from warpweave.trials.job import TrainingJob, promised
from warpweave.trials.trial import Arena, trial

_ENDLESS = 100_000


def _running(arena: Arena) -> TrainingJob:
    job = arena.start("--save-every", "0", steps=_ENDLESS)
    job.wait_for(lambda: job.steps() >= 3)
    return job


def _saved(job: TrainingJob, number: signal.Signals) -> str:
    """That the job ends as signal `number` says, with its last step saved; in words."""
    done = job.steps()
    end, kept = job.end(128 + number), job.newest().step
    result = end.result or {}
    promised(result.get("stopped") is True, end.stderr)
    promised(kept == result["steps"] == job.steps() >= done, f"{kept} saved of {job.steps()} steps")
    return f"saved at step {kept}, exit status {end.code}"


@trial("it ends after its step, which is saved")
def terminated(arena: Arena) -> str:
    """SIGTERM to the launcher."""
    job = _running(arena)
    os.kill(job.process.pid, signal.SIGTERM)
    return _saved(job, signal.SIGTERM)


@trial("a hung-up terminal is a stop that saves")
def hung_up(arena: Arena) -> str:
    """SIGHUP to all."""
    job = _running(arena)
    os.killpg(job.process.pid, signal.SIGHUP)
    return _saved(job, signal.SIGHUP)


@trial("a signal that comes twice within 2 s is one")
def ctrl_c_twice_at_once(arena: Arena) -> str:
    """SIGINT to all, again 0.3 s later, as a terminal and a launcher give it."""
    job = _running(arena)
    os.killpg(job.process.pid, signal.SIGINT)
    time.sleep(0.3)
    if job.process.poll() is None:
        os.killpg(job.process.pid, signal.SIGINT)
    return _saved(job, signal.SIGINT)


@trial("a stop by `timeout`, which signals its child and then the group, saves")
def timed_out(arena: Arena) -> str:
    """SIGTERM to the launcher and then to all."""
    job = _running(arena)
    os.kill(job.process.pid, signal.SIGTERM)
    os.killpg(job.process.pid, signal.SIGTERM)
    return _saved(job, signal.SIGTERM)


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
