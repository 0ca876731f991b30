"""Every schedule that `torch.distributed.pipelining` also has, on two gloo ranks, versus torch's.

Both run the same stages of our GPT (untied) with eight micro-batches, and end the step in the same
way: one global gradient norm over the stages, clipping, AdamW (torch's fused one on torch's side).
torch's schedules may discard their outputs, and are configured not to rescale gradients: as in
ours, the loss is divided by the number of tokens of the whole batch.

If a schedule splits the backward into gradients of inputs and of weights, torch runs the backward
of a custom autograd Function twice (pytorch#174017). `backward_calls` counts those of the linear
layers per micro-batch, on both sides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import (
    Report,
    assert_equal,
    header,
    interleave,
    parser,
    results_folder,
    run_ranks,
    torch_adamw,
)
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from warpweave.layers.context import TokenContext
from warpweave.model.config import ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT, GPTConfig
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.mesh import ConnectedMesh, Mesh

CLAIM = (
    "On 2 gloo ranks, each of our schedules takes no longer than torch.distributed.pipelining's."
)
WORLD, MICROBATCHES = 2, 8
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4
# Our name -> (stages per rank, torch's class)
SCHEDULES = {
    "gpipe": (1, schedules.ScheduleGPipe),
    "1f1b": (1, schedules.Schedule1F1B),
    "interleaved": (2, schedules.ScheduleInterleaved1F1B),
    "looped-bfs": (2, schedules.ScheduleLoopedBFS),
    "zb-h1": (1, schedules.ScheduleInterleavedZeroBubble),
    "zb-v": (2, schedules.ScheduleZBVZeroBubble),
    "dualpipe-v": (2, schedules.ScheduleDualPipeV),
}
QUICK = ("1f1b", "zb-h1")


class Chunk(nn.Module):
    """One stage of the model in the form that torch's pipeline requires: one tensor in, one out."""

    def __init__(self, gpt: GPT, stage: int, batch: int, *, split: bool) -> None:
        super().__init__()
        self.split = split
        stages = len(gpt.placement)
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.blocks = nn.ModuleList(gpt.blocks[str(i)] for i in gpt.layers_of(stage))
        self.gpt = (gpt,)  # not a submodule: a different stage may own its parameters
        self.context = TokenContext(batch, gpt.layout)
        self.register_buffer("at", torch.arange(gpt.config.seq_len).repeat(batch))
        if self.is_first:
            self.embedding, self.positions = gpt.embedding, gpt.positions
        if self.is_last:
            self.final_norm, self.head = gpt.final_norm, gpt.head

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.embedding(x.flatten()) + self.positions(self.at)
        for block in self.blocks:
            x = block(x, self.context)
        x = self.final_norm(x) if self.is_last else x
        # With a split backward, torch detaches the output in place, which fails for a view.
        return x.clone() if x._is_view() and self.split else x


class Torch:
    """torch's schedule over the same stages."""

    def __init__(
        self, config: GPTConfig, batch: int, mesh: ConnectedMesh, plan: ParallelPlan
    ) -> None:
        self.gpt = GPT(config, mesh=mesh, plan=plan, seed=0)
        self.losses: list[Tensor] = []
        tokens = MICROBATCHES * batch * config.seq_len

        def loss(x: Tensor, labels: Tensor) -> Tensor:
            return self.gpt.loss(x, self.gpt.head_weight, labels.flatten(), tokens)

        count = len(self.gpt.placement)
        split = any(a.op == "I" for actions in plan.make_schedule(WORLD) for a in actions)
        stages = [
            PipelineStage(
                Chunk(self.gpt, s, batch, split=split), s, count, torch.device("cpu"),
                group=mesh.group("pp"),
            )
            for s in self.gpt.stages
        ]  # fmt: skip
        kind = SCHEDULES[plan.schedule][1]
        single = plan.schedule in ("gpipe", "1f1b")
        self.schedule = kind(
            stages[0] if single else stages, MICROBATCHES, loss_fn=loss, scale_grads=False
        )
        self.params = list(self.gpt.parameters())
        self.optimizer = torch_adamw(self.params, LR, BETAS, EPS, DECAY)

    def backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of tokens and labels [m, B, S], on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.clear()
        first = (tokens.flatten(0, 1),) if self.gpt.first else ()
        last = {"target": labels.flatten(0, 1), "losses": self.losses} if self.gpt.last else {}
        self.schedule.step(*first, **last, return_outputs=False)
        loss = torch.stack(self.losses).sum().detach() if self.losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss

    def update(self) -> None:
        norm = nn.utils.get_total_norm([p.grad for p in self.params if p.grad is not None])
        square = norm.square()
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(self.params, CLIP, square.sqrt())
        self.optimizer.step()

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = self.backward(tokens, labels)
        self.update()
        return loss


