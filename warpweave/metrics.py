"""The metrics of a run: JSON lines, its options, a plot of the loss, and `boards`.

A metric of a step is a field of the row of `Metrics.trained`, one of an evaluation of that of
`Metrics.evaluated`. What the progress bar shows of them is in `train`. One job at a time writes
into a folder (`locked`).
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from warpweave.boards import EVENTS, WANDB, open_boards
from warpweave.config import GPTConfig
from warpweave.config_file import options_of, write_options
from warpweave.convert.beside import ORIGIN
from warpweave.kernels.devices import find_device
from warpweave.launch import Session
from warpweave.messages import say
from warpweave.parallel.collectives import gather
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.train_config import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PLOT,
    STALENESS,
    UNWRITTEN,
    UPDATES,
    TrainConfig,
)

_HEADING = "# The options of a run, which `warpweave train --config` with this file is again.\n"


def utilisation(
    tokens_per_second: float, model: GPTConfig, dtype: str, session: Session
) -> dict[str, float]:
    """{"mfu"}, model FLOP/s utilisation by ``GPTConfig.step_flops``, on GPUs of known peak."""
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
    """Metrics as JSON lines, on the requested boards, and as a plot; on rank 0.

    A run that resumes from step `step` removes the rows after it, which it will write again, and
    with `evaluates` the evaluation at it; a new run moves the contents of its folder into a
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
        self._shown = -1  # step of an evaluation that is made again, which boards have already
        if config.resume:
            self._rewind(step, evaluates=evaluates)
        else:
            set_aside(self.folder)
        text = write_options(config, UNWRITTEN)
        (self.folder / CONFIG).write_text(_HEADING + text)
        self.boards = open_boards(self.folder, step, options_of(config))

    def trained(self, row: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Write the row of a step that took `seconds`, with what follows from them; the row."""
        rate = self.tokens_per_step / seconds
        row |= {"tokens_per_second": round(rate, 1)}
        row |= utilisation(rate, self.model, self.dtype, self.session)
        self.write(row)
        return row

    def evaluated(self, step: int, val_loss: float, peak: list[float]) -> None:
        """Write the row of an evaluation after `step`; `peak` is every rank's memory in MiB."""
        peak_mib = [round(m) for m in peak]
        self.write({"step": step, "val_loss": val_loss, "peak_memory_mib": peak_mib})

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; the file is complete up to here at any time."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if "val_loss" not in row or row["step"] != self._shown:
            for board in self.boards:
                board.row(row)

    def flush(self) -> None:
        """Flush, so that no row is lost if this process is killed."""
        for board in self.boards:
            board.flush()

    def _rewind(self, step: int, *, evaluates: bool) -> None:
        """Keep the rows up to `step`, without the evaluation at it if the run `evaluates` there."""
        rows = self._rows() if self.path.exists() else []
        again = [row for row in rows if row["step"] == step and "val_loss" in row and evaluates]
        kept = [row for row in rows if row["step"] <= step and row not in again]
        self._shown = step if again else -1
        new = self.path.with_suffix(".tmp")
        new.write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(new, self.path)

    def _rows(self) -> list[dict[str, Any]]:
        """All rows; after a crash the last one may be incomplete and is skipped."""
        lines = self.path.read_text().split("\n")
        return [json.loads(line) for line in lines[:-1]]

    def plot(self) -> Path:
        """Training and validation loss over steps, as PNG."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        rows = self._rows()
        figure, axes = plt.subplots(figsize=(7, 4), dpi=120)
        for name, style in (("loss", {"lw": 0.8}), ("val_loss", {"lw": 1.5, "marker": "o"})):
            points = [(row["step"], row[name]) for row in rows if name in row]
            if points:
                label = "training" if name == "loss" else "validation"
                axes.plot(*zip(*points), label=label, **style)
        stale = [(row["step"], row["staleness"]) for row in rows if "staleness" in row]
        if stale:  # of an asynchronous schedule's stages
            other = axes.twinx()
            other.plot([step for step, _ in stale], [ages for _, ages in stale], ":", lw=0.8)
            other.set_ylabel("staleness of each stage (updates)")
        axes.set_xlabel("step")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.tight_layout()
        path = self.folder / PLOT
        figure.savefig(path)
        plt.close(figure)
        return path

    def close(self) -> None:
        """Close the boards."""
        for board in self.boards:
            board.close()


def set_aside(folder: Path) -> None:
    """Move an earlier run's files in `folder` out of the way of a new one."""
    ours = (METRICS, PLOT, CHECKPOINTS, EVENTS, WANDB, CONFIG, UPDATES, STALENESS)
    names = [name for name in ours if (folder / name).exists()]
    if not names:
        return
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for name in (*names, ORIGIN):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    say(f"the earlier run in {folder} was moved to {aside} (--resume would have continued it)")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder, so that two jobs cannot write into it; the lock ends with the process."""
    import fcntl

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("a")
    except OSError as error:
        raise ValueError(f"--out {folder} cannot be written: {error.strerror}") from None
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another job is training into {folder}; give this one another --out"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield
