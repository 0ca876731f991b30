"""Messages of the commands: one line each, on stderr."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def one_line(error: BaseException) -> str:
    """The text of an error as one line."""
    return " ".join(str(error).split())


def say(message: str) -> None:
    """Print one line on stderr, below a progress bar if there is one."""
    print(f"\nwarpweave: {message}", file=sys.stderr, flush=True)


def tell_torchrun(why: str) -> None:
    """Let torchrun, if it started this process, end its report with the reason of a failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with suppress(OSError):  # torchrun is gone, with its folder
            said = {"message": why, "extraInfo": {"timestamp": str(int(time.time()))}}
            Path(path).write_text(json.dumps({"message": said}))


@contextmanager
def refusing(*errors: type[BaseException]) -> Iterator[None]:
    """End the process with exit code 2 and one line on stderr if one of `errors` is raised.

    For what a user can correct, before a command has begun its work.
    """
    try:
        yield
    except errors as error:
        say(one_line(error))
        tell_torchrun(one_line(error))
        sys.exit(2)
