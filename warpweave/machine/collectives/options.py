"""Measure every all-reduce algorithm on this machine, and compare it with the backend's own.

``warpweave collectives --ranks 4 --sizes 1K 1M`` runs each algorithm of ``parallel.algorithms`` on
vectors of these sizes, checks the sums, and prints a row for each: rounds, bytes over the busiest
rank's link, bytes in flight at once, and the predicted and the measured time. The prediction uses
the α-β-γ model, with its three constants fitted to all measured times at once. Compare the two
columns to see where the model holds: on one machine, ranks share processors and memory, which the
model does not include. The last line is one JSON object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from warpweave.cli import shared_options as shared
from warpweave.cli.command_line import read_command_line

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class CollectivesConfig:
    """Options of ``warpweave collectives``."""

    ranks: int = 4
    """Number of ranks, 2 to 64."""
    sizes: tuple[str, ...] = ("1K", "64K", "1M")
    """Sizes of the fp32 vectors in bytes: numbers, optionally with K, M, or G (powers of 1,024)."""
    node: int | None = None
    """Ranks per node, for the hierarchical algorithm. Default: the divisor of the number of ranks
    that is closest to its square root."""
    repeats: int = 9
    """Number of measurements of each algorithm and size; the median is reported."""
    out: Path | None = None
    """Folder for the rows and a plot (collectives.json, collectives.png); created if missing."""
    device: shared.Device = None
    timeout: shared.Timeout = 60.0
    starts_ranks: ClassVar[bool] = True

    def check(self) -> None:
        """Raise ValueError for options that cannot be measured."""
        if not 2 <= self.ranks <= 64:
            raise ValueError(f"ranks must be 2..64, got {self.ranks}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.node is not None and (self.node < 1 or self.ranks % self.node):
            raise ValueError(f"ranks ({self.ranks}) is not divisible by node ({self.node})")
        _ = self.elements

    @property
    def elements(self) -> list[int]:
        """The number of elements of each vector, ascending."""
        found = []
        for size in self.sizes:
            match = re.fullmatch(r"(\d+)([KMG]?)", size.upper())
            count = int(match[1]) * _UNITS[match[2]] if match else 0
            if count < 4 or count % 4:
                raise ValueError(f"sizes must be multiples of 4 bytes (such as 64K), got {size!r}")
            found.append(count // 4)
        return sorted(set(found))


parse = partial(read_command_line, CollectivesConfig, "collectives", __doc__)
