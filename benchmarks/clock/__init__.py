"""The clock: what a compiled kernel costs, read from its instructions. It needs no GPU.

    loops, outside = read_loops(cubin, arch=90, warps=8)
    for loop in loops:
        print(loop.ideal, loop.serial)        # shares of the tensor cores' peak: PREDICTIONS

`disassembly` a cubin's instructions and their stall counts · `loops` natural loops ·
`instructions` what each holds, and for how long · `reading` the hot loops' figures · `kernel` all
that is read of a compiled kernel · `predict` a launch's time by constants fitted to published ones
· `ratchet` figures that may not worsen. Beside it, `clock_fit.py` fits those constants and
`clock_beside.py` puts predictions beside measurements.

It is a tool of the project's and not installed: scripts in ``benchmarks`` and tests import it as
``clock``.
"""

from clock.reading import HotLoop, read_loops

__all__ = ["HotLoop", "read_loops"]
