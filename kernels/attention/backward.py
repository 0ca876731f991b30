"""Backward of attention: delta, then dk and dv, then dq, each from recomputed probabilities.

    p = exp(s - lse)      delta = sum_d(o do) - dlse
    ds = p (keep (do v^T) - delta), and with a softcap times 1 - (s / softcap)^2
    dq = scale ds k       dk = scale ds^T q    dv = (keep p)^T do
    dsink = -sum over the head's rows of exp(sink - lse) delta

s and keep are as in `forward`. lse and delta [B, Hq, Sq] are over all keys of a row, float32
(float64 for float64). With them, p of a block of keys equals that of the softmax over all keys, so
the sum of `attention_bwd` over blocks is exact, as in ring attention. A gradient through lse only
changes delta. Three kernels compute seven products without atomics, so every result is
deterministic. Where the tile table has a tile for it, the kernel of dk and dv also computes dq, in
five products: every tile of keys adds its part of dq to float32 sums, in any order, as in
FlashAttention-2 (Dao 2023, arXiv:2307.08691). `device` has the loads and the dropout of both
directions.
"""

from __future__ import annotations

import torch

from warpweave.kernels.attention import launch
from warpweave.kernels.attention.device import (
    LOG2E,
    drawn,
    draws,
    elements,
    exp,
    load_rows,
    program,
    store_rows,
    tanh,
)
from warpweave.kernels.attention.options import AttentionOptions, Upstream, resolved
from warpweave.kernels.attention.torch_path import attention_bwd_cpu
from warpweave.kernels.attention.visible import reach, rows_of_step, rows_of_tile, span
from warpweave.kernels.dropout import key_of
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import RUNTIME, choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import dot, to_dtype, upcast
from warpweave.kernels.runtime.tile_table import AttentionTile

# ---------------------------------------------------------------- kernels


