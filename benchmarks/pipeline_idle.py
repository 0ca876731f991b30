"""Idle time of schedules, measured and simulated, on four gloo ranks whose stages sleep.

A sleeping stage needs no core, so four ranks do not hide each other's bubbles on a machine with two
cores. Each F, I and W of a rank's share of a micro-batch sleeps one unit (a B two; with c stages
per rank, each sleeps 1/c of that), and messages have one number. The executor and the lists are
those of a training step. The table also has what `simulate` predicts for the same lists. A unit is
one second: real messages take milliseconds, simulated ones no time.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from harness import header, parser, results_folder, run_ranks, write_report
from torch import Tensor

from warpweave.model.config import ParallelPlan
from warpweave.parallel import schedule as schedules
from warpweave.parallel.mesh import Mesh
from warpweave.parallel.pipeline import Distributed, Like, execute
from warpweave.parallel.simulate import simulate

CLAIM = "A pipeline's measured idle time is within 5 % of that of its simulated timeline."
WORLD, MICROBATCHES = 4, 16
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2, "pipedream": 1}
COST = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


class Sleeping:
    """A stage that sleeps instead of computing (`pipeline.interface.Stage`)."""

    def __init__(self, unit: float) -> None:
        self.unit, self.spans = unit, list[tuple[float, float]]()

    def _work(self, op: str, result: Tensor | None = None) -> Tensor | None:
        began = time.perf_counter()
        time.sleep(COST[op] * self.unit)
        self.spans.append((began, time.perf_counter()))
        return torch.zeros(1) if result is None else result

    def input_like(self, mb: int) -> Like:
        return (1,), torch.float32, torch.device("cpu")

    def start(self) -> None:
        self.spans.clear()

    def forward(self, mb: int, x: Tensor | None, version: int) -> Tensor | None:
        return self._work("F", x)

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        return self._work("B", dy)

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        return self._work("I", dy)

    def backward_weight(self, mb: int) -> None:
        self._work("W")

    def update(self) -> None:
        """Do nothing: nothing is trained."""


def lists_of(name: str, chunks: int) -> schedules.Schedule:
    """Return the lists of a schedule, with messages between ranks."""
    plan = ParallelPlan(schedule=name, chunks=chunks, microbatches=MICROBATCHES)
    return schedules.with_comm(plan.make_schedule(WORLD))


def measure(lists: schedules.Schedule, unit: float, rounds: int, staleness: int) -> list[float]:
    """Return the idle fraction of the span, per round; every rank calls this."""
    mesh = Mesh(pp=WORLD).connect()
    rank, of = mesh.index("pp"), schedules.placement(lists)
    group = mesh.group("pp")
    transport = Distributed(lists, group, staleness=staleness)
    stages = {s: Sleeping(0.0) for s, r in enumerate(of) if r == rank}
    execute(lists, stages, transport)  # connects
    for stage in stages.values():
        stage.unit = unit
    found = []
    for _ in range(rounds):
        torch.distributed.barrier()
        execute(lists, stages, transport)
        spans = [span for stage in stages.values() for span in stage.spans]
        busy = sum(end - begin for begin, end in spans)
        # perf_counter is a single clock for all processes of a machine
        own = [min(b for b, _ in spans), max(e for _, e in spans), busy]
        table = torch.zeros(WORLD, 3, dtype=torch.float64)
        table[rank] = torch.tensor(own, dtype=torch.float64)
        torch.distributed.all_reduce(table)
        span = float(table[:, 1].max() - table[:, 0].min())
        found.append(1 - float(table[:, 2].sum()) / (span * WORLD))
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    arguments = parser(CLAIM)
    arguments.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=[*SCHEDULES])
    options: argparse.Namespace = arguments.parse_args(argv)
    unit = 0.005 if options.quick else 1.0
    rounds = options.rounds or 1
    rows = []
    print(f"{CLAIM}\n{'schedule':14} {'simulated':>10} {'measured':>10} {'low':>8} {'high':>8}")
    for name in options.schedules:
        chunks = SCHEDULES[name]
        lists = lists_of(name, chunks)
        asynchronous = any(a.op == "UPDATE" for row in lists for a in row)
        expected = simulate(lists, COST).bubble
        idle = run_ranks(
            WORLD, measure, lists, unit / chunks, rounds, WORLD - 1 if asynchronous else 0
        )
        middle = sorted(idle)[len(idle) // 2]
        rows.append({"name": name, "simulated": expected, "idle": idle})
        print(f"{name:14} {expected:10.4f} {middle:10.4f} {min(idle):8.4f} {max(idle):8.4f}")
    head = header(ranks=WORLD, microbatches=MICROBATCHES, unit_s=unit)
    report = {"script": "pipeline_idle", "claim": CLAIM, "header": head, "rows": rows}
    write_report(json.loads(json.dumps(report)), results_folder(options))


if __name__ == "__main__":
    main()
