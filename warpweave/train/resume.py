"""Resuming a run: check that a checkpoint fits the run, and restore its progress."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import torch.distributed as dist

from warpweave.checkpoint import CheckpointError, CheckpointReader, open_latest
from warpweave.cli.messages import say
from warpweave.data import Dataset
from warpweave.data.token_file import WHOLE
from warpweave.kernels.structure import Count, structure
from warpweave.model.config import GPTConfig
from warpweave.train.options import TrainConfig

_Float = Annotated[Any, "a float", lambda x: type(x) is float]


@dataclasses.dataclass
class Progress:
    """The progress of a run, as saved in a checkpoint's state.

    Attributes:
        tokens: positions trained on, over all ranks.
        evaluated: the last step that was followed by an evaluation, not counting the final one.
        best, best_step: the lowest validation loss of those evaluations and its step; None and 0
            before the first.
        since: evaluations since then.
    """

    tokens: Count = 0
    evaluated: Count = 0
    best: _Float | None = None
    best_step: Count = 0
    since: Count = 0

    def see(self, step: int, val_loss: float) -> bool:
        """Record the evaluation after `step`. Return True if its loss is the lowest so far."""
        self.evaluated = step
        if self.best is not None and val_loss >= self.best:
            self.since += 1
            return False
        self.best, self.best_step, self.since = val_loss, step, 0
        return True

    def stops_early(self, patience: int) -> bool:
        """True after `patience` evaluations without a lower loss; never if 0."""
        return 0 < patience <= self.since

    def why(self, step: int, steps: int) -> str:
        """A phrase that says why a run of `steps` steps is over at `step`."""
        if step >= steps:
            return f"has completed all {steps} steps"
        count = f"{self.since} evaluation{'s' * (self.since != 1)}"
        return (
            f"stopped early at step {step}, after {count} without a validation loss below "
            f"{self.best:.4f} (step {self.best_step})"
        )

    def lowest(self, step: int, val_loss: float | None) -> dict[str, Any]:
        """The lowest validation loss and its step, including the loss after the last `step`."""
        found = [(self.best, self.best_step), (val_loss, step)]
        known = [(loss, at) for loss, at in found if loss is not None]
        loss, at = min(known, default=(None, None))
        return {"lowest_val_loss": loss if loss is None else round(loss, 4), "lowest_step": at}


def saved_line(step: int) -> str:
    """The line that an interrupted run prints after saving `step`."""
    return f"saved step {step}; continue with --resume"


class _Data(TypedDict):
    name: str
    fingerprint: str
    sequences_per_step: Count
    tokenizer: NotRequired[str | None]
    validation: NotRequired[str | None]


class _Optimizer(TypedDict, total=False):
    count: _Float
    loss_scale: _Float
    good_steps: _Float


class _State(TypedDict):
    """The state of a run; older versions did not write all of it."""

    seed: Count
    settings: dict
    data: _Data
    optimizer: _Optimizer
    step: NotRequired[Count]
    optimizers: NotRequired[list[_Optimizer]]
    progress: NotRequired[Progress]
    outer: NotRequired[dict | None]
    asynchronous: NotRequired[dict | None]
    server: NotRequired[dict]
    layout: NotRequired[dict]


def open_run(
    folder: Path, config: GPTConfig, group: dist.ProcessGroup | None, resume: bool | str = True
) -> CheckpointReader | None:
    """Open the newest good checkpoint in `folder`; rank 0 reports those it skipped.

    Returns None on every rank if `resume` is False, or if it is "auto" and there is no checkpoint.
    Raises `CheckpointError` if there is none, its model differs from `config`, or the trainer did
    not write it.
    """
    if not resume:
        return None
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        reader = open_latest(folder, group=group)
    for warning in passed_over:  # on rank 0
        say(str(warning.message))
    if reader is None:
        if resume == "auto":
            return None
        raise CheckpointError(f"nothing to resume from: no checkpoint in {folder}")
    fields = dataclasses.fields(config)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    reader.require_config(dataclasses.asdict(config), defaults)
    try:
        state = structure(_State, reader.state, "state")
        structure(dict[str, Count | None], reader.mesh, "mesh")
    except ValueError as error:
        raise CheckpointError(f"{reader.path} was not written by the trainer: {error}") from None
    if state.get("step", reader.step) != reader.step:
        raise CheckpointError(
            f"{reader.path} is the checkpoint of step {reader.step}, but contains the state of "
            f"step {state['step']}"
        )
    return reader


def state_of(
    config: TrainConfig, data: Dataset, progress: Progress, *, step: int, sequences_per_step: int,
    validation: Dataset | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The state of a run after `step` as JSON, for `open_run` and `check_run`.

    `validation` is the validation data of a run that evaluates during training."""
    names = {"name": data.name, "fingerprint": data.fingerprint, "tokenizer": data.tokenizer_name}
    held_out = None if validation is None else validation.fingerprint
    return {
        "step": step,
        "seed": config.seed,
        "data": names | {"sequences_per_step": sequences_per_step, "validation": held_out},
        "progress": dataclasses.asdict(progress),
        "outer": _outer_settings(config),
        "asynchronous": _asynchronous_schedule(config),
        "settings": config.settings,
        "layout": _layout_options(config),
    }


