"""Reading a Hugging Face folder: config.json and safetensors files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from warpweave.cli.messages import one_line
from warpweave.convert.families import FAMILIES, Family, read_config
from warpweave.convert.fields import ConvertError, read_json
from warpweave.convert.tensors import TensorRule, rules_of
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT
from warpweave.parallel.shard import ParamRecord

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class StoredTensor(NamedTuple):
    """Where a tensor lies: its file, its name there, its shape and safetensors' word for its
    dtype."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class HFFolder:
    """A model of transformers on disk; only its sizes and names are in memory.

    Attributes:
        path: the folder.
        config: the model as ours.
        fields: its config.json.
        dtype: of its embedding.
    """

    path: Path
    config: GPTConfig
    fields: Mapping[str, Any]
    dtype: torch.dtype
    _rules: Mapping[str, TensorRule]
    _places: Mapping[str, StoredTensor]
    _open: dict[str, Any] = field(default_factory=dict, repr=False)

    def tensor(self, record: ParamRecord) -> Tensor:
        """One logical parameter, in the file's dtype: what ``Engine.load("param", ...)`` asks for.

        Raises `ConvertError` if the model that asks has another shape, or there is none like it.
        """
        rule = self._rules.get(record.name)
        if rule is None or rule.shape != record.shape:
            has = "nothing" if rule is None else f"shape {[*rule.shape]}"
            raise ConvertError(
                f"{self.path} has {has} for {record.name}, which is {[*record.shape]} in the model"
            )
        return rule.pack(self._read)

    def load(self, gpt: GPT) -> GPT:
        """Fill a GPT, or one rank's part of it on any mesh, in its own dtype; the same GPT."""
        return fill(gpt, self.tensor)

    def _read(self, name: str) -> Tensor:
        file, stored = self._places[name][:2]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            return self._open[file].get_tensor(stored)
        except (OSError, SafetensorError) as error:
            raise ConvertError(
                f"cannot read {name}: {self.path / file}: {one_line(error)}"
            ) from None


@torch.no_grad()
def fill(gpt: GPT, tensor: Callable[[ParamRecord], Tensor]) -> GPT:
    """Set every parameter of this rank's part from the logical tensor of its record; the same
    GPT."""
    records = gpt.parameter_records()
    for name, param in gpt.named_parameters():
        param.copy_(records[name].slice(tensor(records[name]), gpt.mesh.coords))
    return gpt


def from_hf(folder: str | Path) -> HFFolder:
    """Open a folder that ``save_pretrained`` wrote, or a download of one; reads no weights yet.

    ``GPT(found.config)`` filled by ``found.load(gpt)`` computes what the transformers model does,
    on any mesh; an `Engine` takes ``engine.load("param", found.tensor)``.

    Its ``config.seq_len`` is the longest sequence that the folder names, 131072 of Llama 3.1. With
    rotary positions a shorter one is the same model: ``replace(found.config, seq_len=2048)`` is
    what to train, shard over ranks or estimate the memory of
    (``train --init-from --seq-len 2048``).

    Raises `ConvertError` in one line: no such folder, no config.json or safetensors in it, an
    unknown model_type, what a GPT of ours cannot be, tensors missing, left over, quantized or of a
    wrong shape.
    """
    path = Path(folder)
    with about(path):
        fields = read_json(path / "config.json")
        kind, config = read_config(fields)
        family = FAMILIES[kind]
        try:
            rules = rules_of(config, family)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ConvertError(f"no model has these sizes: {one_line(error)}") from None
        places = _check_names(_find_tensors(path), rules, family)
        dtypes = {name: _dtype(name, place.dtype) for name, place in places.items()}
        embedding = next(iter(rules["embedding.weight"].shapes))
        found = HFFolder(path, config, fields, dtypes[embedding], rules, places)
        head = f"{family.modules['head'][0]}.weight"
        if config.tied and head in places and not torch.equal(*map(found._read, (head, embedding))):
            raise ConvertError(f"{head} is not {embedding}, though tie_word_embeddings is true")
    return found


@contextmanager
def about(path: Path) -> Iterator[None]:
    """A `ConvertError` of what is done here names the folder."""
    try:
        yield
    except ConvertError as error:
        raise ConvertError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's safetensors files under its own name."""
    if (path / SINGLE).exists():  # the order in which transformers looks for them
        files = [SINGLE]
    elif (path / INDEX).exists():
        names = read_json(path / INDEX).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(f, str) for f in names.values()):
            raise ConvertError(f"{INDEX} has no weight_map of names")
        for file in names.values():
            if Path(file).name != file:
                raise ConvertError(f"{INDEX} names {file!r}, which is no file of the folder")
        files = sorted(set(names.values()))
    else:
        raise ConvertError(f"no {SINGLE} or {INDEX} (other formats than safetensors are not read)")
    places: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is no mapping
                    if name in places:
                        raise ConvertError(f"tensor {name} is in {places[name].file} and in {file}")
                    piece = opened.get_slice(name)
                    places[name] = StoredTensor(
                        file, name, tuple(piece.get_shape()), piece.get_dtype()
                    )
        except (OSError, SafetensorError) as error:
            raise ConvertError(f"cannot read {path / file}: {one_line(error)}") from None
    return places


def _check_names(
    places: Mapping[str, StoredTensor], rules: Mapping[str, TensorRule], family: Family
) -> dict[str, StoredTensor]:
    """The places under the names of the whole model; raises if they do not fit the rules."""
    if not any(name.startswith(family.base) for name in places):  # of a bare base model
        heads = f"{family.modules['head'][0]}."
        places = {
            name if name.startswith(heads) else family.base + name: place
            for name, place in places.items()
        }
    shapes = {name: shape for rule in rules.values() for name, shape in rule.shapes.items()}
    for name, shape in shapes.items():
        if name not in places:
            raise ConvertError(f"tensor {name} is missing")
        if places[name].shape != shape:
            raise ConvertError(
                f"tensor {name} has shape {[*places[name].shape]}, its config.json says {[*shape]}"
            )
    tied = () if "head.weight" in rules else (f"{family.modules['head'][0]}.weight",)
    for name in places:
        if name not in shapes and name not in tied and not name.endswith(family.unused):
            raise ConvertError(
                f"tensor {name} is left over: no {family.architecture} of ours has it"
            )
    return {name: places[name] for name in (*shapes, *tied) if name in places}


def _dtype(name: str, code: str) -> torch.dtype:
    if code not in _DTYPES:
        raise ConvertError(f"tensor {name} is {code}, only {', '.join(_DTYPES)} are read")
    return _DTYPES[code]
