"""Show that a layout computes what one plain device computes.

``warpweave prove --all --world 4`` trains a tiny GPT for a few steps on every mesh of 1 to 4 ranks,
times every ZeRO stage, schedule and model style, with real gloo processes. It compares with
`plain_gpt`, a model that shares no code with the rest of the library: the loss of every step, every
gathered gradient, the gradient norm, the losses of an evaluation and the tokens of a text after
every step, and after the last one the weights, as they are gathered and as every rank computes with
them, and the optimizer's moments. Every rank judges what it holds; the worst of all ranks counts.

``warpweave prove --random 50 --seed 1`` does the same for layouts drawn at random, up to 8 ranks
with axes of 3, 5 and 6 and other sizes each time. Layout i is drawn from seed + i alone.

``warpweave prove --typecheck --model llama-70b --dp 32 --cp 4 --tp 8 --pp 8`` needs no ranks: it
follows the types of one rank's program per stage (`warpweave.typecheck`), on any mesh, in seconds.

``TRITON_INTERPRET=1 warpweave prove --dp 2 --tp 2 --impl triton`` proves a layout and the kernels
in one: everything that has a Triton kernel runs it, in the interpreter.

The batch is made to be nasty: numbers of valid tokens differ between ranks, some ranks have none at
all, the vocabulary and the layers do not divide evenly, dropout is on and its token numbers pass
2**32, the learning rate changes, and clipping is active in one step and not in the next.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.distributed as dist
import tyro
from torch import Tensor

from warpweave.config import Recompute, ScheduleName
from warpweave.engine import Engine
from warpweave.gpt import PRESETS, GPTConfig
from warpweave.kernels.runtime.dispatch import choose
from warpweave.launch import join, launch, reported, under_torchrun
from warpweave.layouts import Layout, Sizes, Style, draw, table
from warpweave.parallel.context import Strategy
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.layout import Kind
from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.parallel.shard import ParamRecord
from warpweave.plain_gpt import (
    PlainConfig,
    plain_adamw_step,
    plain_gpt_logits,
    plain_gpt_loss,
    plain_init,
    plain_shapes,
)

STEPS = 3
# eps of the gradients' size: an update is not the mere sign of a gradient that rounding may turn.
ADAMW = {"eps": 1e-2, "weight_decay": 0.1}
CLIP = 1.2
RATES = (0.01, 0.004, 0.02)  # the learning rate of each step
KEY = 3 << 32  # of the first step's dropout: both words of the key count
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# Largest relative error allowed: float64 leaves no room for anything but the order of sums. For low
# dtypes, how many times the error that the plain model has there on one device.
LIMITS = {"fp64": 1e-11, "fp32": 5e-5, "bf16": 8.0, "fp16": 8.0}


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of a layout, and what the largest of them was of.

    `evaluation` is that of losses without training; `token` is by how much, of their range, the
    plain logit of a generated token is below the largest: 0 for the one that the plain model takes.
    """

    loss: float
    grad: float
    norm: float
    weight: float
    moment: float
    evaluation: float
    token: float
    where: str

    @property
    def each(self) -> dict[str, float]:
        """The errors by name."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "where"}

    @property
    def worst(self) -> float:
        """The largest of all; NaN is as wrong as can be, and `max` would pass over it."""
        return max(e if e == e else float("inf") for e in self.each.values())


@lru_cache(maxsize=8)
def batch(sizes: Sizes, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens and labels [samples, seq_len] of a step, with holes where ranks have nothing to do.

    The third are the samples' numbers. Steps from STEPS on are those of evaluations.
    """
    n, length = sizes.samples, sizes.seq_len
    generator = torch.Generator().manual_seed(1000 * (1 + sizes.seed) + step)
    tokens = torch.randint(0, sizes.vocab, (n, length), generator=generator)
    labels = torch.randint(0, sizes.vocab, (n, length), generator=generator)
    drop = torch.rand(n, length, generator=generator)
    labels[drop < torch.linspace(0.0, 0.8, n)[:, None]] = -100
    quarter = -(-length // 4)
    if step % 3 == 0:  # the second of four data ranks has no loss
        labels[n // 4 : n // 2] = -100
    elif step % 3 == 1:  # what the first of two (or four) zigzag context ranks holds has no loss
        labels[:, :quarter] = -100
        labels[:, length - quarter :] = -100
    else:  # likewise contiguous halves, and one whole half of the samples
        labels[:, length // 2 :] = -100
        labels[-(-n // 2) :] = -100
    first = 2**32 // length - n  # so that the second step's tokens have numbers beyond 32 bits
    return tokens, labels, first + step * n + torch.arange(n)


def prompt(sizes: Sizes, step: int) -> Tensor:
    """The beginning of the text that is generated after a step: one token, half a window, more."""
    generator = torch.Generator().manual_seed(sizes.seed + step)
    length = (1, sizes.seq_len // 2, sizes.seq_len + 1)[step]
    return torch.randint(0, sizes.vocab, (length,), generator=generator)


@dataclass(frozen=True)
class Truth:
    """What the plain model computes: its sizes, and every value under the words that name it."""

    config: PlainConfig
    values: dict[str, Tensor]

    def logits(self, tokens: Tensor, step: int) -> Tensor:
        """The logits [V] of the token after `tokens`, with the weights after `step`."""
        params = {name: self.values[f"{name} after step {step}"] for name in self.names}
        window = tokens[None, -self.config.seq_len :]
        return plain_gpt_logits(params, window, self.config, dropout=0.0)[0, -1]

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return list(plain_shapes(self.config))


@lru_cache(maxsize=32)
def truth(config: GPTConfig, sizes: Sizes, dtype: torch.dtype = torch.float64) -> Truth:
    """Train the plain model on one device for STEPS steps.

    In float64 it is the truth; in a low `dtype`, with masters in float32, it shows how far off one
    plain device is.
    """
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
    wide = torch.promote_types(dtype, torch.float32)
    masters = plain_init(plain, sizes.seed, wide)
    moments: dict[str, dict[str, Tensor]] = {}
    values: dict[str, Tensor] = {}
    for step in range(STEPS):
        tokens, labels, ids = batch(sizes, step)
        params = {name: p.to(dtype, copy=True).requires_grad_() for name, p in masters.items()}
        total, valid = plain_gpt_loss(
            params, tokens, labels, plain, seed=KEY + step, sample_ids=ids
        )
        loss = total / max(valid, 1)
        grads = {
            name: grad.to(wide)
            for name, grad in zip(params, torch.autograd.grad(loss, list(params.values())))
        }
        values[f"loss of step {step}"] = loss.detach()
        values |= {f"gradient of {name} at step {step}": grad for name, grad in grads.items()}
        masters = {name: p.clone() for name, p in masters.items()}
        values[f"norm of step {step}"] = plain_adamw_step(
            masters, grads, moments, step + 1, lr=RATES[step], clip=CLIP, **ADAMW
        )
        values |= {f"{name} after step {step}": p for name, p in masters.items()}
        tokens, labels, _ = batch(sizes, STEPS + step)
        params = {name: p.to(dtype) for name, p in masters.items()}
        total, valid = plain_gpt_loss(params, tokens, labels, plain, dropout=0.0)
        values[f"evaluation after step {step}"] = total / max(valid, 1)
    for name, moment in moments.items():
        values[f"exp_avg of {name}"], values[f"exp_avg_sq of {name}"] = moment["m"], moment["v"]
    return Truth(plain, values)


def _relative(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected|; infinite for other shapes or NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    error = difference / scale if scale else difference
    return error if error == error else float("inf")


class _Comparison:
    """This rank's largest error of each kind, and what the largest of all was of.

    In a low dtype errors are counted in those of the plain model in that dtype.
    """

    def __init__(self, layout: Layout) -> None:
        dtype = DTYPES[layout.dtype]
        self.expected = truth(layout.model, layout.sizes)
        self.low = truth(layout.model, layout.sizes, dtype) if dtype.itemsize < 4 else None
        self.eps = torch.finfo(dtype).eps
        self.errors: dict[str, float] = {}
        self.where = ""

    def add(self, kind: str, what: str, error: float) -> None:
        """Count an error in."""
        if error > max(self.errors.values(), default=0.0):
            self.where = what
        self.errors[kind] = max(error, self.errors.get(kind, 0.0))

    def tensor(
        self, kind: str, what: str, actual: Tensor, cut: Callable[[Tensor], Tensor] = lambda t: t
    ) -> None:
        """Compare `actual` with the (cut of the) value whose words are `what`."""
        expected = cut(self.expected.values[what])
        error = _relative(actual, expected)
        if self.low is not None:
            plain = _relative(cut(self.low.values[what]), expected)
            error = error / (plain + self.eps) if math.isfinite(plain) else float("inf")
        self.add(kind, what, error)

    def text(self, text: Tensor, start: Tensor, step: int, new: int) -> None:
        """By how much of their range the plain logits of the `new` tokens after `start` are low."""
        if len(text) != len(start) + new or not torch.equal(text[: len(start)], start):
            self.add("token", f"text after step {step}", float("inf"))
            return
        for at in range(len(start), len(text)):
            logits = self.expected.logits(text[:at], step)
            best, least = logits.max(), logits.min()
            error = float((best - logits[text[at]]) / (best - least))
            self.add("token", f"text after step {step}", error / (self.eps if self.low else 1.0))


def prove_layout(layout: Layout, mesh: ConnectedMesh, timeout: float = 60.0) -> Errors:
    """Train under `layout` and measure its errors; collective, the same result on every rank.

    The result is the worst of all ranks'; `where` names the rank that has the largest error.
    """
    sizes = layout.sizes
    engine = Engine(
        layout.model,
        mesh,
        layout.plan,
        micro_batch_size=layout.micro_batch_size,
        dtype=DTYPES[layout.dtype],
        seed=sizes.seed,
        rule=AdamW(**ADAMW, impl=layout.impl),
        clip=CLIP,
        impl=layout.impl,
        timeout=timeout,
    )
    found = _Comparison(layout)
    shape = (layout.mesh.dp, layout.microbatches, layout.micro_batch_size)
    owners = dict.fromkeys(found.expected.names, 0)  # ranks that say a tensor is theirs to write

    def mine(step: int) -> list[Tensor]:
        """This replica's part of a batch, by micro-batches."""
        return [x.unflatten(0, shape)[mesh.index("dp")] for x in batch(sizes, step)]

    def read(kind: str, state: str, what: str, scale: float = 1.0) -> None:
        for record, tensor, owned in engine.read(state):
            owners[record.name] += owned
            found.tensor(kind, what.format(record.name), tensor / scale)

    scaler = engine.optimizer.loss_scale
    if scaler is not None:
        scaler.value.fill_(256.0)  # a step that overflowed would be skipped
    for step in range(STEPS):
        tokens, labels, ids = mine(step)
        scale = 1.0 if scaler is None else float(scaler.value)  # its gradients keep it
        result = engine.step(tokens, labels, ids, lr=RATES[step], key=KEY + step)
        found.tensor("loss", f"loss of step {step}", result.loss)
        found.tensor("norm", f"norm of step {step}", result.norm)
        read("grad", "grad", f"gradient of {{}} at step {step}", scale)
        tokens, labels, _ = mine(STEPS + step)
        loss = engine.evaluate(tokens, labels)
        found.tensor("evaluation", f"evaluation after step {step}", loss)
        new = 1 + step // 2  # the last text goes on from its own token
        start = prompt(sizes, step)
        found.text(engine.generate(start, new, temperature=0.0), start, step, new)
    after = f"{{}} after step {STEPS - 1}"
    read("weight", "param", after)
    read("moment", "exp_avg", "exp_avg of {}")
    read("moment", "exp_avg_sq", "exp_avg_sq of {}")
    for unit in engine.units:  # what this very rank computes with, padding included
        unit.parameters.unshard()
        unit.parameters.wait()
        for record, param in unit.params:

            def own(full: Tensor, record: ParamRecord = record) -> Tensor:
                return record.slice(full, mesh.coords)

            found.tensor("weight", after.format(record.name), param.detach(), own)
        unit.parameters.reshard()
    counts = torch.tensor(list(owners.values()))
    if mesh.group("world") is not None:
        dist.all_reduce(counts)
    for name, count in zip(owners, counts.tolist(), strict=True):
        if count != STEPS + 3:  # lost in a checkpoint, or written twice
            found.add("weight", f"{name} read {count} times, not {STEPS + 3},", float("inf"))
    kinds = (field.name for field in dataclasses.fields(Errors) if field.name != "where")
    errors = {kind: found.errors.get(kind, float("inf")) for kind in kinds}  # inf: never compared
    return _worst_rank(Errors(**errors, where=found.where), mesh)


def _worst_rank(own: Errors, mesh: ConnectedMesh) -> Errors:
    """Every error at its largest over all ranks, and the words of the rank with the largest."""
    ranks = [own]
    if mesh.group("world") is not None:
        sent = torch.zeros(1024, dtype=torch.uint8)  # as bytes: no objects travel between ranks
        text = json.dumps(dataclasses.asdict(own)).encode()
        sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = [torch.empty_like(sent) for _ in range(mesh.size("world"))]
        dist.all_gather(every, sent)
        ranks = [Errors(**json.loads(bytes(t.tolist()).rstrip(b"\0"))) for t in every]
    rank = max(range(len(ranks)), key=lambda r: ranks[r].worst)
    largest = {kind: max(errors.each[kind] for errors in ranks) for kind in own.each}
    return Errors(**largest, where=f"{ranks[rank].where} on {mesh.sizes.describe(rank)}")


@dataclass(frozen=True)
class ProveConfig:
    """Which layouts to prove."""

    all: bool = False
    """Every mesh of 1 to `world` ranks instead of the one given by the axes; above four, those of
    exactly `world` ranks that use the most axes (8: 2 x 2 x 2)."""
    world: int = 4
    """With --all: number of ranks."""
    random: int = 0
    """This many layouts drawn at random instead, with sizes of their own."""
    seed: int = 0
    """With --random: layout i is drawn from seed + i."""
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
    schedule: ScheduleName = "1f1b"
    """Order of the micro-batches in a pipeline."""
    sequence_parallel: bool = True
    """With tp > 1, cut the residual stream's tokens over the tensor ranks."""
    style: Style = "gpt2"
    """Learned positions, LayerNorm, GELU and biases; or rotary, RMSNorm, SwiGLU and GQA; or rotary,
    LayerNorm, SwiGLU, GQA and biases."""
    tied: bool = True
    """The head's weight is the embedding's."""
    recompute: Recompute = "none"
    """Activation checkpointing."""
    strategy: Strategy = "auto"
    """How keys and values reach the other context ranks."""
    layout: Kind = "zigzag"
    """How cp cuts the sequence."""
    microbatches: int | None = None
    """Micro-batches per step; by default more than stages, where the samples divide by it."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "both"] = "both"
    """What to compute in."""
    impl: Literal["torch", "triton"] = "torch"
    """What computes on the CPU: torch, or (with TRITON_INTERPRET=1 set, a minute for a layout) the
    Triton kernels in Triton's interpreter."""
    timeout: float = 60.0
    """Seconds that any exchange between ranks may take."""
    typecheck: bool = False
    """Run no ranks: check the program's types on a mesh of any size (`warpweave.typecheck`)."""
    model: str | None = None
    """With --typecheck: a preset of `warpweave.gpt` instead of the proof's tiny model."""

    def given(self) -> Layout:
        """The layout that the axes give."""
        mesh = Mesh(dp=self.dp, tp=self.tp, cp=self.cp, pp=self.pp)
        return Layout(
            mesh,
            self.sequence_parallel and mesh.tp > 1,
            self.zero,
            self.schedule,
            self.style,
            self.tied,
            self.recompute,
            self.strategy,
            self.layout,
            count=self.microbatches,
        )

    def layouts(self) -> list[Layout]:
        """The layouts to prove, largest worlds first."""
        if self.model is not None:
            raise ValueError(f"model = {self.model!r} needs --typecheck: a proof trains a tiny one")
        choose(self.impl, torch.empty(0))  # or a line that says what is missing
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
            chosen = [draw(self.seed + i) for i in range(self.random)]
        elif self.all:
            worlds = range(1, self.world + 1) if self.world <= 4 else (self.world,)
            chosen = [layout for world in worlds for layout in table(world)]
        dtypes = ("fp64", "fp32") if self.dtype == "both" else (self.dtype,)
        every = [
            dataclasses.replace(layout, dtype=d, impl=self.impl)
            for layout in chosen
            for d in dtypes
        ]
        for layout in every:
            layout.model.check(layout.mesh, layout.plan)
        return sorted(every, key=lambda layout: -layout.mesh.world)


def prove_rank(layouts: list[Layout], timeout: float, path: str, port: int | None = None) -> None:
    """Prove `layouts`, largest worlds first, as one rank of the first; rank 0 writes to `path`.

    One line of JSON for each layout as soon as it is proven. A rank that the rest of the layouts
    are too small for has done its part.
    """
    session = join(layouts[0].mesh, timeout=timeout, backend="gloo", port=port)
    torch.set_num_threads(1)
    with reported(session) if session.store is not None else nullcontext():
        for number, layout in enumerate(layouts):
            if session.rank >= layout.mesh.world:
                break
            if number:
                session.renew(layout.mesh)
            session.beat(number, str(layout))
            mesh = layout.mesh.connect()
            errors = prove_layout(layout, mesh, timeout)
            if session.rank == 0:
                with open(path, "a") as file:
                    row = {"layout": str(layout), "errors": dataclasses.asdict(errors)}
                    file.write(json.dumps(row) + "\n")
                found = "  ".join(f"{kind} {error:.1e}" for kind, error in errors.each.items())
                words = "ok"
                if not errors.worst <= LIMITS[layout.dtype]:
                    words = f"WRONG: {errors.where}; again: {layout.command}"
                print(f"[{number + 1}/{len(layouts)}] {layout}  {found}  {words}", flush=True)
        session.close()


def judge(layouts: Sequence[Layout], lines: Sequence[str]) -> dict:
    """The summary of what rank 0 wrote: passed if every layout has its line, within its limit.

    A line that is missing, cut short, of another layout or one too many is wrong.
    """
    worst: dict[str, float] = {}
    right = 0
    for layout, line in zip(layouts, lines):
        if not line.endswith("\n"):
            break
        row = json.loads(line)
        error = Errors(**row["errors"]).worst
        worst[layout.dtype] = max(error, worst.get(layout.dtype, 0.0))
        right += row["layout"] == str(layout) and error <= LIMITS[layout.dtype]
    finite = {dtype: e if math.isfinite(e) else None for dtype, e in worst.items()}  # for JSON
    return {
        "layouts": len(layouts),
        "right": right,
        "worst": next(iter(finite.values()), None),
        "worst_by_dtype": finite,
        "limits": {dtype: LIMITS[dtype] for dtype in worst},
        "passed": right == len(layouts) == len(lines) > 0,
    }


def _typecheck(config: ProveConfig) -> None:
    """The command ``warpweave prove --typecheck``."""
    from warpweave.typecheck import typecheck

    layout = config.given()
    mesh, model = layout.mesh, layout.model
    if config.model is not None:
        if config.model not in PRESETS:
            raise ValueError(f"model must be one of {', '.join(PRESETS)}, got {config.model!r}")
        model = dataclasses.replace(PRESETS[config.model], dropout=model.dropout)
    began, stage, problem = time.perf_counter(), 0, None
    try:
        for stage in range(mesh.pp):
            only = range(stage, stage + 1)
            typecheck(
                model,
                mesh,
                stages=only,
                sequence_parallel=layout.sequence_parallel,
                recompute=layout.recompute,
                layout=layout.layout,
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
    """The command ``warpweave prove``: exits with 0 if everything was proven, else with 1.

    2 is for layouts that cannot be. Whatever ends the ranks, the last line says what was proven.
    """
    config = tyro.cli(ProveConfig, prog="warpweave prove", description=__doc__, args=argv)
    try:
        if config.typecheck:
            _typecheck(config)
        layouts = config.layouts()
    except (ValueError, ImportError) as error:
        print(f"warpweave: {error}", file=sys.stderr)
        sys.exit(2)
    if under_torchrun():
        print("warpweave: prove starts its own ranks, run it without torchrun", file=sys.stderr)
        sys.exit(2)
    began, world = time.perf_counter(), layouts[0].mesh.world
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        try:
            if world == 1:
                prove_rank(layouts, config.timeout, file.name)
            else:
                launch(prove_rank, (layouts, config.timeout, file.name), Mesh(dp=world))
        finally:  # a rank that died has its own exit code, and what is missing is not proven
            summary = judge(layouts, file.readlines())
            summary["seconds"] = round(time.perf_counter() - began, 1)
            print(json.dumps(summary))
    sys.exit(0 if summary["passed"] else 1)


if __name__ == "__main__":
    main()
