"""Show that a layout computes what one plain device computes.

``warpweave prove --all --world 4`` trains a tiny GPT for a few steps on every mesh of 1 to 4 ranks,
times every ZeRO stage, schedule and model style, with real processes: gloo on a CPU, NCCL with
``--device cuda``, each rank on a GPU of its own. It compares with
`model.plain`, a model that shares no code with the rest of the library: the loss of every step,
every gathered gradient, the gradient norm, the losses of an evaluation and the tokens of a
generated text after every step, and after the last step the weights, gathered and as each rank
holds them, and the optimizer's moments. Every rank compares what it holds, and the largest error of
all ranks counts.

It prints a table with a row for each layout and a column for each kind of number. The unit of an
error is how far rounding alone moves that number in the plain model, when its initial weights
change by one unit in the last place (`truth` beside this file): ``1.3e-15 x0.9`` is a relative
error of 1.3e-15, 0.9 times that of rounding. Up to 32 times is ok in fp64 and fp32, up to 8 in bf16
and fp16, more is WRONG. In the line of JSON at the end ``worst`` and ``limits`` are such multiples;
a signal that ends the proof leaves ``"stopped": true`` there and ``"passed": null``. A WRONG row
names the first tensor in order of execution that is beyond the limit, and the one with the largest
error. In the first step of a layout ranks compare their collectives: if a rank skips one, the error
names that rank and the collective of the others.

``warpweave prove --random 50 --seed 1`` does the same for layouts drawn at random, up to 8 ranks
with axes of 3, 5 and 6 and other sizes each time. Layout i is drawn from seed + i alone.

``warpweave prove --typecheck --model llama-70b --dp 32 --cp 4 --tp 8 --pp 8`` needs no ranks: it
follows the types of one rank's program per stage (`typecheck` beside this file), on any mesh, in
seconds.

``TRITON_INTERPRET=1 warpweave prove --dp 2 --tp 2 --impl triton`` proves a layout and the kernels
in one: everything that has a Triton kernel runs it, in the interpreter.

The batch is adversarial: numbers of valid tokens differ between ranks, some ranks have none at all,
the vocabulary and the layers do not divide evenly, dropout is on with token indices beyond 2**32,
the learning rate changes, and clipping is active in one step and not in the next.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from warpweave.cli.command_line import read_command_line
from warpweave.cli.messages import refusing, say
from warpweave.model.config import Recompute, Reduce, ScheduleName
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.words import Kind, Overlap, Strategy
from warpweave.plan.layout import check_agree, take_layout
from warpweave.prove.layouts import Layout, Style, all_layouts, draw

# With --typecheck, which follows one program whatever its values, order and messages are.
_UNSEEN = ("all", "world", "random", "seed", "dp_shard", "zero", "reduce", "schedule",
           "cp_strategy", "packed", "microbatches", "overlap", "optimizer", "dtype", "device",
           "impl", "timeout")  # fmt: skip

_RANKS = 64  # processes that a planned layout may ask for


@dataclass(frozen=True)
class ProveConfig:
    """Which layouts to prove."""

    all: bool = False
    """Prove every mesh of 1 to `world` ranks, not the one of --dp, --tp, --cp and --pp; above four
    ranks, the meshes of exactly `world` ranks with the most axes (8: 2 x 2 x 2)."""
    world: int = 4
    """Number of ranks with --all."""
    random: int = 0
    """Number of layouts drawn at random, each with model sizes of its own; 0 for none."""
    seed: int = 0
    """Random seed of --random: layout i is drawn from seed + i."""
    dp: int = 1
    """Data-parallel degree."""
    dp_shard: int | None = None
    """Sharding degree (hybrid sharding): neighbouring data replicas that ZeRO shards over, with
    replicas of the shards across the dp / dp_shard groups. Default: all of them."""
    tp: int = 1
    """Tensor-parallel degree."""
    cp: int = 1
    """Context-parallel degree: ranks over which the sequence is sharded."""
    pp: int = 1
    """Pipeline-parallel degree."""
    ulysses: int = 1
    """Ulysses degree: neighbouring context ranks that exchange sequence for heads by all-to-all; a
    ring runs over the cp / ulysses groups of them. 1 for a ring alone."""
    outer: int = 1
    """Outer replicas of all of that, each of which trains on the whole batch; their weights are
    averaged in every step."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage, sharded over the dp x cp ranks (hybrid: dp_shard x cp)."""
    reduce: Reduce = "library"
    """Reduction of gradients: by the library's collectives, or ordered, the same bits for any
    number of data ranks."""
    schedule: ScheduleName = "1f1b"
    """Pipeline schedule: the order of the micro-batches."""
    sequence_parallel: bool = True
    """Sequence parallelism: with tp > 1, cut the residual stream's tokens over the tensor ranks."""
    style: Style = "gpt2"
    """Architecture of the model: gpt2 has learned positions, LayerNorm, GELU and biases; llama
    rotary positions, RMSNorm, SwiGLU and GQA; mixed rotary positions, LayerNorm, SwiGLU, GQA and
    biases; qwen, gemma, olmo and primer add options that such models have."""
    tied: bool = True
    """Weight tying: the head's weight is the embedding's."""
    recompute: Recompute = "none"
    """Activation checkpointing: what the backward recomputes."""
    cp_strategy: Strategy = "auto"
    """Context-parallel attention: the algorithm by which ranks attend to one another's tokens."""
    layout: Kind = "zigzag"
    """Sequence sharding: which tokens each context rank holds."""
    packed: bool = False
    """Sequence packing: each sample is several documents."""
    microbatches: int | None = None
    """Micro-batches per step; default: more than pipeline stages, where the samples divide by
    it."""
    overlap: Overlap = "bulk"
    """Overlap of tensor ranks' collectives with products; fused needs --impl triton."""
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    """Optimizer that the steps are of; Muon for the matrices of the blocks, SGD with momentum."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "both"] = "both"
    """Precision of the proof; both is fp64, then fp32, on GPUs fp32, then bf16."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where ranks, and the plain model, compute: cpu with gloo, or cuda with NCCL, a GPU for each
    rank."""
    impl: Literal["torch", "triton"] | None = None
    """Implementation: torch, the default on the CPU, or the Triton kernels, the default on GPUs (on
    the CPU in Triton's interpreter: needs TRITON_INTERPRET=1; a minute for a layout)."""
    timeout: float = 60.0
    """Timeout in seconds of any message between ranks."""
    typecheck: bool = False
    """Typecheck the program on a mesh of any size instead of running ranks. Options that types do
    not see are refused beside it."""
    model: str | None = None
    """Model preset to --typecheck instead of the proof's tiny model."""

    def given(self) -> Layout:
        """The layout that the axes give."""
        sizes = (self.dp, self.cp, self.tp, self.pp, self.ulysses, self.dp_shard, self.outer)
        mesh = Mesh(*sizes)
        return Layout(
            mesh,
            self.sequence_parallel and mesh.tp > 1,
            self.zero,
            self.schedule,
            self.style,
            self.tied,
            self.recompute,
            self.cp_strategy,
            self.layout,
            self.overlap,
            packed=self.packed,
            count=self.microbatches,
            optimizer=self.optimizer,
            reduce=self.reduce,
        )

    @property
    def starts_ranks(self) -> bool:
        """Whether ranks are started on the CPU, if nothing is refused."""
        several = self.all or self.random or max(self.dp, self.cp, self.tp, self.pp, self.outer) > 1
        return self.device == "cpu" and not self.typecheck and bool(several)

    def typechecked(self) -> Layout:
        """The layout whose types are checked; raises ValueError for what types do not see."""
        of_the_tiny_model = () if self.model is None else ("style", "tied")
        for name in (*_UNSEEN, *of_the_tiny_model):
            if getattr(self, name) != getattr(ProveConfig(), name):
                raise ValueError(
                    f"--{name.replace('_', '-')}: types do not see it, prove it with ranks"
                )
        return self.given()

    def layouts(self) -> list[Layout]:
        """The layouts to prove, largest worlds first."""
        if self.model is not None:
            raise ValueError(f"model = {self.model!r} needs --typecheck: a proof trains a tiny one")
        import torch  # and the kernels: a command line does without

        from warpweave.kernels.runtime.dispatch import choose
        from warpweave.launch.devices import choose_backend

        impl = self.impl or ("triton" if self.device == "cuda" else "torch")
        if self.device == "cpu":
            choose(impl, torch.empty(0))  # or a line that says what is missing
        if self.overlap == "fused" and impl == "torch":
            raise ValueError("--overlap fused is within Triton's kernels: it needs --impl triton")
        chosen = [self.given()]
        several = self.all or self.random != 0
        if several and (chosen != [ProveConfig().given()] or (self.all and self.random)):
            raise ValueError("--all and --random choose layouts themselves: no other choice beside")
        if not several and (self.world, self.seed) != (4, 0):
            raise ValueError("--world needs --all, --seed needs --random")
        if self.world < 1 or self.random < 0:
            raise ValueError(
                f"world and random must be at least 1, got {self.world} and {self.random}"
            )
        if self.random:
            chosen = [draw(self.seed + i, impl) for i in range(self.random)]
        elif self.all:
            worlds = range(1, self.world + 1) if self.world <= 4 else (self.world,)
            chosen = [layout for world in worlds for layout in all_layouts(world, impl)]
        if several and self.device == "cuda":  # where the engine refuses these, which may hang
            chosen = [x for x in chosen if x.plan.overlap != "fused" or x.mesh.pp == 1]
        both = ("fp64", "fp32") if self.device == "cpu" else ("fp32", "bf16")
        dtypes = both if self.dtype == "both" else (self.dtype,)
        every = [
            dataclasses.replace(layout, dtype=d, device=self.device, impl=impl)
            for layout in chosen
            for d in dtypes
        ]
        for layout in every:
            layout.model.check(layout.mesh, layout.plan)
        every.sort(key=lambda layout: -layout.mesh.world)
        if self.device == "cuda":
            choose_backend(every[0].mesh.world, "nccl")
        return every


def parse(argv: list[str] | None = None) -> ProveConfig:
    """The options of the command line, and below them those of a planned ``--layout FILE.json``
    that a proof has; a wrong one ends the process with 2."""
    with refusing(ValueError):
        rest, layout = take_layout(argv)
        about = ProveConfig, "prove", __doc__, rest
        given = read_command_line(*about)
        if not layout:
            return given
        # The tiny model has chunks and micro-batches of its own; types see none of `_UNSEEN`.
        without = _UNSEEN if given.typecheck else ("microbatches",)
        own = {n: v for n, v in layout.items() if hasattr(given, n) and n not in without}
        found = read_command_line(*about, dataclasses.replace(ProveConfig(), **own))
        check_agree(own, vars(found))
        if not found.typecheck and found.given().mesh.world > _RANKS:
            raise ValueError(
                f"{found.given().mesh.world} ranks of --layout are more than {_RANKS} processes: "
                "--typecheck follows their types, or plan for fewer --gpus"
            )
        left = ", ".join(f"{name} = {value}" for name, value in layout.items() if name not in own)
        say(f"{'types do' if found.typecheck else 'a proof does'} not take of --layout: {left}")
    return found
