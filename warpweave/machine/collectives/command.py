"""Run ``warpweave collectives``."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from warpweave.cli.messages import refusing
from warpweave.launch.devices import BACKENDS, choose_backend
from warpweave.launch.processes import Processes, under_torchrun
from warpweave.launch.ranks import launch
from warpweave.launch.session import join, reported
from warpweave.machine.collectives.fit import fit, terms
from warpweave.machine.collectives.options import CollectivesConfig
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.network import traffic
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.run_collective import run_collective

Row = dict[str, Any]


def collectives_rank(config: CollectivesConfig, port: int | None = None) -> list[Row]:
    """Measure as one rank. Return rows of algorithm, elements, and seconds, including the backend's
    own algorithm."""
    backend = BACKENDS.get(config.device)
    session = join(Mesh(dp=config.ranks), timeout=config.timeout, backend=backend, port=port)
    torch.set_num_threads(1)
    group, rows = dist.group.WORLD, []
    with reported(session, (), refused=(ValueError,)):
        own = dist.get_backend(group)
        runs: dict[str, Callable[[Tensor], Any]] = {own: dist.all_reduce}
        for name, algorithm in all_reduces(config.ranks, config.node).items():
            runs[name] = partial(run_collective, algorithm, group=group)
        for n in config.elements:
            x = torch.zeros(n, device=session.device)
            found: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(config.repeats + 1):  # interleaved; the first connects and checks
                for name, run in runs.items():
                    session.beat(n, name)
                    x.fill_(session.rank + 1)
                    seconds = _timed(run, x)
                    if repeat == 0:
                        _check(name, x, config.ranks)
                    else:
                        found[name].append(seconds)
            for name, times in found.items():
                seconds = statistics.median(times)
                rows.append({"algorithm": name, "elements": n, "seconds": seconds})
        session.close()
    return rows


def _timed(run: Callable[[Tensor], Any], x: Tensor) -> float:
    """Seconds from the arrival of all ranks until the last one is done."""
    dist.barrier()
    began = time.perf_counter()
    run(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=x.device)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _check(name: str, x: Tensor, ranks: int) -> None:
    expected = ranks * (ranks + 1) // 2
    if not bool((x == expected).all()):
        raise ValueError(
            f"{name}: every element must be {expected}, which is the sum of 1..{ranks}, got "
            f"{x.unique().tolist()}"
        )


def summarised(config: CollectivesConfig, measured: list[Row]) -> Row:
    """Add rounds, bytes, and predicted seconds to the measured rows, and fit the network."""
    algorithms, ranks = all_reduces(config.ranks, config.node), config.ranks
    ours = [row for row in measured if row["algorithm"] in algorithms]
    factors = [terms(algorithms[row["algorithm"]], ranks, row["elements"]) for row in ours]
    network = fit(factors, [row["seconds"] for row in ours])
    rows = []
    for row in measured:
        row = {**row, "bytes": 4 * row["elements"]}
        if row["algorithm"] in algorithms:
            moved = traffic(algorithms[row["algorithm"]], ranks, row["elements"], network)
            row |= {"rounds": moved.rounds, "busiest": moved.busiest, "at_once": moved.at_once}
            row |= {"predicted": moved.seconds}
        rows.append(row)
    errors = [row["predicted"] / row["seconds"] for row in rows if "predicted" in row]
    return {
        "ranks": ranks,
        "rows": rows,
        "network": {k: v for k, v in dataclasses.asdict(network).items() if k[0] != "n"},
        "predicted_by_measured": [round(min(errors), 3), round(max(errors), 3)],
    }


def rows_table(found: Row) -> str:
    """The rows as a text table, ordered by size."""
    head = f"{'algorithm':<20}{'bytes':>11}{'rounds':>8}{'busiest rank':>14}{'at once':>13}"
    lines = [head + f"{'predicted ms':>14}{'measured ms':>13}"]
    for row in found["rows"]:
        line = f"{row['algorithm']:<20}{row['bytes']:>11,}"
        if "rounds" in row:
            line += f"{row['rounds']:>8}{row['busiest']:>14,}{row['at_once']:>13,}"
            line += f"{1e3 * row['predicted']:>14.3f}"
        lines.append(f"{line:<80}{1e3 * row['seconds']:>13.3f}")
    alpha, beta, gamma = found["network"].values()
    low, high = found["predicted_by_measured"]
    lines += [
        "",
        f"fitted: {1e6 * alpha:.1f} us per round, {1e9 * beta:.3f} ns per byte over a link, "
        f"{1e9 * gamma:.3f} ns per byte reduced; predicted / measured from {low:.2f} to {high:.2f}",
    ]
    return "\n".join(lines)


def plot(found: Row, path: Path) -> None:
    """Plot measured (points) and predicted (lines) milliseconds over bytes as PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    for name in dict.fromkeys(row["algorithm"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["algorithm"] == name]
        sizes = [row["bytes"] for row in rows]
        times = [1e3 * row["seconds"] for row in rows]
        (points,) = axes.plot(sizes, times, "o", label=name)
        if "predicted" in rows[0]:
            predicted = [1e3 * row["predicted"] for row in rows]
            axes.plot(sizes, predicted, color=points.get_color(), lw=0.8)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="ms (line: predicted)")
    axes.set_title(f"all-reduce, {found['ranks']} ranks")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def run(config: CollectivesConfig, processes: Processes | None = None) -> None:
    """Run ``warpweave collectives``."""
    with refusing(ValueError, OSError):
        if under_torchrun():
            raise ValueError("collectives starts its own ranks; run it without torchrun")
        config.check()
        if config.out is not None:
            config.out.mkdir(parents=True, exist_ok=True)
        backend = choose_backend(config.ranks, BACKENDS.get(config.device))
    mesh, how = Mesh(dp=config.ranks), {"backend": backend, "processes": processes}
    found = summarised(config, launch(collectives_rank, (config,), mesh, **how))
    print(rows_table(found))
    if config.out is not None:
        (config.out / "collectives.json").write_text(json.dumps(found) + "\n")
        plot(found, config.out / "collectives.png")
    print(json.dumps(found), flush=True)
