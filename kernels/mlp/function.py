"""The MLP as one autograd Function, on one device or over tensor ranks.

The package's docstring has the formulas and what is saved.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.activation import RECOMPUTE, activation_fwd, find_activation
from warpweave.kernels.dropout import Drop, check_drop, dropout
from warpweave.kernels.gemm.local import LOCAL, Local, weight_gradient
from warpweave.kernels.mlp.hidden import hidden_again, hidden_bwd, hidden_fwd
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.runtime.beside import beside_dtensors
from warpweave.kernels.runtime.dispatch import choose, no_graph, once_differentiable, wants_gradient
from warpweave.kernels.runtime.dtypes import no_autocast, operand_dtype
from warpweave.kernels.runtime.wgrad import leaf_of, rows


class MLPOptions(NamedTuple):
    """The options of an MLP; `mlp` documents, creates and checks them."""

    activation: str
    drop: Drop | None = None
    recompute: str = "activation"
    precision: str | None = None
    impl: str | None = None
    dtype: torch.dtype | None = None  # in which the Function computes


# ---------------------------------------------------------------- autograd


@no_graph
def mlp_fwd(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    down_weight: torch.Tensor,
    down_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: MLPOptions,
    *,
    save: bool,
    ranks: Local = LOCAL,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(y, z, h) for x[T, E] and two-dimensional weights; z and h are None unless they are saved."""
    activation, drop, recompute, precision, impl, _ = options

    def up(x: torch.Tensor | Gathering, first: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return hidden_fwd(
            x, up_weight, up_bias, activation=activation,
            save_z=save and recompute != "up", precision=precision, impl=impl,
        )  # fmt: skip

    h, z = ranks.column_product(x, up)
    y = ranks.row_product(
        h, down_weight, down_bias, drop=drop, residual=residual, precision=precision, impl=impl
    )
    return y, z, h if save and recompute == "nothing" else None


@no_graph
def mlp_up_again(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    up_bias: torch.Tensor | None,
    options: MLPOptions,
    *,
    ranks: Local = LOCAL,
) -> torch.Tensor:
    """z of all tokens, recomputed as in the forward."""

    def up(x: torch.Tensor | Gathering, first: int) -> torch.Tensor:
        return hidden_again(
            x, up_weight, up_bias, activation=options.activation, precision=options.precision,
            impl=options.impl,
        )  # fmt: skip

    return ranks.column_product(x, up)


@no_graph
def mlp_bwd(
    do: torch.Tensor | Gathering,
    down_weight: torch.Tensor,
    z: torch.Tensor | None,
    options: MLPOptions,
    *,
    want_dz: bool = True,
    want_hidden: bool = True,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dz, h), each only if needed, from do[T, E] and z of any tokens."""
    activation, precision, impl = options.activation, options.precision, options.impl
    if want_dz:
        return hidden_bwd(
            do, down_weight, z,
            activation=activation, want_hidden=want_hidden, precision=precision, impl=impl,
        )  # fmt: skip
    return None, activation_fwd(z, activation, impl=impl) if want_hidden else None


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, up_weight, up_bias, down_weight, down_bias, residual, options, save, ranks):
        ctx.options, ctx.ranks, ctx.like, dtype = options, ranks, (x.shape, x.dtype), options.dtype
        ctx.leaves = (up_weight, up_bias), (down_weight, down_bias)
        with no_autocast(x):
            x = x.to(dtype)
            y, z, h = mlp_fwd(
                rows(x), *_flat(up_weight, up_bias, dtype), down_weight.to(dtype), down_bias,
                None if residual is None else rows(residual), options, save=save, ranks=ranks,
            )  # fmt: skip
            # Over ranks, only the shard of x is saved, 1/R of the memory, and gathered again.
            needs_x = ctx.needs_input_grad[1] or options.recompute == "up"
            ctx.save_for_backward(x if needs_x else None, up_weight, up_bias, down_weight, z, h)
            return y.view(ctx.like[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, up, up_bias, down, z, h), needs = ctx.saved_tensors, ctx.needs_input_grad
        (up_leaves, (down_leaf, bias_leaf)), (shape, x_dtype) = ctx.leaves, ctx.like
        options, ranks, dtype, dw2 = ctx.options, ctx.ranks, ctx.options.dtype, None
        with no_autocast(dy):
            x, do = None if x is None else rows(x), rows(dy)
            up, up_bias = _flat(up, up_bias, dtype)
            if options.drop is not None:
                do = dropout(do, options.drop, impl=options.impl)
            if z is None and any(needs[:4]):
                z = mlp_up_again(x, up, up_bias, options, ranks=ranks)
            down, want_hidden = down.to(dtype), needs[3] and h is None
            (dz, again), do, db2 = ranks.row_gradients(
                do, bias_leaf if needs[4] else None,
                lambda do, first: mlp_bwd(
                    do, down, None if z is None else z[first : first + do.shape[0]], options,
                    want_dz=any(needs[:3]), want_hidden=want_hidden,
                ),
            )  # fmt: skip
            h = again if want_hidden else h
            if needs[3]:
                dw2 = weight_gradient(down_leaf, lambda: (do, h))
            dx, dw1, db1 = ranks.column_gradients(dz, x, up, up_leaves, needs[:3])
            dx = None if dx is None else dx.view(shape).to(x_dtype)
        return dx, dw1, db1, dw2, db2, dy if needs[5] else None, *[None] * 3

    @staticmethod
    def spmd_typecheck(*, x, up_weight, up_bias, down_weight, down_bias, residual, options, ranks):
        from spmd_types import rules

        # Units are sharded in whole pairs. act is not linear, so the sum over E must be complete.
        x = ranks.column_input_type(x)
        pairs = "_" * (up_weight.dim() - 2)
        h = rules.einsum(f"..._,f{pairs}_->...f", x, up_weight)
        if up_bias is not None:
            h = rules.einsum(f"...f,f{pairs}->...f", h, up_bias)
        y = ranks.row_output_type(rules.einsum("...f,_f->..._", h, down_weight))
        if down_bias is not None:
            y = rules.einsum("..._,_->..._", y, down_bias)
        if options.drop is not None:
            tokens = ranks.row_tokens_type(options.drop.tokens)
            y = rules.einsum("..._,...->..._", y, tokens)
        return y if residual is None else rules.einsum("..._,..._->..._", y, residual)


def _flat(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The up projection as [F or 2F, E] and [F or 2F], in `dtype`."""
    return rows(weight).to(dtype), None if bias is None else bias.flatten().to(dtype)


# ---------------------------------------------------------------- public


@beside_dtensors("x", "residual")
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
    ranks: Local = LOCAL,
) -> torch.Tensor:
    """y[..., E] = residual + dropout(act(x W1^T + b1) W2^T + b2), differentiable in every tensor.

    Args:
        x: x[..., E] (any sharding of the tokens).
        up_weight: W1[F, E], or [F, 2, E] if the activation is gated. To defer its gradient, pass a
            leaf parameter or a view of one. For separate weights, pass torch.stack([gate, up], 1).
        down_weight: W2[E, F].
        up_bias, down_bias: b1[F] or [F, 2], b2[E]; or None.
        activation: "gelu", "gelu_erf", "relu2", "swiglu" or "geglu".
        residual: of the shape of x, or None. If its dtype differs, y has the wider of both.
        drop: probability, seed, site and the global indices of x's tokens: see `dropout`.
        recompute: what backward recomputes: "activation" (the default), "up" (also the first
            product) or "nothing" (the default of the torch path on a CPU).
        precision: how Triton multiplies float32, see `gemm`.
        impl: None is torch except for CUDA tensors; for these it is as in `fused_gemm`.
        ranks: the ranks over which F is sharded, set by `parallel.tensor.parallel_mlp`.

    Under autocast, everything is computed in its dtype.

    Raises:
        ValueError: shapes, dtypes or options do not fit, or `impl` cannot run.

    Examples:
        >>> x, up, down = torch.randn(2, 16, 64), torch.randn(128, 2, 64), torch.randn(64, 128)
        >>> mlp(x, up, down, activation="geglu", residual=x).shape
        torch.Size([2, 16, 64])
    """
    name = ranks.name("mlp")
    parameters = {
        "up_weight": up_weight,
        "up_bias": up_bias,
        "down_weight": down_weight,
        "down_bias": down_bias,
    }
    chosen = choose(impl, x, *parameters.values(), residual, getattr(drop, "tokens", None))
    check_mlp(x, up_weight, down_weight, up_bias, down_bias, residual, activation, name)
    recompute = choose_recompute(recompute, chosen, x)
    dtype = operand_dtype(name, x, parameters)
    drop = check_drop(drop, torch.Size((x.shape[:-1].numel(),)))
    wide = residual is not None and residual.dtype != dtype  # a stream that is kept wider
    added = None if wide else residual
    if added is x:  # a compiler cannot trace a Function that gets one tensor twice
        added = x.view_as(x)
    y = _MLP.apply(
        x,
        *(leaf_of(p, bias=kind.endswith("bias")) for kind, p in parameters.items()),
        added,
        MLPOptions(activation, drop, recompute, precision, impl, dtype),
        wants_gradient(x, *parameters.values(), added),
        ranks,
    )
    return residual + y if wide else y


