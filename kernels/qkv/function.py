"""The QKV projection as one autograd Function, local or over tensor ranks: see the ``__init__``."""

from __future__ import annotations

from typing import NamedTuple

import torch

from warpweave.kernels.gemm.local import LOCAL, Local
from warpweave.kernels.overlap.gathering import Gathering
from warpweave.kernels.qkv.kernels import QKV, check_qkv, gather_qkv_fwd, qkv_bwd, qkv_fwd
from warpweave.kernels.runtime.dispatch import choose, once_differentiable
from warpweave.kernels.runtime.dtypes import no_autocast, operand_dtype
from warpweave.kernels.runtime.wgrad import leaf_of, rows


class QKVOptions(NamedTuple):
    """The options of the projection; `qkv_rope` documents, creates and checks them."""

    shape: tuple[int, int] | None  # (B, S) of tokens x[T, E]; q, k and v are then also flat
    heads: tuple[int, int]  # G + 2 and D, as the leaves may be flat
    dtype: torch.dtype  # in which the Function computes
    precision: str | None = None
    impl: str | None = None


class _QKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, cos, sin, options, ranks):
        shape, heads, dtype, precision, impl = options
        ctx.leaves, ctx.like = (weight, bias), (x.shape, x.dtype)
        ctx.options, ctx.ranks = options, ranks
        with no_autocast(x):
            x = x.to(dtype)
            # Over ranks, only the shard of x is saved, 1/R of the memory, and gathered again.
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, cos, sin)
            w, b = _by_head(weight, bias, heads, dtype)

            def project(x: torch.Tensor | Gathering, first: int) -> tuple[torch.Tensor, ...]:
                how = {"precision": precision, "impl": impl}
                if shape is None:
                    return qkv_fwd(x, w, b, cos, sin, **how)
                if isinstance(x, Gathering):
                    found = gather_qkv_fwd(x, w, b, cos, sin, shape=shape, precision=precision)
                elif len(x) == shape[0] * shape[1]:
                    found = qkv_fwd(x.unflatten(0, shape), w, b, cos, sin, **how)
                else:  # a run of tokens, as one sample of their positions
                    at = torch.arange(first, first + len(x), device=x.device) % shape[1]
                    table = (None, None) if cos is None else (cos[at], sin[at])
                    found = qkv_fwd(x[None], w, b, *table, **how)
                q, k, v = (t.flatten(0, 1) for t in found)
                return q, k, v

            return ranks.column_product(x, project)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        (x, w, cos, sin), (like, x_dtype) = ctx.saved_tensors, ctx.like
        options = ctx.options
        with no_autocast(dq):
            if options.shape is not None:
                dq, dk, dv = (t.unflatten(0, options.shape) for t in (dq, dk, dv))
            dz = qkv_bwd(dq, dk, dv, cos, sin, impl=options.impl)
            dx, dw, db = ctx.ranks.column_gradients(
                dz, x, rows(w).to(options.dtype), ctx.leaves, ctx.needs_input_grad[:3]
            )
            dx = None if dx is None else dx.view(like).to(x_dtype)
        return dx, dw, db, *[None] * 4

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, cos, sin, options, ranks):
        from spmd_types import rules

        shape = options.shape
        # The weight is sharded in whole groups of heads; each output has some of them.
        tokens = "bs" if shape is None else "t"
        x = ranks.column_input_type(x)
        z = rules.einsum(f"{tokens}_,n{'_' * (weight.dim() - 1)}->{tokens}n", x, weight)
        if bias is not None:
            z = rules.einsum(f"{tokens}n,n{'_' * (bias.dim() - 1)}->{tokens}n", z, bias)
        q = k = v = rules.einsum(f"{tokens}n->{tokens}n_", z)
        if cos is not None:
            # The rows of one sample are the rows of the table.
            s = "s" if shape is None else "t" if shape[0] == 1 else "_"
            q = k = rules.einsum(f"{tokens}n_,{s}_,{s}_->{tokens}n_", q, cos, sin)
        return q, k, v


def _by_head(
    weight: torch.Tensor, bias: torch.Tensor | None, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight[Hkv, G + 2, D, E] and bias from leaves that may be flat; `heads` is (G + 2, D)."""
    shape = (weight.shape[:-1].numel() // (heads[0] * heads[1]), *heads)
    weight = weight.to(dtype).reshape(*shape, weight.shape[-1])
    return weight, None if bias is None else bias.to(dtype).reshape(shape)


def qkv_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    precision: str | None = None,
    impl: str | None = None,
    shape: tuple[int, int] | None = None,
    ranks: Local = LOCAL,
) -> QKV:
    """Queries, keys and values of x[B, S, E], rotated; differentiable in x, weight and bias.

    Args:
        x: x[B, S, E] (any sharding of S whose positions the table holds).
        weight: weight[Hkv, G + 2, D, E], for each KV head (which may be sharded) its G query heads,
            its key and its value. For separate weights, pass torch.cat((q.view(Hkv, G, D, E),
            k.view(Hkv, 1, D, E), v.view(Hkv, 1, D, E)), 1).
        bias: [Hkv, G + 2, D], or None.
        cos, sin: [S, D/2] from `rope_table`, or both None for no rotation.
        precision: how Triton multiplies float32, see `gemm`.
        impl: None is torch except for CUDA tensors; for these it is as in `fused_gemm`.
        shape, ranks: (B, S) of x[T, E] with T = B S, and the ranks over which heads are sharded,
            set by `parallel.tensor.parallel_qkv_rope`.

    Returns:
        q[B, S, Hkv G, D], k and v[B, S, Hkv, D], in the dtype of x or of autocast.

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl` cannot run.

    Examples:
        >>> from warpweave.kernels.rope import rope_table
        >>> cos, sin = rope_table(torch.arange(16), 8)
        >>> weight = torch.randn(2, 2 + 2, 8, 64)  # 2 KV heads: 2 queries, a key, a value
        >>> q, k, v = qkv_rope(torch.randn(2, 16, 64), weight, None, cos, sin)
        >>> q.shape, k.shape
        (torch.Size([2, 16, 4, 8]), torch.Size([2, 16, 2, 8]))
    """
    name = ranks.name("qkv_rope")
    choose(impl, x, weight, bias, cos, sin)
    check_qkv(x.shape if shape is None else (*shape, x.shape[-1]), weight, bias, cos, sin, name)
    dtype = operand_dtype(name, x, {"weight": weight, "bias": bias})
    leaves, heads = (leaf_of(weight), leaf_of(bias, bias=True)), tuple(weight.shape[1:3])
    options = QKVOptions(shape, heads, dtype, precision, impl)
    found = _QKV.apply(x, *leaves, cos, sin, options, ranks)
    if shape is None:
        return found
    # the length is -1, because exact sizes would break the type check of a sharded sequence
    B, S = shape
    q, k, v = (t.unflatten(0, (B, -1 if B else S)) for t in found)
    return q, k, v
