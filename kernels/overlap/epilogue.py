"""What follows an overlapped product: bias, activation, dropout, residual, as `gemm.fused_gemm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warpweave.kernels.activation import find_activation
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm.fused import _check_epilogue, _epilogue, find_precision
from warpweave.kernels.gemm.product import halves
from warpweave.kernels.runtime.dispatch import tl, triton


@triton.jit
def finish(
    y,
    bias_ptr,
    z_ptr,
    tokens_ptr,
    residual_ptr,
    y_ptr,
    seed,
    site,
    m,
    col,
    M,
    N,
    stride_rm,
    stride_rn,
    DTYPE: tl.constexpr,
    CURVE: tl.constexpr,
    GATED: tl.constexpr,
    THRESHOLD: tl.constexpr,
    SCALE: tl.constexpr,
):
    """Store the accumulators at rows m and columns from `col`, a quarter at a time (registers)."""
    STEP: tl.constexpr = y.shape[1] // 4
    OUT: tl.constexpr = 2 if GATED else 1
    left, right = halves(y)
    first, second = halves(left)
    third, fourth = halves(right)
    width = N // OUT
    _epilogue(
        first, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col,
        M, N, stride_rm, stride_rn, width, 1, DTYPE, CURVE, GATED, THRESHOLD, SCALE, False,
    )  # fmt: skip
    _epilogue(
        second, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + STEP,
        M, N, stride_rm, stride_rn, width, 1, DTYPE, CURVE, GATED, THRESHOLD, SCALE, False,
    )  # fmt: skip
    _epilogue(
        third, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 2 * STEP,
        M, N, stride_rm, stride_rn, width, 1, DTYPE, CURVE, GATED, THRESHOLD, SCALE, False,
    )  # fmt: skip
    _epilogue(
        fourth, bias_ptr, z_ptr, tokens_ptr, residual_ptr, y_ptr, seed, site, m, col + 3 * STEP,
        M, N, stride_rm, stride_rn, width, 1, DTYPE, CURVE, GATED, THRESHOLD, SCALE, False,
    )  # fmt: skip


@dataclass(frozen=True)
class Epilogue:
    """residual + dropout(act(product + bias)), each optional; with `keep` act's argument is kept.

    Its tensors are those of the rows that are stored: residual [M, N], drop.tokens [M].
    """

    bias: torch.Tensor | None = None
    activation: str | None = None
    keep: bool = False
    drop: Drop | None = None
    residual: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    precision: str | None = None

    def check(self, shape: tuple[int, int]) -> None:
        """Raise ValueError unless it can follow [M, N] = `shape` products."""
        gated = self.activation is not None and find_activation(self.activation).gated
        if gated and shape[1] % 2:
            raise ValueError(f"{self.activation} needs b[K, 2F] of gate, up pairs, got {shape[1]}")
        if self.keep and self.activation is None:
            raise ValueError("keep=True keeps the argument of an activation: activation is None")
        _check_epilogue((shape[0], shape[1] // 2 if gated else shape[1]), self.drop, self.residual)
        find_precision(self.precision)

    def outputs(self, a: torch.Tensor, N: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Empty y[M, N or N / 2] and z[M, N] or None for the rows of a[M, K]."""
        gated = self.activation is not None and find_activation(self.activation).gated
        dtype = a.dtype if self.out_dtype is None else self.out_dtype
        z = a.new_empty(a.shape[0], N) if self.keep else None
        return a.new_empty(a.shape[0], N // 2 if gated else N, dtype=dtype), z

    def pointers(self, z: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """bias, z, tokens and residual as the kernels take them."""
        bias = None if self.bias is None else self.bias.contiguous()
        tokens = None if self.drop is None else self.drop.tokens.contiguous()
        return bias, z, tokens, self.residual

    def key(self) -> tuple[int, int]:
        """The dropout's seed and site."""
        return (0, 0) if self.drop is None else (self.drop.seed, self.drop.site)

    def strides(self) -> tuple[int, int]:
        """Of the residual."""
        return (0, 0) if self.residual is None else self.residual.stride()

    def constants(self) -> tuple[str | None, bool, int, float]:
        """CURVE, GATED, THRESHOLD and SCALE."""
        name, gated = (None, False) if self.activation is None else find_activation(self.activation)
        p = 0.0 if self.drop is None else self.drop.p
        return name, gated, round(p * 2**32), 1 / (1 - p)

    def multiplies(self) -> str:
        """How float32 is multiplied."""
        return find_precision(self.precision)
