"""Matrix products in plain torch, using the faster of its two CPU libraries.

    y[M, N] = a[M, K] b[K, N] + bias[N]          out[M, N] (+)= a[M, K] b[K, N]

On a CPU, torch multiplies float32 matrices with MKL, which uses its AVX2 kernels on CPUs that are
not Intel's, even if they have AVX-512. oneDNN, which torch also ships and uses for bfloat16,
generates AVX-512 code for both: on AMD Zen 5 it takes half the time. A call of oneDNN costs about
ten microseconds more, so small products use MKL. So do Intel CPUs and those without AVX-512, where
oneDNN gains nothing and MKL can also write, or add, directly to the result.

On CUDA it is torch's own product (cuBLAS). All of them sum in float32 (float64 for float64) and
differ only in the order of terms. This is the torch path of `kernels.gemm`.

oneDNN's operator has no gradient, so if autograd records, the product is torch's. Compilers see an
operator of ours. It has a gradient, which uses the same operator, and it chooses the library when
it runs, by sizes that a trace does not know and must not fix.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.autograd import forward_ad

from warpweave.kernels.runtime.dispatch import wants_gradient
from warpweave.kernels.runtime.op import operator

_SMALL = 1 << 20  # M * N * K below which MKL's cheaper call wins
_THIN = 32  # MKL also wins for a product with a side this short


@cache
def _has_onednn() -> bool:
    """Return True if oneDNN can be called for float32 and is faster than MKL."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)  # in newer torch
    if capabilities().get("cpu_name", "").startswith("Intel"):
        return False
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _takes_onednn(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return True if a[M, K] b[K, N] is float32, large, and on a CPU with faster oneDNN."""
    if a.dtype != torch.float32 or a.device.type != "cpu" or not _has_onednn():
        return False
    m, k, n = *a.shape, b.shape[-1]
    return m * n * k >= _SMALL and min(m, n, k) >= _THIN and b.shape == (k, n)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy unless its rows or columns are contiguous.

    oneDNN has no kernel for columns out of wider rows, and its reference takes a thousand times as
    long.
    """
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()


def _onednn(a: torch.Tensor, bt: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a[M, K] bt[N, K]^T + bias, possibly transposed in memory.

    The first operand is copied unless its rows are contiguous, so the shorter one is passed first.
    """
    linear = torch.ops.mkldnn._linear_pointwise
    a, bt = _dense(a), _dense(bt)
    if bias is None and not a.is_contiguous() and bt.shape[0] < a.shape[0]:
        return linear(bt, a, None, "none", [], "").t()
    return linear(a, bt, bias, "none", [], "")


def _multiply(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a[M, K] b[K, N] + bias[N]."""
    return a @ b if bias is None else torch.addmm(bias, a, b)


def _multiply_faster(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`_multiply` with the faster library; not differentiable."""
    if _takes_onednn(a, b):
        return _onednn(a, b.t(), bias).contiguous()
    return _multiply(a, b, bias)


def _save_linear(ctx, inputs, output) -> None:
    a, bt, _ = inputs
    ctx.save_for_backward(a, bt)


def _linear_backward(ctx, dy):
    (a, bt), needs = ctx.saved_tensors, ctx.needs_input_grad
    da = _cpu_linear(dy, bt.t(), None) if needs[0] else None
    dbt = _cpu_linear(dy.t(), a.t(), None) if needs[1] else None
    return da, dbt, dy.sum(0) if needs[2] else None


@operator(
    "cpu_linear",
    lambda a, bt, bias: _multiply(a, bt.t(), bias),
    gradient=(_save_linear, _linear_backward),
)
def _cpu_linear(a: torch.Tensor, bt: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """a[M, K] bt[N, K]^T + bias[N], where bt is b transposed, the layout of weights in memory.

    Weight gradients then also have this layout, and are products of the same kind.
    """
    return _multiply_faster(a, bt.t(), bias)


def product(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """a[M, K] b[K, N] + bias[N] in `dtype`, for a bias of any dtype."""
    bias = None if bias is None else bias.to(dtype)
    derived = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    recorded = wants_gradient(a, b, bias)
    if a.dtype != dtype:
        if a.is_cuda and not derived and not recorded:
            y = torch.mm(a, b, out_dtype=dtype)  # cuBLAS's sums; torch has no derivative for it
            return y if bias is None else y.add_(bias)
        a, b = a.to(dtype), b.to(dtype)
    if derived:
        return _multiply(a, b, bias)  # only torch's product has every derivative
    if torch.compiler.is_compiling():
        ours = dtype == torch.float32 and a.device.type == "cpu"
        return _cpu_linear(a, b.t(), bias) if ours else _multiply(a, b, bias)
    return (_multiply if recorded else _multiply_faster)(a, b, bias)


def product_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    """Add a[M, K] b[K, N] to out[M, N], or overwrite `out` with it."""
    if a.is_cuda and a.dtype != out.dtype:
        if not add:
            torch.mm(a, b, out_dtype=out.dtype, out=out)
            return
        y = torch.mm(a, b, out_dtype=out.dtype)
    elif _takes_onednn(a := a.to(out.dtype), b := b.to(out.dtype)):
        y = _onednn(a, b.t(), None)  # oneDNN can only write to a new tensor
    else:
        torch.addmm(out, a, b, beta=int(add), out=out)  # with beta 0, `out` is not read
        return
    if add:
        out.add_(y.contiguous())  # transposing first is four times as fast
    else:
        out.copy_(y)
