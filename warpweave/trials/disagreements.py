"""Ranks that do not compute the same."""

from __future__ import annotations

from warpweave.trials.deaths import AT, named
from warpweave.trials.faults import Fault
from warpweave.trials.job import promised
from warpweave.trials.trial import FOUR, Arena, trial


@trial("the rank whose tensor first had it is named, on all ranks the weights stay", FOUR[0])
def not_a_number(arena: Arena) -> str:
    """A block of one tensor rank gives NaN."""
    end = arena.start(fault=Fault("nan", 1, AT)).end(1)
    promised(named(end) == {1}, end.said)
    return end.said[-1].removeprefix("warpweave: ")


@trial("the rank with another weight is named", FOUR[2])
def flipped_bit(arena: Arena) -> str:
    """A bit of a norm's weight, on one of four ranks that hold it (ZeRO 0)."""
    end = arena.start("--zero", "0", "--check-every", "2", fault=Fault("flip", 1, AT)).end(1)
    promised(1 in named(end), end.said)
    return end.said[-1].removeprefix("warpweave: ")


@trial("a collective that one rank alone issues ends the run with both named")
def another_collective(arena: Arena) -> str:
    """An all-reduce too many, in the second step."""
    end = arena.start(fault=Fault("extra", 1, 1)).end(1)
    promised(1 in named(end), end.said)
    return end.said[-1].removeprefix("warpweave: ")


@trial("a rank that is 200 ms slower stands in the metrics")
def slow_rank(arena: Arena) -> str:
    """It waits 0.2 s in each forward."""
    job = arena.start("--check-every", "2", fault=Fault("lag", 1, 1))
    job.end(0)
    rows = [row for row in job.rows() if row.get("slowest_rank") is not None]
    promised({1} == {row["slowest_rank"] for row in rows if row["step"] > AT}, rows)
    return f"slowest_rank {rows[-1]['slowest_rank']} in every row"
