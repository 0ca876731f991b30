"""Show that a layout computes what one plain device computes.

``warpweave prove --all --world 4`` trains a tiny GPT for a few steps on every mesh of 1 to 4 ranks,
times every ZeRO stage, schedule and model style, with real processes: gloo on a CPU, NCCL with
``--device cuda``, one GPU per rank. It compares with `model.plain`, a model that shares no code
with the rest of the library. After every step it compares the loss, every gathered gradient, the
gradient norm, the losses of an evaluation and the tokens of a generated text. After the last step
it also compares the optimizer's moments and the weights, both gathered and as each rank holds them.
Every rank compares what it holds, and the largest error of all ranks counts.

It prints a table with a row for each layout and a column for each kind of number. The unit of an
error is how far rounding alone moves that number in the plain model, when its initial weights
change by one unit in the last place (see `truth` in this folder): ``1.3e-15 x0.9`` is a relative
error of 1.3e-15, which is 0.9 times the effect of rounding. Up to 32 times is ok in fp64 and fp32,
up to 8 in bf16 and fp16; more is WRONG. ``worst`` and ``limits`` in the final line of JSON are such
multiples. If a signal ends the proof, that line has ``"stopped": true`` and ``"passed": null``. A
WRONG row names the tensor with the largest error and the first tensor, in order of execution, that
is beyond the limit. Ranks compare their collectives in the first step of each layout: if a rank
skips one, the error names that rank and the collective of the others.

``warpweave prove --random 50 --seed 1`` does the same for layouts drawn at random: up to 8 ranks,
axes of 3, 5 and 6, and different sizes each time. Layout i is drawn from seed + i alone.

``warpweave prove --typecheck --model llama-70b --dp 32 --cp 4 --tp 8 --pp 8`` needs no ranks: it
follows the types of one rank's program per stage (see `typecheck` in this folder), on any mesh,
in seconds.

``warpweave prove --graph --dp 2 --zero 3`` proves that CUDA graphs of a training step are safe,
without a GPU: it records two steps that differ in everything that changes during training, lists
each number, memory address, host read and order of calls in which they differ, and compares
replays of a recorded step with ordinary steps, bit for bit.

``TRITON_INTERPRET=1 warpweave prove --dp 2 --tp 2 --impl triton`` proves a layout and the kernels
together: everything that has a Triton kernel runs it, in the interpreter.

The batch is adversarial: the number of valid tokens differs between ranks, some ranks have none,
the vocabulary and the layers do not split evenly, dropout is on with token indices beyond 2**32,
the learning rate changes, and clipping is active in one step and not in the next.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from warpweave.cli import shared_options as shared
from warpweave.cli.command_line import read_command_line
from warpweave.cli.messages import refusing, say
from warpweave.model.config import Recompute, Reduce, ScheduleName
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.words import Kind, Overlap, Strategy
from warpweave.plan.layout import read_layout
from warpweave.prove.layouts import Layout, Style, all_layouts, draw

# Options that --typecheck ignores: it follows one program, not its values, order or messages.
_UNSEEN = ("all", "world", "random", "seed", "dp_shard", "zero", "reduce", "schedule",
           "cp_strategy", "packed", "microbatches", "overlap", "optimizer", "dtype", "device",
           "impl", "timeout", "graph")  # fmt: skip

_RANKS = 64  # processes that a layout may ask for


@dataclass(frozen=True)
class ProveConfig:
    """The layouts to prove, and how to prove them."""

    all: bool = False
    """Prove every mesh of 1 to `world` ranks instead of the mesh given by --dp, --tp, --cp, and
    --pp. If `world` is above four, prove only the meshes of exactly `world` ranks that have the
    most axes (for 8 ranks: 2 x 2 x 2)."""
    world: int = 4
    """Number of ranks for --all."""
    random: int = 0
    """Number of layouts drawn at random, each with its own model sizes; 0 for none."""
    seed: int = 0
    """Random seed of --random: layout i is drawn from seed + i."""
    dp: int = 1
    """Data-parallel degree."""
    dp_shard: shared.ShardingDegree = None
    tp: shared.TensorParallel = 1
    cp: shared.ContextParallel = 1
    pp: shared.PipelineParallel = 1
    ulysses: shared.UlyssesDegree = 1
    outer: int = 1
    """Number of outer replicas of the whole mesh. Each replica trains on the entire batch, and the
    replicas' weights are averaged in every step."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage, sharded over the dp x cp ranks (dp_shard x cp with hybrid sharding)."""
    reduce: Reduce = "library"
    """Gradient reduction: with the library's collectives (library), or in a fixed order (ordered),
    which gives bitwise identical results for any number of data ranks."""
    schedule: ScheduleName = "1f1b"
    """Pipeline schedule: the order in which stages process micro-batches."""
    sequence_parallel: bool = True
    """Sequence parallelism: with tp > 1, shard the residual stream's tokens over tensor ranks."""
    style: Style = "gpt2"
    """Architecture of the model: gpt2 has learned positions, LayerNorm, GELU, and biases; llama has
    rotary positions, RMSNorm, SwiGLU, and GQA; mixed has rotary positions, LayerNorm, SwiGLU, GQA,
    and biases; qwen, gemma, olmo, and primer add options of the models with these names."""
    tied: bool = True
    """Weight tying: the head shares the embedding's weight."""
    recompute: Recompute = "none"
    """Activation checkpointing: what the backward pass recomputes."""
    cp_strategy: Strategy = "auto"
    """Context-parallel attention: the algorithm with which ranks attend to other ranks' tokens."""
    layout: Kind = "zigzag"
    """Sequence sharding: the tokens that each context rank holds."""
    packed: bool = False
    """Sequence packing: put several documents into each sample."""
    microbatches: int | None = None
    """Micro-batches per step and data replica. Default: the smallest divisor of a replica's number
    of samples that is greater than --pp and large enough for the schedule; without one, that number
    of samples itself."""
    overlap: Overlap = "bulk"
    """Overlap of tensor-parallel collectives with GEMMs; fused requires --impl triton."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """Optimizer of the training steps: adamw, muon (Muon for the blocks' matrices, AdamW for the
    rest), or sgd (with momentum)."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "both"] = "both"
    """Precision of the proof; both means fp64, then fp32 (on GPUs, fp32, then bf16)."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the ranks and of the plain model: cpu with gloo, or cuda with NCCL and one GPU per
    rank."""
    impl: shared.Implementation = None
    timeout: shared.Timeout = 60.0
    graph: bool = False
    """Prove instead that CUDA graphs of a training step are safe: record the step with different
    data, and compare replays with ordinary steps bit for bit."""
    typecheck: bool = False
    """Typecheck the program on a mesh of any size instead of running ranks. Options that have no
    effect on types are rejected."""
    config: Path | None = None
    """File written by ``warpweave plan --out`` with the layout to prove. Options on the command
    line override the file."""
    model: str | None = None
    """Model preset for --typecheck, instead of the proof's tiny model."""

    def given(self) -> Layout:
        """Return the layout of the given options."""
        sizes = (self.dp, self.cp, self.tp, self.pp, self.ulysses, self.dp_shard, self.outer)
        mesh = Mesh(*sizes)
        same = ("zero", "schedule", "style", "tied", "recompute", "layout", "overlap", "packed",
                "optimizer", "reduce")  # fmt: skip
        return Layout(
            mesh, self.sequence_parallel and mesh.tp > 1, strategy=self.cp_strategy,
            count=self.microbatches, **{name: getattr(self, name) for name in same},
        )  # fmt: skip

    @property
    def starts_ranks(self) -> bool:
        """True if the command starts ranks on the CPU, unless it refuses its options."""
        several = self.all or self.random or max(self.dp, self.cp, self.tp, self.pp, self.outer) > 1
        return self.device == "cpu" and not self.typecheck and bool(several)

    def typechecked(self) -> Layout:
        """Return the layout to typecheck; raise ValueError for an option that types ignore."""
        usual = ProveConfig()
        for name in _UNSEEN:
            if getattr(self, name) != getattr(usual, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} has no effect on types; leave it out, or prove "
                    "without --typecheck"
                )
        for name, flag in (("style", "--style"), ("tied", "--no-tied")):  # of the tiny model
            if self.model is not None and getattr(self, name) != getattr(usual, name):
                raise ValueError(f"{flag} has no effect with --model; leave one of them out")
        return self.given()

    def check_ranks(self) -> None:
        """Raise ValueError if the proof needs too many processes."""
        ranks = self.world if self.all else self.given().mesh.world
        if ranks > _RANKS and not self.typecheck:
            raise ValueError(
                f"the proof needs {ranks} ranks, more than the limit of {_RANKS} processes; pass "
                "--typecheck to check only the program's types, or use fewer ranks"
            )

    def layouts(self) -> list[Layout]:
        """Return the layouts to prove, largest worlds first."""
        if self.model is not None:
            raise ValueError(
                f"model = {self.model!r} needs --typecheck: without it, prove always trains the "
                "tiny model"
            )
        self.check_ranks()
        import torch  # here, with the kernels: parsing the options needs neither

        from warpweave.kernels.runtime.dispatch import choose
        from warpweave.launch.devices import choose_backend

        impl = self.impl or ("triton" if self.device == "cuda" else "torch")
        if self.device == "cpu":
            choose(impl, torch.empty(0))  # raises an error that names what is missing
        if self.overlap == "fused" and impl == "torch":
            raise ValueError("--overlap fused runs inside Triton kernels; pass --impl triton")
        chosen = [self.given()]
        several = self.all or self.random != 0
        if several and (chosen != [ProveConfig().given()] or (self.all and self.random)):
            raise ValueError(
                "--all and --random choose the layouts; pass only one of them, and no options that "
                "set a single layout"
            )
        if not several and (self.world, self.seed) != (4, 0):
            raise ValueError("--world requires --all, and --seed requires --random")
        if self.world < 1 or self.random < 0:
            raise ValueError(
                f"expected world >= 1 and random >= 0, got {self.world} and {self.random}"
            )
        if self.random:
            chosen = [draw(self.seed + i, impl) for i in range(self.random)]
        elif self.all:
            worlds = range(1, self.world + 1) if self.world <= 4 else (self.world,)
            chosen = [layout for world in worlds for layout in all_layouts(world, impl)]
        if several and self.device == "cuda":  # the engine refuses these, as they may hang
            chosen = [x for x in chosen if x.plan.overlap != "fused" or x.mesh.pp == 1]
        both = ("fp64", "fp32") if self.device == "cpu" else ("fp32", "bf16")
        dtypes = both if self.dtype == "both" else (self.dtype,)
        where = {"device": self.device, "impl": impl}
        every = [dataclasses.replace(x, dtype=d, **where) for x in chosen for d in dtypes]
        if self.graph and several:
            every = [layout for layout in every if _captured(layout)]
        for layout in every:
            layout.model.check(layout.mesh, layout.plan)
            if self.graph:
                _check_capture(layout)
        every.sort(key=lambda layout: -layout.mesh.world)
        if self.device == "cuda":
            choose_backend(every[0].mesh.world, "nccl")
        return every


