"""The feed-forward half of a transformer block, fused: two products, each with its epilogue.

    z = x W1^T + b1      h = act(z)                          one kernel, z kept
    y = residual + dropout(h W2^T + b2)                      one kernel

    do = dropout'(dy)    dh = do W2     dz = dh act'(z)      one kernel, which makes h again
    dx = dz W1           dW1 = dz^T x   dW2 = do^T h         db1, db2: sums over tokens of dz, do

x, y: [..., E]; W1: [F, E], or gated [F, 2, E], gate and up side by side; W2: [E, F]. Any slice of F
is an MLP of its own whose y is a partial sum: tensor parallelism is `hidden_fwd`, `hidden_bwd` and
products, with collectives between.

Saved for backward: x and z. h is made again from the z that act's derivative reads anyway, so the
activations of a block shrink by [T, F]. `recompute="up"` saves x only and replays the first product
(one product more, no z kept); "nothing" saves h too, which is what is fastest on a CPU. All three
give the same numbers. Gradients of parameters are made in their grad_dtype, through ``wgrad``.

The products with nothing to fuse (dx, dW1, dW2) are torch's, see `gemm`.

Sources: Shazeer 2020 (arXiv:2002.05202); Korthikanti et al. 2022 (arXiv:2205.05198) for what to
recompute. Limits: gradients of gradients do not exist.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.activation import (
    activate,
    activation_bwd,
    activation_fwd,
    curve_and_slope,
    find_activation,
)
from warpweave.kernels.dropout import Drop, dropout_fwd
from warpweave.kernels.dropout import dropout as apply_dropout
from warpweave.kernels.gemm.fused import check_operands, find_precision, fused_gemm, gemm
from warpweave.kernels.gemm.gradients import (
    Settled,
    bias_gradient,
    leaf_of,
    linear,
    rows,
    settled_dtype,
    weight_gradient,
)
from warpweave.kernels.gemm.product import find_tile, grid, halves, launch_options, product, tile_at
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import (
    choose,
    no_graph,
    once_differentiable,
    refuse_tangents,
    tl,
    triton,
    wants_gradient,
)
from warpweave.kernels.runtime.numeric import to_dtype, upcast

RECOMPUTE = ("nothing", "activation", "up")


# ---------------------------------------------------------------- fc1 and its activation


@no_graph
def hidden_fwd(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    *,
    activation: str,
    keep: bool = False,
    precision: str | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(h[T, F], z or None) of x[T, E] and up_weight[F or 2F, E]: the first kernel of the forward.

    With `keep`, z[T, F or 2F] is what `hidden_bwd` needs. Raises what `fused_gemm` raises.
    """
    return fused_gemm(
        x,
        up_weight.t(),
        up_bias,
        activation=activation,
        keep=keep,
        precision=precision,
        impl=impl,
    )


# ---------------------------------------------------------------- its gradient


@triton.jit
def _slope_tile(dh, z_ptr, dz_ptr, h_ptr, t, col, T, F, CURVE: tl.constexpr, GATED: tl.constexpr):
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
        h, slope = curve_and_slope(gate, CURVE)
        dgate, dup = to_dtype(dh * up * slope, dtype), to_dtype(dh * h, dtype)
        tl.store(dz_ptr + pairs, tl.join(dgate, dup).reshape(dh.shape[0], 2 * COLS), here)
        h *= up
    else:
        h, slope = curve_and_slope(upcast(tl.load(z_ptr + at, live, 0.0)), CURVE)
        tl.store(dz_ptr + at, to_dtype(dh * slope, dtype), live)
    if h_ptr is not None:
        tl.store(h_ptr + at, to_dtype(h, dtype), live)


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
    CURVE: tl.constexpr,
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
        row, col = tile_at(index, T, F, BLOCK_T, BLOCK_F, GROUP)
        t, f = row + tl.arange(0, BLOCK_T), col + tl.arange(0, BLOCK_F)
        dh = product(
            dy_ptr, w_ptr, t, f, T, F, E, stride_yt, stride_ye, stride_we, stride_wf,
            PRECISION, EVEN_E, BLOCK_T, BLOCK_F, BLOCK_E,
        )  # fmt: skip

        # 2. Times the slope at z, a quarter at a time: what dh, z, dz and h of a whole tile take
        #    is more than the registers.
        STEP: tl.constexpr = BLOCK_F // 4
        left, right = halves(dh)
        first, second = halves(left)
        third, fourth = halves(right)
        _slope_tile(first, z_ptr, dz_ptr, h_ptr, t, col, T, F, CURVE, GATED)
        _slope_tile(second, z_ptr, dz_ptr, h_ptr, t, col + STEP, T, F, CURVE, GATED)
        _slope_tile(third, z_ptr, dz_ptr, h_ptr, t, col + 2 * STEP, T, F, CURVE, GATED)
        _slope_tile(fourth, z_ptr, dz_ptr, h_ptr, t, col + 3 * STEP, T, F, CURVE, GATED)


