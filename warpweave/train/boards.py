"""Metrics on TensorBoard and Weights & Biases.

A board gets a run's folder, the step from which the run resumes, and then every row of
`metrics.Metrics` as it is written: the ``step`` of rows never decreases, and rows of one step are
consecutive. `flush` loses no row if the process is killed later, and `close` follows the last row.
A library is needed only if its board is requested; `check_boards` reports a missing one before any
rank is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from warpweave.cli.messages import one_line

EVENTS, WANDB = "tensorboard", "wandb"  # subfolders of a run's folder


class TensorBoard:
    """TensorBoard events in ``tensorboard/``; purges events after `step` from a run that died."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / EVENTS), purge_step=step + 1)

    def row(self, row: dict[str, Any]) -> None:
        """Add a scalar for every float in the row."""
        for name, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(name, value, int(row["step"]))

    def flush(self) -> None:
        """Write pending events, which could otherwise wait two minutes."""
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of `project` in W&B, with every option as its config.

    A resumed run continues the W&B run whose id is in ``wandb/run-id``. Rows cannot be removed from
    W&B: steps that it already has, from a run that died after its last checkpoint, are not sent
    again, and an evaluation missing at the last step of an interrupted run is sent with the next
    step. With ``WANDB_MODE=offline``, ``wandb sync --append`` joins the parts. Raises ValueError,
    one line, if W&B fails, for example without a key (``wandb login``).
    """

    def __init__(self, folder: Path, step: int, project: str, options: dict[str, Any]) -> None:
        import wandb

        mark = folder / WANDB / "run-id"
        known = mark.read_text().strip() if mark.exists() else None
        try:
            values = {k: str(v) if isinstance(v, Path) else v for k, v in options.items()}
            self._run = wandb.init(
                project=project, dir=str(folder), id=known, resume="allow" if known else None,
                config=values, allow_val_change=True,
            )  # fmt: skip
        except wandb.Error as error:
            raise ValueError(f"--wandb {project}: {one_line(error)}") from None
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(f"{self._run.id}\n")
        self._first, self._owed = self._run.starting_step if known else 0, step

    def row(self, row: dict[str, Any]) -> None:
        """Log every number in the row at its step."""
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
        if row["step"] >= self._first or row["step"] == self._owed:
            self._run.log(numbers, step=max(row["step"], self._first))

    def flush(self) -> None:
        """Do nothing: W&B's own process already has the rows."""

    def close(self) -> None:
        """Wait until W&B has all rows."""
        self._run.finish()


Board = TensorBoard | WeightsAndBiases


def check_boards(tensorboard: bool, wandb: str | None) -> None:
    """Raise a one-line ``ImportError`` for a board that is requested but not installed."""
    try:
        if tensorboard:
            import torch.utils.tensorboard  # noqa: F401
        if wandb is not None:
            from wandb import init  # noqa: F401  (`import wandb` also finds a plain folder)
    except ImportError as error:
        name = "wandb" if "wandb" in str(error) else "tensorboard"
        raise ImportError(
            f"--{name} needs {name}, which is not installed: pip install 'warpweave[{name}]'"
        ) from None


def open_boards(folder: Path, step: int, options: dict[str, Any]) -> list[Board]:
    """Open the boards that a run's `options` request; the run continues from `step`."""
    boards: list[Board] = []
    if options["tensorboard"]:
        boards.append(TensorBoard(folder, step))
    if (project := options["wandb"]) is not None:
        boards.append(WeightsAndBiases(folder, step, project, options))
    return boards
