"""Messages round a ring, without a transport: what a rank does is a generator of hops.

`run_on_group` executes one rank's steps on a process group, `run_in_process` those of all ranks in
one process. A message starts before the work that hides it and is waited for after it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from warpweave.parallel.collectives import Pending, start_exchange

T = TypeVar("T")


class Hop(NamedTuple):
    """A message of every rank at once: `send` goes to rank + step, `recv` is from rank - step.

    Both are contiguous tensors of the same dtype and, over all ranks, of the same size.
    """

    send: torch.Tensor
    recv: torch.Tensor
    step: int


# What one rank does: yields a Hop to start a message and None to wait for it.
Steps = Generator["Hop | None", None, T]


def run_on_group(steps: Steps[T], group: dist.ProcessGroup, *, overlap: bool = True) -> T:
    """Execute this rank's `steps` with P2P messages on `group`; returns its result.

    ``overlap=False`` waits for every message before the tile that could hide it. The operations and
    their order are the same, so the results are bitwise equal.
    """
    pending: Pending | None = None
    while True:
        try:
            hop = next(steps)
        except StopIteration as stop:
            return stop.value
        if hop is not None:
            pending = start_exchange(hop.send, hop.recv, hop.step, group)
        if pending is not None and (hop is None or not overlap):
            pending.wait()


def run_in_process(every: Sequence[Steps[T]], *, overlap: bool = True) -> list[T]:
    """Execute the steps of all ranks of a ring in lockstep in this process, without any group.

    Messages are copies, delivered where they are waited for (``overlap=False``: where they start).
    """
    hops: list[Hop] = []
    while True:
        events, results = [], []
        for steps in every:
            try:
                events.append(next(steps))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            if events:
                raise RuntimeError(f"{len(results)} of {len(every)} ranks of the ring left early")
            return results
        if events[0] is not None:
            hops = events
        if events[0] is None or not overlap:
            for rank, hop in enumerate(hops):
                hops[(rank + hop.step) % len(hops)].recv.copy_(hop.send)
            hops = []
