"""Execution of an engine's schedule: complete steps, or passes of an asynchronous schedule.

A synchronous schedule runs the same lists in every step. An asynchronous schedule is one long run,
and a step is a pass over a part of it.

    1F1B, two micro-batches; a step is a pass from beginning to end (UPDATE as U)
    rank 0    0F0 0F1 0B0 0B1 0U1          |  0F0 0F1 0B0 0B1 0U1          |
    rank 1    1F0 1B0 1F1 1B1 1U1          |  1F0 1B0 1F1 1B1 1U1          |

    PipeDream; a step ends the backwards of its micro-batches, and begins a forward of the next step
    rank 0    0F0  |  0F1 0B0 0U1 0F2@1 0B1 0U2  |  0F3@2 0B2@1 0U3 0F4@3 0B3@2 0U4  |
    rank 1         |  1F0 1B0 1U1 1F1@1 1B1@1 1U2  |  1F2@2 1B2@2 1U3 1F3@3 1B3@3 1U4  |
             fill    step 0                          step 1

Between two steps of an asynchronous schedule, all stages have made the same number of updates, so
evaluation and checkpoints see one version of the model. The data of a step is needed `ahead` steps
earlier, because its first forwards begin there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from warpweave.model.config import GPTConfig, ParallelPlan
from warpweave.model.engine_update import EngineStage
from warpweave.parallel import schedule as schedules
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.parallel.pipeline import Distributed, InFlight, OnAction, execute


def make_lists(
    config: GPTConfig, plan: ParallelPlan, mesh: ConnectedMesh
) -> schedules.Schedule | schedules.OpenRun:
    """Build the plan's schedule with reductions, tie, updates and all messages.

    Returns the lists of a step, or an asynchronous run.
    """
    lists = plan.make_schedule(mesh.size("pp"))
    freed = plan.reduce == "ordered" or (plan.zero >= 2 and mesh.size("shard") > 1)
    if plan.early_gradients and not freed:
        lists = schedules.send_first(lists)
    if plan.asynchronous:
        return schedules.leave_open(schedules.with_reduce(lists), plan.microbatches)
    lists = schedules.with_reduce(schedules.with_comm(lists))
    if config.tied:
        lists = schedules.with_tie(lists)
    lists = schedules.with_update(lists)
    schedules.validate(lists, microbatches=plan.microbatches)
    return lists


class StepPasses:
    """A synchronous schedule: every step runs the same lists from beginning to end.

    Args:
        lists: the schedule of a step.
        stages: the stages of this rank.
        group: the pipeline group.
        device, timeout: as for the engine.
    """

    asynchronous, ahead, updates = False, 0, 1

    def __init__(
        self,
        lists: schedules.Schedule,
        stages: Mapping[int, EngineStage],
        group: ProcessGroup | None,
        *,
        device: torch.device,
        timeout: float,
    ) -> None:
        self.lists, self.stages = lists, stages
        self.transport = Distributed(lists, group, device=device, timeout=timeout)

    def restart(self) -> None:
        """Do nothing: a step leaves no work unfinished."""

    def feed(self, batches: Sequence[Any], scale: Tensor | None) -> None:
        """Give the stages the micro-batches of the step, and the loss scale."""
        for stage in self.stages.values():
            stage.begin(batches, scale)

    def run(self, on_action: OnAction | None = None) -> None:
        """Run the step; `on_action` as for `execute`."""
        execute(self.lists, self.stages, self.transport, on_action=on_action)


class OpenPasses:
    """An asynchronous schedule: every step is a pass of one long run.

    Weights before the first update are those of version 0, or those in a checkpoint.

    Args:
        run: the passes of the run.
        stages, group, device, timeout: as for `StepPasses`.

    Attributes:
        ahead: number of steps by which data is needed before its losses.
        updates: number of updates in a step.
    """

    asynchronous = True

    def __init__(
        self,
        run: schedules.OpenRun,
        stages: Mapping[int, EngineStage],
        group: ProcessGroup | None,
        *,
        device: torch.device,
        timeout: float,
    ) -> None:
        self.lists, self.stages, self._run = run.steady, stages, run
        self.ahead, self.updates = run.ahead, run.updates
        how: dict[str, Any] = {"device": device, "timeout": timeout, "open_pass": True}
        self.transport = Distributed(run.steady, group, **how)
        if self.ahead:
            self._filling = Distributed(run.fill, group, beside=self.transport, **how)
        for stage in stages.values():
            for unit in stage.units:
                unit.parameters.fill_versions()
        self.restart()

    def restart(self) -> None:
        """Discard the work in flight; the next pass begins with the current weight versions."""
        self._in_flight, self._fed = InFlight(), 0
        each = self._run.microbatches // self.updates
        for stage in self.stages.values():
            stage.begin([], each=each)

    def feed(self, batches: Sequence[Any], scale: Tensor | None) -> None:
        """Give the stages the next micro-batches; there is no loss scale."""
        self._fed += len(batches)
        for stage in self.stages.values():
            stage.feed(batches)

    def run(self, on_action: OnAction | None = None) -> None:
        """Run a step; `on_action` as for `execute`. ValueError unless its data and that of `ahead`
        more steps was fed."""
        wanted = (self.ahead + 1) * self._run.microbatches
        if self._fed != wanted:
            more = f"{self.ahead} step{'s' * (self.ahead != 1)}"
            raise ValueError(
                f"each step of this schedule needs {wanted} queued micro-batches, got {self._fed}; "
                f"call Engine.feed with the data of {more} before the first step and after a load"
            )
        if not self._in_flight.ranks and self.ahead:
            execute(self._run.fill, self.stages, self._filling, self._in_flight)
        execute(self.lists, self.stages, self.transport, self._in_flight, on_action)
        self._in_flight.advance(self._run.microbatches, self.updates)
        self._fed -= self._run.microbatches


def warm_up(stages: Mapping[int, EngineStage], batch: Any, scale: Tensor | None) -> None:
    """Launch the kernels of each stage once, on zeros, before the first message between stages.

    The first launch of a kernel compiles and loads it. That takes seconds and may wait for the
    device, on which a message may be waiting for a peer. The gradients are discarded.
    """
    for number, stage in stages.items():
        shape, dtype, device = stage.message
        stage.begin([batch], scale)
        y = stage.forward(0, torch.zeros(shape, dtype=dtype, device=device) if number else None)
        stage.backward(0, None if y is None else torch.zeros_like(y))
        stage.reduce()
        for unit in stage.units:
            unit.gradients.clear()
