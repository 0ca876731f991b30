"""Products under whose tiles the ranks' data moves: all-gather -> GEMM, GEMM -> reduce-scatter and
GEMM -> all-reduce, in plain Triton over symmetric memory.

    symmetric   a segment per rank that all can reach, its layout and its epochs
    signals     publish and await, on the device
    gather      all-gather -> GEMM          scatter    GEMM -> reduce-scatter, GEMM -> all-reduce
    function    the public functions        gathering  what layers ask of them
"""

from warpweave.kernels.overlap.function import (
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)

__all__ = ["all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter"]
