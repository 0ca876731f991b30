"""1F1B on two gloo ranks against `torch.distributed.pipelining.Schedule1F1B`, same stages.

Both run the same two halves of our GPT (untied) with eight micro-batches, and end the step alike:
one global gradient norm over the stages, clipping, AdamW (torch's fused one on torch's side).
torch's schedule may keep its outputs to itself, and it is told not to rescale gradients: the loss
is divided by the number of tokens of the whole batch, as ours is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Report, assert_equal, header, interleave, parser, results_folder, run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from warpweave.config import ParallelPlan
from warpweave.engine import Engine
from warpweave.gpt import GPT, GPTConfig
from warpweave.layers.context import TokenContext
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.mesh import ConnectedMesh, Mesh

CLAIM = "On 2 gloo ranks, our 1F1B takes no longer than torch.distributed.pipelining's."
WORLD, MICROBATCHES = 2, 8
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4


class Half(nn.Module):
    """This rank's half of the model, as torch's pipeline wants it: one tensor in, one out."""

    def __init__(self, gpt: GPT, batch: int) -> None:
        super().__init__()
        self.gpt = gpt
        self.context = TokenContext(batch, gpt.layout)
        self.register_buffer("positions", torch.arange(gpt.config.seq_len).repeat(batch))

    def forward(self, x: Tensor) -> Tensor:
        gpt = self.gpt
        if gpt.first:
            x = gpt.embedding(x.flatten()) + gpt.positions(self.positions)
        for block in gpt.blocks.values():
            x = block(x, self.context)
        return gpt.final_norm(x) if gpt.last else x


class Torch:
    """torch's schedule over the same stages."""

    def __init__(self, config: GPTConfig, batch: int, mesh: ConnectedMesh) -> None:
        self.gpt = GPT(config, mesh=mesh, seed=0)
        self.losses: list[Tensor] = []
        tokens = MICROBATCHES * batch * config.seq_len

        def loss(x: Tensor, labels: Tensor) -> Tensor:
            return self.gpt.loss(x, self.gpt.head_weight, labels.flatten(), tokens)

        stage = PipelineStage(
            Half(self.gpt, batch), mesh.index("pp"), WORLD, torch.device("cpu"),
            group=mesh.group("pp"),
        )  # fmt: skip
        self.schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss, scale_grads=False)
        self.params = list(self.gpt.parameters())
        groups = [
            {"params": [p for p in self.params if (p.ndim > 1) == matrix],
             "weight_decay": DECAY if matrix else 0.0}
            for matrix in (True, False)
        ]  # fmt: skip
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)

    def backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """tokens and labels [m, B, S] -> the loss, on every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.clear()
        if self.gpt.first:
            self.schedule.step(tokens.flatten(0, 1), return_outputs=False)
        else:
            self.schedule.step(
                target=labels.flatten(0, 1), losses=self.losses, return_outputs=False
            )
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
    """The engine with two pipeline stages."""

    def __init__(self, config: GPTConfig, batch: int, mesh: ConnectedMesh) -> None:
        self.engine = Engine(
            config, mesh, ParallelPlan(microbatches=MICROBATCHES), micro_batch_size=batch,
            rule=AdamW(BETAS, EPS, DECAY), clip=CLIP,
        )  # fmt: skip
        self.ids = torch.arange(MICROBATCHES * batch).view(MICROBATCHES, batch)

    def step(self, tokens: Tensor, labels: Tensor, lr: float | None = LR) -> Tensor:
        return self.engine.step(tokens, labels, self.ids, lr=lr).loss


def check(ours: Ours, theirs: Torch, draw: Callable[[], tuple[Tensor, Tensor]]) -> list[Any]:
    """Gradients of the first step and losses of four, on every rank."""
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


def measure(config: GPTConfig, batch: int, rounds: int) -> tuple[list, dict[str, list[float]]]:
    """On every rank: check, then time."""
    generator = torch.Generator().manual_seed(0)  # every rank draws the whole batch

    def draw() -> tuple[Tensor, Tensor]:
        shape = (2, MICROBATCHES, batch, config.seq_len)
        tokens, labels = torch.randint(config.vocab_size, shape, generator=generator)
        return tokens, labels

    mesh = Mesh(pp=WORLD).connect()
    ours, theirs = Ours(config, batch, mesh), Torch(config, batch, mesh)
    checks = check(ours, theirs, draw)
    fixed = draw()
    variants = {
        "warpweave 1f1b": lambda: ours.step(*fixed),
        "torch Schedule1F1B": lambda: theirs.step(*fixed),
    }
    return checks, interleave(variants, rounds=rounds)


def main(argv: list[str] | None = None) -> None:
    """The benchmark."""
    options = parser(CLAIM).parse_args(argv)
    report = Report("pipeline_1f1b", CLAIM, header(ranks=WORLD, threads_per_rank=1))
    config, batch = GPTConfig(2048, 256, 6, 256, 4, tied=False), 1
    if options.quick:
        config, batch = GPTConfig(101, 16, 2, 32, 2, tied=False), 1
    rounds = options.rounds or (1 if options.quick else 15)
    report.checks, times = run_ranks(WORLD, measure, config, batch, rounds)
    shape = (
        f"L{config.layers} E{config.width} V{config.vocab_size} S{config.seq_len} B{batch} "
        f"m{MICROBATCHES} pp{WORLD}"
    )
    report.add(
        times, list(times)[1:], shape=shape, dtype="float32",
        tokens=MICROBATCHES * batch * config.seq_len,
    )  # fmt: skip
    report.finish(results_folder(options))


if __name__ == "__main__":
    main()
