"""What the Functions of fused linear layers share: the product, and the gradient of its weight.

    y[..., N] = x[..., K] W[N, K]^T + b[N]      dW = dy^T x      db: `runtime.wgrad.bias_gradient`

A weight may have more dims than two: W[F, 2, K] is rows F 2. Its gradient is made in its
``grad_dtype`` and goes through `runtime.wgrad`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from warpweave.kernels.gemm.fused import gemm, gemm_into
from warpweave.kernels.runtime.wgrad import grad_dtype, rows, wgrad


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