def _check_capture(layout: Layout) -> None:
    """Raise ValueError if steps under this layout cannot be CUDA graphs."""
    from warpweave.model.engine_graph import check_capture

    check_capture(layout.plan, layout.mesh, layout.impl, packed=layout.packed)


def _captured(layout: Layout) -> bool:
    """Return True if steps under this layout can be CUDA graphs."""
    try:
        _check_capture(layout)
    except ValueError:
        return False
    return True


def parse(argv: list[str] | None = None) -> ProveConfig:
    """Parse the command line, which overrides the options of ``--config``; exit with 2 if an option
    is wrong."""
    with refusing(ValueError):
        given = read_command_line(ProveConfig, "prove", __doc__, argv)
        if given.config is None:
            return given
        layout = read_layout(given.config)
        # The tiny model has its own chunks and micro-batches; `_UNSEEN` has no effect on types.
        without = _UNSEEN if given.typecheck else ("microbatches",)
        own = {n: v for n, v in layout.items() if hasattr(given, n) and n not in without}
        defaults = dataclasses.replace(ProveConfig(), **own)
        found = read_command_line(ProveConfig, "prove", __doc__, argv, defaults)
        found.check_ranks()
        left = ", ".join(f"{name} = {value}" for name, value in layout.items() if name not in own)
        how = "--typecheck" if found.typecheck else "prove"
        say(f"{how} ignores these options of {given.config}: {left}")
    return dataclasses.replace(found, config=None)
