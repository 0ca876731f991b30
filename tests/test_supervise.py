"""Supervision of processes: signals, exit codes, and that no process is left."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext

import pytest
from ranks import QuickProcesses

import warpweave.launch.interrupt as interrupts
from warpweave.launch.interrupt import STOPS, Stopped
from warpweave.launch.processes import Processes
from warpweave.launch.supervise import supervise


def _sleeps() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    time.sleep(600)


def _ignores_sigterm(ready: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(ready, signal.SIGINT)
    time.sleep(600)


@pytest.mark.parametrize(
    ("code", "number", "raised"),
    [(0, None, None), (3, None, SystemExit(3)), (0, signal.SIGTERM, Stopped(15)),
     (143, signal.SIGTERM, Stopped(15, 143)), (1, signal.SIGINT, Stopped(2, 1))],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_watch_or_of_the_signal(code, number, raised):
    def start() -> None:
        if number is not None:
            os.kill(os.getpid(), number)

    with nullcontext() if raised is None else pytest.raises(type(raised)) as ended:
        supervise(Processes(), start, lambda stop: code)
    if raised is not None:
        assert (type(ended.value), ended.value.code) == (type(raised), raised.code)
        assert getattr(ended.value, "number", None) == number


@pytest.mark.parametrize("error", [None, ArithmeticError])
def test_no_process_is_left_however_the_watch_ends(error):
    processes, started = QuickProcesses(), []

    def start() -> None:
        started.extend(processes.start(_sleeps) for _ in range(2))

    def watch(stop: int | None) -> int:
        if error is not None:
            raise error
        return 0

    with nullcontext() if error is None else pytest.raises(error):
        supervise(processes, start, watch)
    assert [process.exitcode for process in started] == [-signal.SIGKILL] * 2


def test_the_first_signal_reaches_all_processes_once_and_then_the_watch():
    processes, started, stops = QuickProcesses(), [], []

    def start() -> None:
        started.extend(processes.start(_sleeps) for _ in range(2))

    def watch(stop: int | None) -> int | None:
        stops.append(stop)
        if len(stops) == 1:
            os.kill(os.getpid(), signal.SIGHUP)
        return 5 if all(process.exitcode is not None for process in started) else None

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(Stopped, match=r"^5$") as ended:
            supervise(processes, start, watch)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.number == signal.SIGHUP
    assert [process.exitcode for process in started] == [-signal.SIGTERM] * 2
    assert (stops[0], {*stops[1:]}) == (None, {signal.SIGHUP})


def test_the_second_signal_kills_processes_that_ignore_the_first(monkeypatch, capsys):
    monkeypatch.setattr(interrupts, "ONE", 0.0)
    processes, started = QuickProcesses(), []

    def start() -> None:
        started.append(processes.start(_ignores_sigterm, os.getpid()))

    def watch(stop: int | None) -> None:
        if stop is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Stopped, match=r"^130$"):
        supervise(processes, start, watch)
    assert started[0].exitcode == -signal.SIGKILL
    assert capsys.readouterr().err.strip() == "warpweave: stopped at once, without saving"


def test_a_process_that_cannot_be_started_ends_the_run_in_one_line(capsys):
    def start() -> None:
        raise ChildProcessError("it has\n ended")

    with pytest.raises(SystemExit, match=r"^1$"):
        supervise(Processes(), start, lambda stop: 0)
    assert capsys.readouterr().err.strip() == "warpweave: it has ended"
