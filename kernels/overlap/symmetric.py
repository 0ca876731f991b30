"""Symmetric memory: a segment per rank that every rank can read and write, and the epoch it is in.

    segment of a rank:   flags int64[4 W, slots]   data of even epochs   data of odd epochs
    flags[s, i]          the last epoch in which rank s published its part i to this rank
    flags[W + s, i]      the last epoch in which part i of rank s arrived in this rank's own memory
    flags[2 W + s, i]    no flag but the `Signature` of the operation in which rank s published its
    flags[3 W + s, i]    part i, of even epochs and of odd ones: written where waits are bounded

A kernel is given the addresses of all W segments, as they are seen from its own rank, and neither a
process group nor a device: so one kernel serves NVLink peers, W virtual ranks on one device, and
processes over POSIX shared memory in Triton's interpreter.

Every operation is one epoch, one more than the last, on all ranks alike. Flags only grow, so none
is ever reset. Data of epoch e and e + 2 lie in the same place, and nobody needs a barrier at the
end of an operation: each waits for something from every peer, so a rank that has finished epoch
e + 1 knows that all have begun e + 1, and so have read all they needed of e. Two conditions follow.
The operations of one memory follow one another on one stream (two streams, or two groups, need two
memories), and an operation that would wait for nobody, because it is empty, is no epoch. The epoch
is read from memory by the kernels, so that a captured graph counts on when it is replayed.

Sources: Triton-distributed (Zheng et al. 2025, arXiv:2504.19442) for the alternating halves.
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
    """What the ranks of an operation must agree on, or flags and data would not be where they are
    looked for: what each moves, [rows, columns], of which dtype, and the parts it is cut into."""

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
        segments: uint8[bytes] of each rank, as this process sees them; zero when nothing has run.
        addresses: int64[world], where they lie.
        epoch: int64[1], how many operations have run.
        error: int64[5]: the epoch in which a wait gave up (0: none has), the rank and the part that
            it waited for; where that came of another operation, the words of the two signatures,
            the other's and this rank's. See `check`.
        slots: parts that a rank may publish in one epoch.
        capacity: bytes of data in an epoch.
        polls: how often a wait looks before it gives up; 0 for ever.
        left: operations that an error ended midway. Others may have awaited what they published, so
            their epoch cannot begin again: the memory of all ranks is to be made anew.
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
        """Where the data of even epochs begins, in bytes."""
        return _aligned(32 * self.world * self.slots)

    def advance(self) -> None:
        """End an epoch, in stream order."""
        self.epoch.add_(1)

    def check(self, name: str) -> None:
        """Raise TimeoutError if a wait of operation `name` has given up, ValueError if it has found
        a rank in another operation.

        Then what it returned is wrong. Waits for the device: operations check themselves on a CPU
        only, on a GPU it is for those who bound their waits.
        """
        epoch, source, slot, theirs, own = self.error.tolist()
        where = f"{name} on rank {self.rank} of {self.world}, epoch {epoch}"
        if theirs != own:
            raise ValueError(
                f"{where}: rank {source} is in {Signature.of(theirs)}, this rank in "
                f"{Signature.of(own)}"
            )
        if epoch:
            raise TimeoutError(
                f"{where}: rank {source} did not publish part {slot} within {self.polls} polls"
            )

    def settle(self, name: str) -> None:
        """`check`, where waits are bounded and looking makes nobody wait: on a CPU."""
        if self.polls and not self.epoch.is_cuda:
            self.check(name)

    def leave(self, name: str) -> None:
        """Note that an error ended operation `name` midway."""
        self.left.append(name)

    def fitting(self, name: str, device: torch.device, slots: int, size: int) -> SymmetricMemory:
        """This; ValueError unless it is on `device`, no operation was left midway and an epoch of
        operation `name` fits, of `slots` parts and `size` bytes."""
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
    """What an operation is given: memory, or that which finds it."""

    @property
    def rank(self) -> int: ...
    @property
    def world(self) -> int: ...
    def fitting(
        self, name: str, device: torch.device, slots: int, size: int
    ) -> SymmetricMemory: ...
    def settle(self, name: str) -> None: ...
    def leave(self, name: str) -> None: ...


def segment_bytes(world: int, slots: int, capacity: int) -> int:
    """Bytes of one rank's segment."""
    return _aligned(32 * world * slots) + 2 * _aligned(capacity)


def _aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def over_segments(
    segments: Sequence[torch.Tensor], rank: int, *, slots: int, capacity: int, polls: int
) -> SymmetricMemory:
    """The view of `rank` of zeroed uint8 segments, one per rank, that this process can address."""
    device = segments[rank].device
    return SymmetricMemory(
        rank,
        len(segments),
        tuple(segments),
        torch.tensor([segment.data_ptr() for segment in segments], device=device),
        torch.zeros(1, dtype=torch.int64, device=device),
        torch.zeros(5, dtype=torch.int64, device=device),
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
    """Make a zeroed file of `size` bytes, all of them reserved: a full /dev/shm is an OSError here
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
    if (found := os.stat(path).st_size) != size:  # torch would make it, or make it longer
        raise OSError(f"{path.name} has {found} bytes, {size} are expected")
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
