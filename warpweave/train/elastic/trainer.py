"""A rank's training in one generation, and the state it carries into the next.

    a step      gradients, their norm, and the loss  as in `Trainer`, without the update
                vote                                 `Member.vote`, once they are on the host
                update                               by every rank of the generation, or by none
    a change    close connections, keep the state    master weights, moments, counters, progress
                connect, build the engine            `Trainer`, on the mesh of the new replicas
                recover                              from the lowest replica that is complete

Replica k always trains on the same samples, whatever the others do. The samples of an absent
replica are left out of the step, as if their labels were ignored, and the loss is the mean over the
tokens of all other replicas.
"""

from __future__ import annotations

import dataclasses
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from warpweave.checkpoint import CheckpointError
from warpweave.launch.interrupt import Interrupt
from warpweave.launch.session import Session
from warpweave.parallel.data.recovery import State, held_state, recover
from warpweave.parallel.exchange import exchange
from warpweave.parallel.mesh import Mesh
from warpweave.train.elastic.membership import Member, Regroup
from warpweave.train.metrics import Metrics
from warpweave.train.options import TrainConfig
from warpweave.train.resume import Progress
from warpweave.train.trainer import Begun, Trainer


class StateLostError(RuntimeError):
    """No replica holds the whole state anymore."""


@dataclass(frozen=True)
class Carried:
    """The state of a rank between two generations.

    `step` is the number of updates made, None for a new rank, which holds no state. `about` has
    counters, progress, and the last row of metrics, as JSON. `state` is the input of `recover`.
    """

    step: int | None = None
    about: Any = None
    state: State | None = None


def source_of(steps: list[int | None], mesh: Mesh, width: int) -> int:
    """The lowest replica whose ranks all hold the newest step; `StateLostError` if none does."""
    newest = max((step for step in steps if step is not None), default=None)
    behind = {mesh.index("dp", r) // width for r, step in enumerate(steps) if step != newest}
    for replica in range(mesh.dp // width):
        if newest is not None and replica not in behind:
            return replica
    raise StateLostError("no remaining replica holds the whole state; resume from a checkpoint")


class ElasticTrainer(Trainer):
    """A `Trainer` over the replicas of one generation; collective over them.

    `config` has the mesh of all replicas, `session` connects those of the generation, and `carried`
    is this rank's state from the previous one.
    """

    updates = False

    def __init__(
        self,
        config: TrainConfig,
        session: Session,
        interrupt: Interrupt,
        member: Member,
        carried: Carried,
    ) -> None:
        self.member, self._carried, self._leaves = member, carried, False
        self._row: Any = None  # the last step's row of metrics, and its seconds
        self._written = -1  # the step of the last checkpoint
        group = dist.group.WORLD if session.world > 1 else None
        told = exchange([carried.step, carried.about], group)
        self._held = [step for step, _ in told]
        width = member.seat.width
        self._source: int | None = None
        if member.current.begun or None not in self._held:
            self._source = source_of(self._held, session.mesh, width)
            self._about = told[session.mesh.rank_at(dp=self._source * width)][1]
        super().__init__(config, session, interrupt)
        self._carried = Carried()  # the engine has it now
        self.ahead, self.batches.replica = False, member.seat.dp
        self.stopped = member.current.stop
        if self.metrics is not None and self._row is not None:
            self._write_lost_row(self.metrics)

    def _resume(self) -> bool:
        """Restore the state from a replica, or in the first generation from a checkpoint."""
        if self._source is None:
            return super()._resume()
        optimizer, newest = self.engine.optimizer, max(s for s in self._held if s is not None)
        mine = self._carried.state if self._carried.step == newest else None
        group = self.mesh.group("replica" if self.config.plan.zero else "dp")
        alike = all(step == newest for step in self._held)
        recover(optimizer, mine, group, self._source, alike=alike)
        optimizer.load_state(self._about["optimizer"])
        self.step, self.progress = newest, Progress(**self._about["progress"])
        self._row, self._written = self._about["row"], self._about["saved"]
        return True

    def _write_lost_row(self, metrics: Metrics) -> None:
        """Write the last step's row if the rank that died had not written it."""
        with suppress(OSError, ValueError):
            rows = [json.loads(line) for line in metrics.path.read_text().splitlines()]
            if not any(row["step"] == self.step and "loss" in row for row in rows):
                metrics.trained(*self._row)

    def carry(self) -> Carried:
        """The state that this rank carries into the next generation; connections are closed."""
        with suppress(CheckpointError, RuntimeError):  # a save in flight may have been cut off
            self.saver.wait()
        if self.metrics is not None:
            self.metrics.close()
        optimizer, path = self.engine.optimizer, self.saver.path
        about = {
            "optimizer": optimizer.state(),
            "progress": dataclasses.asdict(self.progress),
            "row": self._row,
            "saved": self._written if path is None else int(path.name.removeprefix("step_")),
        }
        return Carried(self.step, about, held_state(optimizer))

    # ------------------------------------------------------------------ the loop

    def _steps(self) -> list[float]:
        """As in `Trainer`, but first write a checkpoint that the previous generation did not reach,
        or whose write a death interrupted."""
        c = self.config
        timely = c.save_every and self.step % c.save_every == 0
        due = self.stopped or self.over or timely
        if self._source is not None and due and 0 < self.step != self._written:
            self.save()
        return super()._steps()

    def _begin(self, step: int, before: Begun | None = None) -> Begun:
        if self._leaves:
            raise Regroup
        return super()._begin(step, before)

    def _commit(self, begun: Begun) -> None:
        """Vote, and update if the step counts; otherwise raise `Regroup`."""
        decision = self.member.vote(str(self.step), self.session.world)
        if decision == "abort":
            raise Regroup
        with self.member.updating:
            self.engine.optimizer.step(begun.lr, norm=begun.result.wait().norm)
        self._leaves = decision == "regroup"

    def _made(self, row: dict[str, Any], began: float) -> None:
        """Keep the row with the weights, so that the next generation writes it if a death keeps
        this rank from doing so."""
        row["replicas"] = self.member.current.replicas
        self._row = row, time.perf_counter() - began
