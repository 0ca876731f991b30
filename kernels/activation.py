"""The activations of feed-forward layers: GELU, squared ReLU, and the gated SwiGLU and GeGLU.

    gelu(x)   = x * Phi(x)                                  "gelu_erf", by erf
              ~ x * sigmoid(2 c (x + 0.044715 x^3))         "gelu", by tanh, c = sqrt(2/pi):
                                                            1 + tanh(u) = 2 sigmoid(2 u)
    relu2(x)  = max(x, 0)^2
    swiglu(x) = silu(gate) * up,   gate = x[..., 0::2], up = x[..., 1::2]
    geglu(x)  = gelu(gate) * up    (by tanh)

Gate and up are interleaved in x[..., 2F], because the fused projection's weight is (F, 2, E). Each
shard of hidden units (x[T, 2F/tp]) then holds matching gates and ups, and a pair is one load.

Only the pre-activation x is saved for backward; everything else is recomputed from it. Kernels
compute in float32 (float64 for float64 x) and cast at the store. The device helpers `pointwise` and
`pointwise_and_slope` are also used in the epilogues of `gemm` and `mlp`.

Sources: Hendrycks and Gimpel 2016 (arXiv:1606.08415); So et al. 2021 (arXiv:2109.08668) for the
squared ReLU; Shazeer 2020 (arXiv:2002.05202). Limits: the Triton path copies a non-contiguous x.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import (
    choose,
    no_graph,
    once_differentiable,
    refuse_tangents,
    tl,
    triton,
)
from warpweave.kernels.runtime.dtypes import to_dtype, upcast
from warpweave.kernels.runtime.op import operator
from warpweave.kernels.words import ACTIVATIONS, find_activation

_BLOCK = 2048  # elements of x per program: 16 per thread of 4 warps

RECOMPUTE = ("nothing", "activation", "up")
"""What the backward of an MLP may recompute instead of keeping; see ``kernels.mlp``."""


# ---------------------------------------------------------------- device helpers


@triton.jit
def _sigmoids(y):
    """sigmoid(x) and sigmoid(-x) for x = -y ln 2.

    sigmoid(-x) is not computed as 1 - sigmoid(x), which would cancel when GELU's slope multiplies
    it by x^3. The square of a reciprocal root takes two instructions, a quotient eight; both are
    accurate to two units of float32.

    Nothing overflows on the way to zero (NumPy, which the interpreter uses, would warn).
    """
    e = tl.exp2(tl.minimum(y, 115.0))
    root = tl.rsqrt(1 + e)
    p = root * root
    return p, e * p


@triton.jit
def _tanh_sigmoids(x):
    """The sigmoid of GELU's tanh form at x and at -x."""
    return _sigmoids(x * (-2.302208198144325 - 0.1029432395800235 * x * x))


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """gelu(x) of a float32 (or float64) tile."""
    if TANH:
        p, _ = _tanh_sigmoids(x)
        return x * p
    else:
        return 0.5 * x * (1 + tl.math.erf(0.7071067811865476 * x))


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr):
    """The derivative of gelu at x."""
    if TANH:
        p, q = _tanh_sigmoids(x)
        return p + x * p * q * (1.5957691216057308 + 0.21406444881780076 * x * x)
    else:
        phi = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        return 0.5 * (1 + tl.math.erf(0.7071067811865476 * x)) + x * phi


@triton.jit
def pointwise(x, ACT: tl.constexpr):
    """The function that an `Activation` names, of a float32 (or float64) tile."""
    if ACT == "silu":
        p, _ = _sigmoids(-1.4426950408889634 * x)
        return x * p
    elif ACT == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive
    else:
        tl.static_assert(ACT == "gelu" or ACT == "gelu_erf")
        return _gelu(x, ACT == "gelu")


@triton.jit
def pointwise_and_slope(x, ACT: tl.constexpr):
    """`pointwise` and its derivative at x."""
    if ACT == "silu":
        p, q = _sigmoids(-1.4426950408889634 * x)
        value = x * p
        return value, p + value * q
    elif ACT == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2 * positive
    else:
        tl.static_assert(ACT == "gelu" or ACT == "gelu_erf")
        return _gelu(x, ACT == "gelu"), _gelu_slope(x, ACT == "gelu")


# ---------------------------------------------------------------- one input, one output


