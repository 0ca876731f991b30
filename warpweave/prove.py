"""Show that a layout computes what one plain device computes.

``warpweave prove --all --world 4`` trains a tiny GPT for a few steps on every mesh of 1, 2 and 4
ranks, times every ZeRO stage, schedule and model style, with real gloo processes, and compares the
loss of every step, every gathered gradient, the gradient norm and the weights after the last step
with `plain_gpt`, a model that shares no code with the rest of the library.

``warpweave prove --typecheck --model llama-70b --dp 32 --cp 4 --tp 8 --pp 8`` needs no ranks: it
follows the types of one rank's program per stage (`warpweave.typecheck`), on any mesh, in seconds.

``TRITON_INTERPRET=1 warpweave prove --dp 2 --tp 2 --impl triton`` proves a layout and the kernels
in one: everything that has a Triton kernel runs it, in the interpreter.

The batch is made to be nasty: numbers of valid tokens differ between ranks, some ranks have none at
all, the vocabulary and the layers do not divide evenly, dropout is on and clipping is active.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from warpweave.engine import Engine
from warpweave.gpt import PRESETS, GPTConfig
from warpweave.kernels.dispatch import choose
from warpweave.launch import join, launch, reported, under_torchrun
from warpweave.parallel.context import Strategy
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.plain_gpt import PlainConfig, plain_adamw_step, plain_gpt_loss, plain_init

SAMPLES, SEQ_LEN, VOCAB, STEPS, SEED = 8, 16, 37, 3, 5
ADAMW = {"eps": 1e-4, "weight_decay": 0.1}
CLIP, LR, DROPOUT = 0.5, 0.01, 0.1
DTYPES = {"fp64": torch.float64, "fp32": torch.float32}
# Largest relative error allowed. float64 leaves no room for anything but the order of sums.
LIMITS = {"fp64": 1e-11, "fp32": 5e-5}


@dataclass(frozen=True)
class Layout:
    """One way to train: a mesh and everything that must not change the numbers."""

    mesh: Mesh
    sequence_parallel: bool = False
    zero: int = 0
    schedule: str = "1f1b"
    style: str = "gpt2"
    tied: bool = True
    recompute: str = "none"
    strategy: Strategy = "auto"
    layout: str = "zigzag"
    dtype: str = "fp64"
    impl: str = "torch"

    def __str__(self) -> str:
        m = self.mesh
        axes = " ".join(f"{a}={getattr(m, a)}" for a in ("dp", "tp", "cp", "pp"))
        sp = "sp" if self.sequence_parallel else "--"
        tied = "tied" if self.tied else "untied"
        return (
            f"{axes} {sp} zero={self.zero} {self.schedule:5} {self.style:5} {tied:6} "
            f"{self.recompute:9} {self.strategy:6} {self.layout:10} "
            f"{self.dtype} {self.impl}"
        )


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of a layout; `where` names the worst gradient or weight."""

    loss: float
    grad: float
    norm: float
    weight: float
    where: str

    @property
    def worst(self) -> float:
        """The largest of the four."""
        return max(self.loss, self.grad, self.norm, self.weight)


def model_config(layout: Layout) -> GPTConfig:
    """The tiny model: prime vocabulary, layers that do not divide by the stages."""
    pp = layout.mesh.pp
    common = {
        "vocab_size": VOCAB,
        "seq_len": SEQ_LEN,
        "layers": pp + 1 if pp > 1 else 2,
        "width": 32,
        "heads": 8,
        "hidden": 40,
        "tied": layout.tied,
        "dropout": DROPOUT,
    }
    if layout.style == "gpt2":
        return GPTConfig(**common)
    return GPTConfig(
        **common,
        kv_heads=max(2, layout.mesh.tp),
        positions="rope",
        norm="rms",
        activation="swiglu",
        bias=False,
    )


@lru_cache(maxsize=8)
def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [SAMPLES, SEQ_LEN] of a step, with holes where ranks have nothing to do."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (SAMPLES, SEQ_LEN), generator=generator)
    labels = torch.randint(0, VOCAB, (SAMPLES, SEQ_LEN), generator=generator)
    drop = torch.rand(SAMPLES, SEQ_LEN, generator=generator)
    labels[drop < torch.linspace(0.0, 0.8, SAMPLES)[:, None]] = -100
    chunk = SEQ_LEN // 8
    if step == 0:  # samples 2 and 3 have no loss: the second of four data ranks has none
        labels[2:4] = -100
    elif step == 1:  # what the first of two (or four) zigzag context ranks holds has no loss
        labels[:, : 2 * chunk] = -100
        labels[:, 6 * chunk :] = -100
    else:  # likewise contiguous halves, and one whole half of the samples
        labels[:, 4 * chunk :] = -100
        labels[4:] = -100
    return tokens, labels


