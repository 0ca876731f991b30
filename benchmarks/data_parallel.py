"""Data parallelism on two gloo ranks, compared with torch's DDP and FSDP2, training the same GPT.

`Engine` with zero=0 (gradients all-reduced) and zero=1 (as many bytes, but each rank updates half
of the weights) is compared with `DistributedDataParallel`. With zero=3 (all three states sharded)
it is compared with FSDP2's `fully_shard` of every block and of the root. The model inside torch's
wrappers is our own `GPT` as an ordinary module, so the only difference is the data parallelism: who
gathers, reduces, clips and updates, when, and with how many copies. Torch's own options that help
on a CPU are on: gradients are views of DDP's buckets, and AdamW is fused.

Two rows for reference repeat the comparison within torch: transformers' GPT-2 in DDP and FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from warpweave.model.config import ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT, GPTConfig
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.mesh import Mesh

CLAIM = "On 2 gloo ranks, our data parallelism and ZeRO-3 take no longer than torch DDP and FSDP2."
WORLD = 2
LR, BETAS, EPS, DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0
LOSS_LIMIT, GRAD_LIMIT = 1e-5, 1e-4


class Torch:
    """A model in a torch wrapper, with torch's clipping and fused AdamW.

    `loss(module, tokens, labels)` is the mean over this rank's tokens. All ranks have the same
    number of tokens, so the wrappers' mean over ranks is the mean over all tokens.
    """

    def __init__(self, module: nn.Module, loss: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        self.module, self.loss = module, loss
        params = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = torch_adamw(params, LR, BETAS, EPS, DECAY)

    def backward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.module, tokens, labels)
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        norm = nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        assert norm.ndim == 0
        self.optimizer.step()

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss = self.backward(tokens, labels)
        self.update()
        return loss

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, param in self.module.named_parameters():
            grad = param.grad
            assert grad is not None
            full = grad.full_tensor() if isinstance(grad, DTensor) else grad
            yield name.removeprefix("module."), full


def ours_in(wrapper: str, config: GPTConfig) -> Torch:
    """Wrap our GPT, as an ordinary module, in DDP or FSDP2."""
    model = GPT(config, seed=0)
    return Torch(_wrapped(model, list(model.blocks.values()), wrapper), lambda m, t, y: m(t, y))


def theirs_in(wrapper: str, config: GPTConfig) -> Torch:
    """Wrap transformers' GPT-2 in DDP or FSDP2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.seq_len, n_embd=config.width,
            n_layer=config.layers, n_head=config.heads, activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
            attn_implementation="sdpa", bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip
    module = _wrapped(model, list(model.transformer.h), wrapper)
    return Torch(module, lambda m, t, _: m(input_ids=t, labels=t).loss)


def _wrapped(model: nn.Module, blocks: list[nn.Module], wrapper: str) -> nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (WORLD,))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    return model


class Ours:
    """The engine with data parallelism."""

    def __init__(self, config: GPTConfig, batch: int, zero: int, mesh: Any) -> None:
        self.engine = Engine(
            config, mesh, ParallelPlan(zero=zero), micro_batch_size=batch,
            rule=AdamW(BETAS, EPS, DECAY), clip=CLIP,
        )  # fmt: skip
        self.ids = torch.arange(batch)[None] + dist.get_rank() * batch

    def step(self, tokens: Tensor, labels: Tensor, lr: float | None = LR) -> Tensor:
        return self.engine.step(tokens[None], labels[None], self.ids, lr=lr).loss


def check(ours: Ours, theirs: Torch, draw: Callable[[], tuple[Tensor, Tensor]], name: str) -> Any:
    """Compare the first step's gradients and four steps' mean losses, on every rank."""

    def mean(loss: Tensor) -> Tensor:
        loss = loss / WORLD
        dist.all_reduce(loss)
        return loss

    batch = draw()
    losses = {"step 0": (ours.step(*batch, lr=None), mean(theirs.backward(*batch)))}
    expected = dict(theirs.gradients())
    pairs = {r.name: (t, expected.pop(r.name)) for r, t, _ in ours.engine.read("grad")}
    assert not expected
    gradients = assert_equal(f"gradients, {name}", pairs, GRAD_LIMIT)
    ours.engine.optimizer.step(LR)
    theirs.update()
    for i in range(1, 4):
        batch = draw()
        losses[f"step {i}"] = (ours.step(*batch), mean(theirs.step(*batch)))
    return [gradients, assert_equal(f"losses of 4 steps, {name}", losses, LOSS_LIMIT)]


def measure(config: GPTConfig, batch: int, rounds: int, reference: bool) -> tuple[list, list]:
    """Check, then time, on every rank; return checks and [(times, baselines)]."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())

    def draw() -> tuple[Tensor, Tensor]:
        tokens = torch.randint(config.vocab_size, (batch, config.seq_len), generator=generator)
        labels = torch.cat([tokens[:, 1:], torch.full_like(tokens[:, :1], -100)], 1)
        return tokens, labels

    mesh = Mesh(dp=WORLD).connect()
    checks, results = [], []
    for stages, wrapper in (((0, 1), "DDP"), ((3,), "FSDP2")):
        fixed, variants = draw(), {}
        for zero in stages:
            ours, theirs = Ours(config, batch, zero, mesh), ours_in(wrapper, config)
            checks += check(ours, theirs, draw, f"zero={zero} and {wrapper}")
            variants[f"warpweave zero={zero}"] = partial(ours.step, *fixed)
        baselines = {f"torch {wrapper}": theirs}
        if reference:
            baselines[f"transformers in {wrapper}"] = theirs_in(wrapper, config)
        for name, other in baselines.items():
            variants[name] = partial(other.step, *fixed)
        results.append((interleave(variants, rounds=rounds), list(baselines)))
    return checks, results


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    report = Report("data_parallel", CLAIM, header(ranks=WORLD, threads_per_rank=1))
    config, batch = GPTConfig(8192, 256, 4, 256, 4), 2
    if options.quick:
        config, batch = GPTConfig(101, 16, 2, 32, 2), 2
    rounds = options.rounds or (1 if options.quick else 40)
    report.checks, results = run_ranks(WORLD, measure, config, batch, rounds, not options.quick)
    shape = (
        f"L{config.layers} E{config.width} V{config.vocab_size} S{config.seq_len} "
        f"B{batch} x {WORLD} ranks"
    )
    for times, baselines in results:
        report.add(
            times, baselines, shape=shape, dtype="float32", tokens=WORLD * batch * config.seq_len
        )
    report.finish(results_folder(options))


if __name__ == "__main__":
    main()
