"""GELU and SwiGLU.

    gelu(x)   = x * Phi(x)                                  approximate="none", by erf
              ~ x * sigmoid(2 c (x + 0.044715 x^3))         "tanh", c = sqrt(2/pi):
                                                            1 + tanh(u) = 2 sigmoid(2 u)
    swiglu(x) = silu(gate) * up,   gate = x[..., 0::2], up = x[..., 1::2]

SwiGLU's gate and up are interleaved, x[..., 2F]: the fused projection's weight is (F, 2, E), so
that each slice of hidden units (x[T, 2F/tp]) holds matching gates and ups, and one pair is one load
here.

Saved for backward: the pre-activation x alone; everything else is recomputed from it. Computed in
float32 (float64 for float64 x), cast at the store.

Sources: Hendrycks and Gimpel 2016 (arXiv:1606.08415); Shazeer 2020 (arXiv:2002.05202).
Limits: a non-contiguous x is copied by the Triton path.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warpweave.kernels.dispatch import choose, tl, triton
from warpweave.kernels.numeric import to_dtype, upcast
from warpweave.kernels.reference import compute_dtype

_BLOCK = 2048  # elements of x per program: 16 per thread of 4 warps


# ---------------------------------------------------------------- device helpers


@triton.jit
def _sigmoids(x):
    """sigmoid(x) and sigmoid(-x): not 1 - sigmoid(x), which cancels where GELU's slope multiplies
    it by x^3.

    Nothing overflows on the way to zero (NumPy, which interprets, would warn).
    """
    e = tl.exp(-tl.maximum(x, -80.0))
    p = 1 / (1 + e)
    return p, e * p


@triton.jit
def gelu_value(x, TANH: tl.constexpr):
    """gelu(x) of a float32 (float64) tile; for epilogues of other kernels too."""
    if TANH:
        p, _ = _sigmoids(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * p
    else:
        return 0.5 * x * (1 + tl.math.erf(0.7071067811865476 * x))


@triton.jit
def gelu_slope(x, TANH: tl.constexpr):
    """The derivative of gelu at x."""
    if TANH:
        p, q = _sigmoids(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return p + x * p * q * (1.5957691216057308 + 0.21406444881780076 * x * x)
    else:
        phi = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1 + tl.math.erf(0.7071067811865476 * x)) + x * phi


# ---------------------------------------------------------------- GELU


@triton.jit
def _gelu_fwd_kernel(x_ptr, y_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = upcast(tl.load(x_ptr + i, i < n, 0.0))
    tl.store(y_ptr + i, to_dtype(gelu_value(x, TANH), y_ptr.dtype.element_ty), i < n)


@triton.jit
def _gelu_bwd_kernel(dy_ptr, x_ptr, dx_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = upcast(tl.load(x_ptr + i, i < n, 0.0))
    dx = upcast(tl.load(dy_ptr + i, i < n, 0.0)) * gelu_slope(x, TANH)
    tl.store(dx_ptr + i, to_dtype(dx, dx_ptr.dtype.element_ty), i < n)


def gelu_fwd(
    x: torch.Tensor, *, approximate: str = "tanh", impl: str | None = None
) -> torch.Tensor:
    """The forward half of `gelu`."""
    tanh = _is_tanh(approximate)
    if choose(impl, x) == "torch":
        return F.gelu(x, approximate=approximate)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n := x.numel():
        with torch.cuda.device_of(x):
            _gelu_fwd_kernel[(triton.cdiv(n, _BLOCK),)](x, y, n, tanh, _BLOCK, num_warps=4)
    return y


def gelu_bwd(
    dy: torch.Tensor, x: torch.Tensor, *, approximate: str = "tanh", impl: str | None = None
) -> torch.Tensor:
    """dx from dy and the pre-activation x: the backward half of `gelu`."""
    tanh = _is_tanh(approximate)
    if choose(impl, dy, x) == "torch":
        return torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if n := x.numel():
        with torch.cuda.device_of(x):
            _gelu_bwd_kernel[(triton.cdiv(n, _BLOCK),)](dy, x, dx, n, tanh, _BLOCK, num_warps=4)
    return dx


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("tanh", "none"):
        raise ValueError(f'approximate must be "tanh" or "none", got {approximate!r}')
    return approximate == "tanh"


@torch.library.custom_op("warpweave::gelu_fwd", mutates_args=())
def _gelu_fwd_op(x: torch.Tensor, approximate: str) -> torch.Tensor:
    return gelu_fwd(x, approximate=approximate, impl="triton")


@torch.library.custom_op("warpweave::gelu_bwd", mutates_args=())
def _gelu_bwd_op(dy: torch.Tensor, x: torch.Tensor, approximate: str) -> torch.Tensor:
    return gelu_bwd(dy, x, approximate=approximate, impl="triton")


@_gelu_fwd_op.register_fake
def _(x, approximate):
    return x.new_empty(x.shape)


@_gelu_bwd_op.register_fake
def _(dy, x, approximate):
    return x.new_empty(x.shape)


def _gelu_save(ctx, inputs, output) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


def _gelu_backward(ctx, dy):
    return _gelu_bwd_op(dy, *ctx.saved_tensors, ctx.approximate), None


_gelu_fwd_op.register_autograd(_gelu_backward, setup_context=_gelu_save)


# ---------------------------------------------------------------- SwiGLU


@triton.jit
def _swiglu_fwd_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, pair = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    x = upcast(tl.load(x_ptr + pair, pair < 2 * n, 0.0))
    gate, up = tl.split(x.reshape(BLOCK, 2))  # loaded flat: 128 bits at a time
    p, _ = _sigmoids(gate)
    y = gate * p * up
    tl.store(y_ptr + i, to_dtype(y, y_ptr.dtype.element_ty), i < n)


@triton.jit
def _swiglu_bwd_kernel(dy_ptr, x_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, pair = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    x = upcast(tl.load(x_ptr + pair, pair < 2 * n, 0.0))
    gate, up = tl.split(x.reshape(BLOCK, 2))
    dy = upcast(tl.load(dy_ptr + i, i < n, 0.0))
    p, q = _sigmoids(gate)
    dx = tl.join(dy * up * (p + gate * p * q), dy * gate * p).reshape(2 * BLOCK)
    tl.store(dx_ptr + pair, to_dtype(dx, dx_ptr.dtype.element_ty), pair < 2 * n)


def swiglu_fwd(x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """y[..., F] from the interleaved x[..., 2F]: the forward half of `swiglu`."""
    impl = choose(impl, x)
    _check_pairs(x)
    if impl == "torch":
        gate, up = x.to(compute_dtype(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return F.silu(gate).mul_(up).to(x.dtype)
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=x.dtype, device=x.device)
    if n := y.numel():
        with torch.cuda.device_of(x):
            _swiglu_fwd_kernel[(triton.cdiv(n, _BLOCK // 2),)](x, y, n, _BLOCK // 2, num_warps=4)
    return y


def swiglu_bwd(dy: torch.Tensor, x: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """dx[..., 2F] from dy[..., F] and the pre-activation x: the backward half of `swiglu`."""
    impl = choose(impl, dy, x)
    _check_pairs(x)
    if impl == "torch":
        dy, (gate, up) = dy.to(compute_dtype(x)), x.unflatten(-1, (-1, 2)).unbind(-1)
        gate = gate.to(dy.dtype).contiguous()
        dgate = torch.ops.aten.silu_backward(dy * up, gate)
        return torch.stack((dgate, F.silu(gate).mul_(dy)), -1).flatten(-2).to(x.dtype)
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    if n := dy.numel():
        with torch.cuda.device_of(x):
            _swiglu_bwd_kernel[(triton.cdiv(n, _BLOCK // 2),)](
                dy, x, dx, n, _BLOCK // 2, num_warps=4
            )
    return dx


def _check_pairs(x: torch.Tensor) -> None:
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(f"swiglu needs x[..., 2F] of gate, up pairs, got {[*x.shape]}")


@torch.library.custom_op("warpweave::swiglu_fwd", mutates_args=())
def _swiglu_fwd_op(x: torch.Tensor) -> torch.Tensor:
    return swiglu_fwd(x, impl="triton")


@torch.library.custom_op("warpweave::swiglu_bwd", mutates_args=())
def _swiglu_bwd_op(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return swiglu_bwd(dy, x, impl="triton")


@_swiglu_fwd_op.register_fake
def _(x):
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@_swiglu_bwd_op.register_fake
def _(dy, x):
    return x.new_empty(x.shape)


def _swiglu_save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _swiglu_backward(ctx, dy):
    return _swiglu_bwd_op(dy, *ctx.saved_tensors)


_swiglu_fwd_op.register_autograd(_swiglu_backward, setup_context=_swiglu_save)


class _SwiGLU(torch.autograd.Function):
    """The torch path: half the time of differentiating silu(gate) * up through strided views."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return swiglu_fwd(x, impl="torch")

    @staticmethod
    def backward(ctx, dy):
        return swiglu_bwd(dy, *ctx.saved_tensors, impl="torch")

    @staticmethod
    def spmd_typecheck(*, x):
        from spmd_types import rules

        # Pairs lie side by side: a shard of the output is the output of a shard.
        return rules.einsum("...f->...f", x)


# ---------------------------------------------------------------- public


def gelu(x: torch.Tensor, *, approximate: str = "tanh", impl: str | None = None) -> torch.Tensor:
    """GELU of x[...] (any sharding), by tanh or, approximate="none", by erf; differentiable.

    Raises ValueError on another `approximate`, or if `impl` cannot run.
    """
    _is_tanh(approximate)
    if choose(impl, x) == "triton":
        return _gelu_fwd_op(x, approximate)
    return F.gelu(x, approximate=approximate)


def swiglu(gate_up: torch.Tensor, *, impl: str | None = None) -> torch.Tensor:
    """silu(gate) * up: y[..., F] (F may be sharded) of interleaved gate_up[..., 2F];
    differentiable.

    Raises ValueError if the last dim is odd, or if `impl` cannot run.
    """
    if choose(impl, gate_up) == "triton":
        _check_pairs(gate_up)
        return _swiglu_fwd_op(gate_up)
    return _SwiGLU.apply(gate_up)
