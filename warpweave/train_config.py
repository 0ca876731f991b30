"""What a training run is asked to do: one typed record, which is the command line's options too."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warpweave.checkpoint import latest
from warpweave.data import Dataset, open_dataset
from warpweave.engine import make_schedule
from warpweave.gpt import PRESETS, GPTConfig
from warpweave.parallel.mesh import Mesh

# Files and folders of a run, in `out`.
METRICS, PLOT, CHECKPOINTS, BOARD = "metrics.jsonl", "loss.png", "checkpoints", "tensorboard"

_DAY = 86400.0  # seconds


@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and over which mesh."""

    model: Literal[
        "toy", "small", "toy-llama", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
        "llama-1b", "llama-8b", "llama-70b",
    ] = "small"  # fmt: skip
    """Preset; the options below change single numbers of it."""
    layers: int | None = None
    """Transformer blocks; default: the preset's."""
    width: int | None = None
    """Model width; default: the preset's."""
    heads: int | None = None
    """Query heads; default: the preset's."""
    kv_heads: int | None = None
    """Key and value heads, which divide the query heads; default: the preset's."""
    hidden: int | None = None
    """Hidden units of the MLP; default: the preset's."""
    seq_len: int | None = None
    """Tokens of a sequence; default: the preset's."""
    vocab_size: int | None = None
    """Size of the vocabulary; default: the larger of the preset's and the data's."""
    dropout: float | None = None
    """Dropout of the embedding and of both branches of a block; default: the preset's."""

    data: Path | None = None
    """UTF-8 text file, folder of them, or token file; default: Python's standard library source."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizers JSON; default: bytes."""

    dp: int | None = None
    """Data-parallel replicas; default: as many as torchrun's ranks allow, without torchrun 1."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel (ring attention) ranks."""
    pp: int = 1
    """Pipeline ranks."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage over dp x cp."""
    schedule: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    """Order of the micro-batches in a pipeline."""
    chunks: int = 1
    """With the interleaved schedule: stages on each pipeline rank."""
    microbatches: int = 1
    """Micro-batches per step and data replica."""
    batch: int = 8
    """Sequences per micro-batch."""
    sequence_parallel: bool = True
    """With tp > 1, cut the residual stream's tokens over the tensor ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing."""
    layout: Literal["zigzag", "contiguous", "striped"] = "zigzag"
    """How cp cuts the sequence."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Of parameters and activations; masters, gradients and sums are fp32 (fp64 for fp64)."""
    steps: int = 500
    """Optimizer steps of the whole run."""
    lr: float = 1e-3
    """Largest learning rate."""
    min_lr: float = 0.1
    """Final learning rate, as a part of `lr`."""
    warmup: int = 20
    """Steps of linear warm-up."""
    weight_decay: float = 0.1
    """AdamW's, of matrices only."""
    clip: float = 1.0
    """Largest gradient norm; 0 for none."""
    seed: int = 0
    """Of the initialisation, the order of the data, the dropout and the sample."""

    out: Path = Path("runs/train")
    """Folder for metrics, plot and checkpoints; an earlier run in it is moved into a subfolder."""
    save_every: int = 0
    """Steps between checkpoints; 0 for one at the end only."""
    keep: int = 3
    """Checkpoints kept."""
    resume: bool = False
    """Go on from the newest good checkpoint in `out`."""
    eval_every: int = 100
    """Steps between evaluations; 0 for one at the end only."""
    eval_batches: int = 8
    """Micro-batches of validation text per data replica."""
    sample: int = 200
    """Tokens of sampled text at the end."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs warpweave[tensorboard])."""
    timeout: float = 300.0
    """Seconds that any exchange between ranks may take."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes; an open `dp` is 1."""
        return Mesh(dp=1 if self.dp is None else self.dp, cp=self.cp, tp=self.tp, pp=self.pp)

    @property
    def token_cache(self) -> Path | None:
        """Where the ids of tokenised text are kept for the other ranks and runs."""
        return self.out / "tokens" if self.tokenizer is not None else None

    @property
    def length(self) -> int:
        """Tokens in a sequence."""
        return self.seq_len or PRESETS[self.model].seq_len

    def for_ranks(self, ranks: int) -> TrainConfig:
        """This configuration with `dp` filled in for `ranks` ranks.

        Raises:
            ValueError: the mesh does not have that many ranks.
        """
        mesh = self.mesh
        if self.dp is None:
            mesh = dataclasses.replace(mesh, dp=max(1, ranks // mesh.world))
        if mesh.world != ranks:
            axes = " x ".join(
                f"{axis}={getattr(self, axis) or 'any'}" for axis in ("dp", "cp", "tp", "pp")
            )
            raise ValueError(
                f"mesh {axes} does not fit {ranks} ranks: it has {mesh.world}, and their number "
                "must be the axes' product"
            )
        return dataclasses.replace(self, dp=mesh.dp)

    def model_config(self, vocab_size: int) -> GPTConfig:
        """The model, with a vocabulary of at least `vocab_size`."""
        preset = PRESETS[self.model]
        names = ("layers", "width", "heads", "kv_heads", "hidden", "seq_len", "dropout")
        changes = {n: getattr(self, n) for n in names if getattr(self, n) is not None}
        vocabulary = self.vocab_size
        if vocabulary is None:
            vocabulary = max(preset.vocab_size, vocab_size)
        if vocabulary < vocab_size:
            raise ValueError(f"vocab_size = {vocabulary} is smaller than the data's {vocab_size}")
        return dataclasses.replace(preset, vocab_size=vocabulary, **changes)

    def open_data(self, split: Literal["train", "validation"]) -> Dataset:
        """One split of the data."""
        return open_dataset(
            self.data,
            seq_len=self.length,
            seed=self.seed,
            split=split,
            tokenizer=self.tokenizer,
            cache=self.token_cache,
        )

    def check(self) -> None:
        """Raise a one-line error for what cannot work, before any rank is started."""
        for low, names in (
            (1, ("steps", "batch", "microbatches", "keep", "eval_batches")),
            (0, ("warmup", "save_every", "eval_every", "sample", "seed")),
            (0, ("lr", "min_lr", "weight_decay", "clip")),
        ):
            for name in names:
                if not low <= getattr(self, name) < math.inf:
                    finite = " and finite" if isinstance(getattr(self, name), float) else ""
                    raise ValueError(
                        f"{name} must be at least {low}{finite}, got {getattr(self, name)}"
                    )
        if not 0 < self.timeout <= _DAY:
            raise ValueError(f"timeout must be positive seconds, at most a day, got {self.timeout}")
        mesh = self.mesh
        make_schedule(self.schedule, mesh.pp, self.microbatches, self.chunks)
        zigzag, stages = self.layout == "zigzag", mesh.pp * self.chunks
        self.model_config(1).check(mesh, zigzag=zigzag, stages=stages)
        rows = self.batch * self.length // self.cp
        if self.sequence_parallel and rows % self.tp:
            raise ValueError(
                f"batch x seq_len / cp = {rows} tokens do not divide by tp = {self.tp} "
                "(sequence parallelism)"
            )
        if self.resume and latest(self.out / CHECKPOINTS) is None:
            raise ValueError(f"nothing to resume from: no checkpoint in {self.out / CHECKPOINTS}")
        if self.tensorboard:
            import torch.utils.tensorboard  # noqa: F401  an ImportError now, not after training
        vocabulary = self.open_data("train").vocab_size
        self.open_data("validation")
        self.model_config(vocabulary)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to ``min_lr * lr`` (arXiv:1608.03983)."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    floor = config.min_lr
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))
