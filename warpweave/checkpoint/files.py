"""Durable files, and errors that all ranks share.

Files are written once, flushed to disk and never reached through a link. If one rank fails, every
rank raises its error.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from warpweave.cli.messages import one_line
from warpweave.parallel.exchange import exchange

CHUNK = 16 << 20  # bytes written at a time

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or must not be read; one line that names the file."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was skipped, or an unknown file left in place."""


def reason(error: Exception, path: Path) -> str:
    """Return an error as one line, with `path` if it does not name a file itself."""
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or one_line(error)}"
    return one_line(error)


def attempt(path: Path, work: Callable[..., dict[str, Any] | None], *args: Any) -> dict[str, Any]:
    """Return the result of ``work(*args)`` ({} for None), or {"error": the reason} if it raised."""
    try:
        return work(*args) or {}
    except (CheckpointError, OSError) as error:
        return {"error": reason(error, path)}


def agree_on_all(own: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    """Return the results of `attempt` on all ranks; if any failed, raise the first rank's error, on
    every rank."""
    every = exchange(own, group)
    for result in every:
        if "error" in result:
            raise CheckpointError(result["error"])
    return every


# ---- files ---------------------------------------------------------------------------------------


def write(path: Path, *parts: bytes | memoryview) -> str:
    """Create a file (mode 0600, never through a link), flush it to disk, and return its SHA-256.

    The digest is of the data in memory, so that reading detects what the disk has changed.
    """
    done, size, digest = 0, sum(map(len, parts)), hashlib.sha256()
    try:
        file = os.open(path, _CREATE, 0o600)
        try:
            for part in parts:
                view = memoryview(part)
                while view:
                    written = os.write(file, view[:CHUNK])
                    digest.update(view[:written])
                    view, done = view[written:], done + written
            os.fsync(file)
            if hasattr(os, "posix_fadvise"):  # so that reading it back reads the disk
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror} after {done} of {size} bytes"
            + ("; free space or raise the limit, earlier checkpoints are intact" if full else "")
        ) from None
    return digest.hexdigest()


def flush_folder(path: Path) -> None:
    """Flush a folder's entries to disk."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def open_regular(path: Path) -> int:
    """Open a regular file for reading; refuse links, devices and pipes without waiting."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise CheckpointError(
            f"{path} is a link (links are rejected)" if link else f"{path}: {error.strerror}"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is not a regular file")
    return file


def read_at_most(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file; raise `CheckpointError` if it has more than `most`."""
    with os.fdopen(open_regular(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path} has more than {most} bytes")
    return data


def stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return a value that changes when the file is replaced or written to."""
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)
