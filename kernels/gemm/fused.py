"""Matrix products, and products whose epilogue is everything up to the next one.

    y[M, N] = a[M, K] b[K, N] + bias[N]          out[M, N] (+)= a[M, K] b[K, N]

    z = a b + bias                               `fused_gemm`: each line is optional
    h = act(z)                                   z, what backward recomputes from, may be saved
    h = h / (1 - p) where kept, else 0           the mask of `dropout`: tokens, columns, seed, site
    y = h + residual                             all from the accumulators, rounded once

act: see `activation`; a gated one makes y[M, N/2] of z[M, N], its gates and ups interleaved. It is
applied to z as rounded to its dtype, so that what is recomputed from z is what forward saw.

Any strides; sums in float32 (float64 for float64), with
`out_dtype` float32 unrounded. float32 operands are multiplied exactly ("ieee") or on tensor cores
("tf32", "tf32x3").

Products with nothing to fuse go to torch (cuBLAS; `cpu` on a CPU): no Triton kernel beats it
there, and what an epilogue saves is memory, not arithmetic. Triton also adds a 16-bit product to a
float32 buffer, where torch would need a float32 matrix beside it.

An epilogue saves a pass over the result in memory, its launch and the memory for what lies between.
It pays where our main loop is not slower than cuBLAS' by more than that: `runtime.fusion` has the
GPUs and epilogues on which impl=None takes torch's product and then our kernels instead.

Sources: Kerr et al. 2017 (CUTLASS) for the epilogue; Korthikanti et al. 2022 (arXiv:2205.05198) for
what is worth keeping. Limits: not differentiable (the callers are the halves of autograd
Functions), but for `gemm` by torch; with dropout, N (of y) is whole on every rank.
"""

from __future__ import annotations

import torch

from warpweave.kernels.activation import activation_fwd, find_activation
from warpweave.kernels.dropout import Drop, check_drop, dropout
from warpweave.kernels.gemm import cpu as gemm_cpu
from warpweave.kernels.gemm.epilogue import find_precision, launch_gemm
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import check_written, choose, refuse_graph
from warpweave.kernels.runtime.dtypes import FLOATS, no_autocast
from warpweave.kernels.runtime.fusion import choose_or_auto, fused_or_apart
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- checks


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless a[M, K] b[K, N] + bias[N] exists, of one floating dtype."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"need a[M, K] and b[K, N], got {[*a.shape]} and {[*b.shape]}")
    if a.dtype != b.dtype or a.dtype not in FLOATS:
        raise ValueError(f"a and b must have one floating dtype, got {a.dtype} and {b.dtype}")
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype not in FLOATS):
        raise ValueError(
            f"bias must be floating and [N] of b {[*b.shape]}, got {bias.dtype} {[*bias.shape]}"
        )


