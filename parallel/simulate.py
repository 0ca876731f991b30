"""Simulation of a pipeline schedule: its timeline, given a time per action and per message.

The simulator reads the same lists as the executor and waits for the same `deps`. A rank does one
action at a time. A send costs the sender nothing and is received `comm` later. The result has both
`span` and `width`, because "zero bubble" holds for the latter only (arXiv:2401.10241). `span` is
the time from the first start to the last end over all ranks, as for a step with a global gradient
norm or barrier. `width` is each rank's time from its own first start to its own last end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from warpweave.parallel.schedule.actions import (
    COMPUTE,
    TIE,
    UPDATE,
    Action,
    B,
    F,
    I,
    Schedule,
    W,
    cell_at,
    gives,
    held_activations,
    placement,
    tied_stages,
)
from warpweave.parallel.schedule.ordering import in_order

OVERLAP = "OVERLAP_F_B"  # the key of a cell in `Cost`
Cost = Mapping[str, float] | Callable[[Action], float]


class Cell(NamedTuple):
    """One action in time.

    Examples:
        >>> from warpweave.parallel.schedule import gpipe
        >>> from warpweave.parallel.simulate import simulate
        >>> cell = simulate(gpipe(1, 1), {"F": 1, "B": 2}).cells[0][1]
        >>> str(cell.action), cell.start, cell.end
        ('0B0', 1, 3)
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step. Times are in the unit of `cost`; per-rank values are in rank order.

    Examples:
        >>> from warpweave.parallel.schedule import one_f_one_b
        >>> from warpweave.parallel.simulate import simulate
        >>> timeline = simulate(one_f_one_b(4, 8), {"F": 1, "B": 2})
        >>> timeline.span, timeline.activations
        (33, (4.0, 3.0, 2.0, 1.0))
    """

    cells: tuple[tuple[Cell, ...], ...]  # per rank, in the order of its list
    activations: tuple[float, ...]  # peak, in micro-batches through all stages of the rank
    versions: tuple[int, ...]  # peak number of weight versions alive

    @property
    def span(self) -> float:
        """Time from the first start to the last end over all ranks."""
        ends = [cell.end for row in self.cells for cell in row]
        starts = [cell.start for row in self.cells for cell in row]
        return max(ends) - min(starts)

    @property
    def width(self) -> tuple[float, ...]:
        """Each rank's time from its own first start to its own last end."""
        return tuple(row[-1].end - row[0].start if row else 0 for row in self.cells)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank works."""
        return tuple(sum(cell.end - cell.start for cell in row) for row in self.cells)

    @property
    def idle(self) -> tuple[float, ...]:
        """Time within the span that each rank does not work."""
        return tuple(self.span - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The bubble as a fraction of the ranks' time, e.g. (p-1)/(m+p-1) for GPipe and 1F1B if
        `comm` is 0."""
        return sum(self.idle) / (self.span * len(self.cells))

    def draw(self, tick: float = 1.0) -> str:
        """Draw a Gantt chart of the compute actions: a line per rank, a column per `tick` of time.

        A column shows the operation and the micro-batch. The stage comes first if ranks hold
        several. A ``&`` at the end means that the action and the next one are one cell; ``-``
        continues an action, ``.`` is idle.
        """
        several = any(len({c.action.stage for c in row}) > 1 for row in self.cells)
        begin = min(cell.start for row in self.cells for cell in row)
        columns = round(self.span / tick)
        grid = [["."] * columns for _ in self.cells]
        for line, row in zip(grid, self.cells):
            for action, start, end in row:
                if action.op not in COMPUTE:
                    continue
                first, stop = round((start - begin) / tick), round((end - begin) / tick)
                line[first:stop] = ["-"] * (stop - first)
                name = f"{action.op}{action.mb}" + "&" * action.joined
                line[first] = f"{action.stage}{name}" if several else name
        wide = max(len(cell) for line in grid for cell in line)
        return "\n".join(" ".join(cell.ljust(wide) for cell in line).rstrip() for line in grid)


