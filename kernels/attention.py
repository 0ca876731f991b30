"""Attention under a mask that is a function of global token positions: right for any layout.

    s = scale q k^T   where visible, else -inf        causal: k_pos <= q_pos
    lse = log(sum_k exp(s))       p = exp(s - lse)     o = p v
    delta = sum_d(o do) - dlse    ds = p (do v^T - delta)
    dq = scale ds k               dk = scale ds^T q    dv = p^T do

q, o: [B, Sq, Hq, D]; k, v: [B, Sk, Hkv, D], Hkv dividing Hq; lse, delta: [B, Hq, Sq], float32
(float64 for float64), natural logarithm. Rows hold at most two contiguous runs of positions
((start, length), ...): what a rank of a contiguous or zigzag layout owns. Tiles never straddle two
runs, so a tile is a range of positions: wholly masked tiles are skipped, wholly visible ones pay
for no mask.

Saved for backward: q, k, v, o and lse; p is recomputed. With the lse and delta of the whole row,
`p` of any block of keys is its share of the whole, so `attention_bwd` over blocks, summed, is
exact: that is ring attention. The gradient through lse only shifts delta. Three backward kernels
(delta; dk and dv; dq) rather than one with atomics: seven products instead of five, and every
result deterministic.

Rows that see no key have o = 0, lse = -inf and zero gradients. Matrix products accumulate in
float32, half-precision p and ds are rounded before they are multiplied. On CPU the torch path calls
torch's own flash attention for every wholly or diagonally visible block.

Sources: Dao 2023 (arXiv:2307.08691); Milakov and Gimelshein 2018 (arXiv:1805.02867) for the online
normaliser. Limits: D <= 256; strides between the elements of one head are 1 (else the tensor is
copied); scale > 0; gradients of gradients do not exist.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from warpweave.kernels.dispatch import INTERPRET, capability, choose, tl, triton
from warpweave.kernels.merge import merge_
from warpweave.kernels.numeric import dot, to_dtype, upcast
from warpweave.kernels.reference import compute_dtype

Runs = Sequence[tuple[int, int]]

MAX_HEAD_DIM = 256
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


class Tile(NamedTuple):
    """How a kernel cuts its work: rows of q and of k per step, and Triton's launch options."""

    q: int
    k: int
    warps: int
    stages: int


