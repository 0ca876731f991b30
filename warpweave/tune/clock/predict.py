"""PREDICTED times: what a kernel's main loop costs, through constants that are fitted per part.

A multiprocessor holds `held` programs. A pass of all of them takes, in cycles of the boost clock,

    busiest pipe of all their warps · a + stalls of all their warps · b + loads in the open · c

and a round of them, once, the stalls outside the loop of all their warps · d, and e. A launch is as
many rounds as its items need, and `START`. Loads in the open are those of a pass, at `rate`
bytes a cycle, less what the passes between their issue and their use take: of the buffers in
shared memory one is being filled and one in use. a above 1 is clocks that do not hold their boost
under load, b below 1 is warps that cover for one another.

`CONSTANTS` come from `benchmarks/clock.py`, which fits them to published figures, half of them, and
tests them on the other half: `spread` is the error that nine of ten of those stay below.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from warpweave.tune.clock.reading import HotLoop
from warpweave.tune.parts import Part


@dataclass(frozen=True)
class Kernel:
    """What the model takes of a compiled kernel.

    Attributes:
        flops, busy, stalls, loaded: of its main loop, of one warp and pass; `busy` are the cycles
            of the busiest pipe, tensor cores included, `loaded` bytes.
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
        uneven: items differ in length, so that short ones fill the last round.
        bytes: that have to pass through the device's memory.
    """

    items: int
    flops: float
    uneven: bool = False
    bytes: float = 0.0


@dataclass(frozen=True)
class Constants:
    """Fitted to one part; `round` is in thousands of cycles."""

    busy: float
    stalls: float
    exposed: float
    outside: float
    round: float
    rate: float
    spread: float


@dataclass(frozen=True)
class Prediction:
    """Microseconds, and the interval in which nine of ten kept-out figures lay."""

    us: float
    low: float
    high: float


CLOCK = {80: 1.41e9, 90: 1.83e9, 100: 1.85e9}  # boost clocks of the data sheets
START = 5000  # cycles, about 3 us: assumed, as no published figure is of a single round
CONSTANTS = {
    80: Constants(0.0, 1.1771, 1.4348, 0.0, 9.288, 96, 0.124),  # products' own stalls are in b
    90: Constants(1.1095, 0.8571, 0.6749, 2.1878, 0.0, 48, 0.143),
    100: Constants(0.5903, 0.2206, 0.2639, 3.8704, 0.0, 16, 0.226),
}


def main_loop(loops: list[HotLoop]) -> HotLoop:
    """The one that most passes go through: the others have masks."""
    return max(loops, key=lambda loop: loop.serial)


def kernel_of(
    loops: list[HotLoop], outside: int, *, warps: int, occupancy: int, shared: int
) -> Kernel:
    """What the model takes of what the clock has read."""
    loop = main_loop(loops)
    busy = max(loop.tensor, loop.instructions, *loop.pipes.values())
    return Kernel(
        loop.flops, busy, loop.stalls, loop.global_bytes, outside, warps, occupancy, shared
    )


def terms(kernel: Kernel, work: Work, part: Part, rate: float) -> tuple[float, ...]:
    """What `Constants.busy`, `.stalls`, `.exposed`, `.outside` and `.round` multiply, in cycles."""
    held = max(1, min(kernel.occupancy, ceil(work.items / part.processors)))
    rounds = work.items / (held * part.processors)
    rounds = max(1.0, rounds) if work.uneven else ceil(rounds)
    passes = rounds * work.flops / work.items / (kernel.flops * kernel.warps)
    warps = held * kernel.warps / 4  # of a scheduler
    loaded = kernel.loaded * kernel.warps
    buffers = round(kernel.shared / loaded) if loaded else 0
    covered = max(0, buffers - 2) * kernel.busy * kernel.warps / 4
    return (
        passes * warps * kernel.busy,
        passes * warps * kernel.stalls,
        passes * max(0.0, loaded / rate - covered),
        rounds * warps * kernel.outside,
        rounds * 1000.0,
    )


def cycles(found: tuple[float, ...], c: Constants) -> float:
    """Of the boost clock, that `terms` come to."""
    factors = (c.busy, c.stalls, c.exposed, c.outside, c.round)
    return START + sum(term * factor for term, factor in zip(found, factors, strict=True))


def predict(kernel: Kernel, work: Work, part: Part) -> Prediction:
    """How long the launch takes on `part`: never less than its bytes through the memory.

    Raises ValueError for a part without constants, and for a kernel of which not one program fits.
    """
    if part.arch not in CONSTANTS:
        known = ", ".join(f"sm_{arch}" for arch in CONSTANTS)
        raise ValueError(f"the clock is calibrated for {known}, not for sm_{part.arch}")
    if not kernel.occupancy:
        raise ValueError(f"not one program of {kernel.shared} bytes of shared memory fits")
    constants = CONSTANTS[part.arch]
    ours = cycles(terms(kernel, work, part, constants.rate), constants) / CLOCK[part.arch] * 1e6
    least = work.bytes / part.bandwidth * 1e6 if part.bandwidth else 0.0
    us = max(ours, least)
    return Prediction(us, max(least, us / (1 + constants.spread)), us * (1 + constants.spread))
