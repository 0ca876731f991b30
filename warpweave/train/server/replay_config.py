"""Repeat a run of parameter servers in one process, and compare the weights to the bit.

RUN is the folder of ``warpweave train --server``. Its log of updates says which worker's gradient
of which version was applied when; every gradient is computed again and applied in that order, and
the result is compared with the newest checkpoint: weights and optimizer state. Exit codes: 0 equal,
1 different, 2 refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from warpweave.cli.command_line import read_command_line


@dataclass(frozen=True)
class ReplayConfig:
    """What to repeat."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run to repeat: its folder."""


def parse(argv: list[str] | None = None) -> ReplayConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(ReplayConfig, "replay", __doc__, argv)
