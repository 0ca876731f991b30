"""What a run compares between its ranks, so that they do not disagree in silence.

when                                    what is compared
the first two steps, and the first      every collective, before it is issued
evaluation; `check_every` steps;        (`parallel.checked`)
each one with `check_collectives`
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from warpweave.launch import Session
from warpweave.parallel.checked import CheckedCollectives
from warpweave.train_config import TrainConfig

_FIRST = 2  # steps of a process whose collectives are compared


class TrainingStopped(RuntimeError):
    """Training cannot go on; raised on every rank."""


class Agreement:
    """The comparisons of one rank's run.

    Args:
        config: how often.
        session: this rank's connection; without a store, of one rank, nothing is compared.
    """

    def __init__(self, config: TrainConfig, session: Session) -> None:
        self._always, self._every = config.check_collectives, config.check_every
        self._checked: CheckedCollectives | None = None
        self._steps, self._evaluations = _FIRST, 1  # to be compared still
        if (store := session.store) is not None:
            # A wait holds a connection, which others use.
            store = store.clone()  # type: ignore[attr-defined]
            self._checked = CheckedCollectives(
                store, config.mesh, session.rank, session.timeout, session.device
            )

    def due(self, step: int) -> bool:
        """Whether ranks are compared after `step` steps."""
        return self._every > 0 and step % self._every == 0

    def of_step(self, step: int) -> AbstractContextManager[object]:
        """The context of a step, whose number is `step` afterwards."""
        self._steps -= 1
        return self._comparing(self._steps >= 0 or self.due(step))

    def of_evaluation(self) -> AbstractContextManager[object]:
        """The context of an evaluation."""
        self._evaluations -= 1
        return self._comparing(self._evaluations >= 0)

    def _comparing(self, due: bool) -> AbstractContextManager[object]:
        compares = self._checked is not None and (due or self._always)
        return self._checked if self._checked is not None and compares else nullcontext()
