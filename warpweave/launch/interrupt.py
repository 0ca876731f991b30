"""Stopping a run by signals: one rule for ranks, servers, and the process that starts them."""

from __future__ import annotations

import signal
import time
from typing import Any

STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE = 2.0  # seconds after the first signal in which further ones count as the same stop
AT_ONCE = "stopped at once, without saving"  # the message after a second signal


class Stopped(SystemExit):
    """Exit after signal `number`, with 128 + number or the code that a rank then failed with."""

    def __init__(self, number: int, code: int = 0) -> None:
        super().__init__(code or 128 + number)
        self.number = number


class Interrupt:
    """Requests a stop at the first signal; raises KeyboardInterrupt at the second.

    The run stops after the current step, with a checkpoint; KeyboardInterrupt is raised once.
    SIGINT, SIGTERM, and SIGHUP are treated the same. Signals within two seconds of the first count
    as one stop, since a stop often arrives twice: the terminal sends Ctrl-C to the ranks and to
    their parent, which passes it on; ``timeout`` signals its child and then the child's group; a
    key press bounces.

    With `raises`, for work that has nothing to save, the first signal raises `Stopped`. `number` is
    the first signal, None until there is one, and `again` is True after a second one.
    """

    def __init__(self, *, raises: bool = False) -> None:
        self._raises = raises
        self.number: int | None = None
        self.again = False
        self._first = 0.0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers, in the main thread. An ignored SIGHUP stays ignored (nohup)."""
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
            if self._raises:
                raise Stopped(number)
        elif now > self._first + ONE and not self.again:
            self.again = True
            raise KeyboardInterrupt
