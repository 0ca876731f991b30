"""The hidden units of an MLP and their gradient: a product and the activation behind it, both ways.

    z = x W1^T + b1      h = act(z)        forward: `gemm`'s kernel, with z stored on the way
    dz = (dy W2) act'(z)                   backward: a kernel of its own, which can make h again

dh = dy W2 never leaves the registers. Any slice of the hidden units is a problem of its own.
"""

from __future__ import annotations

import torch

from warpweave.kernels.activation import (
    activation_bwd,
    activation_fwd,
    find_activation,
)
from warpweave.kernels.gemm.fused import check_operands, find_precision, gemm
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    grid,
    mainloop,
    tile_origin,
)
from warpweave.kernels.mlp.gathered import gather_hidden_bwd_steps
from warpweave.kernels.mlp.slope import slopes
from warpweave.kernels.overlap.function import run_steps
from warpweave.kernels.overlap.gathering import Gathering, check_fusing, multiply
from warpweave.kernels.runtime.dispatch import choose, no_graph, operator, tl, triton

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
    """(h[T, F], z or None) of x[T, E] and up_weight[F or 2F, E]: the first kernel of the forward.

    With `save_z`, z[T, F or 2F] is what `hidden_bwd` needs. x may have to be gathered: see
    `overlap.gathering`. Raises what `fused_gemm` raises.
    """
    impl = choose(impl, x.shard if isinstance(x, Gathering) else x, up_weight, up_bias)
    if impl == "torch" and isinstance(x, torch.Tensor):  # apart: a compiler fuses them
        check_operands(x, up_weight.t(), up_bias)
        z = gemm(x, up_weight.t(), up_bias)
        return activation_fwd(z, activation, impl="torch"), z if save_z else None
    options = {"activation": activation, "save_z": save_z, "precision": precision}
    return multiply(x, up_weight.t(), up_bias, **options, impl=impl)


# ---------------------------------------------------------------- backward


@triton.jit
def _hidden_bwd_kernel(
    dy_ptr,
    w_ptr,
    z_ptr,
    dz_ptr,
    h_ptr,
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
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        # 1. dh of a tile.
        row, col = tile_origin(index, T, F, BLOCK_T, BLOCK_F, GROUP)
        t, f = row + tl.arange(0, BLOCK_T), col + tl.arange(0, BLOCK_F)
        dh = mainloop(
            dy_ptr, w_ptr, t, f, T, F, E, stride_yt, stride_ye, stride_we, stride_wf,
            PRECISION, EVEN_E, BLOCK_T, BLOCK_F, BLOCK_E,
        )  # fmt: skip

        # 2. Times the slope at z.
        slopes(dh, z_ptr, dz_ptr, h_ptr, t, col, T, F, ACT, GATED)


def _fake(dy, down_weight, z, activation, want_hidden, precision):
    h = z.new_empty(dy.shape[0], down_weight.shape[1])
    return [torch.empty_like(z), h] if want_hidden else [torch.empty_like(z)]


@operator("hidden_bwd", _fake)
def _launch(
    dy: torch.Tensor,
    down_weight: torch.Tensor,
    z: torch.Tensor,
    activation: str,
    want_hidden: bool,
    precision: str | None,
) -> list[torch.Tensor]:
    """[dz], or [dz, h]."""
    (T, E), F = dy.shape, down_weight.shape[1]
    name, gated = find_activation(activation)
    dz, h = torch.empty_like(z), z.new_empty(T, F) if want_hidden else None
    found = [dz] if h is None else [dz, h]
    if not z.numel():
        return found
    tile = find_tile(dy, down_weight, "large" if want_hidden else "heavy")
    with torch.cuda.device_of(dy):
        _hidden_bwd_kernel[grid(tile, T, F, dy.device)](
            dy,
            down_weight,
            z,
            dz,
            h,
            T,
            F,
            E,
            *dy.stride(),
            *down_weight.stride(),
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

    dy may have to be gathered, as x above.

    Args:
        want_hidden: return h[T, F] = act(z) too, as the forward did.
        precision, impl: as for `fused_gemm`.

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl` cannot run.
    """
    here = dy.shard if isinstance(dy, Gathering) else dy
    impl, (_, gated) = choose(impl, here, down_weight, z), find_activation(activation)
    check_operands(here, down_weight, None)
    T, F = dy.shape[0], down_weight.shape[1]
    if z.shape != (T, 2 * F if gated else F) or z.dtype != here.dtype:
        raise ValueError(
            f"z must be {here.dtype} {[T, 2 * F if gated else F]} for {activation} of "
            f"dy {[*dy.shape]} and down_weight {[*down_weight.shape]}, got {z.dtype} {[*z.shape]}"
        )
    if isinstance(dy, Gathering):
        check_fusing(impl)
        options = {"activation": activation, "want_hidden": want_hidden, "precision": precision}
        steps = gather_hidden_bwd_steps(here, down_weight, z.contiguous(), dy.memory, **options)
        dz, made, whole = run_steps("mlp", steps, dy.memory)
        dy.arrived(whole)
        return dz, made
    if impl == "torch":
        dz = activation_bwd(gemm(dy, down_weight), z, activation, impl="torch")
        return dz, activation_fwd(z, activation, impl="torch") if want_hidden else None
    dz, *h = _launch(dy, down_weight, z.contiguous(), activation, want_hidden, precision)
    return dz, h[0] if h else None
