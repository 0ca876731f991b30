"""Training jobs, started as a shell starts them and watched through ``/proc`` (Linux)."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from warpweave.checkpoint import CheckpointReader, open_latest
from warpweave.train.options import CHECKPOINTS

_C = ctypes.CDLL(None)  # loaded before a fork
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")  # the second where there is IPv6
_LOOPBACK = {"0100007F", "0" * 24 + "01000000"}  # as in /proc/net, of IPv4 and IPv6
TINY = "--model toy --layers 2 --width 16 --heads 2 --seq-len 16 --batch 2 --sample 0 --warmup 1"


class Ended(NamedTuple):
    """The end of a job.

    Attributes:
        code: the exit status, negative for a signal.
        result: the JSON object in the last line, or None.
        stdout: the lines of stdout.
        stderr: the text of stderr.
        seconds: the time of the end, seconds since 1970.
    """

    code: int
    result: dict[str, Any] | None
    stdout: list[str]
    stderr: str
    seconds: float

    @property
    def said(self) -> list[str]:
        """The lines of stderr that warpweave printed."""
        return [line for line in self.stderr.splitlines() if line.startswith("warpweave: ")]

    @property
    def last(self) -> str:
        """The last of these lines, without "warpweave: "."""
        return self.said[-1].removeprefix("warpweave: ")


def _as_in_a_terminal() -> None:
    """Accept SIGHUP in a new process, even under nohup, and end with the process that started it.

    `processes.end_with_parent` would not do: multiprocessing knows the starter's own parent."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    _C.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def marked(mark: str) -> list[int]:
    """Return the living processes that were started with `mark` in their environment, sorted."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's, or gone; a zombie's environment is empty
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
    return sorted(found)


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


class TrainingJob:
    """``warpweave train`` on a tiny model in a session of its own, with output in ``folder/run``.

    Every process of the job has the job's temporary folder in its environment. The job may leave
    no file there and may listen on loopback only. (torchrun does leave a folder, and listens on
    every interface.) A broken expectation is an AssertionError.

    Args:
        folder: the folder for text, output, stdout, and stderr; created if it is missing.
        options: options after those of the model, or None for a job that ran there before.
        command: ``python -m warpweave train``, or a command that runs it.
        environment: variables to add to those of this process.
        cwd: the working folder; None for that of this process.
        seconds: the longest time to wait for anything.
    """

    def __init__(
        self, folder: Path, options: Sequence[str] | None, *, command: Sequence[str],
        environment: Mapping[str, str] | None = None, cwd: Path | None = None,
        seconds: float = 600.0,
    ) -> None:  # fmt: skip
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
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self._temporary), **(environment or {})}
        how = {"start_new_session": True, "preexec_fn": _as_in_a_terminal, "env": os.environ | own}
        with self._stdout.open("w") as out, self._stderr.open("w") as err:
            self.process = subprocess.Popen(line, cwd=cwd, stdout=out, stderr=err, **how)

    def members(self) -> list[int]:
        """Return every living process of the job, in any session."""
        return marked(f"TMPDIR={self._temporary}\0")

    def ranks(self) -> list[int]:
        """Return the ranks' processes in the order of their start: children of the launcher's fork
        server, or of the launcher itself on GPUs."""
        mark, started = b"spawn_main" if self.ours else b"warpweave.train", {}
        for pid in self.members():
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes() and pid != self.process.pid:
                    started[pid] = _parent_of(pid)
        forked = [pid for pid, parent in started.items() if parent in started]
        return forked or [*started]

    def listening(self) -> set[str]:
        """Return the addresses (hexadecimal) on which any process of the job listens."""
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
        """Wait until `what` is true; fail if the job ends before."""
        deadline, began = time.monotonic() + self.seconds, time.thread_time()
        while not what():
            assert self.process.poll() is None, self._stderr.read_text()
            assert time.monotonic() < deadline, self._stderr.read_text()
            looked = time.thread_time() - began
            time.sleep(max(0.02, 4 * looked))  # the job needs the processor more
            began = time.thread_time()
        beyond = self.listening() - _LOOPBACK if self.ours else set()
        assert not beyond, f"it listens beyond loopback: {beyond}"

    def steps(self) -> int:
        """Return the number of steps done so far."""
        path = self.out / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def end(self, code: int | None = None) -> Ended:
        """Wait for the end; fail if the exit status is not `code`, or if any process or temporary
        file of the job is left five seconds later."""
        try:
            found = self.process.wait(self.seconds)
        except subprocess.TimeoutExpired:
            self.stop()
            raise AssertionError(f"the job did not end in {self.seconds:.0f} s") from None
        ended, deadline = time.time(), time.monotonic() + 5.0
        while (left := self.members()) and time.monotonic() < deadline:
            time.sleep(0.02)
        files = [path.name for path in self._temporary.iterdir()] if self.ours else []
        assert (left, files) == ([], []), "left behind"
        lines = self._stdout.read_text().splitlines()
        result = json.loads(lines[-1]) if lines and lines[-1].startswith("{") else None
        end = Ended(found, result, lines, self._stderr.read_text(), ended)
        assert code in (None, found), f"exit status {found}, expected {code}: {end.stderr}"
        return end

    def newest(self) -> CheckpointReader:
        """Return the newest good checkpoint."""
        kept = open_latest(self.out / CHECKPOINTS)
        assert kept is not None, "there is no checkpoint"
        return kept

    def rows(self) -> list[dict[str, Any]]:
        """Return the complete rows of the metrics."""
        whole = (self.out / "metrics.jsonl").read_text().rpartition("\n")[0]
        return [json.loads(row) for row in whole.splitlines()]

    def losses(self) -> dict[int, float]:
        """Return the loss of each step in the metrics."""
        return {row["step"]: row["loss"] for row in self.rows() if "loss" in row}

    def stop(self) -> None:
        """Leave nothing running."""
        if hasattr(self, "process"):
            for pid in self.members():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
