"""Open the model to start from: a transformers folder, a checkpoint of ours, or a run's folder."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from warpweave.checkpoint import CheckpointReader, latest, open_checkpoint
from warpweave.checkpoint.manifest import MANIFEST, read_manifest
from warpweave.convert.beside import GENERATION, find_origin
from warpweave.convert.families import read_config
from warpweave.convert.fields import ConvertError, read_json
from warpweave.convert.folder import HFFolder, about, fill, from_hf
from warpweave.data import ByteTokenizer
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT
from warpweave.parallel.shard import ParamRecord


@dataclass(frozen=True)
class SavedModel:
    """The weights of a checkpoint of ours, with the interface of an `HFFolder`."""

    config: GPTConfig
    reader: CheckpointReader

    def tensor(self, record: ParamRecord) -> Tensor:
        """Return one logical parameter; raise `CheckpointError` if there is none of this name."""
        return self.reader.tensor(record.name)

    def load(self, gpt: GPT) -> GPT:
        """Fill a GPT, as ``HFFolder.load`` does."""
        return fill(gpt, self.tensor)


def read_model_config(folder: Path) -> GPTConfig:
    """Return the configuration of the model in a folder; its weights are not read or checked.
    Raises `ConvertError`, or `CheckpointError` for a damaged checkpoint."""
    step = find_step(folder)
    if step is not None:
        return _ours(step, read_manifest(step).config)
    with about(folder):
        return read_config(read_json(folder / "config.json"))[1]


def open_model(folder: Path, group: dist.ProcessGroup | None = None) -> HFFolder | SavedModel:
    """Open the model in a folder and check its weights; every rank of `group` calls this. Both
    return types have ``config``, ``tensor(record)`` and ``load(gpt)``. Raises `ConvertError` or
    `CheckpointError` if the folder is damaged or is not a model."""
    step = find_step(folder)
    if step is None:
        return from_hf(folder)
    reader = open_checkpoint(step, group=group)
    return SavedModel(_ours(step, reader.config), reader)


def check_same_model(config: GPTConfig, folder: Path) -> None:
    """Raise a one-line ``ValueError`` unless a folder's weights have the model's shapes."""
    ours, theirs = (
        GPT(m, device="meta").parameter_records() for m in (config, open_model(folder).config)
    )
    for name in {**ours, **theirs}:
        wanted, found = (
            f"shape {r[name].shape}" if name in r else "no such tensor" for r in (ours, theirs)
        )
        if wanted != found:
            raise ValueError(f"{name}: {folder} has {found}, but the given options need {wanted}")


def find_tokenizer(folder: Path) -> Path | None:
    """Return the tokenizer.json of a folder or of a run's ``origin``; None if it has no tokenizer.
    Raises `ConvertError` for a tokenizer in a different format: without this, text would be read as
    bytes."""
    folder = find_origin(folder) or folder
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    for other in ("tokenizer.model", "vocab.json", "tokenizer_config.json"):
        if (folder / other).is_file():
            raise ConvertError(
                f"{folder} has {other} but no tokenizer.json, the only supported format; pass "
                "--tokenizer"
            )
    return None


def is_of_bytes(folder: Path) -> bool:
    """Return True if the tokens of a model without a tokenizer.json are bytes: it was trained on
    bytes, or its tokenizer is unknown and it has 256 tokens."""
    if (record := _tokenizer_of_training(folder)) is not None:
        return record == ByteTokenizer.fingerprint
    return read_model_config(folder).vocab_size == 256


def other_tokenizer(folder: Path, given: Path | None) -> str | None:
    """Return a warning if `given` (a tokenizers JSON, or bytes) is not the run's training
    tokenizer; None if it is, or if that is unknown."""
    trained = _tokenizer_of_training(folder)
    if given is None or trained is None:
        return None
    bytes_ = ByteTokenizer.fingerprint
    other = bytes_ if given == Path("bytes") else hashlib.sha256(given.read_bytes()).hexdigest()
    if other == trained:
        return None
    own = bytes_ if trained == bytes_ else f"SHA-256 {trained[:12]}"
    return (
        f"--tokenizer {given} is not the tokenizer that the model was trained with ({own}), so the "
        "same token ids have different meanings"
    )


def read_stop_tokens(folder: Path) -> tuple[int, ...]:
    """Return the end tokens of a transformers model, or of a run that started from one; () if none.
    As in transformers, generation_config.json alone decides if it exists."""
    folder = find_origin(folder) or folder
    for file in (GENERATION, "config.json"):
        if (folder / file).is_file():
            found = read_json(folder / file).get("eos_token_id")
            ends = found if isinstance(found, list) else [] if found is None else [found]
            if not all(type(token) is int for token in ends):
                raise ConvertError(f"{folder / file}: eos_token_id = {found!r} is not a token id")
            return tuple(ends)
    return ()


def find_step(folder: Path) -> Path | None:
    """Return the folder if it is a checkpoint, or the newest one of a run's folder, else None."""
    if os.path.lexists(folder / MANIFEST):
        return folder
    return latest(folder / "checkpoints")


def _tokenizer_of_training(folder: Path) -> str | None:
    """Return the record of a run's tokenizer, see `tokenizer_of` in `beside`; None if unknown."""
    step = find_step(folder)
    return None if step is None else read_manifest(step).state.get("data", {}).get("tokenizer")


def _ours(step: Path, fields: dict) -> GPTConfig:
    try:
        return GPTConfig(**fields)
    except (TypeError, ValueError) as error:
        raise ConvertError(
            f"{step} has a model that this version of warpweave does not support: {error}"
        ) from None
