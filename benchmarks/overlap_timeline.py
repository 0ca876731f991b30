"""Timelines of what overlap="chunked" hides: messages and products of an MLP on two gloo ranks.

`parallel_mlp` with sequence parallelism runs forward and backward, once waiting for every
collective at once ("none") and once with messages behind pieces of the products. Each rank records

    computation  when torch's operators run, by a dispatch mode around them; products among these
    messages     when something is in flight, from the post to its completion

gloo's messages between two ranks have no future, no callback and no test for completion: only
waiting tells when they complete. So each message has a thread that waits for it, without Python's
lock, and records the time; code that needs the message waits for that thread. The hidden part is
the part of the time with a message in flight in which the same rank computes. The report also
has how much of it the products alone hide.

The hidden width is chosen at run time, so that the blocking twin computes for as long as it has
messages in flight. Then everything could be hidden, with no room to spare. On one machine, ranks'
messages take CPU time that the products also need, so hiding them saves less time here than on a
network, which moves bytes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from harness import (
    Check,
    Ratio,
    Report,
    _quantiles,
    assert_equal,
    header,
    interleave,
    parser,
    results_folder,
    run_ranks,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from warpweave.parallel import collectives
from warpweave.parallel.collectives import start_all_gather
from warpweave.parallel.tensor.mlp import parallel_mlp

CLAIM = (
    "On 2 gloo ranks, at least 0.6 of the messages' time is hidden under computation with "
    'overlap="chunked", and none of it with "none".'
)
WORLD, VARIANTS, WARMUP, LIMIT = 2, ("chunked", "none"), 2, 1e-5
PRODUCTS = {
    "aten::mm", "aten::addmm", "mkldnn::_linear_pointwise",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
}  # fmt: skip
STEP, MOST = 16, 64  # hidden units per rank: at most MOST multiples of STEP

Interval = tuple[float, float]

# ---------------------------------------------------------------- arithmetic of intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same points of time as disjoint intervals, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def both(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Return the time that is both in `a` and in `b`."""
    pairs = [(max(s, t), min(e, f)) for s, e in union(a) for t, f in union(b)]
    return [(start, end) for start, end in pairs if start < end]


def length(intervals: Iterable[Interval]) -> float:
    """Return the time that any of the intervals covers."""
    return sum(end - start for start, end in union(intervals))


# ---------------------------------------------------------------- recording


@dataclass
class Timeline:
    """One run on one rank: seconds of a clock that all ranks of a machine share."""

    computation: list[Interval] = field(default_factory=list)
    products: list[Interval] = field(default_factory=list)
    messages: list[Interval] = field(default_factory=list)
    span: list[Interval] = field(default_factory=list)  # the forward, and the backward


def hidden(messages: list[Interval], work: list[Interval]) -> float:
    """Return the fraction of the time with a message in flight in which there is `work`."""
    return length(both(messages, work)) / length(messages)


class Watched:
    """A message whose completion time a thread records."""

    def __init__(self, done: Future) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


