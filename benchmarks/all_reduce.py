"""All-reduce algorithms by number of ranks: simulated up to 1,024, measured here up to 8.

The simulation counts the rounds that would run (`parallel.algorithms.network.traffic`): "rounds"
are units of latency, "busiest" is what the busiest rank sends or receives, and "at once" is what is
in flight in the fullest round, both in multiples of the vector. Each number is compared with its
closed form. The table also has a parameter server that collects every rank's gradient and returns
the sum. The measured ranks are gloo processes that share this machine's cores, so links are not
their bottleneck; the simulation does not model that.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2
from pathlib import Path
from typing import Any

from harness import header, parser, results_folder, write_report

from warpweave.launch import launch
from warpweave.machine.collectives.command import collectives_rank, summarised
from warpweave.machine.collectives.options import CollectivesConfig
from warpweave.parallel.algorithms.all_reduce import all_reduces
from warpweave.parallel.algorithms.network import Network, traffic
from warpweave.parallel.algorithms.rounds import Algorithm, Recv, Round, Rounds, Send
from warpweave.parallel.mesh import Mesh

CLAIM = (
    "The rounds of an all-reduce grow with R in a ring, with log R in a butterfly, and not at all "
    "if all send to all, where the bytes at once grow with R^2."
)
SCRIPT = "all_reduce"
SIZES = 1 << 12, 1 << 16, 1 << 20, 1 << 22  # bytes


def server(rank: int, ranks: int, n: int) -> Rounds:
    """A synchronous parameter server on rank 0: one round of pushes, one round of pulls."""
    others = range(1, ranks)
    if rank == 0:
        yield Round((), tuple(Recv(peer, 0, n, True) for peer in others))
        yield Round(tuple(Send(peer, 0, n) for peer in others))
    else:
        yield Round((Send(0, 0, n),))
        yield Round((), (Recv(0, 0, n, False),))


# R -> (rounds, busiest, at once), in multiples of the vector.
CLOSED: dict[str, Callable[[int], tuple[float, float, float]]] = {
    "naive": lambda R: (2 * (R - 1), R - 1, 1),
    "server": lambda R: (2, R - 1, R - 1),
    "parallel": lambda R: (1, R - 1, R * (R - 1)),
    "ring": lambda R: (2 * (R - 1), 2 * (R - 1) / R, 1),
    "recursive doubling": lambda R: (log2(R), log2(R), R),
    "halving-doubling": lambda R: (2 * log2(R), 2 * (R - 1) / R, R / 2),
}
GROWTH = {
    "naive": "rounds O(R), busiest rank O(R)",
    "server": "rounds O(1), busiest rank O(R)",
    "parallel": "rounds O(1), at once O(R^2)",
    "ring": "rounds O(R), busiest rank O(1)",
    "recursive doubling": "rounds O(log R), busiest rank O(log R)",
    "halving-doubling": "rounds O(log R), busiest rank O(1)",
}


def simulate(ranks: int, n: int) -> list[dict[str, Any]]:
    """Simulate each algorithm on this many ranks with n elements each; raise an error if a number
    differs from its closed form."""
    algorithms: dict[str, Algorithm] = {**all_reduces(ranks), "server": server}
    rows = []
    for name, closed in CLOSED.items():
        found = traffic(algorithms[name], ranks, n, Network(0.0, 0.0), size=1)
        counted = found.rounds, found.busiest / n, found.at_once / n
        if counted != closed(ranks):
            raise AssertionError(f"{name}, {ranks} ranks: {counted}, expected {closed(ranks)}")
        rows.append(dict(zip(("rounds", "busiest", "at_once"), counted), name=name, ranks=ranks))
    return rows


def measure(ranks: int, sizes: tuple[int, ...], repeats: int) -> dict[str, Any]:
    """Return the milliseconds of each algorithm and of gloo, by bytes, on this machine, and the
    network fitted to ours: seconds per round, per byte over a link and per byte reduced."""
    config = CollectivesConfig(
        ranks=ranks, sizes=tuple(map(str, sizes)), repeats=repeats, device="cpu", timeout=120.0
    )
    rows = launch(collectives_rank, (config,), Mesh(dp=ranks), backend="gloo")
    found = summarised(config, rows)
    ms: dict[str, list[float]] = {}
    for row in found["rows"]:
        ms.setdefault(row["algorithm"], []).append(round(1e3 * row["seconds"], 3))
    return {"ms": ms, **{k: found[k] for k in ("network", "predicted_by_measured")}}


def table(rows: list[dict[str, Any]], sizes: tuple[int, ...], measured: dict[int, Any]) -> str:
    """Format the largest simulated number of ranks, and the measurements."""
    last = max(row["ranks"] for row in rows)
    lines = [f"{last} ranks{'':12} {'rounds':>7} {'busiest':>9} {'at once':>9}   growth"]
    for row in rows:
        if row["ranks"] == last:
            counts = f"{row['rounds']:7.0f} {row['busiest']:9.2f} {row['at_once']:9.0f}"
            lines.append(f"{row['name']:22} {counts}   {GROWTH[row['name']]}")
    for ranks, found in measured.items():
        heads = "".join(f"{size:>12,}" for size in sizes)
        lines += ["", f"{f'ms, R = {ranks}, bytes':22}{heads}"]
        for name, times in found["ms"].items():
            lines.append(f"{name:22}" + "".join(f"{time:12.3f}" for time in times))
        alpha, beta, gamma = found["network"].values()
        low, high = found["predicted_by_measured"]
        lines.append(
            f"fitted: {1e6 * alpha:.0f} us per round, {1e9 * beta:.2f} ns per byte over a link, "
            f"{1e9 * gamma:.2f} ns per byte reduced; predicted / measured {low:.2f} to {high:.2f}"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot rounds, the busiest rank's vectors and vectors at once, over ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "warpweave"}):
        figure, axes = plt.subplots(1, 3, figsize=(12, 4))
        for one, key in zip(axes, ("rounds", "busiest", "at_once"), strict=True):
            for name in CLOSED:
                own = [row for row in rows if row["name"] == name]
                one.plot([r["ranks"] for r in own], [r[key] for r in own], marker=".", label=name)
            one.set(xscale="log", yscale="log", xlabel="ranks")
            one.grid(alpha=0.3)
        axes[0].set_title("rounds")
        axes[1].set_title("vectors through the busiest rank")
        axes[2].set_title("vectors in flight at once")
        axes[0].legend(fontsize=7)
        figure.tight_layout()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    most, some, sizes, repeats = (
        (16, (2,), SIZES[:2], 1) if options.quick else (1024, (2, 4, 8), SIZES, 9)
    )
    report: dict[str, Any] = {"script": SCRIPT, "claim": CLAIM, "header": header()}
    ranks = [2**p for p in range(1, most.bit_length())]
    rows = [row for R in ranks for row in simulate(R, most)]
    measured = {R: measure(R, sizes, options.rounds or repeats) for R in some}
    report |= {"simulated": rows, "bytes": sizes, "measured": measured}
    print(CLAIM, table(rows, sizes, measured), sep="\n")
    path = write_report(report, results_folder(options))
    if path is not None:
        draw(rows, path.with_suffix(".svg"))


if __name__ == "__main__":
    main()