@dataclass(frozen=True)
class Truth:
    """What the plain model computes, in float64."""

    losses: list[float]
    norms: list[float]
    grads: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


@lru_cache(maxsize=16)
def truth(config: GPTConfig) -> Truth:
    """Train the plain model on one device for STEPS steps in float64."""
    plain = PlainConfig(
        vocab_size=config.vocab_size,
        seq_len=config.seq_len,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        kv_heads=config.num_kv_heads,
        hidden=config.num_hidden,
        positions=config.positions,
        norm=config.norm,
        act=config.activation,
        bias=config.bias,
        tied=config.tied,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        dropout=config.dropout,
    )
    params = plain_init(plain, SEED, torch.float64)
    state: dict[str, dict[str, Tensor]] = {}
    losses, norms, history = [], [], []
    for step in range(STEPS):
        tokens, labels = batch(step)
        for param in params.values():
            param.requires_grad_()
        total, valid = plain_gpt_loss(
            params,
            tokens,
            labels,
            plain,
            seed=step,
            sample_ids=torch.arange(step * SAMPLES, (step + 1) * SAMPLES),
        )
        loss = total / valid
        grads = dict(zip(params, torch.autograd.grad(loss, list(params.values()))))
        params = {name: p.detach() for name, p in params.items()}
        norm = plain_adamw_step(params, grads, state, step + 1, lr=LR, clip=CLIP, **ADAMW)
        losses.append(loss.item())
        norms.append(float(norm))
        history.append(grads)
    return Truth(losses, norms, history, params)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected|; infinite for other shapes or NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    error = difference / scale if scale else difference
    return error if error == error else float("inf")


def _ratio(actual: float, expected: float) -> float:
    """|actual / expected - 1|, infinite for NaN, which `max` would pass over."""
    error = abs(actual / expected - 1)
    return error if error == error else float("inf")


