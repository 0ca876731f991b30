"""Metrics of a run: JSON lines, its options, a plot of the loss, and `boards`.

Metrics of a step are the fields of the row in `Metrics.trained`; those of an evaluation are in
`Metrics.evaluated`. `trainer` chooses what the progress bar shows. One job at a time writes into a
folder (`locked`). No error here stops a running job: a file that cannot be written is reported
once, with its path, and retried with the next row.
"""

from __future__ import annotations

import errno
import io
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from warpweave.checkpoint.files import CheckpointError, open_regular, reason
from warpweave.cli.messages import say
from warpweave.cli.toml import options_of, write_options
from warpweave.convert.beside import ORIGIN
from warpweave.data.files import replace
from warpweave.kernels.devices import find_device
from warpweave.launch.session import Session
from warpweave.model.config import GPTConfig
from warpweave.parallel.collectives import gather
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.train.boards import EVENTS, WANDB, Board, open_boards
from warpweave.train.options import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PLOT,
    STALENESS,
    UNWRITTEN,
    UPDATES,
    TrainConfig,
)

_DAMAGED = f"{METRICS}.damaged"  # damaged lines of metrics; -1, -2, ... is appended
_MODE = 0o666  # colleagues of the user can read the files if the umask allows it
_HEADING = (
    "# The options of this run. To repeat the run, pass this file to `warpweave train --config`.\n"
)


def utilisation(
    tokens_per_second: float, model: GPTConfig, dtype: str, session: Session
) -> dict[str, float]:
    """{"mfu": model FLOP/s utilization by ``GPTConfig.step_flops``} on GPUs of known peak; {}
    elsewhere."""
    if session.device.type != "cuda":
        return {}
    device = find_device(torch.cuda.get_device_name())
    if device is None or not device.half or dtype not in ("bf16", "fp16"):
        return {}
    flops = model.step_flops(1)
    return {"mfu": round(tokens_per_second * flops / (device.half * session.world), 4)}


