"""Train a GPT on text, on any mesh, from one command.

``warpweave train`` starts its own ranks; ``torchrun ... -m warpweave.train`` uses torchrun's. With
several machines, `out` must be a folder that all of them share.

Ctrl-C or SIGTERM finishes the step, saves, and stops. Exit codes: 0 done; 1 failed; 2 refused
before the first step (also if a checkpoint does not fit the run), with nothing written; 130
(Ctrl-C) or 143 (SIGTERM) interrupted and saved. Under torchrun an interrupted run exits with 0,
as torchrun treats other codes as a failed rank; a failed or refused run exits with torchrun's 1.
"""

# Typed records that also define the command-line options, one per heading of the help. The options
# of the model and of the plan are the fields of `GPTConfig` and `ParallelPlan`: a field added there
# becomes an option here (except `rope_scaling`). Options are checked before torch is imported, so
# code that needs torch imports it locally.

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from warpweave.cli import shared_options as shared
from warpweave.cli.command_line import read_command_line
from warpweave.cli.messages import refusing
from warpweave.cli.toml import read_options
from warpweave.kernels.runtime.tile_table import read_table
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.parallel.mesh import Mesh
from warpweave.train import idle_options
from warpweave.train.option_kinds import RESUME, overrides_of

if TYPE_CHECKING:
    from warpweave.data import Dataset
    from warpweave.parallel.data.optimizer import Rule
    from warpweave.parallel.data.outer import OuterRule
    from warpweave.parallel.server.server import ServerPlan

# Files and folders that a run writes into `out`.
METRICS, PLOT, CHECKPOINTS, CONFIG = "metrics.jsonl", "loss.png", "checkpoints", "config.toml"
UPDATES, STALENESS = "updates.jsonl", "staleness.png"  # written by parameter servers
UNWRITTEN = ("config", "resume", "max_restarts")  # they describe the invocation, not the run
FORMERLY = {("overlap", "auto"): "bulk"}  # values in config.toml files of older versions

GPTOverrides: Any = overrides_of(GPTConfig, __name__)


@dataclass(frozen=True)
class ModelOptions:
    """The model, and the device and kernels that compute it."""

    model: Literal[
        "toy", "small", "toy-llama", "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl",
        "llama-1b", "llama-8b", "llama-70b", "llama3-405b", "gpt3-175b",
    ] = "small"  # fmt: skip
    """Model preset. The model options below override individual values of the preset."""
    overrides: Annotated[Any, tyro.conf.arg(constructor=GPTOverrides)] = field(
        default_factory=GPTOverrides
    )
    """Model options that override values of the preset."""
    init_from: Path | None = None
    """Pretrained model to start from instead of a preset: a transformers model folder (``hf
    download NAME --local-dir FOLDER`` downloads a model from the Hub), a run's folder, or a
    checkpoint in it."""
    device: shared.Device = None
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = None
    """Precision of parameters and activations; master weights, gradients, and sums are fp32 (fp64
    for fp64). Default: bf16 on a GPU (fp32 does not use its tensor cores) and fp32 on a CPU."""
    impl: shared.Implementation = None
    tiles: Path | None = None
    """Tile table for the kernels, as written by ``warpweave tune``; default: the shipped tiles."""
    cuda_graph: bool = False
    """CUDA graphs: launch each step as a whole, so that the host does not slow the GPU down. Needs
    a GPU, pp = 1, and one outer replica."""


@dataclass(frozen=True)
class DataOptions:
    """Training data."""

    data: Path | None = None
    """Training data: a UTF-8 text file, a folder of text files, or a token file. Default: the
    source code of Python's standard library."""
    tokenizer: Path | None = None
    """Tokenizer: a Hugging Face tokenizer.json. Default: that of `init_from`, or bytes."""
    packed: bool = False
    """Sequence packing: a sample holds several documents. A document ends at a separator token or
    at the end of a file. Each token attends only within its document, and learned positions restart
    in each document."""
    separator: int | None = None
    """End-of-document token id for --packed; in a token file, nothing else separates documents."""


