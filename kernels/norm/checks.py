"""The arguments of a norm: checked once, and as its kernels take them.

Everything here is decided on the host from shapes, dtypes and Python numbers. `function` documents
what the arguments mean.
"""

from __future__ import annotations

import torch

from warpweave.kernels.runtime.dispatch import triton


def check_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    x_bias: torch.Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Raise ValueError unless weight, bias and x_bias are [E], E > 0, of x[..., E], residual is
    like x, all have float dtypes, and eps is not negative."""
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if weight is None:
        raise ValueError("weight must be [E] of x[..., E], got None: ones(E) scale nothing")
    if x.ndim == 0 or weight.shape != x.shape[-1:] or x.shape[-1] == 0:
        raise ValueError(f"weight must be [E] of x[..., E], got {[*weight.shape]}, x {[*x.shape]}")
    for name, v in (("bias", bias), ("x_bias", x_bias)):
        if v is not None and v.shape != weight.shape:
            raise ValueError(f"{name} must be like weight {[*weight.shape]}, got {[*v.shape]}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must be like x {[*x.shape]}, got {[*residual.shape]}")
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "x_bias": x_bias}
    for name, v in given.items():
        if v is not None and not v.dtype.is_floating_point:
            raise ValueError(f"{name} must have a float dtype, got {v.dtype}")


def stream_dtype(x: torch.Tensor, residual: torch.Tensor | None) -> torch.dtype:
    """The dtype of s: the wider of those of x and residual."""
    return x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)


def tile_of(E: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_E and num_warps: 16 elements per thread, several rows per program if rows are
    short."""
    block = max(4, triton.next_power_of_2(E))  # dropout draws four columns at a time
    rows = max(1, 2048 // block)
    return rows, block, max(4, rows * block // 512)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x as [rows, E] with contiguous rows: a view where strides allow it."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()
