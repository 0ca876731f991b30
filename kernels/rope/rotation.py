"""Rotary position embedding: half-rotated or interleaved pairs, whole or partial heads.

    with pairs (x1, x2) of a head:    y1 = x1 cos - x2 sin      y2 = x2 cos + x1 sin

The first R dims of a head are rotated (partial rotary: GPT-NeoX, Phi). Pairs are (i, i + R/2), the
two halves (Llama, GPT-NeoX), or (2i, 2i + 1) if `interleaved` (GPT-J, the paper).

x, y: [B, S, H, D]; cos, sin: [S, R/2] from `table`, the angles of the *global* positions of the
local rows, so any sharding of S (zigzag context parallelism) or of H (tensor parallelism) is exact.

Backward is the rotation by the opposite angle, run by the same kernel; only the table is saved.
Kernels compute in float32 (float64 for float64 x) and cast at the store.

Each tensor is read once and written once. One kernel rotates both q and k (`apply_rope_qk`). It
moves as many bytes as two kernels would, but a separate launch for k, which has few heads, would
cost as much as its rotation.

Source: Su et al. 2021 (arXiv:2104.09864). Limits: even R; x is copied unless its last dim is
contiguous.
"""

from __future__ import annotations

import torch

from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.beside import beside_dtensors, whole_features
from warpweave.kernels.runtime.dispatch import (
    choose,
    no_graph,
    refuse_tangents,
    tl,
    triton,
    wants_gradient,
)
from warpweave.kernels.runtime.dtypes import to_dtype, upcast
from warpweave.kernels.runtime.op import operator

# ---------------------------------------------------------------- Triton


