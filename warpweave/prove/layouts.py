"""The layouts that `prove` trains a tiny GPT on, listed or drawn at random.

A `Layout` is a mesh, every option that must not change the results, and a model style. `Sizes`
holds the sizes of the model and the batch: as small as the mesh allows, or drawn with it.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from warpweave.kernels.rope_scaling import RopeScaling
from warpweave.model.config import GPTConfig, ParallelPlan, Recompute, Reduce
from warpweave.parallel.mesh import AXES, Mesh, divisors
from warpweave.parallel.schedule import FAMILIES, find_family
from warpweave.parallel.words import Kind, Overlap, Strategy

Style = Literal["gpt2", "llama", "mixed", "qwen", "gemma", "olmo", "primer"]

STYLES: dict[str, dict] = {
    "gpt2": {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True},
    "llama": {"positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False},
    "mixed": {"positions": "rope", "norm": "layer", "activation": "swiglu", "bias": True},
    "qwen": {
        "positions": "rope", "norm": "rms", "activation": "gelu_erf", "bias": False,
        "qkv_bias": True, "qk_norm": True, "windows": (3, 0), "sinks": True,
        "rope_scaling": RopeScaling("llama3", 4.0, original_length=8)
    },  # further options that models have; no real one has all of them
    "gemma": {
        "positions": "rope", "norm": "rms1p", "activation": "geglu", "bias": False,
        "norm_place": "sandwich", "qk_norm": True, "attention_scale": 0.4, "softcap": 2.0,
        "logit_softcap": 0.25, "embedding_scale": 2.5, "windows": (3, 0),
        "local_rope_theta": 100.0, "rope_scaling": RopeScaling("linear", 4.0)
    },  # the options of Gemma 2 and 3 together
    "olmo": {"positions": "rope", "norm": "rms", "activation": "swiglu", "bias": False,
             "norm_place": "post", "qk_norm": True, "qk_norm_whole": True},
    "primer": {"positions": "rope", "norm": "layer", "norm_bias": False, "activation": "relu2",
               "bias": True},
}  # fmt: skip
SYNCHRONOUS = tuple(name for name, family in FAMILIES.items() if not family.asynchronous)
ASYNCHRONOUS = tuple(name for name in FAMILIES if name not in SYNCHRONOUS)
PRIMES = (5, 11, 23, 37, 53)  # vocabularies; with 5, some of six tensor ranks hold no word


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the global batch, and the seed of everything that is drawn.

    Examples:
        >>> from warpweave import Mesh
        >>> from warpweave.prove import Layout
        >>> sizes = Sizes(4, 8, vocab=16, layers=2, heads=2, kv_heads=2, head_dim=4, hidden=16)
        >>> layout = Layout(Mesh(), drawn=sizes)
    """

    samples: int
    seq_len: int
    vocab: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    dropout: float = 0.1
    seed: int = 5
    documents: int = 1  # packed into each sample


