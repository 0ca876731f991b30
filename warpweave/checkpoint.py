"""Checkpoints that survive crashes, full disks, flipped bits and hostile files: the file layer.

This file knows names, tensors and JSON; models, meshes and optimizers are its callers' business. It
stores whole logical tensors, so a checkpoint does not know the layout that wrote it.

On disk::

    folder/
      latest                       "step_00000123 <digest of its manifest>", replaced by rename
      step_00000123/
        manifest.json              format, schema, step, config, state, mesh, files, tensors
        manifest.sha256            digest of manifest.json
        rank00000-00000.safetensors ...

Saving writes ``step_00000123.tmp-<id>/``, flushes files and folder to the disk and renames the
folder: a step is there whole or not at all. Opening checks everything first (folder listing,
manifest digest and schema, sizes, safetensors headers, SHA-256 of every file) and only then hands
out a tensor. Nothing is ever unpickled, links are refused, and no name in a manifest can leave the
folder. A digest detects damage, not forgery: who can write a whole consistent checkpoint can choose
its numbers, not run code.

One job at a time writes into a folder, which all its ranks share.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from warpweave.exchange import exchange

FORMAT, SCHEMA = "warpweave-checkpoint", 1

_MANIFEST, _DIGEST, _LATEST = "manifest.json", "manifest.sha256", "latest"
_STEP = re.compile(r"step_(\d{8,18})")
_ASIDE = re.compile(r"step_(\d{8,18})\.(tmp|old)-[0-9a-f]{16}")
_POINTER = re.compile(r"latest\.tmp-[0-9a-f]{16}")
_SHARD = re.compile(r"rank\d{5,9}-\d{5,9}\.safetensors")
_MANIFEST_KEYS = frozenset(
    ("format", "schema", "step", "config", "config_sha256", "state", "mesh", "files", "tensors")
)
_MAX_MANIFEST = 64 << 20  # bounds the cost of a hostile one; 300,000 tensors fit
_CHUNK = 16 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_ROWS = torch.contiguous_format
# torch name, safetensors name, bytes per element
_DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or must not be read; one line, naming the file."""


class CheckpointWarning(UserWarning):
    """A damaged checkpoint was passed over, or something unknown was left alone."""


# ---- saving --------------------------------------------------------------------------------------


def save_checkpoint(
    folder: str | Path,
    step: int,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    mesh: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = 1 << 30,
    keep: int = 3,
) -> Path:
    """Write ``folder/step_<step>`` and return its path; every rank of `group` calls it.

    `tensors` yields (name, whole logical CPU tensor) for the names that this rank writes; a name
    has exactly one writer. Each is a tensor of its own, not a buffer that is filled again: it is
    read when its file is full. The iterable may run collectives as it goes: it is always drained to
    its end, also when this rank's disk is full. Files hold up to `shard_bytes`, or one tensor.
    `config`, `state` and `mesh` are JSON (rank 0's count); floats must be finite and come back bit
    for bit.

    Afterwards the folder keeps this step and the `keep` - 1 highest others. A step that already
    exists is replaced. Raises `CheckpointError` on every rank when any rank failed; whatever was in
    the folder before is then untouched and no partial step is visible.
    """
    if step < 0 or keep < 1 or shard_bytes < 1:
        raise CheckpointError(
            f"need step >= 0, keep >= 1, shard_bytes >= 1, got {step=} {keep=} {shard_bytes=}"
        )
    folder = Path(folder)
    rank = 0 if group is None else dist.get_rank(group)
    target = folder / f"step_{step:08d}"

    # 1. Rank 0 opens a temporary folder and tells its name.
    temporary, opening = None, {}
    if rank == 0:
        try:
            header = _header(step, config, state, mesh)
            temporary = _begin(folder, target.name)
            opening = {"name": temporary.name}
        except (CheckpointError, OSError) as error:
            opening = {"error": _say(error, folder)}
    opening = exchange(opening, group)[0]
    if "error" in opening:
        raise CheckpointError(opening["error"])
    temporary = folder / opening["name"]

    # 2. Everyone writes its tensors, then all learn what all wrote, or who failed.
    try:
        written = _write_shards(temporary, rank, tensors, shard_bytes)
        reports = exchange(written, group)
        problem = _first_problem(reports)
        # 3. Rank 0 seals the step. Its outcome is everyone's outcome.
        outcome: dict[str, Any] = {}
        if rank == 0:
            try:
                if problem is not None:
                    raise CheckpointError(problem)
                _commit(header, reports, temporary, target)
            except (CheckpointError, OSError) as error:
                outcome = {"error": _say(error, temporary)}
    except BaseException:
        if rank == 0:  # also for KeyboardInterrupt and errors of `tensors` itself
            _discard(temporary)
        raise
    if "error" in outcome:
        _discard(temporary)
    outcome = exchange(outcome, group)[0]
    if "error" in outcome:
        raise CheckpointError(outcome["error"])

    if rank == 0:
        _prune(folder, target, keep)
    return target


