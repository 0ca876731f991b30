"""Steps to the same validation loss: Muon versus AdamW on a toy GPT, each at its best rate.

    python benchmarks/muon.py            # minutes; the table, a plot, benchmarks/results/<kind>
    python benchmarks/muon.py --quick    # seconds: only checks that it runs

A GPT of two blocks reads the source of Python's standard library as bytes. Every run has the same
samples in the same order, with a constant rate after ten steps of warm-up. Both rules have the same
grid of rates, weight decay and clip; Muon has Moonlight's scale, and the same AdamW for embeddings,
norms and biases. The target is AdamW's lowest loss at any rate. Step times are not compared: those
of a toy on a CPU say nothing about Newton-Schulz on a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import header, parser, results_folder, write_report

from warpweave.data import Dataset, open_dataset
from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.parallel.data.optimizer import AdamW, Muon, Rule
from warpweave.parallel.mesh import single

CLAIM = "Muon reaches AdamW's lowest validation loss in fewer steps, on a toy model."
WARMUP, BATCH, EVERY, DECAY = 10, 8, 10, 0.1
RULES: dict[str, Rule] = {"adamw": AdamW(weight_decay=DECAY), "muon": Muon(weight_decay=DECAY)}


def curve(rule: Rule, lr: float, steps: int, data: tuple[Dataset, Dataset]) -> list[float]:
    """Return the validation loss after every EVERY steps."""
    train, validation = data
    config = GPTConfig(256, train.seq_len, layers=2, width=64, heads=4)
    engine = Engine(config, single(), ParallelPlan(), micro_batch_size=BATCH, rule=rule)
    ids, found = torch.arange(BATCH), []
    held = [validation.batch(0, [*range(i * BATCH, (i + 1) * BATCH)]) for i in range(2)]
    tokens, labels = (torch.stack(each) for each in zip(*held, strict=True))
    for step in range(steps):
        x, y = train.batch(step, ids.tolist())
        rate = lr * min(1.0, (step + 1) / WARMUP)
        engine.step(x[None], y[None], ids[None], lr=rate, key=step)
        if (step + 1) % EVERY == 0:
            found.append(float(engine.evaluate(tokens, labels)))
    return found


def steps_to(losses: list[float], target: float) -> int | None:
    """Return the first step after which the loss is at most `target`; None if there is none."""
    return next((EVERY * (i + 1) for i, loss in enumerate(losses) if loss <= target), None)


def plot(curves: dict[str, dict[float, list[float]]], target: float, path: Path) -> None:
    """Plot every curve as SVG, with each rule's best one in bold."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4))
    for color, (name, rates) in zip(("#4c78a8", "#e45756"), curves.items(), strict=True):
        best = min(rates, key=lambda lr: min(rates[lr]))
        for lr, losses in rates.items():
            at = [EVERY * (i + 1) for i in range(len(losses))]
            label = f"{name}, lr {lr:g}" if lr == best else None
            axis.plot(at, losses, color=color, label=label, alpha=1.0 if label else 0.25)
    axis.axhline(target, color="gray", linewidth=0.7, linestyle="--")
    axis.set(xlabel="step", ylabel="validation loss", title="2 blocks of width 64, CPU, fp32")
    axis.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    torch.set_num_threads(1)
    steps, length = (20, 16) if options.quick else (120, 32)
    rates = (0.003,) if options.quick else (0.001, 0.003, 0.01)
    data = tuple(
        open_dataset(None, seq_len=length, seed=0, split=split) for split in ("train", "validation")
    )
    head = header()
    curves = {
        name: {lr: curve(rule, lr, steps, data) for lr in rates} for name, rule in RULES.items()
    }
    target = min(min(losses) for losses in curves["adamw"].values())
    rows: list[dict[str, Any]] = [
        {"optimizer": name, "lr": lr, "lowest": round(min(losses), 4),
         "steps": steps_to(losses, target), "losses": [round(x, 4) for x in losses]}
        for name, found in curves.items() for lr, losses in found.items()
    ]  # fmt: skip
    print(f"steps to AdamW's lowest validation loss, {target:.4f}, in {steps} steps")
    print(f"{'optimizer':9} {'lr':>6} {'lowest':>7} {'steps':>5}")
    for row in rows:
        print("{optimizer:9} {lr:6g} {lowest:7.4f} {steps!s:>5}".format(**row))
    needed = {
        name: min((r["steps"] for r in rows if r["optimizer"] == name and r["steps"]), default=None)
        for name in RULES
    }
    report = {"script": "muon", "claim": CLAIM, "header": head, "target": target, "steps": needed}
    report["rows"] = rows
    path = write_report(report, results_folder(options))
    if path is not None:
        plot(curves, target, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
