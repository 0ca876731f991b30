"""Write a trained model as a folder that Hugging Face transformers loads.

RUN is the folder of a ``warpweave train`` run or a single checkpoint. A run's newest checkpoint is
exported or, with --best, the one with the lowest validation loss. OUT receives config.json,
safetensors files, the tokenizer that the run was trained with, generation_config.json, and a
README.md for you to complete; it must not exist yet. Exit codes: 0 done, 1 failed, 2 refused.
"""

# The options of `warpweave.train.export`; they are checked before torch is imported.

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from warpweave.cli.command_line import read_command_line


@dataclass(frozen=True)
class ExportConfig:
    """Options of ``warpweave export``."""

    run: Annotated[Path, tyro.conf.Positional]
    """Run to export: its folder, or a checkpoint in it."""
    out: Annotated[Path, tyro.conf.Positional]
    """Output folder to write; it must not exist yet."""
    best: bool = False
    """Export the checkpoint with the run's lowest validation loss instead of the newest one."""
    like: Path | None = None
    """Transformers model folder to take the model family and other files from; default: the folder
    of the run's --init-from, or without one, the first family that can represent this model."""
    tokenizer: Path | None = None
    """Tokenizer: a JSON file of the Hugging Face tokenizers library (tokenizer.json), or 'bytes';
    default: the run's own."""
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Precision of the weights; default: as they were saved."""


parse = partial(read_command_line, ExportConfig, "export", __doc__)
