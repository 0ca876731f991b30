"""Symmetric memory: a segment per rank that every rank can read and write, and its current epoch.

    the segments of four ranks; each rank has the addresses of all of them

    rank 0 [flags | even data | odd data]    rank 1 [...]    rank 2 [...]    rank 3 [...]

    segment of a rank:   flags int64[4 W, slots]   data of even epochs   data of odd epochs
    flags[s, i]          the last epoch in which rank s published its part i to this rank
    flags[W + s, i]      the last epoch in which part i of rank s was copied to this rank
    flags[2 W + s, i]    not a flag: the `Signature` of the operation in which rank s published its
    flags[3 W + s, i]    part i, for even epochs and for odd ones; written if waits are bounded

A kernel receives the addresses of all W segments as seen from its own rank, but no process group
and no device. So one kernel serves NVLink peers, W virtual ranks on one device, and processes over
POSIX shared memory in Triton's interpreter.

Every operation is one epoch, with the same number on all ranks. Flags only grow, so none is ever
reset. Epochs e and e + 2 use the same data (double buffering, as in Triton-distributed, Zheng et
al. 2025, arXiv:2504.19442), without a barrier at the end of an operation. Each operation waits for
every peer, so a rank that has finished epoch e + 1 knows that all ranks have begun e + 1, and so
have read all of e.

Two conditions follow. The operations of one memory must be on one stream (two streams, or two
groups, need two memories). An operation that is empty, and so waits for no one, is not an epoch.
Kernels load the epoch from memory, so that replays of a captured graph advance it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from warpweave.kernels.runtime.dtypes import DTYPES

ALIGNMENT = 256  # bytes, for segments and the data in them
OPERATIONS = ("all_gather_gemm", "qkv_rope", "gemm_reduce_scatter", "gemm_all_reduce")


class Signature(NamedTuple):
    """The properties on which all ranks of an operation must agree, as they locate flags and data.

    These are the operation, the rows, columns and dtype that each rank sends, and its parts.
    """

    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    part: tuple[int, int]

    def word(self) -> int:
        """Encode as one positive int64; an unknown operation is number 0, sizes are modulo 2^20."""
        word = OPERATIONS.index(self.name) + 1 if self.name in OPERATIONS else 0
        for size in (self.rows, self.columns):
            word = word << 20 | size % 2**20
        for log in (size.bit_length() for size in self.part):
            word = word << 4 | log
        return word << 8 | DTYPES.index(self.dtype)

    @classmethod
    def of(cls, word: int) -> Signature:
        """Decode a `word`."""
        part = (1 << (word >> 12 & 15)) >> 1, (1 << (word >> 8 & 15)) >> 1
        rows, columns, op = word >> 36 & 2**20 - 1, word >> 16 & 2**20 - 1, word >> 56
        name = (*OPERATIONS, "another operation")[op - 1]
        return cls(name, rows, columns, DTYPES[word & 255], part)

    def __str__(self) -> str:
        parts = " x ".join(map(str, self.part))
        return f"{self.name} [{self.rows}, {self.columns}] of {self.dtype}, parts of {parts}"


@dataclass(frozen=True)
class SymmetricMemory:
    """One rank's view of the segments of all ranks of a group.

    Attributes:
        rank, world: this rank, and the number of ranks.
        segments: uint8[bytes] of each rank, as mapped in this process; zero before the first
            operation.
        addresses: int64[world], their addresses.
        epoch: int64[1], the number of operations that have run.
        error: int64[5], in the host's memory: the epoch in which a wait gave up (0: none), the rank
            and the part that it waited for, and the signatures of that part, if it has arrived, and
            of this rank's operation. See `check`.
        slots: parts that a rank may publish in one epoch.
        capacity: bytes of data in an epoch.
        polls: polls after which a wait gives up; 0 means no limit.
        left: operations that an error ended midway. Other ranks may have awaited their flags, so
            the epoch cannot be repeated: all ranks must allocate the memory again.

    Examples:
        >>> from warpweave.kernels.overlap.symmetric import local_memory
        >>> memory = local_memory(2, slots=16, capacity=1 << 16)[1]
        >>> memory.rank, memory.world, memory.capacity
        (1, 2, 65536)
    """

    rank: int
    world: int
    segments: tuple[torch.Tensor, ...]  # kept alive here: a mapping ends with its tensor
    addresses: torch.Tensor
    epoch: torch.Tensor
    error: torch.Tensor
    slots: int
    capacity: int
    polls: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def data_offset(self) -> int:
        """Offset in bytes of the data of even epochs."""
        return _aligned(32 * self.world * self.slots)

    def advance(self) -> None:
        """End an epoch, in stream order."""
        self.epoch.add_(1)

    def check(self) -> None:
        """Raise TimeoutError if a wait gave up, ValueError if a rank was in a different operation.

        The result of the operation named in the error is wrong.

        This reads the host's memory. On a GPU it reports on operations that have already run, so a
        caller who has just read another result of the device (a trainer its loss) need not
        synchronize again.
        """
        epoch, source, slot, theirs, own = self.error.tolist()
        where = (
            f"{Signature.of(own).name} on rank {self.rank} of {self.world}, operation {epoch} on "
            "this symmetric memory"
        )
        if theirs != own:
            raise ValueError(
                f"{where}: rank {source} runs {Signature.of(theirs)}, but this rank runs "
                f"{Signature.of(own)}"
            )
        if epoch:
            raise TimeoutError(
                f"{where}: timed out after {self.polls} polls for part {slot} from rank {source}; "
                "check whether that rank failed or is late"
            )

    def settle(self) -> None:
        """`check` at the end of an operation on a CPU, where it has already run."""
        if not self.epoch.is_cuda:
            self.check()

    def leave(self, name: str) -> None:
        """Record that an error ended operation `name` midway."""
        self.left.append(name)

    def fitting(self, name: str, device: torch.device, slots: int, size: int) -> SymmetricMemory:
        """Return this memory, or raise ValueError if operation `name` cannot use it.

        It must be on `device`, no operation may have ended midway, and `slots` parts and `size`
        bytes must fit.
        """
        if self.left:
            raise ValueError(
                f"{name} on rank {self.rank} of {self.world}: an error interrupted {self.left[0]}; "
                "allocate the symmetric memory again on all ranks (Workspace.renew)"
            )
        if device != self.epoch.device:
            raise ValueError(
                f"{name}: the symmetric memory is on {self.epoch.device}, but the tensors are on "
                f"{device}"
            )
        if slots > self.slots or size > self.capacity:
            raise ValueError(
                f"{name} on rank {self.rank} of {self.world} needs {slots} parts and {size} "
                f"bytes of symmetric memory, but this memory has {self.slots} parts and "
                f"{self.capacity} bytes"
            )
        return self


class Memory(Protocol):
    """The memory argument of an operation: `SymmetricMemory`, or a workspace to allocate it."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def fitting(
        self, name: str, device: torch.device, slots: int, size: int
    ) -> SymmetricMemory: ...
    def settle(self) -> None: ...
    def leave(self, name: str) -> None: ...


