"""Hidden activations of an MLP and their gradient: a product fused with act or its derivative.

    z = x W1^T + b1      h = act(z)        forward: `gemm`'s kernel, which also stores z
    dz = (dy W2) act'(z)                   backward: a separate kernel, which can recompute h

dh = dy W2 stays in registers, which saves its passes through memory. If these cost less than our
main loop loses against cuBLAS, impl=None runs torch's product and then kernels on dh
(`runtime.fusion`). Hidden units are independent of each other, so F may be sharded.
"""

from __future__ import annotations

import torch

from warpweave.kernels.activation import (
    activation_bwd,
    activation_fwd,
    find_activation,
    pointwise_and_slope,
)
from warpweave.kernels.gemm.epilogue import find_precision
from warpweave.kernels.gemm.fused import check_operands, gemm
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    grid,
    next_tile,
    operands,
    split_columns,
    tile_counter,
    tile_origin,
    tile_product,
)
from warpweave.kernels.overlap.gathering import Gathering, multiply
from warpweave.kernels.runtime.dispatch import choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import no_autocast, to_dtype, upcast
from warpweave.kernels.runtime.fusion import choose_or_auto, fused_or_unfused
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- forward


@no_graph
def hidden_fwd(
    x: torch.Tensor | Gathering,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str,
    save_z: bool = False,
    precision: str | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(h[T, F], z or None) from x[T, E] and up_weight[F or 2F, E]: the first kernel of the forward.

    With `save_z` also return z[T, F or 2F], which `hidden_bwd` needs. x may be a `Gathering`
    (`overlap.gathering`). Errors as for `fused_gemm`.
    """
    shard = x if isinstance(x, torch.Tensor) else x.shard
    if choose(impl, shard, up_weight, up_bias) == "torch" and shard is x:  # a compiler fuses them
        check_operands(x, up_weight.t(), up_bias)
        z = gemm(x, up_weight.t(), up_bias)
        return activation_fwd(z, activation, impl="torch"), z if save_z else None
    options = {"activation": activation, "save_z": save_z, "precision": precision}
    return multiply(x, up_weight.t(), up_bias, **options, impl=impl)


def _again_fake(x, up_weight, up_bias, activation, precision, impl):
    return x.new_empty(x.shape[0], up_weight.shape[0])


@operator("hidden_again", _again_fake, direct=True)
def _again(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    activation: str,
    precision: str | None,
    impl: str,
) -> torch.Tensor:
    if fused_or_unfused(impl, activation, x) == "triton":
        return gemm(x, up_weight.t(), up_bias, precision=precision, impl="triton")
    with no_autocast(x):
        return gemm(x, up_weight.t(), up_bias)


@no_graph
def hidden_again(
    x: torch.Tensor | Gathering,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str,
    precision: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """z of `hidden_fwd` for these arguments, recomputed in the same way."""
    if not isinstance(x, torch.Tensor):
        return multiply(x, up_weight.t(), up_bias, precision=precision, impl="triton")[0]
    if (impl := choose_or_auto(impl, x, up_weight, up_bias)) == "torch":
        return gemm(x, up_weight.t(), up_bias)
    return _again(x, up_weight, up_bias, activation, precision, impl)


# ---------------------------------------------------------------- backward


@triton.jit
def _slope_tile(dh, z_ptr, dz_ptr, h_ptr, t, col, T, F, ACT: tl.constexpr, GATED: tl.constexpr):
    """dz, and h if h_ptr is given, for a tile dh at rows t and columns from `col`."""
    COLS: tl.constexpr = dh.shape[1]
    dtype: tl.constexpr = dz_ptr.dtype.element_ty
    f = col + tl.arange(0, COLS)
    at, live = t[:, None] * F + f[None, :], (t < T)[:, None] & (f < F)[None, :]
    if GATED:  # a pair of gate and up is one column of dh
        c = 2 * col + tl.arange(0, 2 * COLS)
        pairs, here = t[:, None] * (2 * F) + c[None, :], (t < T)[:, None] & (c < 2 * F)[None, :]
        z = tl.load(z_ptr + pairs, here, 0.0)
        gate, up = tl.split(z.reshape(dh.shape[0], COLS, 2))
        gate, up = upcast(gate), upcast(up)
        h, slope = pointwise_and_slope(gate, ACT)
        dgate, dup = to_dtype(dh * up * slope, dtype), to_dtype(dh * h, dtype)
        tl.store(dz_ptr + pairs, tl.join(dgate, dup).reshape(dh.shape[0], 2 * COLS), here)
        h *= up
    else:
        h, slope = pointwise_and_slope(upcast(tl.load(z_ptr + at, live, 0.0)), ACT)
        tl.store(dz_ptr + at, to_dtype(dh * slope, dtype), live)
    if h_ptr is not None:
        tl.store(h_ptr + at, to_dtype(h, dtype), live)


@triton.jit
def _hidden_bwd_kernel(
    dy,
    w,
    z_ptr,
    dz_ptr,
    h_ptr,
    counter_ptr,
    T,
    F,
    E,
    stride_yt,
    stride_ye,
    stride_we,
    stride_wf,
    ACT: tl.constexpr,
    GATED: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
):
    tiles = tl.cdiv(T, BLOCK_T) * tl.cdiv(F, BLOCK_F)
    index = tl.program_id(0)
    while index < tiles:
        # 1. dh of a tile.
        following = next_tile(index, counter_ptr)
        row, col = tile_origin(index, T, F, BLOCK_T, BLOCK_F, GROUP)
        dh = tile_product(
            dy, w, row, col, T, F, E, stride_yt, stride_ye, stride_we, stride_wf,
            PRECISION, EVEN_E, BLOCK_T, BLOCK_F, BLOCK_E,
        )  # fmt: skip

        # 2. Times the slope at z, a quarter at a time: dh, z, dz and h of a whole tile do not fit
        #    into the registers.
        STEP: tl.constexpr = BLOCK_F // 4
        t = row + tl.arange(0, BLOCK_T)
        left, right = split_columns(dh)
        first, second = split_columns(left)
        third, fourth = split_columns(right)
        _slope_tile(first, z_ptr, dz_ptr, h_ptr, t, col, T, F, ACT, GATED)
        _slope_tile(second, z_ptr, dz_ptr, h_ptr, t, col + STEP, T, F, ACT, GATED)
        _slope_tile(third, z_ptr, dz_ptr, h_ptr, t, col + 2 * STEP, T, F, ACT, GATED)
        _slope_tile(fourth, z_ptr, dz_ptr, h_ptr, t, col + 3 * STEP, T, F, ACT, GATED)
        index = following


def _hidden_bwd_fake(dy, down_weight, z, activation, want_hidden, precision, impl):
    h = z.new_empty(dy.shape[0], down_weight.shape[1])
    return [torch.empty_like(z), h] if want_hidden else [torch.empty_like(z)]


@operator("hidden_bwd", _hidden_bwd_fake, direct=True)
def _launch_hidden_bwd(
    dy: torch.Tensor,
    down_weight: torch.Tensor,
    z: torch.Tensor,
    activation: str,
    want_hidden: bool,
    precision: str | None,
    impl: str,
) -> list[torch.Tensor]:
    """[dz], or [dz, h]."""
    (T, E), F = dy.shape, down_weight.shape[1]
    if fused_or_unfused(impl, f"slope of {activation}", dy) == "unfused":
        with no_autocast(dy):
            dz = activation_bwd(gemm(dy, down_weight), z, activation, impl="triton")
        return [dz, activation_fwd(z, activation, impl="triton")] if want_hidden else [dz]
    name, gated = find_activation(activation)
    dz, h = torch.empty_like(z), z.new_empty(T, F) if want_hidden else None
    found = [dz] if h is None else [dz, h]
    if not z.numel():
        return found
    tile = find_tile(dy, down_weight, "large" if want_hidden else "heavy")
    dy_tiles, weight_tiles, strides = operands(dy, down_weight, tile)
    with torch.cuda.device_of(dy):
        _hidden_bwd_kernel[grid(tile, T, F, dy.device)](
            dy_tiles,
            weight_tiles,
            z,
            dz,
            h,
            tile_counter(dy.device),
            T,
            F,
            E,
            *strides,
            name,
            gated,
            find_precision(precision),
            E % tile.k == 0,
            tile.m,
            tile.n,
            tile.k,
            tile.group,
            **gemm_options(tile, dy),
        )
    return found


@no_graph
def hidden_bwd(
    dy: torch.Tensor | Gathering,
    down_weight: torch.Tensor,
    z: torch.Tensor,
    *,
    activation: str,
    want_hidden: bool = False,
    precision: str | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dz, h or None) from dy[T, E], down_weight[E, F] and z[T, F or 2F]: dz = (dy W2) act'(z).

    If dy is a `Gathering`, the derivative is applied in a separate pass. Fused into the kernel that
    waits for rows, a gated act would serialize wgmma (ptxas' C7515, sm_90).

    Args:
        want_hidden: also return h[T, F] = act(z), as in the forward.
        precision, impl: as for `fused_gemm`.

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl` cannot run.
    """
    here = dy.shard if isinstance(dy, Gathering) else dy
    impl, (_, gated) = choose_or_auto(impl, here, down_weight, z), find_activation(activation)
    check_operands(here, down_weight, None)
    T, F = dy.shape[0], down_weight.shape[1]
    if z.shape != (T, 2 * F if gated else F) or z.dtype != here.dtype:
        raise ValueError(
            f"{activation}: expected z to be {here.dtype} {[T, 2 * F if gated else F]}, got "
            f"{z.dtype} {[*z.shape]} (dy is {[*dy.shape]}, down_weight is {[*down_weight.shape]})"
        )
    if impl == "torch" or isinstance(dy, Gathering):
        if isinstance(dy, Gathering):
            dh, _ = multiply(dy, down_weight, precision=precision)
        else:
            dh = gemm(dy, down_weight)
        impl = "torch" if impl == "torch" else "triton"
        dz = activation_bwd(dh, z, activation, impl=impl)
        return dz, activation_fwd(z, activation, impl=impl) if want_hidden else None
    dz, *h = _launch_hidden_bwd(
        dy, down_weight, z.contiguous(), activation, want_hidden, precision, impl
    )
    return dz, h[0] if h else None
