"""File access for data: read whole files, or write under a new name and rename into place."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_CHUNK = 16 << 20  # bytes read at a time


class DataError(ValueError):
    """A source cannot serve the requested samples; one line with the path and the sizes."""


def read_whole(path: Path) -> bytes:
    """Return a file's content, or raise `DataError`."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def sha256(path: Path, kept: Path | None = None) -> str:
    """Return the SHA-256 of a file, or raise `DataError`; about 1 s per GB with hardware support.

    If the folder `kept` is given, the digest is cached in its ``digests.json``. It is recomputed
    only if the file's size, inode, or time of last write or change differs. A file written within
    the last second is not cached: a further write might not change its times.
    """
    memory = None if kept is None else kept / "digests.json"
    digests: Any = {}
    if memory is not None:
        with suppress(OSError, ValueError, RecursionError):
            digests = json.loads(memory.read_bytes())
        digests = digests if isinstance(digests, dict) else {}
    name, digest = str(path.resolve()), hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            stamp = _stamp(file.fileno())
            if isinstance(held := digests.get(name), list) and held[:-1] == stamp:
                return str(held[-1])
            old = time.time_ns() - max(stamp[1:3]) > 10**9
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
            whole = _stamp(file.fileno()) == stamp
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if memory is not None and old and whole:
        found = json.dumps(digests | {name: [*stamp, digest.hexdigest()]}).encode()
        with suppress(OSError, DataError):  # then it is computed again next time
            memory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace(memory, lambda file: file.write(found))
    return digest.hexdigest()


def _stamp(file: int) -> list[int]:
    status = os.fstat(file)
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


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
