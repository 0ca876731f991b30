"""Text as token batches that are pure functions of (seed, step, number): resume needs only the
step.

Sources, chosen by what `source` is:

* ``None``: the source text of Python's own standard library (``*.py`` without tests), about 10 MB
  of real text that is on every machine;
* a text file or a folder of them, tokenised at opening and held in memory: bytes as they are (256
  ids, the default), or any Hugging Face ``tokenizer.json``. Text is UTF-8, with or without a
  byte-order mark, and holds no zero byte: what is UTF-16, Latin-1 or binary is refused by name,
  whatever the tokenizer;
* a token file, memory-mapped and never copied: ``NAME.npy`` (one dimension, uint8, uint16 or
  uint32), or ``NAME.bin`` (the same numbers raw, little-endian) with ``NAME.bin.json`` beside it:
  ``{"format": "warpweave-tokens", "version": 1, "dtype": "uint16", "tokens": 1234, "vocab_size":
  50257}``. An ``.npy`` may have the sidecar too; without it the vocabulary is the largest id plus
  one.

Train and validation never share a file: of n files those max(1, round(fraction n)) whose relative
paths hash lowest are validation. One file alone, or a token file, is cut near its end instead.

A training sample is a window of S+1 tokens. Its offset is a hash of the counters (seed, step,
number), so every rank can fetch just its own samples and any layout sees the same batch. The label
of the last token of a file is ``IGNORE``: nothing in the text foretells which file comes next.
"""

from __future__ import annotations

import codecs
import dataclasses
import fnmatch
import hashlib
import json
import os
import secrets
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

IGNORE = -100
"""Label of a position that has no target; `cross_entropy` leaves it out."""

