"""Check this machine: versions, devices, links, every kernel family and every mesh axis.

``warpweave doctor`` takes at most ten minutes and prints one page of Markdown, and as its last line
one JSON object. With GPUs the kernels are compared with the reference in bf16, fp16 and fp32, the
axes are proven over NCCL, a GPU for each rank, and each kernel is timed beside what else is
installed. Without a GPU the CPU's half runs, and says so: kernels in Triton's interpreter in fp32
and fp16 (whose bf16 is wrong), axes over gloo, no kernel is timed. The exit status is 0 if every
check that was begun has passed, else 1, and 2 for what cannot be asked.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warpweave.cli.command_line import read_command_line
from warpweave.launch.processes import DRIVER


@dataclass(frozen=True)
class DoctorConfig:
    """What to check, and where to."""

    quick: bool = False
    """One dtype, two ranks and no times of kernels: about one minute."""
    out: Path | None = None
    """Folder for the page and the JSON (doctor.md, doctor.json), made if it is missing."""
    device: Literal["cpu", "cuda"] | None = None
    """Which half: cuda or cpu. Default: cuda if there is a GPU."""
    ranks: int | None = None
    """Ranks of each axis. Default: every GPU, 8 at most; 2 on a CPU or with --quick."""


def parse(argv: list[str] | None = None) -> DoctorConfig:
    """The options of the command line; a wrong one ends the process with 2.

    Sets TRITON_INTERPRET where kernels will be interpreted, as importing them reads it.
    """
    config = read_command_line(DoctorConfig, "doctor", __doc__, argv)
    if config.device == "cpu" or (config.device is None and not DRIVER.exists()):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return config
