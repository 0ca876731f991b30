"""Which part of a source is for training and which for validation: they never share a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from warpweave.data.files import DataError


@dataclass(frozen=True)
class Split:
    """One of "train", "validation" and "all", with the part of the text that is validation."""

    name: str
    validation_fraction: float

    def __post_init__(self) -> None:
        if self.name not in ("train", "validation", "all"):
            raise DataError(f'split must be "train", "validation" or "all", got {self.name!r}')
        if not 0.0 < self.validation_fraction < 1.0:
            raise DataError(
                f"validation_fraction must lie in (0, 1), got {self.validation_fraction}"
            )

    def choose(self, files: list[str]) -> list[str]:
        """The files of this split, in their order; at least one each for train and validation."""
        if self.name == "all":
            return files
        count = min(max(1, round(self.validation_fraction * len(files))), len(files) - 1)
        by_hash = sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest())
        validation = set(by_hash[:count])
        return [file for file in files if (file in validation) == (self.name == "validation")]

    def cut(self, size: int) -> tuple[int, int]:
        """The part of `size` things that it gets when there is nothing to divide but one row."""
        cut = size - max(1, round(self.validation_fraction * size)) if size else 0
        return {"all": (0, size), "train": (0, cut), "validation": (cut, size)}[self.name]
