"""Trials of faults: ranks that die, hang, lie or are stopped, and disks that are full or damaged.

``warpweave trials`` trains tiny models on four ranks of this machine, plants one fault in each run,
and prints for each trial what happened, in how many seconds, and whether it is what is promised
(docs/faults.md). It needs Linux. The exit status is 0 if every trial has passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warpweave.cli.command_line import read_command_line


@dataclass(frozen=True)
class TrialsConfig:
    """Which trials to run."""

    only: tuple[str, ...] = ()
    """Trials whose name has one of these words in it. Default: all."""
    layout: Literal["first", "all"] = "first"
    """On the first layout of each trial, or on all of them."""
    list: bool = False
    """Only list the trials, their layouts and promises."""


def parse(argv: list[str] | None = None) -> TrialsConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(TrialsConfig, "trials", __doc__, argv)
