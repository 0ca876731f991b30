"""Read a Hugging Face folder: config.json and safetensors files, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

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
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class StoredTensor(NamedTuple):
    """The location of a tensor: its file, and its name, shape and safetensors dtype code there."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class HFFolder:
    """A transformers model on disk; only its sizes and names are in memory.

    Attributes:
        path: the folder.
        config: the model as our configuration.
        fields: its config.json.
        dtype: the dtype of its embedding.

    Examples:
        >>> from warpweave import GPT, PRESETS
        >>> from warpweave.convert import from_hf, to_hf
        >>> found = from_hf(to_hf(GPT(PRESETS["toy-llama"]), "hf-folder"))
        >>> found.config.layers, found.dtype
        (2, torch.float32)
    """

    path: Path
    config: GPTConfig
    fields: Mapping[str, Any]
    dtype: torch.dtype
    _rules: Mapping[str, TensorRule]
    _places: Mapping[str, StoredTensor]
    _open: dict[str, Any] = field(default_factory=dict, repr=False)

    def tensor(self, record: ParamRecord) -> Tensor:
        """Return one logical parameter in the file's dtype; pass to ``Engine.load("param", ...)``.
        Raises `ConvertError` if the requested parameter is missing or has a different shape."""
        rule = self._rules.get(record.name)
        if rule is None or rule.shape != record.shape:
            has = "nothing" if rule is None else f"shape {[*rule.shape]}"
            raise ConvertError(
                f"{self.path} has {has} for {record.name}, but the model expects shape "
                f"{[*record.shape]}"
            )
        return rule.pack(self._read)

    def load(self, gpt: GPT) -> GPT:
        """Fill a GPT, or one rank's part of it on any mesh, in its own dtype; return the GPT."""
        return fill(gpt, self.tensor)

    def _read(self, name: str) -> Tensor:
        file, stored = self._places[name][:2]
        try:
            if file not in self._open:
                self._open[file] = safe_open(self.path / file, framework="pt")
            return self._open[file].get_tensor(stored)
        except (OSError, SafetensorError) as error:
            where = f"{name}: {self.path / file}"
            raise ConvertError(f"cannot read {where}: {one_line(error)}") from None


@torch.no_grad()
def fill(gpt: GPT, tensor: Callable[[ParamRecord], Tensor]) -> GPT:
    """Set this rank's part of every parameter from its record's logical tensor; return the GPT."""
    records = gpt.parameter_records()
    for name, param in gpt.named_parameters():
        param.copy_(records[name].slice(tensor(records[name]), gpt.mesh.coords))
    return gpt


def from_hf(folder: str | Path) -> HFFolder:
    """Open a folder written by ``save_pretrained``, or a download of one, without reading weights.

    ``GPT(found.config)`` filled by ``found.load(gpt)`` computes the same as the transformers model,
    on any mesh. For an `Engine`, call ``engine.load("param", found.tensor)``.

    ``config.seq_len`` is the longest sequence that the folder allows, such as 131072 for Llama 3.1.
    With rotary positions a shorter length is the same model. To train, shard or estimate memory,
    use ``replace(found.config, seq_len=2048)`` (``train --init-from --seq-len 2048``).

    Raises `ConvertError` in one line: there is no such folder, it has no config.json or safetensors
    file, the model_type is unknown, our GPT does not support the model, or a tensor is missing,
    unexpected, quantized or of a wrong shape.

    Examples:
        >>> from warpweave import GPT, PRESETS
        >>> from warpweave.convert import to_hf
        >>> folder = to_hf(GPT(PRESETS["toy-llama"]), "toy-llama")
        >>> found = from_hf(folder)
        >>> gpt = found.load(GPT(found.config))
    """
    path = Path(folder)
    with about(path):
        fields = read_json(path / "config.json")
        kind, config = read_config(fields)
        family = FAMILIES[kind]
        try:
            rules = rules_of(config, family)
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ConvertError(f"these model sizes are invalid: {one_line(error)}") from None
        places = _check_names(_find_tensors(path), rules, family)
        dtypes = {name: _dtype(name, place.dtype) for name, place in places.items()}
        embedding = next(iter(rules["embedding.weight"].shapes))
        found = HFFolder(path, config, fields, dtypes[embedding], rules, places)
        head = f"{family.modules['head'][0]}.weight"
        if config.tied and head in places and not torch.equal(*map(found._read, (head, embedding))):
            raise ConvertError(f"{head} differs from {embedding}, but tie_word_embeddings is true")
    return found


@contextmanager
def about(path: Path) -> Iterator[None]:
    """Name the folder in every `ConvertError` raised in this context."""
    try:
        yield
    except ConvertError as error:
        raise ConvertError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


class _Index(TypedDict):
    """The file that names the file of every tensor."""

    weight_map: dict[str, str]


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor in the folder's safetensors files, by its name there."""
    if (path / SINGLE).exists():  # the order in which transformers looks
        files = [SINGLE]
    elif (path / INDEX).exists():
        names = read_json(path / INDEX, _Index)["weight_map"]
        for file in names.values():
            if Path(file).name != file:
                raise ConvertError(f"file names in {INDEX} must not contain a folder, got {file!r}")
        files = sorted(set(names.values()))
    else:
        raise ConvertError(f"no {SINGLE} or {INDEX} (only safetensors files are supported)")
    places: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(path / file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  it is not a mapping
                    if name in places:
                        raise ConvertError(f"tensor {name} is in {places[name].file} and in {file}")
                    piece = opened.get_slice(name)
                    shape = tuple(piece.get_shape())
                    places[name] = StoredTensor(file, name, shape, piece.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ConvertError(f"cannot read {path / file}: {one_line(error)}") from None
    return places


def _check_names(
    places: Mapping[str, StoredTensor], rules: Mapping[str, TensorRule], family: Family
) -> dict[str, StoredTensor]:
    """Return the places under the whole model's names; raise an error unless they fit the rules."""
    if not any(name.startswith(family.base) for name in places):  # a bare base model
        heads = f"{family.modules['head'][0]}."
        whole = [n if n.startswith(heads) else family.base + n for n in places]
        places = dict(zip(whole, places.values(), strict=True))
    shapes = {name: shape for rule in rules.values() for name, shape in rule.shapes.items()}
    for name, shape in shapes.items():
        if name not in places:
            raise ConvertError(f"tensor {name} is missing")
        if places[name].shape != shape:
            raise ConvertError(
                f"tensor {name} has shape {[*places[name].shape]}, but config.json gives {[*shape]}"
            )
    tied = () if "head.weight" in rules else (f"{family.modules['head'][0]}.weight",)
    for name in places:
        if name not in shapes and name not in tied and not name.endswith(family.unused):
            raise ConvertError(
                f"unexpected tensor {name}: warpweave's {family.architecture} has no tensor of "
                "that name"
            )
    return {name: places[name] for name in (*shapes, *tied) if name in places}


def _dtype(name: str, code: str) -> torch.dtype:
    if code not in _DTYPES:
        raise ConvertError(f"tensor {name} has dtype {code}; expected one of {', '.join(_DTYPES)}")
    return _DTYPES[code]
