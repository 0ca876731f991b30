"""Stale synchronous parallel (SSP, Ho et al. 2013): clocks of workers, and updates that are due.

A worker's clock counts its accepted gradients. One predicate covers every mode. A worker at clock c
may pull weights when

    min(clocks of all workers) >= c - staleness

    staleness   mode                       gradients
    0           synchronous (BSP)          `joint`: all of one clock are summed and applied as one
    s           stale synchronous          each is applied when it arrives
    None        asynchronous (Hogwild,     each is applied when it arrives
                Downpour)

A worker at clock c therefore sees every gradient of clocks <= c - staleness - 1, and perhaps more.

    staleness 1, three workers; a number is a gradient of that clock, . waits
    worker 0   0 1 . . 2
    worker 1   0 . 1 . . 2
    worker 2   . . 0 . 1        worker 0 may pull for clock 2 when worker 2 has pushed clock 0

This file does not depend on tensors, messages or time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Term:
    """One worker's gradient within an update.

    Attributes:
        worker: its number, which is never used for another worker of the run.
        clock: the worker's clock, which determines its data and learning rate.
        pulled: the version of the weights at which the gradient was computed.
        staleness: clock - min(clocks) at the time of the pull; never above the bound.
        count: number of samples or tokens whose losses are summed. The update divides by the total.
        loss: mean loss over them.

    Examples:
        >>> Term(worker=0, clock=3, pulled=2, staleness=1, count=8, loss=0.5).clock
        3
    """

    worker: int
    clock: int
    pulled: int
    staleness: int
    count: int
    loss: float


@dataclass
class Clocks:
    """The clocks of the workers and the version of the weights; every change is a method.

    Attributes:
        staleness: the bound; None for no bound.
        joint: sum the gradients of one clock and apply them together.
        clocks: worker -> number of accepted gradients, for the participating workers.
        version: number of updates applied so far.
        following: the number of the next worker that joins.
        floor: the lowest clock when any worker last participated.

    Raises:
        ValueError: the bound is below 0, or joint updates are combined with a bound other than 0.
    """

    staleness: int | None = 0
    joint: bool = True
    clocks: dict[int, int] = field(default_factory=dict)
    version: int = 0
    following: int = 0
    floor: int = 0
    # Workers that asked to pull, in order; worker -> version and staleness of what it pulled;
    # gradients that are accepted but not yet applied.
    _waiting: dict[int, None] = field(default_factory=dict, init=False)
    _pulled: dict[int, tuple[int, int]] = field(default_factory=dict, init=False)
    _given: list[Term] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.staleness is not None and self.staleness < 0:
            raise ValueError(f"staleness must be at least 0, or None, got {self.staleness}")
        if self.joint and self.staleness != 0:
            raise ValueError(
                f"staleness must be 0 with joint=True, got {self.staleness}; pass joint=False for "
                "a staleness other than 0"
            )

    def join(self, worker: int | None = None, clock: int | None = None) -> int:
        """Add a worker, by default a new one at the lowest clock, and return its number."""
        worker = self.following if worker is None else worker
        if worker in self.clocks:
            raise ValueError(f"worker {worker} has already joined; pass None for a new worker")
        self.clocks[worker] = self._lowest() if clock is None else clock
        self.following = max(self.following, worker + 1)
        self.floor = min(self.clocks.values())
        return worker

    def leave(self, worker: int) -> None:
        """Remove a worker that is done or lost. Its accepted gradients stay; expect no more."""
        self.floor = self._lowest()
        del self.clocks[worker]
        self._waiting.pop(worker, None)
        self._pulled.pop(worker, None)

    def ask(self, worker: int) -> None:
        """Note that a worker asks to pull."""
        self._waiting[worker] = None

    def owes(self, worker: int) -> bool:
        """Return True if the worker has pulled and its gradient has not been accepted yet. Until
        then it may not pull again."""
        return worker in self._pulled

    def grant(self) -> list[int]:
        """The workers that may pull this version now, in the order in which they asked."""
        lowest = self._lowest()
        found = [
            w for w in self._waiting
            if not self.owes(w)
            and (self.staleness is None or lowest >= self.clocks[w] - self.staleness)
        ]  # fmt: skip
        for worker in found:
            del self._waiting[worker]
            self._pulled[worker] = (self.version, self.clocks[worker] - lowest)
        return found

    def give(self, worker: int, count: int, loss: float) -> None:
        """Accept a worker's gradient, computed at the weights that it pulled last.

        Raises:
            ValueError: the worker has not pulled since its last gradient.
        """
        if not self.owes(worker):
            raise ValueError(f"worker {worker} pushed a gradient without pulling weights first")
        self._given.append(
            Term(worker, self.clocks[worker], *self._pulled.pop(worker), count, loss)
        )
        self.clocks[worker] += 1

    def updates(self) -> list[tuple[Term, ...]]:
        """Return the updates that are due, each with its terms in worker order, and count them."""
        due: list[tuple[Term, ...]]
        if not self.joint:
            due = [(term,) for term in self._given]
        else:
            lowest = min(self.clocks.values(), default=None)
            done = [t for t in self._given if lowest is None or t.clock < lowest]
            due = [tuple(sorted(done, key=lambda t: (t.clock, t.worker)))] if done else []
        applied = {term for terms in due for term in terms}
        self._given = [term for term in self._given if term not in applied]
        self.version += len(due)
        return due

    def _lowest(self) -> int:
        return min(self.clocks.values(), default=self.floor)

    def state(self) -> dict[str, Any]:
        """The JSON for a checkpoint. Weights that were pulled will be pulled again."""
        clocks = {str(worker): clock for worker, clock in self.clocks.items()}
        return {"clocks": clocks, "version": self.version, "following": self.following,
                "floor": self.floor}  # fmt: skip

    def load(self, state: dict[str, Any], workers: Iterable[int]) -> None:
        """Continue from `state` with these `workers`: each at its clock, new ones at the lowest."""
        saved = {int(worker): clock for worker, clock in state["clocks"].items()}
        lowest = min(saved.values(), default=state["floor"])
        self.version, self.following, self.floor = state["version"], state["following"], lowest
        self.clocks = {}
        for worker in workers:
            self.join(worker, saved.get(worker, lowest))
