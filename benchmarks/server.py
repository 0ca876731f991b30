"""Convergence under staleness: synchronous, stale synchronous and asynchronous parameter servers.

There are eight workers, one of them four times slower. Their gradients take exponentially
distributed times, drawn from a seed, so that the run is the same on every machine. As in a real
run, `Clocks` decides who pulls and what is applied. The resulting log is replayed
(`parallel.server.replay`) on the toy GPT: real gradients of the pulled versions, applied in its
order. Every mode consumes the same number of gradients, at the same learning rate.

    python benchmarks/server.py             # 6 modes, minutes on 2 cores; a table, JSON and a plot
    python benchmarks/server.py --quick     # seconds, outputs only

Only time is simulated: no messages are sent, and none costs anything. With one learning rate for
all, modes with more updates move the weights further; no mode was tuned. The compensation's lambda
is large because the toy's gradient elements are small, and squared in it.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from pathlib import Path
from typing import Any

import torch
from harness import header, parser, results_folder, write_report

from warpweave.parallel.server.clocks import Clocks
from warpweave.parallel.server.replay import replay
from warpweave.parallel.server.server import ServerPlan
from warpweave.parallel.server.worker import Compute, Gradient
from warpweave.train.options import parse
from warpweave.train.server.log import staleness_of
from warpweave.train.server.roles import ServedModel

CLAIM = "A staleness bound trades waiting for delay: loss by gradients and by time, six modes."
WORKERS, SLOW, SEED = 8, 4.0, 1
COMPENSATION = 1e4
MODES = {
    "synchronous": ServerPlan(),
    "ssp 0": ServerPlan(joint=False),
    "ssp 2": ServerPlan(staleness=2, joint=False),
    "ssp 4": ServerPlan(staleness=4, joint=False),
    "asynchronous": ServerPlan(staleness=None, joint=False),
    "delay-compensated": ServerPlan(staleness=None, joint=False, compensation=COMPENSATION),
}

Row = dict[str, Any]


def simulated(plan: ServerPlan, gradients: int, lr: float) -> list[Row]:
    """Return the log of a run until so many gradients are applied; "time" is in units of a fast
    worker's mean time per gradient."""
    clocks, draw = Clocks(plan.staleness, plan.joint), random.Random(SEED)
    for _ in range(WORKERS):
        clocks.ask(clocks.join())
    rows: list[Row] = []
    now, busy, applied = 0.0, list[tuple[float, int]](), 0
    while applied < gradients:
        for terms in clocks.updates():
            applied += len(terms)
            found = [dataclasses.asdict(term) for term in terms]
            rows.append({"version": len(rows) + 1, "lr": lr, "terms": found, "time": now})
        for worker in clocks.grant():
            took = draw.expovariate(1.0) * (SLOW if worker == 0 else 1.0)
            heapq.heappush(busy, (now + took, worker))
        now, worker = heapq.heappop(busy)
        clocks.give(worker, 1, 0.0)
        clocks.ask(worker)
    return rows


def trained(served: ServedModel, plan: ServerPlan, rows: list[Row]) -> tuple[list[float], float]:
    """Return (loss of each applied gradient, final validation loss) of a replayed log."""
    gpt, shards, losses = served.make_gpt(torch.device("cpu")), [served.shard(0)], {}

    def compute(number: int) -> Compute:
        inner = served.gradient(gpt, number)

        def gradient(clock: int, weights: Any) -> Gradient:
            found = inner(clock, weights)
            losses[number, clock] = found.loss
            # Use the mean, as the log's counts are 1.
            tensors = {name: g / found.count for name, g in found.tensors.items()}
            return Gradient(tensors, 1, found.loss)

        return gradient

    replay(rows, plan, shards, compute)
    weights = dict(shards[0].read())
    gpt.eval()
    with torch.no_grad():
        for name, param in gpt.named_parameters():
            param.copy_(weights[name])
        x, y = served.config.open_data("validation").fixed_batch(range(32), count=32)
        val_loss = float(gpt(x, y))
    order = [losses[t["worker"], t["clock"]] for row in rows for t in row["terms"]]
    return order, val_loss


def compared(served: ServedModel, gradients: int, lr: float) -> list[Row]:
    """Return a row for each mode."""
    found = []
    for name, plan in MODES.items():
        rows = simulated(plan, gradients, lr)
        losses, val_loss = trained(served, plan, rows)
        times = [row["time"] for row in rows for _ in row["terms"]]
        seen = staleness_of(rows)
        delays = {int(k): n for k, n in seen["delay"].items()}
        found.append({
            "name": name, "updates": len(rows), "gradients": len(losses), "time": times[-1],
            "staleness": max(map(int, seen["staleness"])), "delay": max(delays),
            "mean_delay": sum(k * n for k, n in delays.items()) / len(losses),
            "val_loss": val_loss, "losses": losses, "times": times,
        })  # fmt: skip
    return found


def table(rows: list[Row]) -> str:
    """Format the rows as Markdown."""
    lines = [
        "| mode | updates | gradients | time | largest staleness | mean delay | largest delay | "
        "validation loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['name']} | {r['updates']} | {r['gradients']} | {r['time']:.0f} | {r['staleness']} | "
        f"{r['mean_delay']:.1f} | {r['delay']} | {r['val_loss']:.4f} |"
        for r in rows
    ]
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Plot running means of the loss, over gradients and over simulated time, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, both = plt.subplots(1, 2, figsize=(11, 4), sharey=True)
    for row in rows:
        width = max(1, min(64, len(row["losses"]) // 8))
        smooth = torch.tensor(row["losses"]).unfold(0, width, 1).mean(1).tolist()
        both[0].plot(range(width, len(row["losses"]) + 1), smooth, label=row["name"], lw=1)
        both[1].plot(row["times"][width - 1 :], smooth, lw=1)
    both[0].set(xlabel="gradients", ylabel="training loss (nats per token)")
    both[1].set(xlabel="simulated time (mean time of a gradient on a fast worker)")
    for axes in both:
        axes.grid(alpha=0.3)
    both[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    torch.set_num_threads(1)
    words = "--model toy --server 1 --batch 4 --seq-len 32 --seed 0 --device cpu"
    gradients, lr = 480, 1e-3
    if options.quick:
        words += " --layers 1 --width 16 --heads 2 --hidden 32"
        gradients = 48
    served = ServedModel(parse(words.split()), "cpu")
    rows = compared(served, gradients, lr)
    head = header(workers=WORKERS, slow=SLOW, seed=SEED, lr=lr, compensation=COMPENSATION)
    print(CLAIM)
    print(table(rows))
    kept = [{k: v for k, v in row.items() if k not in ("losses", "times")} for row in rows]
    report = {"script": "server", "claim": CLAIM, "header": head, "rows": kept}
    path = write_report(report, results_folder(options))
    if path is not None:
        path.with_suffix(".md").write_text(table(rows) + "\n")
        plot(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
