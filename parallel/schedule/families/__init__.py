"""The schedules that ``--schedule`` knows: each file of this folder has some, in `SCHEDULES`.

A schedule is added by a file alone. It holds pure functions (p, m) -> lists beside their drawings,
and a tuple ``SCHEDULES`` of `ScheduleFamily` records.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from warpweave.parallel.schedule.actions import COMPUTE, RECEIVES, SENDS, Schedule, placement
from warpweave.parallel.schedule.family import ScheduleFamily
from warpweave.parallel.schedule.passes import with_comm
from warpweave.parallel.schedule.text import from_csv
from warpweave.parallel.schedule.validation import validate
from warpweave.parallel.words import did_you_mean

FAMILIES: dict[str, ScheduleFamily] = {
    family.name: family
    for module in sorted(info.name for info in iter_modules(__path__))
    for family in import_module(f"{__name__}.{module}").SCHEDULES
}


def find_family(name: str) -> ScheduleFamily:
    """The schedule of a name, or of a file in torch's notation whose path ends in .csv.

    Raises:
        ValueError: in one line, for another word, or a file that cannot be read or is no schedule.
    """
    if name.endswith(".csv"):
        return _in_file(Path(name))
    if name not in FAMILIES:
        raise ValueError(
            f"schedule must be one of {', '.join(FAMILIES)} or a path ending in .csv, got {name!r}"
            f"{did_you_mean(name, FAMILIES)}"
        )
    return FAMILIES[name]


def _in_file(path: Path) -> ScheduleFamily:
    """The schedule in a file, with or without its messages, which are seen to be right and then
    left out: whoever runs it adds them itself; those must be right, too. Sums, ties, ZeRO's gathers
    and updates, which follow from other options, are refused, and ranks that do nothing."""
    try:
        lists = from_csv(path.read_text().rstrip())  # no blank lines at the end
        for rank, actions in enumerate(lists):
            others = [a for a in actions if a.op not in COMPUTE + SENDS + RECEIVES]
            if others or not actions:
                what = f"{others[0]} is added by whoever runs it" if others else "has no action"
                raise ValueError(f"rank {rank}: {what}")
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
                f"schedule {path} is of {ranks} ranks and {count} micro-batches, got {p} and {m}"
            )
        return compute

    return ScheduleFamily(str(path), generate, chunks, lambda p: count)
