"""Ranks that do not compute the same."""

from __future__ import annotations

import sys

import pytest
from arena import AT, FOUR, named, on
from fault_acts import Fault

pytestmark = [pytest.mark.faults, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]


@on(FOUR[0])
def test_not_a_number(arena):
    """The rank that first had a NaN in a tensor is named, and no weight changes."""
    end = arena.start(fault=Fault("nan", 1, AT)).end(1)
    assert named(end) == {1}
    arena.note(end.last)


@on(FOUR[2])
def test_flipped_bit(arena):
    """The rank whose replicated weight differs is named."""
    end = arena.start("--zero", "0", "--check-every", "2", fault=Fault("flip", 1, AT)).end(1)
    assert 1 in named(end)
    arena.note(end.last)


def test_another_collective(arena):
    """If only one rank issues a collective, the run ends, and both ranks' calls are named."""
    end = arena.start(fault=Fault("extra", 1, 1)).end(1)
    assert 1 in named(end)
    arena.note(end.last)


def test_slow_rank(arena):
    """The metrics name the rank whose forward is 200 ms slower."""
    job = arena.start("--check-every", "2", fault=Fault("lag", 1, 1))
    job.end(0)
    rows = [row for row in job.rows() if row.get("slowest_rank") is not None]
    assert {1} == {row["slowest_rank"] for row in rows if row["step"] > AT}
    arena.note("slowest_rank is 1 in every row")