def config_digest(config: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration's canonical JSON, as manifests hold it."""
    return hashlib.sha256(_dump(config, "config")).hexdigest()


def _header(
    step: int,
    config: Mapping[str, Any],
    state: Mapping[str, Any],
    mesh: Mapping[str, Any] | None,
) -> dict[str, Any]:
    parts = {"config": config, "state": state, "mesh": {} if mesh is None else mesh}
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "step": step,
        "config_sha256": config_digest(config),
        **{name: json.loads(_dump(part, name)) for name, part in parts.items()},
    }


def _begin(folder: Path, name: str) -> Path:
    """Make the folder and a fresh temporary one in it, and tidy what earlier crashes left."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in sorted(folder.iterdir()):
        match = _ASIDE.fullmatch(path.name)
        if match is None:
            if _POINTER.fullmatch(path.name):
                path.unlink()
            continue
        home = folder / f"step_{match[1]}"
        if match[2] == "old" and not os.path.lexists(home):
            os.rename(path, home)  # a crash came between the two renames of a replacement
        else:
            _discard(path)
    if os.path.lexists(folder / name) and not _is_ours(folder / name):
        raise CheckpointError(f"{folder / name} holds what is no checkpoint; move it away")
    temporary = folder / f"{name}.tmp-{secrets.token_hex(8)}"
    temporary.mkdir(mode=0o700)
    return temporary


def _write_shards(
    folder: Path, rank: int, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> dict[str, Any]:
    """What this rank wrote, {"files": ..., "tensors": ...}, or {"error": what went wrong}."""
    files: dict[str, Any] = {}
    entries: dict[str, Any] = {}
    shard: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    problem: str | None = None
    held = 0

    def flush() -> None:
        nonlocal held
        if not shard:
            return
        name = f"rank{rank:05d}-{len(files):05d}.safetensors"
        data = serialize(shard)
        files[name] = {"bytes": len(data), "sha256": _write(folder / name, data)}
        for key, value in shard.items():
            dtype = str(value.dtype).removeprefix("torch.")
            entries[key] = {"file": name, "shape": list(value.shape), "dtype": dtype}
        shard.clear()
        storages.clear()
        held = 0

    for name, tensor in tensors:
        if problem is not None:
            continue  # `tensors` may run collectives, so peers need us to draw it to its end
        try:
            _check_tensor(name, tensor)
            if name in shard or name in entries:
                raise CheckpointError(f"tensor {name!r} was given twice to rank {rank}")
            size = tensor.numel() * tensor.element_size()
            if held + size > shard_bytes:
                flush()
            # safetensors takes plain storages, each once: views and aliases are copied.
            plain = tensor.untyped_storage().nbytes() == size and tensor.is_contiguous()
            copy = tensor.data_ptr() in storages or not plain
            storages.add(tensor.data_ptr())
            shard[name] = tensor.detach().clone(memory_format=_ROWS) if copy else tensor.detach()
            held += size
        except (CheckpointError, OSError, SafetensorError) as error:
            problem = _say(error, folder)
            shard.clear()
    if problem is None:
        try:
            flush()
        except (CheckpointError, OSError, SafetensorError) as error:
            problem = _say(error, folder)
    report: dict[str, Any] = {"files": files, "tensors": entries}
    return report if problem is None else {"error": problem}


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise CheckpointError(f"{name!r} cannot be a tensor's name")
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or dtype not in _DTYPES:
        raise CheckpointError(
            f"tensor {name!r} must be dense on the CPU and of {', '.join(_DTYPES)}; "
            f"it is {tensor.layout}, {tensor.device}, {dtype}"
        )


def _first_problem(reports: Sequence[dict[str, Any]]) -> str | None:
    for rank, report in enumerate(reports):
        if "error" in report:
            return f"rank {rank}: {report['error']}"
    writers: dict[str, int] = {}
    for rank, report in enumerate(reports):
        for name in report["tensors"]:
            if name in writers:
                return f"tensor {name!r} was given twice, to ranks {writers[name]} and {rank}"
            writers[name] = rank
    return None


def _commit(
    header: dict[str, Any], reports: Sequence[dict[str, Any]], temporary: Path, target: Path
) -> None:
    manifest = dict(header)
    for part in ("files", "tensors"):
        manifest[part] = {name: entry for report in reports for name, entry in report[part].items()}
    data = _dump(manifest, "manifest")
    if len(data) > _MAX_MANIFEST:
        raise CheckpointError(
            f"the manifest has {len(data)} bytes, at most {_MAX_MANIFEST} are read"
        )
    digest = _write(temporary / _MANIFEST, data)
    _write(temporary / _DIGEST, digest.encode())
    _sync_folder(temporary)
    aside = None
    if os.path.lexists(target):
        # Two renames; a crash between them is mended by `_begin` and seen through by `latest`.
        aside = target.with_name(f"{target.name}.old-{secrets.token_hex(8)}")
        os.rename(target, aside)
    try:
        os.rename(temporary, target)
    except OSError:
        if aside is not None:
            os.rename(aside, target)
        raise
    _sync_folder(target.parent)
    pointer = target.parent / f"{_LATEST}.tmp-{secrets.token_hex(8)}"
    try:
        _write(pointer, f"{target.name} {digest}\n".encode())
        os.replace(pointer, target.parent / _LATEST)
        _sync_folder(target.parent)
    finally:
        pointer.unlink(missing_ok=True)
    if aside is not None:
        _discard(aside)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    others = [path for path in _steps(folder) if path != newest]
    for path in others[keep - 1 :]:
        try:
            if not _is_ours(path):
                raise CheckpointError(f"{path} holds what saving did not write")
            # Renamed first, so that a crash half way through leaves no partial step to be found.
            doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
            os.rename(path, doomed)
            _discard(doomed)
        except (CheckpointError, OSError) as error:
            # The new step is safe, so this is no reason to stop a run.
            warnings.warn(f"{_say(error, path)}; not removed", CheckpointWarning, stacklevel=3)


def _is_ours(folder: Path) -> bool:
    """A real folder with nothing in it but the files that saving writes."""
    return stat.S_ISDIR(os.lstat(folder).st_mode) and all(
        (path.name in (_MANIFEST, _DIGEST) or _SHARD.fullmatch(path.name))
        and stat.S_ISREG(os.lstat(path).st_mode)
        for path in list(folder.iterdir())
    )


def _discard(folder: Path) -> None:
    """Remove a temporary folder, unless it holds anything that saving does not write."""
    try:
        if folder.exists() and _is_ours(folder):
            for path in list(folder.iterdir()):
                path.unlink()
            folder.rmdir()
    except OSError as error:
        warnings.warn(f"{_say(error, folder)}, not removed", CheckpointWarning, stacklevel=3)


def _write(path: Path, data: bytes) -> str:
    """Create a file (0600, never through a link), flush it to the disk; the SHA-256 of `data`.

    The digest is of what was meant to be written, so a disk that lies is found out at the next
    opening.
    """
    view, done, digest = memoryview(data), 0, hashlib.sha256(data).hexdigest()
    try:
        file = os.open(path, _CREATE, 0o600)
        try:
            while done < len(data):
                done += os.write(file, view[done : done + _CHUNK])
            os.fsync(file)
        finally:
            os.close(file)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise CheckpointError(
            f"cannot write {path}: {error.strerror} after {done} of {len(data)} bytes"
            + ("; free space or raise the limit, earlier checkpoints are intact" if full else "")
        ) from None
    return digest


def _sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# ---- finding -------------------------------------------------------------------------------------


def latest(folder: str | Path) -> Path | None:
    """The step to resume from: what the `latest` file names if it is there whole, else the highest.

    None when there is no step. Nothing is verified yet: see `open_latest`.
    """
    return next(iter(_candidates(Path(folder))), None)


def open_latest(
    folder: str | Path, *, fallback: bool = True, group: dist.ProcessGroup | None = None
) -> CheckpointReader | None:
    """Open and verify the newest step, or None when there is none; every rank of `group` calls it.

    With `fallback`, a damaged step is passed over with a `CheckpointWarning` that names the bad
    file, and the next older good one is opened; `CheckpointError` when none is good.
    """
    folder = Path(folder)
    rank = 0 if group is None else dist.get_rank(group)
    mine = [path.name for path in _candidates(folder)] if rank == 0 else []
    names = exchange(mine, group)[0]
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


def _steps(folder: Path) -> list[Path]:
    """The complete steps, highest first."""
    try:
        found = [(int(m[1]), p) for p in folder.iterdir() if (m := _STEP.fullmatch(p.name))]
    except OSError:
        return []
    return [path for _, path in sorted(found, reverse=True)]


def _candidates(folder: Path) -> list[Path]:
    steps = _steps(folder)
    names = {path.name for path in steps}
    try:
        # Steps that a crash in the middle of a replacement left under their second name.
        for path in sorted(folder.iterdir()):
            match = _ASIDE.fullmatch(path.name)
            if match and match[2] == "old" and f"step_{match[1]}" not in names:
                steps.append(path)
        steps.sort(key=lambda path: int(path.name[5:].split(".")[0]), reverse=True)
        name, digest = _read(folder / _LATEST, 200).decode("ascii").split()
        if name in names and _read(folder / name / _DIGEST, 64).decode("ascii") == digest:
            steps.remove(folder / name)
            steps.insert(0, folder / name)
    except (CheckpointError, OSError, ValueError):
        pass  # the pointer is a help, not a need: a missing or damaged one decides nothing
    return steps


# ---- reading -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CheckpointReader:
    """A checkpoint whose every byte is verified; `config`, `state`, `mesh` are JSON objects."""

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
        """A whole tensor, or with `index` (one slice per leading dim) only that part of the file.

        The result owns its memory. Raises `CheckpointError` for a name that is not here, and when
        the file is no longer the one that was verified.
        """
        entry = self._entry(name)
        path = self.path / entry["file"]
        try:
            if _stamp(os.lstat(path)) != self._stamps[entry["file"]]:
                raise CheckpointError(f"{path} changed after it was verified; open it again")
            with safe_open(path, framework="pt") as file:
                if index is None:
                    return file.get_tensor(name).clone()
                return file.get_slice(name)[index].clone()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {name!r} from {path}: {_line(error)}") from None

    def require_config(self, config: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` listing the fields in which `config` is not the saved one."""
        current = json.loads(_dump(config, "config"))
        differing = [
            f"{key}: saved {self.config.get(key, 'nothing')!r}, now {current.get(key, 'nothing')!r}"
            for key in sorted({*self.config, *current})
            if key not in self.config or key not in current or self.config[key] != current[key]
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

    The ranks share the hashing of the files. Raises `CheckpointError` (on every rank) for anything
    that is not exactly what `save_checkpoint` wrote.
    """
    path = Path(path)
    rank, world = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    verdict: dict[str, Any] = {}
    try:
        manifest = _read_manifest(path)
        stamps = _check_listing(path, manifest["files"])
        for number, name in enumerate(sorted(manifest["files"])):
            if number % world == rank:
                _check_shard(path / name, name, manifest)
        verdict = {"manifest": manifest["sha256"]}
    except (CheckpointError, OSError) as error:
        verdict = {"error": _say(error, path)}
    verdicts = exchange(verdict, group)
    for other in verdicts:
        if "error" in other:
            raise CheckpointError(other["error"])
    if any(other != verdict for other in verdicts):
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


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest, every field checked, with its own digest under "sha256"."""
    if not os.path.lexists(folder):
        raise CheckpointError(f"{folder} does not exist")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise CheckpointError(f"{folder} is not a folder (links are refused)")
    path = folder / _MANIFEST
    data = _read(path, _MAX_MANIFEST)
    expected = _read(folder / _DIGEST, 64)
    digest = hashlib.sha256(data).hexdigest()
    if digest.encode() != expected:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {digest}, {_DIGEST} says {expected!r:.70}"
        )

    def wrong(what: str) -> NoReturn:
        raise CheckpointError(f"{path}: {what}")

    try:
        manifest = _parse(data)
    except (ValueError, RecursionError) as error:
        wrong(f"not JSON: {_line(error)}")
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        wrong(f'not a checkpoint: "format" must be "{FORMAT}"')
    if manifest.get("schema") != SCHEMA:
        wrong(f"schema {manifest.get('schema')!r}, this version reads schema {SCHEMA}")
    if set(manifest) != _MANIFEST_KEYS:
        wrong(f"keys {sorted(set(manifest) ^ _MANIFEST_KEYS)} are missing or unknown")
    if type(manifest["step"]) is not int or manifest["step"] < 0:
        wrong(f"step {manifest['step']!r} must be an integer >= 0")
    for key in ("config", "state", "mesh", "files", "tensors"):
        if not isinstance(manifest[key], dict):
            wrong(f"{key} must be an object")
    match = _STEP.match(folder.name)
    if match and int(match[1]) != manifest["step"]:
        wrong(f"says step {manifest['step']}, but the folder is named {folder.name}")
    if config_digest(manifest["config"]) != manifest["config_sha256"]:
        wrong("config_sha256 is not the digest of config")
    for name, entry in manifest["files"].items():
        if not _SHARD.fullmatch(name):
            wrong(f"file name {name!r} is not of the form rank00000-00000.safetensors")
        if not isinstance(entry, dict) or set(entry) != {"bytes", "sha256"}:
            wrong(f"file {name} must have bytes and sha256")
        if type(entry["bytes"]) is not int or not re.fullmatch(
            "[0-9a-f]{64}", str(entry["sha256"])
        ):
            wrong(f"file {name} has bad bytes or sha256")
    for name, entry in manifest["tensors"].items():
        if not isinstance(entry, dict) or set(entry) != {"file", "shape", "dtype"}:
            wrong(f"tensor {name!r} must have file, shape and dtype")
        shape, dtype, file = entry["shape"], entry["dtype"], entry["file"]
        sizes_fit = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        # Bounded one by one and then together: Python will not even print a larger number.
        sizes_fit = sizes_fit and len(shape) <= 64 and max(shape, default=0) < 1 << 62
        sizes_fit = sizes_fit and math.prod(shape) < 1 << 62
        names_fit = isinstance(dtype, str) and isinstance(file, str) and dtype in _DTYPES
        if not sizes_fit or not names_fit or file not in manifest["files"]:
            wrong(f"tensor {name!r} has bad file {file!r}, shape {shape!r:.200} or dtype {dtype!r}")
    return {**manifest, "sha256": digest}


