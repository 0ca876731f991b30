"""The copy engine's part of all-gather -> GEMM: shards that no program copies.

On a stream beside that of the products, for every peer, the next rank's shard first:

    `_await_shard_kernel`   until the peer has published all parts of its shard
    a copy                  of the whole shard; between NVLink peers a copy engine makes it
    `_arrived_kernel`       raises the flag of the shard, which the tiles of its rows await

Copies are of whole shards, so that one flag is enough for each (`await_tile` with COPYING = 0).
They take no processor from the products; three launches for each peer are what they cost.

Nobody can wait for ever: what is aside waits only for what peers' first launches publish, and the
tiles for what is aside, for whose kernels of one warp the products leave a place free
(`Peers.programs`). Where there is no stream aside, on a CPU and for virtual ranks on one device,
the same launches come one after the other, before those of the products.

The host chooses the half of the peers' memory that is read, by an epoch of its own counting. It
sees no replay of a graph: see `SymmetricMemory.begun`. No copy engine has run this yet.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from warpweave.kernels.overlap.signals import (
    await_part,
    flag_of,
    publish,
    this_epoch,
)
from warpweave.kernels.overlap.symmetric import SymmetricMemory
from warpweave.kernels.runtime.dispatch import tl, triton

# Gathered rows from which on it is taken. A peer's shard costs three launches, about 15 us
# (assumed), which products of fewer rows do not hide: published ones lose below 2048 rows, and
# gain 1.08 at 4096 and 1.31 at 8192 (symm-mem-recipes, 8 x H100). Not measured here.
COPY_ROWS = 4096


@triton.jit(do_not_specialize=["rank", "signature", "source", "parts"])
def _await_shard_kernel(
    addresses_ptr,
    epoch_ptr,
    error_ptr,
    rank,
    slots,
    signature,
    source,
    parts,
    WORLD: tl.constexpr,
    POLLS: tl.constexpr,
):
    """Wait until `source` has published all parts of its shard."""
    epoch = this_epoch(epoch_ptr)
    for part in range(parts):
        await_part(
            addresses_ptr, epoch, error_ptr, rank, slots, signature, source, part, WORLD, POLLS
        )


@triton.jit(do_not_specialize=["rank", "source"])
def _arrived_kernel(addresses_ptr, epoch_ptr, rank, slots, source, WORLD: tl.constexpr):
    """Say that the shard of `source` is here."""
    flag = flag_of(addresses_ptr, rank, WORLD + source, 0, slots)
    publish(flag, this_epoch(epoch_ptr), "gpu")


class Aside:
    """A stream beside the current one, or on a CPU the same order of things."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def fork(self) -> None:
        """What runs aside from here on comes after what the current stream was given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def running(self) -> AbstractContextManager[object]:
        """Within it, launches and copies are aside."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What the current stream is given from here on comes after what is aside."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def copy(here: torch.Tensor, there: torch.Tensor) -> None:
    """A copy in stream order; between peers, of memory without gaps, by a copy engine."""
    here.copy_(there)


def copy_shards(
    whole: torch.Tensor, memory: SymmetricMemory, parts: int, signature: int, aside: Aside
) -> None:
    """Have the shards of all peers copied into whole[W S, K], aside; `memory` counts its epochs."""
    rank, world = memory.rank, memory.world
    shards = whole.view(world, -1)
    size = shards[0].numel() * whole.element_size()
    start = memory.data_offset + (memory.begun[0] + 1) % 2 * memory.capacity
    aside.fork()
    with aside.running():
        for step in range(1, world):
            source = (rank + step) % world
            there = memory.segments[source][start : start + size].view(whole.dtype)
            _await_shard_kernel[(1,)](
                memory.addresses, memory.epoch, memory.error, rank, memory.slots, signature,
                source, parts, world, memory.polls, num_warps=1,
            )  # fmt: skip
            copy(shards[source], there)
            _arrived_kernel[(1,)](
                memory.addresses, memory.epoch, rank, memory.slots, source, world, num_warps=1
            )
