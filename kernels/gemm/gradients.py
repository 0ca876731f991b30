"""What the Functions of fused linear layers share: gradients of weights and biases.

    y[..., N] = x[..., K] W[N, K]^T + b[N]      dW = dy^T x      db = sum over tokens of dy

Gradients of parameters are made in their ``grad_dtype`` (float32 if the parameter says so) and go
through ``wgrad``: where a pipeline schedule collects them they are made later, and where they have
a buffer of their own the product is added there. A weight may have more dims than two: W[F, 2, K]
is rows F 2. Sums over tokens are in float32 (float64 for float64), in one order: deterministic.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpweave.kernels.gemm.fused import gemm, gemm_into
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.wgrad import wgrad


def rows(x: torch.Tensor) -> torch.Tensor:
    """x[..., K] as [T, K]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])  # -1 is ambiguous without features


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x[..., K] weight[N, K]^T + bias[N] of one dtype, as `gemm` multiplies."""
    return gemm(rows(x), weight.t(), bias).view(*x.shape[:-1], weight.shape[0])


def grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype in which the gradient of a parameter is wanted."""
    # One computed from others (a weight norm, an adapter) has no say, and dynamo knows no say.
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # None means that any dtype will do


def leaf_of(parameter: torch.Tensor | None, *, bias: bool = False) -> torch.Tensor | None:
    """The leaf that `parameter` is a view of the whole of, or else `parameter` itself.

    Functions are given the leaf: through a view its gradient could be neither collected nor wider
    than the parameter, because autograd rounds it to the dtype of the view. They know a weight by
    its rows, so its leaf must have rows as long; that of a `bias` may have any shape.
    """
    if parameter is None or torch.compiler.is_compiling() or parameter.is_leaf:
        return parameter
    if parameter.grad_fn.name() != "ViewBackward0":
        return parameter
    leaf = getattr(parameter.grad_fn.next_functions[0][0], "variable", parameter)
    return leaf if bias or leaf.shape[-1:] == parameter.shape[-1:] else parameter


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


def bias_gradient(bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
    """db[N] = sum over tokens of dy[..., N], or None: see `wgrad`."""

    def make() -> torch.Tensor:
        total = rows(dy).sum(0, dtype=compute_dtype(dy))
        return total.to(grad_dtype(bias)).view(bias.shape)

    return wgrad(bias, make)
