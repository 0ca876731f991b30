"""Stopping a run by a signal, which takes effect after the current step."""

from __future__ import annotations

import math
import signal
import time
from typing import Any


class Interrupt:
    """Ctrl-C or SIGTERM asks for a stop after the current step; Ctrl-C again stops at once.

    One Ctrl-C can arrive twice, from the terminal and from the launcher.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._when = 0.0

    def listen(self) -> None:
        """Take over the two signals; in the main thread."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: Any) -> None:
        if self.number is None:
            self.number, self._when = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() > self._when + 2.0:
            self._when = math.inf  # raise once
            raise KeyboardInterrupt
