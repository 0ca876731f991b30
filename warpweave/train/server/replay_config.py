"""Repeat a run of parameter servers in one process, and compare the weights bit for bit.

RUN is the folder of a ``warpweave train --server`` run. Its log of updates records the worker, the
version of the weights, and the order of every gradient. All gradients are computed again and
applied in that order; then the weights and the optimizer state are compared with the newest
checkpoint. Exit codes: 0 equal, 1 different, 2 refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from warpweave.cli.command_line import read_command_line


@dataclass(frozen=True)
class ReplayConfig:
    """Options of ``warpweave replay``."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run to repeat: its folder."""


parse = partial(read_command_line, ReplayConfig, "replay", __doc__)
