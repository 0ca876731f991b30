"""Training samples as windows of a token sequence, a function of (seed, step, number) only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from warpweave.data.files import DataError
from warpweave.data.tokenizer import Tokenizer

IGNORE = -100
"""Label of a position without a target; `cross_entropy` ignores it."""

_M64 = (1 << 64) - 1
_AT_ONCE = 1 << 22  # tokens searched for a separator at a time


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The concatenated tokens of all files of a split.

    tokens[N] unsigned; starts[files] int64 ascending, the first token of each file; `name` says
    where the text came from. Two `fingerprint`s are equal exactly if the tokens and the tokenizer
    are (for token files: the whole file and its vocabulary), so that a resumed run can require the
    same data.
    """

    tokens: np.ndarray
    starts: np.ndarray
    vocab_size: int
    name: str
    fingerprint: str
    tokenizer: Tokenizer | None

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    @property
    def tokenizer_name(self) -> str | None:
        """The tokenizer of the text: "bytes", or the SHA-256 of a tokenizers JSON; None for a token
        file."""
        return None if self.tokenizer is None else self.tokenizer.fingerprint


@dataclasses.dataclass(frozen=True)
class Dataset(Corpus):
    """A corpus, with the rule that selects samples of `seq_len` tokens from it.

    A `separator` token (None: there is none) ends a document, and so does the end of a file.

    Examples:
        >>> from warpweave.data import open_dataset
        >>> dataset = open_dataset(seq_len=16)  # the default text
        >>> tokens, labels = dataset.batch(step=0, sample_ids=[0, 1])
        >>> torch.equal(tokens[:, 1:], labels[:, :-1])
        True
    """

    seq_len: int
    seed: int
    separator: int | None = None

    def batch(self, step: int, sample_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples `sample_ids` of `step`: (tokens[B, S], labels[B, S]), int64 on the CPU.

        A pure function of (seed, step, number): it does not depend on which other samples are
        requested.
        """
        choices = len(self.tokens) - self.seq_len  # windows of S+1 tokens
        return self._windows([_offset(self.seed, step, i, choices) for i in sample_ids])

    def fixed_batch(
        self, sample_ids: Sequence[int], *, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples `sample_ids` of `count` fixed ones spread evenly over the text, for
        evaluation.

        They depend on neither seed nor step. They do not overlap while count (S+1) <= N.
        """
        if count < 1 or not all(0 <= i < count for i in sample_ids):
            raise DataError(f"evaluation samples must be in [0, {count}), got {list(sample_ids)}")
        last = len(self.tokens) - self.seq_len - 1
        return self._windows([i * last // max(1, count - 1) for i in sample_ids])

    @property
    def has_separator(self) -> bool:
        """True if the separator occurs; a memory-mapped file is read up to its first occurrence."""
        parts = range(0, len(self.tokens), _AT_ONCE)
        return self.separator is not None and any(
            (self.tokens[at : at + _AT_ONCE] == self.separator).any() for at in parts
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids; for token files, which have no text, the numbers."""
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
            # Only a token file can contain this; on a GPU it would be a device-side assertion.
            raise DataError(f"{self.name}: expected tokens < {self.vocab_size}, got {rows.max()}")
        if self.separator is not None:
            ignored |= rows[:, :-1] == self.separator
        labels = np.where(ignored, IGNORE, rows[:, 1:])
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(labels)


def boundaries(labels: torch.Tensor) -> torch.Tensor:
    """Return the boundaries int64[B, n + 1] of the documents in samples with these labels[B, S].

    A document ends at a token without a label: the last of a file, or a separator. Samples with
    fewer documents than others repeat their last boundary, S.
    """
    rows, length = labels.shape
    ends = [(row == IGNORE).nonzero()[:, 0] + 1 for row in labels]
    count = 2 + max(map(len, ends), default=0)
    count += count == length  # a size of S would be read as a document number per token
    found = torch.full((rows, count), length)
    found[:, 0] = 0
    for row, end in zip(found, ends):
        row[1 : 1 + len(end)] = end
    return found


def _mix(x: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words."""
    x = (x + 0x9E3779B97F4A7C15) & _M64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _M64
    return x ^ (x >> 31)


def _offset(seed: int, step: int, number: int, choices: int) -> int:
    """Return a number in [0, choices), uniform up to choices / 2**64, from three counters."""
    return (_mix(_mix(_mix(seed & _M64) ^ step) ^ number) * choices) >> 64
