"""What layers ask of overlapped products: rows on their way, which a column-parallel product is
given instead of all tokens, and sums over ranks within a row-parallel product's own kernel.

column-parallel   forward    all-gather -> GEMM, this rank's shard first (`Gathering`)
                  backward   whole collectives under the two products; where dW is not made now
                             there is but one: GEMM -> reduce-scatter
row-parallel      forward    GEMM -> reduce-scatter, or -> all-reduce, and what follows the sum
                  backward   all-gather -> GEMM; the gathered dy serves dW, too
"""

from __future__ import annotations

from typing import Any

import torch

from warpweave.kernels.gemm.fused import fused_gemm
from warpweave.kernels.overlap.function import (
    all_gather_gemm,
    gemm_all_reduce,
    gemm_reduce_scatter,
)
from warpweave.kernels.overlap.symmetric import Memory
from warpweave.kernels.runtime.wgrad import rows


class Gathering:
    """The rows of all ranks, of which this rank has `shard`: a product gathers them under itself.

    Attributes:
        shard: x[T/W, ..., K] of this rank.
        memory: the group's symmetric memory.
        whole: x[T, ..., K], once a product has gathered it.
    """

    def __init__(self, shard: torch.Tensor, memory: Memory) -> None:
        self.shard, self.memory = shard, memory
        self.whole: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """That of the whole."""
        return torch.Size((self.memory.world * len(self.shard), *self.shard.shape[1:]))

    def arrived(self, whole: torch.Tensor) -> None:
        """Keep what a product has gathered, as [T ..., K]."""
        self.whole = whole.view(self.shape)


def check_fusing(impl: str | None) -> None:
    """Raise ValueError if a product under which rows are gathered is not to be Triton's."""
    if impl == "torch":
        raise ValueError(
            "overlap='fused' is within Triton's kernels, and impl is 'torch' here (what None is on "
            "a CPU): pass impl='triton', or another overlap"
        )


def multiply(
    x: torch.Tensor | Gathering,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_gemm` of the rows of x[..., K] and b[K, N], which are gathered if they are to be."""
    if not isinstance(x, Gathering):
        return fused_gemm(rows(x), b, bias, impl=impl, **options)
    y, z, whole = all_gather_gemm(rows(x.shard), b, bias, memory=x.memory, **options)
    x.arrived(whole)
    return y, z


def sum_of_products(
    a: torch.Tensor, b: torch.Tensor, memory: Memory, scatter: bool, **options: Any
) -> torch.Tensor:
    """a[T, ..., K] b[K, N] summed over the ranks: reduce-scattered to [T/R, ..., N] if `scatter`,
    else all-reduced to [T, ..., N]. `options` are those of `gemm_reduce_scatter`."""
    product = gemm_reduce_scatter if scatter else gemm_all_reduce
    y = product(rows(a), b, memory=memory, **options)
    return y.view(len(a) // memory.world if scatter else len(a), *a.shape[1:-1], b.shape[1])
