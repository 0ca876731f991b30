"""The projection to queries, keys and values, with the rotary embedding in its epilogue.

    z = x W^T + b        q, k = rope(z of their rows)        v = z of its rows
    dz = (rope^-1(dq), rope^-1(dk), dv)     dx = dz W     dW = dz^T x     db = sum over tokens of dz

x: [B, S, E]; W: [Hkv, G + 2, D, E], for each KV head its G query heads, then its key, then its
value, so that a slice of KV heads is a slice of W; b: [Hkv, G + 2, D]; q: [B, S, Hkv G, D]; k, v:
[B, S, Hkv, D], contiguous, which is how attention reads them; cos, sin: [S, D/2] of `rope_table`.
The shape says the order: all queries before all keys, in two dims, would be taken for it.

The two halves of a rotated pair lie D/2 columns apart. The kernel numbers its columns by pairs, so
that both are in one tile, side by side, whatever D is: column 2p + h of the product is row
(p // (D/2)) D + h D/2 + p % (D/2) of W, flattened. Values go through with an angle of 0.

Saved for backward: x and the table. One kernel rotates dq and dk back and writes dz; the products
are torch's. Rotation is in float32 (float64 for float64) from the accumulators, rounded once.

Sources: Su et al. 2021 (arXiv:2104.09864); Ainslie et al. 2023 (arXiv:2305.13245) for the groups.
Limits: all of D is rotated, half with half (not the interleaved pairs of GPT-J); gradients of
gradients do not exist. With an odd D nothing can turn and nothing is fused: a product, and views.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warpweave.kernels.gemm.fused import check_operands, find_precision, gemm
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
from warpweave.kernels.rope import apply_rope, check_table, rope_fwd
from warpweave.kernels.runtime.dispatch import (
    choose,
    no_graph,
    once_differentiable,
    refuse_tangents,
    tl,
    triton,
)
from warpweave.kernels.runtime.numeric import to_dtype, upcast

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- device helpers


@triton.jit
def _places(q_ptr, k_ptr, v_ptr, p, m, kv_heads, HALF: tl.constexpr, G: tl.constexpr):
    """Where the first elements of pairs p at rows m lie in q, k or v, and whether they turn."""
    head, i = p // HALF, p % HALF
    slot, kv = head % (G + 2), head // (G + 2)
    is_q, is_k = (slot < G)[None, :], (slot == G)[None, :]
    in_q = m[:, None] * (kv_heads * G * 2 * HALF) + ((kv * G + slot) * 2 * HALF + i)[None, :]
    in_kv = m[:, None] * (kv_heads * 2 * HALF) + (kv * 2 * HALF + i)[None, :]
    place = tl.where(is_q, q_ptr + in_q, tl.where(is_k, k_ptr + in_kv, v_ptr + in_kv))
    return place, slot <= G


@triton.jit
def _angles(cos_ptr, sin_ptr, p, m, M, S, turns, HALF: tl.constexpr):
    """cos and sin of pairs p at rows m; 1 and 0 where nothing turns."""
    at = (m % S)[:, None] * HALF + (p % HALF)[None, :]
    live = (m < M)[:, None] & turns[None, :]
    return upcast(tl.load(cos_ptr + at, live, 1.0)), upcast(tl.load(sin_ptr + at, live, 0.0))


# ---------------------------------------------------------------- forward


@triton.jit
def _turn_tile(
    z,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    m,
    pair,
    M,
    S,
    kv_heads,
    HALF: tl.constexpr,
    G: tl.constexpr,
):
    """Bias, rotation and store of accumulators at rows m and the pairs from `pair`."""
    PAIRS: tl.constexpr = z.shape[1] // 2
    p = pair + tl.arange(0, PAIRS)
    real = p < kv_heads * (G + 2) * HALF
    z1, z2 = tl.split(z.reshape(z.shape[0], PAIRS, 2))
    if bias_ptr is not None:
        at = bias_ptr + p // HALF * (2 * HALF) + p % HALF
        z1 += tl.load(at, real, 0.0).to(z.dtype)[None, :]
        z2 += tl.load(at + HALF, real, 0.0).to(z.dtype)[None, :]
    place, turns = _places(q_ptr, k_ptr, v_ptr, p, m, kv_heads, HALF, G)
    if cos_ptr is not None:
        cos, sin = _angles(cos_ptr, sin_ptr, p, m, M, S, turns & real, HALF)
        z1, z2 = z1 * cos - z2 * sin, z2 * cos + z1 * sin
    live = (m < M)[:, None] & real[None, :]
    tl.store(place, to_dtype(z1, q_ptr.dtype.element_ty), live)
    tl.store(place + HALF, to_dtype(z2, q_ptr.dtype.element_ty), live)


@triton.jit
def _qkv_fwd_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    M,
    S,
    E,
    kv_heads,
    stride_xm,
    stride_xe,
    stride_wn,
    stride_we,
    HALF: tl.constexpr,
    G: tl.constexpr,
    PRECISION: tl.constexpr,
    EVEN_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
):
    N = kv_heads * (G + 2) * (2 * HALF)
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        # 1. The accumulators of a tile, its columns in the order of pairs.
        row, col = tile_at(index, M, N, BLOCK_M, BLOCK_N, GROUP)
        m, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        p = c // 2
        n = p // HALF * (2 * HALF) + c % 2 * HALF + p % HALF
        z = product(
            x_ptr, w_ptr, m, n, M, N, E, stride_xm, stride_xe, stride_we, stride_wn,
            PRECISION, EVEN_E, BLOCK_M, BLOCK_N, BLOCK_E,
        )  # fmt: skip

        # 2. The rest, a quarter at a time, as in `gemm`.
        left, right = halves(z)
        first, second = halves(left)
        third, fourth = halves(right)
        pair, STEP = col // 2, BLOCK_N // 8
        _turn_tile(
            first, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
            m, pair, M, S, kv_heads, HALF, G,
        )  # fmt: skip
        _turn_tile(
            second, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
            m, pair + STEP, M, S, kv_heads, HALF, G,
        )  # fmt: skip
        _turn_tile(
            third, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
            m, pair + 2 * STEP, M, S, kv_heads, HALF, G,
        )  # fmt: skip
        _turn_tile(
            fourth, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
            m, pair + 3 * STEP, M, S, kv_heads, HALF, G,
        )  # fmt: skip


@no_graph
def qkv_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    precision: str | None = None,
    impl: str | None = None,
) -> QKV:
    """(q, k, v) of x[B, S, E]: the forward half of `qkv_rope`. Raises what that raises."""
    impl = choose(impl, x, weight, bias, cos, sin)
    check_qkv(x.shape, weight, bias, cos, sin)
    kv_heads, group, head_dim = weight.shape[0], weight.shape[1] - 2, weight.shape[2]
    weight, bias = rows(weight), None if bias is None else bias.flatten()
    check_operands(rows(x), weight.t(), bias)
    B, S, E = x.shape
    if impl == "torch" or head_dim % 2:
        z = gemm(rows(x), weight.t(), bias).view(B, S, kv_heads, group + 2, head_dim)
        q, k, v = z.split((group, 1, 1), 3)
        q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        if cos is None:
            return q, k, v
        q, k = (rope_fwd(t, cos, sin, impl="torch") for t in (q, k))
        return q, k, v
    q = x.new_empty(B, S, kv_heads * group, head_dim)
    k, v = (x.new_empty(B, S, kv_heads, head_dim) for _ in "kv")
    flat, (N, _) = rows(x), weight.shape
    if not q.numel():
        return q, k, v
    tile = find_tile(flat, weight.t(), "large")
    with torch.cuda.device_of(x):
        _qkv_fwd_kernel[grid(tile, B * S, N, x.device)](
            flat,
            weight,
            None if bias is None else bias.contiguous(),
            None if cos is None else cos.contiguous(),
            None if sin is None else sin.contiguous(),
            q,
            k,
            v,
            B * S,
            S,
            E,
            kv_heads,
            *flat.stride(),
            *weight.stride(),
            head_dim // 2,
            group,
            find_precision(precision),
            E % tile.k == 0,
            tile.m,
            tile.n,
            tile.k,
            tile.group,
            **launch_options(tile, x),
        )
    return q, k, v


# ---------------------------------------------------------------- backward


@triton.jit
def _qkv_bwd_kernel(
    dq_ptr,
    dk_ptr,
    dv_ptr,
    cos_ptr,
    sin_ptr,
    dz_ptr,
    M,
    S,
    kv_heads,
    HALF: tl.constexpr,
    G: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    # 1. Pairs p of rows m, wherever they lie.
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(1).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    real = p < kv_heads * (G + 2) * HALF
    live = (m < M)[:, None] & real[None, :]
    place, turns = _places(dq_ptr, dk_ptr, dv_ptr, p, m, kv_heads, HALF, G)
    d1, d2 = upcast(tl.load(place, live, 0.0)), upcast(tl.load(place + HALF, live, 0.0))

    # 2. Back by the angle that they were turned by.
    if cos_ptr is not None:
        cos, sin = _angles(cos_ptr, sin_ptr, p, m, M, S, turns & real, HALF)
        d1, d2 = d1 * cos + d2 * sin, d2 * cos - d1 * sin

    # 3. To the columns of the product.
    N = kv_heads * (G + 2) * (2 * HALF)
    at = dz_ptr + m[:, None] * N + (p // HALF * (2 * HALF) + p % HALF)[None, :]
    tl.store(at, to_dtype(d1, dz_ptr.dtype.element_ty), live)
    tl.store(at + HALF, to_dtype(d2, dz_ptr.dtype.element_ty), live)


@no_graph
def qkv_bwd(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """dz[B S, N], the gradient of the projection's output, from those of q, k and v."""
    impl = choose(impl, dq, dk, dv, cos, sin)
    fits = dq.ndim == dk.ndim == 4 and dk.shape == dv.shape and dq.dtype == dk.dtype == dv.dtype
    if (
        not fits
        or (*dq.shape[:2], dq.shape[3]) != (*dk.shape[:2], dk.shape[3])
        or dq.shape[2] % max(dk.shape[2], 1)
    ):
        raise ValueError(
            f"dq[B, S, H, D] and dk, dv[B, S, Hkv, D] do not fit: got {[*dq.shape]} {dq.dtype}, "
            f"{[*dk.shape]} {dk.dtype} and {[*dv.shape]} {dv.dtype}"
        )
    (B, S, heads, D), kv_heads = dq.shape, dk.shape[2]
    if cos is not None and (sin is None or not cos.shape == sin.shape == (S, D // 2)):
        raise ValueError(
            f"cos and sin must be [S, D/2] = {[S, D // 2]}, got {[*cos.shape]} and "
            f"{None if sin is None else [*sin.shape]}"
        )
    group = heads // max(kv_heads, 1)
    if impl == "torch" or D % 2:
        if cos is not None:
            dq, dk = (rope_fwd(t, cos, sin, conjugate=True, impl="torch") for t in (dq, dk))
        dz = torch.cat(
            (dq.unflatten(2, (kv_heads, group)), dk[:, :, :, None], dv[:, :, :, None]), 3
        )
        return dz.view(B * S, kv_heads * (group + 2) * D)
    dq, dk, dv = dq.contiguous(), dk.contiguous(), dv.contiguous()
    dz = dq.new_empty(B * S, kv_heads * (group + 2) * D)
    if not dz.numel():
        return dz
    pairs = min(256, triton.next_power_of_2(dz.shape[1] // 2))
    row_count = 1024 // pairs
    with torch.cuda.device_of(dq):
        _qkv_bwd_kernel[(triton.cdiv(B * S, row_count), triton.cdiv(dz.shape[1] // 2, pairs))](
            dq,
            dk,
            dv,
            None if cos is None else cos.contiguous(),
            None if sin is None else sin.contiguous(),
            dz,
            B * S,
            S,
            kv_heads,
            D // 2,
            group,
            row_count,
            pairs,
            num_warps=4,
        )
    return dz


# ---------------------------------------------------------------- autograd


def by_head(
    weight: torch.Tensor, bias: torch.Tensor | None, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """weight[Hkv, G + 2, D, E] and bias of leaves that may be flat; `heads` is (G + 2, D)."""
    shape = (weight.shape[:-1].numel() // (heads[0] * heads[1]), *heads)
    weight = weight.to(dtype).reshape(*shape, weight.shape[-1])
    return weight, None if bias is None else bias.to(dtype).reshape(shape)


class _QKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, cos, sin, heads, dtype, precision, impl):
        ctx.parameters, ctx.shape, ctx.dtypes, ctx.impl = (
            (weight, bias),
            x.shape,
            (x.dtype, dtype),
            impl,
        )
        with Settled(x):
            x = x.to(dtype)
            ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, cos, sin)
            return qkv_fwd(
                x, *by_head(weight, bias, heads, dtype), cos, sin, precision=precision, impl=impl
            )  # fmt: skip

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        (x, w, cos, sin), (weight, bias) = ctx.saved_tensors, ctx.parameters
        (x_dtype, dtype), needs = ctx.dtypes, ctx.needs_input_grad
        with Settled(dq):
            dz = qkv_bwd(dq, dk, dv, cos, sin, impl=ctx.impl)
            dx = gemm(dz, rows(w).to(dtype)).view(ctx.shape).to(x_dtype) if needs[0] else None
            dw = weight_gradient(weight, lambda: (dz, x)) if needs[1] else None
            db = bias_gradient(bias, dz) if needs[2] else None
        return dx, dw, db, *[None] * 6

    @staticmethod
    def spmd_typecheck(*, x, weight, bias, cos, sin):
        from spmd_types import rules

        # The weight is cut in whole groups of heads; each output has its share of them.
        z = rules.einsum(f"bs_,n{'_' * (weight.dim() - 1)}->bsn", x, weight)
        if bias is not None:
            z = rules.einsum(f"bsn,n{'_' * (bias.dim() - 1)}->bsn", z, bias)
        q = k = v = rules.einsum("bsn->bsn_", z)
        if cos is not None:
            q = k = rules.einsum("bsn_,s_,s_->bsn_", q, cos, sin)
        return q, k, v


# For compilers, which cannot trace `wgrad`.


@torch.library.custom_op("warpweave::qkv_rope", mutates_args=())
def _qkv_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    precision: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return qkv_fwd(x, weight, bias, cos, sin, precision=precision, impl="triton")


@_qkv_op.register_fake
def _(x, weight, bias, cos, sin, precision):
    kv, slots, head_dim, _ = weight.shape
    shapes = ((*x.shape[:2], heads, head_dim) for heads in (kv * (slots - 2), kv, kv))
    return tuple(x.new_empty(shape) for shape in shapes)


@torch.library.custom_op("warpweave::qkv_rope_backward", mutates_args=())
def _qkv_backward_op(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dz = qkv_bwd(dq, dk, dv, cos, sin, impl="triton")
    db = dz.sum(0, dtype=compute_dtype(dz)).to(weight.dtype).view(weight.shape[:-1])
    dx = gemm(dz, rows(weight)).view(x.shape)
    return dx, gemm(dz.t(), rows(x)).view(weight.shape), db


@_qkv_backward_op.register_fake
def _(dq, dk, dv, x, weight, cos, sin):
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[:-1])


def _save(ctx, inputs, output) -> None:
    x, weight, bias, cos, sin, *_ = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight, cos, sin)


def _backward(ctx, dq, dk, dv):
    dx, dw, db = _qkv_backward_op(dq, dk, dv, *ctx.saved_tensors)
    return dx, dw, db if ctx.biased else None, *[None] * 3


_qkv_op.register_autograd(_backward, setup_context=_save)


# ---------------------------------------------------------------- public


def qkv_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    precision: str | None = None,
    impl: str | None = None,
) -> QKV:
    """Queries, keys and values of x[B, S, E], rotated; differentiable in x, weight and bias.

    Args:
        x: x[B, S, E] (any sharding of S whose positions the table holds).
        weight: weight[Hkv, G + 2, D, E], for each KV head (which may be sharded) its G query heads,
            its key and its value: of separate ones torch.cat((q.view(Hkv, G, D, E), k.view(Hkv, 1,
            D, E), v.view(Hkv, 1, D, E)), 1).
        bias: [Hkv, G + 2, D], or None.
        cos, sin: [S, D/2] of `rope_table`, or both None to rotate nothing.
        precision: how Triton multiplies float32, see `gemm`.
        impl: None is Triton on CUDA tensors, torch on others.

    Returns:
        q[B, S, Hkv G, D], k and v[B, S, Hkv, D], in the dtype of x or of autocast.

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl` cannot run.
    """
    chosen = choose(impl, x, weight, bias, cos, sin)
    check_qkv(x.shape, weight, bias, cos, sin)
    dtype = settled_dtype("qkv_rope", x, {"weight": weight, "bias": bias})
    options = (precision, chosen)
    if not torch.compiler.is_compiling():
        leaves, heads = (leaf_of(weight), leaf_of(bias)), tuple(weight.shape[1:3])
        return _QKV.apply(x, *leaves, cos, sin, heads, dtype, *options)
    x, weight, bias = (t if t is None else t.to(dtype) for t in (x, weight, bias))
    _, slots, head_dim, _ = weight.shape
    if chosen == "triton" and head_dim % 2 == 0:
        refuse_tangents("qkv_rope", x, weight, bias)
        return _qkv_op(x, weight, bias, cos, sin, precision)
    bias = None if bias is None else bias.flatten()
    z = linear(x, rows(weight), bias, dtype).unflatten(-1, (-1, slots, head_dim))
    q, k, v = z.split((slots - 2, 1, 1), 3)
    q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
    if cos is None:
        return q, k, v
    return apply_rope(q, cos, sin, impl="torch"), apply_rope(k, cos, sin, impl="torch"), v


def check_qkv(
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    name: str = "qkv_rope",
) -> None:
    """Raise ValueError, in this name, on what is no projection of x[B, S, E] = `shape`."""
    if (
        len(shape) != 3
        or weight.ndim != 4
        or weight.shape[1] < 3
        or weight.shape[2] < 1
        or weight.shape[3] != shape[2]
    ):
        raise ValueError(
            f"{name}: need x[B, S, E] and weight[Hkv, G + 2, D, E] (each KV head's queries, key, "
            f"value), got {[*shape]} and {[*weight.shape]}"
        )
    if bias is not None and bias.shape != weight.shape[:-1]:
        raise ValueError(f"{name}: bias must be {[*weight.shape[:-1]]}, got {[*bias.shape]}")
    head_dim = weight.shape[2]
    if cos is not None and head_dim % 2:
        raise ValueError(f"{name}: a rotary embedding needs an even head_dim, got {head_dim}")
    if (cos is None) != (sin is None):
        raise ValueError(f"{name}: cos and sin must both be tensors, or both None")
    if cos is not None and sin is not None:
        check_table(cos, sin, f"{name}: ")
    if cos is not None and not cos.shape == sin.shape == (shape[1], head_dim // 2):
        raise ValueError(
            f"{name}: cos and sin must be [S, D/2] = {[shape[1], head_dim // 2]}, got "
            f"{[*cos.shape]} and {[*sin.shape]}"
        )
