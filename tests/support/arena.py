"""An arena: the folder, the layout, and the jobs of one test of faults."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fault_acts import Fault, planted_at
from jobs import Ended, TrainingJob

SUPPORT = Path(__file__).parent
LAYOUTS = {
    "tp2": "--tp 2",
    "tp2 pp2": "--tp 2 --pp 2 --microbatches 2",
    "tp2 dp2, ZeRO 3": "--tp 2 --dp 2 --zero 3",
    "cp2 dp2": "--cp 2 --dp 2",
    "pp2, interleaved": "--pp 2 --layers 4 --microbatches 2 --schedule interleaved --chunks 2",
    "pp2, PipeDream": "--pp 2 --microbatches 2 --schedule pipedream --clip 0 --no-tied",
    "dp3, elastic": "--dp 3 --zero 0 --elastic 1",
    "1 server, 1 worker": "--server 1 --dp 1",
}
TWO, *GRID, ELASTIC, SERVED = LAYOUTS
FOUR = GRID[:3]
STEPS = 8
AT = 4  # the step of the fault
_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*)")


def named(end: Ended) -> set[int]:
    """Return the ranks that warpweave's lines on stderr name."""
    found = (ranks for line in end.said for ranks in _RANKS.findall(line))
    return {int(rank) for ranks in found for rank in ranks.split(", ")}


def on(*layouts: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test of faults on these layouts; pytest runs the first one unless all are requested."""
    return pytest.mark.layouts(*layouts)


@dataclass
class Arena:
    """Start jobs on one layout, and note what happened.

    Attributes:
        folder: an empty folder, which is removed afterwards.
        layout: a key of `LAYOUTS`.
        references: a folder of undisturbed runs by layout, shared between tests and processes.
        note: called with a sentence about what happened.
        timeout: seconds that a message between ranks may take.
    """

    folder: Path
    layout: str
    references: Path
    note: Callable[[str], None]
    timeout: float = 20.0
    _jobs: list[TrainingJob] = field(default_factory=list)

    def start(
        self, *options: str, fault: Fault | None = None, torchrun: int = 0, max_restarts: int = 0,
        steps: int = STEPS,
    ) -> TrainingJob:  # fmt: skip
        """Start a job on the layout that saves each step, with a fault in one of its ranks.

        If `torchrun` is not 0, torchrun starts that many ranks and restarts them.
        """
        words = (*LAYOUTS[self.layout].split(), "--steps", str(steps), "--eval-every", "0")
        words += ("--save-every", "1", "--keep", "99", "--timeout", str(self.timeout), *options)
        program = ("-m", "warpweave", "train") if fault is None else ("-m", "faulty", fault.text)
        again = ("--max-restarts", str(max_restarts))
        if torchrun:
            ranks = ("-m", "torch.distributed.run", "--nproc-per-node", str(torchrun))
            return self._job(words, (sys.executable, *ranks, *again, *program))
        return self._job((*words, *again), (sys.executable, "-P", *program))

    def _job(self, words: tuple[str, ...] | None, command: tuple[str, ...] = ()) -> TrainingJob:
        path = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
        job = TrainingJob(self.folder, words, command=command, environment={"PYTHONPATH": path})
        self._jobs.append(job)
        return job

    def _reference(self) -> Path:
        """Return the folder of an undisturbed run on this layout, which has ended.

        The first test that needs it makes it, also for tests in other processes.
        """
        path = self.references / self.layout.replace(" ", "-")
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed, or its process dies
            if not path.exists():
                made = Arena(path.with_suffix(".part"), self.layout, self.references, self.note)
                try:
                    made.start().end(0)
                    made.folder.rename(path)
                finally:
                    made.leave()
        return path

    def saved(self) -> TrainingJob:
        """Return a copy of an undisturbed run in this test's folder."""
        shutil.copytree(self._reference(), self.folder, dirs_exist_ok=True)
        return self._job(None)

    def on_layout(self, layout: str) -> Arena:
        """Return an arena in the same folder on a different layout."""
        return Arena(self.folder, layout, self.references, self.note)

    def took(self, seconds: float, limit: float) -> str:
        """Return "1.2 s", marked as late if it is above the limit: a busy machine is no failure."""
        late = f" (late: {limit:g} s are promised)" if seconds > limit else ""
        return f"{seconds:.1f} s{late}"

    def since_fault(self, job: TrainingJob, end: Ended) -> float:
        """Return the seconds from the fault to the end of the job."""
        planted = planted_at(job.out)
        assert planted is not None, f"the fault did not happen: {end.stderr}"
        return end.seconds - planted

    def stop(self) -> None:
        """Leave no process."""
        for job in self._jobs:
            job.stop()

    def leave(self) -> None:
        """Leave no process and no file."""
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)