@triton.jit
def _rotate_tile(
    x_ptr,
    y_ptr,
    cos_ptr,
    sin_ptr,
    tile,
    rows,
    S,
    x_strides,
    y_strides,
    H: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Rotate the first 2 HALF dims of a tile of heads, and copy the REST dims after them."""
    # 1. A tile of heads: row = (b * S + s) * H + h.
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    b, s, h = row // H // S, row // H % S, row % H
    x_ptrs = x_ptr + (b * x_strides[0] + s * x_strides[1] + h * x_strides[2])[:, None]
    y_ptrs = y_ptr + (b * y_strides[0] + s * y_strides[1] + h * y_strides[2])[:, None]
    row = row[:, None]
    dtype: tl.constexpr = y_ptr.dtype.element_ty

    # 2. The angles of its positions.
    col = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (row < rows) & (col < HALF)
    cos = upcast(tl.load(cos_ptr + s[:, None] * HALF + col, mask, 0.0))
    sin = upcast(tl.load(sin_ptr + s[:, None] * HALF + col, mask, 0.0))
    if CONJUGATE:
        sin = -sin

    # 3. Rotate: the halves are two tiles, interleaved pairs are one.
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        inside = (row < rows) & (both < 2 * HALF)
        x1, x2 = tl.split(upcast(tl.load(x_ptrs + both, inside, 0.0)).reshape(ROWS, BLOCK_HALF, 2))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin).reshape(ROWS, 2 * BLOCK_HALF)
        tl.store(y_ptrs + both, to_dtype(y, dtype), inside)
    else:
        x1 = upcast(tl.load(x_ptrs + col, mask, 0.0))
        x2 = upcast(tl.load(x_ptrs + HALF + col, mask, 0.0))
        tl.store(y_ptrs + col, to_dtype(x1 * cos - x2 * sin, dtype), mask)
        tl.store(y_ptrs + HALF + col, to_dtype(x2 * cos + x1 * sin, dtype), mask)

    # 4. The dims that are not rotated.
    if REST > 0:
        at = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        inside = (row < rows) & (at < 2 * HALF + REST)
        tl.store(y_ptrs + at, tl.load(x_ptrs + at, inside, 0.0), inside)


@triton.jit
def _rope_kernel(
    x_ptr,
    y_ptr,
    k_ptr,
    z_ptr,
    cos_ptr,
    sin_ptr,
    rows,
    k_rows,
    tiles,
    S,
    x_strides,
    y_strides,
    k_strides,
    z_strides,
    H: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    # The first `tiles` programs rotate x, the others k.
    pid = tl.program_id(0)
    if pid < tiles:
        _rotate_tile(
            x_ptr, y_ptr, cos_ptr, sin_ptr, pid, rows, S, x_strides, y_strides, H, HALF, REST,
            INTERLEAVED, CONJUGATE, ROWS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        if k_ptr is not None:
            _rotate_tile(
                k_ptr, z_ptr, cos_ptr, sin_ptr, pid - tiles, k_rows, S, k_strides, z_strides,
                KV_HEADS, HALF, REST, INTERLEAVED, CONJUGATE, ROWS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip


def _launch_rope(x, y, k, z, cos, sin, interleaved: bool, conjugate: bool) -> None:
    """Rotate x into y and, if k is given, k into z."""
    B, S, H, D = x.shape
    half, kv_heads = cos.shape[1], 0 if k is None else k.shape[2]
    if B * S * (H + kv_heads) * D == 0:
        return
    rest = D - 2 * half
    x = x if x.stride(-1) == 1 else x.contiguous()
    k = k if k is None or k.stride(-1) == 1 else k.contiguous()
    block, block_rest = triton.next_power_of_2(half), triton.next_power_of_2(max(rest, 1))
    rows = max(1, min(1024 // block, 16384 // block_rest))
    tiles = triton.cdiv(B * S * H, rows)
    with torch.cuda.device_of(x):
        _rope_kernel[(tiles + triton.cdiv(B * S * kv_heads, rows),)](
            x,
            y,
            k,
            z,
            cos.contiguous(),
            sin.contiguous(),
            B * S * H,
            B * S * kv_heads,
            tiles,
            S,
            x.stride()[:3],
            y.stride()[:3],
            None if k is None else k.stride()[:3],
            None if k is None else z.stride()[:3],
            H,
            kv_heads,
            half,
            rest,
            interleaved,
            conjugate,
            rows,
            block,
            block_rest,
            num_warps=4,
        )


# ---------------------------------------------------------------- torch


def _turn_torch(x, cos, sin, interleaved: bool, conjugate: bool) -> torch.Tensor:
    """Rotate x using torch's operators."""
    x, wide, R = whole_features(x), compute_dtype(x), 2 * cos.shape[1]
    turning = x if x.shape[-1] == R else x[..., :R]
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    pair, n = (-1, (R // 2, 2)) if interleaved else (-2, (2, R // 2))
    xw = turning.to(wide).unflatten(-1, n)
    yw = torch.empty_like(xw, memory_format=torch.contiguous_format)
    torch.mul(xw, c.unsqueeze(pair), out=yw)
    yw.select(pair, 0).addcmul_(xw.select(pair, 1), s, value=1 if conjugate else -1)
    yw.select(pair, 1).addcmul_(xw.select(pair, 0), s, value=-1 if conjugate else 1)
    y = yw.flatten(-2).to(x.dtype)
    return y if x.shape[-1] == R else torch.cat((y, x[..., R:]), -1)


# ---------------------------------------------------------------- raw halves


def check_table(cos: torch.Tensor, sin: torch.Tensor, caller: str = "") -> None:
    """Raise ValueError, naming the caller, if tables are not floats or require a gradient."""
    if not (cos.dtype.is_floating_point and sin.dtype.is_floating_point):
        raise ValueError(
            f"{caller}cos and sin must have a float dtype, got {cos.dtype} and {sin.dtype}"
        )
    if wants_gradient(cos, sin):
        raise ValueError(f"{caller}cos and sin must not require grad; detach them")


def _check_rope(x, cos, sin) -> None:
    if x.ndim != 4 or not x.dtype.is_floating_point:
        raise ValueError(f"x must be [B, S, H, D] with a float dtype, got {[*x.shape]} {x.dtype}")
    S, D = x.shape[1], x.shape[3]
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != S:
        raise ValueError(
            f"cos and sin must be [S, R/2] for x {[*x.shape]}, got {[*cos.shape]}, {[*sin.shape]}"
        )
    check_table(cos, sin)
    if not 2 <= 2 * cos.shape[1] <= D:
        raise ValueError(
            f"cos and sin must be [S, R/2] with 2 <= R <= D = {D}, got R = {2 * cos.shape[1]}"
        )


def _check_pair(q, k, cos, sin) -> None:
    _check_rope(q, cos, sin)
    _check_rope(k, cos, sin)
    same = q.ndim == k.ndim and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not same or q.dtype != k.dtype:
        raise ValueError(
            "q[B, S, H, D] and k[B, S, Hkv, D] must have the same B, S, D, and dtype, got "
            f"{[*q.shape]} {q.dtype} and {[*k.shape]} {k.dtype}"
        )


@no_graph
def rope_fwd(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    conjugate: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Rotate x[B, S, H, D] by the table's angles into a new contiguous tensor.

    `conjugate` rotates by the opposite angles (the backward).
    """
    impl = choose(impl, x, cos, sin)
    _check_rope(x, cos, sin)
    if impl == "torch":
        return _turn_torch(x, cos, sin, interleaved, conjugate)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rope(x, y, None, None, cos, sin, interleaved, conjugate)
    return y


@no_graph
def rope_qk_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    conjugate: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_fwd` of q[B, S, H, D] and k[B, S, Hkv, D], which share a dtype, in one launch."""
    impl = choose(impl, q, k, cos, sin)
    _check_pair(q, k, cos, sin)
    if impl == "torch":
        turn = cos, sin, interleaved, conjugate
        return _turn_torch(q, *turn), _turn_torch(k, *turn)
    y = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    z = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _launch_rope(q, y, k, z, cos, sin, interleaved, conjugate)
    return y, z


# ---------------------------------------------------------------- registration


def _save_rope(ctx, inputs, output) -> None:
    *_, cos, sin, ctx.interleaved, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin)


def _rope_backward(ctx, dy):
    return rope_op(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate)


def _rope_qk_backward(ctx, dy, dz):
    return rope_qk_op(dy, dz, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate)


@operator(
    "rope", lambda x, *_: x.new_empty(x.shape), gradient=(_save_rope, _rope_backward),
    sharding="bsh_, s_, s_ -> bsh_",
)  # fmt: skip
def rope_op(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, conjugate: bool
) -> torch.Tensor:
    """The Triton path of `apply_rope`."""
    return rope_fwd(x, cos, sin, interleaved=interleaved, conjugate=conjugate, impl="triton")


@operator(
    "rope_qk", lambda q, k, *_: (q.new_empty(q.shape), k.new_empty(k.shape)),
    gradient=(_save_rope, _rope_qk_backward), sharding="bsh_, bsh_, s_, s_ -> bsh_, bsh_",
)  # fmt: skip
def rope_qk_op(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    conjugate: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton path of `apply_rope_qk`."""
    return rope_qk_fwd(q, k, cos, sin, interleaved=interleaved, conjugate=conjugate, impl="triton")


class _Rope(torch.autograd.Function):
    """The torch path, with three passes over x in each direction."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved=False, conjugate=False):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.conjugate = interleaved, conjugate
        return _turn_torch(x, cos, sin, interleaved, conjugate)

    @staticmethod
    def backward(ctx, dy):
        dx = _Rope.apply(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate)
        return dx, *[None] * 4

    @staticmethod
    def spmd_typecheck(*, x, cos, sin):
        from spmd_types import rules

        return rules.einsum("bsh_,s_,s_->bsh_", x, cos, sin)


# ---------------------------------------------------------------- public


@beside_dtensors("x")
def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """Rotate x[B, S, H, D] (S and H may be sharded) by `rope_table`'s cos and sin[S, R/2].

    The first R <= D dims of each head are rotated: pairs (i, i + R/2), or (2i, 2i + 1) if
    `interleaved`. Differentiable in x; the result is contiguous and has the dtype of x.

    Raises ValueError if shapes do not fit or `impl` cannot run. Su et al. 2021 (arXiv:2104.09864).

    Examples:
        >>> from warpweave.kernels.rope import rope_table
        >>> cos, sin = rope_table(torch.arange(16), 8)
        >>> apply_rope(torch.randn(2, 16, 4, 8), cos, sin).shape
        torch.Size([2, 16, 4, 8])
    """
    impl = choose(impl, x, cos, sin)
    _check_rope(x, cos, sin)
    if impl == "torch":
        return _Rope.apply(x, cos, sin, interleaved)
    refuse_tangents("apply_rope", x)
    return rope_op(x, cos, sin, interleaved, False)


@beside_dtensors("q", "k")
def apply_rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` of q[B, S, H, D] and k[B, S, Hkv, D]; the Triton path uses one launch.

    Examples:
        >>> from warpweave.kernels.rope import rope_table
        >>> cos, sin = rope_table(torch.arange(16), 8)
        >>> q, k = apply_rope_qk(torch.randn(2, 16, 4, 8), torch.randn(2, 16, 2, 8), cos, sin)
    """
    impl = choose(impl, q, k, cos, sin)
    _check_pair(q, k, cos, sin)
    if impl == "torch":
        return _Rope.apply(q, cos, sin, interleaved), _Rope.apply(k, cos, sin, interleaved)
    refuse_tangents("apply_rope_qk", q, k)
    return rope_qk_op(q, k, cos, sin, interleaved, False)
