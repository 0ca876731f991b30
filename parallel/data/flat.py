"""The flat buffer of a unit: the offset of each parameter, and each data rank's slice.

    parameters of a block, concatenated and padded; ZeRO over four data ranks
    [ qkv.weight | out.weight | up.weight | down.weight | norms and biases | padding ]
    [     rank 0      |      rank 1      |      rank 2      |       rank 3           ]

Slices are equal and ignore the boundaries of parameters. Parameters with the same properties form
few contiguous ranges. The properties are: matrix of a linear map (these come first), weight decay,
the axes over which the parameter is sharded, and the axes over which its gradient is still a
partial sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from warpweave.parallel.shard import ParamRecord

_ALIGN = 32  # elements, so that every parameter starts on a 64-byte boundary


@dataclass(frozen=True)
class Range:
    """Elements ``[start, stop)`` of a flat buffer whose parameters share their properties.

    `decay`, `cut_axes` and `partial` are those of their ``ParamRecord``. `matrix` is True if they
    are weights of linear maps (`ParamRecord.matrices`).
    """

    start: int
    stop: int
    matrix: bool
    decay: bool
    cut_axes: tuple[str, ...]
    partial: tuple[str, ...]


def _properties(record: ParamRecord) -> tuple[bool, bool, tuple[str, ...], tuple[str, ...]]:
    return bool(record.matrices), record.decay, record.cut_axes, record.partial


class FlatLayout:
    """The layout of one flat buffer, with an equal slice for each rank of a data axis.

    Args:
        records: the parameters in it.
        ranks: number of ranks of the data axis.
        index: this rank's index on it.

    Attributes:
        records: the parameters in the order of the buffer.
        offsets: name -> first element.
        ranges: contiguous ranges of equal properties, in order.
        matrices: number of leading elements that are weights of linear maps; there are none later.
        size: elements of the buffer, including padding; `ranks` times the slice's.
        own: this rank's slice.
    """

    def __init__(self, records: Iterable[ParamRecord], ranks: int, index: int) -> None:
        self.records = tuple(sorted(records, key=_properties, reverse=True))
        self.offsets: dict[str, int] = {}
        ranges: list[Range] = []
        end = 0
        for record in self.records:
            self.offsets[record.name] = end
            size = torch.Size(record.local_shape).numel()
            start, end = end, end + -(-size // _ALIGN) * _ALIGN
            this = Range(start, end, *_properties(record))
            if ranges and replace(ranges[-1], start=start, stop=end) == this:
                this = replace(this, start=ranges.pop().start)
            ranges.append(this)
        self.ranges = tuple(ranges)
        self.matrices = max((r.stop for r in ranges if r.matrix), default=0)
        slice_size = -(-end // (ranks * _ALIGN)) * _ALIGN
        self.size = slice_size * ranks
        self.own = slice(index * slice_size, (index + 1) * slice_size)

    @property
    def slice_size(self) -> int:
        """Number of elements in one rank's slice."""
        return self.own.stop - self.own.start

    def view(self, buffer: Tensor, record: ParamRecord) -> Tensor:
        """Return the parameter of `record` as a view of the flat `buffer`, in its local shape."""
        offset = self.offsets[record.name]
        shape = record.local_shape
        return buffer[offset : offset + torch.Size(shape).numel()].view(shape)

    def ranges_of(self, region: slice) -> Iterator[tuple[Range, slice]]:
        """Yield each range that intersects `region` of the buffer, and its position in `region`."""
        for r in self.ranges:
            start, stop = max(r.start, region.start), min(r.stop, region.stop)
            if start < stop:
                yield r, slice(start - region.start, stop - region.start)


def free(buffer: Tensor) -> None:
    """Free the memory of `buffer`, which keeps its shape and its views."""
    buffer.untyped_storage().resize_(0)


def allocate(buffer: Tensor) -> None:
    """Undo `free`: allocate uninitialized memory for `buffer`."""
    buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())


def is_free(buffer: Tensor) -> bool:
    """Return True if `buffer` has no memory."""
    return buffer.untyped_storage().size() == 0
