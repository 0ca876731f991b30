"""The schedules that ``--schedule`` knows: each file of this folder has some, in `SCHEDULES`.

A schedule is added by a file alone. It holds pure functions (p, m) -> lists beside their drawings,
and a tuple ``SCHEDULES`` of `ScheduleFamily` records.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from warpweave.parallel.schedule.actions import WHOLE, Schedule
from warpweave.parallel.schedule.family import ScheduleFamily
from warpweave.parallel.schedule.text import from_csv

FAMILIES: dict[str, ScheduleFamily] = {
    family.name: family
    for module in sorted(info.name for info in iter_modules(__path__))
    for family in import_module(f"{__name__}.{module}").SCHEDULES
}


def find_family(name: str) -> ScheduleFamily:
    """The schedule of a name or of a path that ends in .csv (`from_csv`); ValueError for another
    word."""
    if name.endswith(".csv"):
        return ScheduleFamily(name, lambda p, m, c: _read_csv(Path(name), p, m, c), chunks=None)
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ValueError(f"schedule must be one of {known} or a path ending in .csv, got {name!r}")
    return FAMILIES[name]


def _read_csv(path: Path, p: int, m: int, c: int) -> Schedule:
    """The lists in a file; ValueError unless they are of p ranks and m micro-batches."""
    try:
        lists = from_csv(path.read_text())
    except OSError as error:
        raise ValueError(f"schedule {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"schedule {path}: {error}") from error
    found = len({a.mb for actions in lists for a in actions} - {WHOLE})
    if (len(lists), found) != (p, m):
        raise ValueError(
            f"schedule {path} is for {len(lists)} ranks and {found} micro-batches, "
            f"not for pp = {p} and {m}"
        )
    stages = {a.stage for actions in lists for a in actions}
    if c != 1 and len(stages) != p * c:
        raise ValueError(f"schedule {path} has {len(stages)} stages, not {p} * {c}")
    return lists
