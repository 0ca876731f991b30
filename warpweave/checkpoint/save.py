"""Save a step: every rank writes its tensors, then rank 0 writes the manifest and publishes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from warpweave.checkpoint.files import CheckpointError, agree_on_all, attempt, write
from warpweave.checkpoint.manifest import DTYPE_CODES, new_manifest, write_manifest
from warpweave.checkpoint.read import open_checkpoint
from warpweave.checkpoint.steps import begin, discard, prune, publish_step
from warpweave.parallel.exchange import exchange


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
    spare: int | None = None,
) -> Path:
    """Write ``folder/step_<step>`` and return its path; every rank of `group` calls it.

    `tensors` yields (name, whole logical CPU tensor) for the names that this rank writes; each name
    has exactly one writer. Don't reuse a tensor's buffer: each tensor is read only when its file is
    full. The iterable may run collectives, so it is always exhausted, even if this rank's disk is
    full. Files have up to `shard_bytes`, or a single tensor. `config`, `state` and `mesh` are JSON
    (those of rank 0 are written); floats must be finite and are restored bit for bit.

    The saved step is read back and compared. Then older steps are removed, except the `keep` - 1
    highest others and step `spare`. A step that already exists is replaced. If any rank fails,
    every rank raises `CheckpointError`, the folder's previous contents are unchanged and no partial
    step is visible. (If reading back fails, the damaged step stays next to the previous ones, and
    `open_latest` skips it.)

    Examples:
        >>> save_checkpoint("saved", 1, [("weight", torch.ones(4))], config={}, state={}).name
        'step_00000001'
    """
    if step < 0 or keep < 1 or shard_bytes < 1:
        raise CheckpointError(
            f"expected step >= 0, keep >= 1, shard_bytes >= 1, got {step=} {keep=} {shard_bytes=}"
        )
    folder = Path(folder)
    rank = 0 if group is None else dist.get_rank(group)
    target = folder / f"step_{step:08d}"

    def open_step() -> dict[str, Any]:
        manifest = new_manifest(step, config, state, mesh)
        return {"manifest": manifest, "folder": begin(folder, target.name).name}

    def seal() -> None:
        publish_step(temporary, target, write_manifest(temporary, opened["manifest"], reports))

    # 1. Rank 0 creates a temporary folder and broadcasts its name.
    opened = agree_on_all(attempt(folder, open_step) if rank == 0 else {}, group)[0]
    temporary = folder / opened["folder"]
    try:
        # 2. Every rank writes its tensors; reports and errors are gathered on all ranks.
        reports = exchange(_write_shards(temporary, rank, tensors, shard_bytes), group)
        _check_reports(reports)
        # 3. Rank 0 writes the manifest and renames the folder. If it fails, every rank raises.
        agree_on_all(attempt(temporary, seal) if rank == 0 else {}, group)
    except BaseException:
        if rank == 0:  # also for KeyboardInterrupt and errors of `tensors` itself
            discard(temporary)
        raise
    # 4. All ranks read it back, from disk, before an older step is removed.
    try:
        open_checkpoint(target, group=group)
    except CheckpointError as error:
        raise CheckpointError(
            f"the new checkpoint was written but failed verification: {error}; older checkpoints "
            "are kept"
        ) from None
    if rank == 0:
        prune(folder, target, keep, spare)
    return target


def _check_reports(reports: Sequence[dict[str, Any]]) -> None:
    """Raise an error if any rank failed, or if two ranks wrote the same tensor."""
    for rank, report in enumerate(reports):
        if "error" in report:
            raise CheckpointError(f"rank {rank}: {report['error']}")
    writers: dict[str, int] = {}
    for rank, report in enumerate(reports):
        for name in report["tensors"]:
            if (other := writers.setdefault(name, rank)) != rank:
                raise CheckpointError(
                    f"tensor {name!r} must be saved by one rank only, got ranks {other} and {rank}"
                )


def _write_shards(
    folder: Path, rank: int, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> dict[str, Any]:
    """Write this rank's tensors; return {"files": ..., "tensors": ...} or {"error": the reason}."""
    shards, problem = _Shards(folder, rank, shard_bytes), {}
    for name, tensor in tensors:
        if problem:
            continue  # `tensors` may run collectives with other ranks
        problem = attempt(folder, shards.add, name, tensor)
        if problem:
            shards.clear()
    return problem or attempt(folder, shards.close)


class _Shards:
    """The files of one rank; each is written when the next tensor does not fit into it."""

    def __init__(self, folder: Path, rank: int, most: int) -> None:
        self.folder, self.rank, self.most = folder, rank, most
        self.files: dict[str, Any] = {}
        self.written: dict[str, Any] = {}
        self.clear()

    def clear(self) -> None:
        self.waiting: dict[str, torch.Tensor] = {}
        self.bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor; it is read only when its file is full."""
        _check_tensor(name, tensor)
        if name in self.waiting or name in self.written:
            raise CheckpointError(
                f"tensor {name!r} must be saved only once, but rank {self.rank} was asked to save "
                "it twice"
            )
        if self.bytes + tensor.nbytes > self.most:
            self.flush()
        self.waiting[name] = tensor.detach().contiguous()
        self.bytes += tensor.nbytes

    def flush(self) -> None:
        """Write the pending tensors to a file, directly from their memory."""
        if not self.waiting:
            return
        name = f"rank{self.rank:05d}-{len(self.files):05d}.safetensors"
        # Widest dtype first: each tensor starts at a multiple of its width.
        order = sorted(self.waiting, key=lambda key: (-self.waiting[key].element_size(), key))
        parts: list[bytes | memoryview] = [_header({key: self.waiting[key] for key in order})]
        parts += [_memory(self.waiting[key]) for key in order]
        digest = write(self.folder / name, *parts)
        self.files[name] = {"bytes": sum(map(len, parts)), "sha256": digest}
        for key, value in self.waiting.items():
            shape = list(value.shape)
            self.written[key] = {"file": name, "shape": shape, "dtype": _dtype_name(value)}
        self.clear()

    def close(self) -> dict[str, Any]:
        """Write the last file; return the manifest's entries of all files and tensors."""
        self.flush()
        return {"files": self.files, "tensors": self.written}


def _header(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return the header of a safetensors file with these tensors, in this order.

    `safetensors.serialize` would copy all of them twice and block all other threads meanwhile.
    """
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        code, _ = DTYPE_CODES[_dtype_name(tensor)]
        shape = list(tensor.shape)
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    dtype = _dtype_name(tensor)
    if not isinstance(name, str) or not name or name == "__metadata__":
        raise CheckpointError(
            f'a tensor\'s name must be a non-empty string other than "__metadata__", got {name!r}'
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or dtype not in DTYPE_CODES:
        raise CheckpointError(
            f"tensor {name!r} must be a dense CPU tensor of a supported dtype "
            f"({', '.join(DTYPE_CODES)}), got {tensor.layout}, {tensor.device}, {dtype}"
        )
