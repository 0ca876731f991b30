"""Schedules as text, in the form that torch's pipelining runtime reads and writes."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from warpweave.parallel.schedule.actions import (
    COMPUTE,
    RECEIVES,
    REDUCE,
    RESHARD,
    SENDS,
    TIE,
    UNSHARD,
    UPDATE,
    WHOLE,
    Action,
    Schedule,
)

_TORCH_NAME = {REDUCE: "REDUCE_GRAD"}
_OUR_NAME = {theirs: ours for ours, theirs in _TORCH_NAME.items()}
_PATTERN = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)(?:@(-?\d+))?")


def to_csv(lists: Schedule) -> str:
    """One row per rank, one cell per action, in the form that torch's pipelining runtime reads.

    ``"2F0"`` is stage, op, micro-batch. torch does not know TIE, UPDATE and the suffix
    ``@version``: exchange lists with it before the passes that add them.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in lists:
        writer.writerow([str(a._replace(op=_TORCH_NAME.get(a.op, a.op))) for a in actions])
    return text.getvalue()


def from_csv(text: str) -> Schedule:
    """The inverse of `to_csv`; empty cells (torch's idle slots) are skipped."""
    return [list(_parse_row(row)) for row in csv.reader(io.StringIO(text))]


def _parse_row(row: list[str]) -> Iterator[Action]:
    for cell in (cell.strip() for cell in row):
        if not cell:
            continue
        found = _PATTERN.fullmatch(cell)
        op = _OUR_NAME.get(found[2], found[2]) if found else ""
        if found is None or op not in (
            *COMPUTE, *SENDS, *RECEIVES, UNSHARD, RESHARD, REDUCE, TIE, UPDATE,
        ):  # fmt: skip
            raise ValueError(f"cell {cell!r} is not [stage][op][micro-batch][@version], as in 2F0")
        yield Action(op, int(found[1]), int(found[3] or WHOLE), int(found[4] or 0))
