"""The feed-forward half of a transformer block, its hidden units cut over the tensor ranks.

What a column-parallel layer, an activation and a row-parallel layer compute one after the other, in
one Function: the activation is the epilogue of the first product, its slope that of the first
product of the backward, and the hidden activations need not be kept (`kernels.mlp`). Collectives,
types and conventions are those of the two layers in ``tensor``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm.gradients import (
    Settled,
    bias_gradient,
    leaf_of,
    rows,
    settled_dtype,
    weight_gradient,
)
from warpweave.kernels.mlp import How, check_mlp, choose_recompute, hidden_fwd, mlp, mlp_bwd
from warpweave.kernels.runtime.dispatch import choose, once_differentiable, wants_gradient
from warpweave.parallel.collectives import group_rank, start_all_gather
from warpweave.parallel.tensor.linear import (
    column_gradients,
    column_input_type,
    row_output_type,
    row_sum,
    whole_tokens,
)


class _ParallelMLP(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, up_weight, up_bias, down_weight, down_bias, group, sequence_parallel, overlap, how,
        dtype, keep,
    ):  # fmt: skip
        ctx.cut, ctx.how, ctx.dtypes = (group, sequence_parallel, overlap), how, (x.dtype, dtype)
        ctx.parameters = up_weight, up_bias, down_weight, down_bias
        with Settled(x):
            x, bias = x.to(dtype), None if up_bias is None else up_bias.to(dtype).flatten()
            whole = whole_tokens(x, group, sequence_parallel)
            h, z = hidden_fwd(
                rows(whole), rows(up_weight).to(dtype), bias,
                activation=how.activation, keep=keep and how.recompute != "up", impl=how.impl,
            )  # fmt: skip
            # The shard of x is kept and gathered again in the backward: 1/R of the memory.
            needs_x = ctx.needs_input_grad[1] or how.recompute == "up"
            kept = h if keep and how.recompute == "nothing" else None
            ctx.save_for_backward(x if needs_x else None, up_weight, up_bias, down_weight, z, kept)
            h = h.view(*whole.shape[:-1], h.shape[1])
            return row_sum(h, down_weight.to(dtype), down_bias, group, sequence_parallel)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        (x, up, up_bias, down, z, h), needs = ctx.saved_tensors, ctx.needs_input_grad
        up_leaf, up_bias_leaf, down_leaf, down_bias_leaf = ctx.parameters
        (group, sequence_parallel, overlap), (x_dtype, dtype) = ctx.cut, ctx.dtypes
        with Settled(dy):
            gathering = start_all_gather(dy, group) if sequence_parallel else None
            if gathering is not None and not overlap:
                gathering.wait()
            # of this rank's own tokens, while the others' arrive
            db2 = bias_gradient(down_bias_leaf, dy) if needs[4] else None
            whole = dy if gathering is None else gathering.wait()
            again = rows(whole_tokens(x, group, sequence_parallel)) if z is None else None
            up_bias = None if up_bias is None else up_bias.to(dtype).flatten()
            found = mlp_bwd(
                rows(whole), again, rows(up).to(dtype), up_bias, down.to(dtype), z, h, ctx.how,
                want_dx=False, want_dz=any(needs[:3]), want_hidden=needs[3],
            )  # fmt: skip
            dw2 = weight_gradient(down_leaf, lambda: (found.do, found.h)) if needs[3] else None
            dx = dw1 = db1 = None
            if found.dz is not None:
                dz = found.dz.view(*whole.shape[:-1], found.dz.shape[1])
                dx, dw1, db1 = column_gradients(
                    dz, x, rows(up), (up_leaf, up_bias_leaf), group,
                    sequence_parallel=sequence_parallel, overlap=overlap, needs=needs[:3],
                )  # fmt: skip
            dx = None if dx is None else dx.to(x_dtype)
        return dx, dw1, db1, dw2, db2, *[None] * 6

    @staticmethod
    def spmd_typecheck(*, x, up_weight, up_bias, down_weight, down_bias, group, sequence_parallel):
        from spmd_types import rules

        # act is not linear, so the sum over E must be whole
        x = column_input_type(x, group, sequence_parallel)
        pairs = "_" * (up_weight.dim() - 2)
        h = rules.einsum(f"..._,f{pairs}_->...f", x, up_weight)
        if up_bias is not None:
            h = rules.einsum(f"...f,f{pairs}->...f", h, up_bias)
        y = rules.einsum("...f,_f->..._", h, down_weight)
        y = row_output_type(y, group, sequence_parallel)
        return y if down_bias is None else rules.einsum("..._,_->..._", y, down_bias)


def parallel_mlp(
    x: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    *,
    activation: str,
    group: dist.ProcessGroup | None,
    sequence_parallel: bool = False,
    residual: torch.Tensor | None = None,
    drop: Drop | None = None,
    recompute: str | None = None,
    overlap: bool = True,
    impl: str | None = None,
) -> torch.Tensor:
    """y = residual + dropout(act(x W1^T + b1) W2^T + b2), hidden units cut over the group.

    Forward:          h[T, F/R]{S(-1)} = act(z), z = x[T, E]{I} W1[F/R, E]{S(0)}^T + b1[F/R]{S(0)}
                      y[T, E]{I} = all-reduce(h W2[E, F/R]{S(1)}^T) + b2[E]{I}
    Input gradient:   dz[T, F/R]{S(-1)} = (dy W2) act'(z)      dx[T, E]{I} = all-reduce(dz W1)
    Weight gradients: dW1[F/R, E]{S(0)} = dz^T x      dW2[E, F/R]{S(1)} = dy^T h, no collective
    Bias gradients:   db1[F/R]{S(0)}, db2[E]{I} = sums over tokens of dz and dy, no collective

    With sequence_parallel x[T/R, E]{S(0)} and dy[T/R, E]{S(0)} are gathered, y and dx reduced and
    scattered, and db2{P} is the sum over this rank's own tokens, as in the two linear layers.
    A gated activation has W1[F/R, 2, E], gate and up side by side, and b1[F/R, 2].

    Args:
        x: x[..., E] replicated, or x[T/R, ..., E] with sequence_parallel.
        up_weight, up_bias, down_weight, down_bias: this rank's shards (b2 is whole); leaves, or
            views of leaves.
        activation: "gelu", "gelu_erf", "relu2", "swiglu" or "geglu".
        group: the R tensor ranks; None for one.
        sequence_parallel: tokens of x and y are cut over the group along dim 0.
        residual, drop: like y, and the key of its dropout: see `kernels.mlp.mlp`.
        recompute: "nothing", "activation" or "up"; None chooses, see `kernels.mlp.mlp`. "up"
            gathers x once more.
        overlap: in the backward, the gather of dy runs under the bias gradient, that of x under the
            GEMM of dx and the sum of dx under that of dW1; False waits at once, with equal results.
        impl: "triton", "torch" or None to choose by device.

    Returns:
        y like x, in the dtype of `x` or of autocast.

    Raises:
        ValueError: shapes, dtypes or options do not fit.
    """
    if group is None:
        return mlp(
            x, up_weight, down_weight, up_bias, down_bias,
            activation=activation, residual=residual, drop=drop, recompute=recompute, impl=impl,
        )  # fmt: skip
    name = f"parallel_mlp on rank {group_rank(group)}"
    parameters = (up_weight, up_bias, down_weight, down_bias)
    chosen = choose(impl, x, *parameters, residual)
    check_mlp(x, up_weight, down_weight, up_bias, down_bias, residual, activation, name)
    if x.ndim < 2:
        raise ValueError(
            f"{name}: tensor ranks need x[..., E] of two dims at least, got {[*x.shape]}"
        )
    names = ("up_weight", "up_bias", "down_weight", "down_bias")
    dtype = settled_dtype(name, x, dict(zip(names, parameters)))
    how = How(activation, None, choose_recompute(recompute, chosen, x), None, chosen)
    keep = wants_gradient(x, *parameters)
    leaves = map(leaf_of, parameters)
    y = _ParallelMLP.apply(x, *leaves, group, sequence_parallel, overlap, how, dtype, keep)
    if drop is not None and drop.p:
        y = drop.apply(y, impl)
    return y if residual is None else residual + y
