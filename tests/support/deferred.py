"""A product whose weight gradient can be deferred (`kernels.runtime.wgrad`), in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from warpweave.kernels.runtime.wgrad import wgrad


class Product(torch.autograd.Function):
    """x @ w.T; `calls` counts backward passes."""

    calls = 0

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor | None]:
        Product.calls += 1
        x, weight = ctx.saved_tensors
        return dy @ weight, wgrad(weight, lambda: dy.T @ x)
