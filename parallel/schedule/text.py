"""Schedules as text, in the notation that torch's pipelining runtime reads and writes."""

from __future__ import annotations

import csv
import io
import re

from warpweave.parallel.schedule.actions import (
    COMPUTE,
    MESSAGES,
    REDUCE,
    TIE,
    UPDATE,
    WHOLE,
    Action,
    Schedule,
    cells,
)

_OPS = (*COMPUTE, *MESSAGES, REDUCE, TIE, UPDATE)

_TORCH_NAME = {REDUCE: "REDUCE_GRAD"}
_OUR_NAME = {theirs: ours for ours, theirs in _TORCH_NAME.items()}
_PATTERN = re.compile(r"(\d+)([A-Z]+(?:_[A-Z]+)?)(\d*)(?:@(-?\d+))?")
_CELL = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")


def to_csv(lists: Schedule) -> str:
    """Return one row per rank and one field per action, as torch's pipelining runtime reads them.

    ``"2F0"`` is stage, operation and micro-batch; ``"(0F3;7B1)OVERLAP_F_B"`` is a cell. torch does
    not support TIE, UPDATE and the suffix ``@version``. To exchange lists with torch, do it before
    the passes that add them.

    Examples:
        >>> from warpweave.parallel.schedule import gpipe
        >>> to_csv(gpipe(2, 2)).splitlines()
        ['0F0,0F1,0B0,0B1', '1F0,1F1,1B0,1B1']
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in lists:
        writer.writerow(map(_field, cells(actions)))
    return text.getvalue()


def _field(unit: tuple[Action, ...]) -> str:
    names = [str(a._replace(op=_TORCH_NAME.get(a.op, a.op), joined=False)) for a in unit]
    return names[0] if len(unit) == 1 else f"({';'.join(names)})OVERLAP_F_B"


def from_csv(text: str) -> Schedule:
    """The inverse of `to_csv`; empty fields (torch's idle slots) are skipped.

    Raises:
        ValueError: a field does not have this form; the error names its row and position.

    Examples:
        >>> from warpweave.parallel.schedule import Action
        >>> from_csv("0F0,0B0") == [[Action("F", 0, 0), Action("B", 0, 0)]]
        True
    """
    rows = enumerate(csv.reader(io.StringIO(text)))
    return [[a for at, field in enumerate(row) for a in _parse(field, n, at)] for n, row in rows]


def _parse(field: str, row: int, at: int) -> list[Action]:
    """The action of a field, the two actions of a cell, or none."""
    if not field.strip():
        return []
    cell = _CELL.fullmatch(field.strip())
    found = [_PATTERN.fullmatch(name.strip()) for name in (cell.groups() if cell else (field,))]
    known = (f for f in found if f is not None)
    actions = [
        Action(_OUR_NAME.get(f[2], f[2]), int(f[1]), int(f[3] or WHOLE), int(f[4] or 0))
        for f in known
    ]
    if len(actions) < len(found) or any(a.op not in _OPS for a in actions):
        raise ValueError(
            f"row {row} field {at}: expected [stage][op][micro-batch][@version], as in 2F0, or "
            f"an overlapped pair, as in (2F0;5B1)OVERLAP_F_B, got {field!r}"
        )
    return actions if cell is None else [actions[0]._replace(joined=True), actions[1]]
