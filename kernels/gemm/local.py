"""Products of a layer, split as in tensor parallelism, on one device.

    z[T, N] = x[T, K] W[N, K]^T + b        first product, column-parallel: sharded output features
    y[T, N] = h[T, K] W[N, K]^T + b        last product, row-parallel: sharded input features

A fused layer's Function calls four methods of its `ranks`, each a product with its collective:

    column_product      z, from all tokens of x (all-gather with sequence parallelism)
    column_gradients    dx = dz W, summed over ranks; dW, db
    row_product         y = h W^T, summed over ranks; then bias, dropout, residual
    row_gradients       dh = dy W, from all tokens of dy (all-gather with sequence parallelism)

The collective may run before the product, after it, in chunks of it, or within its kernel. A head
and its loss are a column-parallel product whose columns are the vocabulary. `Local` is one device
without collectives; `parallel.tensor.ranks.TensorRanks` is a group.

A weight may have more than two dims: the rows of W[F, 2, K] are F 2. Its gradient dW = dy^T x has
its ``grad_dtype`` and goes through `runtime.wgrad`, and so does db.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm.fused import fused_gemm, gemm, gemm_into
from warpweave.kernels.runtime.dispatch import choose
from warpweave.kernels.runtime.wgrad import bias_gradient, grad_dtype, rows, wgrad

_Made = TypeVar("_Made")
_Gradient = torch.Tensor | None


# ---------------------------------------------------------------- the product and its weight


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[..., K] weight[N, K]^T + bias[N] in one dtype, multiplied by `gemm`."""
    return gemm(rows(x), weight.t(), bias).view(*x.shape[:-1], weight.shape[0])


