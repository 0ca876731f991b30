"""The flat buffer of a unit: positions of parameters, ranges of one kind, slices of the ranks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from warpweave.parallel.data.flat import FlatLayout, allocate, free, is_free
from warpweave.parallel.shard import Cut, ParamRecord


def _drawn(seed: int) -> list[ParamRecord]:
    """Draw records of any properties and sizes, including one element and none."""
    draw = random.Random(seed)
    records = []
    for n in range(draw.randint(1, 12)):
        shape = draw.choice([(1,), (31,), (32,), (33,), (4, 6), (8, 10), (0,), ()])
        matrix = len(shape) == 2 and draw.random() < 0.5
        cuts = (Cut("tp", 0, 2),) if shape and shape[0] and draw.random() < 0.4 else ()
        partial = ("tp",) if not cuts and draw.random() < 0.3 else ()
        options = {"decay": draw.random() < 0.5, "matrices": (1,) if matrix else ()}
        records.append(ParamRecord(f"p{n}", shape, cuts, partial, **options))
    return records


def _size(record: ParamRecord) -> int:
    return torch.Size(record.local_shape).numel()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_parameters_lie_apart_in_one_range_for_each_kind(ranks: int) -> None:
    for seed in range(40):
        records = _drawn(seed)
        layouts = [FlatLayout(iter(records), ranks, index) for index in range(ranks)]
        layout = layouts[0]
        assert sorted(r.name for r in layout.records) == sorted(r.name for r in records)
        end = 0
        for record in layout.records:  # one after the other, each on a boundary of 32
            assert layout.offsets[record.name] == end
            end += -(-_size(record) // 32) * 32
        assert layout.size == -(-end // (32 * ranks)) * 32 * ranks
        # Ranges are the runs of equal kind, and cover everything except the padding at the end.
        kinds, found = [], []
        for r in layout.records:
            kind = bool(r.matrices), r.decay, r.cut_axes, r.partial
            kinds += [kind] * (-(-_size(r) // 32) * 32)
        runs = [(r.matrix, r.decay, r.cut_axes, r.partial) for r in layout.ranges]
        for run, r in zip(runs, layout.ranges):
            found += [run] * (r.stop - r.start)
        assert found == kinds
        assert len({*runs}) == len(runs), "each kind is one range"
        assert all(a.stop == b.start for a, b in itertools.pairwise(layout.ranges))
        flags = [kind[0] for kind in kinds]
        assert flags == sorted(flags, reverse=True), "matrices in front"
        assert layout.matrices == sum(flags)
        # The slices of the ranks make up the buffer.
        slices = [one.own for one in layouts]
        assert (slices[0].start, slices[-1].stop) == (0, layout.size)
        assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
        assert {s.stop - s.start for s in slices} == {layout.slice_size}
        # Parts of ranges within a region are counted from its start.
        for region in (*slices, slice(0, layout.size), slice(7, 7), slice(40, 41)):
            told = [(r, range(part.start, part.stop)) for r, part in layout.ranges_of(region)]
            expected = []
            for r in layout.ranges:
                at = [n - region.start for n in range(r.start, r.stop)
                      if region.start <= n < region.stop]  # fmt: skip
                if at:
                    expected.append((r, range(at[0], at[-1] + 1)))
            assert told == expected


def test_views_are_disjoint_and_have_the_local_shapes() -> None:
    for seed in range(10):
        layout = FlatLayout(_drawn(seed), 2, 1)
        buffer = torch.arange(layout.size)
        seen: list[int] = []
        for record in layout.records:
            view = layout.view(buffer, record)
            assert tuple(view.shape) == record.local_shape
            start = layout.offsets[record.name]
            assert view.flatten().tolist() == [*range(start, start + _size(record))]
            seen += view.flatten().tolist()
            view.fill_(-1)
        assert len({*seen}) == len(seen) == int((buffer == -1).sum())


def test_a_freed_buffer_keeps_its_shape_and_its_views() -> None:
    buffer = torch.zeros(6, dtype=torch.float64)
    view = buffer[2:4]
    assert not is_free(buffer)
    free(buffer)
    assert is_free(buffer)
    assert (buffer.shape, view.shape, buffer.untyped_storage().nbytes()) == ((6,), (2,), 0)
    allocate(buffer)
    assert not is_free(buffer)
    assert buffer.untyped_storage().nbytes() == 48
    buffer.copy_(torch.arange(6))
    assert view.tolist() == [2.0, 3.0]
