"""Times on a CUDA device: one call between two events, calls compared in turn.

A call finds an L2 cache that holds nothing of the one before, as in a model, where other layers ran
in between. Variants take turns in an order that is drawn anew each round, so that clocks, heat and
neighbours hit all of them alike; ratios are to be taken within a round.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

Timer = Callable[[Callable[[], object]], float]
"""Runs a call and returns its milliseconds."""

_Name = TypeVar("_Name")
PASSES = 16  # over the scratch memory


class CudaTimer:
    """Times one call by events, after L2 has been overwritten.

    Overwriting takes the device milliseconds (at least 8.6 GB are written), in which Python gets
    ahead of it: what is timed is the kernels of a call, not the wait for their launches, which was
    0.2 to 1 ms for ours in a virtual machine with an H100.
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
    """Milliseconds of every call in every round, each round in an order drawn anew."""
    for _ in range(warmup):
        for call in calls.values():
            call()
    order, names = random.Random(0), list(calls)
    times: dict[_Name, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in order.sample(names, len(names)):
            times[name].append(timer(calls[name]))
    return times
