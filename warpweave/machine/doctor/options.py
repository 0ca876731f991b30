"""Check this machine: versions, devices, links, every kernel family, and every mesh axis.

``warpweave doctor`` takes at most ten minutes. It prints one page of Markdown and one JSON object
on the last line. With GPUs, kernels are compared with the reference in bf16, fp16, and fp32; axes
are proven over NCCL, one GPU per rank; and each kernel is timed next to the other installed
libraries. Without a GPU, only the CPU half runs, as the page notes: kernels in Triton's interpreter
in fp32 and fp16 (its bf16 is wrong) and axes over gloo, with no kernel timed. The exit status is 0
if every check that started has passed, 1 if not, and 2 for invalid options.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from warpweave.cli import shared_options as shared
from warpweave.cli.command_line import read_command_line
from warpweave.launch.processes import DRIVER


@dataclass(frozen=True)
class DoctorConfig:
    """Options of ``warpweave doctor``."""

    quick: bool = False
    """Check one dtype on two ranks, without kernel times: about one minute."""
    out: Path | None = None
    """Folder for the report as Markdown and JSON (doctor.md, doctor.json); created if missing."""
    device: shared.Device = None
    ranks: int | None = None
    """Number of ranks in the checks of mesh axes, fused GEMMs, and collectives. Default: the number
    of GPUs, at most 8; 2 on a CPU or with --quick."""


def parse(argv: list[str] | None = None) -> DoctorConfig:
    """Read the options of the command line. Exit with 2 on a wrong one.

    Sets TRITON_INTERPRET if kernels will be interpreted, because their import reads it.
    """
    config = read_command_line(DoctorConfig, "doctor", __doc__, argv)
    if config.device == "cpu" or (config.device is None and not DRIVER.exists()):
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return config
