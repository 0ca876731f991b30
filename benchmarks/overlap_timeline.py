"""What overlap="chunked" hides: messages and matrix products of an MLP on two gloo ranks, in time.

Forward and backward of `parallel_mlp` with sequence parallelism run once with every collective
waited for at once ("none") and once with messages under pieces of the products. Each rank records

    products   when its matrix products run, by a dispatch mode around torch's operators
    messages   when something is under way, from the post to its completion

gloo's messages between two ranks have no future, no callback and no test for completion: waiting is
the only way to learn of it. So a thread per message does nothing but wait for it, outside Python's
lock, and notes the time; whoever needs the message waits for that thread. What is hidden is the
part of the time with a message under way in which a product runs on the same rank; the activation,
copies and everything else that is no product count as not hiding anything.

The hidden width is chosen when it runs: where multiplying one rank's share of the tokens takes as
long as sending it, each alone. There everything can be hidden and nothing has room to spare. The
messages of ranks on one machine cost the CPU time that products need as well, so hiding them saves
less time here than on a network, which moves bytes by itself.
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

from warpweave.kernels.gemm import gemm
from warpweave.parallel import collectives
from warpweave.parallel.collectives import start_all_gather, start_exchange
from warpweave.parallel.tensor.mlp import parallel_mlp

CLAIM = (
    "On 2 gloo ranks, at least 0.6 of the messages' time is hidden under products with "
    'overlap="chunked", and none of it with "none".'
)
WORLD, VARIANTS, WARMUP, LIMIT = 2, ("chunked", "none"), 2, 1e-5
PRODUCTS = {"aten::mm", "aten::addmm", "mkldnn::_linear_pointwise"}
UNITS, MOST_UNITS = 16, 1024  # hidden units of a rank: the search's step and end

Interval = tuple[float, float]

# ---------------------------------------------------------------- arithmetic of intervals


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals, in order."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def both(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """The time that is in `a` and in `b`."""
    pairs = [(max(s, t), min(e, f)) for s, e in union(a) for t, f in union(b)]
    return [(start, end) for start, end in pairs if start < end]


def length(intervals: Iterable[Interval]) -> float:
    """How much time is in any of them."""
    return sum(end - start for start, end in union(intervals))


# ---------------------------------------------------------------- recording


@dataclass
class Timeline:
    """One run on one rank: seconds of a clock that all ranks of a machine share."""

    products: list[Interval] = field(default_factory=list)
    messages: list[Interval] = field(default_factory=list)
    span: list[Interval] = field(default_factory=list)  # of the forward and of the backward


def hidden(timeline: Timeline) -> float:
    """Of the time with a message under way, the part in which a product runs."""
    under = both(timeline.messages, timeline.products)
    return length(under) / length(timeline.messages)


class Watched:
    """A message whose completion a thread notes."""

    def __init__(self, done: Future) -> None:
        self._done = done

    def wait(self) -> None:
        self._done.result()


class Recorder(TorchDispatchMode):
    """Records into `timeline` the products and messages of this rank while it is entered."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        super().__init__()
        self.timeline, self._threads, self._patches = Timeline(), threads, ExitStack()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        began = perf_counter()
        result = func(*args, **(kwargs or {}))
        if func._schema.name in PRODUCTS:
            self.timeline.products.append((began, perf_counter()))
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
    """One MLP over the ranks, and its inputs."""

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
        """y and the gradients of x and both weights."""
        y = self.forward(overlap)
        return [y, *torch.autograd.grad(y, self.leaves, self.dy)]

    def record(self, overlap: str, threads: ThreadPoolExecutor, into: list[Timeline]) -> None:
        """A run, which leaves its timeline in `into`."""
        recorder = Recorder(threads)
        with recorder:
            times = [perf_counter()]
            y = self.forward(overlap)
            times.append(perf_counter())
            torch.autograd.grad(y, self.leaves, self.dy)
            times.append(perf_counter())
        recorder.timeline.span += pairwise(times)
        into.append(recorder.timeline)


