"""What a run leaves to look at: metrics as JSONL, TensorBoard events, a plot of the loss."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from warpweave.messages import say
from warpweave.train_config import BOARD, CHECKPOINTS, METRICS, PLOT, TrainConfig


class Metrics:
    """Metrics as JSONL, optionally TensorBoard, and a plot; on rank 0.

    A run that goes on from step `step` forgets the rows after it, which it will write again; a new
    run moves what is in its folder into a folder ``earlier-N`` beside it.
    """

    def __init__(self, config: TrainConfig, step: int) -> None:
        self.folder = config.out
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path = self.folder / METRICS
        if config.resume:
            self._rewind(step, final=step >= config.steps)
        else:
            set_aside(self.folder)
        self.board = None
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(self.folder / BOARD), purge_step=step + 1)

    def write(self, row: dict[str, Any]) -> None:
        """Append one row; the file is complete up to here at any time."""
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if self.board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, float):
                    self.board.add_scalar(name, value, int(row["step"]))

    def _rewind(self, step: int, *, final: bool) -> None:
        """Keep the rows up to `step`, without its evaluation if that is the `final` one."""
        kept = [
            json.dumps(row) + "\n"
            for row in (self._rows() if self.path.exists() else [])
            if row["step"] < step or (row["step"] == step and not (final and "val_loss" in row))
        ]
        new = self.path.with_suffix(".tmp")
        new.write_text("".join(kept))
        os.replace(new, self.path)

    def _rows(self) -> list[dict[str, Any]]:
        """All rows; a crash may have left half of the last one."""
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
        """Close the TensorBoard events."""
        if self.board is not None:
            self.board.close()


def set_aside(folder: Path) -> None:
    """Move an earlier run's files in `folder` out of the way of a new one."""
    names = [n for n in (METRICS, PLOT, CHECKPOINTS, BOARD) if (folder / n).exists()]
    if not names:
        return
    number = 1
    while (folder / f"earlier-{number}").exists():
        number += 1
    aside = folder / f"earlier-{number}"
    aside.mkdir()
    for name in names:
        (folder / name).rename(aside / name)
    say(f"the earlier run in {folder} was moved to {aside} (--resume would have gone on with it)")
