"""Open a source of any kind."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from warpweave.data.dataset import Dataset
from warpweave.data.files import DataError
from warpweave.data.split import Split
from warpweave.data.text import open_text
from warpweave.data.token_file import open_token_file

TOKEN_FILES = (".bin", ".npy")  # suffixes of files with tokens instead of text


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
    separator: int | None = None,
) -> Dataset:
    """Open one split ("train", "validation" or "all") of a source (see the package's docstring).

    `tokenizer` is the path of a tokenizer JSON (default: bytes). `pattern` filters the file names
    of a folder. `cache` is a folder that keeps the ids of tokenized text under a hash of the text,
    so that the next opening skips the tokenizer, and the hashes of files until these change. A
    `separator` token ends a document. Raises `DataError`, in one line, for a source that is
    missing, empty, or shorter than the seq_len + 1 tokens that one sample needs, and for a
    separator that is not in its vocabulary.

    Examples:
        >>> with open("text.txt", "w") as file:
        ...     _ = file.write("to be or not to be " * 100)
        >>> tokens, labels = open_dataset("text.txt", seq_len=16).batch(step=0, sample_ids=[0, 1])
        >>> tokens.shape
        torch.Size([2, 16])
    """
    if seq_len < 1:
        raise DataError(f"seq_len must be at least 1, got {seq_len}")
    part = Split(split, validation_fraction)
    path = None if source is None else Path(source)
    if path is not None and not path.exists():
        raise DataError(f"{path} does not exist")
    if path is not None and path.suffix in TOKEN_FILES:
        if tokenizer is not None:
            raise DataError(
                f"{path} has token ids, so the tokenizer {tokenizer} does not apply; pass "
                "--tokenizer None"
            )
        corpus = open_token_file(path, None if cache is None else Path(cache))
        low, high = part.cut(len(corpus))
        corpus = dataclasses.replace(corpus, tokens=corpus.tokens[low:high])
    else:
        corpus = open_text(path, part, tokenizer, pattern, cache)
    if len(corpus) < seq_len + 1:
        raise DataError(
            f"{corpus.name}: its {split} split has {len(corpus)} tokens, "
            f"but one sample needs seq_len + 1 = {seq_len + 1}"
        )
    if separator is not None and not 0 <= separator < corpus.vocab_size:
        raise DataError(
            f"separator = {separator} is not a token id of {corpus.name}, whose vocabulary is "
            f"[0, {corpus.vocab_size})"
        )
    return Dataset(**vars(corpus), seq_len=seq_len, seed=seed, separator=separator)