def weight_gradient(
    weight: torch.Tensor, operands: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor | None:
    """dW[N, K] = dy[..., N]^T x[..., K] with (dy, x) from ``operands()``, or None: see `wgrad`.

    `weight` is the parameter itself, not the tensor that autograd saved.
    """

    def make() -> torch.Tensor:
        dy, x = operands()
        return gemm(rows(dy).t(), rows(x), out_dtype=grad_dtype(weight)).view(weight.shape)

    def into(buffer: torch.Tensor, add: bool) -> None:
        dy, x = operands()
        gemm_into(rows(dy).t(), rows(x), buffer.view(-1, buffer.shape[-1]), add)

    return wgrad(weight, make, into)


# ---------------------------------------------------------------- communication around it


class Chunks(NamedTuple):
    """Options for gathering x[S, E], and summing its gradient dx, in chunks of tokens.

    A chunk consists of the same rows of every rank's S tokens, so that all ranks work on one chunk
    at a time. The default is one device.

    Attributes:
        parts: the ranks whose tokens form a chunk; T = parts S.
        fewest: the least number of chunks, unless there are fewer rows.
        start_gather: starts the gather of a rank's rows x[s, E]. Calling the result waits for the
            chunk and returns it as x[parts s, E], or as an `overlap.gathering.Gathering`.
        start_sum: starts the sum over ranks of a chunk's terms dx[parts s, E]. Calling the result
            waits for this rank's rows of the sum and returns them.
    """

    parts: int = 1
    fewest: int = 1
    start_gather: Callable[[torch.Tensor], Callable[[], Any]] = lambda x: lambda: x
    start_sum: Callable[[torch.Tensor], Callable[[], torch.Tensor]] = lambda terms: lambda: terms


class Local:
    """One device, with all tokens and all features."""

    def name(self, op: str) -> str:
        """The name of the op in error messages."""
        return op

    def column_product(self, x: torch.Tensor, multiply: Callable[[Any, int], _Made]) -> _Made:
        """Return ``multiply(x, 0)`` for all tokens x[T, ..., K].

        ``multiply(part, first)`` is tokenwise: it can be called for any run of tokens, starting at
        token `first`, and returns a tensor with as many rows, None, or a tuple of these. `part` is
        a tensor, or an `overlap.gathering.Gathering` of all tokens.
        """
        return multiply(x, 0)

    def column_gradients(
        self,
        dz: torch.Tensor,
        x: torch.Tensor | None,
        weight: torch.Tensor,
        leaves: tuple[torch.Tensor, torch.Tensor | None],
        needs: Sequence[bool],
    ) -> tuple[_Gradient, _Gradient, _Gradient]:
        """The gradients (dx, dW, db) of z = x W^T + b for which `needs` is true, else None.

        Args:
            dz: dz[T, ..., N] of all tokens.
            x: the argument of `column_product`; None if dW is not needed.
            weight: weight[N, K] in the dtype of dz; `leaves` are the leaf parameters of weight and
                bias.

        Returns:
            dx like x, in the dtype of dz or of its sum; dW and db are None if passed to `wgrad`.
        """
        leaf, bias = leaves
        dx = gemm(rows(dz), weight).view(*dz.shape[:-1], weight.shape[1]) if needs[0] else None
        dw = weight_gradient(leaf, lambda: (dz, x)) if needs[1] else None
        return dx, dw, bias_gradient(bias, dz) if needs[2] else None

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
        """residual + dropout(h[T, ..., K] weight[N, K]^T + bias[N]), in the dtype of h.

        `drop`, `residual`, `precision` and `impl` are those of `fused_gemm`.
        """
        flat, bias = rows(h), None if bias is None else bias.to(h.dtype)
        if choose(impl, flat) == "triton" and not (drop is None and residual is None):
            options = {"drop": drop, "residual": residual, "precision": precision, "impl": impl}
            y, _ = fused_gemm(flat, weight.t(), bias, **options)
        else:  # separate torch ops, which a compiler fuses
            y = gemm(flat, weight.t(), bias)
            y = y if drop is None else dropout(y, drop, impl="torch")
            y = y if residual is None else y.add_(residual)
        return y.view(*h.shape[:-1], len(weight))

    def row_gradients(
        self,
        dy: torch.Tensor,
        bias: torch.Tensor | None,
        multiply: Callable[[Any, int], _Made],
    ) -> tuple[_Made, torch.Tensor, _Gradient]:
        """(``multiply(dy, 0)``, which computes dh; dy[T, ..., N] of all tokens; db).

        `multiply` is tokenwise, as in `column_product`. `bias` is the leaf parameter whose gradient
        is needed, or None; db is the sum over this rank's tokens.
        """
        db = None if bias is None else bias_gradient(bias, dy)
        return multiply(dy, 0), dy, db

    # For a loss over a vocabulary that is sharded over the ranks.

    def first_column(self, width: int) -> int:
        """The index of the first of this rank's `width` columns."""
        return 0

    def merge(self, stats: torch.Tensor) -> torch.Tensor:
        """stats[k, N] (lse, target and, with smoothing, logit_sum) merged over the ranks."""
        return stats

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of x."""
        return x

    def sum(self, terms: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of terms[T, ...] summed over the ranks."""
        return terms

    def term_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a rank's terms of a dx of `dtype`."""
        return dtype

    @property
    def chunks(self) -> Chunks | None:
        """The chunks of head and loss if the forward computes the gradients; None is one chunk."""
        return None

    # Typing rules of the collectives.

    def column_input_type(self, x: Any) -> Any:
        """The type of x in `column_product`, whose gradient `column_gradients` sums."""
        return x

    def row_output_type(self, y: Any) -> Any:
        """The type of the sum in `row_product` before the bias, given that of a rank's term."""
        return y

    def row_tokens_type(self, tokens: Any) -> Any:
        """The type of the tokens that key the dropout of the output of `row_product`."""
        return tokens

    def loss_type(self, equation: str, *operands: Any) -> Any:
        """The type of losses, given their einsum, in which v is the vocabulary."""
        from spmd_types import rules

        return rules.einsum(equation.replace("v", "_"), *operands)  # v is not sharded


LOCAL = Local()
