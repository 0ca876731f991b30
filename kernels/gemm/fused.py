"""Matrix products, and products fused with an epilogue: bias, activation, dropout, residual.

    y[M, N] = a[M, K] b[K, N] + bias[N]          out[M, N] (+)= a[M, K] b[K, N]

    z = a b + bias                               `fused_gemm`: each line is optional
    h = act(z)                                   z, from which backward recomputes, may be saved
    h = h / (1 - p) where kept, else 0           the mask of `dropout`: tokens, columns, seed, site
    y = h + residual                             all from the accumulators, rounded once

act: see `activation`. With a gated act, z[M, N] has gate and up interleaved, and y is [M, N/2]. act
is applied to z after rounding to its dtype, so that recomputing from a saved z gives the same h.

Operands may have any strides. Sums are in float32 (float64 for float64), and `out_dtype` float32
returns them unrounded. float32 operands are multiplied exactly ("ieee") or on tensor cores ("tf32",
"tf32x3").

Products without an epilogue are torch's (cuBLAS; `cpu` on a CPU), which is faster than a Triton
kernel. Triton is also used to add a 16-bit product to a float32 buffer, for which torch would need
another float32 matrix.

A fused epilogue saves a pass over the result, a launch, and the memory of the intermediate result.
It pays unless our main loop is slower than cuBLAS' by more than that. `runtime.fusion` lists the
GPUs and epilogues for which impl=None runs torch's product and then our kernels instead.

Sources: Kerr et al. 2017 (CUTLASS) for the epilogue; Korthikanti et al. 2022 (arXiv:2205.05198) for
what to keep. Limits: not differentiable (the callers are the halves of autograd Functions), except
`gemm` by torch; with dropout, N (of y) must not be sharded.
"""

from __future__ import annotations

import torch

from warpweave.kernels.activation import activation_fwd
from warpweave.kernels.dropout import Drop, dropout
from warpweave.kernels.gemm import cpu as gemm_cpu
from warpweave.kernels.gemm.epilogue import Epilogue, check_precision, launch_gemm
from warpweave.kernels.gemm.mainloop import has_few_tiles
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import check_written, choose, refuse_graph
from warpweave.kernels.runtime.dtypes import FLOATS, no_autocast
from warpweave.kernels.runtime.fusion import choose_or_auto, fused_or_unfused
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- checks


