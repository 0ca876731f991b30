"""Print a schedule as CSV, in the notation of torch's pipelining runtime.

    python -P -m warpweave.parallel.schedule zb-v --ranks 4 --microbatches 8 --chunks 2 > mine.csv

You can edit the file and pass it to ``warpweave train --schedule mine.csv`` or ``warpweave prove
--schedule mine.csv``, which report any errors in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from warpweave.parallel.schedule.families import FAMILIES, find_family
from warpweave.parallel.schedule.passes import with_comm
from warpweave.parallel.schedule.text import to_csv


def main(argv: Sequence[str] | None = None) -> None:
    """Print the schedule that the options select."""
    options = argparse.ArgumentParser(prog="python -P -m warpweave.parallel.schedule")
    options.add_argument("schedule", help=f"{', '.join(FAMILIES)} or a path ending in .csv")
    options.add_argument("--ranks", type=int, default=2)
    options.add_argument("--microbatches", type=int, default=4)
    options.add_argument("--chunks", type=int, default=1, help="stages per rank")
    options.add_argument("--comm", action="store_true", help="include sends and receives")
    given = options.parse_args(argv)
    try:
        lists = find_family(given.schedule).make(given.ranks, given.microbatches, given.chunks)
    except ValueError as error:
        options.error(str(error))
    print(to_csv(with_comm(lists) if given.comm else lists), end="")


if __name__ == "__main__":
    main()
