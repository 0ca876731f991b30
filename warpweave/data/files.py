"""Files as data needs them: read whole, or written under a new name and renamed into place."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """A source that cannot serve the samples asked for; one line with the path and the sizes."""


def read_whole(path: Path) -> bytes:
    """All of a file, or `DataError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def sha256(path: Path) -> str:
    """Digest of a file."""
    return hashlib.sha256(read_whole(path)).hexdigest()


def replace(path: Path, write: Callable[[Any], object], mode: int = 0o600) -> None:
    """Write a file under a new name, never through a link, and rename it into place."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(temporary, flags, mode), "wb") as file:
            write(file)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror}") from None
