"""PREDICTED time of one compiled launch of ours: what the clock makes of its loop and its grid."""

from __future__ import annotations

from math import ceil

from warpweave.kernels.cost import Cost
from warpweave.tune.aot import Compiled
from warpweave.tune.clock.predict import CONSTANTS, Kernel, Prediction, Work, predict
from warpweave.tune.clock.reading import main_loop
from warpweave.tune.parts import Part

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


def reading_of(kernel: Compiled) -> Kernel:
    """What the model takes of a kernel whose hot loops the clock has read."""
    loop, rest = main_loop(kernel.loops), (kernel.num_warps, kernel.occupancy, kernel.shared)
    return Kernel(loop.flops, loop.busy, loop.stalls, loop.global_bytes, kernel.outside, *rest)


def predicted(kernel: Compiled, cost: Cost | None, part: Part) -> Prediction | None:
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
