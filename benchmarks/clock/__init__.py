"""The clock: the cost of a compiled kernel, read from its instructions without a GPU.

    loops, outside = read_loops(cubin, arch=90, warps=8)
    for loop in loops:
        print(loop.ideal, loop.serial)        # shares of the tensor cores' peak: PREDICTIONS

`disassembly` a cubin's instructions and their stall counts · `loops` natural loops ·
`instructions` what each instruction occupies, and for how long · `reading` the figures of hot loops
· `kernel` all that is read of a compiled kernel · `predict` a launch's time, by constants fitted to
published times. Next to this folder, `clock_fit.py` fits
those constants and `clock_beside.py` compares predictions with measurements.

It is a development tool and not installed: scripts in ``benchmarks`` and tests import it as
``clock``.
"""

from clock.reading import HotLoop, read_loops

__all__ = ["HotLoop", "read_loops"]
