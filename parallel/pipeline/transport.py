"""Pipeline transports: messages between ranks, within one process or over a process group.

`Distributed`, four ranks; each arrow is a link, its letter the communicator that carries it

    activations   rank 0 --A--> rank 1 --B--> rank 2 --A--> rank 3
    gradients     rank 0 <--C-- rank 1 <--D-- rank 2 <--C-- rank 3

No two links of a communicator share a rank. NCCL runs a communicator's operations in order, so this
ensures that a posted receive never blocks a send.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from warpweave.kernels.runtime.dtypes import DTYPES
from warpweave.parallel.buffers import Buffers
from warpweave.parallel.collectives import by_gloo, group_rank, group_size, start_all_gather
from warpweave.parallel.group_options import group_options
from warpweave.parallel.pipeline.interface import Like, Receive, Stage
from warpweave.parallel.schedule.actions import (
    FINISHES,
    RECEIVES,
    RECV_B,
    SEND_F,
    SENDS,
    TIE,
    Action,
    Link,
    Schedule,
    link,
    links,
    lowered,
    other_end,
    placement,
)
from warpweave.parallel.schedule.open_passes import validate_pass
from warpweave.parallel.schedule.ordering import acknowledged, posted_ahead, posted_at_need
from warpweave.parallel.schedule.text import to_csv
from warpweave.parallel.schedule.validation import validate


def _check_like(action: Action, tensor: Tensor, like: Like) -> None:
    shape, dtype = tuple(like[0]), like[1]
    if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
        raise ValueError(
            f"{action}: expected shape {shape} {dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
        )


def _check_stages(lists: Schedule, stages: Mapping[int, Stage], ranks: Sequence[int]) -> None:
    wanted = {a.stage for rank in ranks for a in lists[rank]}
    if wanted != set(stages):
        raise ValueError(
            f"expected stages {sorted(wanted)} for ranks {list(ranks)}, got {sorted(stages)}"
        )
    if len(set(placement(lists))) > 1 and not lowered(lists):
        raise ValueError(
            f"the lists of {len(lists)} ranks have no SEND or RECV; call with_comm to add them"
        )


# ------------------------------------------------------------------ all ranks in a process


class InProcess:
    """Run all ranks in this process, in turn: each runs until it waits for a message.

    Messages are copied, so stages do not share memory by accident. Deadlocks and messages in the
    wrong order are detected during the run, without `validate`.

    Examples:
        >>> from warpweave.parallel.pipeline import ModuleStage, execute
        >>> from warpweave.parallel.schedule import gpipe, with_comm
        >>> like, x = ((8, 16), torch.float32, torch.device("cpu")), torch.randn(2, 8, 16)
        >>> first = ModuleStage(nn.Linear(16, 16), inputs=x.__getitem__)
        >>> last = ModuleStage(nn.Linear(16, 16), like=like, loss=lambda mb, y: y.mean())
        >>> execute(with_comm(gpipe(2, 2)), {0: first, 1: last}, InProcess())
    """

    def __init__(self) -> None:
        self._boxes: dict[Link, deque[tuple[Action, Tensor]]] = {}
        self._stages: Mapping[int, Stage] = {}

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """Return all ranks."""
        return range(len(lists))

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Empty the mailboxes. Raise ``ValueError`` if a stage is missing."""
        _check_stages(lists, stages, self.ranks(lists))
        self._stages, self._boxes = stages, {}

    def like(self, stage: int, mb: int) -> Like:
        """Return the stage's own `input_like`."""
        return self._stages[stage].input_like(mb)

    def reach(self, rank: int, index: int) -> None:
        """Do nothing: mailboxes are always open."""

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Put a copy into the link's mailbox."""
        self._boxes.setdefault(link, deque()).append((action, tensor.clone()))

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Run the ranks in turn to completion. Raise ``RuntimeError`` if none can proceed."""
        waiting: dict[int, Receive | None] = dict.fromkeys(programs)
        while waiting:
            moved = False
            for rank in list(waiting):
                while rank in waiting and (
                    (want := waiting[rank]) is None or self._boxes.get(want.link)
                ):
                    moved = True
                    try:
                        message = None if want is None else self._take(want)
                        waiting[rank] = programs[rank].send(message)  # type: ignore[arg-type]
                    except StopIteration:
                        del waiting[rank]
            if not moved:
                stuck = "; ".join(
                    f"rank {rank} waits for {want.action} from rank {want.link.src}"
                    for rank, want in waiting.items()
                    if want is not None
                )
                raise RuntimeError(f"deadlock: {stuck}")
        left = [str(action) for box in self._boxes.values() for action, _ in box]
        if left:
            raise RuntimeError(f"messages were sent but never received: {' '.join(left)}")

    def _take(self, want: Receive) -> Tensor:
        sent, tensor = self._boxes[want.link].popleft()
        matches = want.action if want.action.op == TIE else other_end(want.action)
        if sent != matches:
            raise RuntimeError(
                f"link {want.link.kind} from rank {want.link.src} to {want.link.dst}: "
                f"{want.action} got {sent}, expected {matches}"
            )
        _check_like(want.action, tensor, want.like)
        return tensor


# ------------------------------------------------------------------ one rank per process

_DIMS = 8
_CTAS = 4  # NCCL thread blocks per message; a receive holds them from its post to its end


class Distributed:
    """Run one rank of the pipeline group in this process, with messages as torch.distributed P2P
    operations.

    * No two links of a communicator share a rank, so a receive that is posted early never blocks a
      later send (NCCL runs the operations of a communicator in order). A linear pipeline needs four
      communicators, because a rank has up to four links.
    * Receives are posted at the positions of a table computed from the lists. On gloo, where a
      posted receive is only a buffer, one receive per link is posted ahead of need
      (`schedule.posted_ahead`), so messages are hidden behind compute. On NCCL and all other
      backends, a posted receive may be a running kernel. There it is posted when it is needed, or
      earlier if necessary (`schedule.posted_at_need`), so no rank computes while one of its own
      operations is waiting for it.
    * Sends are asynchronous. A sent tensor is kept until a later message acknowledges it
      (`schedule.acknowledged`), so no rank blocks on a send before the end of the step.
    * Activations and gradients travel in reused buffers. A received buffer is reused when its
      micro-batch's backward is over, a sent copy when it has arrived. On NCCL, a newly allocated
      block could be reused only after the device is past its message (record_stream). A host that
      is ahead of its device would hold a block for every micro-batch.
    * Every wait ends after `timeout`, with an error that names rank, action and peer. On NCCL the
      stream waits, and torch's watchdog enforces the time-out.

    Args:
        lists: the schedule, which is validated here; `execute` accepts no other.
        group: the pipeline group, whose rank r runs ``lists[r]``; None for a single rank.
        device: device of the receive buffers; the group's backend must support it.
        timeout: seconds.
        staleness: the largest number of versions by which a gradient may be older than the weights
            that it updates.
        open_pass: `lists` are a pass that is left open (`schedule.open_passes`), of a run that the
            caller has validated.
        beside: the transport of another pass of that run; its communicators are used.

    Construction is collective over all ranks, not only those of `group`. Each rank constructs the
    transport of its own pipeline; different pipelines may have different lists. A transport cannot
    be used after an error.

    Raises:
        ValueError: the schedule is invalid, differs between ranks, or does not have as many ranks
            as the group.

    Examples:
        >>> from warpweave.parallel.pipeline import ModuleStage, execute
        >>> from warpweave.parallel.schedule import gpipe
        >>> x, lists = torch.randn(2, 8, 16), gpipe(1, 2)
        >>> loss = lambda mb, y: y.mean()
        >>> stage = ModuleStage(nn.Linear(16, 16), inputs=x.__getitem__, loss=loss)
        >>> execute(lists, {0: stage}, Distributed(lists, None))
    """

    def __init__(
        self,
        lists: Schedule,
        group: ProcessGroup | None,
        *,
        device: torch.device | str = "cpu",
        timeout: float = 300.0,
        staleness: int = 0,
        open_pass: bool = False,
        beside: Distributed | None = None,
    ) -> None:
        if open_pass:
            validate_pass(lists)
        else:
            validate(lists, staleness=staleness)
        size = group_size(group)
        if size != len(lists):
            raise ValueError(
                f"the schedule is for {len(lists)} ranks, but the pipeline group has {size}"
            )
        self.rank = group_rank(group)
        self._lists, self._group, self._timeout = lists, group, timeout
        self._device = torch.device(device)
        self._rank_of = placement(lists)
        self._arrived = acknowledged(lists)
        ahead = group is None or by_gloo(group, self._device)
        self._posts = (posted_ahead if ahead else posted_at_need)(lists)
        self._table: dict[tuple[int, int], Like] | None = None
        own = self._connect() if beside is None else beside._communicators
        self._communicators: dict[Link, ProcessGroup] = own
        self._posted: dict[Action, tuple[dist.Work, Tensor]] = {}
        self._sending: dict[Action, tuple[Link, dist.Work, Tensor]] = {}
        # (stage, micro-batch) pairs that end on this rank, and the buffers to free when they do
        self._ending = {a[1:3] for a in lists[self.rank] if a.op in FINISHES}
        self._received: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        self._buffers = Buffers()

    def _connect(self) -> dict[Link, ProcessGroup]:
        """Create the communicators and send one message on every link."""
        if self._group is None:
            return {}
        matchings: list[list[Link]] = []
        for wire in links(self._lists):
            touched = {wire.src, wire.dst}
            fits = (m for m in matchings if all(touched.isdisjoint({w.src, w.dst}) for w in m))
            matching = next(fits, None)
            if matching is None:
                matchings.append([wire])
            else:
                matching.append(wire)
        groups = self._make_groups(len(matchings))
        pairs = zip(matchings, groups, strict=True)
        result = {wire: made for matching, made in pairs for wire in matching}
        # NCCL connects two ranks at their first message and blocks until both call it. Connecting
        # in the same order on all ranks avoids a deadlock in the first step.
        greeting = torch.zeros(1, device=self._device)
        for wire in sorted(result):
            if wire.src == self.rank:
                dist.send(greeting, group_dst=wire.dst, group=result[wire])
            elif wire.dst == self.rank:
                dist.recv(greeting, group_src=wire.src, group=result[wire])
        return result

    def _make_groups(self, number: int) -> list[ProcessGroup]:
        """Create `number` process groups of the pipeline's ranks.

        All ranks of the default group create the groups of all pipelines, in the same order. On
        NCCL, groups are split off the default group (ncclCommSplit), in which all of its ranks
        participate.
        """
        ranks = dist.get_process_group_ranks(self._group)
        checksum = zlib.crc32(to_csv(self._lists).encode())
        row = [checksum, number, *(rank in ranks for rank in range(dist.get_world_size()))]
        own = torch.tensor([row], dtype=torch.int64, device=self._device)
        rows = dict.fromkeys(map(tuple, start_all_gather(own, dist.group.WORLD).wait().tolist()))
        pipelines = [[r for r, inside in enumerate(row[2:]) if inside] for row in rows]
        if len({*map(tuple, pipelines)}) < len(rows):
            raise ValueError(
                f"the ranks of the pipeline group have different schedules (checksum {checksum} "
                f"on rank {self.rank}); pass the same lists on every rank"
            )
        made, timeout = [], timedelta(seconds=self._timeout)
        for (_, count, *_), members in zip(rows, pipelines, strict=True):
            for _ in range(count):
                options = group_options(self._device.type, _CTAS, timeout, urgent=True)
                group = dist.new_group(members, timeout, pg_options=options)
                if members == ranks:
                    made.append(group)
        return made

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """Return the rank of this process."""
        return (self.rank,)

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Check the stages. In the first run, all ranks exchange the inputs' shapes and dtypes."""
        if lists != self._lists:
            raise ValueError(f"rank {self.rank}: this transport was built for a different schedule")
        _check_stages(lists, stages, self.ranks(lists))
        if self._table is None:
            self._table = self._agree(lists, stages)

    def _agree(self, lists: Schedule, stages: Mapping[int, Stage]) -> dict[tuple[int, int], Like]:
        rank_of = placement(lists)
        m = 1 + max(a.mb for actions in lists for a in actions)
        words = torch.zeros(len(rank_of), m, 2 + _DIMS, dtype=torch.int64)
        for s in range(1, len(rank_of)):
            for i in range(m) if rank_of[s] == self.rank else ():
                shape, dtype, _ = stages[s].input_like(i)
                if len(shape) > _DIMS or dtype not in DTYPES:
                    raise ValueError(
                        f"rank {self.rank}: expected an input of at most {_DIMS} dims with a dtype "
                        f"of {DTYPES} for stage {s}, got {tuple(shape)} {dtype}"
                    )
                row = [DTYPES.index(dtype), len(shape), *shape]
                words[s, i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        if self._group is not None:
            words = words.to(self._device)
            dist.all_reduce(words, group=self._group)
        return {
            (s, i): (tuple(shape[:dims]), DTYPES[dtype], self._device)
            for s, rows in enumerate(words.tolist())
            for i, (dtype, dims, *shape) in enumerate(rows)
        }

    def like(self, stage: int, mb: int) -> Like:
        """Return the entry of the table that the ranks exchanged in `open`."""
        assert self._table is not None
        return self._table[stage, mb]

    def reach(self, rank: int, index: int) -> None:
        """Free the buffers of a micro-batch that is over, and post the receives that the table
        lists at this position."""
        before = self._lists[rank][index - 1] if index else None
        if before is not None and before.op in FINISHES:
            for buffer in self._received.pop((before.stage, before.mb), ()):
                self._buffers.give_back(buffer)
        for receive in self._posts.get((rank, index), ()):
            like = self.like(receive.stage + (receive.op == RECV_B), receive.mb)
            self._post(Receive(link(receive, self._rank_of), receive, like))

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Start an isend, and keep the tensor until it is acknowledged."""
        if action.op in SENDS:
            stage = action.stage + (action.op == SEND_F)
            _check_like(action, tensor, self.like(stage, action.mb))
            tensor = self._buffers.take(tensor.shape, tensor.dtype, self._device).copy_(tensor)
        elif action in self._sending:  # an earlier TIE, whose answer has arrived
            self._arrive(action)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group_dst=link.dst, group=self._communicators[link])
        assert work is not None
        self._sending[action] = (link, work, tensor)

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Run this rank's list, and wait for its sends at the end."""
        program = programs[self.rank]
        message: Tensor | None = None
        while True:
            try:
                want = program.send(message)  # type: ignore[arg-type]
            except StopIteration:
                break
            message = self._take(want)
        for action in list(self._sending):
            self._arrive(action)

    def _post(self, want: Receive) -> None:
        buffer = self._buffers.take(*want.like[:2], self._device)
        work = dist.irecv(buffer, group_src=want.link.src, group=self._communicators[want.link])
        assert work is not None
        self._posted[want.action] = work, buffer

    def _take(self, want: Receive) -> Tensor:
        if want.action not in self._posted:  # a TIE, whose shape only its stage knows
            self._post(want)
        work, buffer = self._posted.pop(want.action)
        self._wait(work, f"{want.action} from rank {want.link.src}")
        for action in self._arrived.get(want.action, ()):
            self._arrive(action)
        if want.action.op in RECEIVES and want.action[1:3] in self._ending:
            self._received[want.action[1:3]].append(buffer)
        return buffer

    def _arrive(self, action: Action) -> None:
        link, work, buffer = self._sending.pop(action)
        self._wait(work, f"{action} to rank {link.dst}")
        if action.op in SENDS:
            self._buffers.give_back(buffer)

    def _wait(self, work: dist.Work, words: str) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise RuntimeError(
                f"rank {self.rank}: {words} failed (the timeout is {self._timeout} s): {first}"
            ) from error
