"""The tensors that a call saves for its backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch


def saved_elements(call: Callable[[], object], but: Iterable[torch.Tensor] = ()) -> int:
    """Return the number of elements that `call` saves, without those of the tensors `but`."""
    others, sizes = {t.data_ptr() for t in but}, []

    def keep(t: torch.Tensor) -> torch.Tensor:
        sizes.append(t.numel() * (t.data_ptr() not in others))
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        call()
    return sum(sizes)
