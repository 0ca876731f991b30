"""Row-parallel products whose terms are summed over the ranks within the product's own kernel.

What `overlap="fused"` does, see `kernels.overlap`:

column-parallel   forward    all-gather -> GEMM, this rank's shard first (`Gathering`)
                  backward   whole collectives under the two products; where dW is not made now
                             there is but one: GEMM -> reduce-scatter
row-parallel      forward    GEMM -> reduce-scatter, or -> all-reduce, and what follows the sum
                  backward   all-gather -> GEMM; the gathered dy serves dW, too
"""

from __future__ import annotations

from typing import Any

import torch

from warpweave.kernels.overlap import gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.runtime.wgrad import rows
from warpweave.parallel.symmetric import Workspace


def sum_of_products(
    a: torch.Tensor, b: torch.Tensor, workspace: Workspace, scatter: bool, **options: Any
) -> torch.Tensor:
    """The sum over ranks of a[T, ..., K] b[K, N]: [T/R, ..., N], this rank's tokens of it, if it is
    to be scattered, otherwise [T, ..., N]. `options` are those of `gemm_reduce_scatter`."""
    product = gemm_reduce_scatter if scatter else gemm_all_reduce
    y = product(rows(a), b, memory=workspace, **options)
    return y.view(len(a) // workspace.world if scatter else len(a), *a.shape[1:-1], b.shape[1])
