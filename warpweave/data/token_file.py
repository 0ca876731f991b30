"""Token files: memory-mapped arrays of token ids that are never copied."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, TypedDict

import numpy as np

from warpweave.cli.messages import one_line
from warpweave.data.dataset import Corpus
from warpweave.data.files import DataError, replace, sha256
from warpweave.data.tokenizer import smallest_dtype
from warpweave.kernels.structure import read_document, structure

WHOLE = "whole:"  # prefix of fingerprints of whole files; earlier versions hashed only the ends
_FORMAT, _VERSION = "warpweave-tokens", 1
_DTYPES = {"uint8": "u1", "uint16": "<u2", "uint32": "<u4"}


class _Header(TypedDict):
    """The sidecar of a token file."""

    format: Annotated[str, f'"{_FORMAT}"', _FORMAT.__eq__]
    version: Annotated[int, str(_VERSION), _VERSION.__eq__]
    dtype: Annotated[str, f"one of {', '.join(_DTYPES)}", _DTYPES.__contains__]
    tokens: Annotated[int, "in 1..2**62", lambda n: 0 < n <= 1 << 62]
    vocab_size: Annotated[int, "in 1..2**32", lambda n: 0 < n <= 1 << 32]


def write_token_file(path: str | Path, tokens: np.ndarray, *, vocab_size: int) -> None:
    """Write tokens[N] (integers in [0, vocab_size)) as ``path`` (.bin) and its sidecar.

    Both are renamed into place when complete, the sidecar last, so that a crash leaves no file that
    opens. Raises `DataError` unless the path ends in .bin and tokens are such an array.

    Examples:
        >>> import numpy as np
        >>> from warpweave.data import open_dataset
        >>> write_token_file("tokens.bin", np.arange(1000) % 256, vocab_size=256)
        >>> len(open_dataset("tokens.bin", seq_len=16, split="all").tokens)
        1000
    """
    path = Path(path)
    if path.suffix != ".bin":
        raise DataError(f"a token file's name must end in .bin, got {path}")
    if not isinstance(tokens, np.ndarray):
        raise DataError(
            f"tokens must be a NumPy array of integers, got {type(tokens).__name__}; convert them "
            "with np.asarray(tokens)"
        )
    if tokens.ndim != 1 or tokens.dtype.kind not in "ui" or not len(tokens):
        found = f"{tokens.dtype}{list(tokens.shape)}"
        raise DataError(f"tokens must be a non-empty 1-D array of integers, got {found}")
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        raise DataError(f"tokens must lie in [0, {vocab_size}), got {tokens.min()}..{tokens.max()}")
    dtype = smallest_dtype(vocab_size)
    header = _Header(
        format=_FORMAT, version=_VERSION, dtype=dtype, tokens=len(tokens), vocab_size=vocab_size
    )
    _sidecar(path).unlink(missing_ok=True)
    replace(path, lambda file: tokens.astype(_DTYPES[dtype], copy=False).tofile(file))
    replace(_sidecar(path), lambda file: file.write(json.dumps(header).encode()))


def open_token_file(path: Path, cache: Path | None = None) -> Corpus:
    """Open a token file, memory-mapped; its SHA-256 is cached in the folder `cache`."""
    tokens, vocab_size = map_tokens(path)
    head = f"{tokens.dtype.name} {len(tokens)} {vocab_size} {sha256(path, cache)}"
    fingerprint = WHOLE + hashlib.sha256(head.encode()).hexdigest()
    starts = np.zeros(1, dtype=np.int64)
    return Corpus(
        tokens, starts, vocab_size, name=str(path), fingerprint=fingerprint, tokenizer=None
    )


def map_tokens(path: Path) -> tuple[np.ndarray, int]:
    """Return a file's tokens, memory-mapped, and the size of their vocabulary."""
    sidecar = _sidecar(path)
    size = path.stat().st_size
    header = _read_header(sidecar) if sidecar.exists() or path.suffix == ".bin" else None
    if path.suffix == ".npy":
        try:
            with path.open("rb") as file:
                archive = file.read(2) == b"PK"
            tokens = None if archive else np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise DataError(
                f"{path} ({size} bytes) is not an array of numbers: {one_line(error)}"
            ) from None
        if tokens is None:
            raise DataError(f"{path} is an archive of arrays (.npz), not a single array")
        if tokens.ndim != 1 or tokens.dtype.name not in _DTYPES or not len(tokens):
            raise DataError(
                f"{path} has {tokens.dtype}{list(tokens.shape)}; expected a non-empty array of "
                "uint8, uint16 or uint32 with one dimension"
            )
        actual = {"dtype": tokens.dtype.name, "tokens": len(tokens)}
        if header is not None and header | actual != header:
            raise DataError(f"{path} has {actual}, but {sidecar} says {header}")
    else:
        assert header is not None
        dtype = np.dtype(_DTYPES[header["dtype"]])
        if size != (expected := header["tokens"] * dtype.itemsize):
            raise DataError(
                f"{path} has {size} bytes, but {sidecar} says {header['tokens']} tokens of "
                f"{header['dtype']} = {expected} bytes"
            )
        tokens = np.memmap(path, dtype=dtype, mode="r")
    vocab_size = int(tokens.max()) + 1 if header is None else header["vocab_size"]
    return tokens, vocab_size


def _sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".json")


def _read_header(path: Path) -> _Header:
    if not path.exists():
        raise DataError(f"{path} is missing: every .bin token file needs this sidecar")
    try:
        return structure(_Header, read_document(path), f"{path}: ")
    except ValueError as error:
        raise DataError(str(error)) from None