@dataclass(frozen=True)
class ParallelismOptions:
    """Ranks, and how a step is distributed over them."""

    dp: int | None = None
    """Data-parallel degree: number of replicas. Default: as many as torchrun's ranks allow, or 1
    without torchrun."""
    dp_shard: shared.ShardingDegree = None
    tp: shared.TensorParallel = 1
    cp: shared.ContextParallel = 1
    ulysses: shared.UlyssesDegree = 1
    pp: shared.PipelineParallel = 1
    outer: int = 1
    """Number of outer replicas, each with dp x cp x tp x pp ranks. They train separately and
    synchronize every `outer_every` steps (local SGD, DiLoCo)."""
    outer_every: int | None = None
    """Steps between synchronizations of the outer replicas. At each one, the replicas' weights are
    averaged and the outer optimizer takes a step. Default: no outer optimizer."""
    outer_lr: float = 0.7
    """Learning rate of the outer SGD, whose gradient is the global weights minus the mean of the
    replicas' weights. For local SGD, use 1 and no momentum."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the outer SGD."""
    fragments: int = 1
    """Streaming DiLoCo: number of fragments into which the layers are divided. The fragments are
    synchronized in turn, outer_every / fragments steps apart."""
    outer_delay: int = 0
    """Streaming DiLoCo: steps between the start of a fragment's all-reduce and the fragment's outer
    step. These steps hide the all-reduce."""
    outer_mix: float = 0.0
    """Streaming DiLoCo: fraction of the local weights kept when the global weights arrive."""
    outer_warmup: int = 0
    """Warm-up steps at the start of the run, with plain data parallelism over the outer replicas
    (post-local SGD)."""
    plan: ParallelPlan = ParallelPlan()
    """Parallel plan: how a step is distributed over the ranks."""
    batch: int = 8
    """Micro-batch size: sequences per micro-batch."""
    server: int = 0
    """Number of parameter servers: ranks with the weights and the optimizer, besides the `dp`
    workers. Each worker does `steps` steps, and the run is evaluated at the end. 0 for none."""
    staleness: int | Literal["unbounded"] = 0
    """Staleness bound with --server: number of steps that a worker may be ahead of the slowest
    worker. With 0, training is synchronous: each update uses the mean of all workers' gradients.
    Otherwise, each gradient is a separate update."""
    compensation: float = 0.0
    """Delay compensation (DC-ASGD) with --server and a nonzero staleness: lambda in g + lambda g^2
    (w - w_old). 0 for none."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Steps, learning rate, and update rule."""

    steps: int = 500
    """Training steps (optimizer steps) in the whole run."""
    lr: float = 1e-3
    """Peak learning rate."""
    lr_schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning-rate schedule after the warm-up: half a cosine, linear, constant, or linear decay in
    the last steps only (wsd: warm-up, stable, decay)."""
    min_lr: float = 0.1
    """Final learning rate as a fraction of `lr`; not used by the constant schedule."""
    warmup: int = 20
    """Linear warm-up steps."""
    decay: float = 0.2
    """Decay phase of lr_schedule wsd, as a fraction of the steps."""
    optimizer: Literal["adamw", "nadamw", "muon", "sgd"] = "adamw"
    """Optimizer: adamw; nadamw, whose look-ahead corrects for stale gradients (use --betas 0.99
    0.999); muon, which uses Muon for the blocks' matrices (scaled so that AdamW's learning rates
    work) and AdamW for the rest; or sgd, with momentum."""
    momentum: float = 0.95
    """Momentum of muon and sgd."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's beta1 and beta2, the decay rates of the two moments."""
    eps: float = 1e-8
    """AdamW's epsilon, added to the square root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay, applied only to matrices; sgd adds it to the gradient."""
    clip: float = 1.0
    """Gradient clipping: maximum global norm; 0 for no clipping."""
    seed: int = 0
    """Random seed of initialization, data order, dropout, and sampled text."""


@dataclass(frozen=True)
class CheckpointsOptions:
    """Saving and resuming."""

    save_every: int = 0
    """Checkpoint interval in steps; 0 saves only at the end."""
    save_minutes: float = 10.0
    """Checkpoint interval in minutes, by the first rank's clock; 0 for none."""
    keep: int = 3
    """Number of most recent checkpoints to keep."""
    resume: Annotated[bool | Literal["auto"], RESUME] = False
    """Resume from the newest good checkpoint in `out`; with auto, start a new run without one."""


@dataclass(frozen=True)
class FaultsOptions:
    """Failures of ranks, and checks that detect them."""

    elastic: int = 0
    """Elastic data parallelism: minimum number of replicas. If replicas die, the run continues
    while this many are left, and dead replicas can rejoin. With 0, any death ends the run."""
    max_restarts: int = 0
    """Maximum number of restarts of all ranks after a failure. torchrun has its own option."""
    timeout: shared.Timeout = 300.0
    check_every: int = 100
    """Interval in steps at which ranks compare a step's collectives, the replicas' state after the
    step, and each rank's compute time. With 0, ranks compare only the collectives of the first two
    steps."""
    check_collectives: bool = False
    """Debugging: compare every collective between ranks before it is issued (slow)."""


