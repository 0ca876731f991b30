"""Stopping a run by signals: one decision for the process that starts ranks, for ranks, servers."""

from __future__ import annotations

import signal
import time
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE = 2.0  # seconds after the first signal in which others are the same stop


class Interrupt:
    """A first signal asks for a stop after the current step, with a checkpoint; a second one raises
    KeyboardInterrupt, once.

    SIGINT, SIGTERM and SIGHUP are alike. Those within two seconds of the first are one stop, since
    it often comes twice: Ctrl-C from the terminal to ranks and to what started them, which passes
    it on; ``timeout`` signals its child and then the child's group; a finger bounces.

    Attributes:
        number: the first signal; None until there is one.
        again: a second one came.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self.again = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Take over the signals; in the main thread. A SIGHUP that is ignored stays so (nohup)."""
        for number in STOPS:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                self._before.setdefault(number, signal.signal(number, self._handle))

    def __enter__(self) -> Interrupt:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: Any) -> None:
        now = time.monotonic()
        if self.number is None:
            self.number, self._first = number, now
        elif now > self._first + ONE and not self.again:
            self.again = True
            raise KeyboardInterrupt
