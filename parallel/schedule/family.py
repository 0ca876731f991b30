"""What a file of `families` says of each schedule in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from warpweave.parallel.schedule.actions import Schedule


@dataclass(frozen=True)
class ScheduleFamily:
    """A schedule for any number of ranks and micro-batches.

    Attributes:
        name: as ``--schedule`` says it.
        generate: (p, m, c) -> the lists of p ranks and m micro-batches with c stages per rank,
            compute actions alone.
        chunks: stages per rank that it has; None: any number, as told.
        staleness: of an asynchronous schedule, p -> by how many updates the weights that a gradient
            was computed with may be older than those it is applied to; as many old versions of the
            weights are kept beside the newest. None: synchronous, version 0 in all of a step.
    """

    name: str
    generate: Callable[[int, int, int], Schedule]
    chunks: int | None = 1
    staleness: Callable[[int], int] | None = None

    def make(self, p: int, m: int, c: int = 1) -> Schedule:
        """The lists; ValueError, in one line, unless it has such lists."""
        if m < 1:
            raise ValueError(f"microbatches must be at least 1, got {m}")
        if self.chunks not in (None, c):
            raise ValueError(
                f"schedule {self.name} has chunks = {self.chunks} stages per rank, got {c}"
            )
        return self.generate(p, m, c)


def need(name: str, p: int, m: int) -> None:
    """ValueError unless there is a stage and a micro-batch."""
    if p < 1 or m < 1:
        raise ValueError(f"{name} needs p >= 1 stages and m >= 1 micro-batches, got p={p} m={m}")
