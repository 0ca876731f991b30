"""Weight gradients, now or later: an ambient collector that a pipeline schedule can fill and run.

A linear layer's backward owes two products: the gradient of its input, which the previous stage
waits for, and the gradient of its weight, which nobody waits for. Zero-bubble schedules (Qi et al.
2023, arXiv:2401.10241) run the second one later. torch's own input/weight split runs the whole
backward of a custom ``autograd.Function`` twice (pytorch#174017), so the Functions of this project
hand the second product over themselves: ``return dx, wgrad(weight, lambda: dy.T @ x)``.

Without a collector the gradient is computed and returned, and autograd (hooks, DDP, FSDP2) sees
nothing unusual. With one, the closure is kept and ``None`` is returned; ``WeightGradients.run``
computes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_Entry = tuple[torch.Tensor, Callable[[], torch.Tensor]]


class WeightGradients:
    """The weight gradients that one backward pass (one stage, one micro-batch) still owes."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, weight: torch.Tensor, fn: Callable[[], torch.Tensor]) -> None:
        """Keep `fn`, which computes the gradient of `weight` (same shape) when it is called."""
        self._entries.append((weight, fn))

    @torch.no_grad()
    def run(self) -> None:
        """Compute every kept gradient and add it to its weight's ``.grad``; then forget them."""
        entries, self._entries = self._entries, []
        for weight, fn in entries:
            gradient = fn()
            if weight.grad is None:
                weight.grad = gradient
            else:
                weight.grad.add_(gradient)


_active: ContextVar[WeightGradients | None] = ContextVar("warpweave_wgrad", default=None)


@contextmanager
def collect(store: WeightGradients) -> Iterator[WeightGradients]:
    """Within this context, weight gradients go to `store` instead of to autograd.

    The backward pass runs in the calling thread meanwhile: autograd's device threads would not see
    a context variable that the caller set.
    """
    token = _active.set(store)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield store
    finally:
        _active.reset(token)


def wgrad(weight: torch.Tensor, fn: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Return ``fn()``, or keep it and return None while a collector is active.

    A deferred gradient is added to the ``.grad`` of `weight`. One that is computed from others (a
    weight norm, an adapter) has none: its gradient goes on through autograd, never deferred.
    """
    store = _active.get()
    if store is None or not weight.is_leaf:
        return fn()
    store.append(weight, fn)
    return None
