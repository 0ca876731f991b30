"""The files next to a model's weights: its tokenizer, its end tokens, and a model card.

A run's folder ``origin`` keeps what an export will need: the tokenizer of its text and, if the run
started from a transformers model, config.json and generation_config.json. A checkpoint's state
records which tokenizer it was, so that no other tokenizer is exported with it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warpweave.cli.messages import one_line
from warpweave.convert.fields import ConvertError, read_json
from warpweave.data import ByteTokenizer
from warpweave.model.config import GPTConfig

ORIGIN = "origin"
GENERATION = "generation_config.json"
_TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_KINDS = ("bos", "eos", "pad")
# Usual names of special tokens, for a tokenizers JSON without a file that states their roles.
_CALLED = {
    "bos": ("<s>", "<bos>", "<|begin_of_text|>", "[BOS]", "<|startoftext|>"),
    "eos": ("</s>", "<eos>", "<|end_of_text|>", "[EOS]", "<|endoftext|>"),
    "pad": ("<pad>", "[PAD]", "<|pad|>"),
}


def keep_origin(
    run: Path, source: Path | None, tokenizer: Path | None, record: str | None, *, again: bool
) -> None:
    """Copy into a run's folder what its export will need, from the model it started from and its
    tokenizer (`record` as for `tokenizer_of`). A resumed run (`again`) keeps existing files."""
    folder = run / ORIGIN
    if again and folder.exists():
        return
    source = None if source is None else find_origin(source) or source
    own = None if source is None else source / "tokenizer.json"
    files: dict[str, bytes] = {}
    if source is not None and tokenizer in (None, own) and record != ByteTokenizer.fingerprint:
        files = _copies(source, ("config.json", GENERATION, *_TOKENIZER))
    else:
        files = {} if tokenizer is None else _tokenizer_files(tokenizer)
        if source is not None and (source / "config.json").is_file():  # its token ids are invalid
            fields = read_json(source / "config.json")
            kept = {k: v for k, v in fields.items() if not k.endswith("_token_id")}
            files["config.json"] = json.dumps(kept).encode()
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", GENERATION, *_TOKENIZER):  # files of an earlier run
        (folder / name).unlink(missing_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def find_origin(folder: Path) -> Path | None:
    """Return the ``origin`` of a run's folder, or of a checkpoint's run; None without one."""
    for run in (folder, folder.absolute().parent.parent):
        if (run / ORIGIN).is_dir() and (run / "checkpoints").is_dir():
            return run / ORIGIN
    return None


def tokenizer_of(
    given: str | Path | None, record: str | None, places: list[Path]
) -> tuple[dict[str, bytes], Path | None]:
    """Return a tokenizer's files, name -> content ({} if there is none), and its place.

    Args:
        given: a tokenizers JSON, or "bytes".
        record: the tokenizer of the training, from the checkpoint's state: "bytes", or the SHA-256
            of a tokenizers JSON.
        places: folders that may contain it; the one that does is returned.

    Raises `ConvertError` if no folder has the recorded tokenizer.
    """
    if given is not None:
        return (_bytes_files() if str(given) == "bytes" else _tokenizer_files(Path(given))), None
    if record == ByteTokenizer.fingerprint:
        return _bytes_files(), None
    for place in places:
        found = _copies(place, _TOKENIZER)
        digest = hashlib.sha256(found.get("tokenizer.json", b"")).hexdigest()
        if digest == record or (record is None and found):
            return found, place
    if record is not None:
        where = " or ".join(map(str, places)) or "no folder"
        raise ConvertError(
            f"the tokenizer that the model was trained with (SHA-256 {record[:12]}) is not in "
            f"{where}; pass its path as `tokenizer`"
        )
    return {}, None


def special_tokens(
    files: Mapping[str, bytes], config: GPTConfig, separator: int | None
) -> dict[str, int | None]:
    """Return a tokenizer's {"bos_token_id", "eos_token_id", "pad_token_id"}; None if unknown.

    The ids come from tokenizer_config.json, else from the training's separator, which ends a text,
    else from the names of special tokens. Raises `ConvertError` if the model's vocabulary is too
    small.
    """
    ids: dict[str, int | None] = dict.fromkeys(f"{kind}_token_id" for kind in _KINDS)
    ids["eos_token_id"] = separator
    if "tokenizer.json" not in files:
        return ids
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
        said = json.loads(files.get("tokenizer_config.json", b"{}"))
    except Exception as error:  # the Rust side raises bare Exception
        raise ConvertError(f"tokenizer.json is not a valid tokenizer: {one_line(error)}") from None
    size, rows = tokenizer.get_vocab_size(with_added_tokens=True), config.vocab_size
    if size > rows:
        raise ConvertError(f"the tokenizer has {size} tokens, but the model's vocab_size is {rows}")
    special = {t.content: i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    for kind in _KINDS:
        name = said.get(f"{kind}_token")
        name = name.get("content") if isinstance(name, dict) else name
        called = [special[n] for n in _CALLED[kind] if n in special]
        if name is not None:
            ids[f"{kind}_token_id"] = tokenizer.token_to_id(name)
        elif len(called) == 1 and ids[f"{kind}_token_id"] is None:
            ids[f"{kind}_token_id"] = called[0]
    return ids


def tokenizer_config(
    files: Mapping[str, bytes], config: GPTConfig, ids: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return the tokenizer_config.json with which transformers loads a tokenizers JSON."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
    names = {f"{k}_token": ids[f"{k}_token_id"] for k in _KINDS}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.seq_len,
        "clean_up_tokenization_spaces": False,
        **{name: tokenizer.id_to_token(i) for name, i in names.items() if i is not None},
    }


def card(
    name: str, config: GPTConfig, architecture: str, trained: Mapping[str, Any], tokenizer: bool
) -> str:
    """Return a README.md template: the model, its training data, and how to load it, together with
    the `tokenizer` if there is one."""
    also = ", AutoTokenizer" if tokenizer else ""
    load = f'\ntokenizer = AutoTokenizer.from_pretrained("{name}")' if tokenizer else ""
    sizes = (
        f"{config.layers} layers of width {config.width}, {config.heads} heads, vocabulary "
        f"{config.vocab_size}, sequences of {config.seq_len} tokens"
    )
    facts = {architecture: sizes, **trained}
    about = "\n".join(f"* {what}: {value}" for what, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A language model, exported by warpweave.

{about}
* License: not chosen yet; add `license:` to the header above, and what the data's licenses require.
* Intended use, limits, evaluation: to be filled in.

```python
from transformers import AutoModelForCausalLM{also}

model = AutoModelForCausalLM.from_pretrained("{name}"){load}
```
"""


def _copies(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _tokenizer_files(path: Path) -> dict[str, bytes]:
    """Read a tokenizers JSON, and, if it is named tokenizer.json, the files next to it."""
    try:
        files = {"tokenizer.json": path.read_bytes()}
    except OSError as error:
        raise ConvertError(f"cannot read {path}: {error.strerror}") from None
    beside = _copies(path.parent, _TOKENIZER) if path.name == "tokenizer.json" else {}
    return beside | files


def _bytes_files() -> dict[str, bytes]:
    """Return bytes as a tokenizers JSON: the byte-level alphabet in order of bytes, no merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    hidden = [b for b in range(256) if b not in shown]
    names = {b: chr(b) for b in shown} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(vocab={names[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    return {"tokenizer.json": tokenizer.to_str().encode()}