@triton.jit
def _pointwise_fwd_kernel(x_ptr, y_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = upcast(tl.load(x_ptr + i, i < n, 0.0))
    tl.store(y_ptr + i, to_dtype(pointwise(x, ACT), y_ptr.dtype.element_ty), i < n)


@triton.jit
def _pointwise_bwd_kernel(dy_ptr, x_ptr, dx_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = upcast(tl.load(x_ptr + i, i < n, 0.0))
    _, slope = pointwise_and_slope(x, ACT)
    dx = upcast(tl.load(dy_ptr + i, i < n, 0.0)) * slope
    tl.store(dx_ptr + i, to_dtype(dx, dx_ptr.dtype.element_ty), i < n)


# ---------------------------------------------------------------- gate and up


@triton.jit
def _gated_fwd_kernel(x_ptr, y_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, pair = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    x = upcast(tl.load(x_ptr + pair, pair < 2 * n, 0.0))
    gate, up = tl.split(x.reshape(BLOCK, 2))  # loaded flat: 128 bits at a time
    tl.store(y_ptr + i, to_dtype(pointwise(gate, ACT) * up, y_ptr.dtype.element_ty), i < n)


@triton.jit
def _gated_bwd_kernel(dy_ptr, x_ptr, dx_ptr, n, ACT: tl.constexpr, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    i, pair = start + tl.arange(0, BLOCK), 2 * start + tl.arange(0, 2 * BLOCK)
    x = upcast(tl.load(x_ptr + pair, pair < 2 * n, 0.0))
    gate, up = tl.split(x.reshape(BLOCK, 2))
    dy = upcast(tl.load(dy_ptr + i, i < n, 0.0))
    value, slope = pointwise_and_slope(gate, ACT)
    dx = tl.join(dy * up * slope, dy * value).reshape(2 * BLOCK)
    tl.store(dx_ptr + pair, to_dtype(dx, dx_ptr.dtype.element_ty), pair < 2 * n)


# ---------------------------------------------------------------- launchers


_APPROXIMATE = {"gelu": "tanh", "gelu_erf": "none"}  # torch's names for them


def _gelu_sigmoids(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x in the compute dtype, and GELU's sigmoid at x and at -x.

    The constant 2 sqrt(2 / pi), its slope at 0, is written out here and in `_gradient`: compilers
    with dynamic shapes turn a module-level float into a symbol, and a second call of an autograd
    Function does not accept one.
    """
    z = x.to(compute_dtype(x))
    e = torch.exp((-1.5957691216057308 * (z + 0.044715 * z * z * z)).clamp(max=80.0))
    p = (1 + e).reciprocal()
    return z, p, e * p


def _value(x: torch.Tensor, name: str) -> torch.Tensor:
    """The elementwise function, using torch's fused operators.

    Under a compiler, GELU is written out as in the kernels: on a CPU, inductor's tanh takes six
    times as long as its exp, and it fuses the rest.
    """
    if name == "silu":
        return F.silu(x)
    if name == "relu2":
        return F.relu(x).square()
    if name == "gelu" and torch.compiler.is_compiling():
        z, p, _ = _gelu_sigmoids(x)
        return (z * p).to(x.dtype)
    return F.gelu(x, approximate=_APPROXIMATE[name])


def _gradient(dy: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """dy times the derivative at x."""
    if name == "gelu" and torch.compiler.is_compiling():
        z, p, q = _gelu_sigmoids(x)
        return (dy * (p + z * p * q * 1.5957691216057308 * (1 + 0.134145 * z * z))).to(dy.dtype)
    if name == "silu":
        return torch.ops.aten.silu_backward(dy, x)
    if name == "relu2":
        return F.relu(x).mul_(2).mul_(dy)
    return torch.ops.aten.gelu_backward(dy, x, approximate=_APPROXIMATE[name])


@no_graph
def activation_fwd(x: torch.Tensor, activation: str, *, impl: str | None = None) -> torch.Tensor:
    """Forward half: y[..., F] from x[..., F], or from x[..., 2F] if the activation is gated."""
    impl, (name, gated) = choose(impl, x), find_activation(activation)
    if gated:
        _check_pairs(x, activation)
    if impl == "torch" and gated:
        gate, up = x.to(compute_dtype(x)).unflatten(-1, (-1, 2)).unbind(-1)
        return _value(gate, name).mul_(up).to(x.dtype)
    if impl == "torch":
        return _value(x, name)
    x = x.contiguous()
    y = x.new_empty(_out_shape(x, gated))
    kernel, block = (_gated_fwd_kernel, _BLOCK // 2) if gated else (_pointwise_fwd_kernel, _BLOCK)
    if n := y.numel():
        with torch.cuda.device_of(x):
            kernel[(triton.cdiv(n, block),)](x, y, n, name, block, num_warps=4)
    return y


@no_graph
def activation_bwd(
    dy: torch.Tensor, x: torch.Tensor, activation: str, *, impl: str | None = None
) -> torch.Tensor:
    """Backward half: dx from dy and the pre-activation x."""
    impl, (name, gated) = choose(impl, dy, x), find_activation(activation)
    if gated:
        _check_pairs(x, activation)
    if dy.shape != _out_shape(x, gated):
        raise ValueError(
            f"dy must have the shape of {activation}(x) for x {[*x.shape]}, got {[*dy.shape]}"
        )
    if impl == "torch" and gated:
        dy, (gate, up) = dy.to(compute_dtype(x)), x.unflatten(-1, (-1, 2)).unbind(-1)
        gate = gate.to(dy.dtype).contiguous()
        dgate = _gradient(dy * up, gate, name)
        return torch.stack((dgate, _value(gate, name).mul_(dy)), -1).flatten(-2).to(x.dtype)
    if impl == "torch":
        return _gradient(dy, x, name)
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    kernel, block = (_gated_bwd_kernel, _BLOCK // 2) if gated else (_pointwise_bwd_kernel, _BLOCK)
    if n := dy.numel():
        with torch.cuda.device_of(x):
            kernel[(triton.cdiv(n, block),)](dy, x, dx, n, name, block, num_warps=4)
    return dx


def _out_shape(x: torch.Tensor, gated: bool) -> torch.Size:
    return torch.Size((*x.shape[:-1], x.shape[-1] // 2)) if gated else x.shape


def _check_pairs(x: torch.Tensor, activation: str) -> None:
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ValueError(
            f"{activation} needs x[..., 2F] with gate and up interleaved, got {[*x.shape]}"
        )


# ---------------------------------------------------------------- autograd


def _save_activation(ctx, inputs, output) -> None:
    x, ctx.activation = inputs
    ctx.save_for_backward(x)


def _activation_backward(ctx, dy):
    return activation_bwd_op(dy, *ctx.saved_tensors, ctx.activation)


def _activation_fake(x, activation):
    return x.new_empty(_out_shape(x, ACTIVATIONS[activation].gated))


@operator(
    "activation_fwd",
    _activation_fake,
    gradient=(_save_activation, _activation_backward),
    sharding="... -> ...",
)
def activation_op(x: torch.Tensor, activation: str) -> torch.Tensor:
    """The Triton path of `activate`."""
    return activation_fwd(x, activation, impl="triton")


@operator(
    "activation_bwd", lambda dy, x, activation: x.new_empty(x.shape), sharding="..., ... -> ..."
)
def activation_bwd_op(dy: torch.Tensor, x: torch.Tensor, activation: str) -> torch.Tensor:
    """The gradient of `activation_op`."""
    return activation_bwd(dy, x, activation, impl="triton")


class _Gated(torch.autograd.Function):
    """The torch path of both gated activations, twice as fast as autograd through strided
    views."""

    @staticmethod
    def forward(ctx, x, activation="swiglu"):
        ctx.activation = activation
        ctx.save_for_backward(x)
        return activation_fwd(x, activation, impl="torch")

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return activation_bwd(dy, *ctx.saved_tensors, ctx.activation, impl="torch"), None

    @staticmethod
    def spmd_typecheck(*, x):
        from spmd_types import rules

        # Pairs are adjacent, so a shard of the output is the output of a shard.
        return rules.einsum("...f->...f", x)


# ---------------------------------------------------------------- public


def activate(x: torch.Tensor, activation: str, *, impl: str | None = None) -> torch.Tensor:
    """Apply the activation of that name (a key of ACTIVATIONS) to x[...]; differentiable.

    x may have any sharding. A gated activation maps interleaved x[..., 2F] = gate, up, gate, ... to
    y[..., F] (F may be sharded). Raises ValueError for any other name, for a gated activation if
    the last dim is odd, or if `impl` cannot run.

    Examples:
        >>> activate(torch.randn(2, 16, 128), "swiglu").shape
        torch.Size([2, 16, 64])
    """
    impl, (name, gated) = choose(impl, x), find_activation(activation)
    if not x.dtype.is_floating_point:
        raise ValueError(f"{activation} needs a float dtype, got {x.dtype}")
    if gated:
        _check_pairs(x, activation)
    if impl == "triton":
        refuse_tangents(activation, x)
        return activation_op(x, activation)
    return _Gated.apply(x, activation) if gated else _value(x, name)
