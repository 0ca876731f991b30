"""Full activation checkpointing that does not recompute attention over context ranks.

LightSeq (Li et al. 2023, arXiv:2310.03294). Full checkpointing keeps a block's input and runs the
block's forward again in the backward. On a long sequence most of that second forward is attention,
with all of its messages and tiles. Within `Kept.first`, the results of each attention call are
therefore kept: o, lse and what its backward needs in addition to q, k and v, which are recomputed.
Within `Kept.second`, the same calls, in the same order, return these results. Nothing is sent or
attended again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

Attended = tuple[torch.Tensor, torch.Tensor, Sequence[torch.Tensor | None]]


class Kept:
    """The attention results of a block's forward, one entry per call: o and lse. A ring adds the
    K‖V that it received last; Ulysses adds q, k, v, o and lse of this rank's heads."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Attended, list[int | None]]] = deque()

    def first(self) -> AbstractContextManager[None]:
        """Return a context in which attention calls keep their results."""
        return _set(self.keep)

    def second(self) -> AbstractContextManager[None]:
        """Return a context in which attention calls return the results of `first`, each once."""
        return _set(self.take)

    def keep(self, run: Callable[[], Attended], inputs: Sequence[torch.Tensor]) -> Attended:
        """Run ``run()`` and keep its result, without the saved tensors that are inputs."""
        o, lse, saved = run()
        places = [next((i for i, x in enumerate(inputs) if x is t), None) for t in saved]
        others = [None if at is not None else t for t, at in zip(saved, places)]
        self._calls.append(((o, lse, others), places))
        return o, lse, saved

    def take(self, run: Callable[[], Attended], inputs: Sequence[torch.Tensor]) -> Attended:
        """Return what ``run()`` returned in `first`, with the saved inputs replaced by `inputs`."""
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
    """Return ``run()`` for these q, k and v, or the kept result of the first forward (`Kept`)."""
    how = _active.get()
    return run() if how is None else how(run, inputs)
