"""Plan a training run before it: the fastest layouts of a model that fit given GPUs.

``warpweave plan --model gpt3-175b --gpus 1024 --hw a100-80g`` searches tensor, pipeline, context
and data ranks, the schedule and its chunks, ZeRO's stage, recomputation and the micro-batch, and
prints one page: the best layouts with step time, MFU, memory per rank and traffic per link, and why
others fall out. Everything is predicted: by formulas of FLOPs and bytes, one set of efficiencies
per GPU, and the simulator that reads the lists of actions that training runs. Nothing is measured,
and torch is not imported. ``warpweave train --layout plan.json`` and ``warpweave prove --layout
plan.json`` take what ``--out plan.json`` wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from warpweave.cli.command_line import read_command_line
from warpweave.model.config import PRESETS, GPTConfig
from warpweave.parallel.words import did_you_mean

_TOKENS = 2**22  # of a step, unless told


@dataclass(frozen=True)
class PlanConfig:
    """What to plan."""

    model: str = "llama-8b"
    """Model preset, or a Hugging Face config.json, or a folder with one."""
    gpus: int = 8
    """Number of GPUs."""
    hw: str = "h100"
    """Hardware: a100-40g, a100-80g, a40, l40s, h100, h800, h200, b200, or a .toml or .json file of
    figures."""
    sequences: int | None = None
    """Sequences of a step, over all data replicas. Default: as many as have 4,194,304 tokens."""
    seq_len: int | None = None
    """Sequence length in tokens. Default: the model's."""
    best: int = 5
    """Number of layouts to print, at most: the fastest of each family. Layouts that shard the model
    over the same axes are a family."""
    explain: bool = False
    """Print formula and numbers behind each figure of the best layout."""
    out: Path | None = None
    """File for what was found, as JSON, for --layout of train and prove."""
    html: Path | None = None
    """File for one self-contained page: layouts to sort, memory per rank, the timeline, traffic,
    and why other layouts were refused."""
    timeline: Path | None = None
    """File for the best layout's timeline: .svg, .png, or Chrome's trace (.json)."""

    @property
    def config(self) -> GPTConfig:
        """The model; ValueError for one that is not known."""
        found = _read_model(self.model)
        return found if self.seq_len is None else replace(found, seq_len=self.seq_len)

    @property
    def step_sequences(self) -> int:
        """Sequences of a step."""
        given = self.sequences
        return max(1, _TOKENS // self.config.seq_len) if given is None else given


def _read_model(name: str) -> GPTConfig:
    """The preset, or the model of a config.json."""
    from warpweave.convert.families import read_config
    from warpweave.convert.fields import ConvertError, read_json

    if name in PRESETS:
        return PRESETS[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if path.suffix != ".json":
        raise ValueError(
            f"model must be one of {', '.join(PRESETS)}, or a config.json, got {name!r}"
            f"{did_you_mean(name, PRESETS)}"
        )
    try:
        return read_config(read_json(path))[1]
    except ConvertError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(argv: list[str] | None = None) -> PlanConfig:
    """The options of the command line; a wrong one ends the process with 2."""
    return read_command_line(PlanConfig, "plan", __doc__, argv)
