"""Training and evaluation mode, for the length of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """All modules in one mode; each in its own again afterwards, whatever happens."""
    before = {module: module.training for module in model.modules()}
    try:
        model.train(training)
        yield
    finally:
        for module, mode in before.items():
            module.training = mode
