"""One record per parameter: everything the library must know about it, in one place.

Initialisation, gradient sums, the global norm, ZeRO slices and checkpoints all read this record, so
they cannot disagree (the idea is nanotron's tied-parameter record, widened).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class ParamRecord:
    """What is true of one parameter on every rank.

    Attributes:
        name: its full logical name, the same on every mesh, e.g. ``blocks.3.mlp.up.weight``.
        shape: its logical (unsharded, unpadded) shape.
        shard_dim: the dim that is cut over the tensor axis; None if every tensor rank holds it all.
            Rank r holds rows ``[r * n, (r + 1) * n)`` with ``n = ceil(shape[shard_dim] / parts)``;
            rows past the logical size are padding, always zero.
        parts: number of tensor ranks.
        partial: every tensor rank holds it all but sees only a part of the tokens (sequence
            parallelism), so that its gradients must be summed over the tensor axis.
        init: "zeros", "ones", or a standard deviation.
        decay: weight decay applies.
        tied: the stages that hold a copy, first is the owner; () if only one stage holds it.
    """

    name: str
    shape: tuple[int, ...]
    shard_dim: int | None = None
    parts: int = 1
    partial: bool = False
    init: str | float = 0.02
    decay: bool = True
    tied: tuple[int, ...] = ()

    def renamed(self, name: str) -> ParamRecord:
        """The same record under another name."""
        return replace(self, name=name)

    @property
    def sharded(self) -> bool:
        """True if the tensor ranks hold different values."""
        return self.shard_dim is not None and self.parts > 1

    @property
    def rows(self) -> int:
        """Length of `shard_dim` on each tensor rank, padding included."""
        if self.shard_dim is None:
            raise ValueError(f"parameter {self.name} is not sharded")
        return -(-self.shape[self.shard_dim] // self.parts)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on one tensor rank, padding included."""
        if self.shard_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.shard_dim] = self.rows
        return tuple(shape)

    def slice(self, full: torch.Tensor, index: int) -> torch.Tensor:
        """Tensor rank `index`'s shard of the logical tensor `full`, padded with zero rows."""
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"parameter {self.name} has logical shape {self.shape}, got {tuple(full.shape)}"
            )
        if self.shard_dim is None:
            return full
        start = min(index * self.rows, self.shape[self.shard_dim])
        stop = min(start + self.rows, self.shape[self.shard_dim])
        part = full.narrow(self.shard_dim, start, stop - start)
        missing = self.rows - (stop - start)
        if missing == 0:
            return part
        padding = list(part.shape)
        padding[self.shard_dim] = missing
        return torch.cat([part, part.new_zeros(padding)], self.shard_dim)

    def assemble(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The logical tensor from every tensor rank's shard; the inverse of `slice`."""
        if self.shard_dim is None:
            return parts[0]
        full = torch.cat(parts, self.shard_dim)
        return full.narrow(self.shard_dim, 0, self.shape[self.shard_dim])

    def draw(self, seed: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The initial logical tensor, a function of `seed` and the name alone.

        Drawn in float32 on the CPU and then cast, so that every mesh, device and dtype starts from
        the same numbers.
        """
        if self.init == "zeros":
            return torch.zeros(self.shape, dtype=dtype)
        if self.init == "ones":
            return torch.ones(self.shape, dtype=dtype)
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") & (2**63 - 1))
        return (torch.randn(self.shape, generator=generator) * float(self.init)).to(dtype)
