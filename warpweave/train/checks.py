"""What a run compares between its ranks, so that they do not disagree in silence.

    when                                      what
    the first two steps, the first            every collective, before it is issued
    evaluation; each with `check_collectives` (`parallel.checked`)
    every `check_every` steps                 that, and then what replicas hold (`replicas`), and
                                              how long each rank computed

A rank's own time is that of the step without the waits for others: at collectives, where all ranks
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
from warpweave.train.timeline import Marked

_FIRST = 2  # steps of a process whose collectives are compared


class TrainingStopped(RuntimeError):
    """Training cannot go on; raised on every rank."""


class Agreement:
    """The comparisons of one rank's run.

    Args:
        config: how often.
        session: this rank's connection; a single rank, without a store, compares nothing.
        engine: what is trained.
    """

    def __init__(self, config: TrainConfig, session: Session, engine: Engine) -> None:
        self._always, self._every = config.check_collectives, config.check_every
        self._engine, self._replicas = engine, ReplicaCheck(engine)
        self._checked: CheckedCollectives | None = None
        self._steps, self._evaluations = _FIRST, 1  # to be compared still
        self._data: Mapping[str, Any] = {}
        self._own = 0.0  # seconds of the last step that was compared
        if (store := session.store) is not None:
            # A wait holds a connection, which others use.
            store = store.clone()  # type: ignore[attr-defined]
            self._checked = CheckedCollectives(
                store, session.mesh, session.rank, session.timeout, session.device
            )

    def due(self, step: int) -> bool:
        """Whether ranks are compared after `step` steps."""
        return self._checked is not None and self._every > 0 and step % self._every == 0

    def of_step(
        self, step: int, began: float, data: Mapping[str, Any]
    ) -> AbstractContextManager[object]:
        """The context of a step that `began`, whose number is `step` afterwards, on `data`
        (`ReplicaCheck.compare`)."""
        self._steps -= 1
        if self.due(step):
            self._data = data
            return self._timed(began)
        return self._comparing(self._steps >= 0)

    def of_evaluation(self) -> AbstractContextManager[object]:
        """The context of an evaluation."""
        self._evaluations -= 1
        return self._comparing(self._evaluations >= 0)

    def _comparing(self, due: bool) -> AbstractContextManager[object]:
        compares = self._checked is not None and (due or self._always)
        return self._checked if self._checked is not None and compares else nullcontext()

    @contextmanager
    def _timed(self, began: float) -> Iterator[None]:
        assert self._checked is not None
        passes, before = self._engine.passes, self._checked.waited
        marked = Marked(passes.transport, self._engine.device)
        passes.transport = marked  # type: ignore[assignment]
        try:
            with self._comparing(True):
                yield
        finally:
            passes.transport = marked.transport
        waited = self._checked.waited - before
        marks = marked.seconds()
        actions = passes.lists[self._engine.mesh.index("pp")]
        for action, start, end in zip(actions, marks, marks[1:]):
            if action.op in (*RECEIVES, TIE):
                waited += end - start
        self._own = time.perf_counter() - began - waited

    def after_step(self, step: int) -> dict[str, Any]:
        """Metrics of a step: of one after which ranks are compared its slowest rank, with its own
        seconds and the median of all ranks'. Collective.

        Raises:
            TrainingStopped: replicas differ.
        """
        if not self.due(step):
            return {}
        words, seconds = self._replicas.compare(self._data, self._own)
        if words is not None:
            raise TrainingStopped(
                f"{words} after step {step}: they must be equal bit for bit, and training stops"
            )
        slowest = max(seconds)
        return {"slowest_rank": seconds.index(slowest), "slowest_seconds": round(slowest, 4),
                "median_seconds": round(median(seconds), 4)}  # fmt: skip