_FORMAT, _VERSION = "warpweave-tokens", 1
_DTYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4"}
_LIBRARY_SKIPS = frozenset(
    ("site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "ensurepip")
)
_M64 = (1 << 64) - 1


class DataError(ValueError):
    """A source that cannot serve the samples asked for; one line with the path and the sizes."""


class Tokenizer(Protocol):
    """What a text source needs of a tokenizer."""

    vocab_size: int
    fingerprint: str

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids of UTF-8 text, one dimension, unsigned."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; what is no valid UTF-8 shows as U+FFFD."""


class ByteTokenizer:
    """A token is a byte: 256 ids, exact for any text, nothing to download or train."""

    vocab_size = 256
    fingerprint = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """The bytes themselves, uint8."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of byte ids; a window may begin or end inside a character, which shows as U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class JsonTokenizer:
    """Any Hugging Face `tokenizers` JSON file; no special tokens are added."""

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        data = _read(Path(path))
        try:
            self._tokenizer = HuggingFaceTokenizer.from_buffer(data)
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(f"{path} is not a tokenizers JSON file: {_line(error)}") from None
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(data).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """Ids of UTF-8 text as uint8, uint16 or uint32."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=_dtype_for(self.vocab_size))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Tokens in a row, and the rule that cuts samples of them.

    tokens[N] unsigned; starts[files] int64 ascending, the first token of each file; `name` says
    where the text came from; `fingerprint` is equal exactly when the tokens and the tokenizer are
    (for token files: size, vocabulary, first and last MiB), so that a resumed run can insist on its
    own data.
    """

    tokens: np.ndarray
    starts: np.ndarray
    vocab_size: int
    seq_len: int
    seed: int
    name: str
    fingerprint: str
    tokenizer: Tokenizer | None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def batch(self, step: int, sample_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples `sample_ids` of step `step`: (tokens[B, S], labels[B, S]), int64 on the CPU.

        A pure function of (seed, step, number): it does not depend on which other samples are asked
        for.
        """
        choices = len(self.tokens) - self.seq_len  # windows of S+1 tokens
        return self._windows([_offset(self.seed, step, i, choices) for i in sample_ids])

    def fixed_batch(
        self, sample_ids: Sequence[int], *, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples `sample_ids` of `count` fixed ones spread evenly over the text (evaluation).

        Neither seed nor step takes part. They do not overlap while count (S+1) <= N.
        """
        if count < 1 or not all(0 <= i < count for i in sample_ids):
            raise DataError(f"evaluation samples {list(sample_ids)} must lie in [0, {count})")
        last = len(self.tokens) - self.seq_len - 1
        return self._windows([i * last // max(1, count - 1) for i in sample_ids])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; token files know no text, so they print the numbers."""
        if self.tokenizer is None:
            return " ".join(str(int(i)) for i in ids)
        return self.tokenizer.decode(ids)

    def _windows(self, offsets: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.seq_len + 1
        rows = np.empty((len(offsets), size), dtype=np.int64)
        ignored = np.zeros((len(offsets), self.seq_len), dtype=bool)
        for row, offset in enumerate(offsets):
            rows[row] = self.tokens[offset : offset + size]
            first, last = np.searchsorted(self.starts, (offset + 1, offset + size))
            ignored[row, self.starts[first:last] - offset - 1] = True
        if rows.size and int(rows.max()) >= self.vocab_size:
            # Only a token file can lie about this; on a GPU it would be a device-side assertion.
            raise DataError(f"{self.name}: token {rows.max()} is not below {self.vocab_size=}")
        labels = np.where(ignored, IGNORE, rows[:, 1:])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(labels)


def open_dataset(
    source: str | Path | None = None,
    *,
    seq_len: int,
    seed: int = 0,
    split: str = "train",
    tokenizer: str | Path | None = None,
    validation_fraction: float = 0.05,
    pattern: str = "*",
    cache: str | Path | None = None,
) -> Dataset:
    """Open one split ("train", "validation" or "all") of a source (see the module's docstring).

    `tokenizer` is the path of a tokenizer JSON (default: bytes); `pattern` filters the file names
    of a folder; `cache` is a folder that keeps the ids of tokenised text under a hash of the text,
    so that the next opening skips the tokenizer. Raises `DataError`, one line, for a source that is
    missing, empty, or shorter than the seq_len + 1 tokens that one sample needs.
    """
    if seq_len < 1:
        raise DataError(f"seq_len must be at least 1, got {seq_len}")
    if split not in ("train", "validation", "all"):
        raise DataError(f'split must be "train", "validation" or "all", got {split!r}')
    if not 0.0 < validation_fraction < 1.0:
        raise DataError(f"validation_fraction must lie in (0, 1), got {validation_fraction}")
    path = None if source is None else Path(source)
    if path is not None and not path.exists():
        raise DataError(f"{path} does not exist")
    if path is not None and path.suffix in (".bin", ".npy"):
        if tokenizer is not None:
            raise DataError(f"{path} holds tokens, so the tokenizer {tokenizer} cannot apply")
        data = _open_token_file(path, seq_len, seed)
        low, high = _cut(len(data), split, validation_fraction)
        data = dataclasses.replace(data, tokens=data.tokens[low:high])
    else:
        data = _open_text(
            path, seq_len, seed, split, tokenizer, validation_fraction, pattern, cache
        )
    if len(data) < seq_len + 1:
        raise DataError(
            f"{data.name}: its {split} split has {len(data)} tokens, "
            f"one sample needs seq_len + 1 = {seq_len + 1}"
        )
    return data


def write_token_file(path: str | Path, tokens: np.ndarray, *, vocab_size: int) -> None:
    """Write tokens[N] (integers in [0, vocab_size)) as ``path`` (.bin) and its sidecar.

    Both are renamed into place whole, the sidecar last: a crash leaves no file that opens.
    """
    path = Path(path)
    if path.suffix != ".bin":
        raise DataError(f"a token file is named .bin, got {path}")
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not len(tokens):
        raise DataError(f"tokens must be integers[N > 0], got {tokens.dtype}{list(tokens.shape)}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise DataError(f"tokens {tokens.min()}..{tokens.max()} must lie in [0, {vocab_size})")
    dtype = _dtype_for(vocab_size)
    header = {
        "format": _FORMAT,
        "version": _VERSION,
        "dtype": dtype,
        "tokens": len(tokens),
        "vocab_size": vocab_size,
    }
    _sidecar(path).unlink(missing_ok=True)
    _replace(path, lambda file: tokens.astype(_DTYPES[dtype], copy=False).tofile(file))
    _replace(_sidecar(path), lambda file: file.write(json.dumps(header).encode()))


# ---- sampling ------------------------------------------------------------------------------------


def _mix(x: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _offset(seed: int, step: int, number: int, choices: int) -> int:
    """A number in [0, choices), uniform up to choices / 2**64, from three counters."""
    return (_mix(_mix(_mix(seed & _M64) ^ step) ^ number) * choices) >> 64


# ---- text ----------------------------------------------------------------------------------------


def _open_text(
    path: Path | None,
    seq_len: int,
    seed: int,
    split: str,
    tokenizer_path: str | Path | None,
    fraction: float,
    pattern: str,
    cache: str | Path | None,
) -> Dataset:
    tokenizer = ByteTokenizer() if tokenizer_path is None else JsonTokenizer(tokenizer_path)
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        name, files = "the Python standard library", list(_library_files(root))
    elif path.is_dir():
        root, name = path, str(path)
        files = [f for f in _walk(path) if fnmatch.fnmatch(f.rsplit("/", 1)[-1], pattern)]
    else:
        root, name, files = path.parent, str(path), [path.name]
    if not files:
        raise DataError(f"{root} holds no file that matches {pattern!r}")

    if len(files) > 1:
        files = _choose(files, split, fraction)
        texts = [_read_text(root / file) for file in files]
    else:
        text = _read_text(root / files[0])
        low, high = _cut(len(text), split, fraction)
        if tokenizer_path is not None:  # not inside a UTF-8 character
            low, high = (_character_start(text, i) for i in (low, high))
        texts = [text[low:high]]

    digest = hashlib.sha256(f"{tokenizer.fingerprint} {tokenizer.vocab_size}".encode())
    for text in texts:
        digest.update(b"%d " % len(text))
        digest.update(text)
    fingerprint = digest.hexdigest()

    cached = None if cache is None or tokenizer_path is None else Path(cache) / fingerprint[:32]
    if cached is not None and cached.with_suffix(".json").exists():
        tokens, starts = _read_cache(cached)
    else:
        parts = [tokenizer.encode(text) for text in texts]
        starts = np.cumsum([0] + [len(part) for part in parts[:-1]], dtype=np.int64)
        tokens = np.concatenate(parts)
        if cached is not None and len(tokens):
            _write_cache(cached, tokens, starts, tokenizer.vocab_size)
    return Dataset(
        tokens=tokens,
        starts=starts,
        vocab_size=tokenizer.vocab_size,
        seq_len=seq_len,
        seed=seed,
        name=name,
        fingerprint=fingerprint,
        tokenizer=tokenizer,
    )


def _walk(root: Path, skip: frozenset[str] = frozenset()) -> Iterator[str]:
    """Relative paths of the regular files below `root`, sorted, with "/" on every system.

    Left out: hidden files and folders, folders named in `skip`, and links to folders (they may
    loop).
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if not s.startswith(".") and s not in skip]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                found.append(path.relative_to(root).as_posix())
    return iter(sorted(found))


def _library_files(root: Path) -> Iterator[str]:
    for file in _walk(root, _LIBRARY_SKIPS):
        # _sysconfigdata* is generated and holds the paths of the machine that built Python.
        if file.endswith(".py") and not file.startswith(("_sysconfigdata", "config-")):
            yield file


def _choose(files: list[str], split: str, fraction: float) -> list[str]:
    """The files of a split, in their order; at least one for each of train and validation."""
    if split == "all":
        return files
    count = min(max(1, round(fraction * len(files))), len(files) - 1)
    by_hash = sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest())
    validation = set(by_hash[:count])
    return [file for file in files if (file in validation) == (split == "validation")]


def _cut(size: int, split: str, fraction: float) -> tuple[int, int]:
    """The part of `size` things that a split gets when there is nothing to divide but one row."""
    cut = size - max(1, round(fraction * size)) if size else 0
    return {"all": (0, size), "train": (0, cut), "validation": (cut, size)}[split]


def _character_start(text: bytes, index: int) -> int:
    while 0 < index < len(text) and text[index] & 0xC0 == 0x80:
        index -= 1
    return index


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _read_text(path: Path) -> bytes:
    """A file that is UTF-8 text; `DataError` says of any other what it is and what to do."""
    data = _read(path)
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(
            f"{path} is UTF-16 or UTF-32 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"
        )
    if (zero := data.find(0)) >= 0:
        raise DataError(
            f"{path} is binary, or UTF-16 without a mark: it has a zero byte at offset {zero} of "
            f"{len(data)}; leave it out, or convert it to UTF-8 or to a token file"
        )
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: byte {data[error.start]:#04x} at offset {error.start} of "
            f"{len(data)}; convert it (Latin-1: iconv -f LATIN1 -t UTF-8), or leave it out"
        ) from None
    return data


# ---- token files ---------------------------------------------------------------------------------


def _open_token_file(path: Path, seq_len: int, seed: int) -> Dataset:
    sidecar = _sidecar(path)
    size = path.stat().st_size
    header = _read_header(sidecar) if sidecar.exists() or path.suffix == ".bin" else None
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(
                f"{path} ({size} bytes) is no array of numbers: {_line(error)}"
            ) from None
        if not isinstance(tokens, np.ndarray):
            tokens.close()
            raise DataError(f"{path} is an archive of arrays (.npz), not one array")
        if tokens.ndim != 1 or tokens.dtype.name not in _DTYPES or not len(tokens):
            raise DataError(
                f"{path} holds {tokens.dtype}{list(tokens.shape)}; "
                "a token file is uint8, uint16 or uint32 of one dimension, not empty"
            )
        actual = {"dtype": tokens.dtype.name, "tokens": len(tokens)}
        if header is not None and any(header[key] != value for key, value in actual.items()):
            raise DataError(f"{path} holds {actual}, but {sidecar} says {header}")
    else:
        assert header is not None
        dtype = np.dtype(_DTYPES[header["dtype"]])
        if size != header["tokens"] * dtype.itemsize:
            raise DataError(
                f"{path} has {size} bytes, but {sidecar} says {header['tokens']} tokens of "
                f"{header['dtype']} = {header['tokens'] * dtype.itemsize} bytes"
            )
        tokens = np.memmap(path, dtype=dtype, mode="r")
    vocab_size = int(tokens.max()) + 1 if header is None else header["vocab_size"]
    edge = (1 << 20) // tokens.itemsize
    digest = hashlib.sha256(f"{tokens.dtype.name} {len(tokens)} {vocab_size} ".encode())
    digest.update(tokens[:edge].tobytes() + tokens[-edge:].tobytes())
    return Dataset(
        tokens=tokens,
        starts=np.zeros(1, dtype=np.int64),
        vocab_size=vocab_size,
        seq_len=seq_len,
        seed=seed,
        name=str(path),
        fingerprint=digest.hexdigest(),
        tokenizer=None,
    )


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_header(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise DataError(f"{path} is missing: a .bin token file needs it beside it")
    try:
        header = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {_line(error)}") from None
    if not isinstance(header, dict):
        raise DataError(f"{path} must hold a JSON object, got {type(header).__name__}")
    if header.get("format") != _FORMAT or header.get("version") != _VERSION:
        raise DataError(
            f'{path} must say "format": "{_FORMAT}", "version": {_VERSION}; '
            f"got {header.get('format')!r}, {header.get('version')!r}"
        )
    counts_fit = all(
        type(header.get(key)) is int and 0 < header[key] <= most
        for key, most in (("tokens", 1 << 62), ("vocab_size", 1 << 32))
    )
    if header.get("dtype") not in _DTYPES or not counts_fit:
        raise DataError(
            f"{path} must give dtype (one of {', '.join(_DTYPES)}), tokens > 0 and "
            "0 < vocab_size <= 2**32"
        )
    return header


def _dtype_for(vocab_size: int) -> str:
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"


# ---- cache of tokenised text ---------------------------------------------------------------------


def _write_cache(path: Path, tokens: np.ndarray, starts: np.ndarray, vocab_size: int) -> None:
    """`path`.bin, .bin.json, .starts and last .json with the digests; private to the user."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_token_file(path.with_suffix(".bin"), tokens, vocab_size=vocab_size)
    _replace(path.with_suffix(".starts"), lambda file: starts.astype("<i8").tofile(file))
    digests = {s: _sha256(path.with_suffix(s)) for s in (".bin", ".starts")}
    _replace(path.with_suffix(".json"), lambda file: file.write(json.dumps(digests).encode()))


def _read_cache(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """A cache that was damaged or tampered with is an error, never quietly other data."""
    try:
        digests = json.loads(_read(path.with_suffix(".json")))
    except (ValueError, RecursionError):
        digests = {}
    for suffix in (".bin", ".starts"):
        file = path.with_suffix(suffix)
        if not isinstance(digests, dict) or digests.get(suffix) != _sha256(file):
            raise DataError(f"{file} is damaged (its SHA-256 differs); delete {path}.* to rebuild")
    data = _open_token_file(path.with_suffix(".bin"), 1, 0)
    return data.tokens, np.fromfile(path.with_suffix(".starts"), dtype="<i8")


def _sha256(path: Path) -> str:
    return hashlib.sha256(_read(path)).hexdigest()


def _replace(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file under a new name (0600, never through a link) and rename it into place."""
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            write(file)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DataError(f"cannot write {path}: {error.strerror}") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
