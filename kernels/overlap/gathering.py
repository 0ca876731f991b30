"""Fused communication in the form that layers use (overlap="fused").

The product's own kernel gathers its input, or sums its result over the ranks.

    column-parallel   forward    all-gather -> GEMM fused, this rank's shard first (`Gathering`)
                      backward   whole collectives hidden behind the GEMMs of dx and dW; if dW is
                                 deferred or not needed, GEMM -> reduce-scatter fused
    row-parallel      forward    GEMM -> reduce-scatter (or all-reduce) fused, with bias, dropout
                                 and residual after the sum
                      backward   all-gather -> GEMM fused; the gathered dy is also used for dW
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
    """All ranks' rows x[T, ..., K], of which this rank holds `shard`.

    The all-gather is part of the product's kernel (`all_gather_gemm`).

    Attributes:
        shard: x[T/W, ..., K] of this rank.
        memory: the group's symmetric memory.
        whole: x[T, ..., K] after a product has gathered it, None before.
    """

    def __init__(self, shard: torch.Tensor, memory: Memory) -> None:
        self.shard, self.memory = shard, memory
        self.whole: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """[T, ..., K]."""
        return torch.Size((self.memory.world * len(self.shard), *self.shard.shape[1:]))

    def arrived(self, whole: torch.Tensor) -> None:
        """Set `whole` to the rows that a product has gathered."""
        self.whole = whole.view(self.shape)


def check_fusing(impl: str | None) -> None:
    """Raise ValueError unless `impl`, once chosen, is Triton: only its kernels gather."""
    if impl == "torch":
        raise ValueError(
            "overlap='fused' needs Triton's kernels, got impl='torch' (the default on a CPU); pass "
            "impl='triton', or a different overlap"
        )


def multiply(
    x: torch.Tensor | Gathering,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    impl: str | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`fused_gemm` of the rows x[..., K] and b[K, N], or `all_gather_gemm` of a `Gathering`."""
    if not isinstance(x, Gathering):
        return fused_gemm(rows(x), b, bias, impl=impl, **options)
    y, z, whole = all_gather_gemm(rows(x.shard), b, bias, memory=x.memory, **options)
    x.arrived(whole)
    return y, z


def sum_of_products(
    a: torch.Tensor, b: torch.Tensor, memory: Memory, scatter: bool, **options: Any
) -> torch.Tensor:
    """a[T, ..., K] b[K, N] summed over the ranks.

    The sum is reduce-scattered to [T/R, ..., N] if `scatter`, else all-reduced to [T, ..., N].
    `options` are those of `gemm_reduce_scatter`.
    """
    product = gemm_reduce_scatter if scatter else gemm_all_reduce
    y = product(rows(a), b, memory=memory, **options)
    return y.view(len(a) // memory.world if scatter else len(a), *a.shape[1:-1], b.shape[1])