def smallest(mesh: Mesh, style: str, chunks: int = 1) -> Sizes:
    """Return sizes that fit the mesh: a prime vocabulary, layers that do not split evenly over the
    stages, of which each pipeline rank has `chunks`.

    Axes of one, two and four ranks get the same sizes, so that their layouts share one truth.
    """
    tp, stages = mesh.tp, mesh.pp * chunks
    heads = tp * max(1, 8 // tp)
    tokens = mesh.cp * math.lcm(2, tp)  # splits over cp and tp, for any micro-batch
    return Sizes(
        samples=mesh.dp * max(1, 12 // mesh.dp),
        seq_len=tokens * max(1, 16 // tokens),
        vocab=37,
        layers=stages + 1 if stages > 1 else 2,
        heads=heads,
        kv_heads=heads if style == "gpt2" else max(2, tp),
        head_dim=4,
        hidden=tp * max(1, 40 // tp),
    )


@dataclass(frozen=True)
class Layout:
    """A mesh and every option that must not change the results.

    `count` is the number of micro-batches (None: the first divisor of the samples that is larger
    than the number of stages). `drawn` holds the sizes of a random layout (None: the smallest that
    fit).

    Examples:
        >>> from warpweave import Mesh
        >>> layout = Layout(Mesh(tp=2, pp=2), schedule="zb-h1", style="llama")
    """

    mesh: Mesh
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    style: str = "gpt2"
    tied: bool = True
    recompute: str = "none"
    strategy: Strategy = "auto"
    layout: str = "zigzag"
    overlap: Overlap = "bulk"
    dtype: str = "fp64"
    impl: str = "torch"
    packed: bool = False
    count: int | None = None
    drawn: Sizes | None = None
    device: str = "cpu"
    optimizer: str = "adamw"
    reduce: Reduce = "library"

    def __post_init__(self) -> None:
        if self.sizes.samples % (self.mesh.dp * self.microbatches):
            raise ValueError(
                f"{self.sizes.samples} samples are not divisible by dp x micro-batches "
                f"({self.mesh.dp} x {self.microbatches})"
            )

    @property
    def sizes(self) -> Sizes:
        """Sizes of the model and the batch."""
        sizes = self.drawn or smallest(self.mesh, self.style, self.chunks)
        if self.schedule.endswith(".csv"):  # the file sets the number of micro-batches
            sizes = replace(sizes, samples=self.mesh.dp * self._least)
        return replace(sizes, documents=4) if self.packed else sizes

    @property
    def chunks(self) -> int:
        """Stages of each pipeline rank."""
        return find_family(self.schedule).chunks or 2

    @property
    def microbatches(self) -> int:
        """Micro-batches of each data replica in a step."""
        if self.count is not None:
            return self.count
        counts = divisors(self.sizes.samples // self.mesh.dp)
        return next((m for m in counts if m > self.mesh.pp and m >= self._least), counts[-1])

    @property
    def _least(self) -> int:
        """The fewest micro-batches that the schedule supports."""
        return find_family(self.schedule).least(self.mesh.pp)

    @property
    def micro_batch_size(self) -> int:
        """Sequences in a micro-batch."""
        return self.sizes.samples // self.mesh.dp // self.microbatches

    @property
    def plan(self) -> ParallelPlan:
        """The engine's plan."""
        return ParallelPlan(
            zero=self.zero,
            reduce=self.reduce,
            schedule=self.schedule,
            chunks=self.chunks,
            microbatches=self.microbatches,
            sequence_parallel=self.sequence_parallel,
            recompute=self.recompute,
            layout=self.layout,
            cp_strategy=self.strategy,
            overlap=self.overlap,
        )

    @property
    def model(self) -> GPTConfig:
        """The tiny model."""
        s = self.sizes
        return GPTConfig(
            vocab_size=s.vocab,
            seq_len=s.seq_len,
            layers=s.layers,
            width=s.heads * s.head_dim,
            heads=s.heads,
            kv_heads=s.kv_heads,
            head_size=s.head_dim + 2 if self.style == "qwen" else None,
            hidden=s.hidden,
            tied=self.tied,
            dropout=s.dropout,
            **STYLES[self.style],
        )

    @property
    def command(self) -> str:
        """The command that proves only this layout, again."""
        words = [f"--random 1 --seed {self.drawn.seed}"] if self.drawn is not None else []
        if not words:
            sizes = {axis: getattr(self.mesh, axis) for axis in (*AXES, "ulysses", "dp_shard")}
            given = {axis: n for axis, n in sizes.items() if n != getattr(Mesh(), axis)}
            words = [f"--{axis.replace('_', '-')} {n}" for axis, n in given.items()]
            words += [
                f"--zero {self.zero} --schedule {self.schedule} --style {self.style}",
                f"--recompute {self.recompute} --cp-strategy {self.strategy}",
                f"--layout {self.layout} --microbatches {self.microbatches}",
                f"--overlap {self.overlap}",
                "--tied" if self.tied else "--no-tied",
                "--sequence-parallel" if self.sequence_parallel else "--no-sequence-parallel",
                *["--packed"] * self.packed,
                *[f"--optimizer {self.optimizer}"] * (self.optimizer != "adamw"),
                *[f"--reduce {self.reduce}"] * (self.reduce != "library"),
            ]
        words += [f"--device {self.device}"] if self.device != "cpu" else []
        return " ".join(["warpweave prove", *words, f"--dtype {self.dtype} --impl {self.impl}"])

    def __str__(self) -> str:
        """Return the layout as one line in the words of the options; batch is data ranks x
        micro-batches x sequences x tokens."""
        m, s = self.mesh, self.sizes
        words = [] if self.drawn is None else [f"seed {s.seed}:"]
        words += [f"outer={m.outer}"] if m.outer > 1 else []
        words += [f"{axis}={getattr(m, axis)}" for axis in ("dp", "tp", "cp", "pp")]
        words += [f"dp-shard={m.dp_shard}"] if m.dp_shard is not None else []
        words += [f"batch={m.dp}x{self.microbatches}x{self.micro_batch_size}x{s.seq_len}"]
        words += [f"zero={self.zero}", f"schedule={self.schedule}", f"style={self.style}"]
        words += ["tied" if self.tied else "no-tied"]
        words += ["packed"] * self.packed + [f"recompute={self.recompute}"]
        if m.cp > 1 or (self.strategy, self.layout) != ("auto", "zigzag"):
            neighbours = f" ulysses={m.ulysses}" if m.ulysses > 1 else ""
            words += [f"cp-strategy={self.strategy}{neighbours} layout={self.layout}"]
        words += ["sequence-parallel"] * self.sequence_parallel
        if m.tp > 1 or self.overlap != "bulk":
            words += [f"overlap={self.overlap}"]
        words += [f"optimizer={self.optimizer}"] if self.optimizer != "adamw" else []
        words += [f"reduce={self.reduce}"] if self.reduce != "library" else []
        words += [f"device={self.device}"] if self.device != "cpu" else []
        return " ".join([*words, f"dtype={self.dtype}", f"impl={self.impl}"])


def meshes(world: int) -> Iterator[Mesh]:
    """Every mesh of `world` ranks."""
    for dp, tp, cp, pp in itertools.product(divisors(world), repeat=4):
        if dp * tp * cp * pp == world:
            for neighbours in (1, *divisors(cp)[1:-1]):
                yield Mesh(dp, cp, tp, pp, neighbours)


def _axes(mesh: Mesh) -> int:
    return sum(getattr(mesh, axis) > 1 for axis in AXES)


def all_layouts(world: int, impl: str = "torch") -> list[Layout]:
    """Return every legal layout of `world` ranks; above four ranks, those with the most axes.

    Takes the product mesh x SP x ZeRO x schedule x context strategy x style x tie, wherever a
    choice has an effect: SP needs tensor ranks, ZeRO data ranks, a strategy context ranks. Other
    choices alternate from layout to layout: recomputation, the sequence layout, the number of
    micro-batches (fewer or more than stages), the overlap (with tensor ranks, and if `impl` can run
    it), one or several documents per sample, shards over all data ranks or with replicas, and
    "llama" (without windows and sinks) or "qwen" (with both).
    """
    every = sorted(meshes(world), key=lambda mesh: -mesh.pp)
    if world > 4:
        most = max(map(_axes, every))
        every = [mesh for mesh in every if _axes(mesh) == most]
    layouts: list[Layout] = []
    for mesh in every:
        samples = smallest(mesh, "gpt2").samples // mesh.dp
        counts = [m for m in divisors(samples) if m <= mesh.pp + 2]
        fit = [name for name in SYNCHRONOUS if FAMILIES[name].least(mesh.pp) <= samples]
        heads = smallest(mesh, "gpt2").heads // mesh.tp
        for sp, zero, schedule, strategy, style, tied in itertools.product(
            (False, True) if mesh.tp > 1 else (False,),
            range(4) if mesh.data > 1 else (0,),
            fit if mesh.pp > 1 else ("gpipe", "1f1b"),
            _strategies(mesh, heads),
            ("gpt2", "llama"),
            (True, False),
        ):
            turn, least = len(layouts), FAMILIES[schedule].least(mesh.pp)
            mine = [m for m in counts if m >= least] or [None]
            shards, kinds = _shardings(mesh, zero), _kinds(mesh, strategy)
            overlaps = _overlaps(mesh, impl)
            layouts.append(
                Layout(
                    replace(mesh, dp_shard=shards[turn // 3 % len(shards)]), sp, zero, schedule,
                    "qwen" if style == "llama" and turn % 7 < 3 else style, tied,
                    get_args(Recompute)[turn % 3], strategy, kinds[turn // 3 % len(kinds)],
                    overlaps[turn // 2 % len(overlaps)], packed=turn % 5 in (1, 3),
                    count=mine[turn % len(mine)],
                )
            )  # fmt: skip
        layouts += _asynchronous(mesh, len(layouts))
    return layouts


def _asynchronous(mesh: Mesh, turn: int) -> list[Layout]:
    """Return every asynchronous schedule with every ZeRO stage it supports, if pp > 1."""
    return [
        Layout(
            mesh,
            zero=zero,
            schedule=name,
            style=("gpt2", "llama")[(turn + zero) % 2],
            tied=False,
            recompute=get_args(Recompute)[(turn + zero) % 3],
            strategy=_strategies(mesh, mesh.cp)[0],
            count=next(m for m in divisors(max(1, 12 // mesh.dp)) if m >= mesh.pp),
        )
        for name in ASYNCHRONOUS * (mesh.pp > 1)
        for zero in (range(3) if mesh.data > 1 else (0,))
    ]


def _shardings(mesh: Mesh, zero: int) -> tuple[int | None, ...]:
    """Return the values to try for `dp_shard`: None (all data replicas) or fewer shards."""
    fewer = [n for n in divisors(mesh.dp)[:-1] if n * mesh.cp > 1]
    return (None, *fewer) if zero else (None,)


def _strategies(mesh: Mesh, heads: int) -> tuple[Strategy, ...]:
    """Return the strategies that fit this mesh; Ulysses needs enough `heads` on a rank."""
    if mesh.cp == 1:
        return ("auto",)
    if mesh.ulysses > 1:
        return ("hybrid",)
    names: tuple[Strategy, ...] = ("ring", "gather", "stream", "ulysses")
    return names if heads >= mesh.cp else names[:-1]


def _kinds(mesh: Mesh, strategy: Strategy) -> tuple[Kind, ...]:
    """Return the sequence layouts that the strategy supports."""
    if mesh.cp == 1:
        return ("zigzag",)
    unknown = {"ring": ("balanced",), "hybrid": ("striped", "balanced")}.get(strategy, ())
    return tuple(kind for kind in get_args(Kind) if kind not in unknown)


def _overlaps(mesh: Mesh, impl: str) -> tuple[Overlap, ...]:
    if mesh.tp == 1:
        return ("bulk",)
    words: tuple[Overlap, ...] = get_args(Overlap)
    return words if impl == "triton" else tuple(w for w in words if w != "fused")


def _without_effect(layout: Layout, rng: random.Random) -> Layout:
    """Return `layout` with random options for axes of one rank, where they must have no effect."""
    mesh = layout.mesh
    if mesh.cp == 1:
        kind, strategy = rng.choice(get_args(Kind)), rng.choice(get_args(Strategy))
        layout = replace(layout, layout=kind, strategy=strategy)
    if mesh.tp == 1:
        overlap, sp = rng.choice(("none", "bulk", "chunked")), rng.random() < 0.5
        layout = replace(layout, overlap=overlap, sequence_parallel=sp)
    return layout if mesh.data > 1 else replace(layout, zero=rng.randrange(4))


def draw(seed: int, impl: str = "torch") -> Layout:
    """Draw the layout of `seed`: 2 to 8 ranks, with a model and a batch that barely fit them."""
    rng = random.Random(seed)
    mesh = rng.choice(list(meshes(rng.choice((2, 3, 4, 5, 6, 6, 8, 8)))))
    sp = mesh.tp > 1 and rng.random() < 0.7
    cut = rng.choice(_kinds(mesh, "hybrid" if mesh.ulysses > 1 else "auto"))
    each = rng.choice((1, 1, 2))  # stages per rank
    count, size = rng.randint(1, mesh.pp + 3), rng.randint(1, 3)
    chunks = 2 if mesh.cp > 1 and cut in ("zigzag", "balanced") else 1
    rows = (n for n in range(1, 24 // mesh.cp + 1) if n * mesh.cp >= 4 and n % chunks == 0)
    local = [n for n in rows if not (sp and size * n % mesh.tp)]
    kv_heads = mesh.tp * rng.randint(1, max(1, 4 // mesh.tp))
    least = -(-mesh.tp * mesh.ulysses // kv_heads)
    heads = kv_heads * rng.randint(least, max(least, 3))
    style = rng.choice(get_args(Style))
    sizes = Sizes(
        samples=mesh.dp * count * size,
        # Most likely does not fill all of the local rows on every rank.
        seq_len=max(rng.choice(local) * mesh.cp - seed % (mesh.cp * chunks), 3),
        vocab=rng.choice(PRIMES),
        layers=mesh.pp * each + rng.randint(0, 2),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=rng.choice((3, 4, 5) if style == "gpt2" else (2, 4, 6)),
        hidden=mesh.tp * rng.randint(2, 9),
        dropout=rng.choice((0.0, 0.1, 0.3)),
        seed=seed,
    )
    layout = Layout(
        mesh, sp, rng.randrange(4) if mesh.data > 1 else 0, "1f1b", style, rng.random() < 0.5,
        rng.choice(get_args(Recompute)),
        rng.choice([s for s in _strategies(mesh, heads // mesh.tp) if cut in _kinds(mesh, s)]),
        cut, rng.choice(_overlaps(mesh, impl)), packed=seed % 3 == 1, count=count, drawn=sizes,
    )  # fmt: skip
    # Draw these last, so that earlier seeds keep all other choices.
    shards = rng.choice(_shardings(mesh, layout.zero))
    every = ((name, FAMILIES[name]) for name in SYNCHRONOUS)
    fits = [n for n, of in every if (of.chunks or 2) == each and of.least(mesh.pp) <= count]
    schedule = rng.choice(fits)
    outer = 2 if seed % 5 == 2 and mesh.world <= 4 else 1
    ordered = outer == 1 and shards is None and schedule in ("gpipe", "1f1b", "interleaved")
    return replace(
        _without_effect(layout, rng),
        mesh=replace(mesh, dp_shard=shards, outer=outer),
        schedule=schedule,
        optimizer={3: "muon", 5: "sgd", 7: "muon"}.get(seed % 8, "adamw"),
        reduce="ordered" if seed % 7 == 4 and ordered else "library",
    )
