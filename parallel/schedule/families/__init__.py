"""The schedules that ``--schedule`` accepts. Each file of this folder lists some in `SCHEDULES`.

To add a schedule, add a file: pure functions (p, m) -> lists, with drawings of them, and a tuple
``SCHEDULES`` of `ScheduleFamily` records.
"""

from __future__ import annotations

from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from warpweave.kernels.words import did_you_mean
from warpweave.parallel.schedule.actions import COMPUTE, MESSAGES, Schedule, placement
from warpweave.parallel.schedule.family import ScheduleFamily
from warpweave.parallel.schedule.passes import with_comm
from warpweave.parallel.schedule.text import from_csv
from warpweave.parallel.schedule.validation import validate

FAMILIES: dict[str, ScheduleFamily] = {
    family.name: family
    for module in sorted(info.name for info in iter_modules(__path__))
    for family in import_module(f"{__name__}.{module}").SCHEDULES
}


def find_family(name: str, known: Collection[str] = FAMILIES.keys()) -> ScheduleFamily:
    """Return the schedule of a name in `known`, or of a file in torch's notation if the path ends
    in .csv. Raise ValueError, in one line, if there is none or the file is invalid."""
    if name.endswith(".csv"):
        return _in_file(Path(name))
    if name not in known:
        raise ValueError(
            f"schedule must be one of {', '.join(known)} or a path ending in .csv, got {name!r}"
            f"{did_you_mean(name, known)}"
        )
    return FAMILIES[name]


def _in_file(path: Path) -> ScheduleFamily:
    """Return the schedule in a file, with or without messages.

    Messages in the file are validated and then removed, because the caller adds them itself. Sums,
    ties and updates are rejected because they follow from other options.
    """
    try:
        lists = from_csv(path.read_text().rstrip())  # without blank lines at the end
        for rank, actions in enumerate(lists):
            if not actions:
                raise ValueError(f"rank {rank}: has no action")
            if others := [a for a in actions if a.op not in COMPUTE + MESSAGES]:
                why = "is added automatically, depending on other options; remove it"
                raise ValueError(f"rank {rank}: {others[0]} {why}")
        validate(lists)
        compute = [[a for a in actions if a.op in COMPUTE] for actions in lists]
        validate(with_comm(compute))
    except OSError as error:
        raise ValueError(f"schedule {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"schedule {path}: {error}") from None
    count = 1 + max(a.mb for actions in compute for a in actions)
    ranks, chunks = len(compute), -(-len(placement(compute)) // len(compute))

    def generate(p: int, m: int, c: int) -> Schedule:
        if (p, m) != (ranks, count):
            raise ValueError(
                f"schedule {path} is for {ranks} ranks and {count} micro-batches, got {p} and {m}"
            )
        return compute

    return ScheduleFamily(str(path), generate, chunks, lambda p: count)
