"""Tensor ranks whose data moves within the kernels of the products: see `kernels.overlap`.

column-parallel   forward    all-gather -> GEMM, this rank's shard first
                  backward   whole collectives under the two products, as without; where dW is not
                             made now there is but one: GEMM -> reduce-scatter
row-parallel      forward    GEMM -> reduce-scatter, or -> all-reduce, and what follows the sum
                  backward   all-gather -> GEMM; the gathered dy serves dW, too
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from warpweave.kernels.dropout import Drop
from warpweave.kernels.overlap import gemm_all_reduce, gemm_reduce_scatter
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.runtime.wgrad import bias_gradient, rows, waits
from warpweave.parallel.symmetric import Workspace
from warpweave.parallel.tensor.ranks import Gradient, Made, TensorRanks


@dataclass(frozen=True)
class FusedRanks(TensorRanks):
    """`TensorRanks` over symmetric memory: of `workspace`, which all layers of the group share.

    All ranks have the same number of tokens and want the same gradients: which operation comes next
    follows from both.
    """

    workspace: Workspace = field(kw_only=True)

    def column_product(self, x: torch.Tensor, multiply: Callable[[Any, int], Made]) -> Made:
        return multiply(Gathering(x, self.workspace) if self.sequence_parallel else x, 0)

    def column_gradients(
        self,
        dz: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor,
        leaves: tuple[torch.Tensor, torch.Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[Gradient, Gradient, Gradient]:
        if not needs[0] or (needs[1] and not waits(leaves[0])):
            return super().column_gradients(dz, x, weight, leaves, needs)
        dx = self._sum_of_products(rows(dz), weight)
        _, dw, db = super().column_gradients(dz, x, weight, leaves, (False, *needs[1:]))
        return dx.view(self._own(dz), *dz.shape[1:-1], weight.shape[1]), dw, db

    def row_product(
        self,
        h: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        drop: Drop | None = None,
        residual: torch.Tensor | None = None,
        precision: str | None = None,
        impl: str | None = None,
    ) -> torch.Tensor:
        options = {"drop": drop, "residual": residual, "precision": precision}
        y = self._sum_of_products(rows(h), weight.t(), bias, **options)
        return y.view(self._own(h), *h.shape[1:-1], len(weight))

    def row_gradients(
        self,
        dy: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: Callable[[Any, int], Made],
    ) -> tuple[Made, torch.Tensor, Gradient]:
        if not self.sequence_parallel:
            return super().row_gradients(dy, bias, multiply)
        db = None if bias is None else bias_gradient(bias, dy)
        arriving = Gathering(dy, self.workspace)
        made = multiply(arriving, 0)
        whole = self.gather(dy) if arriving.whole is None else arriving.whole
        return made, whole, db

    def _own(self, x: torch.Tensor) -> int:
        """How many of the tokens of x[T, ...] are this rank's after a sum."""
        return len(x) // self.workspace.world if self.sequence_parallel else len(x)

    def _sum_of_products(self, *operands: Any, **options: Any) -> torch.Tensor:
        """The sum over ranks, of this rank's rows where tokens are cut."""
        fused = gemm_reduce_scatter if self.sequence_parallel else gemm_all_reduce
        return fused(*operands, memory=self.workspace, **options)
