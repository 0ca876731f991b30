"""Timing on a CUDA device: one call between two events, with calls interleaved.

L2 holds nothing from the previous call, as in a model, where other layers run in between. Variants
run in a random order in each round, so that clocks, heat, and neighbors affect all of them equally.
Compute ratios within a round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Timer = Callable[[Callable[[], object]], float]
"""Run a call and return its milliseconds."""

_Name = TypeVar("_Name")
PASSES = 16  # over the scratch memory


class CudaTimer:
    """Times one call by events, after L2 has been overwritten.

    Overwriting keeps the device busy for milliseconds (at least 8.6 GB are written), so Python gets
    ahead of it. The time is then that of a call's kernels, without the wait for their launches,
    which was 0.2 to 1 ms for ours in a virtual machine with an H100.
    """

    def __init__(self, device: torch.device) -> None:
        size = torch.cuda.get_device_properties(device).L2_cache_size
        self.scratch = torch.empty(max(2 * size, 1 << 29), dtype=torch.uint8, device=device)

    def __call__(self, call: Callable[[], object]) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(PASSES):
            self.scratch.zero_()
        began.record()
        call()
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended)


def interleave(
    calls: Mapping[_Name, Callable[[], object]], timer: Timer, *, rounds: int, warmup: int = 3
) -> dict[_Name, list[float]]:
    """Milliseconds of every call in every round; each round has a different random order."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    order, names = random.Random(0), list(calls)
    times: dict[_Name, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            times[name].append(timer(calls[name]))
    return times
