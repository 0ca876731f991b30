"""Symmetric memory: a segment per rank that every rank can read and write, and the epoch it is in.

    the segments of four ranks; each rank has the addresses of all of them

    rank 0 [flags | even data | odd data]    rank 1 [...]    rank 2 [...]    rank 3 [...]

    segment of a rank:   flags int64[4 W, slots]   data of even epochs   data of odd epochs
    flags[s, i]          the last epoch in which rank s published its part i to this rank
    flags[W + s, i]      the last epoch in which part i of rank s was copied to this rank
    flags[2 W + s, i]    not a flag: the `Signature` of the operation in which rank s published its
    flags[3 W + s, i]    part i, of even epochs and of odd ones; written if waits are bounded

A kernel is given the addresses of all W segments as seen from its own rank, and neither a process
group nor a device. So one kernel serves NVLink peers, W virtual ranks on one device, and processes
over POSIX shared memory in Triton's interpreter.

Every operation is one epoch, numbered alike on all ranks. Flags only grow, so none is ever reset.
Epochs e and e + 2 use the same data (double buffering, as in Triton-distributed, Zheng et al. 2025,
arXiv:2504.19442), without a barrier at the end of an operation: each operation waits for every
peer, so a rank that has finished epoch e + 1 knows that all have begun e + 1, and so have read all
of e.

Two conditions follow. The operations of one memory must be on one stream (two streams, or two
groups, need two memories), and an operation that waits for no one, because it is empty, is no
epoch. Kernels load the epoch from memory, so that replays of a captured graph advance it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from warpweave.kernels.runtime.dtypes import DTYPES

ALIGNMENT = 256  # bytes: of segments, and of the data in them
OPERATIONS = ("all_gather_gemm", "qkv_rope", "gemm_reduce_scatter", "gemm_all_reduce")


class Signature(NamedTuple):
    """What all ranks of an operation must agree on, because it decides where flags and data are:
    the operation, the rows, columns and dtype that each rank sends, and its parts."""

    name: str
    rows: int
    columns: int
    dtype: torch.dtype
    part: tuple[int, int]

    def word(self) -> int:
        """As one positive int64; an unknown operation is number 0, sizes are modulo 2^20."""
        word = OPERATIONS.index(self.name) + 1 if self.name in OPERATIONS else 0
        for size in (self.rows, self.columns):
            word = word << 20 | size % 2**20
        for log in (size.bit_length() for size in self.part):
            word = word << 4 | log
        return word << 8 | DTYPES.index(self.dtype)

    @classmethod
    def of(cls, word: int) -> Signature:
        """The inverse of `word`."""
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
        rank, world: this rank, and how many there are.
        segments: uint8[bytes] of each rank, as mapped in this process; zero before the first
            operation.
        addresses: int64[world], their addresses.
        epoch: int64[1], the number of operations that have run.
        error: int64[5], in the host's memory: the epoch in which a wait gave up (0: none), the rank
            and the part that it waited for, and the signatures of that part, if it has come, and
            of this rank's operation. See `check`.
        slots: parts that a rank may publish in one epoch.
        capacity: bytes of data in an epoch.
        polls: polls after which a wait gives up; 0 is no limit.
        left: operations that an error ended midway. Other ranks may have awaited their flags, so
            the epoch cannot be repeated: all ranks must allocate the memory anew.
    """

    rank: int
    world: int
    segments: tuple[torch.Tensor, ...]  # held here: a mapping ends with its tensor
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
        """Raise TimeoutError if a wait has given up, ValueError if it has found a rank in another
        operation; the result of the operation that is named is then wrong.

        Reads the host's memory: on a GPU it tells of what has run, so that a caller who has just
        read another result of the device (a trainer its loss) need not synchronise again.
        """
        epoch, source, slot, theirs, own = self.error.tolist()
        where = f"{Signature.of(own).name} on rank {self.rank} of {self.world}, epoch {epoch}"
        if theirs != own:
            raise ValueError(
                f"{where}: rank {source} is in {Signature.of(theirs)}, this rank in "
                f"{Signature.of(own)}"
            )
        if epoch:
            raise TimeoutError(
                f"{where}: rank {source} did not publish part {slot} within {self.polls} polls"
            )

    def settle(self) -> None:
        """`check` at the end of an operation on a CPU, where it has run."""
        if not self.epoch.is_cuda:
            self.check()

    def leave(self, name: str) -> None:
        """Note that an error ended operation `name` midway."""
        self.left.append(name)

    def fitting(self, name: str, device: torch.device, slots: int, size: int) -> SymmetricMemory:
        """This memory; ValueError unless it is on `device`, no operation was ended midway, and
        `slots` parts and `size` bytes fit, which operation `name` needs."""
        if self.left:
            raise ValueError(
                f"{name} on rank {self.rank} of {self.world}: an error ended {self.left[0]} "
                "midway, the symmetric memory is to be made anew on all ranks (Workspace.renew)"
            )
        if device != self.epoch.device:
            raise ValueError(
                f"{name}: symmetric memory on {self.epoch.device}, tensors on {device}"
            )
        if slots > self.slots or size > self.capacity:
            raise ValueError(
                f"{name} on rank {self.rank} of {self.world} needs {slots} parts and {size} "
                f"bytes of symmetric memory, it has {self.slots} and {self.capacity}"
            )
        return self


class Memory(Protocol):
    """What an operation is given: a `SymmetricMemory`, or a workspace that allocates one."""

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
    """Bytes of one rank's segment."""
    return _aligned(32 * world * slots) + 2 * _aligned(capacity)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def over_segments(
    segments: Sequence[torch.Tensor], rank: int, *, slots: int, capacity: int, polls: int
) -> SymmetricMemory:
    """The memory of `rank` over zeroed uint8 segments, one per rank, that this process can
    address."""
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
    """`world` virtual ranks on one device, for tests and for timing a kernel alone."""
    size = segment_bytes(world, slots, capacity)
    segments = torch.zeros(world, size, dtype=torch.uint8, device=device)
    if segments.data_ptr() % ALIGNMENT:  # torch aligns memory of a CPU to 64 bytes only
        segments = torch.zeros(world * size + ALIGNMENT, dtype=torch.uint8, device=device)
        segments = segments[-segments.data_ptr() % ALIGNMENT :][: world * size].view(world, size)
    return [
        over_segments([*segments], rank, slots=slots, capacity=capacity, polls=polls)
        for rank in range(world)
    ]


def create_file(path: Path, size: int) -> None:
    """Create a zeroed file of `size` bytes and reserve them, so that a full /dev/shm is an OSError
    and not a bus error at the first write."""
    number = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(number, 0, size)
    finally:
        os.close(number)


def map_file(path: Path, size: int) -> torch.Tensor:
    """uint8[size], shared with every process that maps the file; it outlives the file's name.

    Raises OSError if there is no such file, or one of another size.
    """
    if (found := os.stat(path).st_size) != size:  # torch would create or extend it
        raise OSError(f"{path.name} has {found} bytes, {size} are expected")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
