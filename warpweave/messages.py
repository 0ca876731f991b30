"""What a command says to people: one line, on stderr."""

from __future__ import annotations

import sys


def one_line(error: BaseException) -> str:
    """The words of an error, whatever line breaks they came with."""
    return " ".join(str(error).split())


def say(message: str) -> None:
    """One line on stderr, below whatever progress bar is there."""
    print(f"\nwarpweave: {message}", file=sys.stderr, flush=True)