class Recorder(TorchDispatchMode):
    """Record into `timeline` what this rank computes and sends while the mode is active."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self.timeline, self._threads, self._patches = Timeline(), threads, ExitStack()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = perf_counter()
        result = func(*args, **(kwargs or {}))
        interval = began, perf_counter()
        if func.namespace != "c10d":
            self.timeline.computation.append(interval)
        if func._schema.name in PRODUCTS:
            self.timeline.products.append(interval)
        return result

    def _posting(self, post: Callable[..., Any]) -> Callable[..., Any]:
        def finish(work: dist.Work, began: float) -> None:
            work.wait()
            self.timeline.messages.append((began, perf_counter()))

        def posted(*args: Any, **options: Any) -> Any:
            began = perf_counter()
            works = post(*args, **options)
            if isinstance(works, list):
                return [Watched(self._threads.submit(finish, work, began)) for work in works]
            return Watched(self._threads.submit(finish, works, began))

        return posted

    def __enter__(self):
        for owner, name in (
            (dist, "batch_isend_irecv"),
            (collectives, "all_gather_into"),
            (collectives, "reduce_scatter_into"),
        ):
            post = self._posting(getattr(owner, name))
            self._patches.enter_context(mock.patch.object(owner, name, post))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)


# ---------------------------------------------------------------- the problem


class Problem:
    """One MLP over the ranks, with its inputs."""

    def __init__(self, tokens: int, width: int, units: int) -> None:
        generator = torch.Generator().manual_seed(dist.get_rank())

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

        self.leaves = [
            t.requires_grad_()
            for t in (normal(tokens, width), normal(units, width), normal(width, units))
        ]
        self.dy = normal(tokens, width)

    def forward(self, overlap: str) -> Tensor:
        return parallel_mlp(
            *self.leaves, activation="gelu", group=dist.group.WORLD, sequence_parallel=True,
            overlap=overlap,
        )  # fmt: skip

    def run(self, overlap: str) -> list[Tensor]:
        """Return y and the gradients of x and both weights."""
        y = self.forward(overlap)
        return [y, *torch.autograd.grad(y, self.leaves, self.dy)]

    def record(self, overlap: str, threads: ThreadPoolExecutor, into: list[Timeline]) -> None:
        """Run once, and append the timeline to `into`."""
        recorder = Recorder(threads)
        with recorder:
            times = [perf_counter()]
            y = self.forward(overlap)
            times.append(perf_counter())
            torch.autograd.grad(y, self.leaves, self.dy)
            times.append(perf_counter())
        recorder.timeline.span += pairwise(times)
        into.append(recorder.timeline)


def check(
    problem: Problem, variants: tuple[str, str] = VARIANTS,
    names: tuple[str, ...] = ("y", "dx", "dW1", "dW2"),
) -> list[Check]:  # fmt: skip
    """Check on every rank that both variants compute the same; `names[0]` is the output."""
    found, expected = (problem.run(overlap) for overlap in variants)
    pairs = dict(zip(names, zip(found, expected, strict=True), strict=True))
    return [
        assert_equal("output", {names[0]: pairs.pop(names[0])}, LIMIT),
        assert_equal("gradients", pairs, LIMIT),
    ]


def record(
    problem: Problem, names: Iterable[str], rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[Timeline]]]:
    """Return (ms, this rank's timelines) of the variants, with one list entry per round."""
    found: dict[str, list[Timeline]] = {name: [] for name in names}
    with ThreadPoolExecutor(16) as threads:
        runs = {name: partial(problem.record, name, threads, into) for name, into in found.items()}
        times = interleave(runs, rounds=rounds, warmup=WARMUP)
    return times, {name: timelines[WARMUP:] for name, timelines in found.items()}


def parts(timelines: list[Timeline]) -> list[list[float]]:
    """Return, per round, the mean over ranks of: hidden, hidden by products, total seconds of
    computation, total seconds of messages."""
    rows = [
        (
            hidden(t.messages, t.computation), hidden(t.messages, t.products),
            length(t.computation), length(t.messages),
        )
        for t in timelines
    ]  # fmt: skip
    table = torch.tensor(rows, dtype=torch.float64)
    dist.all_reduce(table)
    return (table / dist.get_world_size()).t().tolist()


def balanced(tokens: int, width: int) -> int:
    """Return hidden units per rank for which the blocking twin computes as long as it has messages
    in flight; the same on all ranks."""
    units = 4 * STEP
    for _ in range(4):
        _, timelines = record(Problem(tokens, width, units), ["none"], rounds=5)
        *_, computation, messages = map(median, parts(timelines["none"]))
        units = STEP * max(1, min(MOST, round(units * messages / computation / STEP)))
    return units


def everywhere(timeline: Timeline) -> list[Timeline]:
    """Return the timelines of all ranks, in seconds since the first start."""
    kinds = list(vars(timeline).values())
    table = torch.tensor(
        [(k, *interval) for k, kind in enumerate(kinds) for interval in kind], dtype=torch.float64
    )
    most = torch.tensor(len(table))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    padded = torch.full((int(most), 3), -1.0, dtype=torch.float64)
    padded[: len(table)] = table
    every = start_all_gather(padded[None], dist.group.WORLD).wait()
    began = every[..., 1][every[..., 0] == len(kinds) - 1].min().item()
    found = []
    for rows in every.tolist():
        lists: list[list[Interval]] = [[] for _ in kinds]
        for kind, start, end in rows:
            if kind >= 0:
                lists[int(kind)].append((start - began, end - began))
        found.append(Timeline(*lists))
    return found


def measure(tokens: int, width: int, units: int | None, rounds: int) -> dict[str, Any]:
    """Choose the size, check, and record; every rank calls this."""
    units = units or balanced(tokens, width)
    problem = Problem(tokens, width, units)
    checks = check(problem)
    times, timelines = record(problem, VARIANTS, rounds)
    shown = {}
    for name, ms in times.items():  # the round with the median time, the same on all ranks
        shown[name] = everywhere(
            timelines[name][sorted(range(rounds), key=ms.__getitem__)[rounds // 2]]
        )
    every = {name: parts(timelines[name]) for name in VARIANTS}
    return {"units": units, "checks": checks, "times": times, "parts": every, "shown": shown}


# ---------------------------------------------------------------- report


@dataclass
class TimelineReport(Report):
    """A report with the hidden fractions: quantiles over rounds of the mean over ranks."""

    hidden: dict[str, Ratio] = field(default_factory=dict)
    hidden_by_products: dict[str, Ratio] = field(default_factory=dict)
    computation_ms: dict[str, float] = field(default_factory=dict)  # totals: medians
    messages_ms: dict[str, float] = field(default_factory=dict)

    def finish(self, folder: Path | None) -> None:
        for name, part in self.hidden.items():
            print(
                f"hidden, {name}: {part.median:.2f} ({part.p20:.2f} to {part.p80:.2f}), "
                f"by products {self.hidden_by_products[name].median:.2f}; messages "
                f"{self.messages_ms[name]:.0f} ms, computation {self.computation_ms[name]:.0f} ms"
            )
        super().finish(folder)


def draw(
    shown: dict[str, list[Timeline]], report: TimelineReport, path: Path, *, title: str,
    label: str = "{}",
) -> None:  # fmt: skip
    """Draw all variants' timelines on one time axis, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colors = {
        "product": "#4c78a8",
        "other computation": "#a0cbe8",
        "message, hidden": "#f2cf5b",
        "message, not hidden": "#e45756",
    }
    figure, axes = plt.subplots(len(shown), 1, sharex=True, figsize=(9, 2.1 * len(shown) + 0.9))
    for axis, (name, ranks) in zip(axes, reversed(shown.items())):
        for rank, timeline in enumerate(ranks):
            at = 1.2 * (len(ranks) - 1 - rank)
            under = both(timeline.messages, timeline.computation)
            for color, intervals, bottom in (
                (colors["other computation"], union(timeline.computation), at + 0.5),
                (colors["product"], timeline.products, at + 0.5),
                (colors["message, not hidden"], union(timeline.messages), at),
                (colors["message, hidden"], under, at),
            ):
                bars = [(1e3 * start, 1e3 * (end - start)) for start, end in intervals]
                axis.broken_barh(bars, (bottom, 0.45), facecolors=color)
        for _, end in ranks[0].span:  # end of the forward, and of the backward
            axis.axvline(1e3 * end, color="#888888", lw=0.8, ls=":")
        axis.set_yticks([1.2 * (len(ranks) - 1 - r) + 0.47 for r in range(len(ranks))])
        axis.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
        part, row = report.hidden[name], next(r for r in report.rows if r.name == name)
        axis.set_title(
            f"{label.format(name)}: {part.median:.0%} of the messages' time is hidden, "
            f"{row.ms:.0f} ms", loc="left", fontsize=10,
        )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel(
        f"ms ({report.rows[0].shape}); dotted: end of the forward, of the backward (rank 0)"
    )
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in colors.items()],
        loc="upper right", ncols=4, fontsize=8, frameon=False,
    )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "warpweave"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark."""
    options = parser(CLAIM).parse_args(argv)
    report = TimelineReport("overlap_timeline", CLAIM, header(ranks=WORLD, threads_per_rank=1))
    tokens, width, units = (16, 8, 16) if options.quick else (2048, 1024, None)
    rounds = options.rounds or (1 if options.quick else 21)
    found = run_ranks(WORLD, measure, tokens, width, units, rounds)
    report.checks = found["checks"]
    units = found["units"]
    for name, (fractions, by_products, computation, messages) in found["parts"].items():
        report.hidden[name] = Ratio(*_quantiles(fractions))
        report.hidden_by_products[name] = Ratio(*_quantiles(by_products))
        report.computation_ms[name] = 1e3 * median(computation)
        report.messages_ms[name] = 1e3 * median(messages)
    report.add(
        found["times"], ["none"], shape=f"T{WORLD * tokens} E{width} F{WORLD * units} gelu",
        dtype="float32", tokens=WORLD * tokens,
    )  # fmt: skip
    folder = results_folder(options)
    if folder is not None:
        draw(
            found["shown"], report, folder / report.header["kind"] / f"{report.script}.svg",
            title=f"MLP on {WORLD} gloo ranks", label='overlap="{}"',
        )  # fmt: skip
    report.finish(folder)


if __name__ == "__main__":
    main()
