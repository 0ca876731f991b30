"""Compute dtypes of ops and calls, and the casts and products inside kernels.

Autocast must not change a dtype within a Function, where dtypes are already settled. Triton's
interpreter stores bfloat16 as bare 16-bit patterns: arithmetic and `tl.dot` on them return garbage,
and a float32 -> bfloat16 cast truncates (Triton 3.4 to 3.9, triton#11584). So a kernel
  * loads through `upcast` (float32, or float64 for float64 tensors) before any arithmetic,
  * multiplies matrices through `dot`,
  * casts through `to_dtype`, also right before `tl.store` (its implicit cast also truncates).
On a GPU `dot` is `tl.dot` and `to_dtype` is `.to`: the branches are decided at compile time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from warpweave.kernels.runtime import dispatch
from warpweave.kernels.runtime.dispatch import tl, triton

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that ops compute in."""

DTYPES = (*FLOATS, torch.int64, torch.int32)
"""Every dtype that ranks send to each other. On the wire it is one byte, its index in this list, so
append new ones."""

NAMED_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The dtype names used in options, layouts, and tables."""


def is_autocast(x: torch.Tensor) -> bool:
    """Return True if autocast is on for x's device; torch has no autocast for meta tensors."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def operand_dtype(
    name: str, x: torch.Tensor, parameters: Mapping[str, torch.Tensor | None]
) -> torch.dtype:
    """The dtype to compute in: autocast's, or the one that x and its parameters share.

    Raises ValueError, with `name` in the message, if there is no such dtype.
    """
    if is_autocast(x) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    if any(p is not None and p.dtype != x.dtype for p in parameters.values()):
        found = ", ".join(f"{k} {p.dtype}" for k, p in parameters.items() if p is not None)
        raise ValueError(f"{name}: dtypes differ: x {x.dtype}, {found}")
    return x.dtype


def no_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """A context that turns autocast off on x's device: inside a Function the dtypes are settled."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast(x) else nullcontext()


def check_integers(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless x is an int64 or int32 tensor, as ids and positions must be."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor of integers, got {type(x).__name__}")
    if x.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be an int64 or int32 tensor, got {x.dtype}")


# ---------------------------------------------------------------- inside kernels

_INTERPRET = tl.constexpr(dispatch.INTERPRET)
_IEEE = tl.constexpr("ieee")  # Triton 3.6 does not accept a bare string as a default


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr = _IEEE):
    """acc + a @ b; `acc` is float32 (float64 for float64 operands), a and b have one dtype.

    PRECISION matters for float32 operands on a GPU only: "ieee" (exact products), "tf32" or
    "tf32x3".
    """
    if _INTERPRET:
        return tl.dot(a.to(acc.dtype), b.to(acc.dtype), acc, out_dtype=acc.dtype)
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def to_dtype(x, DTYPE: tl.constexpr):
    """x cast to DTYPE, rounding to nearest even; NaN stays NaN.

    For a store: ``tl.store(p, to_dtype(v, p.dtype.element_ty), mask)``.
    """
    if _INTERPRET and tl.bfloat16 == DTYPE and x.dtype != tl.bfloat16:
        value = x.to(tl.float32)
        bits = value.to(tl.int32, bitcast=True)
        nearest_even = bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding could carry a NaN's payload into infinity or zero: keep it, quiet bit set.
        bits = tl.where(value != value, bits | 0x400000, nearest_even) >> 16
        return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)  # a cast would flush subnormals
    else:
        return x.to(DTYPE)


@triton.jit
def upcast(x):
    """Cast x to the compute dtype: float64 stays, every other float becomes float32."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)
