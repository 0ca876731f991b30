"""Split a source into training and validation, which never share a file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from warpweave.data.files import DataError


@dataclass(frozen=True)
class Split:
    """One of "train", "validation" and "all", and the fraction of the text for validation."""

    name: str
    validation_fraction: float

    def __post_init__(self) -> None:
        if self.name not in ("train", "validation", "all"):
            raise DataError(f'split must be "train", "validation" or "all", got {self.name!r}')
        if not 0.0 < self.validation_fraction < 1.0:
            fraction = self.validation_fraction
            raise DataError(f"validation_fraction must lie in (0, 1), got {fraction}")

    def choose(self, files: list[str]) -> list[str]:
        """Return this split's files, in order; train and validation each get at least one."""
        if self.name == "all":
            return files
        count = min(max(1, round(self.validation_fraction * len(files))), len(files) - 1)
        by_hash = sorted(files, key=lambda file: hashlib.sha256(file.encode()).digest())
        validation = set(by_hash[:count])
        return [file for file in files if (file in validation) == (self.name == "validation")]

    def cut(self, size: int) -> tuple[int, int]:
        """Return this split's part (begin, end) of a single file or token file of this size."""
        cut = size - max(1, round(self.validation_fraction * size)) if size else 0
        return {"all": (0, size), "train": (0, cut), "validation": (cut, size)}[self.name]
