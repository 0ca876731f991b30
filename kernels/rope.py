"""Rotary position embedding, half-rotated (Llama) convention.

    with x = (x1, x2), the two halves of a head:    y1 = x1 cos - x2 sin      y2 = x2 cos + x1 sin
    angle[s, i] = position[s] * theta^(-2i / D)     i < D / 2

x, y: [B, S, H, D]; cos, sin: [S, D/2] hold the angles of the *global* positions of the local rows,
so any sharding of S (zigzag context parallelism) or of H (tensor parallelism) is exact.

Backward is the rotation by the opposite angle, run by the same kernel; nothing but the table is
saved. Computed in float32 (float64 for float64 x), cast at the store. The table is built in
float64: at position 10^6 a float32 angle is already wrong by 0.03 radians.

Source: Su et al. 2021 (arXiv:2104.09864). Limits: even D, last dim of x contiguous or copied.
"""

from __future__ import annotations

import torch

from warpweave.kernels.dispatch import choose, tl, triton
from warpweave.kernels.numeric import to_dtype, upcast
from warpweave.kernels.reference import compute_dtype


def rope_table(
    positions: torch.Tensor,
    head_dim: int,
    *,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos[S, D/2], sin[S, D/2]) for the global `positions`[S] (int64) of the local rows.

    Raises ValueError if head_dim is odd or positions is not one-dimensional.
    """
    if head_dim % 2 or positions.ndim != 1:
        raise ValueError(
            f"need an even head_dim and positions[S], got {head_dim} and {[*positions.shape]}"
        )
    wide = {"dtype": torch.float64, "device": positions.device}
    frequencies = theta ** (torch.arange(0, head_dim, 2, **wide) / -head_dim)
    angles = torch.outer(positions.double(), frequencies)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@triton.jit
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    rows,
    S,
    stride_xb,
    stride_xs,
    stride_xh,
    H: tl.constexpr,
    HALF: tl.constexpr,
    CONJUGATE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    # 1. A tile of heads: row = (b * S + s) * H + h.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    b, s, h = row // H // S, row // H % S, row % H
    col = tl.arange(0, BLOCK_HALF)[None, :]
    live = (row[:, None] < rows) & (col < HALF)

    # 2. The angles of its positions.
    cos = upcast(tl.load(cos_ptr + s[:, None] * HALF + col, live, 0.0))
    sin = upcast(tl.load(sin_ptr + s[:, None] * HALF + col, live, 0.0))
    if CONJUGATE:
        sin = -sin

    # 3. Rotate.
    x_ptrs = x_ptr + (b * stride_xb + s * stride_xs + h * stride_xh)[:, None] + col
    x1 = upcast(tl.load(x_ptrs, live, 0.0))
    x2 = upcast(tl.load(x_ptrs + HALF, live, 0.0))
    y_ptrs = y_ptr + row[:, None] * (2 * HALF) + col
    tl.store(y_ptrs, to_dtype(x1 * cos - x2 * sin, y_ptr.dtype.element_ty), live)
    tl.store(y_ptrs + HALF, to_dtype(x2 * cos + x1 * sin, y_ptr.dtype.element_ty), live)


def rope_fwd(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    conjugate: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """x[B, S, H, D] rotated by the table's angles, or by their opposites if `conjugate` (the
    backward)."""
    impl = choose(impl, x, cos, sin)
    _check(x, cos, sin)
    B, S, H, D = x.shape
    if x.numel() == 0:
        return torch.empty_like(x)
    if impl == "torch":
        wide = compute_dtype(x)
        xw = x.to(wide).unflatten(-1, (2, D // 2))
        c, s = cos.to(wide)[:, None, None], sin.to(wide)[:, None]
        yw = torch.empty(xw.shape, dtype=wide, device=x.device)
        torch.mul(xw, c, out=yw)
        yw[..., 0, :].addcmul_(xw[..., 1, :], s, value=1 if conjugate else -1)
        yw[..., 1, :].addcmul_(xw[..., 0, :], s, value=-1 if conjugate else 1)
        return yw.flatten(-2).to(x.dtype)

    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x = x if x.stride(-1) == 1 else x.contiguous()
    block = triton.next_power_of_2(D // 2)
    rows = max(1, 1024 // block)
    with torch.cuda.device_of(x):
        _rope_kernel[(triton.cdiv(B * S * H, rows),)](
            x,
            cos.contiguous(),
            sin.contiguous(),
            y,
            B * S * H,
            S,
            *x.stride()[:3],
            H,
            D // 2,
            conjugate,
            rows,
            block,
            num_warps=4,
        )
    return y


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    if x.ndim != 4 or x.shape[-1] % 2:
        raise ValueError(f"x must be [B, S, H, D] with an even D, got {[*x.shape]}")
    if not cos.shape == sin.shape == (x.shape[1], x.shape[3] // 2):
        raise ValueError(
            f"cos and sin must be [S, D/2] of x {[*x.shape]}, got {[*cos.shape]} and {[*sin.shape]}"
        )


@torch.library.custom_op("warpweave::rope", mutates_args=())
def _rope_op(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, conjugate: bool
) -> torch.Tensor:
    return rope_fwd(x, cos, sin, conjugate=conjugate, impl="triton")


@_rope_op.register_fake
def _(x, cos, sin, conjugate):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output) -> None:
    _, cos, sin, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dy):
    return _rope_op(dy, *ctx.saved_tensors, not ctx.conjugate), None, None, None


_rope_op.register_autograd(_backward, setup_context=_save)


class _Rope(torch.autograd.Function):
    """The torch path: three passes over x each way."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return rope_fwd(x, cos, sin, impl="torch")

    @staticmethod
    def backward(ctx, dy):
        return rope_fwd(dy, *ctx.saved_tensors, conjugate=True, impl="torch"), None, None

    @staticmethod
    def spmd_typecheck(*, x, cos, sin):
        from spmd_types import rules

        return rules.einsum("bsh_,s_,s_->bsh_", x, cos, sin)


def apply_rope(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, impl: str | None = None
) -> torch.Tensor:
    """x[B, S, H, D] (S and H may be sharded) rotated by `rope_table`'s cos and sin[S, D/2].

    Differentiable in x; the result is contiguous and has the dtype of x. Raises ValueError on
    shapes that do not fit, or if `impl` cannot run. Su et al. 2021 (arXiv:2104.09864).
    """
    if choose(impl, x, cos, sin) == "triton":
        _check(x, cos, sin)
        return _rope_op(x, cos, sin, False)
    return _Rope.apply(x, cos, sin)