@dataclass(frozen=True)
class OutputOptions:
    """Files and evaluations."""

    config: Path | None = None
    """TOML file with options, such as steps = 500. Options on the command line override the file.
    Every run writes its options to config.toml in `out`."""
    out: Path = Path("runs/train")
    """Output folder: metrics, plot, checkpoints. An earlier run's files move to a subfolder."""
    eval_every: int = 100
    """Evaluation interval in steps; 0 evaluates only at the end."""
    eval_batches: int = 8
    """Evaluation size: micro-batches of validation text per data replica."""
    early_stop: int = 0
    """Early stopping: stop after this many evaluations without a lower validation loss, and keep
    the checkpoint with the lowest loss. 0 for no early stopping."""
    sample: int = 200
    """Number of tokens of text to sample at the end; 0 for none."""
    tensorboard: bool = False
    """Also write TensorBoard events (needs warpweave[tensorboard])."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs warpweave[wandb])."""
    timeline: Path | None = None
    """File to write a timeline of the last step to, measured and simulated: .svg, .png, or a Chrome
    trace (.json)."""


@dataclass(frozen=True)
class TrainConfig(
    OutputOptions, FaultsOptions, CheckpointsOptions, OptimizerOptions, ParallelismOptions,
    DataOptions, ModelOptions,
):  # fmt: skip
    """Options of a training run, under the headings of its bases; the last base comes first."""

    @property
    def mesh(self) -> Mesh:
        """The mesh's sizes, with 1 for `dp` if it is not set."""
        dp = 1 if self.dp is None else self.dp
        return Mesh(dp, self.cp, self.tp, self.pp, self.ulysses, self.dp_shard, self.outer)

    @property
    def starts_ranks(self) -> bool:
        """True if ``warpweave train`` starts processes (unless torchrun already has)."""
        axes = (self.dp or 1, self.cp, self.tp, self.pp, self.outer)
        return max(axes) > 1 or bool(self.server or self.max_restarts or self.elastic)

    @property
    def replicas(self) -> int:
        """Number of data replicas over all outer replicas."""
        return self.outer * self.mesh.dp

    @property
    def outer_rule(self) -> OuterRule | None:
        """The outer optimizer, or None. Raises ValueError if outer replicas or an option of the
        outer optimizer are set without `outer_every`, or an option is invalid."""
        from warpweave.parallel.data.outer import OuterRule

        names = ("lr", "momentum", "delay", "mix", "warmup")
        given = {name: getattr(self, f"outer_{name}") for name in names}
        given["fragments"] = self.fragments
        if self.outer_every is None:
            rule = OuterRule(1)
            set_ = [n for n, v in given.items() if v != getattr(rule, n)]
            idle = [f"{'outer_' * (n != 'fragments')}{n} = {given[n]}" for n in set_]
            if self.outer > 1 or idle:
                what = f"outer = {self.outer}" if self.outer > 1 else idle[0]
                raise ValueError(
                    f"{what} requires --outer-every, the number of steps between outer steps"
                )
            return None
        rule = OuterRule(self.outer_every, **given)
        rule.check(self.overrides.layers or self.base.layers)
        return rule

    @property
    def server_plan(self) -> ServerPlan | None:
        """The plan shared by servers and workers; None without servers. Raises ValueError for an
        option that servers do not support."""
        if not self.server:
            if self.staleness != 0 or self.compensation:
                raise ValueError(
                    f"staleness = {self.staleness} and compensation = {self.compensation:g} apply "
                    "to parameter servers only; pass --server"
                )
            return None
        from warpweave.parallel.server.server import ServerPlan

        one = ("tp", "cp", "pp", "dp_shard", "early_stop", "outer", "outer_every", "timeline",
               "max_restarts", "elastic", "cuda_graph")  # fmt: skip
        for name in one:
            if (given := getattr(self, name)) != getattr(TrainConfig, name):
                raise ValueError(f"--server does not support {name} = {given}; leave it out")
        plan = dataclasses.replace(self.plan, microbatches=1)
        for name, value in dataclasses.asdict(ParallelPlan()).items():
            if (given := getattr(plan, name)) != value:
                raise ValueError(f"{name} = {given} has no effect with --server; leave it out")
        if self.tiles is not None:
            raise ValueError("--server workers do not read tile tables; leave out --tiles")
        if self.compensation and self.staleness == 0:
            raise ValueError(
                f"compensation = {self.compensation:g} needs delayed gradients, but staleness is "
                "0; pass a nonzero --staleness"
            )
        if self.dtype == "fp16":
            raise ValueError("dtype = fp16 needs loss scaling, which --server does not support")
        if self.optimizer == "muon":
            raise ValueError("--server needs an elementwise optimizer, got muon; use adamw")
        return ServerPlan(
            self.server, None if self.staleness == "unbounded" else self.staleness,
            joint=self.staleness == 0, compensation=self.compensation, clip=self.clip or None,
            timeout=self.timeout, save_every=self.save_every, save_minutes=self.save_minutes,
        )  # fmt: skip

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a resumed run must keep to be the same run, as JSON."""
        updates = (item.name for item in dataclasses.fields(OptimizerOptions))
        names = [name for name in updates if name != "seed"] + ["dtype", "packed", "separator"]
        return {name: getattr(self, name) for name in names} | {"betas": list(self.betas)}

    @property
    def rule(self) -> Rule:
        """The optimizer's update rule; Muon's steps run in bf16 if the parameters are 16-bit."""
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
        """The 64-bit key of a step: the seed in the high half, the step in the low half."""
        return ((self.seed & 0x7FFFFFFF) << 32) | (step & 0xFFFFFFFF)

    @property
    def token_cache(self) -> Path:
        """The folder that caches token ids of text and hashes of token files."""
        return self.out / "tokens"

    @property
    def tokenizer_file(self) -> Path | None:
        """The tokenizer's path; None for bytes, and for a token file without `tokenizer`."""
        from warpweave.convert.source import find_tokenizer
        from warpweave.data import TOKEN_FILES

        tokens = self.data is not None and self.data.suffix in TOKEN_FILES
        if self.tokenizer is not None or self.init_from is None or tokens:
            return self.tokenizer
        return find_tokenizer(self.init_from)

    @property
    def base(self) -> GPTConfig:
        """The model that the overrides apply to: that of `init_from`, or the preset."""
        if self.init_from is None:
            return PRESETS[self.model]
        from warpweave.convert.source import read_model_config

        return read_model_config(self.init_from)

    @property
    def seq_len(self) -> int:
        """Tokens in a sequence."""
        return self.overrides.seq_len or self.base.seq_len

    def for_ranks(self, ranks: int) -> TrainConfig:
        """This configuration with `dp` filled in for `ranks` ranks. Raises ValueError if the mesh
        has a different number of ranks."""
        dp = self.dp
        if dp is None:
            dp = max(1, ranks // dataclasses.replace(self, dp=1, dp_shard=None).mesh.world)
        filled = dataclasses.replace(self, dp=dp)
        if (found := filled.mesh.world) != ranks:
            named = (*["outer"] * (self.outer > 1), "dp", "cp", "tp", "pp")
            axes = " x ".join(f"{axis}={getattr(self, axis) or 'any'}" for axis in named)
            raise ValueError(
                f"mesh {axes} has {found} ranks, but {ranks} were started; the number of ranks "
                "must be the product of the axes"
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
        """Raise a one-line error for options that cannot work, before any rank is started."""
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
            raise ValueError(f"decay must be a fraction of the steps in [0, 1], got {self.decay}")
        if not 0 < self.timeout <= 86400:
            raise ValueError(f"timeout must be in (0, 86400] seconds, got {self.timeout}")
        idle_options.refuse_idle(idle_options.TRAIN, self)
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be in [0, 1), got {self.betas}")
        self.model_config(1).check(self.mesh, self.plan)
        self.plan.check_update(self.clip, self.dtype == "fp16", self.outer_rule is not None)
        _ = self.server_plan
        if self.cuda_graph:
            from warpweave.model.engine_graph import check_capture

            if self.check_collectives or self.elastic:
                name = "elastic" if self.elastic else "check_collectives"
                raise ValueError(f"cuda_graph does not support {name}; leave one of them out")
            check_capture(self.plan, self.mesh, self.impl or "triton", packed=self.packed)
        if self.init_from is not None:
            from warpweave.convert.source import check_same_model

            check_same_model(self.model_config(1), self.init_from)
        from warpweave.parallel.layout import cut

        rows = self.batch * cut(self.seq_len, self.cp, self.plan.layout).local_len
        if self.plan.sequence_parallel and rows % self.tp:
            raise ValueError(
                "sequence parallelism shards tokens over tp, but batch x seq_len / cp "
                f"({rows}) is not divisible by tp ({self.tp})"
            )
        if self.resume is True and latest(self.out / CHECKPOINTS) is None:
            raise ValueError(f"nothing to resume from: no checkpoint in {self.out / CHECKPOINTS}")
        if self.tiles is not None:
            read_table(self.tiles, by="device")
        check_boards(self.tensorboard, self.wandb)
        check_suffix(self.timeline)
        if self.timeline is not None:  # fail now rather than after the last, still unsaved step
            self.timeline.parent.mkdir(parents=True, exist_ok=True)
        vocabulary = self.open_data("train").vocab_size
        self.open_data("validation")
        self.model_config(vocabulary)


def parse(argv: list[str] | None = None) -> TrainConfig:
    """Read the options: the command line's override those of ``--config``. Exit with 2 on a wrong
    option."""
    with refusing(ValueError):
        given = read_command_line(TrainConfig, "train", __doc__, argv)
        if given.config is None:
            return given
        defaults = read_options(given.config, TrainConfig(), ("config",), FORMERLY)
        found = read_command_line(TrainConfig, "train", __doc__, argv, defaults)
    return dataclasses.replace(found, config=None)
