"""PREDICTED times: the cost of a kernel's main loop, through constants that are fitted per part.

In cycles of the boost clock, an iteration of all programs that a multiprocessor holds at once takes

    their warps' cycles of the busiest pipe · busy + their warps' stalls · stalls
    + exposed loads · exposed

A wave of programs takes, once, their warps' stalls outside the loop · outside, and `wave` thousand.
A launch takes as many waves as its items need, and `START`. Exposed loads are those of an
iteration, at `rate` bytes per cycle, minus the time of the iterations between their issue and their
use: of the buffers in shared memory, one is being filled and one is in use. `busy` above 1 means
that clocks do not hold their boost under load; `stalls` below 1 means that warps hide each other's
stalls.

`CONSTANTS` come from `clock_fit.py`, which fits them to half of the published figures and tests
them on the other half. Nine of ten of those have an error below `spread`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from clock.instructions import SCHEDULERS
from clock.kernel import ReadKernel
from clock.reading import main_loop
from warpweave.kernels.cost import Cost
from warpweave.kernels.devices import Device


@dataclass(frozen=True)
class Kernel:
    """The model's inputs from a compiled kernel.

    Attributes:
        flops, busy, stalls, loaded: of its main loop, per warp and iteration; `busy` are the cycles
            of the busiest pipe, including tensor cores, and `loaded` are bytes.
        outside: stalls outside hot loops.
        warps, occupancy, shared: as in `aot.Compiled`.
    """

    flops: float
    busy: float
    stalls: int
    loaded: float
    outside: int
    warps: int
    occupancy: int
    shared: int


@dataclass(frozen=True)
class Work:
    """The work of a launch.

    Attributes:
        items: programs; for a persistent kernel, its tiles.
        flops: executed by tensor cores, for all items together.
        uneven: items differ in length, so that short ones fill the last wave.
        bytes: that must pass through the device's memory.
    """

    items: int
    flops: float
    uneven: bool = False
    bytes: float = 0.0


@dataclass(frozen=True)
class Constants:
    """The constants fitted to a part's published figures: factors of `terms`, and two more.

    Attributes:
        busy, stalls, exposed, outside, wave: see the module; `wave` is in thousands of cycles.
        rate: bytes that a multiprocessor loads per cycle.
        spread: the interval is from the prediction / (1 + spread) to the prediction * (1 + spread).
    """

    busy: float
    stalls: float
    exposed: float
    outside: float
    wave: float
    rate: float
    spread: float


@dataclass(frozen=True)
class Prediction:
    """Microseconds, and the interval that contained nine of ten held-out figures."""

    us: float
    low: float
    high: float


CLOCK = {80: 1.41e9, 90: 1.83e9, 100: 1.85e9}  # boost clocks of the data sheets
START = 5000  # cycles, about 3 us: assumed, because no published figure is of a single wave
CONSTANTS = {
    80: Constants(0.0, 1.1771, 1.4348, 0.0, 9.288, 96, 0.124),
    90: Constants(1.1095, 0.8571, 0.6749, 2.1878, 0.0, 48, 0.143),
    100: Constants(0.5903, 0.2206, 0.2639, 3.8704, 0.0, 16, 0.226),
}
# Products that a kernel executes divided by those credited to its op: the backward of attention has
# five, and each of its kernels repeats some.
EXECUTED = {
    "attention_fwd_kernel": 1.0,
    "attention_dkdv_kernel": 4 / 5,
    "attention_dq_kernel": 3 / 5,
    "_gemm_kernel": 1.0,
    "_hidden_bwd_kernel": 1.0,
}
# Programs of a product loop over its tiles: (rows, columns) and (those of a tile) by argument.
_TILED = {
    "_gemm_kernel": (("M", "BLOCK_M"), ("N", "BLOCK_N")),
    "_hidden_bwd_kernel": (("T", "BLOCK_T"), ("F", "BLOCK_F")),
}


def terms(kernel: Kernel, work: Work, part: Device, rate: float) -> tuple[float, ...]:
    """The cycles that the constants busy, stalls, exposed, outside and wave multiply."""
    held = min(kernel.occupancy, ceil(work.items / part.processors))
    waves = work.items / (held * part.processors)
    waves = max(1.0, waves) if work.uneven else ceil(waves)
    iterations = waves * work.flops / work.items / (kernel.flops * kernel.warps)
    warps = held * kernel.warps / SCHEDULERS  # of each
    loaded = kernel.loaded * kernel.warps
    buffers = round(kernel.shared / loaded) if loaded else 0
    covered = max(0, buffers - 2) * kernel.busy * kernel.warps / SCHEDULERS
    return (
        iterations * warps * kernel.busy,
        iterations * warps * kernel.stalls,
        iterations * max(0.0, loaded / rate - covered),
        waves * warps * kernel.outside,
        waves * 1000.0,
    )


def cycles(found: tuple[float, ...], c: Constants) -> float:
    """The cycles of the boost clock that `terms` add up to."""
    factors = (c.busy, c.stalls, c.exposed, c.outside, c.wave)
    return START + sum(term * factor for term, factor in zip(found, factors, strict=True))


def predict(kernel: Kernel, work: Work, part: Device) -> Prediction:
    """Predict the time of the launch on `part`, one of CONSTANTS.

    It is never less than the time for its bytes to pass through the memory.
    """
    c = CONSTANTS[part.arch]
    ours = cycles(terms(kernel, work, part, c.rate), c) / CLOCK[part.arch] * 1e6
    least = work.bytes / part.memory * 1e6
    us = max(ours, least)
    return Prediction(us, max(least, us / (1 + c.spread)), us * (1 + c.spread))


# ---------------------------------------------------------------- of our kernels


def reading_of(kernel: ReadKernel) -> Kernel:
    """The model's inputs from a kernel whose hot loops the clock has read."""
    loop, rest = main_loop(kernel.loops), (kernel.num_warps, kernel.occupancy, kernel.shared)
    return Kernel(loop.flops, loop.busy, loop.stalls, loop.global_bytes, kernel.outside, *rest)


def predicted(kernel: ReadKernel, cost: Cost | None, part: Device) -> Prediction | None:
    """Predict the time of `kernel` for an op of `cost`.

    None if the clock cannot predict it: kernels without tensor-core products or other than the five
    above, kernels that spill or do not fit, and parts for which it is not calibrated.
    """
    readable = kernel.loops and kernel.occupancy and not kernel.stack and part.arch in CONSTANTS
    if cost is None or not readable or kernel.kernel not in EXECUTED:
        return None
    sizes, items = kernel.constants, kernel.programs
    if kernel.kernel in _TILED:
        rows, columns = (ceil(sizes[n] / sizes[b]) for n, b in _TILED[kernel.kernel])
        items = rows * columns
    executed = cost.flops * EXECUTED[kernel.kernel]
    work = Work(items, executed, uneven=bool(sizes.get("CAUSAL")), bytes=cost.bytes)
    return predict(reading_of(kernel), work, part)