# (compute capability, bytes per element, head dim) -> tiles of fwd, dkdv, dq. A call takes the
# largest capability not above its device's that has the element size, and there the smallest head
# dim that fits; (0, 0, 256) is for the interpreter and everything else. In half precision the head
# dims 64, 128 and 256 compile without register spills (test_compiles.py); larger dkdv tiles do not.
TILES: dict[tuple[int, int, int], tuple[Tile, Tile, Tile]] = {
    (0, 0, 256): (Tile(64, 32, 4, 1), Tile(32, 64, 4, 1), Tile(64, 32, 4, 1)),
    (80, 2, 64): (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(64, 64, 4, 2)),
    (80, 2, 128): (Tile(128, 64, 8, 3), Tile(32, 64, 8, 2), Tile(64, 64, 8, 2)),
    (80, 2, 256): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(64, 32, 8, 1)),
    (80, 4, 64): (Tile(64, 32, 8, 2), Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)),
    (80, 4, 128): (Tile(32, 16, 4, 2), Tile(32, 32, 8, 1), Tile(32, 16, 8, 1)),
    (80, 4, 256): (Tile(16, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
    (80, 8, 256): (Tile(16, 16, 8, 1), Tile(16, 16, 8, 1), Tile(16, 16, 8, 1)),
    (90, 2, 64): (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    (90, 2, 128): (Tile(128, 64, 8, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    (90, 2, 256): (Tile(128, 64, 8, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
    (100, 2, 64): (Tile(128, 64, 4, 3), Tile(32, 128, 8, 2), Tile(128, 64, 8, 2)),
    (100, 2, 128): (Tile(128, 64, 8, 3), Tile(64, 64, 8, 1), Tile(128, 64, 8, 2)),
    (100, 2, 256): (Tile(64, 64, 8, 2), Tile(32, 32, 8, 2), Tile(64, 32, 8, 2)),
}


def _tiles(q: torch.Tensor) -> tuple[Tile, Tile, Tile]:
    fitting = [
        (arch, -head_dim)
        for arch, size, head_dim in TILES
        if size == q.element_size() and head_dim >= q.shape[3] and arch <= capability(q.device)
    ]
    if INTERPRET or not fitting:
        return TILES[0, 0, MAX_HEAD_DIM]
    arch, head_dim = max(fitting)
    return TILES[arch, q.element_size(), -head_dim]


# Start positions change from one ring hop to the next: they are plain arguments (Triton specialises
# the elements of a tuple whatever one says), so that no hop compiles a kernel of its own.
_POSITIONS = ["q_start0", "q_start1", "k_start0", "k_start1"]


# ---------------------------------------------------------------- device helpers


@triton.jit
def _before(position, start, length):
    """How many rows of the run (start, length) lie at positions before `position`."""
    return tl.minimum(tl.maximum(position - start, 0), length)


@triton.jit
def _tile(index, runs, BLOCK: tl.constexpr):
    """First row, first position and number of rows of tile `index`; no tile straddles two runs."""
    tiles0 = tl.cdiv(runs[1], BLOCK)
    second = index >= tiles0
    at = (index - tl.where(second, tiles0, 0)) * BLOCK
    row = at + tl.where(second, runs[1], 0)
    position = at + tl.where(second, runs[2], runs[0])
    rows = tl.minimum(tl.where(second, runs[3], runs[1]) - at, BLOCK)
    return row.to(tl.int64), position, rows


@triton.jit
def _load(
    ptr,
    stride,
    rows,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
):
    """The tile [BLOCK, BLOCK_D] at `ptr`, zero from column D on and, if CHECK, from row `rows`
    on."""
    r, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = ptr + r.to(tl.int64) * stride + d
    if CHECK and D != BLOCK_D:
        return tl.load(at, (r < rows) & (d < D), 0.0)
    elif CHECK:
        return tl.load(at, r < rows, 0.0)
    elif D != BLOCK_D:
        return tl.load(at, d < D, 0.0)
    else:
        return tl.load(at)


@triton.jit
def _store(ptr, stride, x, rows, BLOCK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    r, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = ptr + r.to(tl.int64) * stride + d
    tl.store(at, to_dtype(x, ptr.dtype.element_ty), (r < rows) & (d < D))


@triton.jit
def _program(runs, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Tile, head and batch of this program. Causal tiles with most work should start first: the
    last tiles of queries, the first ones of keys."""
    tiles = tl.cdiv(runs[1], BLOCK) + tl.cdiv(runs[3], BLOCK)
    pid = tl.program_id(0)
    tile = pid % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, (pid // tiles) % heads, (pid // tiles // heads).to(tl.int64)


@triton.jit
def _visible_keys(position, rows, runs, BLOCK: tl.constexpr, CAUSAL: tl.constexpr):
    """For queries at [position, position + rows): in each run the number of key tiles that all of
    them see whole, and the number that any of them sees at all."""
    full0, full1, any0, any1 = runs[1], runs[3], runs[1], runs[3]
    if CAUSAL:
        full0 = _before(position + 1, runs[0], runs[1])
        full1 = _before(position + 1, runs[2], runs[3])
        any0 = _before(position + rows, runs[0], runs[1])
        any1 = _before(position + rows, runs[2], runs[3])
    return full0 // BLOCK, full1 // BLOCK, tl.cdiv(any0, BLOCK), tl.cdiv(any1, BLOCK)


@triton.jit
def _nth(j, first0, count0, first1, runs, BLOCK: tl.constexpr):
    """Tile of step j: through count0 tiles of run 0 from first0 on, then run 1 from first1 on."""
    return tl.where(j < count0, first0 + j, tl.cdiv(runs[1], BLOCK) + first1 + j - count0)


# ---------------------------------------------------------------- forward


@triton.jit
def _fwd_steps(acc, l, m, q, q_pos, k_ptr, v_ptr, k_step, v_step, k_runs,
               first0, count0, first1, count1,
               SCALE2: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
               BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    n = tl.arange(0, BLOCK_N)[None, :]
    for j in range(count0 + count1):
        # 1. Scores of one tile of keys.
        index = _nth(j, first0, count0, first1, k_runs, BLOCK_N)
        row, position, rows = _tile(index, k_runs, BLOCK_N)
        k = _load(k_ptr + row * k_step, k_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        s = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), acc.dtype))
        if MASK:
            visible = n < rows
            if CAUSAL:
                visible = visible & (position + n <= q_pos[:, None])
            s = tl.where(visible, s, -float("inf"))

        # 2. Online softmax in units of log2; the pivot of a row that has seen no key yet is 0.
        m_new = tl.maximum(m, tl.max(s, 1) * SCALE2)
        pivot = m_new
        if MASK:
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s * SCALE2 - pivot[:, None])
        shrink = tl.exp2(m - pivot)

        # 3. Accumulate.
        v = _load(v_ptr + row * v_step, v_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        acc = dot(to_dtype(p, v.dtype), v, acc * shrink[:, None])
        l = l * shrink + tl.sum(p, 1)
        m = m_new
    return acc, l, m


@triton.jit(do_not_specialize=_POSITIONS)
def _attention_fwd_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
                          q_stride, k_stride, v_stride, o_stride,
                          q_start0, q_len0, q_start1, q_len1, k_start0, k_len0, k_start1, k_len1,
                          heads, group,
                          SCALE: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of queries of one head.
    q_runs = (q_start0, q_len0, q_start1, q_len1)
    k_runs = (k_start0, k_len0, k_start1, k_len1)
    tile, head, batch = _program(q_runs, heads, BLOCK_M, True)
    row, position, rows = _tile(tile, q_runs, BLOCK_M)
    q_ptr += batch * q_stride[0] + row * q_stride[1] + head.to(tl.int64) * q_stride[2]
    k_ptr += batch * k_stride[0] + (head // group).to(tl.int64) * k_stride[2]
    v_ptr += batch * v_stride[0] + (head // group).to(tl.int64) * v_stride[2]
    o_ptr += batch * o_stride[0] + row * o_stride[1] + head.to(tl.int64) * o_stride[2]
    lse_ptr += (batch * heads + head) * (q_runs[1] + q_runs[3]) + row
    q = _load(q_ptr, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    l = tl.zeros((BLOCK_M,), ACC)
    m = tl.full((BLOCK_M,), -float("inf"), ACC)
    i = tl.arange(0, BLOCK_M)

    # 2. The keys that all of its rows see, then those on the diagonal and at the ends of runs.
    full0, full1, any0, any1 = _visible_keys(position, rows, k_runs, BLOCK_N, CAUSAL)
    acc, l, m = _fwd_steps(
        acc, l, m, q, position + i, k_ptr, v_ptr, k_stride[1], v_stride[1], k_runs,
        0, full0, 0, full1, SCALE * _LOG2E, CAUSAL, False, BLOCK_N, D, BLOCK_D)  # fmt: skip
    acc, l, m = _fwd_steps(
        acc, l, m, q, position + i, k_ptr, v_ptr, k_stride[1], v_stride[1], k_runs,
        full0, any0 - full0, full1, any1 - full1,
        SCALE * _LOG2E, CAUSAL, True, BLOCK_N, D, BLOCK_D)  # fmt: skip

    # 3. Normalise; l = 0 and m = -inf only in rows that saw no key.
    l = tl.where(l == 0, 1.0, l)
    _store(o_ptr, o_stride[1], acc / l[:, None], rows, BLOCK_M, D, BLOCK_D)
    tl.store(lse_ptr + i, (m + tl.log2(l)) * _LN2, i < rows)


def attention_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    out_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o[B, Sq, Hq, D] and its natural-log normaliser lse[B, Hq, Sq], both contiguous.

    `out_dtype` (default q.dtype) may be float32 for half-precision inputs: partial results that
    will be merged. Arguments and errors otherwise as `attention`; not differentiable by itself.
    """
    impl = choose(impl, q, k, v)
    scale, q_runs, k_runs = _check(q, k, v, causal, scale, q_runs, k_runs)
    q, k, v = _unit(q), _unit(k), _unit(v)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    if impl == "torch":
        return _torch_fwd(q, k, v, causal, scale, q_runs, k_runs, out_dtype)
    B, Sq, H, D = q.shape
    o = torch.empty(q.shape, dtype=out_dtype, device=q.device)
    lse = torch.empty((B, H, Sq), dtype=compute_dtype(q), device=q.device)
    tile, _, _ = _tiles(q)
    if o.numel():
        grid = (_count(q_runs, tile.q) * H * B,)
        with torch.cuda.device_of(q):
            _attention_fwd_kernel[grid](
                q, k, v, o, lse, q.stride()[:3], k.stride()[:3], v.stride()[:3], o.stride()[:3],
                *q_runs, *k_runs, H, H // k.shape[2], scale, causal, D, tile.q, tile.k, _padded(D),
                num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
    return o, lse


# ---------------------------------------------------------------- backward


@triton.jit
def _attention_delta_kernel(o_ptr, do_ptr, dlse_ptr, delta_ptr, o_stride, do_stride, dlse_stride,
                            heads, seq, D: tl.constexpr, BLOCK_M: tl.constexpr,
                            BLOCK_D: tl.constexpr):  # fmt: skip
    tiles = tl.cdiv(seq, BLOCK_M)
    pid = tl.program_id(0)
    row = (pid % tiles).to(tl.int64) * BLOCK_M
    head, batch = ((pid // tiles) % heads).to(tl.int64), (pid // tiles // heads).to(tl.int64)
    rows, i = seq - row, tl.arange(0, BLOCK_M)
    o_ptr += batch * o_stride[0] + row * o_stride[1] + head * o_stride[2]
    do_ptr += batch * do_stride[0] + row * do_stride[1] + head * do_stride[2]
    o = upcast(_load(o_ptr, o_stride[1], rows, BLOCK_M, D, BLOCK_D, True))
    do = upcast(_load(do_ptr, do_stride[1], rows, BLOCK_M, D, BLOCK_D, True))
    delta = tl.sum(o * do, 1)
    if dlse_ptr is not None:
        dlse_ptr += batch * dlse_stride[0] + head * dlse_stride[1] + row * dlse_stride[2]
        delta -= tl.load(dlse_ptr + i.to(tl.int64) * dlse_stride[2], i < rows, 0.0)
    tl.store(delta_ptr + (batch * heads + head) * seq + row + i, delta, i < rows)


def attention_delta(
    o: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Return delta[B, H, S] = sum_d(o do) - dlse, float32 (float64 if o is).

    o and do [B, S, H, D] of any dtypes, dlse [B, H, S] or None. Raises ValueError on other shapes.
    """
    impl = choose(impl, o, do, dlse)
    if o.ndim != 4 or do.shape != o.shape:
        raise ValueError(
            f"o and do must have one shape [B, S, H, D], got {tuple(o.shape)} and {tuple(do.shape)}"
        )
    B, S, H, D = o.shape
    if dlse is not None and dlse.shape != (B, H, S):
        raise ValueError(f"dlse must have the shape {(B, H, S)}, got {tuple(dlse.shape)}")
    dtype = compute_dtype(o)
    if impl == "torch":
        delta = (o.to(dtype) * do.to(dtype)).sum(-1).transpose(1, 2)
        return delta.contiguous() if dlse is None else (delta - dlse).contiguous()
    delta = torch.empty((B, H, S), dtype=dtype, device=o.device)
    o, do = _unit(o), _unit(do)
    if delta.numel():
        with torch.cuda.device_of(o):
            _attention_delta_kernel[(triton.cdiv(S, 64) * H * B,)](
                o, do, dlse, delta, o.stride()[:3], do.stride()[:3],
                (0, 0, 0) if dlse is None else dlse.stride(), H, S, D, 64, _padded(D))  # fmt: skip
    return delta


@triton.jit
def _dkdv_steps(dk, dv, k, v, k_pos, q_ptr, do_ptr, lse_ptr, delta_ptr, q_step, do_step, q_runs,
                first0, count0, first1, count1,
                SCALE2: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
                BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    i = tl.arange(0, BLOCK_M)
    for j in range(count0 + count1):
        # 1. One tile of queries. Rows past the end of a run get lse = inf, hence p = 0.
        index = _nth(j, first0, count0, first1, q_runs, BLOCK_M)
        row, position, rows = _tile(index, q_runs, BLOCK_M)
        q = _load(q_ptr + row * q_step, q_step, rows, BLOCK_M, D, BLOCK_D, True)
        do = _load(do_ptr + row * do_step, do_step, rows, BLOCK_M, D, BLOCK_D, True)
        lse = tl.load(lse_ptr + row + i, i < rows, float("inf"))
        delta = tl.load(delta_ptr + row + i, i < rows, 0.0)

        # 2. p and ds, transposed: [keys, queries].
        zero = tl.zeros((k.shape[0], BLOCK_M), dk.dtype)
        p = tl.exp2(dot(k, tl.trans(q), zero) * SCALE2 - (lse * _LOG2E)[None, :])
        if MASK and CAUSAL:
            p = tl.where(k_pos[:, None] <= position + i[None, :], p, 0.0)
        dv = dot(to_dtype(p, do.dtype), do, dv)
        ds = p * (dot(v, tl.trans(do), zero) - delta[None, :])
        dk = dot(to_dtype(ds, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=_POSITIONS)
def _attention_dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                           q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride,
                           q_start0, q_len0, q_start1, q_len1, k_start0, k_len0, k_start1, k_len1,
                           kv_heads, group,
                           SCALE: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr,
                           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                           BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of keys of one key-value head.
    q_runs = (q_start0, q_len0, q_start1, q_len1)
    k_runs = (k_start0, k_len0, k_start1, k_len1)
    tile, kv_head, batch = _program(k_runs, kv_heads, BLOCK_N, False)
    row, position, rows = _tile(tile, k_runs, BLOCK_N)
    kv_head = kv_head.to(tl.int64)
    k_ptr += batch * k_stride[0] + row * k_stride[1] + kv_head * k_stride[2]
    v_ptr += batch * v_stride[0] + row * v_stride[1] + kv_head * v_stride[2]
    k = _load(k_ptr, k_stride[1], rows, BLOCK_N, D, BLOCK_D, True)
    v = _load(v_ptr, v_stride[1], rows, BLOCK_N, D, BLOCK_D, True)
    k_pos = position + tl.arange(0, BLOCK_N)
    dk = tl.zeros((BLOCK_N, BLOCK_D), lse_ptr.dtype.element_ty)
    dv = tl.zeros((BLOCK_N, BLOCK_D), lse_ptr.dtype.element_ty)

    # 2. In each run of queries: tiles before `any` see none of these keys, from `full` on all of
    # them.
    tiles0, tiles1 = tl.cdiv(q_runs[1], BLOCK_M), tl.cdiv(q_runs[3], BLOCK_M)
    any0, any1, full0, full1 = 0, 0, 0, 0
    if CAUSAL:
        last = position + rows - 1
        any0 = _before(position, q_runs[0], q_runs[1]) // BLOCK_M
        any1 = _before(position, q_runs[2], q_runs[3]) // BLOCK_M
        full0 = tl.cdiv(_before(last, q_runs[0], q_runs[1]), BLOCK_M)
        full1 = tl.cdiv(_before(last, q_runs[2], q_runs[3]), BLOCK_M)

    # 3. The query heads of the group, one after another: no atomics, no copy of dk and dv per head.
    for g in range(group):
        head = kv_head * group + g
        q_head = q_ptr + batch * q_stride[0] + head * q_stride[2]
        do_head = do_ptr + batch * do_stride[0] + head * do_stride[2]
        at = (batch * kv_heads * group + head) * (q_runs[1] + q_runs[3])
        dk, dv = _dkdv_steps(
            dk, dv, k, v, k_pos, q_head, do_head, lse_ptr + at, delta_ptr + at,
            q_stride[1], do_stride[1], q_runs, full0, tiles0 - full0, full1, tiles1 - full1,
            SCALE * _LOG2E, CAUSAL, False, BLOCK_M, D, BLOCK_D)  # fmt: skip
        if CAUSAL:
            dk, dv = _dkdv_steps(
                dk, dv, k, v, k_pos, q_head, do_head, lse_ptr + at, delta_ptr + at,
                q_stride[1], do_stride[1], q_runs, any0, full0 - any0, any1, full1 - any1,
                SCALE * _LOG2E, CAUSAL, True, BLOCK_M, D, BLOCK_D)  # fmt: skip

    # 4. Store; ds was the gradient of scale q k^T.
    dk_ptr += batch * dk_stride[0] + row * dk_stride[1] + kv_head * dk_stride[2]
    dv_ptr += batch * dv_stride[0] + row * dv_stride[1] + kv_head * dv_stride[2]
    _store(dk_ptr, dk_stride[1], dk * SCALE, rows, BLOCK_N, D, BLOCK_D)
    _store(dv_ptr, dv_stride[1], dv, rows, BLOCK_N, D, BLOCK_D)


@triton.jit
def _dq_steps(dq, q, do, lse, delta, q_pos, k_ptr, v_ptr, k_step, v_step, k_runs,
              first0, count0, first1, count1,
              SCALE2: tl.constexpr, CAUSAL: tl.constexpr, MASK: tl.constexpr,
              BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    n = tl.arange(0, BLOCK_N)[None, :]
    for j in range(count0 + count1):
        # 1. p of one tile of keys.
        index = _nth(j, first0, count0, first1, k_runs, BLOCK_N)
        row, position, rows = _tile(index, k_runs, BLOCK_N)
        k = _load(k_ptr + row * k_step, k_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        v = _load(v_ptr + row * v_step, v_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        zero = tl.zeros((q.shape[0], BLOCK_N), dq.dtype)
        p = tl.exp2(dot(q, tl.trans(k), zero) * SCALE2 - lse[:, None])
        if MASK:
            visible = n < rows
            if CAUSAL:
                visible = visible & (position + n <= q_pos[:, None])
            p = tl.where(visible, p, 0.0)

        # 2. ds and its product with the keys.
        ds = p * (dot(do, tl.trans(v), zero) - delta[:, None])
        dq = dot(to_dtype(ds, k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=_POSITIONS)
def _attention_dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
                         q_stride, k_stride, v_stride, do_stride, dq_stride,
                         q_start0, q_len0, q_start1, q_len1, k_start0, k_len0, k_start1, k_len1,
                         heads, group,
                         SCALE: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of queries of one head; rows past its end get lse = inf, hence p = 0.
    q_runs = (q_start0, q_len0, q_start1, q_len1)
    k_runs = (k_start0, k_len0, k_start1, k_len1)
    tile, head, batch = _program(q_runs, heads, BLOCK_M, True)
    row, position, rows = _tile(tile, q_runs, BLOCK_M)
    q_ptr += batch * q_stride[0] + row * q_stride[1] + head.to(tl.int64) * q_stride[2]
    do_ptr += batch * do_stride[0] + row * do_stride[1] + head.to(tl.int64) * do_stride[2]
    dq_ptr += batch * dq_stride[0] + row * dq_stride[1] + head.to(tl.int64) * dq_stride[2]
    k_ptr += batch * k_stride[0] + (head // group).to(tl.int64) * k_stride[2]
    v_ptr += batch * v_stride[0] + (head // group).to(tl.int64) * v_stride[2]
    at = (batch * heads + head) * (q_runs[1] + q_runs[3]) + row
    i = tl.arange(0, BLOCK_M)
    q = _load(q_ptr, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    do = _load(do_ptr, do_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    lse = tl.load(lse_ptr + at + i, i < rows, float("inf")) * _LOG2E
    delta = tl.load(delta_ptr + at + i, i < rows, 0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), lse_ptr.dtype.element_ty)

    # 2. The keys that all of its rows see, then those on the diagonal and at the ends of runs.
    full0, full1, any0, any1 = _visible_keys(position, rows, k_runs, BLOCK_N, CAUSAL)
    dq = _dq_steps(
        dq, q, do, lse, delta, position + i, k_ptr, v_ptr, k_stride[1], v_stride[1], k_runs,
        0, full0, 0, full1, SCALE * _LOG2E, CAUSAL, False, BLOCK_N, D, BLOCK_D)  # fmt: skip
    dq = _dq_steps(
        dq, q, do, lse, delta, position + i, k_ptr, v_ptr, k_stride[1], v_stride[1], k_runs,
        full0, any0 - full0, full1, any1 - full1,
        SCALE * _LOG2E, CAUSAL, True, BLOCK_N, D, BLOCK_D)  # fmt: skip
    _store(dq_ptr, dq_stride[1], dq * SCALE, rows, BLOCK_M, D, BLOCK_D)


def attention_bwd(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor | None,
    *,
    o: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    grad_dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return this block's dq[B, Sq, Hq, D], dk and dv[B, Sk, Hkv, D], contiguous.

    lse[B, Hq, Sq] is the final one of each row over all blocks of keys, delta[B, Hq, Sq] is
    `attention_delta` of the final o. `o`, the final output, may be given too when there is no
    gradient through lse: the CPU path then copies nothing and reads no delta, which may be None.
    `grad_dtype` (default q.dtype) may be float32 for gradients that will be summed over blocks.
    Arguments and errors otherwise as `attention`.
    """
    impl = choose(impl, do, q, k, v, lse, delta, o)
    scale, q_runs, k_runs = _check(q, k, v, causal, scale, q_runs, k_runs)
    _check_bwd(do, q, lse, delta, o)
    q, k, v, do = _unit(q), _unit(k), _unit(v), _unit(do.to(q.dtype))
    lse = lse.contiguous()
    grad_dtype = q.dtype if grad_dtype is None else grad_dtype
    if impl == "torch":
        return _torch_bwd(do, q, k, v, lse, delta, o, causal, scale, q_runs, k_runs, grad_dtype)
    delta = attention_delta(o, do, impl=impl) if delta is None else delta.contiguous()
    dq, dk, dv = (torch.empty(x.shape, dtype=grad_dtype, device=x.device) for x in (q, k, v))
    (B, _, H, D), Hkv = q.shape, k.shape[2]
    _, for_dkdv, for_dq = _tiles(q)
    inputs = (q, k, v, do, lse, delta)
    strides = tuple(x.stride()[:3] for x in (q, k, v, do))
    with torch.cuda.device_of(q):
        if dk.numel():
            tile = for_dkdv
            _attention_dkdv_kernel[(_count(k_runs, tile.k) * Hkv * B,)](
                *inputs, dk, dv, *strides, dk.stride()[:3], dv.stride()[:3],
                *q_runs, *k_runs, Hkv, H // Hkv, scale, causal, D, tile.q, tile.k, _padded(D),
                num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
        if dq.numel():
            tile = for_dq
            _attention_dq_kernel[(_count(q_runs, tile.q) * H * B,)](
                *inputs, dq, *strides, dq.stride()[:3],
                *q_runs, *k_runs, H, H // Hkv, scale, causal, D, tile.q, tile.k, _padded(D),
                num_warps=tile.warps, num_stages=tile.stages)  # fmt: skip
    return dq, dk, dv


# ---------------------------------------------------------------- torch path


class _Block(NamedTuple):
    """Rows of q and of k between which everything is visible, or (causal) the lower triangle."""

    q: slice
    k: slice
    causal: bool


def _blocks(q_runs: tuple[int, ...], k_runs: tuple[int, ...], causal: bool) -> list[_Block]:
    """What is visible, cut into blocks; blocks of neighbouring rows are joined."""
    blocks: list[_Block] = []
    q_row = 0
    for q_start, q_len in (q_runs[:2], q_runs[2:]):
        k_row = 0
        for k_start, k_len in (k_runs[:2], k_runs[2:]):
            # Queries before `first` see nothing; keys before `diagonal` are seen by all the others.
            first = max(q_start, k_start) if causal else q_start
            diagonal = min(first - k_start, k_len) if causal else k_len
            reach = min(q_start + q_len - k_start, k_len) if causal else k_len
            if reach <= diagonal + 1:  # the triangle would be one key that all see, or none
                diagonal = max(reach, 0)
            rows = slice(q_row + first - q_start, q_row + q_len)
            for start, stop, triangle in ((0, diagonal, False), (diagonal, reach, True)):
                if start < stop and rows.start < rows.stop:
                    _join(blocks, _Block(rows, slice(k_row + start, k_row + stop), triangle))
            k_row += k_len
        q_row += q_len
    return blocks


def _join(blocks: list[_Block], new: _Block) -> None:
    """Append `new`, or lengthen a wholly visible block that it continues in rows of q or of k."""
    for n, old in enumerate(blocks):
        if old.causal or new.causal:
            continue
        if old.q == new.q and old.k.stop == new.k.start:
            blocks[n] = old._replace(k=slice(old.k.start, new.k.stop))
            return
        if old.k == new.k and old.q.stop == new.q.start:
            blocks[n] = old._replace(q=slice(old.q.start, new.q.stop))
            return
    blocks.append(new)


def _torch_fwd(q, k, v, causal, scale, q_runs, k_runs, out_dtype):
    B, Sq, H, _ = q.shape
    blocks = _blocks(q_runs, k_runs, causal) if q.numel() else []
    whole = len(blocks) == 1 and blocks[0].q == slice(0, Sq)
    dtype = _torch_dtype(q, whole and out_dtype == q.dtype)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if not whole:
        o = torch.zeros((B, Sq, H, q.shape[3]), dtype=dtype, device=q.device)
        lse = torch.full((B, H, Sq), -float("inf"), dtype=dtype, device=q.device)
    for b in blocks:
        q_b, k_b, v_b = q[:, :, b.q], k[:, :, b.k], v[:, :, b.k]
        o_b, lse_b = flash(q_b, k_b, v_b, 0.0, b.causal, scale=scale)
        if whole:
            o, lse = o_b.transpose(1, 2).contiguous(), lse_b.contiguous()
        else:
            merge_(o[:, b.q], lse[:, :, b.q], o_b.transpose(1, 2), lse_b)
    return o.to(out_dtype), lse


def _torch_bwd(do, q, k, v, lse, delta, o, causal, scale, q_runs, k_runs, grad_dtype):
    blocks = _blocks(q_runs, k_runs, causal) if q.numel() and k.numel() else []
    shapes, D = (q.shape, k.shape, v.shape), q.shape[3]
    whole = len(blocks) == 1 and blocks[0][:2] == (slice(0, q.shape[1]), slice(0, k.shape[1]))
    dtype = _torch_dtype(q, whole and grad_dtype == q.dtype and o is not None)
    do, q, k, v = (x.to(dtype) for x in (do, q, k, v))
    if o is None:
        # torch computes delta itself, from o and do. One more column makes it ours:
        # (do, -delta) . (v, 1) - sum(0 do) = do . v - delta, and a column of 0 in q and k changes
        # no score.
        do = torch.cat([do, -delta.transpose(1, 2).unsqueeze(-1).to(dtype)], -1)
        q, k, v = _widen(q, 0.0), _widen(k, 0.0), _widen(v, 1.0)
        o = torch.zeros_like(do)
    do, q, k, v, o = (x.transpose(1, 2) for x in (do, q, k, v, _unit(o.to(dtype))))
    if not whole:
        dq, dk, dv = (torch.zeros(shape, dtype=dtype, device=q.device) for shape in shapes)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for b in blocks:
        do_b, q_b, o_b, lse_b = (x[:, :, b.q] for x in (do, q, o, lse))
        k_b, v_b = k[:, :, b.k], v[:, :, b.k]
        parts = flash(do_b, q_b, k_b, v_b, o_b, lse_b, 0.0, b.causal, scale=scale)
        dq_b, dk_b, dv_b = (x.transpose(1, 2)[..., :D] for x in parts)
        if whole:
            dq, dk, dv = dq_b, dk_b, dv_b
        else:
            dq[:, b.q] += dq_b
            dk[:, b.k] += dk_b
            dv[:, b.k] += dv_b
    return tuple(x.to(grad_dtype).contiguous() for x in (dq, dk, dv))


def _torch_dtype(q: torch.Tensor, alone: bool) -> torch.dtype:
    """What torch's flash attention computes in. bfloat16 stays if nothing will be added to the
    result; float16 never does: torch accumulates its gradients in float16, at a tenth of float32's
    speed."""
    return q.dtype if alone and q.dtype == torch.bfloat16 else compute_dtype(q)


def _widen(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, 1), value=value)


# ---------------------------------------------------------------- arguments


def _unit(x: torch.Tensor) -> torch.Tensor:
    """x with stride 1 in the last dim: torch's flash attention reads nonsense otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _padded(head_dim: int) -> int:
    return max(16, triton.next_power_of_2(head_dim))


def _count(runs: tuple[int, ...], block: int) -> int:
    return triton.cdiv(runs[1], block) + triton.cdiv(runs[3], block)


def _check(q, k, v, causal, scale, q_runs, k_runs):
    """Raise ValueError on what cannot be computed; return scale and (start, length, start,
    length)s."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, S, H, D], got shape {tuple(x.shape)}")
    (B, Sq, Hq, D), (_, Sk, Hkv, _) = q.shape, k.shape
    if k.shape != v.shape or k.shape[0] != B or k.shape[3] != D:
        raise ValueError(
            f"k and v must have one shape [{B}, Sk, Hkv, {D}] for q {tuple(q.shape)}, "
            f"got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"the {Hq} heads of q must be a multiple of the {Hkv} heads of k and v")
    if not 1 <= D <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be in 1..{MAX_HEAD_DIM}, got {D}")
    if not q.dtype == k.dtype == v.dtype or not q.dtype.is_floating_point:
        raise ValueError(
            f"q, k, v must have one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    scale = D**-0.5 if scale is None else float(scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    q_runs, k_runs = _check_runs("q_runs", q_runs, Sq), _check_runs("k_runs", k_runs, Sk)
    if not causal:
        return scale, (0, Sq, 0, 0), (0, Sk, 0, 0)
    if q_runs == k_runs and (q_runs[3] == 0 or q_runs[0] + q_runs[1] <= q_runs[2]):
        return scale, (0, Sq, 0, 0), (0, Sk, 0, 0)  # equal ascending positions compare like rows
    return scale, q_runs, k_runs


def _check_runs(name: str, runs: Runs | None, length: int) -> tuple[int, int, int, int]:
    """The runs as (start0, length0, start1, length1), without empty ones, neighbours joined."""
    if runs is None:
        return (0, length, 0, 0)
    if len(runs) > 2 or any(start < 0 or n < 0 for start, n in runs):
        raise ValueError(f"{name} must be at most two (start >= 0, length >= 0), got {runs}")
    if sum(n for _, n in runs) != length:
        raise ValueError(f"the lengths of {name} {runs} must add up to the {length} rows")
    runs = [(start, n) for start, n in runs if n]
    if len(runs) == 2 and runs[0][0] + runs[0][1] == runs[1][0]:
        runs = [(runs[0][0], length)]
    runs = [*runs, (0, 0), (0, 0)]
    return (*runs[0], *runs[1])


def _check_bwd(do, q, lse, delta, o):
    for name, x in (("do", do), ("o", o)):
        if x is not None and x.shape != q.shape:
            raise ValueError(f"{name} must have q's shape {tuple(q.shape)}, got {tuple(x.shape)}")
    B, S, H, _ = q.shape
    for name, x in (("lse", lse), ("delta", delta)):
        if x is not None and (x.shape != (B, H, S) or x.dtype != compute_dtype(q)):
            raise ValueError(
                f"{name} must be {compute_dtype(q)} of shape {(B, H, S)}, "
                f"got {x.dtype} {tuple(x.shape)}"
            )
    if delta is None and o is None:
        raise ValueError("attention_bwd needs delta or o, got neither")


# ---------------------------------------------------------------- autograd


@torch.library.custom_op("warpweave::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    q_runs: Sequence[int] | None,
    k_runs: Sequence[int] | None,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"causal": causal, "scale": scale, "q_runs": _pairs(q_runs), "k_runs": _pairs(k_runs)}
    return attention_fwd(q, k, v, **options, impl=impl)


@_attention.register_fake
def _(q, k, v, causal, scale, q_runs, k_runs, impl):
    B, S, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((B, H, S), dtype=compute_dtype(q))


@torch.library.custom_op("warpweave::attention_backward", mutates_args=())
def _attention_backward(
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
    q_runs: Sequence[int] | None,
    k_runs: Sequence[int] | None,
    impl: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    options = {"causal": causal, "scale": scale, "q_runs": _pairs(q_runs), "k_runs": _pairs(k_runs)}
    delta = None if dlse is None else attention_delta(o, do, dlse, impl=impl)
    o = o if dlse is None else None
    return attention_bwd(do, q, k, v, lse, delta, o=o, **options, impl=impl)


@_attention_backward.register_fake
def _(do, dlse, q, k, v, o, lse, causal, scale, q_runs, k_runs, impl):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    q, k, v, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx, do, dlse):
    q, k, v, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    return *_attention_backward(do, dlse, q, k, v, o, lse, *ctx.options), *([None] * 5)


_attention.register_autograd(_backward, setup_context=_save)


def _pairs(flat: Sequence[int] | None) -> Runs | None:
    return None if flat is None else tuple(zip(flat[::2], flat[1::2]))


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    q_runs: Runs | None = None,
    k_runs: Runs | None = None,
    return_lse: bool = False,
    impl: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v, differentiable in q, k and v.

    q[B, Sq, Hq, D]; k, v[B, Sk, Hkv, D] of the same dtype, each of the Hkv heads serving Hq / Hkv
    neighbouring query heads; any strides; any size may be 0 but head_dim and Hkv. `scale` defaults
    to D**-0.5. `q_runs` and `k_runs`, at most two (start, length), are the global positions of the
    rows, ((0, S),) by default; `causal` lets a query see the keys at positions up to its own.

    Returns o[B, Sq, Hq, D] in q's dtype, and with `return_lse` also lse[B, Hq, Sq], the natural
    logarithm of the softmax denominators (float32; float64 for float64), differentiable too. A row
    that sees no key has o = 0, lse = -inf and gradients 0. Under autocast q, k and v are cast, as
    for `F.scaled_dot_product_attention`.

    Raises ValueError if shapes, dtypes, devices, head counts, runs or scale do not fit, or `impl`
    cannot run here.
    """
    device = q.device.type
    if q.dtype != torch.float64 and torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    flat = [None if r is None else [int(n) for run in r for n in run] for r in (q_runs, k_runs)]
    o, lse = _attention(q, k, v, causal, scale, *flat, impl)
    return (o, lse) if return_lse else o
