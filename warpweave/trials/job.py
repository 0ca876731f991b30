"""A training job as a shell would start it, watched from outside. Linux: it reads ``/proc``."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from warpweave.checkpoint import CheckpointReader, open_latest
from warpweave.train.options import CHECKPOINTS

_C = ctypes.CDLL(None)  # loaded before a fork
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # the second where there is IPv6
_LOOPBACK = {"0100007F", "0" * 24 + "01000000"}  # as in /proc/net, of IPv4 and IPv6
TINY = "--model toy --layers 2 --width 16 --heads 2 --seq-len 16 --batch 2 --sample 0 --warmup 1"


class BrokenPromiseError(Exception):
    """Something else happened than what is promised."""


def promised(held: bool, otherwise: object) -> None:
    """Raise `BrokenPromiseError`, with what was found instead, unless it held."""
    if not held:
        raise BrokenPromiseError(str(otherwise))


class Ended(NamedTuple):
    """How a job ended.

    Attributes:
        code: its exit status, negative for a signal.
        result: the JSON object of its last line; None without.
        stdout: the lines that were printed there.
        stderr: all that was printed there.
        seconds: since the epoch.
    """

    code: int
    result: dict[str, Any] | None
    stdout: list[str]
    stderr: str
    seconds: float

    @property
    def said(self) -> list[str]:
        """The lines of ours on stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("warpweave: ")]


def _as_in_a_terminal() -> None:
    """In a new process: SIGHUP is not ignored, though this one may run under nohup; and SIGKILL
    when the one that started it ends, even by SIGKILL.

    Not `processes.end_with_parent`: what multiprocessing knows of a parent is the starter's."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _C.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def marked(mark: str) -> list[int]:
    """Living processes with `mark` in the environment that they were started with, ascending."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or gone; a zombie's environment is empty
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return sorted(found)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


class TrainingJob:
    """``warpweave train`` on a tiny model, in a session of its own; in ``folder/run``.

    Whatever it starts knows it by its temporary folder, in which nothing may be left; it listens on
    loopback only. (torchrun leaves a folder there, and listens everywhere.)

    Args:
        folder: for its text, its output and what it prints; made if it is missing.
        options: of the command, after those of the model; None for a job that ran there before.
        command: ``python -m warpweave train``, or what runs it.
        cwd: where it runs; None for this process's.
        seconds: that anything waited for may take.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] | None,
        *,
        command: Sequence[str],
        cwd: Path | None = None,
        seconds: float = 600.0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text"
        if not text.exists():
            text.write_bytes(b" ".join(b"%d" % (i * i % 977) for i in range(1500)))
        self.out, self.seconds = folder / "run", seconds
        self.ours = "torch.distributed.run" not in command
        self._temporary = folder / "tmp"
        self._stdout, self._stderr = folder / "stdout", folder / "stderr"
        if options is None:
            return
        self._temporary.mkdir(exist_ok=True)
        line = [*command, *TINY.split(), "--data", str(text), "--out", str(self.out), *options]
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.process = subprocess.Popen(
                line,
                cwd=cwd,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=_as_in_a_terminal,
                env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary)},
            )

    def members(self) -> list[int]:
        """Every living process of the job, in whichever session."""
        return marked(f"TMPDIR={self._temporary}\0")

    def ranks(self) -> list[int]:
        """The ranks' processes, in the order in which they were started: of `launch` the children
        of its fork server, on GPUs its own."""
        mark, started = b"spawn_main" if self.ours else b"warpweave.train", {}
        for pid in self.members():
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != self.process.pid:
                    started[pid] = _parent_of(pid)
        forked = [pid for pid, parent in started.items() if parent in started]
        return forked or [*started]

    def listening(self) -> set[str]:
        """Addresses (hexadecimal) on which any process of the job listens."""
        sockets = set()
        for pid in self.members():
            with suppress(OSError):
                links = [os.readlink(p) for p in Path(f"/proc/{pid}/fd").iterdir()]
                sockets |= {name[8:-1] for name in links if name.startswith("socket:[")}
        rows = [
            line.split()
            for table in filter(os.path.exists, _TABLES)
            for line in Path(table).read_text().splitlines()[1:]
        ]
        return {row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in sockets}

    def wait_for(self, what: Callable[[], object]) -> None:
        """Wait until `what` is true; `BrokenPromiseError` if the job ends before."""
        deadline, began = time.monotonic() + self.seconds, time.thread_time()
        while not what():
            promised(self.process.poll() is None, self._stderr.read_text())
            promised(time.monotonic() < deadline, self._stderr.read_text())
            looked = time.thread_time() - began
            time.sleep(max(0.02, 4 * looked))  # the job needs the processor more
            began = time.thread_time()
        beyond = self.listening() - _LOOPBACK if self.ours else set()
        promised(not beyond, f"it listens beyond loopback: {beyond}")

    def steps(self) -> int:
        """Steps done so far."""
        path = self.out / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def end(self, code: int | None = None) -> Ended:
        """Wait for the end, with exit status `code` if one is given; `BrokenPromiseError` if it is
        another, or if any process of the job is left five seconds later, or a file."""
        try:
            found = self.process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise BrokenPromiseError(f"no end in {self.seconds:.0f} s") from None
        ended, deadline = time.time(), time.monotonic() + 5.0
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        files = [path.name for path in self._temporary.iterdir()] if self.ours else []
        promised(not left and not files, f"left behind: {left} {files}")
        lines = self._stdout.read_text().splitlines()
        result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        end = Ended(found, result, lines, self._stderr.read_text(), ended)
        promised(code in (None, found), f"exit status {found}, expected {code}: {end.stderr}")
        return end

    def newest(self) -> CheckpointReader:
        """Its newest good checkpoint."""
        kept = open_latest(self.out / CHECKPOINTS)
        if kept is None:
            raise BrokenPromiseError("there is no checkpoint")
        return kept

    def rows(self) -> list[dict[str, Any]]:
        """The metrics, as far as they are written."""
        whole = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0]
        return [json.loads(row) for row in whole.splitlines()]

    def losses(self) -> dict[int, float]:
        """The loss of each step that is in the metrics."""

        return {row["step"]: row["loss"] for row in self.rows() if "loss" in row}

    def stop(self) -> None:
        """Leave nothing running."""
        if hasattr(self, "process"):
            for pid in self.members():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
