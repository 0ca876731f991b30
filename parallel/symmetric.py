"""Symmetric memory for the ranks of a process group: who makes it, and how the ranks find it.

On CUDA it is torch's (`torch.distributed._symmetric_memory`: NVLink peers of one node; that has not
been run yet); on a CPU, for kernels in Triton's interpreter, files in /dev/shm that every rank
maps. Both need all ranks on one machine. A group needs one memory per stream that it works on, see
`kernels.overlap.symmetric`; `Workspace` makes it as it is needed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from warpweave.kernels.overlap.symmetric import (
    SymmetricMemory,
    create_file,
    map_file,
    over_segments,
    segment_bytes,
)

FOLDER = Path("/dev/shm")
LOOKS = 10_000  # per second: of an interpreter that takes about a tenth of a millisecond for each
TIMEOUT = timedelta(seconds=100)


def symmetric_memory(
    group: dist.ProcessGroup,
    device: torch.device | str,
    *,
    slots: int,
    capacity: int,
    timeout: timedelta = TIMEOUT,
    polls: int | None = None,
) -> SymmetricMemory:
    """Make the memory of `group`; every rank calls it, with the same numbers.

    Args:
        group: ranks of one machine.
        device: this rank's, CUDA or CPU.
        slots: parts that a rank may publish in one operation: tiles of its rows.
        capacity: bytes of data in one operation.
        timeout: about how long a wait looks on a CPU before it gives up, longer where that is slow:
            no kernel of the interpreter knows the time.
        polls: how often a wait looks, wherever it is; 0 for ever, as by default on a GPU.

    Raises:
        ValueError: on a CPU, on all ranks: some cannot make their files or see the others', or
            asked for other sizes. On CUDA torch raises what it raises.
    """
    device = torch.device(device)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    size = segment_bytes(world, slots, capacity)
    if device.type == "cuda":
        return _over_peers(group, device, slots, capacity, polls or 0)
    token = torch.tensor([secrets.randbits(62)])
    dist.broadcast(token, group_src=0, group=group)
    files = [FOLDER / f"warpweave-{token.item():016x}-{peer}" for peer in range(world)]
    try:
        problem = _attempt(lambda: create_file(files[rank], size))
        _agree(problem, group, "make")
        segments: list[torch.Tensor] = []
        problem = _attempt(lambda: segments.extend(map_file(file, size) for file in files))
        _agree(problem, group, "map")
    finally:  # a mapping outlives the name, and a crash from here on leaves nothing behind
        files[rank].unlink(missing_ok=True)
    if polls is None:
        polls = max(1, int(timeout.total_seconds() * LOOKS))
    return over_segments(segments, rank, slots=slots, capacity=capacity, polls=polls)


class Workspace:
    """The symmetric memory of one group and one stream: made when first needed, and made anew, by
    all ranks together, when an operation needs more than there is.

    Operations fit it as they fit the memory itself, on all ranks in the same order and sizes, and
    wait as long as `timeout` and `polls` of `symmetric_memory` say (None: its defaults). Under
    capture of a CUDA graph it cannot grow: run the step before, on the stream of the capture.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        timeout: timedelta | None = None,
        polls: int | None = None,
    ) -> None:
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._group, self._timeout, self._polls = group, timeout or TIMEOUT, polls
        self._memory: SymmetricMemory | None = None
        self._stream: int | None = None

    def fitting(self, name: str, device: torch.device, slots: int, size: int) -> SymmetricMemory:
        """The memory, in which an epoch of `slots` parts and `size` bytes fits.

        Raises:
            ValueError: it is used from another stream or device than before, it would have to grow
                under capture, or it cannot be made.
        """
        self._check_stream(name, device)
        memory = self._memory
        if memory is not None and (memory.left or memory.epoch.device != device):
            return memory.fitting(name, device, slots, size)  # says what is wrong
        if memory is None or slots > memory.slots or size > memory.capacity:
            if device.type == "cuda":
                if torch.cuda.is_current_stream_capturing():
                    raise ValueError(
                        f"{name} on rank {self.rank} of {self.world} needs {slots} parts and "
                        f"{size} bytes of symmetric memory, which cannot grow while a graph is "
                        "captured: run the step before, on this stream"
                    )
                torch.cuda.synchronize(device)  # peers may read the old one up to here
            slots, size = (1 << (n - 1).bit_length() for n in (slots, size))
            if memory is not None:
                slots, size = max(slots, memory.slots), max(size, memory.capacity)
            bounds = {"timeout": self._timeout, "polls": self._polls}
            self._memory = symmetric_memory(
                self._group, device, slots=slots, capacity=size, **bounds
            )
        return self._memory.fitting(name, device, slots, size)

    def settle(self, name: str) -> None:
        """See `SymmetricMemory.settle`."""
        if self._memory is not None:
            self._memory.settle(name)

    def leave(self, name: str) -> None:
        """See `SymmetricMemory.leave`."""
        if self._memory is not None:
            self._memory.leave(name)

    def renew(self) -> None:
        """Forget the memory, as after an error that ended an operation midway: the next one makes
        it anew. Every rank calls this, when none of them is in an operation."""
        self._memory = None

    def _check_stream(self, name: str, device: torch.device) -> None:
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            if self._stream not in (None, stream):
                raise ValueError(
                    f"{name} on rank {self.rank} of {self.world}: a workspace is of one stream, "
                    "this one was used from another"
                )
            self._stream = stream


def _attempt(action: Callable[[], object]) -> str:
    """What went wrong, or nothing."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def _agree(problem: str, group: dist.ProcessGroup, verb: str) -> None:
    """Raise on every rank what went wrong on one."""
    failed = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    failed[dist.get_rank(group)] = bool(problem)
    dist.all_reduce(failed, group=group)
    if failed.any():
        ranks = failed.nonzero().flatten().tolist()
        raise ValueError(
            f"symmetric memory: ranks {ranks} cannot {verb} the files of their group in {FOLDER} "
            f"(the ranks must share one machine): {problem or 'see their own message'}"
        )


def _over_peers(
    group: dist.ProcessGroup, device: torch.device, slots: int, capacity: int, polls: int
) -> SymmetricMemory:
    """Over NVLink, by torch's own symmetric memory."""
    import torch.distributed._symmetric_memory as symm_mem

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    size = segment_bytes(world, slots, capacity)
    own = symm_mem.empty(size, dtype=torch.uint8, device=device).zero_()
    handle = symm_mem.rendezvous(own, group)
    segments = [handle.get_buffer(peer, (size,), torch.uint8) for peer in range(world)]
    segments[rank] = own
    handle.barrier()  # all are zero
    return over_segments(segments, rank, slots=slots, capacity=capacity, polls=polls)
