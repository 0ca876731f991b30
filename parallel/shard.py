"""One record per parameter: how it is sharded, initialised, decayed, tied, and over which ranks its
gradient is summed.

    weight[6, E] of a column-parallel layer on tp = 4, sharded along dim 0 in blocks of ceil(6 / 4)
    tp rank   0        1        2        3
    rows      0, 1     2, 3     4, 5     padding, padding (always zero)

Initialisation, gradient sums, the global norm, ZeRO slices and checkpoints all read this record, so
that they cannot disagree (the idea is nanotron's tied-parameter record, widened).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Cut:
    """A parameter is sharded along `dim` over the `parts` ranks of the mesh's `axis`.

    Rank r of the axis holds rows ``[r * n, (r + 1) * n)`` with n = ceil(length / parts); rows past
    the end are padding, always zero.
    """

    axis: str
    dim: int
    parts: int


@dataclass(frozen=True)
class ParamRecord:
    """What is true of one parameter on every rank.

    Attributes:
        name: its full logical name, the same on every mesh, e.g. ``blocks.3.mlp.up.weight``.
        shape: its logical shape, before sharding and without padding.
        cuts: the dims along which it is sharded over axes of the mesh, one after the other; over
            axes that are not named it is replicated.
        partial: the axes over which it is replicated but whose ranks see different tokens (sequence
            parallelism over "tp"), so that gradients are summed over them, too.
        init: "zeros", "ones", or a standard deviation.
        decay: weight decay applies.
        tied: the stages that hold a copy, first is the owner; () if only one stage holds it.
        sum_over: the axis of the mesh whose ranks apply it to different tokens: its gradient is
            summed, and ZeRO shards it, over this axis.
    """

    name: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    partial: tuple[str, ...] = ()
    init: str | float = 0.02
    decay: bool = True
    tied: tuple[int, ...] = ()
    sum_over: str = "data"

    def renamed(self, name: str) -> ParamRecord:
        """The same record under another name."""
        return replace(self, name=name)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold different values."""
        return tuple(cut.axis for cut in self.cuts if cut.parts > 1)

    def _lengths(self) -> Iterator[tuple[Cut, int, int]]:
        """Each of `cuts` with the length of its dim before and after it, padding included."""
        shape = list(self.shape)
        for cut in self.cuts:
            before = shape[cut.dim]
            shape[cut.dim] = -(-before // cut.parts)
            yield cut, before, shape[cut.dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape on one rank, padding included."""
        shape = list(self.shape)
        for cut, _, after in self._lengths():
            shape[cut.dim] = after
        return tuple(shape)

    def slice(self, full: torch.Tensor, at: Mapping[str, int]) -> torch.Tensor:
        """The shard of the logical tensor `full` on the rank at mesh coordinates `at`, padded with
        zeros.

        Raises ValueError if `full` has another shape.
        """
        if tuple(full.shape) != self.shape:
            raise ValueError(
                f"parameter {self.name} has logical shape {self.shape}, got {tuple(full.shape)}"
            )
        for cut, before, after in self._lengths():
            start = min(at[cut.axis] * after, before)
            part = full.narrow(cut.dim, start, min(after, before - start))
            padding = list(part.shape)
            padding[cut.dim] = after - part.shape[cut.dim]
            full = torch.cat([part, part.new_zeros(padding)], cut.dim) if padding[cut.dim] else part
        return full

    def assemble(
        self, local: torch.Tensor, gather: Callable[[torch.Tensor, str], list[torch.Tensor]]
    ) -> torch.Tensor:
        """The logical tensor from the ranks' shards, of which `local` is this rank's; the inverse
        of `slice`.

        ``gather(x, axis)`` returns the x of every rank along `axis`, in order.
        """
        for cut, before, _ in reversed(list(self._lengths())):
            if cut.parts > 1:
                local = torch.cat(gather(local, cut.axis), cut.dim).narrow(cut.dim, 0, before)
        return local

    def draw(self, seed: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The initial logical tensor, a function of `seed` and the name only.

        Drawn in float32 on the CPU and then cast, so that every mesh, device and dtype starts from
        the same values.
        """
        if self.init == "zeros":
            return torch.zeros(self.shape, dtype=dtype)
        if self.init == "ones":
            return torch.ones(self.shape, dtype=dtype)
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") & (2**63 - 1))
        return (torch.randn(self.shape, generator=generator) * float(self.init)).to(dtype)
