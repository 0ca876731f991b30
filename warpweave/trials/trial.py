"""A trial: what is promised, and a run in which it is tried."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from warpweave.trials.faults import Fault, planted_at
from warpweave.trials.job import BrokenPromiseError, Ended, TrainingJob

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


@dataclass
class Arena:
    """What a trial is given: a folder and a layout.

    Attributes:
        folder: empty, removed afterwards.
        layout: of `LAYOUTS`.
        references: a folder of undisturbed runs by layout, shared among trials.
        timeout: seconds that a message may take in the jobs.
        late: what took longer than promised, in words; on a busy machine that breaks no promise.
    """

    folder: Path
    layout: str
    references: Path
    timeout: float = 20.0
    late: str = ""
    _jobs: list[TrainingJob] = field(default_factory=list)

    def start(
        self,
        *options: str,
        fault: Fault | None = None,
        torchrun: int = 0,
        max_restarts: int = 0,
        steps: int = STEPS,
    ) -> TrainingJob:
        """A job on the layout, saving each step, with a fault in one of its ranks; `torchrun` is
        the number of its ranks where that starts them, and starts them again."""
        words = (*LAYOUTS[self.layout].split(), "--steps", str(steps), "--eval-every", "0")
        words += ("--save-every", "1", "--keep", "99", "--timeout", str(self.timeout), *options)
        program = ("-m", "warpweave", "train")
        if fault is not None:
            program = ("-m", "warpweave.trials.faulty", fault.text)
        again = ("--max-restarts", str(max_restarts))
        if torchrun:
            ranks = ("-m", "torch.distributed.run", "--nproc-per-node", str(torchrun))
            return self._job(words, (sys.executable, *ranks, *again, *program))
        return self._job((*words, *again), (sys.executable, "-P", *program))

    def _job(self, words: tuple[str, ...] | None, command: tuple[str, ...] = ()) -> TrainingJob:
        self._jobs.append(TrainingJob(self.folder, words, command=command))
        return self._jobs[-1]

    def reference(self) -> TrainingJob:
        """An undisturbed run on this layout, which has ended."""
        apart = Arena(self.references / self.layout.replace(" ", "-"), self.layout, self.references)
        if apart.folder.exists():
            return apart._job(None)
        job = apart.start()
        try:
            job.end(0)
        except BrokenPromiseError:
            apart.leave()
            raise
        return job

    def saved(self) -> TrainingJob:
        """A copy of it in this trial's folder."""
        shutil.copytree(self.reference().out.parent, self.folder, dirs_exist_ok=True)
        return self._job(None)

    def took(self, seconds: float, within: float) -> str:
        """ "1.2 s"; more than `within` seconds are noted as late."""
        if seconds > within:
            self.late = f"late: {within:g} s are promised"
        return f"{seconds:.1f} s"

    def since(self, job: TrainingJob, end: Ended) -> float:
        """Seconds from the fault to the end of the job."""
        planted = planted_at(job.out)
        if planted is None:
            raise BrokenPromiseError(f"the fault did not happen: {end.stderr}")
        return end.seconds - planted

    def leave(self) -> None:
        """Leave no process and no file."""
        for job in self._jobs:
            job.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class Trial:
    """A promise and how it is tried.

    Attributes:
        name: in a few words.
        promise: what must happen.
        run: tries it, returns what happened in words; `BrokenPromiseError` if it is something else.
        layouts: on which it is tried.
    """

    name: str
    promise: str
    run: Callable[[Arena], str]
    layouts: tuple[str, ...]


def trial(promise: str, *layouts: str) -> Callable[[Callable[[Arena], str]], Trial]:
    """Make a function a trial of its name, by default on two tensor ranks."""

    def make(run: Callable[[Arena], str]) -> Trial:
        return Trial(run.__name__.replace("_", " "), promise, run, layouts or (TWO,))

    return make
