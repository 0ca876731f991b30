"""Comparisons between the ranks of a run, so that they cannot diverge silently.

    when                                      compared
    the first two steps, the first            every collective, before it is issued
    evaluation; always, if `check_collectives` (`parallel.checked`)
    every `check_every` steps                 also the replicas' state (`replicas`) and each rank's
                                              compute time

A rank's own time is the step's time without waits for other ranks: at collectives, where all ranks
meet before they issue one, and for a pipeline's messages. On a GPU the host waits for its stream at
each collective of such a step, and messages are timed by events.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from statistics import median
from typing import Any

from warpweave.launch.session import Session
from warpweave.model.engine import Engine
from warpweave.parallel.checked import CheckedCollectives
from warpweave.parallel.schedule.actions import RECEIVES, TIE
from warpweave.train.options import TrainConfig
from warpweave.train.replicas import ReplicaCheck
from warpweave.train.timeline import Marks

_FIRST = 2  # a process compares the collectives of its first steps


class TrainingStopped(RuntimeError):
    """Training cannot continue; raised on every rank."""


class Agreement:
    """The comparisons of one rank's run, as often as `config` says. A single rank, whose session
    has no store, compares nothing."""

    def __init__(self, config: TrainConfig, session: Session, engine: Engine) -> None:
        self._always, self._every = config.check_collectives, config.check_every
        self._engine, self._replicas = engine, ReplicaCheck(engine)
        self._checked: CheckedCollectives | None = None
        self._steps, self._evaluations = _FIRST, 1  # still to be compared
        self._data: Mapping[str, Any] = {}
        self._own = 0.0  # own seconds of the last compared step
        if (store := session.store) is not None:
            # A wait would block the connection for its other users.
            store = store.clone()  # type: ignore[attr-defined]
            self._checked = CheckedCollectives(
                store, session.mesh, session.rank, session.timeout, session.device
            )

    def due(self, step: int) -> bool:
        """True if ranks are compared after `step` steps."""
        return self._checked is not None and self._every > 0 and step % self._every == 0

    def of_step(
        self, step: int, began: float, data: Mapping[str, Any], marks: Marks | None
    ) -> AbstractContextManager[object]:
        """A context for a step on `data` (see `ReplicaCheck.compare`).

        The step starts at time `began`; afterwards its number is `step`. If ranks are compared
        after it, `marks` are those of its actions."""
        self._steps -= 1
        if self.due(step):
            self._data = data
            assert marks is not None
            return self._timed(began, marks)
        return self._comparing(self._steps >= 0)

    def of_evaluation(self) -> AbstractContextManager[object]:
        """A context for an evaluation."""
        self._evaluations -= 1
        return self._comparing(self._evaluations >= 0)

    def _comparing(self, due: bool) -> AbstractContextManager[object]:
        return self._checked if self._checked and (due or self._always) else nullcontext()

    @contextmanager
    def _timed(self, began: float, marks: Marks) -> Iterator[None]:
        assert self._checked is not None
        before = self._checked.waited
        with self._comparing(True):
            yield
        waited = self._checked.waited - before
        actions = self._engine.passes.lists[self._engine.mesh.index("pp")]
        times = marks.seconds()
        for action, start, end in zip(actions, times, times[1:]):
            if action.op in (*RECEIVES, TIE):
                waited += end - start
        self._own = time.perf_counter() - began - waited

    def after_step(self, step: int) -> dict[str, Any]:
        """Compare the ranks if due. Collective. Raises `TrainingStopped` if replicas differ.

        Returns the metrics of a compared step: its slowest rank, that rank's own seconds, and the
        median over all ranks.
        """
        if not self.due(step):
            return {}
        words, seconds = self._replicas.compare(self._data, self._own)
        if words is not None:
            raise TrainingStopped(
                f"{words} after step {step}: replicas must be bitwise identical; training stops"
            )
        slowest = max(seconds)
        return {"slowest_rank": seconds.index(slowest), "slowest_seconds": round(slowest, 4),
                "median_seconds": round(median(seconds), 4)}  # fmt: skip
