"""Pipeline schedules as data, using only the standard library.

`actions` the actions of a schedule and their dependencies · `families` the schedules, one file per
family, each a record (`family`) · `passes` add sends, ZeRO's collectives, ties and updates ·
`ordering` the order in which lists can run, deadlocks · `validation` checks of complete lists ·
`open_passes` runs cut into passes that are left open · `text` the notation of torch's runtime.
"""

from warpweave.parallel.schedule.actions import Action, Link, Schedule, placement
from warpweave.parallel.schedule.families import FAMILIES, find_family
from warpweave.parallel.schedule.families.gpipe import gpipe
from warpweave.parallel.schedule.families.interleaved import interleaved
from warpweave.parallel.schedule.families.one_f_one_b import one_f_one_b
from warpweave.parallel.schedule.families.pipedream import pipedream, pipedream_2bw
from warpweave.parallel.schedule.family import ScheduleFamily
from warpweave.parallel.schedule.open_passes import (
    OpenRun,
    cut_into_passes,
    leave_open,
    renumbered,
    staleness,
    validate_pass,
)
from warpweave.parallel.schedule.ordering import acknowledged, order, posted_ahead, posted_at_need
from warpweave.parallel.schedule.passes import (
    send_first,
    split_backward,
    with_comm,
    with_reduce,
    with_tie,
    with_update,
)
from warpweave.parallel.schedule.text import from_csv, to_csv
from warpweave.parallel.schedule.validation import validate

__all__ = [
    "FAMILIES", "Action", "Link", "OpenRun", "Schedule", "ScheduleFamily", "acknowledged",
    "cut_into_passes", "find_family", "from_csv", "gpipe", "interleaved", "leave_open",
    "one_f_one_b", "order", "pipedream", "pipedream_2bw", "placement", "posted_ahead",
    "posted_at_need", "renumbered", "send_first", "split_backward", "staleness", "to_csv",
    "validate", "validate_pass", "with_comm", "with_reduce", "with_tie", "with_update",
]  # fmt: skip
