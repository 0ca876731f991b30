"""One record per parameter: how it is sharded, initialised, decayed, tied, and over which ranks its
gradient is summed.

    weight[6, E] of a column-parallel layer on tp = 4, sharded along dim 0 in blocks of ceil(6 / 4)
    tp rank   0        1        2        3
    rows      0, 1     2, 3     4, 5     padding, padding (always zero)

Initialisation, gradient sums, the global norm, ZeRO slices and checkpoints all read this record, so
that they cannot disagree (the idea is nanotron's tied-parameter record, widened).
"""

from __future__ import annotations

import builtins
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

_PIECE = 1 << 22  # elements that are drawn at a time


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
        matrices: of the weight of a linear map, the rows of each of its matrices, in turns: (1,) is
            one matrix, (1, 1) two whose rows alternate (gate and up), (2 D, D, D) the queries, key
            and value of each KV head. () is what is none: an embedding or head, a norm, a bias.
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
    matrices: tuple[int, ...] = ()
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
        part, shape = full[self.held(at)], self.local_shape
        behind = [n for i in reversed(range(full.ndim)) for n in (0, shape[i] - part.shape[i])]
        return F.pad(part, behind) if any(behind) else part

    def held(self, at: Mapping[str, int]) -> tuple[builtins.slice, ...]:
        """The part of the logical tensor that the rank at mesh coordinates `at` holds, without
        padding."""
        first, stop = [0] * len(self.shape), list(self.shape)
        for cut, _, after in self._lengths():
            start = first[cut.dim] + at[cut.axis] * after
            first[cut.dim] = min(start, stop[cut.dim])
            stop[cut.dim] = min(start + after, stop[cut.dim])
        return tuple(map(slice, first, stop))

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

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """The `matrices` of the logical tensor `full`, each [its rows, columns]."""
        parts = full.unflatten(0, (-1, sum(self.matrices))).split(self.matrices, 1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The logical tensor of its `matrices`; the inverse of `split`."""
        parts = (x.unflatten(0, (-1, n)) for x, n in zip(matrices, self.matrices, strict=True))
        return torch.cat([*parts], 1).flatten(0, 1)

    def draw(
        self,
        seed: int,
        *,
        at: Mapping[str, int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """The initial logical tensor, a function of `seed` and the name only; its shard on the rank
        at mesh coordinates `at`, as `slice` would cut it, if these are given.

        Drawn in float32 on the CPU and then cast, so that every mesh, device and dtype starts from
        the same values. torch's generator cannot skip numbers, so a rank draws all up to its last
        row, some rows at a time, and keeps its own.
        """
        record = replace(self, cuts=()) if at is None else self
        rows, *others = record.held(at or {})
        local = torch.zeros(record.local_shape, dtype=dtype)
        own = local[tuple(slice(s.stop - s.start) for s in (rows, *others))]
        if self.init == "ones":
            own.fill_(1.0)
        if isinstance(self.init, str):
            return local
        digest = hashlib.sha256(f"{seed}/{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") & (2**63 - 1))
        for first, stop in self._pieces(rows.stop):
            piece = torch.randn((stop - first, *self.shape[1:]), generator=generator)
            here = slice(max(first, rows.start), min(stop, rows.stop))
            if here.start < here.stop:
                part = piece[here.start - first : here.stop - first][(slice(None), *others)]
                own[here.start - rows.start : here.stop - rows.start] = part * float(self.init)
        return local

    def _pieces(self, stop: int) -> Iterator[tuple[int, int]]:
        """The rows [first, last) to draw one after the other, up to row `stop` or more.

        Multiples of 16 rows, of which the last piece has at least 16: `torch.randn` makes 16
        numbers at a time, so pieces then have the numbers of the whole.
        """
        rows, each = self.shape[0], math.prod(self.shape[1:])
        size, first = max(16, _PIECE // max(1, each) // 16 * 16), 0
        while first < stop:
            last = first + size if rows - first >= size + 16 else rows
            yield first, last
            first = last
