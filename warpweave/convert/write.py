"""Write a Hugging Face folder: each rank writes its own tensors, one file at a time."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from warpweave.checkpoint import CheckpointError, open_checkpoint
from warpweave.checkpoint.files import agree_on_all, attempt
from warpweave.convert.beside import (
    GENERATION,
    card,
    find_origin,
    special_tokens,
    tokenizer_config,
    tokenizer_of,
)
from warpweave.convert.families import FAMILIES, canonical, read_config, write_config
from warpweave.convert.fields import read_json
from warpweave.convert.folder import INDEX, SINGLE
from warpweave.convert.source import find_step
from warpweave.convert.tensors import rules_of
from warpweave.model.config import GPTConfig
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT


def to_hf(
    model: GPT | Engine | str | Path,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    tokenizer: str | Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 5 << 30,
) -> Path:
    """Write a model as a folder that ``AutoModelForCausalLM.from_pretrained`` loads; return it.

    The folder also has a tokenizer that ``AutoTokenizer`` loads (if one is known),
    generation_config.json and a README.md template.

    Args:
        model: a GPT or an engine (on any mesh, every rank calls this), or the path of a run's
            folder (its newest checkpoint) or of a checkpoint (``.../checkpoints/step_00000500``).
        folder: the destination; it must not exist yet.
        like: a transformers folder that the model came from. Its family, its tokenizer and the
            other fields of its config.json are kept. By default it is the model that a run started
            from; without one, the family is the first that can express this model.
        tokenizer: a tokenizers JSON, or "bytes"; None is the one of the training, or `like`'s.
        dtype: the dtype of the weights; None is the model's own.
        shard_bytes: the largest size of a file, unless a single tensor is larger.

    Raises `ConvertError` if no family (or not that of `like`) can express this model, or if the
    tokenizer is not found or larger than the model's vocabulary. Raises `CheckpointError`, on every
    rank, if the folder exists or cannot be written.

    Examples:
        >>> from warpweave import GPT, PRESETS
        >>> to_hf(GPT(PRESETS["toy-llama"]), "to-hf").name
        'to-hf'
    """
    folder = Path(folder)
    state: Mapping[str, Any] = {}
    places = [] if like is None else [Path(like)]
    tensors: Iterator[tuple[str, Tensor]]
    if isinstance(model, (str, Path)):
        saved = open_checkpoint(find_step(Path(model)) or model)
        config, group, state = GPTConfig(**saved.config), None, saved.state
        tensors = ((n, saved.tensor(n)) for n in saved.names if "/" not in n)  # "/": optimizer's
        places += [place for place in [find_origin(saved.path)] if place is not None]
    else:
        config, group = model.config, model.mesh.group("world")
        if isinstance(model, Engine):
            tensors = ((r.name, tensor) for r, tensor, mine in model.read("param") if mine)
            dtype = model.dtype if dtype is None else dtype
        else:
            tensors = _of_gpt(model)
    source = next((place for place in places if (place / "config.json").is_file()), like)
    kind, fields = _config_json(config, source)
    files, place = tokenizer_of(tokenizer, state.get("data", {}).get("tokenizer"), places)
    source = source if not files or place == source else None  # its token ids hold only then
    beside = _beside(folder.name, config, kind, fields, files, source, state)
    rules = rules_of(config, FAMILIES[kind])
    theirs = (item for name, ours in tensors for item in rules[name].unpack(ours).items())
    rank = 0 if group is None else dist.get_rank(group)

    def begin() -> dict[str, Any]:
        if os.path.lexists(folder):
            raise CheckpointError(f"{folder} already exists")
        temporary = folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(8)}")
        temporary.mkdir(parents=True)
        return {"name": temporary.name}

    def finish() -> None:
        config_json = fields | {"dtype": next(r["dtype"] for r in reports if r["dtype"])}
        _write_names(temporary, reports)
        for name, data in {"config.json": _json(config_json), **beside}.items():
            (temporary / name).write_bytes(data)
        os.rename(temporary, folder)

    # Rank 0 creates a temporary folder, every rank writes into it, and rank 0 renames it.
    opened = agree_on_all(attempt(folder, begin) if rank == 0 else {}, group)[0]
    temporary = folder.with_name(opened["name"])
    try:
        reports = agree_on_all(_write_files(temporary, rank, theirs, dtype, shard_bytes), group)
        agree_on_all(attempt(folder, finish) if rank == 0 else {}, group)
    except BaseException:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _config_json(config: GPTConfig, like: str | Path | None) -> tuple[str, dict[str, Any]]:
    """Return (model_type, config.json) of a model, or of `like` unchanged if it is the same."""
    if like is None:
        return write_config(config)
    old = read_json(Path(like) / "config.json")
    kind, before = read_config(old)
    now = replace(canonical(config), dropout=0.0)
    if now.positions == "rope":  # the last training length is not a limit
        now = replace(now, seq_len=before.seq_len)
    if now == before:
        return kind, dict(old)
    kept = {k: v for k, v in old.items() if k not in ("rope_scaling", "rope_theta")}
    return kind, kept | write_config(now, kind)[1]


def _beside(
    name: str,
    config: GPTConfig,
    kind: str,
    fields: dict[str, Any],
    files: dict[str, bytes],
    source: str | Path | None,
    state: Mapping[str, Any],
) -> dict[str, bytes]:
    """Return the files besides config.json and the weights, with the tokenizer's `files`. Add the
    begin and end tokens to `fields`, unless `source`, where the fields come from, has this
    tokenizer and names them."""
    data, settings, tokenizer = state.get("data", {}), state.get("settings", {}), bool(files)
    if source is None or "eos_token_id" not in fields:
        ids = special_tokens(files, config, settings.get("separator"))
        fields |= ids
        if "tokenizer.json" in files and "tokenizer_config.json" not in files:
            files["tokenizer_config.json"] = _json(tokenizer_config(files, config, ids))
    if source is not None and (Path(source) / GENERATION).is_file():
        files[GENERATION] = (Path(source) / GENERATION).read_bytes()
    else:
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        files[GENERATION] = _json({n: fields.get(n) for n in names})
    trained = {}
    if "name" in data:  # without the path on the training machine
        tokens = state["step"] * data["sequences_per_step"] * config.seq_len
        trained = {"Data": Path(data["name"]).name, "Steps": f"{state['step']} ({tokens:,} tokens)"}
    written = card(name, config, FAMILIES[kind].architecture, trained, tokenizer)
    return files | {"README.md": written.encode()}


@torch.no_grad()
def _of_gpt(gpt: GPT) -> Iterator[tuple[str, Tensor]]:
    """Yield the logical parameters that this rank writes; collective over the tensor ranks."""
    mesh, records = gpt.mesh, gpt.parameter_records()

    def gather(x: Tensor, axis: str) -> list[Tensor]:
        parts = [torch.empty_like(x) for _ in range(mesh.size(axis))]
        dist.all_gather(parts, x.contiguous(), group=mesh.group(axis))
        return parts

    first = not any(mesh.index(axis) for axis in ("dp", "cp", "tp"))
    for name, param in gpt.named_parameters():
        tensor = records[name].assemble(param.detach(), gather)
        copy = name.startswith("embedding.") and not gpt.first  # the copy of a tied embedding
        if first and not copy:
            yield name, tensor


def _write_files(
    folder: Path,
    rank: int,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    shard_bytes: int,
) -> dict[str, Any]:
    """Write this rank's files; return them with their tensors' sizes, or {"error": the reason}."""
    files: dict[str, dict[str, int]] = {}
    waiting: dict[str, Tensor] = {}
    problem: dict[str, Any] = {}
    found: str | None = None

    def size(tensor: Tensor) -> int:
        return tensor.numel() * tensor.element_size()

    def flush() -> None:
        if waiting:
            name = f"rank{rank:05d}-{len(files):05d}"
            save_file(waiting, folder / name, metadata={"format": "pt"})
            files[name] = {key: size(tensor) for key, tensor in waiting.items()}
            waiting.clear()

    for name, tensor in tensors:
        if problem:
            continue  # `tensors` may run collectives, so peers need this rank to exhaust it
        tensor = tensor.detach().to("cpu", dtype, copy=True)
        found = str(tensor.dtype).removeprefix("torch.")
        if sum(map(size, waiting.values())) + size(tensor) > shard_bytes:
            problem = attempt(folder, flush)
        waiting[name] = tensor
    return problem or attempt(folder, flush) or {"files": files, "dtype": found}


def _write_names(folder: Path, reports: list[dict[str, Any]]) -> None:
    """Rename all ranks' files as transformers expects, and write the index if there are several."""
    written = [(old, sizes) for report in reports for old, sizes in report["files"].items()]
    names, total = {}, 0
    for number, (old, sizes) in enumerate(written, 1):
        new = f"model-{number:05d}-of-{len(written):05d}.safetensors"
        new = SINGLE if len(written) == 1 else new
        os.rename(folder / old, folder / new)
        names |= dict.fromkeys(sizes, new)
        total += sum(sizes.values())
    if len(written) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (folder / INDEX).write_bytes(_json(index))


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
