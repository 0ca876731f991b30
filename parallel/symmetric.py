"""Symmetric memory of a process group: buffers that every rank of the group can read and write.

On CUDA it is torch's own (`torch.distributed._symmetric_memory`, NVLink within a node), where each
GPU reaches the memory of the others with atomics; this has not been run yet. On a CPU, for kernels
in Triton's interpreter, it consists of files in /dev/shm that every rank maps. All ranks must be on
one machine. A group needs one memory per stream. `kernels.overlap.symmetric` describes its layout
and its signals. `Workspace` allocates it on demand.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

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
# Polls per second. In the interpreter a poll takes about 0.1 ms. The value for a GPU is a
# prediction: 1 to 2 us for an atomic, a barrier and a broadcast, so a wait ends before NCCL's
# watchdog does.
LOOKS = {"cpu": 10_000, "cuda": 500_000}
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
    """Allocate the symmetric memory of `group`. Every rank must call it with the same sizes.

    Args:
        group: ranks of one machine.
        device: this rank's device, CUDA or CPU.
        slots: signals per rank in one operation, one for each tile of its rows.
        capacity: bytes of data per rank in one operation.
        timeout: the approximate time after which a wait times out. It is counted in polls, so it is
            longer on a slow machine.
        polls: the number of polls, instead of `timeout`; 0 means no limit.

    Raises:
        ValueError: raised on all ranks. On a CPU, a rank cannot create its file or map the others',
            or ranks passed different sizes. On GPUs, one GPU cannot reach another, or cannot do so
            with atomics.
    """
    device = torch.device(device)
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    size = segment_bytes(world, slots, capacity)
    if polls is None:
        polls = max(1, int(timeout.total_seconds() * LOOKS[device.type]))
    if device.type == "cuda":
        return _over_peers(group, device, slots, capacity, polls)
    token = torch.tensor([secrets.randbits(62)])
    dist.broadcast(token, group_src=0, group=group)
    files = [FOLDER / f"warpweave-{token.item():016x}-{peer}" for peer in range(world)]
    of_group = f"group's shared files in {FOLDER} (all ranks must be on one machine)"
    try:
        problem = _attempt(lambda: create_file(files[rank], size))
        _agree(problem, group, f"cannot create their {of_group}")
        segments: list[torch.Tensor] = []
        problem = _attempt(lambda: segments.extend(map_file(file, size) for file in files))
        _agree(problem, group, f"cannot map their {of_group}")
    finally:  # the mapping outlives the file name, so a later crash leaves no file behind
        files[rank].unlink(missing_ok=True)
    return over_segments(segments, rank, slots=slots, capacity=capacity, polls=polls)


class Workspace:
    """The symmetric memory of one group and one stream. It is allocated when an operation first
    needs it, and reallocated by all ranks together when an operation needs more.

    All ranks must call the same operations in the same order with the same sizes. `timeout` and
    `polls` bound every wait, as in `symmetric_memory` (None means its defaults). The memory cannot
    grow while a CUDA graph is captured: run one step before the capture, on the same stream.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> workspace = Workspace(init_device_mesh("cpu", (1,)).get_group())
        >>> workspace.rank, workspace.world
        (0, 1)
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
        """Return the memory, large enough for an operation of `slots` signals and `size` bytes.

        Raises:
            ValueError: the stream or the device changed, the memory would have to grow during graph
                capture, or it cannot be allocated.
        """
        self._check_stream(name, device)
        memory = self._memory
        if memory is not None and (memory.left or memory.epoch.device != device):
            return memory.fitting(name, device, slots, size)  # raises the specific error
        if memory is None or slots > memory.slots or size > memory.capacity:
            if device.type == "cuda":
                if torch.cuda.is_current_stream_capturing():
                    raise ValueError(
                        f"{name} on rank {self.rank} of {self.world} needs {size} bytes of "
                        f"symmetric memory in {slots} parts, but symmetric memory cannot grow "
                        "during graph capture; run the step once on this stream before capturing it"
                    )
                if memory is not None:  # peers may have been reading it until now
                    torch.cuda.current_stream(device).synchronize()
                    memory.check()
            slots, size = (1 << (n - 1).bit_length() for n in (slots, size))
            if memory is not None:
                slots, size = max(slots, memory.slots), max(size, memory.capacity)
            bounds = {"timeout": self._timeout, "polls": self._polls}
            self._memory = symmetric_memory(
                self._group, device, slots=slots, capacity=size, **bounds
            )
        return self._memory.fitting(name, device, slots, size)

    def settle(self) -> None:
        """See `SymmetricMemory.settle`."""
        if self._memory is not None:
            self._memory.settle()

    def check(self) -> None:
        """See `SymmetricMemory.check`."""
        if self._memory is not None:
            self._memory.check()

    def leave(self, name: str) -> None:
        """See `SymmetricMemory.leave`."""
        if self._memory is not None:
            self._memory.leave(name)

    def renew(self) -> None:
        """Discard the memory after an error within an operation; the next operation allocates it
        again. Every rank must call this, while no rank is in an operation."""
        self._memory = None

    def _check_stream(self, name: str, device: torch.device) -> None:
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            if self._stream not in (None, stream):
                raise ValueError(
                    f"{name} on rank {self.rank} of {self.world}: this workspace was used on "
                    "another stream; use one workspace per stream"
                )
            self._stream = stream