def check(problem: Problem) -> list[Check]:
    """Both variants compute the same, on every rank."""
    names = ("y", "dx", "dW1", "dW2")
    found, expected = (problem.run(overlap) for overlap in VARIANTS)
    pairs = dict(zip(names, zip(found, expected, strict=True), strict=True))
    return [
        assert_equal("output", {"y": pairs.pop("y")}, LIMIT),
        assert_equal("gradients", pairs, LIMIT),
    ]


def balanced(tokens: int, width: int) -> tuple[int, float, float]:
    """(units, ms of a product, ms of a message) of a rank's tokens, where both take as long.

    Of the slowest rank, so that all find the same, and the best of several rounds: other work on
    the machine takes from both.
    """
    x = torch.randn(tokens, width)
    place = torch.empty_like(x)

    def timed(call: Callable[[], object]) -> float:
        return min(interleave({"": call}, rounds=15, warmup=2)[""])

    message = timed(lambda: start_exchange(x, place, 1, dist.group.WORLD).wait())
    for units in range(UNITS, MOST_UNITS + 1, UNITS):
        product = timed(partial(gemm, x, torch.randn(width, units)))
        if product >= message:
            break
    return units, product, message


def everywhere(timeline: Timeline) -> list[Timeline]:
    """The timelines of all ranks, in seconds from the first start on."""
    kinds = [getattr(timeline, name) for name in ("products", "messages", "span")]
    table = torch.tensor(
        [(k, *interval) for k, kind in enumerate(kinds) for interval in kind], dtype=torch.float64
    )
    most = torch.tensor(len(table))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    padded = torch.full((int(most), 3), -1.0, dtype=torch.float64)
    padded[: len(table)] = table
    every = start_all_gather(padded[None], dist.group.WORLD).wait()
    began = every[..., 1][every[..., 0] == 2].min().item()
    found = []
    for rows in every.tolist():
        kinds = [[(s - began, e - began) for k, s, e in rows if k == kind] for kind in range(3)]
        found.append(Timeline(*kinds))
    return found


def measure(tokens: int, width: int, units: int | None, rounds: int) -> dict[str, Any]:
    """On every rank: choose the size, check, record."""
    size: tuple[int, float | None, float | None] = (units, None, None)
    if units is None:
        size = balanced(tokens, width)
    problem = Problem(tokens, width, size[0])
    checks = check(problem)
    timelines: dict[str, list[Timeline]] = {name: [] for name in VARIANTS}
    with ThreadPoolExecutor(16) as threads:
        runs = {name: partial(problem.record, name, threads, timelines[name]) for name in VARIANTS}
        times = interleave(runs, rounds=rounds, warmup=WARMUP)
    parts, shown = {}, {}
    for name, recorded in timelines.items():
        table = torch.tensor(
            [(hidden(t), length(t.products), length(t.messages)) for t in recorded[WARMUP:]],
            dtype=torch.float64,
        )
        dist.all_reduce(table)
        parts[name] = (table / dist.get_world_size()).t().tolist()
        fraction = table[:, 0]  # and of the round nearest to the middle, the same on all ranks,
        shown[name] = everywhere(recorded[WARMUP + (fraction - fraction.median()).abs().argmin()])
    return {"size": size, "checks": checks, "times": times, "parts": parts, "shown": shown}


# ---------------------------------------------------------------- report


