"""The kernels of the QKV projection, and their launchers; see the room's ``__init__``.

Forward is a product whose epilogue rotates; backward rotates dq and dk back and writes dz, of which
products of torch's make the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from warpweave.kernels.gemm.fused import check_operands, find_precision, gemm
from warpweave.kernels.gemm.gradients import rows
from warpweave.kernels.gemm.mainloop import (
    find_tile,
    gemm_options,
    grid,
    mainloop,
    split_columns,
    tile_origin,
)
from warpweave.kernels.rope import check_table, rope_fwd
from warpweave.kernels.runtime.dispatch import choose, no_graph, operator, tl, triton
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
        row, col = tile_origin(index, M, N, BLOCK_M, BLOCK_N, GROUP)
        m, c = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        p = c // 2
        n = p // HALF * (2 * HALF) + c % 2 * HALF + p % HALF
        z = mainloop(
            x_ptr, w_ptr, m, n, M, N, E, stride_xm, stride_xe, stride_we, stride_wn,
            PRECISION, EVEN_E, BLOCK_M, BLOCK_N, BLOCK_E,
        )  # fmt: skip

        # 2. The rest, a quarter at a time, as in `gemm`.
        left, right = split_columns(z)
        first, second = split_columns(left)
        third, fourth = split_columns(right)
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


def _fwd_fake(x, weight, bias, cos, sin, precision):
    kv_heads, slots, head_dim, _ = weight.shape
    shapes = ((*x.shape[:2], n, head_dim) for n in (kv_heads * (slots - 2), kv_heads, kv_heads))
    return tuple(x.new_empty(shape) for shape in shapes)


@operator("qkv_fwd", _fwd_fake)
def _launch_fwd(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor | None,
    sin: torch.Tensor | None,
    precision: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (B, S, E), (kv_heads, slots, head_dim, _) = x.shape, weight.shape
    q = x.new_empty(B, S, kv_heads * (slots - 2), head_dim)
    k, v = (x.new_empty(B, S, kv_heads, head_dim) for _ in "kv")
    if not q.numel():
        return q, k, v
    flat, weight = rows(x), rows(weight)
    tile = find_tile(flat, weight.t(), "large")
    with torch.cuda.device_of(x):
        _qkv_fwd_kernel[grid(tile, B * S, len(weight), x.device)](
            flat,
            weight,
            None if bias is None else bias.flatten().contiguous(),
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
    """(q, k, v) of x[B, S, E]: the forward half of `qkv_rope`. Raises what that raises."""
    impl = choose(impl, x, weight, bias, cos, sin)
    check_qkv(x.shape, weight, bias, cos, sin)
    flat_bias = None if bias is None else bias.flatten()
    check_operands(rows(x), rows(weight).t(), flat_bias)
    _, slots, head_dim, _ = weight.shape
    if impl == "triton" and head_dim % 2 == 0:
        return _launch_fwd(x, weight, bias, cos, sin, precision)
    z = gemm(rows(x), rows(weight).t(), flat_bias).view(*x.shape[:2], *weight.shape[:3])
    q, k, v = z.split((slots - 2, 1, 1), 3)
    q, k, v = q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
    if cos is None:
        return q, k, v
    q, k = (rope_fwd(t, cos, sin, impl="torch") for t in (q, k))
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


def _bwd_fake(dq, dk, dv, cos, sin):
    (B, S, heads, D), kv_heads = dq.shape, dk.shape[2]
    return dq.new_empty(B * S, (heads + 2 * kv_heads) * D)


@operator("qkv_bwd", _bwd_fake)
def _launch_bwd(
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
    return _launch_bwd(dq, dk, dv, cos, sin)


# ---------------------------------------------------------------- checks


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
