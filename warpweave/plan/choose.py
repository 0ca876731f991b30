"""Find the fastest layouts that fit given hardware, by exact best-first branch and bound.

A layout is a mesh (tp within a node, pp, cp, dp), a micro-batch, a ZeRO stage, recomputation, a
schedule and its chunks. There are tens of thousands of layouts, and few are simulated. A heap holds
three kinds of item, each ordered by a lower bound of its time: first the branches (mesh,
micro-batch, recomputation), then the layouts of a branch taken from the heap, then simulated
layouts. A simulated layout that leaves the heap is the next best, because the bounds of all
remaining items are larger:

    branch   bound: its blocks' work, no bubble         memory: all of ZeRO 3, one micro-batch
    layout   bound: `time.least_time`                   memory: `memory.estimate`
    answer   the simulated time

Most of the fastest layouts differ in a single number, so the answer has only the fastest of each
`family` (layouts that shard over the same axes). Among equally fast layouts, the one with the
fewest axes, the fewest ranks on them and the simplest options comes first (`_simplicity`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, get_args

from warpweave.model.config import GPTConfig, ParallelPlan, Recompute
from warpweave.parallel.mesh import Mesh, divisors
from warpweave.parallel.schedule import FAMILIES
from warpweave.plan.device import Hardware
from warpweave.plan.memory import MemoryEstimate, estimate, least_memory, pipeline_shape
from warpweave.plan.time import Job, StepTime, block_work, least_time, predict

_ROWS = 1024  # minimum tokens of a sequence on a context rank
_BATCHES = (1, 2, 4, 8, 16)  # sequences in a micro-batch
_CHUNKS = 16  # maximum stages per rank
_GIB = 2**30


@dataclass(frozen=True)
class Search:
    """The problem to find layouts for.

    Attributes:
        config: the model.
        gpus: the number of GPUs.
        hardware: their figures.
        sequences: sequences per step, over all data replicas.
        dtype: dtype of parameters and activations.
    """

    config: GPTConfig
    gpus: int
    hardware: Hardware
    sequences: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.sequences < 1:
            given = f"{self.gpus} and {self.sequences}"
            raise ValueError(f"gpus and sequences must be at least 1, got {given}")


@dataclass(frozen=True)
class Chosen:
    """A layout that fits, with its prediction."""

    job: Job
    time: StepTime
    memory: list[MemoryEstimate]


@dataclass
class Found:
    """The result of a search.

    Attributes:
        best: the fastest layouts, each the best of its family, in order.
        refused: the reason that rules layouts out -> how many.
        miss: the layout that exceeds memory by the least, among those that would be faster than the
            last of `best`, and the bytes that it needs.
        simulated, bounded: the number of layouts simulated, and of layouts with a bound.
    """

    best: list[Chosen] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    miss: tuple[Job, int] | None = None
    simulated: int = 0
    bounded: int = 0


def family(job: Job) -> frozenset[str]:
    """Return the axes over which a layout shards the model; all other ranks are data ranks."""
    return frozenset(axis for axis in ("tp", "pp", "cp") if getattr(job.mesh, axis) > 1)


def _simplicity(job: Job) -> tuple[int, ...]:
    """Return the sort key for equally fast layouts, the simplest first."""
    mesh, plan = job.mesh, job.plan
    ranks = mesh.tp * mesh.pp * mesh.cp
    words = get_args(Recompute).index(plan.recompute), [*FAMILIES].index(plan.schedule)
    return (len(family(job)), ranks, plan.zero, *words, plan.chunks, plan.microbatches)


def choose_layouts(search: Search, keep: int = 5, *, families: bool = True) -> Found:
    """Return at most `keep` of the fastest layouts: the fastest of each family.

    A family is left out if a different one shards over fewer of its axes and is as fast. With
    `families` False the layouts are the fastest overall. Raises ValueError, with the most common
    reasons and their counts, if there is none.
    """
    found, heap, number = Found(), [], count()
    seen: dict[frozenset[str], float] = {}  # family -> the time of its fastest

    def push(least: float, item: Any) -> None:
        """Add an item with its rounded time. Among equally fast items, those still to be simulated
        come first, then simulated ones in the order of `_simplicity`."""
        simulated = isinstance(item, Chosen)
        simple = _simplicity(item.job) if simulated else ()
        heapq.heappush(heap, (float(f"{least:.9g}"), simulated, simple, next(number), item))

    bound = math.inf
    for branch in branches(search, found.refused):
        least = least_memory(replace(branch, plan=replace(branch.plan, zero=3)))
        if least > search.hardware.capacity:
            found.refused["does not fit into memory with any schedule or ZeRO stage"] += 1
            bound = min(bound, least)
            continue
        work, layers = block_work(branch), branch.config.layers / branch.mesh.pp
        push(branch.plan.microbatches * layers * (work.forward + work.backward), (branch,))
    while heap and len(found.best) < keep:
        least, *_, item = heapq.heappop(heap)
        kind = family(item[0] if isinstance(item, tuple) else getattr(item, "job", item))
        if families and kind in seen:
            continue
        if isinstance(item, Chosen):
            if not families or not any(kind > of and time == least for of, time in seen.items()):
                found.best.append(item)
            seen[kind] = least
        elif isinstance(item, tuple):
            for job in layouts_of(item[0], found.refused):
                if least_memory(job) > search.hardware.capacity:
                    found.refused["does not fit into memory"] += 1
                    continue
                found.bounded += 1
                push(least_time(job), job)
        else:
            memory = estimate(item)
            needed = max(rank.total for rank in memory)
            if needed > search.hardware.capacity:
                found.refused["does not fit into memory"] += 1
                if found.miss is None or needed < found.miss[1]:
                    found.miss = item, needed
                continue
            found.simulated += 1
            time = predict(item)
            push(time.seconds, Chosen(item, time, memory))
    if not found.best:
        raise ValueError(_none(search, found, bound))
    return found


def branches(search: Search, refused: Counter[str]) -> Iterator[Job]:
    """Yield every mesh, micro-batch and recomputation, with one schedule; count what is refused."""
    config, layers = search.config, search.config.layers
    if search.gpus < search.hardware.node:
        search = replace(search, hardware=replace(search.hardware, node=search.gpus))
    for tp in (n for n in divisors(search.gpus) if search.hardware.joins(1, n)):
        try:
            config.check_tensor(tp)
        except ValueError as error:
            refused[str(error)] += 1
            continue
        for pp in (n for n in divisors(search.gpus // tp) if n <= layers):
            for cp in divisors(search.gpus // tp // pp):
                dp = search.gpus // tp // pp // cp
                if cp > 1 and config.seq_len // cp < _ROWS:
                    continue
                if cp & (cp - 1) and config.seq_len % (2 * cp):  # such as 7 instead of 8 ranks
                    chunks = f"the {2 * cp} chunks of cp = {cp}"
                    refused[f"seq_len = {config.seq_len} is not divisible by {chunks}"] += 1
                    continue
                if search.sequences % dp:
                    refused[f"{search.sequences} sequences are not divisible by dp"] += 1
                    continue
                yield from _of_mesh(search, Mesh(dp, cp, tp, pp), refused)


def _of_mesh(search: Search, mesh: Mesh, refused: Counter[str]) -> Iterator[Job]:
    each = search.sequences // mesh.dp
    for batch in (n for n in _BATCHES if each % n == 0):
        plan = ParallelPlan(microbatches=each // batch)
        job = Job(search.config, mesh, plan, batch, search.dtype, "cuda", hardware=search.hardware)
        if job.tokens % mesh.tp:
            refused[f"{job.tokens} tokens are not divisible by tp = {mesh.tp}"] += 1
            continue
        for recompute in get_args(Recompute):
            yield replace(job, plan=replace(plan, recompute=recompute))


def layouts_of(branch: Job, refused: Counter[str]) -> Iterator[Job]:
    """Yield every schedule, number of chunks and ZeRO stage of a branch."""
    mesh, plan = branch.mesh, branch.plan
    for name, schedule in FAMILIES.items():
        if schedule.asynchronous or (mesh.pp == 1 and name != "1f1b"):
            continue
        for chunks in _chunk_counts(schedule.chunks, branch.config.layers, mesh.pp):
            own = replace(plan, schedule=name, chunks=chunks)
            try:
                pipeline_shape(own, mesh.pp)
            except ValueError:
                what = "this number of micro-batches or chunks"
                refused[f"schedule {name} does not support {what}"] += 1
                continue
            for zero in (0, 1, 2, 3) if mesh.data > 1 else (1,):
                yield replace(branch, plan=replace(own, zero=zero))


def _chunk_counts(fixed: int | None, layers: int, pp: int) -> list[int]:
    """Return the stages per rank to try: powers of two, and divisors of a rank's layers."""
    most = min(layers // pp, _CHUNKS)
    if fixed is not None:
        return [fixed] if fixed <= most else []
    return [n for n in range(2, most + 1) if not n & (n - 1) or layers % (pp * n) == 0]


def _none(search: Search, found: Found, bound: float) -> str:
    """Explain in one line why no layout is left; those that were pruned need more than `bound`."""
    room = f"{search.hardware.name} has {search.hardware.capacity / _GIB:.1f}"
    what = f"no layout of {search.gpus} GPUs"
    miss = math.inf if found.miss is None else found.miss[1]
    if (least := min(bound, miss)) < math.inf:
        needs = f"{'more than ' if bound < miss else ''}{least / _GIB:.1f} GiB"
        return f"{what} fits: the smallest needs {needs} per GPU, but {room}"
    reasons = ", ".join(f"{why} ({n})" for why, n in found.refused.most_common(3))
    return f"{what} is possible: {reasons or 'their number has no suitable divisors'}"