def check_epilogue(
    shape: tuple[int, int],
    activation: str | None,
    save_z: bool,
    residual: torch.Tensor | None,
    drop: Drop | None,
    precision: str | None,
) -> Drop | None:
    """`drop`, or None if it drops nothing; ValueError unless all this can follow [M, N] = `shape`
    products."""
    if precision is not None:  # None is asked of torch at the launch: compilers cannot trace it
        find_precision(precision)
    gated = activation is not None and find_activation(activation).gated
    if gated and shape[1] % 2:
        raise ValueError(f"{activation} needs b[K, 2F] of gate, up pairs, got N = {shape[1]}")
    if save_z and activation is None:
        raise ValueError("save_z=True saves the argument of an activation: activation is None")
    made = (shape[0], shape[1] // 2 if gated else shape[1])
    if residual is not None and residual.shape != made:
        raise ValueError(f"residual must be {[*made]} as the result, got {[*residual.shape]}")
    return check_drop(drop, torch.Size(made[:1]))


def check_result(a: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError unless a product with `a` can be given in this dtype."""
    if dtype not in (a.dtype, compute_dtype(a)):
        raise ValueError(
            f"the product of {a.dtype} is given in {a.dtype} or {compute_dtype(a)}, not in {dtype}"
        )


# ---------------------------------------------------------------- launches


def _gemm_fake(a, b, bias, dtype, precision):
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@operator("gemm", _gemm_fake, direct=True)
def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    precision: str | None,
) -> torch.Tensor:
    y = a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
    launch_gemm(a, b, bias, y, precision=precision)
    return y


@operator("gemm_into", lambda *_: None, writes=("out",), direct=True)
def _gemm_into(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    precision: str | None,
    impl: str,
) -> None:
    if impl == "torch":
        gemm_cpu.product_into(a, b, out, add)
    else:
        launch_gemm(a, b, None, out, add=add, precision=precision)


def _fused_fake(a, b, bias, residual, activation, save_z, drop, dtype, *how):
    y = a.new_empty(_fused_shape(a, b, activation), dtype=dtype)
    return [y, a.new_empty(a.shape[0], b.shape[1])] if save_z else [y]


@operator("fused_gemm", _fused_fake, records=(Drop,), direct=True)
def _fused(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    save_z: bool,
    drop: Drop | None,
    dtype: torch.dtype,
    precision: str | None,
    impl: str,
) -> list[torch.Tensor]:
    """[y], or [y, z]."""
    impl = fused_or_apart(impl, epilogue_name(activation, drop, residual), a)
    if impl != "triton":
        after = "torch" if impl == "torch" else "triton"
        return _unfused_gemm(a, b, bias, residual, activation, save_z, drop, dtype, after)
    y = a.new_empty(_fused_shape(a, b, activation), dtype=dtype)
    z = a.new_empty(a.shape[0], b.shape[1]) if save_z else None
    launch_gemm(
        a,
        b,
        bias,
        y,
        activation=activation,
        z=z,
        drop=drop,
        residual=residual,
        precision=precision,
    )
    return [y] if z is None else [y, z]


def epilogue_name(activation: str | None, drop: Drop | None, residual: torch.Tensor | None) -> str:
    """What `runtime.fusion` calls an epilogue."""
    rest = ["dropout"] * (drop is not None) + ["residual"] * (residual is not None)
    return " and ".join(([] if activation is None else [activation]) + rest) or "bias"


def _fused_shape(a: torch.Tensor, b: torch.Tensor, activation: str | None) -> tuple[int, int]:
    gated = activation is not None and find_activation(activation).gated
    return a.shape[0], b.shape[1] // 2 if gated else b.shape[1]


# ---------------------------------------------------------------- public


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """a[M, K] b[K, N] + bias[N] in `out_dtype`, by default the dtype of `a`.

    a and b have one dtype and any strides. With 16-bit a and b and out_dtype float32, the result is
    the accumulators, unrounded.

    Args:
        precision: how the Triton kernel multiplies float32: "ieee", "tf32" or "tf32x3"; None is
            what torch is set to (``torch.set_float32_matmul_precision``).
        impl: None is torch, on CUDA too (cuBLAS): nothing is fused; "triton" is our kernel.

    Raises:
        ValueError: by the Triton kernel, on shapes or dtypes that do not fit, if something that it
            multiplies requires a gradient or if it cannot run; torch raises what it raises.
    """
    dtype = a.dtype if out_dtype is None else out_dtype
    if impl is None or choose(impl, a, b, bias) == "torch":
        return gemm_cpu.product(a, b, bias, dtype)
    check_operands(a, b, bias)
    check_result(a, dtype)
    refuse_graph("the Triton kernel of gemm", a, b, bias)
    return _gemm(a, b, bias, dtype, precision)


def gemm_into(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    *,
    precision: str | None = None,
    impl: str | None = None,
) -> None:
    """Add a[M, K] b[K, N] to out[M, N], or overwrite `out` with it.

    a and b have one dtype and any strides; out that dtype, or float32 to be given (or added) the
    accumulators of 16-bit operands unrounded. `precision` as for `gemm`.

    Args:
        impl: None is Triton where 16-bit operands on CUDA meet a float32 `out` (torch would need a
            float32 matrix beside it), else torch.

    Raises:
        ValueError: out has another shape or dtype or elements that are one in memory, something
            requires a gradient; by the Triton kernel, on shapes or dtypes that do not fit or if it
            cannot run; torch raises what it raises.
    """
    if out.shape != (a.shape[0], b.shape[-1]):
        raise ValueError(
            f"out must be [M, N] of a {[*a.shape]} and b {[*b.shape]}, got {[*out.shape]}"
        )
    check_written("out", out)
    if impl is None and (a.dtype == out.dtype or not a.is_cuda):
        impl = "torch"
    impl = choose(impl, a, b, out)
    if impl == "triton":
        check_operands(a, b, None)
    check_result(a, out.dtype)  # torch would cast the operands to it: to integers, without a word
    refuse_graph("gemm_into", a, b, out)
    _gemm_into(a, b, out, add, precision, impl)


def fused_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    save_z: bool = False,
    drop: Drop | None = None,
    residual: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """residual + dropout(act(a[M, K] b[K, N] + bias[N])), and with `save_z` the argument of act.

    Args:
        activation: a key of ``activation.ACTIVATIONS``, or None; a gated one halves N.
        save_z: return z[M, N], rounded to the dtype of `a`, too; it needs an activation.
        drop: what `dropout` takes; its mask is that of `dropout` on the whole result.
        residual: [M, N] (N/2 if gated), any strides.
        out_dtype: of the result; float32 with 16-bit operands leaves it unrounded.
        precision: as for `gemm`.
        impl: None is torch on all but CUDA tensors, and there the kernel, or torch's product with
            our kernels after it where `runtime.fusion` has that for faster; "triton" is the kernel.

    Returns:
        (y, z or None).

    Raises:
        ValueError: shapes, dtypes or numbers do not fit, something requires a gradient, or `impl`
            cannot run.
    """
    impl = choose_or_auto(impl, a, b, bias, residual, getattr(drop, "tokens", None))
    check_operands(a, b, bias)
    refuse_graph("fused_gemm", a, b, bias, residual)
    dtype = a.dtype if out_dtype is None else out_dtype
    check_result(a, dtype)
    products = a.shape[0], b.shape[1]
    drop = check_epilogue(products, activation, save_z, residual, drop, precision)
    y, *z = _fused(a, b, bias, residual, activation, save_z, drop, dtype, precision, impl)
    return y, z[0] if z else None


def _unfused_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str | None,
    save_z: bool,
    drop: Drop | None,
    dtype: torch.dtype,
    impl: str,
) -> list[torch.Tensor]:
    """Torch's product, and one operator of `impl` after the other; each rounds to the dtype of its
    result."""
    with no_autocast(a):
        z = gemm_cpu.product(a, b, bias, dtype if activation is None else a.dtype)
    if activation is None:
        y = z
    else:
        y = activation_fwd(z.to(dtype), activation, impl=impl)
    if drop is not None:
        y = dropout(y, drop, impl=impl)
    if residual is not None:
        y += residual
    return [y, z] if save_z else [y]
