"""Rotary position embedding: half-rotated or interleaved pairs, whole or partial heads, in place or
not, with tables for models whose context was extended.

    with pairs (x1, x2) of a head:    y1 = x1 cos - x2 sin      y2 = x2 cos + x1 sin
    angle[s, i] = position[s] * frequency[i],   frequency[i] = theta^(-2i / R), i < R / 2

The first R dims of a head turn, the rest stay (partial rotary: GPT-NeoX, Phi). Pairs are (i, i +
R/2), the two halves (Llama, GPT-NeoX), or (2i, 2i + 1), `interleaved` (GPT-J, the paper).

x, y: [B, S, H, D]; cos, sin: [S, R/2] hold the angles of the *global* positions of the local rows,
so any sharding of S (zigzag context parallelism) or of H (tensor parallelism) is exact.

Backward is the rotation by the opposite angle, run by the same kernel; nothing but the table is
saved. Computed in float32 (float64 for float64 x), cast at the store. The table is built in
float64: at position 10^6 a float32 angle is already wrong by 0.03 radians.

Each tensor is read once and written once; in place, the dims that stay are not touched. q and k
have one kernel for both (`apply_rope_qk`): the bytes are those of two, but the launch of k, which
has few heads, costs as much as its rotation.

Sources: Su et al. 2021 (arXiv:2104.09864); see `RopeScaling` for the tables. Limits: even R, last
dim of x contiguous or copied (in place: contiguous).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import (
    check_written,
    choose,
    no_graph,
    refuse_tangents,
    tl,
    triton,
    wants_gradient,
)
from warpweave.kernels.runtime.numeric import to_dtype, upcast

# ---------------------------------------------------------------- tables


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of a model trained on `original_length` positions are changed, so that it
    reads `factor` times as many.

    kind:
        "linear"  position interpolation: every frequency / factor (Chen et al. 2023,
                  arXiv:2306.15595).
        "ntk"     a larger base, theta * factor^(R / (R - 2)): the highest frequency stays and the
                  lowest is divided by factor (bloc97 2023; Peng et al. 2023, section 3.1).
        "yarn"    frequencies that turn more than `high` times in original_length stay, those that
                  turn less than `low` times are interpolated, a linear ramp over the dims between;
                  and queries and keys are multiplied by 0.1 ln(factor) + 1, the attention's
                  temperature (Peng et al. 2023, arXiv:2309.00071). `low` and `high`: 1 and 32. The
                  ramp begins and ends at whole dims unless `truncate` is false (gpt-oss).
        "llama3"  the same idea with a ramp over the number of turns, no temperature (Llama 3.1,
                  arXiv:2407.21783). `low` and `high`: 1 and 4.

    attention_factor replaces YaRN's multiplier of queries and keys (scores get its square); models
    that put the temperature into the softmax scale themselves pass 1.0. It is folded into cos and
    sin, so dims that do not turn are not multiplied, as in Hugging Face transformers.
    """

    kind: str
    factor: float
    original_length: int = 0
    low: float = 1.0
    high: float | None = None
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        """Raises ValueError for what no table can be made of."""
        if self.kind not in ("linear", "ntk", "yarn", "llama3"):
            raise ValueError(f'kind must be linear, ntk, yarn or llama3, got "{self.kind}"')
        if not self.factor >= 1:
            raise ValueError(f"factor must be at least 1, got {self.factor}")
        bands = self.kind in ("yarn", "llama3")
        if bands and self.original_length < 1:
            raise ValueError(f"{self.kind} needs original_length >= 1, got {self.original_length}")
        if bands and not 0 < self.low < self._high:
            raise ValueError(f"need 0 < low < high, got {self.low} and {self._high}")

    @property
    def _high(self) -> float:
        return self.high if self.high is not None else 4.0 if self.kind == "llama3" else 32.0

    @property
    def multiplier(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1 if self.kind == "yarn" else 1.0

    def scale(self, frequencies: torch.Tensor, theta: float) -> torch.Tensor:
        """The changed frequencies[R/2] of plain ones, theta^(-2i / R)."""
        if self.kind == "linear":
            return frequencies / self.factor
        R = 2 * len(frequencies)
        i = torch.arange(R // 2, dtype=frequencies.dtype, device=frequencies.device)
        if self.kind == "ntk":
            return frequencies * self.factor ** (-2 * i / max(R - 2, 1))
        if self.kind == "llama3":
            turns = self.original_length * frequencies / (2 * math.pi)
            stay = (turns - self.low) / (self._high - self.low)
        else:

            def dim(turns: float) -> float:  # the dim that turns so often
                found = math.log(self.original_length / (turns * 2 * math.pi))
                return R * found / (2 * math.log(theta))

            first, last = dim(self._high), dim(self.low)
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, R - 1)
            stay = 1 - (i - first) / (last - first if last != first else 0.001)
        stay = stay.clamp(0, 1)
        return frequencies * stay + frequencies / self.factor * (1 - stay)


def rope_table(
    positions: torch.Tensor,
    rotary_dim: int,
    *,
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos[S, R/2], sin[S, R/2]) for the global `positions`[S] (int64) of the local rows.

    R = `rotary_dim` is the head dim, or the part of it that turns. YaRN's multiplier is in both.
    Raises ValueError if R is odd or not positive, positions is not one-dimensional or theta not
    greater than 1.
    """
    if rotary_dim % 2 or rotary_dim < 1 or positions.ndim != 1:
        raise ValueError(
            f"need an even head_dim and positions[S], got {rotary_dim} and {[*positions.shape]}"
        )
    if not theta > 1:
        raise ValueError(f"theta must be greater than 1, got {theta}")
    wide = {"dtype": torch.float64, "device": positions.device}
    frequencies = theta ** (torch.arange(0, rotary_dim, 2, **wide) / -rotary_dim)
    if scaling is not None:
        frequencies = scaling.scale(frequencies, theta)
    angles = torch.outer(positions.double(), frequencies)
    cos, sin = angles.cos(), angles.sin()
    if scaling is not None and scaling.multiplier != 1:
        cos, sin = cos * scaling.multiplier, sin * scaling.multiplier
    return cos.to(dtype), sin.to(dtype)


# ---------------------------------------------------------------- Triton


@triton.jit
def _rotate(
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
    """Turn the tile of heads number `tile`, and copy the REST dims behind the 2 HALF that turn."""
    # 1. A tile of heads: row = (b * S + s) * H + h.
    row = tl.cast(tile, tl.int64) * ROWS + tl.arange(0, ROWS)
    b, s, h = row // H // S, row // H % S, row % H
    x_ptrs = x_ptr + (b * x_strides[0] + s * x_strides[1] + h * x_strides[2])[:, None]
    y_ptrs = y_ptr + (b * y_strides[0] + s * y_strides[1] + h * y_strides[2])[:, None]
    row = row[:, None]
    dtype: tl.constexpr = y_ptr.dtype.element_ty

    # 2. The angles of its positions.
    col = tl.arange(0, BLOCK_HALF)[None, :]
    live = (row < rows) & (col < HALF)
    cos = upcast(tl.load(cos_ptr + s[:, None] * HALF + col, live, 0.0))
    sin = upcast(tl.load(sin_ptr + s[:, None] * HALF + col, live, 0.0))
    if CONJUGATE:
        sin = -sin

    # 3. Rotate: the halves are two tiles, interleaved pairs one.
    if INTERLEAVED:
        both = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        inside = (row < rows) & (both < 2 * HALF)
        x1, x2 = tl.split(upcast(tl.load(x_ptrs + both, inside, 0.0)).reshape(ROWS, BLOCK_HALF, 2))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin).reshape(ROWS, 2 * BLOCK_HALF)
        tl.store(y_ptrs + both, to_dtype(y, dtype), inside)
    else:
        x1 = upcast(tl.load(x_ptrs + col, live, 0.0))
        x2 = upcast(tl.load(x_ptrs + HALF + col, live, 0.0))
        tl.store(y_ptrs + col, to_dtype(x1 * cos - x2 * sin, dtype), live)
        tl.store(y_ptrs + HALF + col, to_dtype(x2 * cos + x1 * sin, dtype), live)

    # 4. What does not turn.
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
    # The first `tiles` programs turn x into y, the others, if there are any, k into z.
    pid = tl.program_id(0)
    if pid < tiles:
        _rotate(
            x_ptr, y_ptr, cos_ptr, sin_ptr, pid, rows, S, x_strides, y_strides, H, HALF, REST,
            INTERLEAVED, CONJUGATE, ROWS, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        if k_ptr is not None:
            _rotate(
                k_ptr, z_ptr, cos_ptr, sin_ptr, pid - tiles, k_rows, S, k_strides, z_strides,
                KV_HEADS, HALF, REST, INTERLEAVED, CONJUGATE, ROWS, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip


def _launch(x, y, k, z, cos, sin, interleaved: bool, conjugate: bool) -> None:
    """Turn x into y and, if there is a k, k into z; x may be y and k z, then in place."""
    B, S, H, D = x.shape
    half, kv_heads = cos.shape[1], 0 if k is None else k.shape[2]
    if B * S * (H + kv_heads) * D == 0:
        return
    rest = 0 if x is y else D - 2 * half  # in place, what does not turn is there already
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


def _turn_torch(x, out, cos, sin, interleaved: bool, conjugate: bool) -> torch.Tensor:
    """x turned by torch's operators, into `out` (which may be x) or into a new tensor."""
    wide, R = compute_dtype(x), 2 * cos.shape[1]
    turning = x if x.shape[-1] == R else x[..., :R]
    c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
    pair, n = (-1, (R // 2, 2)) if interleaved else (-2, (2, R // 2))
    xw = turning.to(wide).unflatten(-1, n)
    yw = torch.empty(xw.shape, dtype=wide, device=x.device)
    torch.mul(xw, c.unsqueeze(pair), out=yw)
    yw.select(pair, 0).addcmul_(xw.select(pair, 1), s, value=1 if conjugate else -1)
    yw.select(pair, 1).addcmul_(xw.select(pair, 0), s, value=-1 if conjugate else 1)
    y = yw.flatten(-2).to(x.dtype)
    if out is not None:
        out[..., :R].copy_(y)
        return out
    return y if x.shape[-1] == R else torch.cat((y, x[..., R:]), -1)


# ---------------------------------------------------------------- raw halves


def check_table(cos: torch.Tensor, sin: torch.Tensor, caller: str = "") -> None:
    """Raise ValueError, in the caller's name, on tables that are no floats or want a gradient."""
    if not (cos.dtype.is_floating_point and sin.dtype.is_floating_point):
        raise ValueError(
            f"{caller}cos and sin must be of a float dtype, got {cos.dtype} and {sin.dtype}"
        )
    if wants_gradient(cos, sin):
        raise ValueError(f"{caller}cos and sin get no gradient: detach them")


def _check(x, cos, sin, *, inplace: bool = False) -> None:
    if x.ndim != 4 or not x.dtype.is_floating_point:
        raise ValueError(f"x must be [B, S, H, D] of a float dtype, got {[*x.shape]} {x.dtype}")
    S, D = x.shape[1], x.shape[3]
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[0] != S:
        raise ValueError(
            f"cos and sin must be [S, R/2] of x {[*x.shape]}, got {[*cos.shape]} and {[*sin.shape]}"
        )
    check_table(cos, sin)
    if not 2 <= 2 * cos.shape[1] <= D:
        raise ValueError(f"cos and sin [S, R/2] need 2 <= R <= D = {D}, got R = {2 * cos.shape[1]}")
    if inplace and x.stride(-1) != 1 and D != 1:
        raise ValueError(f"in place needs the elements of a head side by side, got {x.stride()}")
    if inplace:
        check_written("x", x)
    if inplace and x.is_leaf and wants_gradient(x):
        raise ValueError("in place needs an x that no gradient stops at: a leaf requires grad")


def _check_pair(q, k, cos, sin, *, inplace: bool = False) -> None:
    _check(q, cos, sin, inplace=inplace)
    _check(k, cos, sin, inplace=inplace)
    same = q.ndim == k.ndim and q.shape[:2] == k.shape[:2] and q.shape[3] == k.shape[3]
    if not same or q.dtype != k.dtype:
        raise ValueError(
            f"q[B, S, H, D] and k[B, S, Hkv, D] must fit, got {[*q.shape]} {q.dtype} and "
            f"{[*k.shape]} {k.dtype}"
        )


@no_graph
def rope_fwd(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    conjugate: bool = False,
    inplace: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """x[B, S, H, D] rotated by the table's angles, or by their opposites if `conjugate` (the
    backward); into a new contiguous tensor, or in x itself if `inplace`."""
    impl = choose(impl, x, cos, sin)
    _check(x, cos, sin, inplace=inplace)
    if impl == "torch":
        return _turn_torch(x, x if inplace else None, cos, sin, interleaved, conjugate)
    y = x if inplace else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, y, None, None, cos, sin, interleaved, conjugate)
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
    inplace: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`rope_fwd` of q[B, S, H, D] and k[B, S, Hkv, D], of one dtype, in one launch."""
    impl = choose(impl, q, k, cos, sin)
    _check_pair(q, k, cos, sin, inplace=inplace)
    if impl == "torch":
        found = (
            _turn_torch(x, x if inplace else None, cos, sin, interleaved, conjugate) for x in (q, k)
        )
        return next(found), next(found)
    y = q if inplace else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    z = k if inplace else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _launch(q, y, k, z, cos, sin, interleaved, conjugate)
    return y, z


# ---------------------------------------------------------------- registration


@torch.library.custom_op("warpweave::rope", mutates_args=())
def _rope_op(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: int, conjugate: int
) -> torch.Tensor:
    return rope_fwd(
        x, cos, sin, interleaved=bool(interleaved), conjugate=bool(conjugate), impl="triton"
    )


@_rope_op.register_fake
def _(x, cos, sin, interleaved, conjugate):
    return x.new_empty(x.shape)


@torch.library.custom_op("warpweave::rope_qk", mutates_args=())
def _rope_qk_op(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: int,
    conjugate: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    return rope_qk_fwd(
        q, k, cos, sin, interleaved=bool(interleaved), conjugate=bool(conjugate), impl="triton"
    )


@_rope_qk_op.register_fake
def _(q, k, cos, sin, interleaved, conjugate):
    return q.new_empty(q.shape), k.new_empty(k.shape)


@torch.library.custom_op("warpweave::rope_inplace", mutates_args=("x",))
def _rope_inplace_op(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: int
) -> None:
    rope_fwd(x, cos, sin, interleaved=bool(interleaved), inplace=True, impl="triton")


@torch.library.custom_op("warpweave::rope_qk_inplace", mutates_args=("q", "k"))
def _rope_qk_inplace_op(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: int
) -> None:
    rope_qk_fwd(q, k, cos, sin, interleaved=bool(interleaved), inplace=True, impl="triton")


def _save(ctx, inputs, output) -> None:
    *_, cos, sin, ctx.interleaved, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dy):
    dx = _rope_op(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate)
    return dx, None, None, None, None


def _backward_qk(ctx, dy, dz):
    dq, dk = _rope_qk_op(dy, dz, *ctx.saved_tensors, ctx.interleaved, not ctx.conjugate)
    return dq, dk, None, None, None, None


_rope_op.register_autograd(_backward, setup_context=_save)
_rope_qk_op.register_autograd(_backward_qk, setup_context=_save)


class _Rope(torch.autograd.Function):
    """The torch path, three passes over x each way; and in place, of both implementations."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved=False, conjugate=False, inplace=False, impl="torch"):
        ctx.save_for_backward(cos, sin)
        ctx.turn, ctx.impl = (interleaved, conjugate), impl
        if inplace:
            ctx.mark_dirty(x)
        return rope_fwd(
            x, cos, sin, interleaved=interleaved, conjugate=conjugate, inplace=inplace, impl=impl
        )

    @staticmethod
    def backward(ctx, dy):
        interleaved, conjugate = ctx.turn
        dx = _Rope.apply(dy, *ctx.saved_tensors, interleaved, not conjugate, False, ctx.impl)
        return dx, *[None] * 6

    @staticmethod
    def spmd_typecheck(*, x, cos, sin):
        from spmd_types import rules

        return rules.einsum("bsh_,s_,s_->bsh_", x, cos, sin)


# ---------------------------------------------------------------- public


def apply_rope(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    impl: str | None = None,
) -> torch.Tensor:
    """x[B, S, H, D] (S and H may be sharded) rotated by `rope_table`'s cos and sin[S, R/2].

    The first R <= D dims of each head turn: pairs (i, i + R/2), or (2i, 2i + 1) if `interleaved`.
    Differentiable in x; the result is contiguous and has the dtype of x. `inplace` writes it into x
    (which must not be a leaf that requires grad) and returns x; the dims that stay are not touched.

    Raises ValueError on shapes that do not fit, in place on heads that do not lie side by side or
    overlap, or if `impl` cannot run. Su et al. 2021 (arXiv:2104.09864).
    """
    impl = choose(impl, x, cos, sin)
    _check(x, cos, sin, inplace=inplace)
    if inplace and wants_gradient(x):
        if torch.compiler.is_compiling() and impl == "triton":  # traces operators, no launches
            return x.copy_(_rope_op(x, cos, sin, interleaved, False))
        return _Rope.apply(x, cos, sin, interleaved, False, True, impl)
    if impl == "torch":
        if inplace:
            return rope_fwd(x, cos, sin, interleaved=interleaved, inplace=True, impl=impl)
        return _Rope.apply(x, cos, sin, interleaved)
    refuse_tangents("apply_rope", x)
    if inplace:
        _rope_inplace_op(x, cos, sin, interleaved)
        return x
    return _rope_op(x, cos, sin, interleaved, False)


def apply_rope_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    inplace: bool = False,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`apply_rope` of q[B, S, H, D] and k[B, S, Hkv, D], in one launch where that runs in Triton
    (in place only where no gradient is wanted)."""
    impl = choose(impl, q, k, cos, sin)
    _check_pair(q, k, cos, sin, inplace=inplace)
    if impl == "torch" or (inplace and wants_gradient(q, k)):
        options = {"interleaved": interleaved, "inplace": inplace, "impl": impl}
        return apply_rope(q, cos, sin, **options), apply_rope(k, cos, sin, **options)
    refuse_tangents("apply_rope_qk", q, k)
    if inplace:
        _rope_qk_inplace_op(q, k, cos, sin, interleaved)
        return q, k
    return _rope_qk_op(q, k, cos, sin, interleaved, False)
