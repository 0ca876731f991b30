"""Messages of the commands: one line each, on stderr."""

from __future__ import annotations

import sys


def one_line(error: BaseException) -> str:
    """The text of an error as one line."""
    return " ".join(str(error).split())


def say(message: str) -> None:
    """Print one line on stderr, below a progress bar if there is one."""
    print(f"\nwarpweave: {message}", file=sys.stderr, flush=True)
