"""Train a GPT on text, on any mesh, from one command.

``warpweave train`` starts its own ranks; ``torchrun ... -m warpweave.train`` uses torchrun's (with
several machines, `out` must be a folder that all of them share).

Ctrl-C or SIGTERM finishes the step, saves and stops. Exit codes: 0 done, 1 failed, 2 refused before
the first step (a checkpoint that cannot be gone on from, too), with nothing written, 130 (Ctrl-C)
or 143 (SIGTERM) interrupted and saved. Under torchrun an interrupted run ends with 0, because
torchrun would take anything else for a failed rank; a failed or refused one ends with torchrun's 1.
"""

# One typed record, which is the command line's options too. The options of the model and of the
# plan are the fields of `GPTConfig` and `ParallelPlan` themselves (`config`): whoever adds a field
# there has added an option here (but for `rope_scaling`). A wrong option is answered before torch
# is imported: what needs it is imported where it is used.

from __future__ import annotations

import dataclasses
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import tyro

from warpweave.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.config_file import read_options
from warpweave.kernels.runtime.tile_table import read_table
from warpweave.lr_schedule import LRSchedule
from warpweave.messages import one_line, say
from warpweave.parallel.mesh import Mesh

if TYPE_CHECKING:
    from warpweave.data import Dataset

# Files and folders of a run, in `out`.
METRICS, PLOT, CHECKPOINTS, CONFIG = "metrics.jsonl", "loss.png", "checkpoints", "config.toml"
UNWRITTEN = ("config", "resume")  # how the command was called, not what the run is
FORMERLY = {("overlap", "auto"): "bulk"}  # what the config.toml of earlier runs says

_DAY = 86400.0  # seconds


def _overrides_of(config: type) -> Any:
    """A frozen record of the fields of `config`, their types and their help; None is not given."""
    hints = {"vocab_size": "(default: the larger of the preset's and the data's)"}
    fields = []
    for name, kind in get_type_hints(config).items():
        if name == "rope_scaling":  # a record, which comes with a model
            continue
        hint = hints.get(name, "(default: the preset's)")
        option: Any = Annotated[kind | None, tyro.conf.arg(help_behavior_hint=hint)]
        fields.append((name, option, None))
    namespace = {"__doc__": config.__doc__, "__module__": __name__}
    return dataclasses.make_dataclass("GPTOverrides", fields, frozen=True, namespace=namespace)


