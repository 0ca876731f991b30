"""Loss versus bytes sent: data parallelism, local SGD, DiLoCo and streaming DiLoCo.

Four gloo ranks, each a replica with its own samples, train a small GPT on the source text of
Python's standard library, from the same weights with the same inner AdamW. Data parallelism
all-reduces the gradients in every step; the other methods all-reduce the weights every n steps.
Bytes are those of the tensors that a rank passes to all-reduces over the replicas' axis, counted at
the call. The few numbers per step that are reduced over all ranks are not counted. A point is the
validation loss of the weights that the replicas share. Nothing is timed: on one machine a byte
costs next to nothing.

The inner optimizer has data parallelism's settings, the outer ones those of the papers, untuned.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from harness import header, parser, results_folder, run_ranks, write_report

from warpweave.data import open_dataset
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.data.optimizer import AdamW
from warpweave.parallel.data.outer import OuterRule
from warpweave.parallel.mesh import Mesh

CLAIM = (
    "Replicas that average every n steps come close to data parallelism's loss at 1 / n its bytes."
)
SCRIPT = "local_steps"
LR, SEED = 2e-3, 0
FEW = 64  # upper limit on the numbers of losses, norm and valid tokens in a message


class Sizes(NamedTuple):
    """The sizes of a run."""

    config: GPTConfig
    ranks: int
    batch: int
    steps: int
    every: int


QUICK = Sizes(GPTConfig(256, 16, 2, 16, 2), 2, 1, 4, 2)
FULL = Sizes(GPTConfig(256, 64, 2, 64, 4), 4, 4, 400, 20)


def rules(every: int, steps: int) -> dict[str, OuterRule | None]:
    """Return the ways to combine replicas; None sums gradients in every step."""
    return {
        "data parallel": None,
        "local SGD": OuterRule(every, lr=1.0, momentum=0.0),
        "post-local SGD": OuterRule(every, lr=1.0, momentum=0.0, warmup=steps // 10),
        "DiLoCo": OuterRule(every),
        "streaming DiLoCo": OuterRule(every, fragments=2, delay=max(0, every // 4 - 1)),
    }


def _train(name: str, sizes: Sizes) -> list[dict[str, float]]:
    """Train one way; return bytes per rank, the most in a step, and validation loss over time."""
    config, ranks, batch, steps, every = sizes
    rule = rules(every, steps)[name]
    mesh = (Mesh(dp=ranks) if rule is None else Mesh(outer=ranks)).connect()
    axis = mesh.group("dp" if rule is None else "outer")
    engine = Engine(config, mesh, ParallelPlan(zero=0), micro_batch_size=batch, seed=SEED,
                    rule=AdamW(), outer=rule)  # fmt: skip
    train, held_out = (
        open_dataset(None, seq_len=config.seq_len, seed=SEED, split=split)
        for split in ("train", "validation")
    )
    ids = torch.arange(batch) + dist.get_rank() * batch
    count = 16 * batch
    mine = range(dist.get_rank() * count, (dist.get_rank() + 1) * count)
    tokens, labels = held_out.fixed_batch(mine, count=count * ranks)
    held = tokens.unflatten(0, (-1, batch)), labels.unflatten(0, (-1, batch))
    sent, most, found, all_reduce = 0, 0, [], dist.all_reduce

    def counted(x: torch.Tensor, *given: Any, group: Any = None, **options: Any) -> Any:
        nonlocal sent
        if group is axis and x.numel() > FEW:
            sent += x.nbytes
        return all_reduce(x, *given, group=group, **options)

    dist.all_reduce = counted
    try:
        for step in range(steps + 1):
            if step % every == 0:
                loss = float(engine.evaluate(*held))
                point = {"step": step, "bytes": sent, "most": most, "val_loss": round(loss, 4)}
                found.append(point)
            if step < steps:
                before = sent
                x, y = train.batch(step, ids.tolist())
                engine.step(x[None], y[None], ids[None], lr=LR * min(1.0, (step + 1) / every))
                most = max(most, sent - before)
    finally:
        dist.all_reduce = all_reduce
    return found


def measure(sizes: Sizes) -> dict[str, list[dict[str, float]]]:
    """Train every way on these ranks."""
    return {name: _train(name, sizes) for name in rules(sizes.every, sizes.steps)}


def table(curves: dict[str, list[dict[str, float]]]) -> str:
    """Format the last point of each way: bytes, also relative to data parallelism's, and loss."""
    whole = curves["data parallel"][-1]["bytes"]
    lines = [f"{'':18} {'MB per rank':>12} {'of DP':>8} {'most a step':>12} {'val loss':>9}"]
    for name, points in curves.items():
        last = points[-1]
        part, most, loss = last["bytes"] / whole, last["most"] / 1e6, last["val_loss"]
        lines.append(f"{name:18} {last['bytes'] / 1e6:12.2f} {part:8.3f} {most:12.3f} {loss:9.4f}")
    return "\n".join(lines)


def draw(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Plot loss over bytes, and over steps."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "warpweave"}):
        figure, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
        for name, points in curves.items():
            y = [p["val_loss"] for p in points]
            axes[0].plot([p["bytes"] / 1e6 for p in points], y, marker=".", label=name)
            axes[1].plot([p["step"] for p in points], y, marker=".", label=name)
        axes[0].set_xscale("symlog", linthresh=1.0)
        axes[0].set_xlabel("MB sent per rank, all-reduces between replicas")
        axes[1].set_xlabel("step")
        axes[0].set_ylabel("validation loss (nats per token)")
        axes[0].legend()
        for one in axes:
            one.grid(alpha=0.3)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    sizes = QUICK if options.quick else FULL
    report = {"script": SCRIPT, "claim": CLAIM, "header": header(ranks=sizes.ranks)}
    curves = run_ranks(sizes.ranks, measure, sizes)
    said = {name: None if rule is None else dataclasses.asdict(rule)
            for name, rule in rules(sizes.every, sizes.steps).items()}  # fmt: skip
    report |= {"sizes": sizes._asdict() | {"config": dataclasses.asdict(sizes.config)}}
    report |= {"rules": said, "curves": curves}
    print(CLAIM, table(curves), sep="\n")
    path = write_report(report, results_folder(options))
    if path is not None:
        draw(curves, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