def choose_recompute(recompute: str | None, impl: str, x: torch.Tensor) -> str:
    """Resolve a `recompute` of None for `impl` and x's device; refuse unknown ones."""
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
    """Raise ValueError, with `name`, unless the shapes are those of an MLP with this activation."""
    gated = find_activation(activation).gated
    E = x.shape[-1] if x.ndim else 0
    width = down_weight.shape[-1] if down_weight.ndim == 2 else -1
    # With two dims, rows gate, up, gate, up, ... would look like all gates before all ups.
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
        raise ValueError(
            f"{name}: residual must have the shape {[*x.shape]} of x, got {[*residual.shape]}"
        )


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
    """`mlp` with GELU in its tanh form, or by erf if approximate="none": up_weight[F, E].

    Examples:
        >>> gelu_mlp(torch.randn(2, 16, 64), torch.randn(128, 64), torch.randn(64, 128)).shape
        torch.Size([2, 16, 64])
    """
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
    """`mlp` with SwiGLU: up_weight[F, 2, E], gate and up interleaved.

    Examples:
        >>> gate, up, down = torch.randn(128, 64), torch.randn(128, 64), torch.randn(64, 128)
        >>> swiglu_mlp(torch.randn(2, 16, 64), torch.stack([gate, up], 1), down).shape
        torch.Size([2, 16, 64])
    """
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