def _layout_options(config: TrainConfig) -> dict[str, Any]:
    """Options of the layout and of evaluations, as JSON; a resumed run may change them."""
    names = ("batch", "impl", "eval_every", "eval_batches", "early_stop")
    return dataclasses.asdict(config.plan) | {name: getattr(config, name) for name in names}


def _outer_settings(config: TrainConfig) -> dict[str, Any] | None:
    """The outer replicas and their rule as JSON; a resumed run must have the same ones."""
    rule = config.outer_rule
    return None if rule is None else {"replicas": config.outer} | dataclasses.asdict(rule)


def _asynchronous_schedule(config: TrainConfig) -> dict[str, Any] | None:
    """The asynchronous schedule that a checkpoint's weight versions belong to, or None."""
    plan = config.plan
    found = {"schedule": plan.schedule, "microbatches": plan.microbatches, "pp": config.pp}
    return found if plan.asynchronous else None


def check_run(reader: CheckpointReader, config: TrainConfig, data: Dataset) -> None:
    """Raise `CheckpointError` if the data, the seed, or the optimizer differ."""
    saved = reader.state["data"]
    same = saved["fingerprint"] == data.fingerprint
    if not same and not (_of_ends(saved) and saved["name"] == data.name):
        now = data.tokenizer_name
        before, now = (str(name)[:12] for name in (saved.get("tokenizer", now), now))
        tokens = f"different tokens (tokenizer was {before}, is now {now})"
        other = "different data" if before == now else tokens
        raise CheckpointError(
            f"{reader.path} was trained on {other}: {saved['name']} "
            f"({saved['fingerprint'][:12]}), but this run uses {data.name} "
            f"({data.fingerprint[:12]})"
        )
    outer = _outer_settings(config)
    if (before := reader.state.get("outer")) != outer:
        none = "no outer optimizer"
        had, has = (f"the outer settings {x}" if x else none for x in (before, outer))
        raise CheckpointError(f"{reader.path} was trained with {had}, but this run has {has}")
    held, wanted = reader.state.get("asynchronous"), _asynchronous_schedule(config)
    if held not in (None, wanted):
        raise CheckpointError(
            f"{reader.path} was saved with the asynchronous schedule {held} and holds the "
            f"schedule's weight versions, but this run uses {wanted or config.plan.schedule}; "
            "resume with the saved schedule, or start a new run with --init-from"
        )
    if (before := reader.state["seed"]) != config.seed:
        raise CheckpointError(
            f"{reader.path} was trained with seed {before}, but this run has seed {config.seed}; "
            f"pass --seed {before}"
        )
    if (before := reader.state["settings"].get("optimizer", "adamw")) != config.optimizer:
        raise CheckpointError(
            f"{reader.path} was trained with optimizer {before}, whose state does not fit "
            f"optimizer {config.optimizer}"
        )


def _of_ends(saved: dict[str, Any]) -> bool:
    """True if an older version saved a token file's fingerprint, which covered only its ends."""
    return saved.get("tokenizer", "") is None and not saved["fingerprint"].startswith(WHOLE)


def differences(
    reader: CheckpointReader, config: TrainConfig, sequences_per_step: int,
    validation: Dataset | None = None, *, layout: bool = True,
) -> str:  # fmt: skip
    """Differences from the checkpoint that are allowed, as text; "" if there are none.

    Compares settings, validation data, and (with `layout`) the mesh, plan, and evaluations."""
    now: dict[str, Any] = config.settings | {"sequences_per_step": sequences_per_step}
    # A setting that did not exist yet has its current default.
    before = TrainConfig().settings | reader.state["settings"]
    before["sequences_per_step"] = reader.state["data"]["sequences_per_step"]
    if layout:  # older versions saved only the mesh and the ZeRO stage
        held: dict[str, Any] = reader.mesh | reader.state.get("layout", {})
        current = dataclasses.asdict(config.mesh) | _layout_options(config)
        before |= held
        now |= {name: value for name, value in current.items() if name in held}
    if validation is not None and (other := reader.state["data"].get("validation")) is not None:
        prints = validation.fingerprint, other  # they may start with the same word
        now["validation data"], before["validation data"] = (p[-12:] for p in prints)
    now["fingerprint"] = "whole file"
    before["fingerprint"] = "ends of the file" if _of_ends(reader.state["data"]) else "whole file"
    differ = {name: value for name, value in now.items() if before.get(name) != value}
    return "; ".join(f"{k}: saved {before.get(k)}, now {v}" for k, v in differ.items())


def progress_of(reader: CheckpointReader, seq_len: int) -> Progress:
    """The progress of the run; fields that older versions did not save are derived."""
    step, sequences = reader.step, reader.state["data"]["sequences_per_step"]
    old = {"tokens": step * sequences * seq_len, "evaluated": step}
    return Progress(**old | reader.state.get("progress", {}))
