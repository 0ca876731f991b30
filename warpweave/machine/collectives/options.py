"""Measure every all-reduce algorithm on ranks of this machine, beside the backend's own.

``warpweave collectives --ranks 4 --sizes 1K 1M`` runs each algorithm of ``parallel.algorithms`` on
vectors of these sizes, checks the sums, and prints a row for each: rounds, bytes over the busiest
rank's link, bytes under way at once, the time that the α-β-γ model predicts and the time measured.
The model's three constants are fitted to all measured times at once, so that the prediction shows
where the model holds, and the column beside it where it does not: on one machine ranks share its
processors and its memory, which the model's links do not know. The last line is one JSON object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from warpweave.cli.command_line import read_command_line

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class CollectivesConfig:
    """What to measure, and where to."""

    ranks: int = 4
    """Number of ranks, 2 to 64."""
    sizes: tuple[str, ...] = ("1K", "64K", "1M")
    """Bytes of the vectors, of fp32 elements: a number, or one with K, M or G (powers of 1,024)."""
    node: int | None = None
    """Ranks of a node, for the hierarchical algorithm. Default: the divisor of the ranks next to
    their square root."""
    repeats: int = 9
    """Times that each is measured; the median counts."""
    out: Path | None = None
    """Folder for the rows and a plot (collectives.json, collectives.png), made if it is missing."""
    device: Literal["cpu", "cuda"] | None = None
    """Device: cuda, a GPU for each rank and NCCL, or cpu, gloo. Default: cuda if there are GPUs."""
    timeout: float = 60.0
    """Timeout in seconds of any message between ranks."""
    starts_ranks: ClassVar[bool] = True

    def check(self) -> None:
        """Raise ValueError for what cannot be measured."""
        if not 2 <= self.ranks <= 64:
            raise ValueError(f"ranks must be 2..64, got {self.ranks}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.node is not None and (self.node < 1 or self.ranks % self.node):
            raise ValueError(f"nodes of {self.node} do not divide {self.ranks} ranks")
        _ = self.elements

    @property
    def elements(self) -> list[int]:
        """Elements of each vector, ascending."""
        found = []
        for size in self.sizes:
            match = re.fullmatch(r"(\d+)([KMG]?)", size.upper())
            count = int(match[1]) * _UNITS[match[2]] if match else 0
            if count < 4 or count % 4:
                raise ValueError(f"sizes must be multiples of 4 bytes such as 64K, got {size!r}")
            found.append(count // 4)
        return sorted(set(found))


def parse(argv: list[str] | None = None) -> CollectivesConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(CollectivesConfig, "collectives", __doc__, argv)
