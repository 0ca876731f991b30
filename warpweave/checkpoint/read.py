"""Open a step: verify every byte before returning a tensor."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from warpweave.checkpoint.files import (
    CheckpointError,
    CheckpointWarning,
    agree_on_all,
    attempt,
    open_regular,
    read_at_most,
    reason,
    stamp,
)
from warpweave.checkpoint.manifest import (
    DIGEST,
    DTYPE_CODES,
    MANIFEST,
    FileEntry,
    TensorEntry,
    dump,
    parse_manifest,
    read_manifest,
)
from warpweave.checkpoint.steps import newest_first
from warpweave.cli.messages import one_line
from warpweave.parallel.exchange import exchange

_STEPS = "checkpoints"  # the folder of steps in a run's folder (`warpweave train`)


@dataclasses.dataclass(frozen=True)
class CheckpointReader:
    """A verified checkpoint; `config`, `state` and `mesh` are JSON objects.

    Examples:
        >>> from warpweave.checkpoint import open_latest, save_checkpoint
        >>> path = save_checkpoint("read", 1, [("weight", torch.ones(4))], config={}, state={})
        >>> saved = open_latest("read")
        >>> saved.names, saved.shape("weight")
        (['weight'], (4,))
    """

    path: Path
    step: int
    config: dict[str, Any]
    state: dict[str, Any]
    mesh: dict[str, Any]
    _tensors: dict[str, TensorEntry]
    _stamps: dict[str, tuple[int, ...]]

    @property
    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the logical shape of a tensor."""
        return self._entry(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor."""
        return getattr(torch, self._entry(name).dtype)

    def tensor(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return the logical tensor, or with `index` (one slice per leading dim) a part of it.

        The result owns its memory. Raises `CheckpointError` for an unknown name, or if the file has
        changed since it was verified.
        """
        return self.mapped(name, index).clone()

    def mapped(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """Return the tensor as a view of the file's memory map; don't keep it or write to it.

        Otherwise like `tensor`. Only what you copy out of it is read from disk.
        """
        entry = self._entry(name)
        path = self.path / entry.file
        try:
            if stamp(os.lstat(path)) != self._stamps[entry.file]:
                raise CheckpointError(
                    f"{path} changed after it was verified; open the checkpoint again"
                )
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name!r} from {path}: {one_line(error)}") from None

    def require_config(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Raise `CheckpointError` with the fields in which `config` differs from the saved one.

        A field that did not exist when the checkpoint was written has its value from `defaults`.
        """
        current = json.loads(dump(config, "config"))
        saved = json.loads(dump(defaults or {}, "defaults")) | self.config
        differing = [
            f"{key}: saved {saved.get(key, 'nothing')!r}, now {current.get(key, 'nothing')!r}"
            for key in sorted({*saved, *current})
            if key not in saved or key not in current or not _same(saved[key], current[key])
        ]
        if differing:
            raise CheckpointError(
                f"{self.path} was written with a different config; {'; '.join(differing)}"
            )

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} has no tensor named {name!r} (it has {len(self._tensors)} in all)"
            )
        return self._tensors[name]


def open_checkpoint(
    path: str | Path, *, group: dist.ProcessGroup | None = None
) -> CheckpointReader:
    """Verify a step folder completely and return its reader; every rank of `group` calls it.

    Each rank hashes some of the files. Raises `CheckpointError`, on every rank, for anything that
    differs from what `save_checkpoint` wrote. Given a run's folder, the error names its newest
    step.

    Examples:
        >>> from warpweave.checkpoint import save_checkpoint
        >>> path = save_checkpoint("opened", 1, [("weight", torch.ones(4))], config={}, state={})
        >>> open_checkpoint(path).tensor("weight")
        tensor([1., 1., 1., 1.])
    """
    path = Path(path)
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    verdict: dict[str, Any] = {}
    try:
        _refuse_run_folder(path)
        manifest = read_manifest(path)
        stamps = _check_listing(path, manifest.files)
        tensors: dict[str, dict[str, TensorEntry]] = {name: {} for name in manifest.files}
        for key, entry in manifest.tensors.items():
            tensors[entry.file][key] = entry
        for number, (name, file) in enumerate(sorted(manifest.files.items())):
            if number % world == rank:
                _check_shard(path / name, file, tensors[name])
        verdict = {"manifest": read_at_most(path / DIGEST, 64).decode()}
    except (CheckpointError, OSError) as error:
        verdict = {"error": reason(error, path)}
    if any(other != verdict for other in agree_on_all(verdict, group)):
        raise CheckpointError(f"{path} is not the same folder on all {world} ranks")
    return CheckpointReader(
        path, manifest.step, config=manifest.config, state=manifest.state, mesh=manifest.mesh,
        _tensors=manifest.tensors, _stamps=stamps,
    )  # fmt: skip


def open_latest(
    folder: str | Path, *, fallback: bool = True, group: dist.ProcessGroup | None = None
) -> CheckpointReader | None:
    """Open and verify the newest step; None if there is none. Every rank of `group` calls it.

    With `fallback`, a damaged step is skipped with a `CheckpointWarning` that names the file, and
    the next older one is opened. Raises `CheckpointError` if all are damaged, or if `folder` is a
    run's folder (its steps are in a folder inside it).

    Examples:
        >>> from warpweave.checkpoint import save_checkpoint
        >>> for step in (1, 2):
        ...     path = save_checkpoint("latest", step, [("w", torch.ones(4))], config={}, state={})
        >>> open_latest("latest").step
        2
    """
    folder = Path(folder)
    rank = 0 if group is None else dist.get_rank(group)
    mine = [path.name for path in newest_first(folder)] if rank == 0 else []
    names = exchange(mine, group)[0]
    if not names:
        found = attempt(folder, _refuse_run_folder, folder) if rank == 0 else {}
        agree_on_all(found, group)
    problem: CheckpointError | None = None
    for name in names:
        try:
            return open_checkpoint(folder / name, group=group)
        except CheckpointError as error:
            if not fallback:
                raise
            problem = error
            if rank == 0:
                warnings.warn(f"skipped: {error}", CheckpointWarning, stacklevel=2)
    if problem is not None:
        raise CheckpointError(
            f"{folder} has {len(names)} steps, none of them valid; the last error: {problem}"
        )
    return None


def _refuse_run_folder(path: Path) -> None:
    """Raise `CheckpointError` if `path` contains steps or a folder of steps instead of a step."""
    for folder in () if os.path.lexists(path / MANIFEST) else (path, path / _STEPS):
        if steps := newest_first(folder):
            raise CheckpointError(
                f"{path} is a run's folder, not a step; open {steps[0]}, or call "
                f"open_latest({str(folder)!r}) for the newest good step"
            )


def _same(saved: Any, current: Any) -> bool:
    """Compare as JSON: 1 equals 1.0, but not true."""
    return saved == current and isinstance(saved, bool) == isinstance(current, bool)


def _check_listing(folder: Path, files: dict[str, FileEntry]) -> dict[str, tuple[int, ...]]:
    """Check that the folder has exactly the manifest's files, regular and of the right sizes;
    return their stamps."""
    found = {path.name: os.lstat(path) for path in list(folder.iterdir())}
    for name in sorted(set(found) - set(files) - {MANIFEST, DIGEST}):
        raise CheckpointError(
            f"{folder / name} is not listed in the manifest of this checkpoint; move it elsewhere"
        )
    for name, entry in sorted(files.items()):
        path = folder / name
        if name not in found:
            raise CheckpointError(f"{path} is missing")
        if not stat.S_ISREG(found[name].st_mode):
            raise CheckpointError(f"{path} is not a regular file (links are rejected)")
        if found[name].st_size != entry.bytes:
            raise CheckpointError(
                f"{path} has {found[name].st_size} bytes, but the manifest says {entry.bytes}"
            )
    return {name: stamp(found[name]) for name in files}


def _check_shard(path: Path, entry: FileEntry, expected: dict[str, TensorEntry]) -> None:
    """Check a file's SHA-256, and its safetensors header against the manifest: its `entry` and its
    tensors."""
    size = entry.bytes
    with os.fdopen(open_regular(path), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # The manifest bounds the header's size, so that a hostile one costs no memory or time.
        room = 4096 + sum(200 + 6 * len(key) + 24 * len(e.shape) for key, e in expected.items())
        if size < 8 or length > min(size - 8, room):
            raise CheckpointError(
                f"{path}: a safetensors header of {length} bytes is not plausible for "
                f"{len(expected)} tensors in a file of {size} bytes"
            )
        try:
            header = parse_manifest(file.read(length))
            entries = {
                key: (e.pop("dtype"), e.pop("shape"), *e.pop("data_offsets"), *e)
                for key, e in header.items()
            }
            order = sorted(entries, key=lambda key: entries[key][2:])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: bad safetensors header: {one_line(error)}") from None
        if names := sorted(set(entries) ^ set(expected)):
            raise CheckpointError(
                f"{path} must have exactly the tensors that the manifest lists for it, but differs "
                f"in {names[:4]}"
            )
        position = 0
        for key in order:
            shape = expected[key].shape
            code, width = DTYPE_CODES[expected[key].dtype]
            should = (code, [*shape], position, position + width * math.prod(shape))
            if repr(entries[key]) != repr(should):  # repr, as true and 1.0 compare equal to 1
                raise CheckpointError(
                    f"{path}: (dtype, shape, begin, end) of tensor {key!r} must be {should}, "
                    f"got {entries[key]!r:.200}"
                )
            position = should[3]
        if 8 + length + position != size:
            raise CheckpointError(
                f"{path} has {size} bytes, but its header declares {8 + length + position}"
            )
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != entry.sha256:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {digest}, but the manifest says {entry.sha256}"
        )
