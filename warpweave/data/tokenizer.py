"""Tokenizers: bytes, or a Hugging Face file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from warpweave.cli.messages import one_line
from warpweave.data.files import DataError, read_whole


class Tokenizer(Protocol):
    """The interface that text sources require of a tokenizer."""

    vocab_size: int
    fingerprint: str

    def encode(self, text: bytes) -> np.ndarray:
        """Return the token ids of UTF-8 text, one dimension, unsigned."""

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text that a model will continue."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; invalid UTF-8 becomes U+FFFD."""


class ByteTokenizer:
    """Each byte is a token: 256 ids, exact for any text, nothing to download or train."""

    vocab_size = 256
    fingerprint = "bytes"

    def encode(self, text: bytes) -> np.ndarray:
        """Return the bytes themselves, uint8."""
        return np.frombuffer(text, dtype=np.uint8)

    def prompt(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of the text."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of byte ids; a character cut off at either end becomes U+FFFD."""
        return bytes(ids).decode("utf-8", errors="replace")


class JsonTokenizer:
    """Any Hugging Face `tokenizers` JSON file; special tokens are added only to prompts."""

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer as HuggingFaceTokenizer

        data = read_whole(Path(path))
        try:
            self._tokenizer = HuggingFaceTokenizer.from_buffer(data)
        except Exception as error:  # the Rust side raises bare Exception
            raise DataError(f"{path} is not a tokenizers JSON file: {one_line(error)}") from None
        self.vocab_size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.fingerprint = hashlib.sha256(data).hexdigest()

    def encode(self, text: bytes) -> np.ndarray:
        """Return the ids of UTF-8 text as uint8, uint16 or uint32."""
        ids = self._tokenizer.encode(text.decode("utf-8"), add_special_tokens=False).ids
        return np.asarray(ids, dtype=smallest_dtype(self.vocab_size))

    def prompt(self, text: str) -> list[int]:
        """Return the ids of a text, with the tokenizer's special tokens at its beginning or end."""
        return self._tokenizer.encode(text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


def smallest_dtype(vocab_size: int) -> str:
    """Return the name of the smallest dtype that can hold every id below `vocab_size`."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "uint32"