def simulate(
    lists: Schedule, cost: Cost, comm: float = 0, before: Collection[Action] = ()
) -> Timeline:
    """Return the timeline of `lists`; it is the same before and after `with_comm`.

    Args:
        lists: the schedule.
        cost: time per operation, such as {"F": 1, "B": 2}, or a function of an `Action`. B defaults
            to I + W, other operations to 0. "OVERLAP_F_B" is the time of a cell, which defaults to
            F + B.
        comm: time of one message between ranks. Waiting in a receive or a TIE counts as idle.
        before: events before time 0, for a pass that is left open (`begun_before`).

    Raises:
        ValueError: the lists deadlock; the error names what each rank waits for.

    Examples:
        >>> from warpweave.parallel.schedule import gpipe
        >>> timeline = simulate(gpipe(4, 8), {"F": 1, "B": 2}, comm=0.1)
        >>> round(timeline.bubble, 3)
        0.286
    """
    rank_of = placement(lists)
    price = cost if callable(cost) else _price(cost)
    overlapped = None if callable(cost) else cost.get(OVERLAP)
    rows: list[list[Cell]] = [[] for _ in lists]
    happened = dict.fromkeys(before, 0.0)
    held = [[*_begun(actions, before), *actions] if before else actions for actions in lists]
    tied = len(tied_stages(rank_of)) == 2
    met: float | None = None
    for rank, index, events in in_order(lists, before):
        if index < len(rows[rank]):  # the second action of a cell
            continue
        row, action = rows[rank], lists[rank][index]
        start = row[-1].end if row else 0
        for event in events:
            there = happened[event] + (comm if rank_of[event.stage] != rank else 0)
            start = there if there > start else start
        if action.op == TIE and tied:  # `order` puts the two TIEs that meet next to each other
            if met is None:
                peer = rows[rank_of[len(rank_of) - 1 - action.stage]]
                met = start = max(start, peer[-1].end if peer else 0) + comm
            else:
                start, met = met, None
        unit = cell_at(lists[rank], index) if action.joined else (action,)
        prices = [price(a) for a in unit]
        if action.joined and overlapped is not None:  # each gets its share of the cell's time
            prices = [overlapped * part / sum(prices) for part in prices]
        for a, length in zip(unit, prices):
            row.append(Cell(a, start, start + length))
            start += length
        for a in unit:
            for event in gives(a):
                happened[event] = start
    return Timeline(
        cells=tuple(map(tuple, rows)),
        activations=tuple(map(_peak_activations, held)),
        versions=tuple(map(_peak_versions, held)),
    )


def _begun(actions: list[Action], before: Collection[Action]) -> Iterator[Action]:
    """A rank's forwards that happened before, and whose backwards are in its list."""
    for a in actions:
        if a.op in (B, I) and Action(F, a.stage, a.mb) in before:
            yield a._replace(op=F)


def _price(cost: Mapping[str, float]) -> Callable[[Action], float]:
    table = {B: cost.get(I, 0) + cost.get(W, 0)} | dict(cost)
    return lambda action: table.get(action.op, 0)


def _peak_activations(actions: list[Action]) -> float:
    stages = len({a.stage for a in actions})
    return max(0, *held_activations(actions)) / stages if stages else 0.0


def _peak_versions(actions: list[Action]) -> int:
    """The peak number of versions of one stage's weights: newest, held by a graph, or still to be
    read."""
    if not any(a.ver for a in actions):
        return 1 if actions else 0
    peak = 0
    for stage in {a.stage for a in actions}:
        own = [a for a in actions if a.stage == stage]
        born = {a.ver: index for index, a in enumerate(own) if a.op == UPDATE}
        newest, last, held = min(born, default=1) - 1, {}, {}  # last: version -> its last index
        for index, a in enumerate(own):
            if a.op == UPDATE:
                last[newest], newest = max(last.get(newest, 0), index - 1), a.ver
            if a.op in (F, B, I):
                last[a.ver] = index
            if a.op == F:
                held[a.mb] = a.ver
            if a.op in (B, I):
                del held[a.mb]
        last |= dict.fromkeys([newest, *held.values()], len(own) - 1)
        changes = [0] * (len(own) + 1)
        for version, index in last.items():
            changes[born.get(version, 0)] += 1
            changes[index + 1] -= 1
        peak = max(peak, *accumulate(changes))
    return peak
