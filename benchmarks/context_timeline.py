"""Timelines of what a context-parallel ring hides: hops and tiles on 2 and 4 gloo ranks.

Causal attention, zig-zag, forward and backward: once with every hop in flight while a tile is
computed ("overlap"), and once waiting for every hop first ("blocking"). Recorded and drawn as in
`overlap_timeline`; the products here are the calls of the attention kernel.

`explain` predicts what can be hidden, from the bytes per second and the FLOP/s of the blocking
twin: everything but the predicted exposed seconds. On one machine, a peer that waits for a
processor delays its message, which counts as in flight meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import Ratio, _quantiles, header, parser, results_folder, run_ranks
from overlap_timeline import Problem, TimelineReport, check, draw, everywhere, parts, record
from torch import Tensor

from warpweave.parallel.context import Links, context_attention
from warpweave.parallel.context.explain import explain
from warpweave.parallel.layout import SequenceLayout

CLAIM = (
    "On 2 and 4 gloo ranks at least 0.8 of the time with a hop in flight is hidden under "
    "computation if the link and the kernel are fast enough for all of it."
)
WORLDS, VARIANTS = (2, 4), ("overlap", "blocking")
HEADS, KV_HEADS, DIM = 8, 8, 64


class Ring(Problem):
    """This rank's rows of one sequence, with `tokens` on each rank."""

    def __init__(self, tokens: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.layout = SequenceLayout(tokens * dist.get_world_size(), dist.get_world_size())
        shapes = [(1, tokens, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
        *leaves, self.dy = (torch.randn(shape, generator=generator) for shape in shapes)
        self.leaves = [x.requires_grad_() for x in leaves]

    def forward(self, overlap: str) -> Tensor:
        return context_attention(
            *self.leaves, layout=self.layout, group=dist.group.WORLD, strategy="ring",
            overlap=overlap == "overlap",
        )  # fmt: skip


def predicted(layout: SequenceLayout, computation: float, messages: float) -> float:
    """Return the fraction of the hops' time that can be hidden, given the seconds of both."""
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "itemsize": 4}
    (ring,) = (c for c in explain(layout, **sizes) if c.strategy == "ring")
    flops = 3.5 * 4 * DIM * HEADS * layout.local_len * layout.seq_len / 2
    links = Links((ring.forward + ring.backward) / messages, flops / computation)
    costs = explain(layout, **sizes, links=links)
    return 1 - next(c.exposed for c in costs if c.strategy == "ring") / messages


def measure(tokens: int, rounds: int) -> dict[str, Any]:
    """Check, record, and predict from the blocking twin; every rank calls this."""
    problem = Ring(tokens)
    checks = check(problem, VARIANTS, ("o", "dq", "dk", "dv"))
    times, timelines = record(problem, VARIANTS, rounds)
    shown = {}
    for name, ms in times.items():
        middle = sorted(range(rounds), key=ms.__getitem__)[rounds // 2]
        shown[name] = everywhere(timelines[name][middle])
    every = {name: parts(timelines[name]) for name in VARIANTS}
    *_, computation, messages = map(median, every["blocking"])
    can = predicted(problem.layout, computation, messages)
    return {"checks": checks, "times": times, "parts": every, "shown": shown, "predicted": can}


@dataclass
class RingReport(TimelineReport):
    """A timeline report that also has the predicted hidden fraction, by number of ranks."""

    predicted: dict[str, float] = field(default_factory=dict)

    def finish(self, folder: Path | None) -> None:
        print(", ".join(f"can be hidden, {key}: {x:.2f}" for key, x in self.predicted.items()))
        super().finish(folder)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    report = RingReport("context_timeline", CLAIM, header(ranks=[*WORLDS], threads_per_rank=1))
    tokens = 16 if options.quick else 2048
    rounds = options.rounds or (1 if options.quick else 21)
    shown = {}
    for world in WORLDS[:1] if options.quick else WORLDS:
        found = run_ranks(world, measure, tokens, rounds)
        report.checks += found["checks"]
        report.predicted[f"cp{world}"] = found["predicted"]
        times = {f"{name} cp{world}": ms for name, ms in found["times"].items()}
        for name, (fractions, by_tiles, computation, messages) in found["parts"].items():
            key = f"{name} cp{world}"
            report.hidden[key] = Ratio(*_quantiles(fractions))
            report.hidden_by_products[key] = Ratio(*_quantiles(by_tiles))
            report.computation_ms[key] = 1e3 * median(computation)
            report.messages_ms[key] = 1e3 * median(messages)
            shown[key] = found["shown"][name]
        report.add(
            times, [f"blocking cp{world}"], dtype="float32", tokens=world * tokens,
            shape=f"S{world * tokens} H{HEADS}/{KV_HEADS} D{DIM} causal cp{world}",
        )  # fmt: skip
    folder = results_folder(options)
    if folder is not None:
        path = folder / report.header["kind"] / f"{report.script}.svg"
        draw(shown, report, path, title="Ring attention on gloo ranks")
    report.finish(folder)


if __name__ == "__main__":
    main()
