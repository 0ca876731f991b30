"""The clock: what a compiled kernel costs, read from its instructions. It needs no GPU.

    loops, outside = read_loops(cubin, arch=90, warps=8)
    for loop in loops:
        print(loop.ideal, loop.serial)        # shares of the tensor cores' peak: PREDICTIONS

`disassembly` a cubin's instructions and their stall counts · `loops` natural loops ·
`instructions` what each holds, and for how long · `reading` the hot loops' figures · `predict` a
launch's time by constants fitted to published ones · `ratchet` figures that may not worsen.
"""

from warpweave.tune.clock.reading import HotLoop, read_loops

__all__ = ["HotLoop", "read_loops"]
