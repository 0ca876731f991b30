"""Fused communication and GEMM in Triton kernels over symmetric memory.

The operations are all-gather -> GEMM, GEMM -> reduce-scatter and GEMM -> all-reduce.

    symmetric   the memory: a segment per rank that all ranks can read and write, flags, epochs
    signals     publish and await flags within a kernel
    gather      all-gather -> GEMM          scatter    GEMM -> reduce-scatter, GEMM -> all-reduce
    gathering   the form for layers: the gathered input of a column-parallel product, and the summed
                result of a row-parallel one
    function    the public functions and their checks
"""

from warpweave.kernels.overlap.function import (
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)

__all__ = ["all_gather_gemm", "gemm_all_reduce", "gemm_reduce_scatter"]
