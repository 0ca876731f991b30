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
follows the types of one rank's program per stage (`typecheck` beside this file), on any mesh, in
seconds.

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
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import tyro

from warpweave.config import Recompute, ScheduleName
from warpweave.gpt import PRESETS
from warpweave.kernels.runtime.dispatch import choose
from warpweave.launch import join, launch, reported, under_torchrun
from warpweave.parallel.context import Strategy
from warpweave.parallel.layout import Kind
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.tensor.overlap import Overlap
from warpweave.prove.layouts import Layout, Style, draw, table
from warpweave.prove.proof import LIMITS, Errors, prove_layout


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
    ulysses: int = 1
    """Of the context ranks, neighbours that trade rows for heads; a ring goes over the rest."""
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
    """How context ranks attend to one another's tokens."""
    layout: Kind = "zigzag"
    """How cp cuts the sequence."""
    packed: bool = False
    """Each sample is packed from several documents."""
    microbatches: int | None = None
    """Micro-batches per step; by default more than stages, where the samples divide by it."""
    overlap: Overlap = "auto"
    """How messages of tensor ranks and products hide one another; "fused" needs --impl triton."""
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "both"] = "both"
    """What to compute in."""
    impl: Literal["torch", "triton"] = "torch"
    """What computes on the CPU: torch, or (with TRITON_INTERPRET=1 set, a minute for a layout) the
    Triton kernels in Triton's interpreter."""
    timeout: float = 60.0
    """Seconds that any exchange between ranks may take."""
    typecheck: bool = False
    """Run no ranks: check the program's types on a mesh of any size."""
    model: str | None = None
    """With --typecheck: a preset of `warpweave.gpt` instead of the proof's tiny model."""

    def given(self) -> Layout:
        """The layout that the axes give."""
        mesh = Mesh(self.dp, self.cp, self.tp, self.pp, self.ulysses)
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
            self.overlap,
            packed=self.packed,
            count=self.microbatches,
        )

    def layouts(self) -> list[Layout]:
        """The layouts to prove, largest worlds first."""
        if self.model is not None:
            raise ValueError(f"model = {self.model!r} needs --typecheck: a proof trains a tiny one")
        choose(self.impl, torch.empty(0))  # or a line that says what is missing
        if self.overlap == "fused" and self.impl == "torch":
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
            chosen = [draw(self.seed + i, self.impl) for i in range(self.random)]
        elif self.all:
            worlds = range(1, self.world + 1) if self.world <= 4 else (self.world,)
            chosen = [layout for world in worlds for layout in table(world, self.impl)]
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
    from warpweave.prove.typecheck import typecheck

    if config.packed:
        raise ValueError("--packed: types see no documents, prove it with ranks")
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
