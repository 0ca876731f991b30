"""The checkpoint of a run that ``warpweave sample`` and ``warpweave export`` use.

It is the newest one in the run's folder or, with ``--best``, the one with the lowest validation
loss. The losses come from the run's metrics and from the progress in the newest checkpoint.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from warpweave.checkpoint.manifest import STEP, read_manifest
from warpweave.checkpoint.steps import newest_first
from warpweave.convert.source import find_step
from warpweave.train.metrics import read_rows
from warpweave.train.options import CHECKPOINTS, METRICS


@dataclass(frozen=True)
class ChosenCheckpoint:
    """A checkpoint of a run, its step, and the validation loss at that step; None if the run was
    not evaluated there.

    If it is the newest and the loss was lower at another step, `hint` names that step in words.
    """

    path: Path
    step: int
    val_loss: float | None
    hint: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The checkpoint's fields in a command's result."""
        loss = None if self.val_loss is None else round(self.val_loss, 4)
        return {"checkpoint": str(self.path), "step": self.step, "val_loss": loss}

    def describe(self) -> str:
        """A one-line description of the checkpoint, with the hint."""
        known = self.val_loss is not None
        loss = f"validation loss {self.val_loss:.4f}" if known else "not evaluated"
        return f"using step {self.step} ({loss}), {self.path}{self.hint}"


def choose_checkpoint(folder: Path, *, best: bool) -> ChosenCheckpoint | None:
    """The newest or the `best` checkpoint of a run's folder, or the checkpoint `folder` itself;
    None for any other folder.

    Raises ValueError if `best` is set and the folder is not a run's, the run was not evaluated, or
    its best checkpoint was not kept, and `CheckpointError` if the newest checkpoint is damaged.
    """
    step = find_step(folder)
    if best and step in (None, folder):
        what = "a single checkpoint" if step else "not a run of warpweave train"
        raise ValueError(f"--best requires a run's folder, but {folder} is {what}")
    if step is None:
        return None
    manifest = read_manifest(step)
    losses, number = _validation_losses(step, manifest.state), manifest.step
    chosen = ChosenCheckpoint(step, number, losses.get(number))
    if step == folder or (not best and not losses):
        return chosen
    if not losses:
        raise ValueError(f"{folder} has no validation loss; leave out --best")
    loss, at = min((loss, at) for at, loss in losses.items())
    steps = newest_first(folder / CHECKPOINTS)
    kept = {int(m[1]): path for path in steps if (m := STEP.match(path.name))}
    if best and at not in kept:
        raise ValueError(
            f"{folder} kept the checkpoints of steps {sorted(kept)}, but not the one of step {at}, "
            f"which has the lowest validation loss, {loss:.4f}; train with --early-stop to keep it"
        )
    if best:
        return ChosenCheckpoint(kept[at], at, loss)
    hint = f"; it is the newest, but step {at} has the lowest validation loss, {loss:.4f} "
    hint += "(pass --best to use it)" if at in kept else "(not kept)"
    return chosen if at == number else replace(chosen, hint=hint)


def _validation_losses(step: Path, state: dict[str, Any]) -> dict[int, float]:
    """Validation losses by step, of the run that a checkpoint with this state belongs to."""
    progress = state.get("progress") or {}
    found = {progress.get("best_step"): progress.get("best")}
    checkpoints = step.absolute().parent
    metrics = checkpoints.parent / METRICS
    if checkpoints.name == CHECKPOINTS and os.path.lexists(metrics):
        rows, _ = read_rows(metrics)
        found |= {row["step"]: row["val_loss"] for row in rows if "val_loss" in row}
    return {at: v for at, v in found.items() if type(v) in (int, float) and math.isfinite(v)}
