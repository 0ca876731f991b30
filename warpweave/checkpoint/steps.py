"""The folder of steps: atomic publication, retention, and finding the newest.

A step is written under a temporary name and renamed. Replacing a step takes two renames: the old
step is first renamed to ``.old-<id>``. After a crash between the two, the next save restores it.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import warnings
from pathlib import Path

from warpweave.checkpoint.files import (
    CheckpointError,
    CheckpointWarning,
    flush_folder,
    read_at_most,
    reason,
    write,
)
from warpweave.checkpoint.manifest import DIGEST, MANIFEST, SHARD, STEP

_LATEST = "latest"
_POINTER = re.compile(r"latest\.tmp-[0-9a-f]{16}")
_UNFINISHED = re.compile(r"step_(\d{8,18})\.(tmp|old)-[0-9a-f]{16}")

# ---- finding steps -------------------------------------------------------------------------------


def latest(folder: str | Path) -> Path | None:
    """Return the step to resume from: the one `latest` names if it is complete, else the highest.

    None if there is no step. Nothing is verified here; use `open_latest` for that.
    """
    return next(iter(newest_first(Path(folder))), None)


def newest_first(folder: Path) -> list[Path]:
    """Return the steps to resume from, in the order in which to try them."""
    steps = _steps(folder)
    names = {path.name for path in steps}
    try:
        # Include steps that a crash between the two renames left under their temporary name.
        for path in sorted(folder.iterdir()):
            match = _UNFINISHED.fullmatch(path.name)
            if match and match[2] == "old" and f"step_{match[1]}" not in names:
                steps.append(path)
        steps.sort(key=lambda path: int(path.name[5:].split(".")[0]), reverse=True)
        name, digest = read_at_most(folder / _LATEST, 200).decode("ascii").split()
        if name in names and read_at_most(folder / name / DIGEST, 64).decode("ascii") == digest:
            steps.remove(folder / name)
            steps.insert(0, folder / name)
    except (CheckpointError, OSError, ValueError):
        pass  # a missing or damaged `latest` is ignored
    return steps


def _steps(folder: Path) -> list[Path]:
    """Return the complete steps, highest first."""
    try:
        found = [(int(m[1]), p) for p in folder.iterdir() if (m := STEP.fullmatch(p.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


# ---- publishing ----------------------------------------------------------------------------------


def begin(folder: Path, name: str) -> Path:
    """Create the folder, and a new temporary folder in it; clean up after earlier crashes."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        if _POINTER.fullmatch(path.name):
            path.unlink()
        elif match := _UNFINISHED.fullmatch(path.name):
            whole = folder / f"step_{match[1]}"
            if match[2] == "old" and not os.path.lexists(whole):
                os.rename(path, whole)  # after a crash between the two renames
            else:
                discard(path)
    if os.path.lexists(folder / name) and not _is_ours(folder / name):
        raise CheckpointError(
            f"cannot replace {folder / name}: it is not a folder that contains only checkpoint "
            "files; move it elsewhere"
        )
    temporary = folder / f"{name}.tmp-{secrets.token_hex(8)}"
    temporary.mkdir(mode=0o700)
    return temporary


def publish_step(temporary: Path, step: Path, digest: str) -> None:
    """Rename a completely written step to its final name, and point `latest` to it."""
    flush_folder(temporary)
    aside = None
    if os.path.lexists(step):
        # After a crash between the two renames, `begin` restores the step, and `latest` finds it.
        aside = step.with_name(f"{step.name}.old-{secrets.token_hex(8)}")
        os.rename(step, aside)
    try:
        os.rename(temporary, step)
    except OSError:
        if aside is not None:
            os.rename(aside, step)
        raise
    flush_folder(step.parent)
    pointer = step.parent / f"{_LATEST}.tmp-{secrets.token_hex(8)}"
    try:
        write(pointer, f"{step.name} {digest}\n".encode())
        os.replace(pointer, step.parent / _LATEST)
        flush_folder(step.parent)
    finally:
        pointer.unlink(missing_ok=True)
    if aside is not None:
        discard(aside)


# ---- removing ------------------------------------------------------------------------------------


def prune(folder: Path, newest: Path, keep: int, spare: int | None) -> None:
    """Remove all steps but `newest`, the `keep` - 1 highest others, and step `spare`."""
    kept = (newest.name, "" if spare is None else f"step_{spare:08d}")
    others = [path for path in _steps(folder) if path.name not in kept]
    for path in others[keep - 1 :]:
        try:
            if not _is_ours(path):
                raise CheckpointError(f"{path} is not a folder that contains only checkpoint files")
            # Rename it first, so that a crash during removal leaves no partial step.
            doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
            os.rename(path, doomed)
            discard(doomed)
        except (CheckpointError, OSError) as error:
            # The new step is safe, so failing to remove an old one does not end the run.
            warnings.warn(f"{reason(error, path)}; not removed", CheckpointWarning, stacklevel=3)


def discard(folder: Path) -> None:
    """Remove a temporary folder, unless it contains something that saving does not write."""
    try:
        if folder.exists() and _is_ours(folder):
            for path in list(folder.iterdir()):
                path.unlink()
            folder.rmdir()
    except OSError as error:
        warnings.warn(f"{reason(error, folder)}, not removed", CheckpointWarning, stacklevel=3)


def _is_ours(folder: Path) -> bool:
    """Return True if this is a real folder that contains only files that saving writes."""
    return stat.S_ISDIR(os.lstat(folder).st_mode) and all(
        (path.name in (MANIFEST, DIGEST) or SHARD.fullmatch(path.name))
        and stat.S_ISREG(os.lstat(path).st_mode)
        for path in list(folder.iterdir())
    )
