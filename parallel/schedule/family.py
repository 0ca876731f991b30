"""A pipeline schedule by name: the lists of any number of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warpweave.parallel.schedule.actions import Action, F, I, Schedule, W


@dataclass(frozen=True)
class ScheduleFamily:
    """A pipeline schedule for any number of ranks and micro-batches.

    Attributes:
        name: its name for ``--schedule``.
        generate: (p, m, c) -> the lists of p ranks and m micro-batches with c stages per rank,
            compute actions only.
        chunks: its number of stages per rank; None means any number, as requested.
        least: p -> the minimum number of micro-batches.
        asynchronous: its lists contain updates, and gradients of older weights than the ones they
            change (`open_passes.staleness`). Otherwise everything in a step reads version 0.
    """

    name: str
    generate: Callable[[int, int, int], Schedule]
    chunks: int | None = 1
    least: Callable[[int], int] = lambda p: 1
    asynchronous: bool = False

    def make(self, p: int, m: int, c: int = 1) -> Schedule:
        """Return the lists. Raise ValueError, in one line, if the schedule cannot have them."""
        if self.chunks not in (None, c):
            raise ValueError(
                f"schedule {self.name} requires chunks = {self.chunks} stages per rank, got {c}"
            )
        if m < (least := self.least(p)):
            where = "" if least == 1 else f" with schedule {self.name} on {p} ranks"
            raise ValueError(f"microbatches must be at least {least}{where}, got {m}")
        return self.generate(p, m, c)


def need(name: str, p: int, m: int) -> None:
    """Raise ValueError unless there is at least one stage and one micro-batch."""
    if p < 1 or m < 1:
        raise ValueError(f"{name} needs p >= 1 stages and m >= 1 micro-batches, got p={p} m={m}")


def count_up(pattern: str, stages: Sequence[int], m: int) -> list[Action]:
    """A rank's list, from a pattern of operations and indices into the rank's `stages`.

    ``"F0 F1 F0&B1 I0 W"`` means: F of its first stage, F of its second, a cell of F of the first
    and B of the second, I of the first, and the oldest W that is owed (``W0`` is the oldest one of
    the first stage). Each operation of a stage takes the next micro-batch; micro-batches from `m`
    on are left out.
    """
    following: dict[tuple[bool, int], int] = {}  # (is it an F, stage) -> micro-batch
    owed: list[Action] = []
    actions: list[Action] = []
    for name in pattern.replace("&", "& ").split():
        op, k = name[0], int(name.strip("FBIW&") or -1)
        if op == W:
            action = next(a for a in owed if k < 0 or a.stage == stages[k])
            owed.remove(action)
        else:
            mb = following.get((op == F, k), 0)
            following[op == F, k] = mb + 1
            action = Action(op, stages[k], mb, joined=name.endswith("&"))
            owed += [action._replace(op=W)] * (op == I)
        actions.append(action)
    return [a for a in actions if a.mb < m]
