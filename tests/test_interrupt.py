"""Signals: which of them count as one stop, and that handlers are restored."""

from __future__ import annotations

import os
import signal

import pytest

import warpweave.launch.interrupt as interrupts
from warpweave.launch.interrupt import STOPS, Interrupt, Stopped


@pytest.mark.parametrize("first", STOPS)
@pytest.mark.parametrize("again", STOPS)
def test_signals_within_two_seconds_are_one_stop_and_a_later_one_interrupts(
    monkeypatch, first, again
):
    clock = [100.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: clock[0])
    interrupt = Interrupt()
    interrupt._handle(first, None)
    # from the terminal and from the launcher, or from a double keypress
    for late in (0.0, 0.3, 1.9, 2.0):
        clock[0] = 100.0 + late
        interrupt._handle(again, None)
    assert (interrupt.number, interrupt.again) == (first, False)
    clock[0] = 102.1
    with pytest.raises(KeyboardInterrupt):
        interrupt._handle(again, None)
    interrupt._handle(again, None)  # must not interrupt the exit
    assert (interrupt.number, interrupt.again) == (first, True)


def test_first_signal_raises_if_asked_to_and_a_doubled_one_does_not():
    with Interrupt(raises=True) as interrupt:
        with pytest.raises(Stopped) as stopped:
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert (stopped.value.number, stopped.value.code) == (signal.SIGTERM, 128 + signal.SIGTERM)
    assert interrupt.number == signal.SIGTERM


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_listens_and_leaves_what_it_found_and_nohup_is_kept(ignored):
    found = signal.SIG_IGN if ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, found)
    try:
        with Interrupt() as interrupt:
            interrupt.listen()  # as a rank does twice
            for number in STOPS if not ignored else (signal.SIGHUP,):
                os.kill(os.getpid(), number)
        assert interrupt.number == (None if ignored else STOPS[0])
        assert signal.getsignal(signal.SIGHUP) == found
    finally:
        signal.signal(signal.SIGHUP, before)
