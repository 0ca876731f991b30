"""The kernels of the QKV projection, and their launchers; the package's docstring has the formulas.

Forward is a product whose epilogue rotates. Backward rotates dq and dk back and writes dz, from
which torch's products compute the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warpweave.kernels.gemm.epilogue import find_precision
from warpweave.kernels.gemm.fused import check_operands, gemm
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    grid,
    mainloop,
    next_tile,
    tile_counter,
    tile_origin,
)
from warpweave.kernels.overlap.function import run_steps
from warpweave.kernels.overlap.gathering import Gathering, multiply
from warpweave.kernels.qkv.gathered import gather_qkv_steps
from warpweave.kernels.qkv.pairs import angles, columns_of_pairs, places, turn
from warpweave.kernels.rope import check_table, rope_fwd, rope_qk_fwd
from warpweave.kernels.runtime.dispatch import choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import no_autocast, to_dtype, upcast
from warpweave.kernels.runtime.fusion import choose_or_auto, fused_or_unfused
from warpweave.kernels.runtime.op import operator
from warpweave.kernels.runtime.wgrad import rows

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# ---------------------------------------------------------------- forward


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
    counter_ptr,
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
    index = tl.program_id(0)
    while index < tiles:
        # 1. The accumulators of a tile, with columns in the order of pairs.
        row, col = tile_origin(index, M, N, BLOCK_M, BLOCK_N, GROUP)
        m, n = row + tl.arange(0, BLOCK_M), columns_of_pairs(col, HALF, BLOCK_N)
        z = mainloop(
            x_ptr, w_ptr, m, n, M, N, E, stride_xm, stride_xe, stride_we, stride_wn,
            PRECISION, EVEN_E, BLOCK_M, BLOCK_N, BLOCK_E,
        )  # fmt: skip

        # 2. The rest. A100 has no free register for the next tile until this is done.
        turn(z, bias_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, m, col, M, S, kv_heads, HALF, G)
        index = next_tile(index, counter_ptr)


def _qkv_fwd_fake(x, weight, bias, cos, sin, precision, impl):
    kv_heads, slots, head_dim, _ = weight.shape
    shapes = ((*x.shape[:2], n, head_dim) for n in (kv_heads * (slots - 2), kv_heads, kv_heads))
    return tuple(x.new_empty(shape) for shape in shapes)


@operator("qkv_fwd", _qkv_fwd_fake, direct=True)
def _launch_qkv_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    precision: str | None,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (B, S, E), (kv_heads, slots, head_dim, _) = x.shape, weight.shape
    flat, flat_bias = rows(x), None if bias is None else bias.flatten().contiguous()
    if fused_or_unfused(impl, "qkv", flat) == "unfused":
        with no_autocast(x):
            z = gemm(flat, rows(weight).t(), flat_bias)
        q, k, v = _unfused_qkv(z, (B, S), weight, cos, sin, "triton")
        return q, k, v if cos is None else v.contiguous()  # q and k are copies: let go of z
    q, k, v = _qkv_fwd_fake(x, weight, bias, cos, sin, precision, impl)
    if not q.numel():
        return q, k, v
    weight = rows(weight)
    tile = find_tile(flat, weight.t(), "large")
    with torch.cuda.device_of(x):
        _qkv_fwd_kernel[grid(tile, B * S, len(weight), x.device)](
            flat,
            weight,
            flat_bias,
            None if cos is None else cos.contiguous(),
            None if sin is None else sin.contiguous(),
            q,
            k,
            v,
            tile_counter(x.device),
            B * S,
            S,
            E,
            kv_heads,
            *flat.stride(),
            *weight.stride(),
            head_dim // 2,
            slots - 2,
            find_precision(precision),
            E % tile.k == 0,
            tile.m,
            tile.n,
            tile.k,
            tile.group,
            **gemm_options(tile, x),
        )
    return q, k, v


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
    """(q, k, v) from x[B, S, E]: the forward half of `qkv_rope`, with the same errors."""
    impl = choose_or_auto(impl, x, weight, bias, cos, sin)
    check_qkv(x.shape, weight, bias, cos, sin)
    flat_bias = None if bias is None else bias.flatten()
    check_operands(rows(x), rows(weight).t(), flat_bias)
    if impl != "torch" and weight.shape[2] % 2 == 0:
        return _launch_qkv_fwd(x, weight, bias, cos, sin, precision, impl)
    z = gemm(rows(x), rows(weight).t(), flat_bias, precision=precision)
    return _unfused_qkv(z, x.shape[:2], weight, cos, sin)


@no_graph
def gather_qkv_fwd(
    x: Gathering,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    *,
    shape: tuple[int, int],
    precision: str | None = None,
) -> QKV:
    """`qkv_fwd` for tokens x[T, E] of `shape` (B, S), gathered within the product's kernel."""
    check_qkv((*shape, x.shape[1]), weight, bias, cos, sin)
    flat_bias = None if bias is None else bias.flatten()
    check_operands(x.shard, rows(weight).t(), flat_bias)
    if weight.shape[2] % 2:  # nothing can be rotated
        z, _ = multiply(x, rows(weight).t(), flat_bias, precision=precision, impl="triton")
        return _unfused_qkv(z, shape, weight, cos, sin)
    options = {"shape": shape, "precision": precision}
    steps = gather_qkv_steps(x.shard, weight, bias, (cos, sin), x.memory, **options)
    *found, whole = run_steps("qkv_rope", steps, x.memory)
    x.arrived(whole)
    return tuple(found)


