"""Algorithms over ranks as generators of messages, independent of how messages are sent.

An algorithm (a ring, recursive doubling, a tree, ring attention) is one generator per rank. It
yields a message to start it, or None to wait for all pending messages of this rank:

    def all_gather(rank, ranks, x):  # row `rank` of x[ranks, n] is set
        right, left = (rank + 1) % ranks, (rank - 1) % ranks
        for hop in range(ranks - 1):
            yield Hop(x[rank - hop], x[rank - hop - 1], right, left)
            yield None

`run_on_group` executes one rank's generator on process groups. `run_in_process` executes the
generators of all ranks in one process. Start a message before the work that hides it, and wait for
it afterwards. Ranks may have different numbers of steps.

    the ring above on four ranks: the row that each rank receives, and from which rank
             rank 0        rank 1        rank 2        rank 3
    hop 0    3 from 3      0 from 0      1 from 1      2 from 2
    hop 1    2 from 3      3 from 0      0 from 1      1 from 2
    hop 2    1 from 3      2 from 0      3 from 1      0 from 2

The pipeline's executor (`pipeline.execute`) has its own transports, which know the schedule. They
own the buffers, post receives ahead of need, and wait for single messages. Here, an algorithm owns
its buffers, and a wait is for all pending messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from warpweave.parallel.collectives import Pending, by_gloo, start_all_to_all, start_batch
from warpweave.parallel.observe import carried, observers

T = TypeVar("T")


class Hop(NamedTuple):
    """MPI's sendrecv: `send` goes to rank `dest`, `recv` comes from rank `source`
    (`start_exchange`)."""

    send: torch.Tensor | None
    recv: torch.Tensor | None
    dest: int
    source: int

    @property
    def batch(self) -> Batch:
        """The same messages as a `Batch`."""
        return Batch(
            [] if self.send is None else [(self.send, self.dest)],
            [] if self.recv is None else [(self.recv, self.source)],
        )


class Batch(NamedTuple):
    """Messages between ranks of a group that begin and end together: one NCCL group call
    (`start_batch`)."""

    sends: Sequence[tuple[torch.Tensor, int]]
    receives: Sequence[tuple[torch.Tensor, int]]


class AllToAll(NamedTuple):
    """Messages between all ranks of a Ulysses group (`start_all_to_all`)."""

    send: torch.Tensor
    recv: torch.Tensor
    send_sizes: list[int]
    recv_sizes: list[int]


# A rank's algorithm: yields messages to start them, and None to wait for all pending ones.
Steps = Generator["Hop | Batch | AllToAll | None", None, T]


def run_on_group(
    steps: Steps[T],
    group: dist.ProcessGroup | None,
    inner_group: dist.ProcessGroup | None = None,
    *,
    overlap: bool = True,
) -> T:
    """Execute this rank's `steps` and return their result: hops use `group`, all-to-alls use
    `inner_group`.

    ``overlap=False`` waits for every message before the tile that could hide it. The operations and
    their order are the same, so the results are bitwise equal.

    On a CPU, a thread starts the hops. If the receiver is already waiting, gloo's isend returns
    only after it has copied the message into the socket, which would delay the tile. Observers see
    what that thread issues. Another mode of torch, such as a recording, must see the calls in their
    order, so then there is no such thread.
    """
    pending: list[Pending | Future[Pending]] = []
    with ThreadPoolExecutor(1) as thread:
        while True:
            try:
                message = next(steps)
            except StopIteration as stop:
                return stop.value
            if isinstance(message, Hop):
                message = message.batch
            if isinstance(message, AllToAll):
                pending.append(start_all_to_all(*message, inner_group))
            elif message is not None and overlap and _in_a_thread(message, group):
                pending.append(thread.submit(carried(start_batch), *message, group))
            elif message is not None:
                pending.append(start_batch(*message, group))
            if message is None or not overlap:
                for started in pending:
                    (started if isinstance(started, Pending) else started.result()).wait()
                pending = []


def _in_a_thread(batch: Batch, group: dist.ProcessGroup | None) -> bool:
    tensors = [x for x, _ in (*batch.sends, *batch.receives)]
    cpu = torch.device("cpu")
    if torch._C._len_torch_dispatch_stack() > len(observers()):
        return False
    return any(x.device == cpu for x in tensors) and by_gloo(group, cpu)


# ------------------------------------------------------------------ all ranks in a process


class _Ends(NamedTuple):
    """The undelivered parts of a rank's message, by destination and by source."""

    sends: dict[int, list[torch.Tensor]]
    receives: dict[int, list[torch.Tensor]]


