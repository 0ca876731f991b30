"""A layer's first and last product, and its loss, on one device, as tensor parallelism sees them.

    z[T, N] = x[T, K] W[N, K]^T + b        the first: column-parallel, by output features
    y[T, N] = h[T, K] W[N, K]^T + b        the last: row-parallel, by input features

Over ranks the first needs all tokens of x, and dx is a sum over ranks; y is a sum, and the backward
of the last needs all tokens of dy. A fused layer's Function asks its `ranks` for these four, each a
product together with what moves around it, so that the move may run before it, after it, in chunks
of it or within its kernel. A head and its loss are a column-parallel product whose columns are the
vocabulary. `Local` moves nothing; `parallel.tensor.ranks` has the one that does.

A weight may have more dims than two: W[F, 2, K] is rows F 2. Its gradient dW = dy^T x is made in
its ``grad_dtype`` and goes through `runtime.wgrad`, as db does.
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
    """x[..., K] weight[N, K]^T + bias[N] of one dtype, as `gemm` multiplies."""
    return gemm(rows(x), weight.t(), bias).view(*x.shape[:-1], weight.shape[0])


def weight_gradient(
    weight: torch.Tensor, operands: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor | None:
    """dW[N, K] = dy[..., N]^T x[..., K] with (dy, x) from ``operands()``, or None: see `wgrad`.

    `weight` is the parameter itself, not what a saved tensor came back as.
    """

    def make() -> torch.Tensor:
        dy, x = operands()
        return gemm(rows(dy).t(), rows(x), out_dtype=grad_dtype(weight)).view(weight.shape)

    def into(buffer: torch.Tensor, add: bool) -> None:
        dy, x = operands()
        gemm_into(rows(dy).t(), rows(x), buffer.view(-1, buffer.shape[-1]), add)

    return wgrad(weight, make, into)


# ---------------------------------------------------------------- what moves around it


class Chunks(NamedTuple):
    """How rows of x[S, E] come to a product and those of its gradient dx go, some at a time.

    A chunk is the same rows of every rank's S tokens, so that all ranks work on one at a time. By
    default one device has all of them.

    Attributes:
        parts: ranks whose tokens make a chunk; T = parts S.
        fewest: chunks, where there are as many rows.
        start_gather: of a rank's rows x[s, E]: what waits for, and gives, the chunk x[parts s, E]
            or an `overlap.gathering.Gathering` of it.
        start_sum: of a chunk's terms dx[parts s, E]: what waits for, and gives, this rank's rows of
            their sum over the ranks.
    """

    parts: int = 1
    fewest: int = 1
    start_gather: Callable[[torch.Tensor], Callable[[], Any]] = lambda x: lambda: x
    start_sum: Callable[[torch.Tensor], Callable[[], torch.Tensor]] = lambda terms: lambda: terms


class Local:
    """One device: it has all tokens and all features."""

    def name(self, op: str) -> str:
        """What errors call the op."""
        return op

    def column_product(self, x: torch.Tensor, multiply: Callable[[Any, int], _Made]) -> _Made:
        """``multiply(x, 0)`` of all tokens x[T, ..., K].

        ``multiply(part, first)`` works on each token by itself, so on any run of tokens that begins
        at `first`, and gives a tensor of as many rows, None, or a tuple of these. A part is a
        tensor, or an `overlap.gathering.Gathering` of all tokens.
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
        """The gradients (dx, dW, db) of z = x W^T + b that `needs` says are wanted.

        Args:
            dz: dz[T, ..., N] of all tokens.
            x: what `column_product` was given; None if dW is not wanted.
            weight: weight[N, K] in the dtype of dz; `leaves` are those of weight and bias.

        Returns:
            dx like x, in the dtype of dz or of its sum; dW and db may have gone elsewhere
            (`wgrad`).
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
        else:  # by torch one after the other: a compiler fuses them
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
        """``multiply(dy, 0)``, with it dh, and dy[T, ..., N], both of all tokens; and db.

        `multiply` is as for `column_product`: it works on each token by itself. `bias` is the leaf
        whose gradient is wanted, or None: db is the sum of this rank's tokens.
        """
        db = None if bias is None else bias_gradient(bias, dy)
        return multiply(dy, 0), dy, db

    # What a loss asks of the ranks that have columns of the vocabulary each.

    def first_column(self, width: int) -> int:
        """The first of this rank's `width` columns."""
        return 0

    def merge(self, stats: torch.Tensor) -> torch.Tensor:
        """This rank's stats[k, N] (lse, target and, with smoothing, logit_sum) combined with those
        of the others."""
        return stats

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of x."""
        return x

    def sum(self, terms: torch.Tensor) -> torch.Tensor:
        """The sum of the ranks' terms[T, ...], this rank's tokens of it."""
        return terms

    def term_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of a rank's terms of a dx of this dtype."""
        return dtype

    @property
    def chunks(self) -> Chunks | None:
        """How a head and loss whose forward makes the gradients moves x and dx; None is whole."""
        return None

    # What typing rules say of the moves.

    def column_input_type(self, x: Any) -> Any:
        """The type of x in `column_product`, whose gradient `column_gradients` sums."""
        return x

    def row_output_type(self, y: Any) -> Any:
        """The type of the product in `row_product`, before its bias, from that of a rank's term."""
        return y

    def row_tokens_type(self, tokens: Any) -> Any:
        """The type of the tokens by which the output of `row_product` is dropped out."""
        return tokens

    def loss_type(self, equation: str, *operands: Any) -> Any:
        """The type of losses whose einsum over the columns v of the vocabulary is `equation`."""
        from spmd_types import rules

        return rules.einsum(equation.replace("v", "_"), *operands)  # v is whole


LOCAL = Local()