class Ours:
    """The engine with the same schedule."""

    def __init__(
        self, config: GPTConfig, batch: int, mesh: ConnectedMesh, plan: ParallelPlan
    ) -> None:
        self.engine = Engine(
            config, mesh, plan, micro_batch_size=batch, rule=AdamW(BETAS, EPS, DECAY), clip=CLIP
        )
        self.ids = torch.arange(MICROBATCHES * batch).view(MICROBATCHES, batch)

    def step(self, tokens: Tensor, labels: Tensor, lr: float | None = LR) -> Tensor:
        return self.engine.step(tokens, labels, self.ids, lr=lr).loss


def check(ours: Ours, theirs: Torch, draw: Callable[[], tuple[Tensor, Tensor]]) -> list[Any]:
    """Compare the first step's gradients and four steps' losses, on every rank."""
    batch = draw()
    losses = {"step 0": (ours.step(*batch, lr=None), theirs.backward(*batch))}
    expected = {name: p.grad for name, p in theirs.gpt.named_parameters()}
    pairs = {r.name: (t, expected.pop(r.name)) for r, t, _ in ours.engine.read("grad")}
    assert not expected
    gradients = assert_equal("gradients of every stage", pairs, GRAD_LIMIT)
    ours.engine.optimizer.step(LR)
    theirs.update()
    for i in range(1, 4):
        batch = draw()
        losses[f"step {i}"] = (ours.step(*batch), theirs.step(*batch))
    return [gradients, assert_equal("losses of 4 steps", losses, LOSS_LIMIT)]


def backward_calls(step: Callable[[], object]) -> int:
    """Count how often autograd runs a custom Function's backward in a step on this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    prefix, suffix = "autograd::engine::evaluate_function: _", "Backward"
    events = profile.key_averages()
    return sum(e.count for e in events if e.key.startswith(prefix) and e.key.endswith(suffix))


def measure(
    config: GPTConfig, batch: int, rounds: int, schedule: str
) -> tuple[list, dict[str, list[float]], tuple[int, int]]:
    """Check, count, then time; every rank calls this."""
    generator = torch.Generator().manual_seed(0)  # every rank draws the whole batch

    def draw() -> tuple[Tensor, Tensor]:
        shape = (2, MICROBATCHES, batch, config.seq_len)
        tokens, labels = torch.randint(config.vocab_size, shape, generator=generator)
        return tokens, labels

    mesh = Mesh(pp=WORLD).connect()
    chunks, kind = SCHEDULES[schedule]
    plan = ParallelPlan(schedule=schedule, chunks=chunks, microbatches=MICROBATCHES)
    ours, theirs = Ours(config, batch, mesh, plan), Torch(config, batch, mesh, plan)
    checks = check(ours, theirs, draw)
    fixed = draw()
    calls = backward_calls(lambda: ours.step(*fixed)), backward_calls(lambda: theirs.step(*fixed))
    variants = {
        f"warpweave {schedule}": lambda: ours.step(*fixed),
        f"torch {kind.__name__}": lambda: theirs.step(*fixed),
    }
    return checks, interleave(variants, rounds=rounds), calls


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = parser(CLAIM)
    arguments.add_argument("--schedules", nargs="+", choices=SCHEDULES)
    options = arguments.parse_args(argv)
    report = Report("pipelines", CLAIM, header(ranks=WORLD, threads_per_rank=1))
    config, batch = GPTConfig(2048, 256, 8, 256, 4, tied=False), 1
    if options.quick:
        config, batch = GPTConfig(101, 16, 4, 32, 2, tied=False), 1
    rounds = options.rounds or (1 if options.quick else 15)
    shape = (
        f"L{config.layers} E{config.width} V{config.vocab_size} S{config.seq_len} B{batch} "
        f"m{MICROBATCHES} pp{WORLD}"
    )
    report.header["backward_calls"] = calls = {}
    for schedule in options.schedules or (QUICK if options.quick else SCHEDULES):
        checks, times, pair = run_ranks(WORLD, measure, config, batch, rounds, schedule)
        report.checks += [dataclasses.replace(c, name=f"{schedule}: {c.name}") for c in checks]
        calls[schedule] = {"warpweave": pair[0], "torch": pair[1]}
        report.add(
            times, list(times)[1:], shape=shape, dtype="float32",
            tokens=MICROBATCHES * batch * config.seq_len,
        )  # fmt: skip
    report.finish(results_folder(options))


if __name__ == "__main__":
    main()
