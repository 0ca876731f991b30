"""PREDICTED times: what a kernel's main loop costs, through constants that are fitted per part.

An iteration of all programs that a multiprocessor holds at once takes, in cycles of the boost
clock,

    their warps' cycles of the busiest pipe · busy + their warps' stalls · stalls
    + exposed loads · exposed

and a wave of programs, once, their warps' stalls outside the loop · outside, and `wave` thousand. A
launch is as many waves as its items need, and `START`. Exposed loads are those of an iteration, at
`rate` bytes a cycle, less what the iterations between their issue and their use take: of the
buffers in shared memory one is being filled and one in use. `busy` above 1 is clocks that do not
hold their boost under load, `stalls` below 1 is warps that cover for one another.

`CONSTANTS` come from `clock_fit.py`, which fits them to half of the published figures and tests
them on the other half: `spread` is the error that nine of ten of those stay below.
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
    """What the model takes of a compiled kernel.

    Attributes:
        flops, busy, stalls, loaded: of its main loop, a warp and an iteration; `busy` are the
            cycles of the busiest pipe, tensor cores included, `loaded` bytes.
        outside: stalls outside of hot loops.
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
    """What a launch has to do.

    Attributes:
        items: programs; of a persistent kernel its tiles.
        flops: of all items together, in tensor cores, as they are executed.
        uneven: items differ in length, so that short ones fill the last wave.
        bytes: that have to pass through the device's memory.
    """

    items: int
    flops: float
    uneven: bool = False
    bytes: float = 0.0


@dataclass(frozen=True)
class Constants:
    """What a part's published figures were fitted by: factors of `terms`, and two more.

    Attributes:
        busy, stalls, exposed, outside, wave: see the module; `wave` is in thousands of cycles.
        rate: bytes that a multiprocessor loads in a cycle.
        spread: the interval is a prediction over, and times, 1 + spread.
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
    """Microseconds, and the interval in which nine of ten kept-out figures lay."""

    us: float
    low: float
    high: float


CLOCK = {80: 1.41e9, 90: 1.83e9, 100: 1.85e9}  # boost clocks of the data sheets
START = 5000  # cycles, about 3 us: assumed, as no published figure is of a single wave
CONSTANTS = {
    80: Constants(0.0, 1.1771, 1.4348, 0.0, 9.288, 96, 0.124),
    90: Constants(1.1095, 0.8571, 0.6749, 2.1878, 0.0, 48, 0.143),
    100: Constants(0.5903, 0.2206, 0.2639, 3.8704, 0.0, 16, 0.226),
}
# Products that a kernel executes over those that its op is credited with: the backward of attention
# has five, of which each of its kernels does some again.
EXECUTED = {
    "attention_fwd_kernel": 1.0,
    "attention_dkdv_kernel": 4 / 5,
    "attention_dq_kernel": 3 / 5,
    "_gemm_kernel": 1.0,
    "_hidden_bwd_kernel": 1.0,
}
# Programs of a product walk over its tiles: (rows, columns) and (those of a tile) by argument.
_TILED = {
    "_gemm_kernel": (("M", "BLOCK_M"), ("N", "BLOCK_N")),
    "_hidden_bwd_kernel": (("T", "BLOCK_T"), ("F", "BLOCK_F")),
}


def terms(kernel: Kernel, work: Work, part: Device, rate: float) -> tuple[float, ...]:
    """What the constants busy, stalls, exposed, outside and wave multiply, in cycles."""
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
    """Of the boost clock, that `terms` come to."""
    factors = (c.busy, c.stalls, c.exposed, c.outside, c.wave)
    return START + sum(term * factor for term, factor in zip(found, factors, strict=True))


def predict(kernel: Kernel, work: Work, part: Device) -> Prediction:
    """How long the launch takes on `part`, of CONSTANTS: never less than its bytes through the
    memory."""
    c = CONSTANTS[part.arch]
    ours = cycles(terms(kernel, work, part, c.rate), c) / CLOCK[part.arch] * 1e6
    least = work.bytes / part.memory * 1e6
    us = max(ours, least)
    return Prediction(us, max(least, us / (1 + c.spread)), us * (1 + c.spread))


# ---------------------------------------------------------------- of our kernels


def reading_of(kernel: ReadKernel) -> Kernel:
    """What the model takes of a kernel whose hot loops the clock has read."""
    loop, rest = main_loop(kernel.loops), (kernel.num_warps, kernel.occupancy, kernel.shared)
    return Kernel(loop.flops, loop.busy, loop.stalls, loop.global_bytes, kernel.outside, *rest)


def predicted(kernel: ReadKernel, cost: Cost | None, part: Device) -> Prediction | None:
    """How long `kernel` takes for an op of `cost`.

    None for what the clock cannot say: kernels without tensor-core products or with others than the
    five above, those that spill or do not fit, and parts for which it is not calibrated.
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
