"""Memory that detects reads of unwritten elements and writes out of bounds.

Within `guarded()` every tensor that is made empty is filled with NaN (integers with -7). It and
every tensor that is made of zeros has a margin before and behind it. At the end the margins must be
unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode

MARGIN = 64  # in elements: one row of a small tile
EMPTY = (torch.empty, torch.empty_like, torch.Tensor.new_empty)
ZERO = (torch.zeros, torch.zeros_like, torch.Tensor.new_zeros)


def _nothing(x: torch.Tensor) -> float:
    return float("nan") if x.is_floating_point() else 0 if x.dtype == torch.bool else -7


class _Guard(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Tensor, int]] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func not in EMPTY + ZERO or type(made) is not torch.Tensor or not made.is_cpu:
            return made
        if not made.is_contiguous() or made.dtype not in (torch.float64, torch.float32,
                torch.float16, torch.bfloat16, torch.int64, torch.int32):  # fmt: skip
            return made
        size = made.numel()
        memory = made.detach().new_full((size + 2 * MARGIN,), _nothing(made))
        found = memory.new_empty(0).set_(memory.untyped_storage(), MARGIN, made.shape)
        if func in ZERO:
            found.zero_()
        self.made.append((memory, size))
        return found.requires_grad_(made.requires_grad)

    def check(self) -> None:
        for memory, size in self.made:
            for margin in (memory[:MARGIN], memory[MARGIN + size :]):
                still = margin.isnan() if margin.is_floating_point() else margin == -7
                assert still.all(), f"something was written beside {size} elements"


@contextmanager
def guarded() -> Iterator[None]:
    guard = _Guard()
    with guard:
        yield
    guard.check()
