"""Plan a training run in advance: the fastest layouts of a model that fit given GPUs.

``warpweave plan --model gpt3-175b --gpus 1024 --hw a100-80g`` searches tensor, pipeline, context
and data ranks, the schedule and its chunks, the ZeRO stage, recomputation and the micro-batch. It
prints one page: the best layouts with step time, MFU, memory per rank and traffic per link, and why
others were rejected. Everything is predicted: from formulas for FLOPs and bytes, one set of
efficiencies per GPU, and the simulator, which reads the same lists of actions as training. Nothing
is measured, and torch is not imported. Pass the file of ``--out plan.toml`` to ``warpweave train
--config plan.toml`` or ``warpweave prove --config plan.toml``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from warpweave.cli.command_line import read_command_line
from warpweave.kernels.words import did_you_mean
from warpweave.model.config import PRESETS, GPTConfig

_TOKENS = 2**22  # of a step, by default


@dataclass(frozen=True)
class PlanConfig:
    """The model, the GPUs and the output of a plan."""

    model: str = "llama-8b"
    """Model preset, a Hugging Face config.json, or a folder with one."""
    gpus: int = 8
    """Number of GPUs."""
    hw: str = "h100"
    """Hardware: a100-40g, a100-80g, a40, l40s, h100, h800, h200, b200, or a .toml or .json file
    with the figures of a GPU."""
    sequences: int | None = None
    """Sequences per step, over all data replicas. Default: as many as fit in 4,194,304 tokens, at
    least 1."""
    seq_len: int | None = None
    """Sequence length in tokens. Default: the model's."""
    best: int = 5
    """Maximum number of layouts to print. Only the fastest layout of each family is printed; a
    family is all layouts that shard the model over the same axes."""
    explain: bool = False
    """Print the formula and numbers behind each figure of the best layout."""
    out: Path | None = None
    """File to write the best layout's options to: .toml, for --config of train and prove."""
    html: Path | None = None
    """File to write a self-contained page to: a sortable table of layouts, memory per rank, the
    timeline, traffic, and the reasons why other layouts were rejected."""
    timeline: Path | None = None
    """File to write the best layout's timeline to: .svg, .png, or a Chrome trace (.json)."""

    @property
    def config(self) -> GPTConfig:
        """The model; raises ValueError if it is unknown."""
        found = _read_model(self.model)
        return found if self.seq_len is None else replace(found, seq_len=self.seq_len)

    @property
    def step_sequences(self) -> int:
        """Sequences per step."""
        given = self.sequences
        return max(1, _TOKENS // self.config.seq_len) if given is None else given


def _read_model(name: str) -> GPTConfig:
    """Return the preset, or the model of a config.json."""
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


parse = partial(read_command_line, PlanConfig, "plan", __doc__)
