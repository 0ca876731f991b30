"""The manifest that describes a step, and its strict JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

from warpweave.checkpoint.files import CheckpointError, read_at_most, write
from warpweave.cli.messages import one_line
from warpweave.kernels.structure import Count, structure

FORMAT, SCHEMA = "warpweave-checkpoint", 1

MANIFEST, DIGEST = "manifest.json", "manifest.sha256"
STEP = re.compile(r"step_(\d{8,18})")
SHARD = re.compile(r"rank\d{5,9}-\d{5,9}\.safetensors")
# torch name, safetensors name, bytes per element
DTYPE_CODES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "int64": ("I64", 8),
    "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}  # fmt: skip


class FileEntry(NamedTuple):
    """A file of a step."""

    bytes: Count
    sha256: Annotated[str, "64 hexadecimal digits", re.compile("[0-9a-f]{64}").fullmatch]


class TensorEntry(NamedTuple):
    """A tensor of a step: its file, logical shape and dtype."""

    file: str
    shape: tuple[Count, ...]
    dtype: Annotated[str, f"one of {', '.join(DTYPE_CODES)}", DTYPE_CODES.__contains__]


class Manifest(NamedTuple):
    """The description of a step, its files and tensors by name."""

    format: Annotated[str, f'"{FORMAT}"', FORMAT.__eq__]
    schema: Annotated[int, str(SCHEMA), SCHEMA.__eq__]
    step: Count
    config: dict[str, Any]
    config_sha256: str
    state: dict[str, Any]
    mesh: dict[str, Any]
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]


# Limits on the cost of a hostile manifest. One with 130,000 tensors has 16 MiB, mostly names, with
# at most one comma or bracket per 11 bytes.
_MAX_BYTES, _VALUES, _BYTES_PER_VALUE = 16 << 20, 10_000, 10


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a configuration's canonical JSON, as stored in manifests."""
    return hashlib.sha256(dump(config, "config")).hexdigest()


def new_manifest(
    step: int, config: Mapping[str, Any], state: Mapping[str, Any], mesh: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a manifest without files and tensors; raise `CheckpointError` unless it is JSON."""
    parts = {"config": config, "state": state, "mesh": {} if mesh is None else mesh}
    head = {"format": FORMAT, "schema": SCHEMA, "step": step}
    values = {name: json.loads(dump(part, name)) for name, part in parts.items()}
    return head | {"config_sha256": config_digest(config)} | values


def write_manifest(
    folder: Path, manifest: dict[str, Any], reports: Sequence[dict[str, Any]]
) -> str:
    """Write the manifest, with the files and tensors that all ranks reported; return its digest."""
    for part in ("files", "tensors"):
        manifest[part] = {name: entry for report in reports for name, entry in report[part].items()}
    data = dump(manifest, "manifest")
    _count_values(data, folder / MANIFEST)
    digest = write(folder / MANIFEST, data)
    write(folder / DIGEST, digest.encode())
    return digest


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a step, with every field checked."""
    if not os.path.lexists(folder):
        raise CheckpointError(f"{folder} does not exist")
    if not stat.S_ISDIR(os.lstat(folder).st_mode):
        raise CheckpointError(f"{folder} is not a folder (links are rejected)")
    path = folder / MANIFEST
    data = read_at_most(path, _MAX_BYTES)
    _count_values(data, path)
    expected = read_at_most(folder / DIGEST, 64)
    digest = hashlib.sha256(data).hexdigest()
    if digest.encode() != expected:
        raise CheckpointError(
            f"{path} is damaged: its SHA-256 is {digest}, but {DIGEST} says {expected!r:.70}"
        )
    try:
        parsed = parse_manifest(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {one_line(error)}") from None
    try:
        manifest = structure(Manifest, parsed)
        _check_manifest(manifest, folder)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error!s:.400}") from None
    return manifest


def _count_values(data: bytes, path: Path) -> None:
    """Raise `CheckpointError` if a manifest is too large for this version to parse."""
    values, most = sum(map(data.count, b",[{")), _VALUES + len(data) // _BYTES_PER_VALUE
    if len(data) > _MAX_BYTES or values > most:
        raise CheckpointError(
            f"{path} must have at most {_MAX_BYTES} bytes, and at most {most} JSON values for its "
            f"size, got {len(data)} bytes and {values} values"
        )


def _check_manifest(manifest: Manifest, folder: Path) -> None:
    """Raise ValueError if the manifest of the step in `folder` was not written by saving."""
    match = STEP.match(folder.name)
    if match and int(match[1]) != manifest.step:
        raise ValueError(f"step is {manifest.step}, but the folder is named {folder.name}")
    if config_digest(manifest.config) != manifest.config_sha256:
        raise ValueError("config_sha256 is not the digest of config")
    for name in manifest.files:
        if not SHARD.fullmatch(name):
            raise ValueError(f"file name {name!r} is not of the form rank00000-00000.safetensors")
    for name, (file, shape, _) in manifest.tensors.items():
        # Check each size, then their product: Python refuses to print larger numbers.
        sizes_fit = len(shape) <= 64 and max(shape, default=0) < 1 << 62
        if not sizes_fit or math.prod(shape) >= 1 << 62 or file not in manifest.files:
            raise ValueError(
                f"tensor {name!r} has an invalid file {file!r} or shape {shape!r:.200}"
            )


def dump(value: Any, what: str) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, no NaN, only string keys."""

    def check(part: Any, where: str) -> None:
        if isinstance(part, dict):
            for key, item in part.items():
                if not isinstance(key, str):
                    raise CheckpointError(f"{where}: JSON keys must be strings, got {key!r}")
                check(item, f"{where}.{key}")
        elif isinstance(part, (list, tuple)):
            for number, item in enumerate(part):
                check(item, f"{where}[{number}]")
        elif not isinstance(part, (str, int, float, bool, type(None))):
            raise CheckpointError(f"{where} is a {type(part).__name__}, which is not a JSON type")
        elif isinstance(part, float) and part - part != 0:
            raise CheckpointError(f"{where} is {part}; JSON has only finite numbers")

    value = dict(value) if isinstance(value, Mapping) else value
    check(value, what)
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def parse_manifest(data: bytes) -> Any:
    """Parse strict JSON; raise `ValueError` for duplicate names, NaN and infinity, which Python
    would accept."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if repeated := len(pairs) - len(result):
            raise ValueError(f"names in a JSON object must be unique, got {repeated} duplicate(s)")
        return result

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    def finite(number: str) -> float:
        return value if math.isfinite(value := float(number)) else refuse(number)

    return json.loads(data, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
