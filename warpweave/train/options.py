"""Train a GPT on text, on any mesh, from one command.

``warpweave train`` starts its own ranks; ``torchrun ... -m warpweave.train`` uses torchrun's (with
several machines, `out` must be a folder that all of them share).

Ctrl-C or SIGTERM finishes the step, saves and stops. Exit codes: 0 done, 1 failed, 2 refused before
the first step (also for a checkpoint that does not fit the run), with nothing written, 130 (Ctrl-C)
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from warpweave.cli.command_line import read_command_line
from warpweave.cli.messages import refusing
from warpweave.cli.toml import options_of, read_options, with_options
from warpweave.kernels.runtime.tile_table import read_table
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.plan.layout import check_agree, take_layout
from warpweave.train import idle_options
from warpweave.train.lr_schedule import LRSchedule
from warpweave.train.option_kinds import RESUME, overrides_of

if TYPE_CHECKING:
    from warpweave.data import Dataset
    from warpweave.parallel.data.optimizer import Rule
    from warpweave.parallel.data.outer import OuterRule
    from warpweave.parallel.server.server import ServerPlan

# Files and folders of a run, in `out`.
METRICS, PLOT, CHECKPOINTS, CONFIG = "metrics.jsonl", "loss.png", "checkpoints", "config.toml"
UPDATES, STALENESS = "updates.jsonl", "staleness.png"  # of parameter servers
UNWRITTEN = ("config", "resume", "max_restarts")  # how the command was called, not what the run is
FORMERLY = {("overlap", "auto"): "bulk"}  # what the config.toml of earlier runs says

GPTOverrides: Any = overrides_of(GPTConfig, __name__)


@tyro.conf.configure(tyro.conf.OmitArgPrefixes)  # --layers, not --overrides.layers
@dataclass(frozen=True)
class TrainConfig:
    """What to train, on what, and over which mesh."""

    config: Path | None = None
    """TOML file of options (steps = 500); options on the command line win over it. Every run writes
    one of its own, config.toml in `out`."""
    model: Literal[
        "toy", "small", "toy-llama", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
        "llama-1b", "llama-8b", "llama-70b", "llama3-405b", "gpt3-175b",
    ] = "small"  # fmt: skip
    """Model preset; the model's own options change single numbers of it."""
    overrides: Annotated[Any, tyro.conf.arg(constructor=GPTOverrides)] = field(
        default_factory=GPTOverrides
    )
    """Model options that differ from the preset."""
    init_from: Path | None = None
    """Pretrained model to start from instead of a preset: a folder of transformers (``hf download
    NAME --local-dir FOLDER`` fetches one of the hub), or the folder or checkpoint of a run."""

    data: Path | None = None
    """Training data: UTF-8 text file, folder of them, or token file; default: the source of
    Python's standard library."""
    tokenizer: Path | None = None
    """Tokenizer: a Hugging Face tokenizers JSON; default: that of `init_from`, or bytes."""
    packed: bool = False
    """Sequence packing: each sample is several documents, tokens attend within their own, and
    learned positions count from its beginning. Documents end with their file and at the
    separator."""
    separator: int | None = None
    """End-of-document token id, with --packed; in a token file nothing else ends a document."""

    dp: int | None = None
    """Data-parallel degree: replicas. Default: as many as torchrun's ranks allow, 1 without
    torchrun."""
    dp_shard: int | None = None
    """Sharding degree (hybrid sharding): neighbouring data replicas that ZeRO shards over, with
    replicas of the shards across the dp / dp_shard groups. Default: all of them."""
    tp: int = 1
    """Tensor-parallel degree."""
    cp: int = 1
    """Context-parallel degree: ranks over which the sequence is sharded."""
    ulysses: int = 1
    """Ulysses degree: neighbouring context ranks that exchange sequence for heads by all-to-all; a
    ring runs over the cp / ulysses groups of them. 1 for a ring alone."""
    pp: int = 1
    """Pipeline-parallel degree."""
    outer: int = 1
    """Outer replicas, each of dp x cp x tp x pp ranks, that train apart and meet every
    `outer_every` steps: local SGD, DiLoCo."""
    outer_every: int | None = None
    """Steps between two meetings of the outer replicas, whose weights are then averaged and given
    to the outer optimizer. Default: no outer optimizer."""
    outer_lr: float = 0.7
    """Learning rate of the outer SGD, whose gradient is the global weights minus the mean of the
    replicas'; local SGD is 1, with no momentum."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer SGD."""
    fragments: int = 1
    """Streaming: fragments of the layers that meet in turn, outer_every / fragments steps apart."""
    outer_delay: int = 0
    """Streaming: steps from the start of a fragment's all-reduce, which they hide, to its outer
    step."""
    outer_mix: float = 0.0
    """Streaming: the part of the local weights that is kept when the global ones come."""
    outer_warmup: int = 0
    """Steps of data parallelism between the outer replicas before the first of `outer_every`
    (post-local SGD)."""
    plan: ParallelPlan = ParallelPlan()
    """Parallel plan: how a step is distributed over the ranks."""
    batch: int = 8
    """Micro-batch size: sequences per micro-batch."""

    server: int = 0
    """Parameter servers: ranks that hold weights and optimizer, beside the `dp` workers, which each
    do `steps`; evaluated at the end. 0 for none."""
    staleness: int | Literal["unbounded"] = 0
    """Staleness bound with --server: steps that a worker may be ahead of the slowest. 0 is
    synchronous, and one update is the mean of all; otherwise each gradient is an update."""
    compensation: float = 0.0
    """Delay compensation (DC-ASGD) with --server and a staleness: lambda in g + lambda g^2 (w -
    w_old). 0 for none."""

    elastic: int = 0
    """Elastic data parallelism: replicas that die leave the run, which goes on while this many are
    left, and join it again. 0 for a run that ends with any of its ranks."""

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Precision of parameters and activations; master weights, gradients and sums are fp32 (fp64
    for fp64). Default: bf16 on a GPU, whose tensor cores fp32 does not use, and fp32 on a CPU."""
    steps: int = 500
    """Training steps (optimizer steps) of the whole run."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: LRSchedule = "cosine"
    """Learning-rate schedule after the warm-up: half a cosine, linear, constant, or linear in the
    last steps only (wsd: warm-up, stable, decay)."""
    min_lr: float = 0.1
    """Final learning rate as a fraction of `lr`; a constant schedule has none."""
    warmup: int = 20
    """Warm-up steps, linear."""
    decay: float = 0.2
    """Decay phase of lr_schedule wsd, as a fraction of the steps."""
    optimizer: Literal["adamw", "nadamw", "muon", "sgd"] = "adamw"
    """Optimizer: AdamW; NAdamW, whose look-ahead corrects for delays (--betas 0.99 0.999); Muon for
    the matrices of the blocks, scaled so that AdamW's learning rate fits, with AdamW for the rest;
    or SGD with momentum."""
    momentum: float = 0.95
    """Momentum of muon and sgd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's beta1 and beta2, decay rates of the two moments."""
    eps: float = 1e-8
    """AdamW's epsilon, beside the square root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay, of matrices only; sgd adds it to the gradient."""
    clip: float = 1.0
    """Gradient clipping: largest global norm; 0 for none."""
    seed: int = 0
    """Random seed of initialisation, data order, dropout and sampled text."""

    out: Path = Path("runs/train")
    """Output folder for metrics, plot and checkpoints; an earlier run in it is moved into a
    subfolder."""
    save_every: int = 0
    """Checkpoint interval in steps; 0 for one at the end only."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    save_minutes: float = 10.0
    """Checkpoint interval in minutes, by the first rank's clock; 0 for none."""
    resume: Annotated[bool | Literal["auto"], RESUME] = False
    """Resume from the newest good checkpoint in `out`; auto: if there is one, and else begin."""
    max_restarts: int = 0
    """Number of times that all ranks are started again after a failure, to go on from the newest
    checkpoint. (torchrun has an option of its own.)"""
    eval_every: int = 100
    """Evaluation interval in steps; 0 for one at the end only."""
    early_stop: int = 0
    """Early stopping after this many evaluations without a lower validation loss; the checkpoint of
    the lowest is kept, too. 0 for never."""
    eval_batches: int = 8
    """Evaluation size: micro-batches of validation text per data replica."""
    sample: int = 200
    """Number of tokens of sampled text at the end; 0 for none."""
    tensorboard: bool = False
    """TensorBoard events are written, too (needs warpweave[tensorboard])."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs warpweave[wandb])."""
    timeline: Path | None = None
    """Timeline of the last step, measured and simulated: .svg, .png, or Chrome's trace (.json)."""
    device: Literal["cpu", "cuda"] | None = None
    """Device that computes; default: GPUs where there are any, one for each rank."""
    impl: Literal["triton", "torch"] | None = None
    """Implementation that computes; default: the Triton kernels on a GPU, torch on the CPU."""
    tiles: Path | None = None
    """Tile table for the kernels, as ``warpweave tune`` writes it; default: the shipped tiles."""
    timeout: float = 300.0
    """Timeout in seconds of any message between ranks."""
    check_every: int = 100
    """Steps between two comparisons of the ranks: of a step's collectives, of what replicas hold
    after it, of the ranks' own times. 0 for none but of the collectives of the first two steps."""
    check_collectives: bool = False
    """Debugging: every collective is compared between ranks before it is issued, which is slow."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes; an open `dp` is 1."""
        dp = 1 if self.dp is None else self.dp
        return Mesh(dp, self.cp, self.tp, self.pp, self.ulysses, self.dp_shard, self.outer)

    @property
    def starts_ranks(self) -> bool:
        """Whether ``warpweave train`` starts processes; torchrun may have started them already."""
        axes = (self.dp or 1, self.cp, self.tp, self.pp, self.outer)
        return max(axes) > 1 or bool(self.server or self.max_restarts or self.elastic)

    @property
    def replicas(self) -> int:
        """Data replicas."""
        return self.outer * self.mesh.dp

    @property
    def outer_rule(self) -> OuterRule | None:
        """The outer optimizer; None for none.

        Raises:
            ValueError: replicas, or an option of the outer optimizer, without `outer_every`, or an
                option that does not fit.
        """
        from warpweave.parallel.data.outer import OuterRule

        names = ("lr", "momentum", "delay", "mix", "warmup")
        given = {name: getattr(self, f"outer_{name}") for name in names}
        given["fragments"] = self.fragments
        if self.outer_every is None:
            rule = OuterRule(1)
            idle = [f"{n} = {v}" for n, v in given.items() if v != getattr(rule, n)]
            if self.outer > 1 or idle:
                what = f"outer = {self.outer}" if self.outer > 1 else f"outer {idle[0]}"
                raise ValueError(f"{what} needs --outer-every, the steps between meetings")
            return None
        rule = OuterRule(self.outer_every, **given)
        rule.check(self.overrides.layers or self.base.layers)
        return rule

    @property
    def outer_settings(self) -> dict[str, Any] | None:
        """The outer replicas and their rule, which a resumed run must have, as JSON has them."""
        rule = self.outer_rule
        return None if rule is None else {"replicas": self.outer} | dataclasses.asdict(rule)

    @property
    def asynchronous(self) -> dict[str, Any] | None:
        """What the versions of weights in a checkpoint are of, if the schedule is asynchronous."""
        plan = self.plan
        found = {"schedule": plan.schedule, "microbatches": plan.microbatches, "pp": self.pp}
        return found if plan.asynchronous else None

    @property
    def server_plan(self) -> ServerPlan | None:
        """What servers and workers agree on; None without servers.

        Raises:
            ValueError: what servers cannot do.
        """
        if not self.server:
            if self.staleness != 0 or self.compensation:
                raise ValueError(
                    f"staleness = {self.staleness} and compensation = {self.compensation:g} are of "
                    "parameter servers: they need --server"
                )
            return None
        from warpweave.parallel.server.server import ServerPlan

        one = {"tp": 1, "cp": 1, "pp": 1, "dp_shard": None, "early_stop": 0}
        one |= {"outer": 1, "outer_every": None, "timeline": None, "max_restarts": 0, "elastic": 0}
        for name, value in one.items():
            if (given := getattr(self, name)) != value:
                raise ValueError(
                    f"{name} = {given} does not go with --server, whose workers are one rank each"
                )
        plan = dataclasses.replace(self.plan, microbatches=1)
        for name, value in dataclasses.asdict(ParallelPlan()).items():
            if (given := getattr(plan, name)) != value:
                raise ValueError(f"{name} = {given} does nothing in workers of --server")
        if self.tiles is not None:
            raise ValueError("tiles are not read by workers of --server")
        if self.compensation and self.staleness == 0:
            raise ValueError(
                f"compensation = {self.compensation:g} is of delayed gradients: it needs a "
                "--staleness other than 0"
            )
        if self.dtype == "fp16":
            raise ValueError("dtype = fp16 needs a loss scale, which servers do not have")
        if self.optimizer == "muon":
            raise ValueError("optimizer = muon: servers update element by element, adamw or sgd")
        return ServerPlan(
            self.server,
            None if self.staleness == "unbounded" else self.staleness,
            joint=self.staleness == 0,
            compensation=self.compensation,
            clip=self.clip or None,
            timeout=self.timeout,
            save_every=self.save_every,
            save_minutes=self.save_minutes,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What must stay as it was for a resumed run to be the same run, as JSON has it."""
        schedule = ("steps", "lr", "lr_schedule", "min_lr", "warmup", "decay")
        rule = ("optimizer", "momentum", "eps", "weight_decay", "clip")
        names = (*schedule, *rule, "dtype", "packed", "separator")
        return {name: getattr(self, name) for name in names} | {"betas": list(self.betas)}

    @property
    def rule(self) -> Rule:
        """The optimizer's update rule; Muon's steps are bf16 if the parameters have 16 bits."""
        import torch

        from warpweave.parallel.data.optimizer import SGD, AdamW, Muon, NAdamW

        if self.optimizer == "sgd":
            return SGD(self.momentum, self.weight_decay)
        kind = NAdamW if self.optimizer == "nadamw" else AdamW
        adamw = kind(self.betas, self.eps, self.weight_decay, self.impl)
        if self.optimizer != "muon":
            return adamw
        low = torch.bfloat16 if self.dtype in ("bf16", "fp16") else None
        return Muon(self.momentum, self.weight_decay, rest=adamw, dtype=low, impl=self.impl)

    def dropout_key(self, step: int) -> int:
        """The key of a step: 64 bits, seed above and step below."""
        return ((self.seed & 0x7FFFFFFF) << 32) | (step & 0xFFFFFFFF)

    @property
    def token_cache(self) -> Path:
        """Where ids of tokenised text and hashes of token files are kept for others and later."""
        return self.out / "tokens"

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
        dp = self.dp
        if dp is None:
            others = dataclasses.replace(self, dp=1, dp_shard=None).mesh.world
            dp = max(1, ranks // others)
        filled = dataclasses.replace(self, dp=dp)
        if (found := filled.mesh.world) != ranks:
            named = (*["outer"] * (self.outer > 1), "dp", "cp", "tp", "pp")
            axes = " x ".join(f"{axis}={getattr(self, axis) or 'any'}" for axis in named)
            raise ValueError(
                f"mesh {axes} does not fit {ranks} ranks: it has {found}, and their number "
                "must be the axes' product"
            )
        return filled

    def on(self, device_type: str) -> TrainConfig:
        """This configuration with `dtype` filled in for "cpu" or "cuda"."""
        default = "bf16" if device_type == "cuda" else "fp32"
        return dataclasses.replace(self, dtype=self.dtype or default)

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
            self.data, seq_len=self.seq_len, seed=self.seed, split=split,
            tokenizer=self.tokenizer_file, cache=self.token_cache, separator=self.separator,
        )  # fmt: skip

    def check(self) -> None:
        """Raise a one-line error for what cannot work, before any rank is started."""
        from warpweave.checkpoint import latest
        from warpweave.plan.timeline import check_suffix
        from warpweave.train.boards import check_boards

        for low, names in (
            (1, ("steps", "batch", "keep", "eval_batches")),
            (0, ("warmup", "save_every", "max_restarts", "eval_every", "check_every")),
            (0, ("early_stop", "sample", "seed")),
            (0, ("lr", "min_lr", "eps", "weight_decay", "clip", "save_minutes")),
        ):
            for name in names:
                if not low <= (value := getattr(self, name)) < math.inf:
                    finite = " and finite" if isinstance(value, float) else ""
                    raise ValueError(f"{name} must be at least {low}{finite}, got {value}")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay is a part of the steps, 0 to 1, got {self.decay}")
        if not 0 < self.timeout <= 86400:
            raise ValueError(f"timeout must be positive seconds, at most a day, got {self.timeout}")
        idle_options.refuse_idle(idle_options.TRAIN, self)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        self.model_config(1).check(self.mesh, self.plan)
        self.plan.check_update(self.clip, self.dtype == "fp16", self.outer_rule is not None)
        _ = self.server_plan
        if self.init_from is not None:
            from warpweave.convert.source import check_same_model

            check_same_model(self.model_config(1), self.init_from)
        from warpweave.parallel.layout import cut

        rows = self.batch * cut(self.seq_len, self.cp, self.plan.layout).local_len
        if self.plan.sequence_parallel and rows % self.tp:
            raise ValueError(
                f"batch x seq_len / cp = {rows} tokens do not divide by tp = {self.tp} "
                "(sequence parallelism)"
            )
        if self.resume is True and latest(self.out / CHECKPOINTS) is None:
            raise ValueError(f"nothing to resume from: no checkpoint in {self.out / CHECKPOINTS}")
        if self.tiles is not None:
            read_table(self.tiles, by="device")
        check_boards(self.tensorboard, self.wandb)
        check_suffix(self.timeline)
        if self.timeline is not None:  # not after the last step, which is not saved yet
            self.timeline.parent.mkdir(parents=True, exist_ok=True)
        vocabulary = self.open_data("train").vocab_size
        self.open_data("validation")
        self.model_config(vocabulary)


def parse(argv: list[str] | None = None) -> TrainConfig:
    """The options of the command line, and below them those of ``--config`` and of a planned
    ``--layout FILE.json``; a wrong one ends the process with 2."""
    with refusing(ValueError):
        rest, layout = take_layout(argv)
        about = TrainConfig, "train", __doc__, rest
        given, defaults = read_command_line(*about), TrainConfig()
        if given.config is None and not layout:
            return given
        if given.config is not None:
            defaults = read_options(given.config, defaults, ("config",), FORMERLY)
        apart, filed = options_of(TrainConfig()), options_of(defaults)
        check_agree(layout, filed | {n: v for n, v in layout.items() if filed[n] == apart[n]})
        found = read_command_line(*about, with_options(defaults, layout))
        check_agree(layout, options_of(found))
    return dataclasses.replace(found, config=None)