@no_graph
def hidden_bwd(
    dy: torch.Tensor,
    down_weight: torch.Tensor,
    z: torch.Tensor,
    *,
    activation: str,
    want_hidden: bool = False,
    precision: str | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(dz, h or None) from dy[T, E], down_weight[E, F] and z[T, F or 2F]: dz = (dy W2) act'(z).

    Args:
        want_hidden: return h[T, F] = act(z) too, as `hidden_fwd` did.
        precision, impl: as for `fused_gemm`.

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl` cannot run.
    """
    impl, (name, gated) = choose(impl, dy, down_weight, z), find_activation(activation)
    check_operands(dy, down_weight, None)
    (T, E), F_ = dy.shape, down_weight.shape[1]
    if z.shape != (T, 2 * F_ if gated else F_) or z.dtype != dy.dtype:
        raise ValueError(
            f"z must be {dy.dtype} {[T, 2 * F_ if gated else F_]} for {activation} of "
            f"dy {[*dy.shape]} and down_weight {[*down_weight.shape]}, got {z.dtype} {[*z.shape]}"
        )
    if impl == "torch":
        dz = activation_bwd(gemm(dy, down_weight), z, activation, impl="torch")
        return dz, activation_fwd(z, activation, impl="torch") if want_hidden else None
    z = z.contiguous()
    dz, h = torch.empty_like(z), z.new_empty(T, F_) if want_hidden else None
    if not z.numel():
        return dz, h
    tile = find_tile(dy, down_weight, "large" if want_hidden else "heavy")
    with torch.cuda.device_of(dy):
        _hidden_bwd_kernel[grid(tile, T, F_, dy.device)](
            dy,
            down_weight,
            z,
            dz,
            h,
            T,
            F_,
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
            **launch_options(tile, dy),
        )
    return dz, h


# ---------------------------------------------------------------- both halves


class How(NamedTuple):
    """What an MLP is besides its tensors."""

    activation: str
    drop: Drop | None = None
    recompute: str = "activation"
    precision: str | None = None
    impl: str | None = None


class Gradients(NamedTuple):
    """The factors of every gradient: dW1 = dz^T x, db1 = sum dz, dW2 = do^T h, db2 = sum do."""

    dx: torch.Tensor | None
    dz: torch.Tensor | None
    do: torch.Tensor
    h: torch.Tensor | None


@no_graph
def mlp_fwd(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    how: How,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(y, z, h) of x[T, E] and two-dimensional weights; with `keep`, z and h as `how` saves them.

    Raises what `fused_gemm` raises.
    """
    keep_z = keep and how.recompute != "up"
    h, z = hidden_fwd(
        x,
        up_weight,
        up_bias,
        activation=how.activation,
        keep=keep_z,
        precision=how.precision,
        impl=how.impl,
    )
    if how.drop is None and residual is None:
        y = gemm(h, down_weight.t(), down_bias)
    else:
        y, _ = fused_gemm(
            h,
            down_weight.t(),
            down_bias,
            drop=how.drop,
            residual=residual,
            precision=how.precision,
            impl=how.impl,
        )
    return y, z, h if keep and how.recompute == "nothing" else None


@no_graph
def mlp_bwd(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    z: torch.Tensor | None,
    h: torch.Tensor | None,
    how: How,
    *,
    want_dx: bool = True,
    want_dz: bool = True,
    want_hidden: bool = True,
) -> Gradients:
    """The factors of the wanted gradients from dy[T, E] and what `mlp_fwd` kept.

    Raises what `hidden_bwd` raises.
    """
    activation, impl = how.activation, how.impl
    do = dy if how.drop is None else _drop_bwd(dy, how.drop, impl)
    if z is None and (want_dz or (want_hidden and h is None)):
        z, _ = fused_gemm(x, up_weight.t(), up_bias, precision=how.precision, impl=impl)
    dz = None
    if want_dz:
        dz, again = hidden_bwd(
            do,
            down_weight,
            z,
            activation=activation,
            want_hidden=want_hidden and h is None,
            precision=how.precision,
            impl=impl,
        )
        h = again if h is None else h
    elif want_hidden and h is None:
        h = activation_fwd(z, activation, impl=impl)
    return Gradients(gemm(dz, up_weight) if want_dx else None, dz, do, h)


def _drop_bwd(dy: torch.Tensor, drop: Drop, impl: str | None) -> torch.Tensor:
    p, seed, site, tokens = drop
    if choose(impl, dy, tokens) == "triton":
        return dropout_fwd(dy, p, seed=seed, site=site, tokens=tokens)
    return apply_dropout(dy, p, seed=seed, site=site, tokens=tokens, impl="torch")


# ---------------------------------------------------------------- autograd


def _operands(
    x: torch.Tensor, tensors: tuple[torch.Tensor | None, ...], dtype: torch.dtype
) -> list[torch.Tensor | None]:
    """x and (up_weight, up_bias, down_weight, down_bias, residual) with two dims, in `dtype`.

    A bias has one.
    """
    up_weight, up_bias, down_weight, down_bias, residual = tensors
    flat = (
        rows(x),
        rows(up_weight),
        None if up_bias is None else up_bias.flatten(),
        down_weight,
        down_bias,
        None if residual is None else rows(residual),
    )
    return [t if t is None else t.to(dtype) for t in flat]


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up_weight, up_bias, down_weight, down_bias, residual, how, dtype, keep):
        ctx.how, ctx.shape, ctx.dtypes = how, x.shape, (x.dtype, dtype)
        ctx.parameters = parameters = (up_weight, up_bias, down_weight, down_bias)
        with Settled(x):
            flat, *tensors = _operands(x, (*parameters, residual), dtype)
            y, z, h = mlp_fwd(flat, *tensors, how, keep=keep)
            needs_x = ctx.needs_input_grad[1] or how.recompute == "up"
            x = x if x.dtype == dtype else flat
            ctx.save_for_backward(x if needs_x else None, up_weight, up_bias, down_weight, z, h)
            return y.view(ctx.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, *weights, z, h), needs = ctx.saved_tensors, ctx.needs_input_grad
        (up, up_bias, down, down_bias), (x_dtype, dtype) = ctx.parameters, ctx.dtypes
        with Settled(dy):
            flat, *weights = _operands(dy, (*weights, None, None), dtype)
            x = None if x is None else rows(x)
            dx, dz, do, h = mlp_bwd(
                flat, x, *weights[:3], z, h, ctx.how,
                want_dx=needs[0], want_dz=any(needs[:3]), want_hidden=needs[3],
            )  # fmt: skip
            dx = None if dx is None else dx.view(ctx.shape).to(x_dtype)
            dw1 = weight_gradient(up, lambda: (dz, x)) if needs[1] else None
            dw2 = weight_gradient(down, lambda: (do, h)) if needs[3] else None
            db1 = bias_gradient(up_bias, dz) if needs[2] else None
            db2 = bias_gradient(down_bias, do) if needs[4] else None
        return dx, dw1, db1, dw2, db2, dy if needs[5] else None, None, None, None

    @staticmethod
    def spmd_typecheck(*, x, up_weight, up_bias, down_weight, down_bias, residual, how):
        from spmd_types import rules

        # Units are cut in whole pairs; act is not linear, so the sum over E must be whole.
        pairs = "_" * (up_weight.dim() - 2)
        h = rules.einsum(f"..._,f{pairs}_->...f", x, up_weight)
        if up_bias is not None:
            h = rules.einsum(f"...f,f{pairs}->...f", h, up_bias)
        y = rules.einsum("...f,_f->..._", h, down_weight)
        if down_bias is not None:
            y = rules.einsum("..._,_->..._", y, down_bias)
        if how.drop is not None:
            y = rules.einsum("..._,...->..._", y, how.drop.tokens)
        return y if residual is None else rules.einsum("..._,..._->..._", y, residual)


# For compilers, which cannot trace `wgrad`: an operator each way, and every gradient at once.


@torch.library.custom_op("warpweave::mlp", mutates_args=())
def _mlp_op(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    tokens: torch.Tensor | None,
    activation: str,
    p: float,
    seed: int,
    site: int,
    recompute: str,
    precision: str | None,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    drop = None if tokens is None else Drop(p, seed, site, tokens)
    how = How(activation, drop, recompute, precision, "triton")
    y, z, h = mlp_fwd(x, up_weight, up_bias, down_weight, down_bias, residual, how, keep=bool(keep))
    none = x.new_empty(0, 0)
    return y, none if z is None else z, none.clone() if h is None else h


@_mlp_op.register_fake
def _(x, w1, b1, w2, b2, residual, tokens, activation, p, seed, site, recompute, precision, keep):
    z = (x.shape[0], w1.shape[0]) if keep and recompute != "up" else (0, 0)
    h = (x.shape[0], w2.shape[1]) if keep and recompute == "nothing" else (0, 0)
    return x.new_empty(x.shape), x.new_empty(z), x.new_empty(h)


@torch.library.custom_op("warpweave::mlp_backward", mutates_args=())
def _mlp_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    tokens: torch.Tensor | None,
    z: torch.Tensor,
    h: torch.Tensor,
    activation: str,
    p: float,
    seed: int,
    site: int,
    recompute: str,
    precision: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    drop = None if tokens is None else Drop(p, seed, site, tokens)
    how = How(activation, drop, recompute, precision, "triton")
    dx, dz, do, h = mlp_bwd(
        dy, x, up_weight, up_bias, down_weight,
        None if recompute == "up" else z, h if recompute == "nothing" else None, how,
    )  # fmt: skip
    wide, dtype = compute_dtype(dy), up_weight.dtype
    db1, db2 = (t.sum(0, dtype=wide).to(dtype) for t in (dz, do))
    return dx, gemm(dz.t(), x), gemm(do.t(), h), db1, db2


@_mlp_backward_op.register_fake
def _(dy, x, w1, b1, w2, *rest):
    biases = w1.new_empty(w1.shape[0]), w1.new_empty(w2.shape[0])
    return x.new_empty(x.shape), w1.new_empty(w1.shape), w2.new_empty(w2.shape), *biases


def _save(ctx, inputs, output) -> None:
    x, w1, b1, w2, b2, residual, tokens, *ctx.how, _ = inputs
    ctx.biased, ctx.added = (b1 is not None, b2 is not None), residual is not None
    ctx.save_for_backward(x, w1, b1, w2, tokens, *output[1:])


def _backward(ctx, dy, dz, dh):
    dx, dw1, dw2, db1, db2 = _mlp_backward_op(dy, *ctx.saved_tensors, *ctx.how)
    db1, db2 = db1 if ctx.biased[0] else None, db2 if ctx.biased[1] else None
    return dx, dw1, db1, dw2, db2, dy if ctx.added else None, *[None] * 8


_mlp_op.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- public


def mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str,
    residual: torch.Tensor | None = None,
    drop: Drop | None = None,
    recompute: str | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """y[..., E] = residual + dropout(act(x W1^T + b1) W2^T + b2), differentiable in every tensor.

    Args:
        x: x[..., E] (any sharding of the tokens).
        up_weight: W1[F, E], or [F, 2, E] where the activation is gated; a leaf or a view of one, if
            its gradient is to be collected. Of a [gate; up] concatenation it is
            torch.stack([gate, up], 1).
        down_weight: W2[E, F].
        up_bias, down_bias: b1[F] or [F, 2], b2[E]; or None.
        activation: "gelu", "gelu_erf", "relu2", "swiglu" or "geglu".
        residual: of the shape of x, or None. One of another dtype is added in the wider of both,
            which y then has.
        drop: probability, seed, site and the global indices of x's tokens: see `dropout`.
        recompute: what backward computes again instead of keeping it: "activation" (the default),
            "up" (the first product too) or "nothing" (the default where torch computes on a CPU).
        precision: how Triton multiplies float32, see `gemm`.
        impl: None is Triton on CUDA tensors, torch on others.

    Under autocast everything is computed in its dtype.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or `impl` cannot run.
    """
    tokens = None if drop is None else drop.tokens
    chosen = choose(impl, x, up_weight, down_weight, up_bias, down_bias, residual, tokens)
    check_mlp(x, up_weight, down_weight, up_bias, down_bias, residual, activation)
    recompute = choose_recompute(recompute, chosen, x)
    parameters = (up_weight, up_bias, down_weight, down_bias)
    names = ("up_weight", "up_bias", "down_weight", "down_bias")
    dtype = settled_dtype("mlp", x, dict(zip(names, parameters)))
    if drop is not None:
        drop = drop._replace(tokens=drop.tokens.reshape(-1)) if drop.p else None
    how = How(activation, drop, recompute, precision, chosen)
    if residual is not None and residual.dtype != dtype:  # a stream that is kept wider
        return residual + _mlp(x, parameters, None, how, dtype)
    return _mlp(x, parameters, residual, how, dtype)


def _mlp(
    x: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    residual: torch.Tensor | None,
    how: How,
    dtype: torch.dtype,
) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return _compiled(x, parameters, residual, how, dtype)
    keep = wants_gradient(x, *parameters, residual)
    return _MLP.apply(x, *map(leaf_of, parameters), residual, how, dtype, keep)


def _compiled(
    x: torch.Tensor,
    parameters: tuple[torch.Tensor | None, ...],
    residual: torch.Tensor | None,
    how: How,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What a compiler traces: one operator, or by torch one after the other."""
    shape = x.shape
    x, w1, b1, w2, b2, residual = _operands(x, (*parameters, residual), dtype)
    p, seed, site, tokens = how.drop or (0.0, 0, 0, None)
    if how.impl == "triton":
        refuse_tangents("mlp", x, *parameters, residual)
        y, _, _ = _mlp_op(
            x, w1, b1, w2, b2, residual, tokens, how.activation, p, seed, site,
            how.recompute, how.precision, int(torch.is_grad_enabled()),
        )  # fmt: skip
        return y.view(shape)
    y = linear(activate(linear(x, w1, b1, dtype), how.activation, impl="torch"), w2, b2, dtype)
    if tokens is not None:
        y = apply_dropout(y, p, seed=seed, site=site, tokens=tokens, impl="torch")
    return (y if residual is None else residual + y).view(shape)


def choose_recompute(recompute: str | None, impl: str, x: torch.Tensor) -> str:
    """What `recompute` means where `impl` computes on x's device; ValueError for an unknown one."""
    if recompute is None:
        return "nothing" if impl == "torch" and x.device.type == "cpu" else "activation"
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}, got {recompute!r}")
    return recompute


def check_mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    name: str = "mlp",
) -> None:
    """Raise ValueError, in this name, unless the shapes are those of an MLP of this activation."""
    gated = find_activation(activation).gated
    E = x.shape[-1] if x.ndim else 0
    width = down_weight.shape[-1] if down_weight.ndim == 2 else -1
    # Two dims would not tell rows gate, up, gate, up, ... from all gates before all ups.
    units = (width, 2) if gated else (width,)
    if x.ndim < 1 or down_weight.shape != (E, width) or up_weight.shape != (*units, E):
        form = "[F, 2, E] (torch.stack([gate, up], 1))" if gated else "[F, E]"
        raise ValueError(
            f"{name}: {activation} needs x[..., E], up_weight{form} and down_weight[E, F], got "
            f"{[*x.shape]}, {[*up_weight.shape]} and {[*down_weight.shape]}"
        )
    if up_bias is not None and up_bias.shape != units:
        raise ValueError(f"{name}: up_bias must be {[*units]}, got {[*up_bias.shape]}")
    if down_bias is not None and down_bias.shape != (E,):
        raise ValueError(f"{name}: down_bias must be [{E}], got {[*down_bias.shape]}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{name}: residual must be {[*x.shape]} as x, got {[*residual.shape]}")


def gelu_mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    approximate: str = "tanh",
    residual: torch.Tensor | None = None,
    drop: Drop | None = None,
    recompute: str | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """`mlp` with GELU, by tanh or, approximate="none", by erf: up_weight[F, E]."""
    if approximate not in ("tanh", "none"):
        raise ValueError(f'approximate must be "tanh" or "none", got {approximate!r}')
    return mlp(
        x,
        up_weight,
        down_weight,
        up_bias,
        down_bias,
        activation="gelu" if approximate == "tanh" else "gelu_erf",
        residual=residual,
        drop=drop,
        recompute=recompute,
        precision=precision,
        impl=impl,
    )


def swiglu_mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    drop: Drop | None = None,
    recompute: str | None = None,
    precision: str | None = None,
    impl: str | None = None,
) -> torch.Tensor:
    """`mlp` with SwiGLU: up_weight[F, 2, E], gate and up side by side."""
    return mlp(
        x,
        up_weight,
        down_weight,
        up_bias,
        down_bias,
        activation="swiglu",
        residual=residual,
        drop=drop,
        recompute=recompute,
        precision=precision,
        impl=impl,
    )