@dataclass
class TimelineReport(Report):
    """A report that says what was hidden, too: quantiles over rounds of the mean over ranks."""

    hidden: dict[str, Ratio] = field(default_factory=dict)
    products_ms: dict[str, float] = field(default_factory=dict)  # in all, per variant: medians
    messages_ms: dict[str, float] = field(default_factory=dict)
    product_ms: float | None = None  # of a rank's tokens, alone
    message_ms: float | None = None

    def finish(self, folder: Path | None) -> None:
        if self.product_ms is not None:
            print(
                "one rank's tokens, each alone: "
                f"product {self.product_ms:.1f} ms, message {self.message_ms:.1f} ms"
            )
        for name, part in self.hidden.items():
            print(
                f"hidden, {name}: {part.median:.2f} ({part.p20:.2f} to {part.p80:.2f}) of messages "
                f"of {self.messages_ms[name]:.0f} ms, beside products of "
                f"{self.products_ms[name]:.0f} ms"
            )
        super().finish(folder)


def draw(shown: dict[str, list[Timeline]], report: TimelineReport, path: Path) -> None:
    """Both variants' timelines on one axis of time, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    colors = {"product": "#4c78a8", "message, hidden": "#f2cf5b", "message, not hidden": "#e45756"}
    figure, axes = plt.subplots(len(shown), 1, sharex=True, figsize=(9, 2.1 * len(shown) + 0.9))
    for axis, (name, ranks) in zip(axes, reversed(shown.items())):
        for rank, timeline in enumerate(ranks):
            at = 1.2 * (len(ranks) - 1 - rank)
            under = union(both(timeline.messages, timeline.products))
            for color, intervals, bottom in (
                (colors["product"], timeline.products, at + 0.5),
                (colors["message, not hidden"], union(timeline.messages), at),
                (colors["message, hidden"], under, at),
            ):
                bars = [(1e3 * start, 1e3 * (end - start)) for start, end in intervals]
                axis.broken_barh(bars, (bottom, 0.45), facecolors=color)
        for _, end in ranks[0].span:  # of the forward and of the backward
            axis.axvline(1e3 * end, color="#888888", lw=0.8, ls=":")
        axis.set_yticks([1.2 * (len(ranks) - 1 - r) + 0.47 for r in range(len(ranks))])
        axis.set_yticklabels([f"rank {rank}" for rank in range(len(ranks))])
        part, row = report.hidden[name], next(r for r in report.rows if r.name == name)
        axis.set_title(
            f'overlap="{name}": {part.median:.0%} of the messages\' time is hidden, '
            f"{row.ms:.0f} ms", loc="left", fontsize=10,
        )  # fmt: skip
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms; dotted lines: end of the forward, end of the backward (rank 0)")
    figure.legend(
        handles=[Patch(color=color, label=label) for label, color in colors.items()],
        loc="upper right", ncols=3, fontsize=8, frameon=False,
    )  # fmt: skip
    figure.suptitle(
        f"MLP {report.rows[0].shape} on {WORLD} gloo ranks", x=0.01, ha="left", fontsize=11
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "warpweave"}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    """The benchmark."""
    options = parser(CLAIM).parse_args(argv)
    report = TimelineReport("overlap_timeline", CLAIM, header(ranks=WORLD, threads_per_rank=1))
    tokens, width, units = (16, 8, 16) if options.quick else (2048, 1024, None)
    rounds = options.rounds or (1 if options.quick else 21)
    found = run_ranks(WORLD, measure, tokens, width, units, rounds)
    report.checks = found["checks"]
    units, report.product_ms, report.message_ms = found["size"]
    for name, (fractions, products, messages) in found["parts"].items():
        report.hidden[name] = Ratio(*_quantiles(fractions))
        report.products_ms[name] = 1e3 * median(products)
        report.messages_ms[name] = 1e3 * median(messages)
    report.add(
        found["times"], ["none"], shape=f"T{WORLD * tokens} E{width} F{WORLD * units} gelu",
        dtype="float32", tokens=WORLD * tokens,
    )  # fmt: skip
    folder = results_folder(options)
    if folder is not None:
        draw(found["shown"], report, folder / report.header["kind"] / f"{report.script}.svg")
    report.finish(folder)


if __name__ == "__main__":
    main()
