"""What attention over context ranks computed, kept from a block's first run for its second.

Full recomputation keeps a block's input and runs the block again in the backward. Of a long
sequence the second run's attention would be the dearest part, every message and tile of it. Within
`Kept.first` what a strategy's forward returns is kept: o, lse and what its backward needs besides
q, k and v, which are made again. Within `Kept.second` the calls get it in the same order: nothing
is sent or attended (LightSeq's checkpoints, Li et al. 2023, arXiv:2310.03294).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

Attended = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]


class Kept:
    """Results of one run's calls: per token o, lse and, of a ring, the farthest K‖V; of Ulysses
    also the q, k, v, o and lse of this rank's heads."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Attended, list[int | None]]] = deque()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Within, calls are kept."""
        with _set(self.keep):
            yield

    @contextmanager
    def second(self) -> Iterator[None]:
        """Within, calls get what was kept, each once."""
        with _set(self.take):
            yield

    def keep(self, run: Callable[[], Attended], inputs: Sequence[torch.Tensor]) -> Attended:
        """``run()``."""
        o, lse, saved = run()
        places = [next((i for i, x in enumerate(inputs) if x is t), None) for t in saved]
        others = [None if at is not None else t for t, at in zip(saved, places)]
        self._calls.append(((o, lse, others), places))
        return o, lse, saved

    def take(self, run: Callable[[], Attended], inputs: Sequence[torch.Tensor]) -> Attended:
        """What ``run()`` would return for these inputs, which are those of the first run."""
        (o, lse, others), places = self._calls.popleft()
        return o, lse, [t if at is None else inputs[at] for t, at in zip(others, places)]


_active: ContextVar[Callable[..., Attended] | None] = ContextVar("kept", default=None)


@contextmanager
def _set(how: Callable[..., Attended]) -> Iterator[None]:
    token = _active.set(how)
    try:
        yield
    finally:
        _active.reset(token)


def attend_once(run: Callable[[], Attended], inputs: Sequence[torch.Tensor]) -> Attended:
    """``run()`` of these q, k and v, or in a second run what it was in the first."""
    how = _active.get()
    return run() if how is None else how(run, inputs)