# The pending messages of each kind (that is, of each process group), in order.
_Queues = dict[type, "deque[_Ends]"]


def run_in_process(every: Sequence[Steps[T]], *, inner: int = 1, overlap: bool = True) -> list[T]:
    """Execute the steps of all ranks in turn in this process, without any group.

    All-to-alls are within groups of `inner` consecutive ranks, hops between ranks that have the
    same index in their groups. Messages are copies, delivered when both sender and receiver wait
    for them (``overlap=False``: when they start), so using a buffer too early gives wrong results.

    The order is NCCL's: a rank's hops run one after the other, each when its peers have reached
    theirs, and so do all-to-alls, concurrently with the hops. Raises RuntimeError, naming the
    ranks, for a deadlock, also one that gloo would not have, for a rank that ends with pending
    messages, and for a mismatch between the two ends of a message.
    """
    queues: list[_Queues] = [{Batch: deque(), AllToAll: deque()} for _ in every]
    results: dict[int, T] = {}
    while len(results) < len(every):
        moved = False
        for rank, steps in enumerate(every):
            if rank in results or any(queues[rank].values()):
                continue
            moved = True
            try:
                while (message := next(steps)) is not None:
                    kind = AllToAll if isinstance(message, AllToAll) else Batch
                    ends = _ends(rank, message, inner)
                    if kind is Batch:
                        _check_peers(rank, ends, len(every))
                    queues[rank][kind].append(ends)
                    if not overlap:
                        break
            except StopIteration as stop:
                if any(queues[rank].values()):
                    raise RuntimeError(f"rank {rank} ends with pending messages") from None
                results[rank] = stop.value
        while _deliver(queues):
            moved = True
        if not moved:
            raise RuntimeError(f"deadlock: {'; '.join(_waits(queues))}")
    return [results[rank] for rank in range(len(every))]


def _ends(rank: int, message: Hop | Batch | AllToAll, inner: int) -> _Ends:
    """The parts of a message, by the global ranks of its peers."""
    first, place = rank - rank % inner, rank % inner
    ends = _Ends({}, {})
    if isinstance(message, AllToAll):
        parts = message.send.split(message.send_sizes), message.recv.split(message.recv_sizes)
        for peers, mine in zip(ends, parts, strict=True):
            peers.update({i: [x] for i, x in enumerate(mine, first)})
        return ends
    if isinstance(message, Hop):
        message = message.batch
    for tensors, peers in zip(message, ends, strict=True):
        for x, at in tensors:
            peers.setdefault(at * inner + place, []).append(x)
    return ends


def _check_peers(rank: int, ends: _Ends, ranks: int) -> None:
    for at in (*ends.sends, *ends.receives):
        if at == rank or not 0 <= at < ranks:
            raise RuntimeError(
                f"rank {rank} sends to or receives from rank {at}; expected one of the other ranks "
                f"in [0, {ranks - 1}]"
            )


def _deliver(queues: list[_Queues]) -> bool:
    """Deliver all that is possible of each rank's first message; return True if any was."""
    moved = False
    for rank, own in enumerate(queues):
        for kind, queue in own.items():
            for peer in list(queue[0].sends) if queue else ():
                theirs = queues[peer][kind]
                if not theirs or rank not in theirs[0].receives:
                    continue
                parts, buffers = queue[0].sends.pop(peer), theirs[0].receives.pop(rank)
                if len(parts) != len(buffers):
                    raise RuntimeError(
                        f"rank {rank} sends {len(parts)} messages, rank {peer} receives "
                        f"{len(buffers)}"
                    )
                for part, into in zip(parts, buffers, strict=True):
                    if (part.numel(), part.dtype) != (into.numel(), into.dtype):
                        raise RuntimeError(
                            f"rank {rank} sends {part.numel()} elements of {part.dtype}, rank "
                            f"{peer} receives {into.numel()} of {into.dtype}"
                        )
                    into.view(-1).copy_(part.view(-1))
                moved = True
    for own in queues:
        for queue in own.values():
            while queue and not any(queue[0]):
                queue.popleft()
                moved = True
    return moved


def _waits(queues: list[_Queues]) -> list[str]:
    """For each waiting rank, a description of the ranks that it waits for."""
    first = ((rank, q[0]) for rank, own in enumerate(queues) for q in own.values() if q)
    peers = ((rank, sorted({*ends.sends, *ends.receives})) for rank, ends in first)
    return [f"rank {rank} waits for ranks {others}" for rank, others in peers]
