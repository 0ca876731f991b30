"""`make pretend`: checks under the pretended NCCL that are too slow for the suite.

The first is a table of the faults of `test_pretend_nccl`: the layout in which each is planted, how
it shows, and after how many seconds. The second explores every order in which two stages of two
tensor ranks may start fused products and messages. The third draws layouts of `warpweave prove` by
a seed and proves them against the plain model, with hosts that occasionally wait for their device
and with communicators made in either way. The last line is a summary. The exit status is 1 if
anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
from plants import planted
from pretend_nccl import AbortedError, run_nccl
from processors import Device, stuck
from test_pretend_nccl import CASES, FAULTS, plainly, shows

from warpweave.parallel.schedule import interleaved, with_comm
from warpweave.prove.layouts import Layout, draw
from warpweave.prove.proof import LIMITS, Errors, prove_layout

_DRAINS = ("never", "always", "first", 0.02)


def _tell() -> int:
    """Print the table of faults, and return how many are not detected."""
    print("| fault | layout | how it shows | seconds |\n|---|---|---|---|")
    silent = 0
    for name, fault in FAULTS.items():
        if fault.case in CASES:
            plainly(fault.case)
        before = time.perf_counter()
        try:
            with planted(*fault.plants()):
                shows(fault)
            silent, words = silent + 1, "NOT AT ALL"
        except (AssertionError, RuntimeError, AbortedError) as error:
            words = str(error).splitlines()[0]
        print(
            f"| {name} | {fault.case} | {words} | {time.perf_counter() - before:.1f} |", flush=True
        )
    return silent


def _prove(seed: int) -> str:
    """Return the error of the layout of `seed`, or an empty string."""
    layout = draw(seed)

    def go(rank: int, layout: Layout) -> Errors:
        return prove_layout(layout, layout.mesh.connect())

    drains, lazily = _DRAINS[seed % 4], seed // 4 % 2 == 1
    how = f"seed {seed}, drains {drains}{', lazily' * lazily}, {layout}"
    try:
        found = run_nccl(layout.mesh.world, go, layout, drains=drains, seed=seed, lazily=lazily)
    except (Exception, AbortedError) as error:
        return f"{how}: {type(error).__name__} {error}"
    return "" if found[0].worst <= LIMITS[layout.dtype] else f"{how}: {found[0]}"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--first", type=int, default=0, help="the first seed")
    options.add_argument("--count", type=int, default=40, help="of layouts")
    given = options.parse_args()
    torch.set_num_threads(1)
    before = time.perf_counter()
    silent, wrong = _tell(), 0
    if left := stuck(with_comm(interleaved(2, 2, 2)), 2, Device(grid=132 - 16)):
        wrong = 1
    print(f"fused products that leave 16 processors to messages: {left or 'always go on'}")
    for seed in range(given.first, given.first + given.count):
        words = _prove(seed)
        wrong += bool(words)
        print(words or f"seed {seed} is right", flush=True)
    print(
        f"make pretend: {len(FAULTS)} faults, {silent} not told; {given.count} layouts, {wrong} "
        f"wrong; {time.perf_counter() - before:.0f} s"
    )
    sys.exit(bool(silent or wrong))


if __name__ == "__main__":
    main()
