"""Causal attention over 2 and 4 gloo ranks: our strategies and others', compared in one run.

Forward and backward in float32, each variant once per round. Timing starts only after o, dq, dk and
dv of all ranks, in float32 and in bfloat16, have been compared with float64 attention on one device
for the same inputs; the report has their relative RMS error. See `context_baselines` for the
baselines.

Rows of "CPU time" have the time of a rank's process with all its threads, in the same calls. If
ranks share cores with each other or with other programs, this says more about a variant than the
wall clock, which includes waiting for a core.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from context_baselines import exact_ring, plain_ulysses, rsa, usual_ring
from harness import Report, header, interleave, parser, results_folder, run_ranks
from torch import Tensor

from warpweave.parallel.context import context_attention
from warpweave.parallel.layout import SequenceLayout

CLAIM = (
    "On 2 and 4 gloo ranks our ring takes no longer than the usual one (blocking hops, SDPA "
    "blocks, sigmoid merge), and our Ulysses no longer than one with plain all-to-alls; the error "
    "of neither is larger."
)
WORLDS, HEADS, DIM = (2, 4), 4, 64
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NAMES = ("o", "dq", "dk", "dv")
RSA = "RSA (2105.13120)"
BASELINES = {"usual ring": usual_ring, "plain Ulysses": plain_ulysses, RSA: rsa}
EXACT = "exact ring"  # the report has its errors, but no times
Times = dict[str, list[float]]
OURS = [f"warpweave {strategy}" for strategy in ("ring", "gather", "stream", "ulysses")]


@dataclass
class ContextReport(Report):
    """A report with errors: shape -> variant and dtype -> relative RMS of o, dq, dk and dv."""

    errors: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def finish(self, folder: Path | None) -> None:
        for shape, variants in self.errors.items():
            for name, found in variants.items():
                words = ", ".join(f"{key} {error:.2e}" for key, error in found.items())
                print(f"error, {name}, {shape}: {words}")
        super().finish(folder)


class Variant:
    """A way to attend, with this rank's rows of the same inputs in the order that it requires."""

    def __init__(self, name: str, whole: list[Tensor]) -> None:
        kind = "contiguous" if name in ("warpweave ulysses", "plain Ulysses", RSA) else "zigzag"
        self.layout = SequenceLayout(whole[0].shape[1], dist.get_world_size(), kind)
        theirs = BASELINES | {EXACT: exact_ring}
        self.swap = name in theirs  # these have heads before rows
        self.call = theirs.get(name) or partial(
            context_attention, layout=self.layout, group=dist.group.WORLD,
            strategy=name.removeprefix("warpweave "),
        )  # fmt: skip
        *inputs, self.do = (self._mine(x) for x in whole)
        self.inputs = [x.requires_grad_() for x in inputs]
        self.cpu_ms: list[float] = []  # for every call of `run`

    def _mine(self, x: Tensor) -> Tensor:
        mine = self.layout.shard(x, dist.get_rank(), 1)
        return (mine.transpose(1, 2) if self.swap else mine).contiguous()

    def run(self) -> tuple[Tensor, ...]:
        """Return this rank's o, dq, dk and dv."""
        began = time.process_time()
        o = self.call(*self.inputs)
        results = o, *torch.autograd.grad(o, self.inputs, self.do)
        self.cpu_ms.append(1000 * (time.process_time() - began))
        return results

    def errors(self, truth: list[Tensor]) -> list[float]:
        """Return the relative RMS errors over all ranks."""
        found = []
        for mine, whole in zip(self.run(), truth):
            mine = (mine.transpose(1, 2) if self.swap else mine).detach()
            mine = mine - self.layout.shard(whole, dist.get_rank(), 1)
            square = mine.square().sum()
            dist.all_reduce(square)
            found.append(float((square / whole.square().sum()).sqrt()))
        return found


def measure(tokens: int, rounds: int) -> tuple[dict[str, dict[str, float]], Times, Times]:
    """Measure all variants' errors, then wall times and CPU times; every rank calls this."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, tokens, HEADS, DIM)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    errors, variants = {}, {}
    for dtype in reversed(LIMITS):
        whole = [x.to(dtype) for x in drawn]
        *leaves, do = (x.double().requires_grad_() for x in whole)
        of_heads = (x.transpose(1, 2) for x in leaves)
        o = F.scaled_dot_product_attention(*of_heads, is_causal=True).transpose(1, 2)
        truth = [o.detach(), *torch.autograd.grad(o, leaves, do)]
        variants = {name: Variant(name, whole) for name in (*OURS, *BASELINES, EXACT)}
        for name, variant in variants.items():
            found = dict(zip(NAMES, variant.errors(truth), strict=True))
            errors[f"{name}, {str(dtype).removeprefix('torch.')}"] = found
            if not max(found.values()) <= LIMITS[dtype]:
                raise AssertionError(f"{name}, {dtype}: {found}, limit {LIMITS[dtype]:.0e}")
    del variants[EXACT]
    times = interleave({name: v.run for name, v in variants.items()}, rounds=rounds)
    cpu = torch.tensor([v.cpu_ms[-rounds:] for v in variants.values()], dtype=torch.float64)
    dist.all_reduce(cpu, dist.ReduceOp.MAX)
    return errors, times, dict(zip(variants, cpu.tolist(), strict=True))


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    report = ContextReport("context", CLAIM, header(ranks=[*WORLDS], threads_per_rank=1))
    tokens = 64 if options.quick else 4096
    rounds = options.rounds or (1 if options.quick else 21)
    for world in WORLDS[:1] if options.quick else WORLDS:
        errors, times, cpu = run_ranks(world, measure, tokens, rounds)
        shape = f"B1 S{tokens} H{HEADS} D{DIM} causal cp{world}"
        report.errors[shape] = errors
        for which, of in ((times, ""), (cpu, ", CPU time")):
            report.add(which, list(BASELINES), shape=shape + of, dtype="float32", tokens=tokens)
    report.finish(results_folder(options))


if __name__ == "__main__":
    main()