def check_operands(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raise ValueError unless a[M, K] b[K, N] + bias[N] exists and has one floating dtype."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"need a[M, K] and b[K, N], got {[*a.shape]} and {[*b.shape]}")
    if a.dtype != b.dtype or a.dtype not in FLOATS:
        raise ValueError(f"a and b must have the same float dtype, got {a.dtype} and {b.dtype}")
    if bias is not None and (bias.shape != b.shape[1:] or bias.dtype not in FLOATS):
        raise ValueError(
            f"bias must be [N] with a float dtype for b[K, N] = {[*b.shape]}, got {bias.dtype} "
            f"{[*bias.shape]}"
        )


def check_result(a: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Raise ValueError unless a product with `a` can have this dtype; None is the dtype of `a`."""
    if dtype is not None and dtype not in (a.dtype, compute_dtype(a)):
        raise ValueError(
            f"the result for {a.dtype} inputs must be {a.dtype} or {compute_dtype(a)}, got {dtype}"
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
    launch_gemm(a, b, y, Epilogue(bias, precision=precision))
    return y


@operator("gemm_into", lambda *_: None, writes=("out",), direct=True)
def _gemm_into(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor,
    add: bool,
    precision: str | None,
    impl: str,
    by_default: bool,
) -> None:
    # Decided here, where no compiler traces, as it needs the table of tiles and the GPU.
    if impl == "torch" or (by_default and has_few_tiles(a, b, "heavy")):
        gemm_cpu.product_into(a, b, out, add)
    else:
        launch_gemm(a, b, out, Epilogue(precision=precision), add=add)


def _fused_fake(a, b, after, drop, impl):
    return [x for x in after.outputs(a, a.shape[0], b.shape[1]) if x is not None]


@operator("fused_gemm", _fused_fake, records=(Epilogue, Drop), direct=True)
def _fused(
    a: torch.Tensor, b: torch.Tensor, after: Epilogue, drop: Drop | None, impl: str
) -> list[torch.Tensor]:
    """Return [y], or [y, z].

    The epilogue's dropout is a separate argument, because an operator's records cannot contain
    records with tensors.
    """
    after = after._replace(drop=drop)
    impl = fused_or_unfused(impl, after.name, a)
    if impl != "triton":
        return _unfused_gemm(a, b, after, "torch" if impl == "torch" else "triton")
    y, z = after.outputs(a, a.shape[0], b.shape[1])
    launch_gemm(a, b, y, after, z=z)
    return [y] if z is None else [y, z]


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
    the unrounded accumulators.

    Args:
        precision: how the Triton kernel multiplies float32: "ieee", "tf32" or "tf32x3"; None uses
            torch's setting (``torch.set_float32_matmul_precision``).
        impl: None is torch, also on CUDA (cuBLAS), because nothing is fused; "triton" is our
            kernel.

    Raises:
        ValueError: the precision is unknown; or the Triton kernel is requested, and shapes or
            dtypes do not fit, one of its operands requires a gradient, or it cannot run. torch
            raises its own errors.

    Examples:
        >>> gemm(torch.randn(16, 64), torch.randn(64, 32), torch.zeros(32)).shape
        torch.Size([16, 32])
    """
    check_precision(precision)
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

    a and b have one dtype and any strides. out has that dtype, or float32 to receive the unrounded
    accumulators of 16-bit operands. `precision` as for `gemm`.

    Args:
        impl: None is Triton if 16-bit operands on CUDA meet a float32 `out` with at least one tile
            per multiprocessor (torch would need a second, large float32 matrix). Otherwise it is
            torch, which splits long sums and so keeps a GPU busy with fewer tiles.

    Raises:
        ValueError: out has a wrong shape or dtype or elements that share memory, something requires
            a gradient, or the precision is unknown; or the Triton kernel is requested, and shapes
            or dtypes do not fit or it cannot run. torch raises its own errors.

    Examples:
        >>> total = torch.zeros(16, 32)
        >>> for _ in range(2):
        ...     gemm_into(torch.ones(16, 64), torch.ones(64, 32), total, add=True)
        >>> total[0, 0].item()
        128.0
    """
    if out.shape != (a.shape[0], b.shape[-1]):
        raise ValueError(
            f"out must be [M, N] for a {[*a.shape]} and b {[*b.shape]}, got {[*out.shape]}"
        )
    check_written("out", out)
    check_precision(precision)
    by_default = impl is None
    if impl is None and (a.dtype == out.dtype or not a.is_cuda):
        impl = "torch"
    impl = choose(impl, a, b, out)
    if impl == "triton":
        check_operands(a, b, None)
    check_result(a, out.dtype)  # torch would silently cast the operands to it, even to integers
    refuse_graph("gemm_into", a, b, out)
    _gemm_into(a, b, out, add, precision, impl, by_default)


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
        save_z: also return z[M, N], rounded to the dtype of `a`; requires an activation.
        drop: the key of `dropout`; the mask is that of `dropout` on the whole result.
        residual: [M, N] (N/2 if gated), any strides.
        out_dtype: of the result; float32 with 16-bit operands leaves it unrounded.
        precision: as for `gemm`.
        impl: None is torch except for CUDA tensors. For these it is the kernel, or torch's product
            followed by our kernels if `runtime.fusion` lists that as faster. "triton" is the
            kernel.

    Returns:
        (y, z or None).

    Raises:
        ValueError: shapes, dtypes or numbers do not fit, something requires a gradient, or `impl`
            cannot run.

    Examples:
        >>> a, b, bias = torch.randn(16, 64), torch.randn(64, 32), torch.zeros(32)
        >>> y, z = fused_gemm(a, b, bias, activation="gelu", save_z=True)
        >>> y.shape, z.shape
        (torch.Size([16, 32]), torch.Size([16, 32]))
    """
    after = Epilogue(bias, activation, save_z, drop, residual, out_dtype, precision)
    impl = choose_or_auto(impl, a, b, *after.tensors)
    check_operands(a, b, bias)
    refuse_graph("fused_gemm", a, b, bias, residual)
    check_result(a, out_dtype)
    after = after.checked((a.shape[0], b.shape[1]))
    y, *z = _fused(a, b, after._replace(drop=None), after.drop, impl)
    return y, z[0] if z else None


def _unfused_gemm(
    a: torch.Tensor, b: torch.Tensor, after: Epilogue, impl: str
) -> list[torch.Tensor]:
    """Run torch's product and then one operator of `impl` after another.

    Each rounds to the dtype of its result.
    """
    activation, dtype = after.activation, after.out_dtype or a.dtype
    with no_autocast(a):
        z = gemm_cpu.product(a, b, after.bias, dtype if activation is None else a.dtype)
    if activation is None:
        y = z
    else:
        y = activation_fwd(z.to(dtype), activation, impl=impl)
    if after.drop is not None:
        y = dropout(y, after.drop, impl=impl)
    if after.residual is not None:
        y += after.residual
    return [y, z] if after.save_z else [y]