def _unfused_qkv(
    z: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    impl: str = "torch",
) -> QKV:
    """q, k and v from the product z[B S, N], rotated by a separate `impl`."""
    slots = weight.shape[1]
    z = z.view(*shape, *weight.shape[:3])
    q, k, v = z.split((slots - 2, 1, 1), 3)
    q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
    if cos is None:
        return q, k, v
    q, k = rope_qk_fwd(q, k, cos, sin, impl=impl)
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
    # 1. Pairs p of rows m in dq, dk or dv.
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(1).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    real = p < kv_heads * (G + 2) * HALF
    live = (m < M)[:, None] & real[None, :]
    place, turns = places(dq_ptr, dk_ptr, dv_ptr, p, m, kv_heads, HALF, G)
    d1, d2 = upcast(tl.load(place, live, 0.0)), upcast(tl.load(place + HALF, live, 0.0))

    # 2. Rotate back.
    if cos_ptr is not None:
        cos, sin = angles(cos_ptr, sin_ptr, p, m, M, S, turns & real, HALF)
        d1, d2 = d1 * cos + d2 * sin, d2 * cos - d1 * sin

    # 3. Store to the columns of the product.
    N = kv_heads * (G + 2) * (2 * HALF)
    at = dz_ptr + m[:, None] * N + (p // HALF * (2 * HALF) + p % HALF)[None, :]
    tl.store(at, to_dtype(d1, dz_ptr.dtype.element_ty), live)
    tl.store(at + HALF, to_dtype(d2, dz_ptr.dtype.element_ty), live)


def _qkv_bwd_fake(dq, dk, dv, cos, sin):
    (B, S, heads, D), kv_heads = dq.shape, dk.shape[2]
    return dq.new_empty(B * S, (heads + 2 * kv_heads) * D)


@operator("qkv_bwd", _qkv_bwd_fake, direct=True)
def _launch_qkv_bwd(
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
) -> torch.Tensor:
    (B, S, heads, D), kv_heads = dq.shape, dk.shape[2]
    dz = dq.new_empty(B * S, (heads + 2 * kv_heads) * D)
    if not dz.numel():
        return dz
    pairs = min(256, triton.next_power_of_2(dz.shape[1] // 2))
    row_count = 1024 // pairs
    with torch.cuda.device_of(dq):
        _qkv_bwd_kernel[(triton.cdiv(B * S, row_count), triton.cdiv(dz.shape[1] // 2, pairs))](
            dq.contiguous(),
            dk.contiguous(),
            dv.contiguous(),
            None if cos is None else cos.contiguous(),
            None if sin is None else sin.contiguous(),
            dz,
            B * S,
            S,
            kv_heads,
            D // 2,
            heads // kv_heads,
            row_count,
            pairs,
            num_warps=4,
        )
    return dz


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
        or (dq.shape[2] % dk.shape[2] if dk.shape[2] else dq.shape[2])
    ):
        raise ValueError(
            "dq[B, S, H, D], dk[B, S, Hkv, D] and dv[B, S, Hkv, D] do not match: got "
            f"{[*dq.shape]} {dq.dtype}, {[*dk.shape]} {dk.dtype} and {[*dv.shape]} {dv.dtype}"
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
    return _launch_qkv_bwd(dq, dk, dv, cos, sin)


# ---------------------------------------------------------------- checks


def check_qkv(
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    name: str = "qkv_rope",
) -> None:
    """Raise ValueError, naming the caller, unless the shapes are a projection of x[B, S, E]."""
    if (
        len(shape) != 3
        or weight.ndim != 4
        or weight.shape[1] < 3
        or weight.shape[2] < 1
        or weight.shape[3] != shape[2]
    ):
        raise ValueError(
            f"{name}: need x[B, S, E] and weight[Hkv, G + 2, D, E] (the queries, the key "
            f"and the value of each KV head), got {[*shape]} and {[*weight.shape]}"
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