def peak_memory(device: torch.device, mesh: ConnectedMesh) -> list[float]:
    """Peak memory of every rank in MiB: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        unit = 2**20 if sys.platform == "darwin" else 2**10
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return gather(torch.tensor([peak], device=device), mesh.group("world")).tolist()


class Metrics:
    """Rank 0's metrics as JSON lines, on the requested boards, and as a plot.

    A run that resumes from `step` removes the rows after it, which it will write again, and with
    `evaluates` also the evaluation at `step`. A new run moves the files of an earlier one into a
    subfolder ``earlier-N``. The run's options are written to ``config.toml``.
    """

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        model: GPTConfig,
        step: int,
        *,
        tokens_per_step: int,
        evaluates: bool = False,
    ) -> None:
        self.session, self.model, self.dtype = session, model, config.dtype
        self.tokens_per_step = tokens_per_step
        self.folder = config.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / METRICS
        self._shown = -1  # step of an evaluation that is repeated, but already on the boards
        self._said: set[str] = set()
        self._owed, self._anew = bytearray(), False  # rows to write; True if they replace the file
        if config.resume:
            self._rewind(step, evaluates=evaluates)
        else:
            set_aside(self.folder)
        text = (_HEADING + write_options(config, UNWRITTEN)).encode()
        with self._tried(self.folder / CONFIG):
            replace(self.folder / CONFIG, lambda file: file.write(text), _MODE)
        self.boards = open_boards(self.folder, step, options_of(config))

    def trained(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Write the row of a step that took `seconds`, with its throughput. Return the row."""
        rate = self.tokens_per_step / seconds
        row |= {"tokens_per_second": round(rate, 1)}
        row |= utilisation(rate, self.model, self.dtype, self.session)
        self.write(row)
        return row

    def evaluated(self, step: int, val_loss: float, peak: list[float]) -> None:
        """Print the loss after `step` and write its row; `peak` is every rank's memory in MiB."""
        say(f"step {step}: validation loss {val_loss:.4f}")
        peak_mib = [round(m) for m in peak]
        self.write({"step": step, "val_loss": val_loss, "peak_memory_mib": peak_mib})

    def write(self, row: dict[str, Any]) -> None:
        """Append one row, so that the file is always complete up to here. Rows that cannot be
        written stay in memory until a later write succeeds."""
        self._owed += json.dumps(row).encode() + b"\n"
        self._write_owed()
        if "val_loss" not in row or row["step"] != self._shown:
            self._on_boards(lambda board: board.row(row))

    def flush(self) -> None:
        """Flush, so that no row is lost if this process is killed."""
        self._on_boards(lambda board: board.flush())

    def _write_owed(self) -> None:
        with self._tried(self.path):
            if self._anew:
                replace(self.path, lambda file: file.write(self._owed), _MODE)
            else:
                _append(self.path, self._owed)
            self._owed, self._anew = bytearray(), False

    def _on_boards(self, do: Callable[[Board], None]) -> None:
        for board in self.boards:
            with self._tried(self.folder, f" by {type(board).__name__}"):
                do(board)

    @contextmanager
    def _tried(self, path: Path, by: str = "") -> Iterator[None]:
        """Report any error in the block, once for each `path`, and continue."""
        try:
            yield
        except Exception as error:
            if (what := f"{path} cannot be written{by}") not in self._said:
                self._said.add(what)
                why = reason(error, path).removeprefix("cannot write ").removeprefix(f"{path}: ")
                say(f"{what}: {why}; the run continues and will try again")

    def _rewind(self, step: int, *, evaluates: bool) -> None:
        """Keep the rows up to `step`, without its evaluation if the run `evaluates` there again."""
        rows = self._whole_rows()
        again = [row for row in rows if row["step"] == step and "val_loss" in row and evaluates]
        kept = [row for row in rows if row["step"] <= step and row not in again]
        self._shown = step if again else -1
        self._owed += "".join(json.dumps(row) + "\n" for row in kept).encode()
        self._anew = True
        self._write_owed()

    def _whole_rows(self) -> list[dict[str, Any]]:
        """The rows of an interrupted run. Anything else is set aside, such as half a row after a
        crash, or a link or folder in place of the file."""
        rows: list[dict[str, Any]] = []
        aside = _unused(self.folder, _DAMAGED)
        with self._tried(aside):
            try:
                rows, damaged = read_rows(self.path)
            except (CheckpointError, OSError) as error:
                if os.path.lexists(self.path):
                    os.rename(self.path, aside)
                    why = reason(error, self.path)
                    say(f"{why}; moved {self.path} to {aside} and will write a new file")
                return []
            if damaged:
                replace(aside, lambda file: file.write(b"\n".join(damaged) + b"\n"), _MODE)
                say(f"{self.path}: moved damaged rows ({len(damaged)}) to {aside}")
        return rows

    def plot(self) -> Path | None:
        """Plot training and validation loss over steps as PNG. Return its path, or None if it
        could not be written."""
        path = self.folder / PLOT
        with self._tried(path):
            self._plot(path)
            return path
        return None

    def _plot(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows, _ = read_rows(self.path)
        figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
        for name, style in (("loss", {"lw": 0.8}), ("val_loss", {"lw": 1.5, "marker": "o"})):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                label = "training" if name == "loss" else "validation"
                axes.plot(*zip(*points), label=label, **style)
        stale = [(row["step"], row["staleness"]) for row in rows if "staleness" in row]
        if stale:  # from the stages of an asynchronous schedule
            other = axes.twinx()
            other.plot([step for step, _ in stale], [ages for _, ages in stale], ":", lw=0.8)
            other.set_ylabel("staleness of each stage (updates)")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        image = io.BytesIO()
        figure.savefig(image)
        plt.close(figure)
        replace(path, lambda file: file.write(image.getbuffer()), _MODE)

    def close(self) -> None:
        """Close the boards."""
        self._on_boards(lambda board: board.close())


def read_rows(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The rows of a metrics file, and its lines that are not rows. Raises `CheckpointError` or
    OSError if it is not a regular file, or cannot be read."""
    rows, damaged = [], []
    with os.fdopen(open_regular(path), "rb") as file:
        lines = file.read().split(b"\n")
    for line in filter(None, lines):
        try:
            row = json.loads(line.decode())
        except (ValueError, RecursionError):
            row = None
        whole = isinstance(row, dict) and type(row.get("step")) is int
        (rows if whole else damaged).append(row if whole else line)
    return rows, damaged


def _append(path: Path, data: bytes | bytearray) -> None:
    """Append all of `data` to a file, or nothing; never follow a link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.open(path, flags, _MODE)
    try:
        size = os.fstat(file).st_size
        try:
            if os.write(file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def _unused(folder: Path, name: str) -> Path:
    """The first of `folder`/`name`-1, -2, ... that does not exist."""
    paths = (folder / f"{name}-{number}" for number in itertools.count(1))
    return next(path for path in paths if not os.path.lexists(path))


def set_aside(folder: Path) -> None:
    """Move the files of an earlier run in `folder` into a subfolder."""
    ours = (METRICS, PLOT, CHECKPOINTS, EVENTS, WANDB, CONFIG, UPDATES, STALENESS)
    names = [name for name in ours if os.path.lexists(folder / name)]
    if not names:
        return
    aside = _unused(folder, "earlier")
    aside.mkdir()
    for name in (*names, ORIGIN, *(path.name for path in folder.glob(f"{_DAMAGED}-*"))):
        if os.path.lexists(folder / name):
            (folder / name).rename(aside / name)
    hint = " (--resume would have continued it)" if CHECKPOINTS in names else ""
    say(f"moved the files of an earlier run in {folder} to {aside}{hint}")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder so that no second job can write into it; the lock ends with the process."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.fdopen(os.open(folder / "lock", flags, _MODE))
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be written to: {error.strerror}") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another job is writing to {folder}; pass a different --out"
            ) from None
        except OSError:
            pass  # the file system has no locks
        yield