GPTOverrides: Any = _overrides_of(GPTConfig)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)  # --layers, not --overrides.layers
@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and over which mesh."""

    config: Path | None = None
    """TOML file of options, which those on the command line change: steps = 500. Every run leaves
    such a file of its own, config.toml in `out`."""
    model: Literal[
        "toy", "small", "toy-llama", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
        "llama-1b", "llama-8b", "llama-70b",
    ] = "small"  # fmt: skip
    """Preset, of which the overrides change single numbers."""
    overrides: Annotated[Any, tyro.conf.arg(constructor=GPTOverrides)] = field(
        default_factory=GPTOverrides
    )
    """What is other than in the preset."""
    init_from: Path | None = None
    """Start from a model instead of a preset: a folder of transformers (``hf download NAME
    --local-dir FOLDER`` fetches one of the hub), or a run's folder or checkpoint."""

    data: Path | None = None
    """UTF-8 text file, folder of them, or token file; default: Python's standard library source."""
    tokenizer: Path | None = None
    """A Hugging Face tokenizers JSON; default: that of `init_from`, or bytes."""
    packed: bool = False
    """Tokens attend within their document only, and learned positions count from its begin: samples
    are packed from documents, which the ends of files and the separator cut."""
    separator: int | None = None
    """With packed: the token that ends a document, of which a token file knows no other ends."""

    dp: int | None = None
    """Data-parallel replicas; default: as many as torchrun's ranks allow, without torchrun 1."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks, over which the sequence is cut."""
    ulysses: int = 1
    """Of the context ranks, neighbours that trade rows for heads; a ring goes over the rest."""
    pp: int = 1
    """Pipeline ranks."""
    plan: ParallelPlan = ParallelPlan()
    """How a step is cut over the ranks."""
    batch: int = 8
    """Sequences per micro-batch."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Of parameters and activations; masters, gradients and sums are fp32 (fp64 for fp64)."""
    steps: int = 500
    """Optimizer steps of the whole run."""
    lr: float = 1e-3
    """Largest learning rate."""
    lr_schedule: LRSchedule = "cosine"
    """How it falls after the warm-up: as a half cosine, linearly, not at all, or linearly in the
    last steps only (warm-up, stable, decay)."""
    min_lr: float = 0.1
    """Final learning rate, as a part of `lr`; not of a constant one."""
    warmup: int = 20
    """Steps of linear warm-up."""
    decay: float = 0.2
    """With lr_schedule wsd: the part of the steps in which the learning rate falls."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    eps: float = 1e-8
    """AdamW's, beside the square root of the second moment."""
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
    early_stop: int = 0
    """Stop after this many evaluations without a lower validation loss, and keep the checkpoint of
    the lowest, too; 0 for never."""
    eval_batches: int = 8
    """Micro-batches of validation text per data replica."""
    sample: int = 200
    """Tokens of sampled text at the end."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs warpweave[tensorboard])."""
    wandb: str | None = None
    """Also log to this project of Weights & Biases (needs warpweave[wandb])."""
    impl: Literal["triton", "torch"] | None = None
    """What computes; default: the Triton kernels on a GPU, torch on the CPU."""
    tiles: Path | None = None
    """Table of ``warpweave tune`` for the kernels on these GPUs; default: the shipped tiles."""
    timeout: float = 300.0
    """Seconds that any exchange between ranks may take."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes; an open `dp` is 1."""
        dp = 1 if self.dp is None else self.dp
        return Mesh(dp=dp, cp=self.cp, tp=self.tp, pp=self.pp, ulysses=self.ulysses)

    @property
    def settings(self) -> dict[str, Any]:
        """What must stay as it was for a resumed run to be the same run, as JSON has it."""
        schedule = ("steps", "lr", "lr_schedule", "min_lr", "warmup", "decay")
        names = (*schedule, "eps", "weight_decay", "clip", "dtype", "packed", "separator")
        return {name: getattr(self, name) for name in names} | {"betas": list(self.betas)}

    @property
    def token_cache(self) -> Path | None:
        """Where the ids of tokenised text are kept for the other ranks and runs."""
        return self.out / "tokens" if self.tokenizer_file is not None else None

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer; None for bytes, and for a token file unless one is given for it."""
        from warpweave.convert.source import find_tokenizer
        from warpweave.data import TOKEN_FILES

        tokens = self.data is not None and self.data.suffix in TOKEN_FILES
        if self.tokenizer is not None or self.init_from is None or tokens:
            return self.tokenizer
        return find_tokenizer(self.init_from)

    @property
    def base(self) -> GPTConfig:
        """The model that the overrides change: that of `init_from`, or the preset."""
        if self.init_from is None:
            return PRESETS[self.model]
        from warpweave.convert.source import read_model_config

        return read_model_config(self.init_from)

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.overrides.seq_len or self.base.seq_len

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
        base = self.base
        given = {name: value for name, value in vars(self.overrides).items() if value is not None}
        enough = base.vocab_size if self.init_from else max(base.vocab_size, vocab_size)
        vocabulary = given.setdefault("vocab_size", enough)
        if vocabulary < vocab_size:
            raise ValueError(f"vocab_size = {vocabulary} is smaller than the data's {vocab_size}")
        return dataclasses.replace(base, **given)

    def open_data(self, split: Literal["train", "validation"]) -> Dataset:
        """One split of the data."""
        from warpweave.data import open_dataset

        return open_dataset(
            self.data,
            seq_len=self.seq_len,
            seed=self.seed,
            split=split,
            tokenizer=self.tokenizer_file,
            cache=self.token_cache,
            separator=self.separator,
        )

    def check(self) -> None:
        """Raise a one-line error for what cannot work, before any rank is started."""
        from warpweave.boards import check_boards
        from warpweave.checkpoint import latest

        for low, names in (
            (1, ("steps", "batch", "keep", "eval_batches")),
            (0, ("warmup", "save_every", "eval_every", "early_stop", "sample", "seed")),
            (0, ("lr", "min_lr", "eps", "weight_decay", "clip")),
        ):
            for name in names:
                if not low <= getattr(self, name) < math.inf:
                    finite = " and finite" if isinstance(getattr(self, name), float) else ""
                    raise ValueError(
                        f"{name} must be at least {low}{finite}, got {getattr(self, name)}"
                    )
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay is a part of the steps, 0 to 1, got {self.decay}")
        if self.early_stop and not self.eval_every:
            raise ValueError(f"early_stop = {self.early_stop} evaluations need --eval-every")
        if not 0 < self.timeout <= _DAY:
            raise ValueError(f"timeout must be positive seconds, at most a day, got {self.timeout}")
        if self.separator is not None and not self.packed:
            raise ValueError(f"separator = {self.separator} cuts documents: it needs --packed")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        self.model_config(1).check(self.mesh, self.plan)
        if self.init_from is not None:
            self._check_weights(self.init_from)
        from warpweave.parallel.layout import cut

        rows = self.batch * cut(self.seq_len, self.cp, self.plan.layout).local_len
        if self.plan.sequence_parallel and rows % self.tp:
            raise ValueError(
                f"batch x seq_len / cp = {rows} tokens do not divide by tp = {self.tp} "
                "(sequence parallelism)"
            )
        if self.resume and latest(self.out / CHECKPOINTS) is None:
            raise ValueError(f"nothing to resume from: no checkpoint in {self.out / CHECKPOINTS}")
        if self.tiles is not None:
            read_table(self.tiles, by="device")
        check_boards(self.tensorboard, self.wandb)
        vocabulary = self.open_data("train").vocab_size
        self.open_data("validation")
        self.model_config(vocabulary)

    def _check_weights(self, folder: Path) -> None:
        """Raise if the weights in `folder` are not those of a model with the overrides."""
        from warpweave.convert.source import open_model
        from warpweave.gpt import GPT

        models = (self.model_config(1), open_model(folder).config)
        ours, theirs = (GPT(m, device="meta").parameter_records() for m in models)
        for name in {**ours, **theirs}:
            wanted, found = (r[name].shape if name in r else None for r in (ours, theirs))
            if wanted != found:
                raise ValueError(
                    f"{name} is {found} in {folder}, but with the given options the model's is "
                    f"{wanted}"
                )


def parse(argv: list[str] | None = None) -> TrainConfig:
    """The options of the command line, and below them those of ``--config``; a wrong one ends the
    process with 2."""
    about: dict[str, Any] = {"prog": "warpweave train", "description": __doc__, "args": argv}
    given = tyro.cli(TrainConfig, **about)
    if given.config is None:
        return given
    try:
        defaults = read_options(given.config, TrainConfig(), ("config",), FORMERLY)
    except ValueError as error:
        say(one_line(error))
        sys.exit(2)
    return dataclasses.replace(tyro.cli(TrainConfig, default=defaults, **about), config=None)