@triton.jit
def attention_delta_kernel(o_ptr, do_ptr, dlse_ptr, delta_ptr, o_stride, do_stride, dlse_stride,
                           heads, seq, STEP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_D: tl.constexpr):  # fmt: skip
    o_stride, do_stride = elements(o_stride, STEP), elements(do_stride, STEP)
    tiles = tl.cdiv(seq, BLOCK_M)
    pid = tl.program_id(0)
    row = (pid % tiles).to(tl.int64) * BLOCK_M
    head, batch = ((pid // tiles) % heads).to(tl.int64), (pid // tiles // heads).to(tl.int64)
    rows, i = seq - row, tl.arange(0, BLOCK_M)
    o_ptr += batch * o_stride[0] + row * o_stride[1] + head * o_stride[2]
    do_ptr += batch * do_stride[0] + row * do_stride[1] + head * do_stride[2]
    o = upcast(load_rows(o_ptr, o_stride[1], rows, BLOCK_M, D, BLOCK_D, True))
    do = upcast(load_rows(do_ptr, do_stride[1], rows, BLOCK_M, D, BLOCK_D, True))
    delta = tl.sum(o * do, 1)
    if dlse_ptr is not None:
        dlse_ptr += batch * dlse_stride[0] + head * dlse_stride[1] + row * dlse_stride[2]
        delta -= tl.load(dlse_ptr + i.to(tl.int64) * dlse_stride[2], i < rows, 0.0)
    tl.store(delta_ptr + (batch * heads + head) * seq + row + i, delta, i < rows)


@triton.jit
def _of_rows(ptr, at, rows, REST, BLOCK: tl.constexpr, MASK: tl.constexpr):
    """The numbers of BLOCK rows from `at` on; REST from row `rows` on."""
    i = tl.arange(0, BLOCK)
    if MASK:
        return tl.load(ptr + (at + i), i < rows, REST)
    else:
        return tl.load(ptr + (at + i))


@triton.jit
def _add_dq(sums, at, ds, k, rows, DTYPE: tl.constexpr, D: tl.constexpr, MASK: tl.constexpr):
    """Add ds^T k, what one tile of keys adds to dq / SCALE, to the rows from `at` on of sums[n, D].

    From row `rows` on, where the rows of others follow, ds is 0. If keys or values are infinite, it
    is NaN there, and the copy engine also makes dq of others NaN.
    """
    BLOCK_M: tl.constexpr = ds.shape[1]
    BLOCK_D: tl.constexpr = k.shape[1]
    part = dot(tl.trans(ds), k, tl.zeros((BLOCK_M, BLOCK_D), DTYPE))
    if isinstance(sums, tl.tensor_descriptor):  # the copy engine (TMA) adds, up to column D
        sums.atomic_add([at, 0], part)
    else:
        r, d = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)[None, :]
        inside = (r < rows) & (d < D) if MASK else d < D
        tl.atomic_add(sums + (at + r).to(tl.int64) * D + d, part, inside, sem="relaxed")


@triton.jit
def _dkdv_steps(dk, dv, k, v, k_rows, k_pos, first, last, q_ptr, do_ptr, lse_ptr, delta_ptr,
                dq_sums, at_head, q_stride, do_stride, q_runs, ends, group, head, sample, seed,
                SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                KEEP: tl.constexpr, ALIGNED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
                OWN: tl.constexpr, MASK: tl.constexpr,
                BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    BASE: tl.constexpr = 1.0 if k.dtype == tl.float32 else LOG2E
    UNIT: tl.constexpr = BASE if CAP > 0 else SCALE * BASE
    # With dq, a head dim up to 64 leaves registers for numbers and products that come early, under
    # the exponentials; a larger one needs the part of dq out of the way before dk.
    EARLY: tl.constexpr = dq_sums is not None and BLOCK_D <= 64
    LATE: tl.constexpr = dq_sums is not None and BLOCK_D > 64
    ahead = tl.arange(0, BLOCK_M)[None, :] * q_runs[4]
    q_drawn = drawn(BLOCK_M, ALIGNED) * q_runs[4]
    # A tile of keys that the end of a run cuts short continues with keys that are zero. Without a
    # mask, their p could overflow, and would reach dq as infinity times zero.
    short = None if dq_sums is None else k_rows < k.shape[0]
    k_inside = tl.arange(0, k.shape[0])[:, None] < k_rows
    span0 = span(ends, q_runs[0], q_runs[1], q_runs[4], MASK, FIRST, LAST, BLOCK_M, short)
    span1 = span(ends, q_runs[2], q_runs[3], q_runs[4], MASK, FIRST, LAST, BLOCK_M, short)
    # Go through the tiles of one head after another in a single loop: two nested loops take up to
    # 60 registers more.
    count, j = span0[1] + span1[1], 0
    for _ in range(group * count):
        # 1. Tile j of this head. Rows past the end of a run get lse = inf, so p = 0.
        row, position, rows = rows_of_step(j, span0, span1, q_runs, MASK and FIRST, BLOCK_M)
        begin = 0
        q_at, do_at = q_ptr + row * q_stride[1], do_ptr + row * do_stride[1]
        if OWN:  # there are not enough registers for two sets of offsets
            q_at, do_at, begin = q_ptr, do_ptr, row.to(tl.int32)
        q = load_rows(q_at, q_stride[1], rows, BLOCK_M, D, BLOCK_D, MASK, begin)
        do = load_rows(do_at, do_stride[1], rows, BLOCK_M, D, BLOCK_D, MASK, begin)
        at = at_head + row.to(at_head.dtype)
        if EARLY:
            lse = _of_rows(lse_ptr, at, rows, float("inf"), BLOCK_M, MASK)
            delta = _of_rows(delta_ptr, at, rows, 0.0, BLOCK_M, MASK)

        # 2. p, transposed: [keys, queries].
        zero = tl.zeros((k.shape[0], BLOCK_M), dk.dtype)
        s = dot(k, tl.trans(q), zero)
        if CAP > 0:
            t = tanh(s * (SCALE / CAP), q.dtype == tl.float32)
            s = CAP * t
        if not EARLY:  # only when it is used, to save registers; so is delta
            lse = _of_rows(lse_ptr, at, rows, float("inf"), BLOCK_M, MASK)
        s = s * UNIT - (lse * BASE)[None, :]
        if MASK and FIRST:
            s = tl.where(first[:, None] <= position + ahead, s, -float("inf"))
        if MASK and LAST:
            s = tl.where(position + ahead <= last[:, None], s, -float("inf"))
        if MASK and dq_sums is not None:
            s = tl.where(k_inside, s, -float("inf"))
        p = exp(s, BASE)

        # 3. ds, and the products with the queries' side.
        weight = p
        if DROP:
            kept = tl.trans(draws(position + q_drawn, k_pos, head, sample, seed, DROP, ALIGNED))
            weight = tl.where(kept, p * KEEP, 0.0)
        if EARLY:
            dp = dot(v, tl.trans(do), zero)
        dv = dot(to_dtype(weight, do.dtype), do, dv)
        if not EARLY:
            dp = dot(v, tl.trans(do), zero)
        if DROP:
            dp = tl.where(kept, dp * KEEP, 0.0)
        if not EARLY:
            delta = _of_rows(delta_ptr, at, rows, 0.0, BLOCK_M, MASK)
        ds = p * (dp - delta[None, :])
        if CAP > 0:
            ds *= 1 - t * t
        ds = to_dtype(ds, q.dtype)
        if LATE:
            _add_dq(dq_sums, at, ds, k, rows, dk.dtype, D, MASK)
        dk = dot(ds, q, dk)
        if EARLY:
            _add_dq(dq_sums, at, ds, k, rows, dk.dtype, D, MASK)

        # 4. The next tile of this head, or the first one of the next.
        over = j + 1 == count
        j = tl.where(over, 0, j + 1)
        head += over.to(tl.int64)
        q_ptr += tl.where(over, q_stride[2], 0)
        do_ptr += tl.where(over, do_stride[2], 0)
        at_head += tl.where(over, q_runs[1] + q_runs[3], 0)
    return dk, dv


@triton.jit(do_not_specialize=RUNTIME)
def attention_dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                          dq_sums, table_ptr,
                          q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride,
                          table_stride,
                          q_start0, q_len0, q_start1, q_len1, q_stripes,
                          k_start0, k_len0, k_start1, k_len1, k_stripes,
                          kv_heads, group, window, seed, sample, head0,
                          SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                          KEEP: tl.constexpr, ALIGNED: tl.constexpr, CAUSAL: tl.constexpr,
                          WINDOW: tl.constexpr, INTO: tl.constexpr, STEP: tl.constexpr,
                          D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of keys of one key-value head.
    OWN: tl.constexpr = do_stride is not None  # None if it equals q_stride
    if not OWN:
        do_stride = q_stride
    q_stride, do_stride = elements(q_stride, STEP), elements(do_stride, STEP)
    k_stride, v_stride = elements(k_stride, STEP), elements(v_stride, STEP)
    dk_stride, dv_stride = elements(dk_stride, STEP), elements(dv_stride, STEP)
    q_runs = (q_start0, q_len0, q_start1, q_len1, q_stripes)
    k_runs = (k_start0, k_len0, k_start1, k_len1, k_stripes)
    seed = key_of(seed)
    tile, kv_head, batch = program(k_runs, kv_heads, BLOCK_N, False)
    row, position, rows = rows_of_tile(tile, k_runs, BLOCK_N)
    kv_head = kv_head.to(tl.int64)
    k_ptr += batch * k_stride[0] + row * k_stride[1] + kv_head * k_stride[2]
    v_ptr += batch * v_stride[0] + row * v_stride[1] + kv_head * v_stride[2]
    k = load_rows(k_ptr, k_stride[1], rows, BLOCK_N, D, BLOCK_D, True)
    v = load_rows(v_ptr, v_stride[1], rows, BLOCK_N, D, BLOCK_D, True)
    k_pos = position + drawn(BLOCK_N, ALIGNED) * k_stripes
    dk = tl.zeros((BLOCK_N, BLOCK_D), lse_ptr.dtype.element_ty)
    dv = tl.zeros((BLOCK_N, BLOCK_D), lse_ptr.dtype.element_ty)

    # 2. The queries that see its keys.
    LAST: tl.constexpr = WINDOW or table_ptr is not None
    if table_ptr is not None:
        table_ptr += batch * table_stride + row
    first, last, ends = reach(
        position, rows, k_stripes, table_ptr, k_runs[1] + k_runs[3], window,
        not CAUSAL, True, WINDOW, BLOCK_N)  # fmt: skip

    # 3. All query heads of the group: no atomics, no copy of dk and dv per head.
    head = kv_head * group
    q_ptr += batch * q_stride[0] + head * q_stride[2]
    do_ptr += batch * do_stride[0] + head * do_stride[2]
    at = (batch * kv_heads * group + head) * (q_runs[1] + q_runs[3])
    if dq_sums is None:
        lse_ptr, delta_ptr, at = lse_ptr + at, delta_ptr + at, tl.full((), 0, tl.int64)
    else:
        at = at.to(tl.int32)  # this is also the row of the sums
    dk, dv = _dkdv_steps(
        dk, dv, k, v, rows, k_pos, first, last, q_ptr, do_ptr, lse_ptr, delta_ptr, dq_sums, at,
        q_stride, do_stride, q_runs, ends, group, head0 + head, sample + batch, seed,
        SCALE, CAP, DROP, KEEP, ALIGNED, CAUSAL or LAST, LAST, OWN,
        False, BLOCK_M, D, BLOCK_D)  # fmt: skip
    dk, dv = _dkdv_steps(
        dk, dv, k, v, rows, k_pos, first, last, q_ptr, do_ptr, lse_ptr, delta_ptr, dq_sums, at,
        q_stride, do_stride, q_runs, ends, group, head0 + head, sample + batch, seed,
        SCALE, CAP, DROP, KEEP, ALIGNED, CAUSAL or LAST, LAST, OWN,
        True, BLOCK_M, D, BLOCK_D)  # fmt: skip

    # 4. Store. ds was the gradient of scale q k^T.
    dk_ptr += batch * dk_stride[0] + row * dk_stride[1] + kv_head * dk_stride[2]
    dv_ptr += batch * dv_stride[0] + row * dv_stride[1] + kv_head * dv_stride[2]
    store_rows(dk_ptr, dk_stride[1], dk * SCALE, rows, BLOCK_N, D, BLOCK_D, INTO)
    store_rows(dv_ptr, dv_stride[1], dv, rows, BLOCK_N, D, BLOCK_D, INTO)


@triton.jit
def _dq_steps(dq, q, do, lse, delta, q_pos, first, last, k_ptr, v_ptr, k_step, v_step, k_runs, ends,
              head, sample, seed,
              SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
              KEEP: tl.constexpr, ALIGNED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
              MASK: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    BASE: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    UNIT: tl.constexpr = BASE if CAP > 0 else SCALE * BASE
    n = tl.arange(0, BLOCK_N)[None, :]
    ahead = n * k_runs[4]
    k_drawn = drawn(BLOCK_N, ALIGNED) * k_runs[4]
    span0 = span(ends, k_runs[0], k_runs[1], k_runs[4], MASK, FIRST, LAST, BLOCK_N)
    span1 = span(ends, k_runs[2], k_runs[3], k_runs[4], MASK, FIRST, LAST, BLOCK_N)
    for j in range(span0[1] + span1[1]):
        # 1. p of one tile of keys.
        row, position, rows = rows_of_step(j, span0, span1, k_runs, MASK and FIRST, BLOCK_N)
        k = load_rows(k_ptr + row * k_step, k_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        v = load_rows(v_ptr + row * v_step, v_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        zero = tl.zeros((q.shape[0], BLOCK_N), dq.dtype)
        s = dot(q, tl.trans(k), zero)
        if CAP > 0:
            t = tanh(s * (SCALE / CAP), q.dtype == tl.float32)
            s = CAP * t
        p = exp(s * UNIT - (lse * BASE)[:, None], BASE)
        if MASK:
            visible = n < rows
            if FIRST:
                visible = visible & (position + ahead >= first[:, None])
            if LAST:
                visible = visible & (position + ahead <= last[:, None])
            p = tl.where(visible, p, 0.0)

        # 2. ds and its product with the keys.
        dp = dot(do, tl.trans(v), zero)
        if DROP:
            kept = draws(q_pos, position + k_drawn, head, sample, seed, DROP, ALIGNED)
            dp = tl.where(kept, dp * KEEP, 0.0)
        ds = p * (dp - delta[:, None])
        if CAP > 0:
            ds *= 1 - t * t
        dq = dot(to_dtype(ds, k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=RUNTIME)
def attention_dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, table_ptr,
                        q_stride, k_stride, v_stride, do_stride, dq_stride, table_stride,
                        q_start0, q_len0, q_start1, q_len1, q_stripes,
                        k_start0, k_len0, k_start1, k_len1, k_stripes,
                        heads, group, window, seed, sample, head0,
                        SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                        KEEP: tl.constexpr, ALIGNED: tl.constexpr, CAUSAL: tl.constexpr,
                        WINDOW: tl.constexpr, INTO: tl.constexpr, STEP: tl.constexpr,
                        D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of queries of one head; rows past its end get lse = inf, so p = 0.
    if v_stride is None:  # as in the forward
        v_stride = k_stride
    q_stride, k_stride = elements(q_stride, STEP), elements(k_stride, STEP)
    v_stride, do_stride = elements(v_stride, STEP), elements(do_stride, STEP)
    dq_stride = elements(dq_stride, STEP)
    q_runs = (q_start0, q_len0, q_start1, q_len1, q_stripes)
    k_runs = (k_start0, k_len0, k_start1, k_len1, k_stripes)
    seed = key_of(seed)
    tile, head, batch = program(q_runs, heads, BLOCK_M, True)
    row, position, rows = rows_of_tile(tile, q_runs, BLOCK_M)
    seq = q_runs[1] + q_runs[3]
    q_ptr += batch * q_stride[0] + row * q_stride[1] + head.to(tl.int64) * q_stride[2]
    do_ptr += batch * do_stride[0] + row * do_stride[1] + head.to(tl.int64) * do_stride[2]
    dq_ptr += batch * dq_stride[0] + row * dq_stride[1] + head.to(tl.int64) * dq_stride[2]
    k_ptr += batch * k_stride[0] + (head // group).to(tl.int64) * k_stride[2]
    v_ptr += batch * v_stride[0] + (head // group).to(tl.int64) * v_stride[2]
    at = (batch * heads + head) * seq + row
    i = tl.arange(0, BLOCK_M)
    q_pos = position + drawn(BLOCK_M, ALIGNED) * q_stripes
    q = load_rows(q_ptr, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    do = load_rows(do_ptr, do_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    lse = tl.load(lse_ptr + at + i, i < rows, float("inf"))
    delta = tl.load(delta_ptr + at + i, i < rows, 0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), lse_ptr.dtype.element_ty)

    # 2. Tiles of keys that all rows see, without a mask; then those that some rows see in part.
    FIRST: tl.constexpr = WINDOW or table_ptr is not None
    if table_ptr is not None:
        table_ptr += batch * table_stride + row
    first, last, ends = reach(
        position, rows, q_stripes, table_ptr, seq, window,
        True, not CAUSAL, WINDOW, BLOCK_M)  # fmt: skip
    dq = _dq_steps(
        dq, q, do, lse, delta, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1],
        k_runs, ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP, ALIGNED,
        FIRST, CAUSAL or FIRST, False, BLOCK_N, D, BLOCK_D)  # fmt: skip
    dq = _dq_steps(
        dq, q, do, lse, delta, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1],
        k_runs, ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP, ALIGNED,
        FIRST, CAUSAL or FIRST, True, BLOCK_N, D, BLOCK_D)  # fmt: skip
    store_rows(dq_ptr, dq_stride[1], dq * SCALE, rows, BLOCK_M, D, BLOCK_D, INTO)


# ---------------------------------------------------------------- launches


@no_graph
def attention_delta(
    o: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None = None,
    *,
    impl: str | None = None,
) -> torch.Tensor:
    """Return delta[B, H, S] = sum_d(o do) - dlse, float32 (float64 if o is).

    o and do are [B, S, H, D] of any dtypes, dlse is [B, H, S] or None. Raises ValueError for other
    shapes.
    """
    impl = choose(impl, o, do, dlse)
    if o.ndim != 4 or do.shape != o.shape:
        raise ValueError(
            f"`o` and `do` must have the same shape [B, S, H, D], got {tuple(o.shape)} and "
            f"{tuple(do.shape)}"
        )
    B, S, H, D = o.shape
    if dlse is not None and dlse.shape != (B, H, S):
        raise ValueError(f"dlse must have the shape {(B, H, S)}, got {tuple(dlse.shape)}")
    dtype = compute_dtype(o)
    if impl == "torch":
        delta = (o.to(dtype) * do.to(dtype)).sum(-1).transpose(1, 2)
        return delta.contiguous() if dlse is None else (delta - dlse).contiguous()
    delta = torch.empty((B, H, S), dtype=dtype, device=o.device)
    o, do = launch.unit_stride(o, do)
    if delta.numel():
        step, steps = launch.shared_steps(o, do)
        with torch.cuda.device_of(o):
            attention_delta_kernel[(triton.cdiv(S, 64) * H * B,)](
                o, do, dlse, delta, *steps, (0, 0, 0) if dlse is None else dlse.stride(),
                H, S, step, D, 64, launch.padded(D))  # fmt: skip
    return delta


@no_graph
def attention_dsinks(sinks: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return dsinks[Hq] = -sum over samples and rows of exp(sinks - lse) delta.

    lse and delta[B, Hq, S] are the final ones of these rows; the result has their dtype. Over ranks
    with different rows it is a partial sum. It uses torch: one pass over two small tensors.
    """
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    # exp(-inf - -inf): a sink of -inf is no sink, and the row saw nothing else.
    return -(share.nan_to_num(nan=0.0) * delta).sum((0, 2))


@no_graph
def block_bwd(
    upstream: Upstream,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    *,
    grad_dtype: torch.dtype | None = None,
    into: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`attention_bwd` of checked arguments: (dq, dk, dv) of these rows and keys."""
    options = resolved(options, q, k)
    q, k, v, do = launch.unit_stride(q, k, v, upstream.do.to(q.dtype))
    upstream = upstream._replace(do=do, lse=upstream.lse.contiguous())
    grad_dtype = q.dtype if grad_dtype is None else grad_dtype
    impl = choose(options.impl, q)
    if impl == "torch":
        dq, dk, dv = attention_bwd_cpu(upstream, q, k, v, options, grad_dtype, into)
        return dq, dk, dv
    delta = upstream.delta
    delta = attention_delta(upstream.o, do, impl=impl) if delta is None else delta.contiguous()
    dq, dk, dv = (
        torch.empty(x.shape, dtype=grad_dtype, device=x.device) if given is None else given
        for x, given in zip((q, k, v), into)
    )
    q, k, v, do, wide_dq, wide_dk, wide_dv = launch.widened(q, q, k, v, do, dq, dk, dv)
    upstream = upstream._replace(do=do, delta=delta)
    carried = [x is not None for x in into]
    variant = launch.variant_of(q, options, carried[1])
    tile = launch.find_fused_tile(q, k, options, variant)
    with torch.cuda.device_of(q):
        if tile is not None:
            _launch_fused(
                upstream, q, k, v, wide_dq, wide_dk, wide_dv, options, carried, variant, tile
            )
        else:
            if k.numel():
                tile = launch.find_attention_tile("attention_dkdv", q, variant)
                _launch_dkdv(
                    upstream, q, k, v, wide_dk, wide_dv, options, carried[1], variant, tile
                )
            if q.numel():
                _launch_dq(upstream, q, k, v, wide_dq, options, carried[0])
    for wide, given in ((wide_dq, dq), (wide_dk, dk), (wide_dv, dv)):
        launch.narrow_into(wide, given)
    return dq, dk, dv


def _launch_fused(
    upstream: Upstream, q, k, v, dq, dk, dv, options: AttentionOptions, into: list[bool],
    variant: frozenset[str], tile: AttentionTile,
) -> None:  # fmt: skip
    """dq, dk and dv in one kernel, through sums of dq / scale[B, Hq, Sq, D]."""
    B, S, H, D = q.shape
    sums = torch.zeros((B, H, S, D), dtype=upstream.lse.dtype, device=q.device)
    _launch_dkdv(upstream, q, k, v, dk, dv, options, into[1], variant, tile, sums)
    if into[0]:
        dq.add_(sums.transpose(1, 2), alpha=options.scale)
    else:
        torch.mul(sums.transpose(1, 2), options.scale, out=dq)


def _launch_dkdv(
    upstream: Upstream, q, k, v, dk, dv, options: AttentionOptions, into: bool,
    variant: frozenset[str], tile: AttentionTile, dq_sums: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """dk and dv. If dq_sums are given, also add dq / scale to them."""
    (B, _, H, D), Hkv, (do, lse, delta, _) = q.shape, k.shape[2], upstream
    table, by_sample = launch.table_of(options, q, keys=True)
    step, (of_q, of_k, of_v, of_do, *others) = launch.shared_steps(q, k, v, do, dk, dv)
    of_q, of_do = launch.one_set(of_q, of_do)
    attention_dkdv_kernel[(launch.count_tiles(options.k_runs, tile.k) * Hkv * B,)](
        q, k, v, do, lse, delta, dk, dv,
        None if dq_sums is None else launch.added_rows(dq_sums, tile), table,
        of_q, of_k, of_v, of_do, *others, by_sample,
        *launch.numbers(options, Hkv, H // Hkv), *launch.constants(options, into, step, D, tile),
        **launch.launch_options(tile, q, variant))  # fmt: skip


def _launch_dq(upstream: Upstream, q, k, v, dq, options: AttentionOptions, into: bool) -> None:
    (B, _, H, D), (do, lse, delta, _) = q.shape, upstream
    variant = launch.variant_of(q, options, into)
    tile = launch.find_attention_tile("attention_dq", q, variant)
    table, by_sample = launch.table_of(options, q)
    step, (of_q, of_k, of_v, *others) = launch.shared_steps(q, k, v, do, dq)
    attention_dq_kernel[(launch.count_tiles(options.q_runs, tile.q) * H * B,)](
        q, k, v, do, lse, delta, dq, table,
        of_q, *launch.one_set(of_k, of_v), *others, by_sample,
        *launch.numbers(options, H, H // k.shape[2]),
        *launch.constants(options, into, step, D, tile),
        **launch.launch_options(tile, q, variant))  # fmt: skip
