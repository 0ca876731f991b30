"""One record per parameter: its sharding, initialization, weight decay, ties, and the ranks over
which its gradient is summed.

    weight[6, E] of a column-parallel layer on tp = 4, sharded along dim 0 in blocks of ceil(6 / 4)
    tp rank   0        1        2        3
    rows      0, 1     2, 3     4, 5     padding, padding (always zero)

Initialization, gradient sums, the global norm, ZeRO slices and checkpoints all read this record, so
they cannot disagree. The idea extends nanotron's tied-parameter record.
"""

from __future__ import annotations

import builtins
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

_PIECE = 1 << 22  # elements to draw at a time


@dataclass(frozen=True)
class Cut:
    """Sharding of a parameter along `dim` over the `parts` ranks of the mesh's `axis`.

    Rank r of the axis holds rows ``[r * n, (r + 1) * n)`` with n = ceil(length / parts). Rows past
    the end are padding, which is always zero.

    Examples:
        >>> from warpweave.parallel.shard import ParamRecord
        >>> ParamRecord("weight", (256, 64), (Cut("tp", 0, 4),)).local_shape
        (64, 64)
    """

    axis: str
    dim: int
    parts: int


@dataclass(frozen=True)
class ParamRecord:
    """Everything about one parameter that is the same on every rank.

    Attributes:
        name: its full logical name, the same on every mesh, e.g. ``blocks.3.mlp.up.weight``.
        shape: its logical shape, before sharding and without padding.
        cuts: the dims along which it is sharded over mesh axes, applied one after the other. It is
            replicated over all other axes.
        partial: the axes over which it is replicated but whose ranks see different tokens (sequence
            parallelism over "tp"). Its gradient must be summed over these axes as well.
        init: "zeros", "ones", or a standard deviation.
        decay: True if weight decay applies.
        matrices: for the weight of a linear map, the rows of each of its matrices, repeated in
            turn. (1,) is one matrix; (1, 1) is two whose rows alternate (gate and up);
            (2 D, D, D) is the queries, key and value of each KV head. () means that it is not a
            linear map: an embedding or head, a norm, a bias.
        tied: the stages that hold a copy, the owner first; () if only one stage holds it.
        sum_over: the mesh axis whose ranks apply it to different tokens. Its gradient is summed
            over this axis, and ZeRO shards it over this axis.

    Examples:
        >>> from warpweave.parallel.shard import Cut
        >>> record = ParamRecord("weight", (256, 64), (Cut("tp", 0, 4),))
        >>> record.slice(torch.randn(256, 64), {"tp": 1}).shape  # rows 64 to 127
        torch.Size([64, 64])
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
        """Return the same record under another name."""
        return replace(self, name=name)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The axes whose ranks hold different values."""
        return tuple(cut.axis for cut in self.cuts if cut.parts > 1)

    def _lengths(self) -> Iterator[tuple[Cut, int, int]]:
        """Each of `cuts`, with the length of its dim before and after it, including padding."""
        shape = list(self.shape)
        for cut in self.cuts:
            before = shape[cut.dim]
            shape[cut.dim] = -(-before // cut.parts)
            yield cut, before, shape[cut.dim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape on one rank, including padding."""
        shape = list(self.shape)
        for cut, _, after in self._lengths():
            shape[cut.dim] = after
        return tuple(shape)

    def slice(self, full: torch.Tensor, at: Mapping[str, int]) -> torch.Tensor:
        """Return the shard of the logical tensor `full` for the rank at mesh coordinates `at`,
        padded with zeros.

        Raises ValueError if `full` does not have the logical shape.
        """
        if (found := tuple(full.shape)) != self.shape:
            wanted = f"expected logical shape {self.shape}, got {found}"
            raise ValueError(f"parameter {self.name}: {wanted}")
        part, shape = full[self.held(at)], self.local_shape
        behind = [n for i in reversed(range(full.ndim)) for n in (0, shape[i] - part.shape[i])]
        return F.pad(part, behind) if any(behind) else part

    def held(self, at: Mapping[str, int]) -> tuple[builtins.slice, ...]:
        """The slices of the logical tensor that the rank at mesh coordinates `at` holds, without
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
        """Return the logical tensor from the shards of all ranks; `local` is this rank's shard. The
        inverse of `slice`.

        ``gather(x, axis)`` returns the x of every rank along `axis`, in order.
        """
        for cut, before, _ in reversed(list(self._lengths())):
            if cut.parts > 1:
                local = torch.cat(gather(local, cut.axis), cut.dim).narrow(cut.dim, 0, before)
        return local

    def split(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return the `matrices` of the logical tensor `full`, each [rows, columns]."""
        parts = full.unflatten(0, (-1, sum(self.matrices))).split(self.matrices, 1)
        return [part.flatten(0, 1) for part in parts]

    def join(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the logical tensor made of its `matrices`; the inverse of `split`."""
        parts = (x.unflatten(0, (-1, n)) for x, n in zip(matrices, self.matrices, strict=True))
        return torch.cat([*parts], 1).flatten(0, 1)

    def draw(
        self, seed: int, *, at: Mapping[str, int] | None = None, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Draw the initial logical tensor, a function of `seed` and the name only. If mesh
        coordinates `at` are given, return only the shard that `slice` would return for them.

        Values are drawn in float32 on the CPU and then cast, so every mesh, device and dtype starts
        from the same values. torch's generator cannot skip numbers. A rank therefore draws all
        values up to its last row, a few rows at a time, and keeps its own.
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
        """The row ranges [first, last) to draw one after the other, up to row `stop` or beyond.

        Each range is a multiple of 16 rows, and the last one has at least 16. `torch.randn` makes
        16 numbers at a time, so drawing in pieces gives the same numbers as drawing the whole.
        """
        rows, each = self.shape[0], math.prod(self.shape[1:])
        size, first = max(16, _PIECE // max(1, each) // 16 * 16), 0
        while first < stop:
            last = first + size if rows - first >= size + 16 else rows
            yield first, last
            first = last