def segment_bytes(world: int, slots: int, capacity: int) -> int:
    """The bytes of one rank's segment."""
    return _aligned(32 * world * slots) + 2 * _aligned(capacity)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def over_segments(
    segments: Sequence[torch.Tensor], rank: int, *, slots: int, capacity: int, polls: int
) -> SymmetricMemory:
    """The memory of `rank` over zeroed uint8 segments, one per rank, that are addressable here."""
    device = segments[rank].device
    return SymmetricMemory(
        rank,
        len(segments),
        tuple(segments),
        torch.tensor([segment.data_ptr() for segment in segments], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(5, dtype=torch.int64, pin_memory=device.type == "cuda"),
        slots,
        _aligned(capacity),
        polls,
    )


def local_memory(
    world: int,
    *,
    slots: int,
    capacity: int,
    device: torch.device | str = "cpu",
    polls: int = 0,
) -> list[SymmetricMemory]:
    """`world` virtual ranks on one device, for tests and for timing a kernel alone.

    Examples:
        >>> first, second = local_memory(2, slots=16, capacity=1 << 16)
        >>> first.rank, first.world
        (0, 2)
    """
    size = segment_bytes(world, slots, capacity)
    segments = torch.zeros(world, size, dtype=torch.uint8, device=device)
    if segments.data_ptr() % ALIGNMENT:  # torch aligns CPU memory to only 64 bytes
        segments = torch.zeros(world * size + ALIGNMENT, dtype=torch.uint8, device=device)
        segments = segments[-segments.data_ptr() % ALIGNMENT :][: world * size].view(world, size)
    return [
        over_segments([*segments], rank, slots=slots, capacity=capacity, polls=polls)
        for rank in range(world)
    ]


def create_file(path: Path, size: int) -> None:
    """Create a zeroed file of `size` bytes and reserve them.

    A full /dev/shm then raises an OSError, and not a bus error at the first write.
    """
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(number, 0, size)
    finally:
        os.close(number)


def map_file(path: Path, size: int) -> torch.Tensor:
    """Map a file as uint8[size], shared with all processes that map it; it outlives its name.

    Raises OSError if there is no such file, or if its size differs.
    """
    if (found := os.stat(path).st_size) != size:  # torch would create or extend it
        raise OSError(f"{path.name} has {found} bytes, expected {size}")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