def prove_layout(layout: Layout, mesh: ConnectedMesh, timeout: float = 60.0) -> Errors:
    """Train under `layout` and measure its errors; collective, the same result on every rank."""
    config = model_config(layout)
    expected = truth(config)
    dp = layout.mesh.dp
    microbatches = min(2, SAMPLES // dp)
    engine = Engine(
        config,
        mesh,
        microbatches=microbatches,
        micro_batch_size=SAMPLES // dp // microbatches,
        zero=layout.zero,
        schedule=layout.schedule,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        strategy=layout.strategy,
        layout=layout.layout,
        dtype=DTYPES[layout.dtype],
        seed=SEED,
        clip=CLIP,
        impl=layout.impl,
        timeout=timeout,
        **ADAMW,
    )
    shape = (dp, microbatches, -1)
    mine = mesh.index("dp")
    loss = grad = norm = weight = 0.0
    where = ""
    for step in range(STEPS):
        tokens, labels = (x.view(*shape, SEQ_LEN)[mine] for x in batch(step))
        ids = torch.arange(step * SAMPLES, (step + 1) * SAMPLES).view(shape)[mine]
        result = engine.step(tokens, labels, ids, lr=None, key=step)
        loss = max(loss, _ratio(float(result.loss), expected.losses[step]))
        norm = max(norm, _ratio(float(result.norm), expected.norms[step]))
        for record, tensor, _ in engine.read("grad"):
            error = _relative(tensor, expected.grads[step][record.name])
            if error > grad:
                grad, where = error, f"gradient of {record.name} at step {step}"
        engine.optimizer.step(LR)
    for record, tensor, _ in engine.read("param"):
        error = _relative(tensor, expected.weights[record.name])
        if error > max(weight, grad):
            where = f"{record.name} after step {STEPS - 1}"
        weight = max(weight, error)
    errors = torch.tensor([loss, grad, norm, weight], dtype=torch.float64)
    if mesh.group("world") is not None:
        dist.all_reduce(errors, dist.ReduceOp.MAX)
    loss, grad, norm, weight = (e if e == e else float("inf") for e in errors.tolist())
    return Errors(loss, grad, norm, weight, where)


def meshes(world: int) -> Iterator[Mesh]:
    """Every mesh of `world` ranks."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    for dp, tp, cp, pp in itertools.product(sizes, repeat=4):
        if dp * tp * cp * pp == world:
            yield Mesh(dp=dp, tp=tp, cp=cp, pp=pp)


def _misfits(mesh: Mesh) -> list[str]:
    """What of the tiny model cannot be cut over `mesh`."""
    cuts = (
        ("samples", SAMPLES, "dp", mesh.dp),
        ("tokens", SEQ_LEN, "2 * cp", 2 * mesh.cp),
        ("heads", 8, "tp", mesh.tp),
    )
    return [f"{n} {what} over {axis} = {parts}" for what, n, axis, parts in cuts if n % parts]


def table(world: int, *, min_axes: int = 0) -> list[Layout]:
    """Every legal layout of exactly `world` ranks.

    Mesh x SP x ZeRO x schedule x context strategy x style x tie, where a choice makes a difference:
    SP needs tensor ranks, ZeRO data ranks, a strategy context ranks. Recomputation and the ways
    to cut the sequence take turns.
    `min_axes` keeps the meshes that have at least so many axes above 1.
    """
    layouts: list[Layout] = []
    for mesh in meshes(world):
        axes = sum(getattr(mesh, a) > 1 for a in ("dp", "tp", "cp", "pp"))
        if _misfits(mesh) or axes < min_axes:
            continue
        for sp, zero, schedule, strategy, style, tied in itertools.product(
            (False, True) if mesh.tp > 1 else (False,),
            range(4) if mesh.data > 1 else (0,),
            ("gpipe", "1f1b"),
            ("ring", "gather") if mesh.cp > 1 else ("auto",),
            ("gpt2", "llama"),
            (True, False),
        ):
            recompute = ("none", "selective", "full")[len(layouts) % 3]
            turn = len(layouts) // 3 % 3 if mesh.cp > 1 else 0
            cut = ("zigzag", "striped", "contiguous")[turn]
            layouts.append(
                Layout(
                    mesh, sp, zero, schedule, style, tied, recompute, cast(Strategy, strategy), cut
                )
            )
    return layouts


@dataclass(frozen=True)
class ProveConfig:
    """Which layouts to prove."""

    all: bool = False
    """Every mesh of up to `world` ranks instead of the one given by the axes."""
    world: int = 4
    """With --all: largest number of ranks. 8 proves the meshes that use three or four axes."""
    dp: int = 1
    """Data-parallel replicas."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over dp x cp."""
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    """Order of the micro-batches in a pipeline."""
    sequence_parallel: bool = True
    """With tp > 1, cut the residual stream's tokens over the tensor ranks."""
    style: Literal["gpt2", "llama"] = "gpt2"
    """Learned positions, LayerNorm, GELU and biases; or rotary, RMSNorm, SwiGLU and GQA."""
    tied: bool = True
    """The head's weight is the embedding's."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing."""
    strategy: Literal["auto", "ring", "gather"] = "auto"
    """How keys and values reach the other context ranks."""
    layout: Literal["zigzag", "contiguous", "striped"] = "zigzag"
    """How cp cuts the sequence."""
    dtype: Literal["fp64", "fp32", "both"] = "both"
    """What to compute in."""
    impl: Literal["torch", "triton"] = "torch"
    """What computes on the CPU: torch, or (with TRITON_INTERPRET=1 set, half a minute for a layout)
    the Triton kernels in Triton's interpreter."""
    timeout: float = 60.0
    """Seconds that any exchange between ranks may take."""
    typecheck: bool = False
    """Run no ranks: check the program's types on a mesh of any size (`warpweave.typecheck`)."""
    model: str | None = None
    """With --typecheck: a preset of `warpweave.gpt` instead of the proof's tiny model."""

    def layouts(self) -> list[Layout]:
        """The layouts to prove, smallest worlds first."""
        if self.model is not None:
            raise ValueError(f"model = {self.model!r} needs --typecheck: a proof trains a tiny one")
        choose(self.impl, torch.empty(0))  # or a line that says what is missing
        if self.all:
            worlds = [w for w in (1, 2, 4) if w <= self.world]
            chosen = [layout for w in worlds for layout in table(w)] if self.world <= 4 else []
            if self.world > 4:
                chosen = table(self.world, min_axes=3)
        else:
            mesh = Mesh(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp)
            sp = self.sequence_parallel and mesh.tp > 1
            chosen = [
                Layout(
                    mesh,
                    sp,
                    self.zero,
                    self.schedule,
                    self.style,
                    self.tied,
                    self.recompute,
                    self.strategy,
                    self.layout,
                )
            ]
            if misfits := _misfits(mesh):
                raise ValueError(f"the proof's model does not divide: {', '.join(misfits)}")
        dtypes = ("fp64", "fp32") if self.dtype == "both" else (self.dtype,)
        return [
            dataclasses.replace(layout, dtype=d, impl=self.impl)
            for layout in chosen
            for d in dtypes
        ]


def prove_rank(layouts: list[Layout], timeout: float, path: str, port: int | None = None) -> None:
    """Prove `layouts`, all of one world size, as one rank; rank 0 writes the errors to `path`."""
    world = layouts[0].mesh.world
    session = join(Mesh(dp=world), timeout=timeout, backend="gloo", port=port)
    torch.set_num_threads(1)
    rows = []
    with reported(session):
        for number, layout in enumerate(layouts):
            session.beat(number, str(layout))
            if number:
                session.renew()
            mesh = layout.mesh.connect()
            errors = prove_layout(layout, mesh, timeout)
            rows.append(dataclasses.asdict(errors))
            if session.rank == 0:
                ok = "ok" if errors.worst <= LIMITS[layout.dtype] else f"WRONG: {errors.where}"
                print(
                    f"[{number + 1}/{len(layouts)}] {layout}  "
                    f"loss {errors.loss:.1e}  grads {errors.grad:.1e}  "
                    f"norm {errors.norm:.1e}  weights {errors.weight:.1e}  {ok}",
                    flush=True,
                )
        if session.rank == 0:
            with open(path, "w") as file:
                json.dump(rows, file)
        session.close()


def _typecheck(config: ProveConfig) -> None:
    """The command ``warpweave prove --typecheck``."""
    from warpweave.typecheck import typecheck

    mesh = Mesh(dp=config.dp, tp=config.tp, cp=config.cp, pp=config.pp)
    sp = config.sequence_parallel and mesh.tp > 1
    if config.model is not None:
        if config.model not in PRESETS:
            raise ValueError(f"model must be one of {', '.join(PRESETS)}, got {config.model!r}")
        model = dataclasses.replace(PRESETS[config.model], dropout=DROPOUT)
    else:  # grown until every axis divides it: sizes cost nothing here
        tiny = model_config(Layout(Mesh(pp=mesh.pp), style=config.style, tied=config.tied))
        model = dataclasses.replace(
            tiny,
            seq_len=SEQ_LEN * mesh.cp * mesh.tp,
            width=tiny.width * mesh.tp,
            heads=tiny.heads * mesh.tp,
            kv_heads=tiny.num_kv_heads * mesh.tp,
            hidden=tiny.num_hidden * mesh.tp,
        )
    began, stage, problem = time.perf_counter(), 0, None
    try:
        for stage in range(mesh.pp):
            only = range(stage, stage + 1)
            typecheck(
                model,
                mesh,
                stages=only,
                sequence_parallel=sp,
                recompute=config.recompute,
                layout=config.layout,
            )
            print(f"stage {stage} of {mesh.pp}: ok", flush=True)
    except TypeError as error:
        problem = str(error)
    summary = {
        "typechecked": mesh.pp if problem is None else stage,
        "ranks": mesh.world,
        "seconds": round(time.perf_counter() - began, 1),
        "passed": problem is None,
    }
    print(json.dumps(summary if problem is None else summary | {"error": problem}))
    sys.exit(0 if problem is None else 1)


def main(argv: list[str] | None = None) -> None:
    """The command ``warpweave prove``."""
    import tempfile

    config = tyro.cli(ProveConfig, prog="warpweave prove", description=__doc__, args=argv)
    try:
        if config.typecheck:
            _typecheck(config)
        layouts = config.layouts()
        for layout in layouts:
            model_config(layout).check(layout.mesh)
    except (ValueError, ImportError) as error:
        print(f"warpweave: {error}", file=sys.stderr)
        sys.exit(2)
    if under_torchrun():
        print("warpweave: prove starts its own ranks, run it without torchrun", file=sys.stderr)
        sys.exit(2)
    began = time.perf_counter()
    results: list[tuple[Layout, float]] = []
    for world in sorted({layout.mesh.world for layout in layouts}):
        chosen = [layout for layout in layouts if layout.mesh.world == world]
        with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
            if world == 1:
                prove_rank(chosen, config.timeout, file.name)
            else:
                launch(prove_rank, (chosen, config.timeout, file.name), Mesh(dp=world))
            rows = json.load(file)
        results += [
            (layout, max(row[k] for k in ("loss", "grad", "norm", "weight")))
            for layout, row in zip(chosen, rows, strict=True)
        ]
    worst = {
        dtype: max((error for layout, error in results if layout.dtype == dtype), default=None)
        for dtype in DTYPES
    }
    passed = all(error <= LIMITS[layout.dtype] for layout, error in results)
    summary = {
        "layouts": len(results),
        "worst": worst["fp64"] if worst["fp64"] is not None else worst["fp32"],
        "worst_by_dtype": {k: v for k, v in worst.items() if v is not None},
        "limits": {k: LIMITS[k] for k, v in worst.items() if v is not None},
        "seconds": round(time.perf_counter() - began, 1),
        "passed": passed,
    }
    print(json.dumps(summary))
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