def _check_listing(folder: Path, files: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Exactly the files of the manifest are there, regular and of their sizes; their stamps."""
    found = {path.name: os.lstat(path) for path in list(folder.iterdir())}
    for name in sorted(set(found) - set(files) - {_MANIFEST, _DIGEST}):
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
    return {name: _stamp(found[name]) for name in files}


def _check_shard(path: Path, name: str, manifest: dict[str, Any]) -> None:
    """The safetensors header says what the manifest says, and every byte is what was written."""
    size = manifest["files"][name]["bytes"]
    expected = {key: e for key, e in manifest["tensors"].items() if e["file"] == name}
    with os.fdopen(_open(path), "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        # Bounded by what the manifest lists before it is read, so that it costs no memory or time.
        room = 4096 + sum(200 + 6 * len(key) + 24 * len(e["shape"]) for key, e in expected.items())
        if size < 8 or length > min(size - 8, room):
            raise CheckpointError(
                f"{path}: a header of {length} bytes for {len(expected)} tensors in {size} bytes"
            )
        try:
            header = _parse(file.read(length))
            entries = {
                key: (e["dtype"], e["shape"], *e["data_offsets"]) for key, e in header.items()
            }
            order = sorted(entries, key=lambda key: entries[key][2:])
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: bad safetensors header: {_line(error)}") from None
        if set(entries) != set(expected):
            names = sorted(set(entries) ^ set(expected))
            raise CheckpointError(f"{path} and the manifest do not both hold {names[:4]}")
        position = 0
        for key in order:
            shape = expected[key]["shape"]
            code, width = _DTYPES[expected[key]["dtype"]]
            should = (code, shape, position, position + width * math.prod(shape))
            if entries[key] != should:
                raise CheckpointError(
                    f"{path}: tensor {key!r} is (dtype, shape, begin, end) = "
                    f"{entries[key]!r:.200}, it must be {should}"
                )
            position = should[3]
        if 8 + length + position != size:
            raise CheckpointError(f"{path} has {size} bytes, its header {8 + length + position}")
        file.seek(0)
        digest = hashlib.sha256()
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != manifest["files"][name]["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {digest.hexdigest()}, "
            f"the manifest says {manifest['files'][name]['sha256']}"
        )


def _open(path: Path) -> int:
    """Open a regular file for reading; links, devices and pipes are refused without waiting."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        link = error.errno == errno.ELOOP
        raise CheckpointError(
            f"{path} is a link (links are refused)" if link else f"{path}: {error.strerror}"
        ) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise CheckpointError(f"{path} is not a regular file")
    return file


def _read(path: Path, most: int) -> bytes:
    with os.fdopen(_open(path), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise CheckpointError(f"{path} has more than {most} bytes")
    return data


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_mode)


# ---- JSON between ranks and files ----------------------------------------------------------------


def _dump(value: Any, what: str) -> bytes:
    """Canonical JSON: sorted keys, no spaces, no NaN, only string keys."""

    def check(part: Any, where: str) -> None:
        if isinstance(part, dict):
            for key, item in part.items():
                if not isinstance(key, str):
                    raise CheckpointError(f"{where}: key {key!r} must be a string to be JSON")
                check(item, f"{where}.{key}")
        elif isinstance(part, (list, tuple)):
            for number, item in enumerate(part):
                check(item, f"{where}[{number}]")
        elif not isinstance(part, (str, int, float, bool, type(None))):
            raise CheckpointError(f"{where} is a {type(part).__name__}, which is not JSON")
        elif isinstance(part, float) and part - part != 0:
            raise CheckpointError(f"{where} is {part}; JSON holds finite numbers only")

    value = dict(value) if isinstance(value, Mapping) else value
    check(value, what)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _parse(data: bytes) -> Any:
    """Strict JSON: `ValueError` for names given twice and for NaN, which Python lets pass."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            raise ValueError(f"{len(pairs) - len(result)} names appear twice in one object")
        return result

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(data, object_pairs_hook=unique, parse_constant=refuse)


def _say(error: Exception, path: Path) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or _line(error)}"
    return _line(error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
