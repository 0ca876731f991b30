"""Messages between context ranks, without a transport: what a rank does is a generator of them.

`run_on_group` executes one rank's steps on process groups, `run_in_process` those of all ranks in
one process. A message starts before the work that hides it and is waited for after it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from warpweave.parallel.collectives import Pending, start_all_to_all, start_exchange

T = TypeVar("T")


class Hop(NamedTuple):
    """A message of every rank at once: `send` goes to rank + step, `recv` is from rank - step.

    Both are contiguous tensors of the same dtype and, over all ranks, of the same size; None where
    nothing is sent, or nothing arrives, on this rank.
    """

    send: torch.Tensor | None
    recv: torch.Tensor | None
    step: int


class AllToAll(NamedTuple):
    """Messages between all neighbours that trade heads: the first ``send_sizes[0]`` elements go to
    neighbour 0, and so on; `recv` is filled alike. Flat tensors of one dtype; what a rank sends to
    itself is copied.
    """

    send: torch.Tensor
    recv: torch.Tensor
    send_sizes: list[int]
    recv_sizes: list[int]


# What one rank does: yields messages to start them and None to wait for all that are under way.
Steps = Generator["Hop | AllToAll | None", None, T]


def run_on_group(
    steps: Steps[T],
    group: dist.ProcessGroup | None,
    neighbours: dist.ProcessGroup | None = None,
    *,
    overlap: bool = True,
) -> T:
    """Execute this rank's `steps`: hops on `group`, all-to-alls among `neighbours`; its result.

    ``overlap=False`` waits for every message before the tile that could hide it. The operations and
    their order are the same, so the results are bitwise equal.

    On a CPU a thread starts the hops: where the receiver waits already, gloo's isend returns when
    the message has been copied into the socket, and the tile would begin only then.
    """
    pending: list[Pending | Future[Pending]] = []
    with ThreadPoolExecutor(1) as thread:
        while True:
            try:
                message = next(steps)
            except StopIteration as stop:
                return stop.value
            if isinstance(message, AllToAll):
                pending.append(start_all_to_all(*message, neighbours))
            elif message is not None and overlap and _by_gloo(message, group):
                pending.append(thread.submit(start_exchange, *message, group))
            elif message is not None:
                pending.append(start_exchange(*message, group))
            if message is None or not overlap:
                for started in pending:
                    (started if isinstance(started, Pending) else started.result()).wait()
                pending = []


def _by_gloo(hop: Hop, group: dist.ProcessGroup | None) -> bool:
    tensors = [x for x in (hop.send, hop.recv) if x is not None and x.device.type == "cpu"]
    return bool(tensors) and "cpu:gloo" in dist.get_backend_config(group)


def run_in_process(
    every: Sequence[Steps[T]], *, neighbours: int = 1, overlap: bool = True
) -> list[T]:
    """Execute the steps of all ranks in lockstep in this process, without any group.

    `neighbours` ranks in a row trade heads; the ring goes over ranks that far apart. Messages are
    copies, delivered where they are waited for (``overlap=False``: where they start).
    """
    started: list[list[Hop | AllToAll]] = []
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
            started.append(events)
        if events[0] is None or not overlap:
            for messages in started:
                _deliver(messages, neighbours)
            started = []


def _deliver(messages: Sequence[Hop | AllToAll], neighbours: int) -> None:
    """Copy what every rank sends to where it is received."""
    for rank, message in enumerate(messages):
        if isinstance(message, Hop):
            into = messages[(rank + message.step * neighbours) % len(messages)].recv
            if (into is None) != (message.send is None):
                raise RuntimeError(f"what rank {rank} sends and what is received there differ")
            if into is not None:
                into.copy_(message.send)
            continue
        first, place = rank - rank % neighbours, rank % neighbours
        for other, part in enumerate(message.send.split(message.send_sizes)):
            there = messages[first + other]
            there.recv.split(there.recv_sizes)[place].copy_(part)
