"""Metrics on TensorBoard and Weights & Biases.

A board gets a run's folder, the step from which it resumes, and then every row of `metrics.Metrics`
as it is written. Neither library is needed unless its board is requested, and `check_boards` names
a missing one before any rank is started.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from warpweave.cli.messages import one_line

EVENTS, WANDB = "tensorboard", "wandb"  # folders of a run, in its own


class Board(Protocol):
    """What `metrics.Metrics` needs of a board."""

    def row(self, row: dict[str, Any]) -> None:
        """Show a row; its ``step`` never decreases, and rows of one step are consecutive."""

    def flush(self) -> None:
        """Flush, so that no row is lost if this process is killed."""

    def close(self) -> None:
        """Close the board after the last row."""


class TensorBoard:
    """Events in ``tensorboard/``; those after `step`, of a run that died later, are purged."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / EVENTS), purge_step=step + 1)

    def row(self, row: dict[str, Any]) -> None:
        """A scalar for every float of the row."""
        for name, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(name, value, int(row["step"]))

    def flush(self) -> None:
        """Write pending events, which may otherwise wait for two minutes."""
        self._writer.flush()

    def close(self) -> None:
        """Close the events' file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of `project` in W&B, with every option as its config.

    A resumed run continues the W&B run whose id is in ``wandb/run-id``. Rows cannot be removed from
    W&B: steps that it already has, from a run that died after its last checkpoint, are not sent
    again, and an evaluation missing at the last step of an interrupted run is sent with the next
    one. With ``WANDB_MODE=offline``, ``wandb sync --append`` joins the parts.

    Raises:
        ValueError: W&B refuses, such as without a key (``wandb login``); one line.
    """

    def __init__(self, folder: Path, step: int, project: str, options: dict[str, Any]) -> None:
        import wandb

        mark = folder / WANDB / "run-id"
        known = mark.read_text().strip() if mark.exists() else None
        try:
            self._run = wandb.init(
                project=project,
                dir=str(folder),
                id=known,
                resume="allow" if known else None,
                config={k: _json_value(v) for k, v in options.items()},
                allow_val_change=True,
            )
        except wandb.Error as error:
            raise ValueError(f"--wandb {project}: {one_line(error)}") from None
        mark.parent.mkdir(exist_ok=True)
        mark.write_text(f"{self._run.id}\n")
        self._first, self._owed = self._run.starting_step if known else 0, step

    def row(self, row: dict[str, Any]) -> None:
        """Every number of the row, at its step."""
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, (int, float))}
        if row["step"] >= self._first or row["step"] == self._owed:
            self._run.log(numbers, step=max(row["step"], self._first))

    def flush(self) -> None:
        """Nothing to do: W&B's own process already has the rows."""

    def close(self) -> None:
        """Wait until W&B has all of it."""
        self._run.finish()


def _json_value(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def check_boards(tensorboard: bool, wandb: str | None) -> None:
    """Raise a one-line ``ImportError`` for a board that is asked for and not installed."""
    try:
        if tensorboard:
            import torch.utils.tensorboard  # noqa: F401
        if wandb is not None:
            from wandb import init  # noqa: F401  (a folder of that name can be imported, too)
    except ImportError as error:
        name = "wandb" if "wandb" in str(error) else "tensorboard"
        raise ImportError(
            f"--{name} needs {name}, which is not installed: pip install 'warpweave[{name}]'"
        ) from None


def open_boards(folder: Path, step: int, options: dict[str, Any]) -> list[Board]:
    """The boards that a run's `options` ask for; the run goes on from `step`."""
    boards: list[Board] = []
    if options["tensorboard"]:
        boards.append(TensorBoard(folder, step))
    if (project := options["wandb"]) is not None:
        boards.append(WeightsAndBiases(folder, step, project, options))
    return boards
