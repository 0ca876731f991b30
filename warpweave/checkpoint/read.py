"""Opening a step: every byte is verified before a tensor is returned."""

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
    CHUNK,
    CheckpointError,
    CheckpointWarning,
    agree_on_all,
    attempt,
    open_regular,
    reason,
    stamp,
)
from warpweave.checkpoint.manifest import (
    DIGEST,
    DTYPE_CODES,
    MANIFEST,
    dump,
    parse_manifest,
    read_manifest,
)
from warpweave.checkpoint.steps import newest_first
from warpweave.cli.messages import one_line
from warpweave.parallel.exchange import exchange

_STEPS = "checkpoints"  # the folder of steps inside that of a run of `warpweave train`


@dataclasses.dataclass(frozen=True)
class CheckpointReader:
    """A verified checkpoint; `config`, `state` and `mesh` are JSON objects."""

    path: Path
    step: int
    config: dict[str, Any]
    state: dict[str, Any]
    mesh: dict[str, Any]
    _tensors: dict[str, Any]
    _stamps: dict[str, tuple[int, ...]]

    @property
    def names(self) -> list[str]:
        """The tensors' names, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The logical shape of a tensor."""
        return tuple(self._entry(name)["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor."""
        return getattr(torch, self._entry(name)["dtype"])

    def tensor(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """The logical tensor, or with `index` (one slice per leading dim) only that part of it.

        The result owns its memory. Raises `CheckpointError` for an unknown name, and if the file
        has changed since it was verified.
        """
        return self.mapped(name, index).clone()

    def mapped(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """As `tensor`, but in the file's memory map, not to be kept or written to: what is copied
        out of it is all that is read from the disk."""
        entry = self._entry(name)
        path = self.path / entry["file"]
        try:
            if stamp(os.lstat(path)) != self._stamps[entry["file"]]:
                raise CheckpointError(f"{path} changed after it was verified; open it again")
            with safe_open(path, framework="pt") as file:
                if index is None:
                    return file.get_tensor(name)
                return file.get_slice(name)[index]
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name!r} from {path}: {one_line(error)}") from None

    def require_config(
        self, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """Raise `CheckpointError` with the fields in which `config` differs from the saved one.

        A field that did not exist when the checkpoint was written has its value in `defaults`.
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
                f"{self.path} was written by another config; {'; '.join(differing)}"
            )

    def _entry(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(
                f"{self.path} holds no tensor {name!r} among {len(self._tensors)}"
            )
        return self._tensors[name]


def open_checkpoint(
    path: str | Path, *, group: dist.ProcessGroup | None = None
) -> CheckpointReader:
    """Verify a step folder completely and return its reader; every rank of `group` calls it.

    Each rank hashes some of the files. Raises `CheckpointError`, on every rank, for anything that
    is not exactly what `save_checkpoint` wrote; for the folder of a run it names the newest step.
    """
    path = Path(path)
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    verdict: dict[str, Any] = {}
    try:
        _refuse_run_folder(path)
        manifest = read_manifest(path)
        stamps = _check_listing(path, manifest["files"])
        tensors: dict[str, dict[str, Any]] = {name: {} for name in manifest["files"]}
        for key, entry in manifest["tensors"].items():
            tensors[entry["file"]][key] = entry
        for number, (name, entry) in enumerate(sorted(manifest["files"].items())):
            if number % world == rank:
                _check_shard(path / name, entry, tensors[name])
        verdict = {"manifest": manifest["sha256"]}
    except (CheckpointError, OSError) as error:
        verdict = {"error": reason(error, path)}
    if any(other != verdict for other in agree_on_all(verdict, group)):
        raise CheckpointError(f"{path} is not the same folder on all {world} ranks")
    return CheckpointReader(
        path=path,
        step=manifest["step"],
        config=manifest["config"],
        state=manifest["state"],
        mesh=manifest["mesh"],
        _tensors=manifest["tensors"],
        _stamps=stamps,
    )


def open_latest(
    folder: str | Path, *, fallback: bool = True, group: dist.ProcessGroup | None = None
) -> CheckpointReader | None:
    """Open and verify the newest step; None if there is none. Every rank of `group` calls it.

    With `fallback` a damaged step is skipped with a `CheckpointWarning` that names the file, and
    the next older one is opened. Raises `CheckpointError` if all are damaged, or if `folder` is
    that of a run, whose steps are in a folder inside it.
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
                warnings.warn(f"passed over: {error}", CheckpointWarning, stacklevel=2)
    if problem is not None:
        raise CheckpointError(f"{folder} has {len(names)} steps, none is good; the last: {problem}")
    return None


def _refuse_run_folder(path: Path) -> None:
    """Raise `CheckpointError` if `path` is not a step, but contains steps or a folder of steps."""
    for folder in () if os.path.lexists(path / MANIFEST) else (path, path / _STEPS):
        if steps := newest_first(folder):
            raise CheckpointError(
                f"{path} is the folder of a run, not of one step: open {steps[0]}, or the newest "
                f"good step by open_latest({str(folder)!r})"
            )


def _same(saved: Any, current: Any) -> bool:
    """Equal as JSON: 1 is 1.0, but not true."""
    return saved == current and isinstance(saved, bool) == isinstance(current, bool)


def _check_listing(folder: Path, files: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Check that the folder has exactly the manifest's files, regular, of their sizes; their
    stamps."""
    found = {path.name: os.lstat(path) for path in list(folder.iterdir())}
    for name in sorted(set(found) - set(files) - {MANIFEST, DIGEST}):
        raise CheckpointError(f"{folder / name} does not belong to this checkpoint")
    for name, entry in sorted(files.items()):
        path = folder / name
        if name not in found:
            raise CheckpointError(f"{path} is missing")
        if not stat.S_ISREG(found[name].st_mode):
            raise CheckpointError(f"{path} is not a regular file (links are refused)")
        if found[name].st_size != entry["bytes"]:
            raise CheckpointError(
                f"{path} has {found[name].st_size} bytes, the manifest says {entry['bytes']}"
            )
    return {name: stamp(found[name]) for name in files}


def _check_shard(path: Path, entry: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that the safetensors header agrees with the manifest's `entry` and the tensors that it
    says are in the file, and the SHA-256 of the file."""
    size = entry["bytes"]
    with os.fdopen(open_regular(path), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Bounded by the manifest before it is read, so that a hostile one costs no memory or time.
        room = 4096 + sum(200 + 6 * len(key) + 24 * len(e["shape"]) for key, e in expected.items())
        if size < 8 or length > min(size - 8, room):
            raise CheckpointError(
                f"{path}: a header of {length} bytes for {len(expected)} tensors in {size} bytes"
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
        if set(entries) != set(expected):
            names = sorted(set(entries) ^ set(expected))
            raise CheckpointError(f"{path} and the manifest do not both hold {names[:4]}")
        position = 0
        for key in order:
            shape = expected[key]["shape"]
            code, width = DTYPE_CODES[expected[key]["dtype"]]
            should = (code, shape, position, position + width * math.prod(shape))
            if repr(entries[key]) != repr(should):  # true and 1.0 are equal to 1
                raise CheckpointError(
                    f"{path}: tensor {key!r} is (dtype, shape, begin, end) = "
                    f"{entries[key]!r:.200}, it must be {should}"
                )
            position = should[3]
        if 8 + length + position != size:
            raise CheckpointError(f"{path} has {size} bytes, its header {8 + length + position}")
        file.seek(0)
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != entry["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, "
            f"the manifest says {entry['sha256']}"
        )
