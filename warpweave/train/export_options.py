"""Write a trained model as a folder that Hugging Face transformers loads.

RUN is the folder of a run of ``warpweave train`` (its newest checkpoint, or with --best the one
with the lowest validation loss) or one checkpoint of it. OUT gets config.json, safetensors files,
the tokenizer that the run was trained with, generation_config.json and a README.md to be filled in;
it must not exist yet. Exit codes: 0 done, 1 failed, 2 refused.
"""

# The options of `warpweave.train.export`: a wrong one is answered before torch is imported.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from warpweave.cli.command_line import read_command_line


@dataclass(frozen=True)
class ExportConfig:
    """What to export, and as what."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run to export: its folder, or a checkpoint in it."""
    out: Annotated[Path, tyro.conf.Positional]
    """Output folder to write; it must not exist yet."""
    best: bool = False
    """Export the checkpoint with the lowest validation loss of the run, instead of the newest."""
    like: Path | None = None
    """Folder of transformers whose model family and other files to take; default: that of the run's
    --init-from, or the first family that can be this model."""
    tokenizer: Path | None = None
    """Tokenizer: a Hugging Face tokenizers JSON, or the word bytes; default: the run's own."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Precision of the weights; default: as they were saved."""


def parse(argv: list[str] | None = None) -> ExportConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(ExportConfig, "export", __doc__, argv)
