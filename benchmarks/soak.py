"""A long run on four ranks: memory, descriptors, threads and shared memory over 3,000 steps.

The run saves every 50 steps, and evaluates and compares its replicas every 100. Anything that it
keeps opening, starting or holding would show. `/proc` is read for each rank twice a second (Linux).
The bounds are for how much more the last thousand steps need than the second thousand. In the first
thousand the heap grows to its size, by some 0.5 %.

    python benchmarks/soak.py               # 3,000 steps on two layouts: minutes on 2 cores
    python benchmarks/soak.py --quick       # 60 steps
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness import header, parser, results_folder, write_report

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from arena import LAYOUTS
from jobs import TrainingJob

CLAIM = "Memory, descriptors, threads and shared memory of four ranks over 3,000 steps."
SOAKED = ("tp2 pp2", "tp2 dp2, ZeRO 3")
# Limits on the median of the last third of a run above that of the second third, on any rank.
BOUNDS = {"resident KiB": 1024, "descriptors": 0, "threads": 0, "shared KiB": 64}


def looked_at(pid: int) -> dict[str, int]:
    """Return the figures of `BOUNDS` for one process; OSError if it has ended."""
    at = Path(f"/proc/{pid}")
    lines = (line.split() for line in (at / "status").read_text().splitlines())
    status = {fields[0]: fields[1] for fields in lines if len(fields) > 1}
    return {
        "resident KiB": int(status["RssAnon:"]),
        "descriptors": len(os.listdir(at / "fd")),
        "threads": int(status["Threads:"]),
        "shared KiB": int(status["RssShmem:"]),
    }


def soaked(layout: str, steps: int) -> dict[str, Any]:
    """Run a layout; for each figure, return the medians by thirds for the rank that grew most."""
    seen: list[tuple[int, int, dict[str, int]]] = []  # step, rank, figures
    with tempfile.TemporaryDirectory() as folder:
        every = ("--save-every", "50", "--keep", "2", "--eval-every", "100", "--check-every", "100")
        job = TrainingJob(
            Path(folder), (*LAYOUTS[layout].split(), "--steps", str(steps), *every),
            command=(sys.executable, "-P", "-m", "warpweave", "train"), seconds=1800.0,
        )  # fmt: skip
        try:
            while job.process.poll() is None:
                with suppress(OSError):
                    at = job.steps()
                    seen += [(at, rank, looked_at(pid)) for rank, pid in enumerate(job.ranks())]
                time.sleep(0.5)
            job.end(0)
        finally:
            job.stop()
    row: dict[str, Any] = {"name": layout, "steps": steps}
    for what in BOUNDS:
        thirds = []
        for rank in range(4):
            own = [(3 * at / steps, w[what]) for at, r, w in seen if r == rank]
            of = [[v for at, v in own if k < at <= k + 1] for k in range(3)]
            thirds.append([int(statistics.median(values)) for values in of])
        row[what] = max(thirds, key=lambda t: t[2] - t[1])
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; raise AssertionError for a figure that is not flat."""
    options = parser(CLAIM).parse_args(argv)
    steps = 60 if options.quick else 3000
    head = header(bounds=BOUNDS)
    rows = [soaked(layout, steps) for layout in SOAKED]
    print(CLAIM)
    print(f"{'layout':20}" + "".join(f"{what + ', by thirds':>32}" for what in BOUNDS))
    for row in rows:
        shown = (", ".join(f"{v:,}" for v in row[what]) for what in BOUNDS)
        print(f"{row['name']:20}" + "".join(f"{text:>32}" for text in shown))
    report = {"script": "soak", "claim": CLAIM, "header": head, "rows": rows}
    write_report(report, results_folder(options))
    for row in rows if not options.quick else ():
        for what, bound in BOUNDS.items():
            _, second, last = row[what]
            grown = f"{row['name']}: {what} grew from {second} to {last}"
            assert last <= second + bound, grown


if __name__ == "__main__":
    main()