def _attempt(action: Callable[[], object]) -> str:
    """Run `action`; return the first line of its error, or "" if there is none."""
    try:
        action()
    except (OSError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def _agree(problem: str, group: dist.ProcessGroup, what: str, device: Any = "cpu") -> None:
    """Raise on every rank if `problem` is not empty on any rank."""
    failed = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    failed[dist.get_rank(group)] = bool(problem)
    dist.all_reduce(failed, group=group)
    if failed.any():
        ranks = failed.nonzero().flatten().tolist()
        raise ValueError(
            f"symmetric memory: ranks {ranks} {what}: {problem or 'see the errors of those ranks'}"
        )


def _over_peers(
    group: dist.ProcessGroup, device: torch.device, slots: int, capacity: int, polls: int
) -> SymmetricMemory:
    """torch's own symmetric memory, over NVLink."""
    import torch.distributed._symmetric_memory as symm_mem

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    index = torch.zeros(world, dtype=torch.int64, device=device)
    index[rank] = device.index
    dist.all_reduce(index, group=group)
    problem = unreachable(device.index, index.tolist(), native_atomics)
    _agree(problem, group, "cannot use the GPUs of their group", device)
    size = segment_bytes(world, slots, capacity)
    own = symm_mem.empty(size, dtype=torch.uint8, device=device).zero_()
    handle = symm_mem.rendezvous(own, group)
    segments = [handle.get_buffer(peer, (size,), torch.uint8) for peer in range(world)]
    segments[rank] = own
    handle.barrier()  # all segments are zero
    return over_segments(segments, rank, slots=slots, capacity=capacity, polls=polls)


def unreachable(own: int, peers: list[int], atomics: Callable[[int, int], bool]) -> str:
    """The reason why kernels on GPU `own` cannot signal to GPUs `peers` (by rank); "" if they can.

    A flag is set by an atomic exchange in the peer's memory. NVLink has such atomics; PCIe does
    not.
    """
    if len(set(peers)) < len(peers):
        return (
            f"each rank must have its own GPU, got GPUs {peers} for ranks 0 to {len(peers) - 1}; "
            "make all GPUs of the group visible to every process, and use a different one on each "
            "rank"
        )
    for rank, peer in enumerate(peers):
        if peer == own:
            continue
        if not torch.cuda.can_device_access_peer(own, peer):
            return f"cuda:{own} has no peer access to cuda:{peer} of rank {rank}"
        if not atomics(own, peer):
            return (
                f"cuda:{own} has no native atomics on cuda:{peer} of rank {rank}; the GPUs must be "
                "connected by NVLink, not PCIe"
            )
    return ""


def native_atomics(own: int, peer: int) -> bool:
    """Return True if, according to the driver, the link between two GPUs has 64-bit atomics."""
    import ctypes

    found = ctypes.c_int()
    # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED; devices are numbered as torch numbers them.
    ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
    return ask(ctypes.byref(found), 3, own, peer) == 0 and bool(found.value)
