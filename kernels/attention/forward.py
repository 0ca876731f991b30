"""Forward of attention: online softmax over tiles of keys, from formula to launch.

    s = scale q k^T, or softcap tanh(scale q k^T / softcap), where visible, else -inf
    lse = log(exp(sink) + sum_k exp(s))        p = exp(s - lse)       o = (keep p) v

q, o: [B, Sq, Hq, D]; k, v: [B, Sk, Hkv, D], where Hq is a multiple of Hkv; lse: [B, Hq, Sq],
natural logarithm, float32 (float64 for float64); keep is 0 or 1 / (1 - dropout). A program holds a
tile of queries of one head and loops over the tiles of keys that any of its rows sees (`visible`).
It keeps the running maximum m and sum l of the weights, and rescales acc and l when m grows. At the
end o = acc / l and lse = m + log l. `function` has the sources, `device` the loads and the dropout
of both directions.
"""

from __future__ import annotations

import torch

from warpweave.kernels.attention import launch
from warpweave.kernels.attention.device import (
    LN2,
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
from warpweave.kernels.attention.options import AttentionOptions, resolved
from warpweave.kernels.attention.torch_path import attention_fwd_cpu
from warpweave.kernels.attention.visible import reach, rows_of_step, rows_of_tile, span
from warpweave.kernels.dropout import key_of
from warpweave.kernels.reference import compute_dtype
from warpweave.kernels.runtime.dispatch import RUNTIME, capability, choose, no_graph, tl, triton
from warpweave.kernels.runtime.dtypes import dot, to_dtype

# ---------------------------------------------------------------- kernel


@triton.jit
def _row_max(s, HALVES: tl.constexpr):
    """The maximum of each row.

    With HALVES, ptxas interleaves four chains of comparisons instead of two, which hides latency on
    Hopper. Elsewhere it costs time: on Blackwell, the halves of a row are in different warps.
    """
    if HALVES:
        left, right = tl.split(s.reshape(s.shape[0], 2, s.shape[1] // 2).permute(0, 2, 1))
        s = tl.maximum(left, right)
    return tl.max(s, 1)


@triton.jit
def _fwd_steps(acc, l, m, q, q_pos, first, last, k_ptr, v_ptr, k_step, v_step, k_runs, ends,
               head, sample, seed,
               SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
               KEEP: tl.constexpr, ALIGNED: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
               MASK: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
               HALVES: tl.constexpr):  # fmt: skip
    BASE: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    UNIT: tl.constexpr = BASE if CAP > 0 else SCALE * BASE
    n = tl.arange(0, BLOCK_N)[None, :]
    ahead = n * k_runs[4]
    k_drawn = drawn(BLOCK_N, ALIGNED) * k_runs[4]
    span0 = span(ends, k_runs[0], k_runs[1], k_runs[4], MASK, FIRST, LAST, BLOCK_N)
    span1 = span(ends, k_runs[2], k_runs[3], k_runs[4], MASK, FIRST, LAST, BLOCK_N)
    for j in range(span0[1] + span1[1]):
        # 1. Scores of one tile of keys.
        row, position, rows = rows_of_step(j, span0, span1, k_runs, MASK and FIRST, BLOCK_N)
        k = load_rows(k_ptr + row * k_step, k_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        s = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), acc.dtype))
        if CAP > 0:
            s = CAP * tanh(s * (SCALE / CAP), q.dtype == tl.float32)
        if MASK:
            visible = n < rows
            if FIRST:
                visible = visible & (position + ahead >= first[:, None])
            if LAST:
                visible = visible & (position + ahead <= last[:, None])
            s = tl.where(visible, s, -float("inf"))

        # 2. Online softmax; the pivot of a row that has seen no key yet is 0.
        m_new = tl.maximum(m, _row_max(s, HALVES) * UNIT)
        pivot = m_new
        if MASK:
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = exp(s * UNIT - pivot[:, None], BASE)
        shrink = exp(m - pivot, BASE)

        # 3. Accumulate. The normalizer is that of the row before dropout. p is summed before it is
        #    rounded, so that only one copy of it is held.
        v = load_rows(v_ptr + row * v_step, v_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        l = l * shrink + tl.sum(p, 1)
        weight = p
        if DROP:
            kept = draws(q_pos, position + k_drawn, head, sample, seed, DROP, ALIGNED)
            weight = tl.where(kept, p * KEEP, 0.0)
        acc = dot(to_dtype(weight, v.dtype), v, acc * shrink[:, None])
        m = m_new
    return acc, l, m


@triton.jit(do_not_specialize=RUNTIME)
def attention_fwd_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, sinks_ptr,
                         q_stride, k_stride, v_stride, o_stride, table_stride,
                         q_start0, q_len0, q_start1, q_len1, q_stripes,
                         k_start0, k_len0, k_start1, k_len1, k_stripes,
                         heads, group, window, seed, sample, head0,
                         SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                         KEEP: tl.constexpr, ALIGNED: tl.constexpr, CAUSAL: tl.constexpr,
                         WINDOW: tl.constexpr, INTO: tl.constexpr, STEP: tl.constexpr,
                         D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_D: tl.constexpr, HALVES: tl.constexpr):  # fmt: skip
    # 1. One tile of queries of one head. v_stride is None if it equals k_stride: one set of
    #    addresses then serves both.
    if v_stride is None:
        v_stride = k_stride
    q_stride, k_stride = elements(q_stride, STEP), elements(k_stride, STEP)
    v_stride, o_stride = elements(v_stride, STEP), elements(o_stride, STEP)
    q_runs = (q_start0, q_len0, q_start1, q_len1, q_stripes)
    k_runs = (k_start0, k_len0, k_start1, k_len1, k_stripes)
    seed = key_of(seed)
    tile, head, batch = program(q_runs, heads, BLOCK_M, True)
    row, position, rows = rows_of_tile(tile, q_runs, BLOCK_M)
    seq = q_runs[1] + q_runs[3]
    q_ptr += batch * q_stride[0] + row * q_stride[1] + head.to(tl.int64) * q_stride[2]
    k_ptr += batch * k_stride[0] + (head // group).to(tl.int64) * k_stride[2]
    v_ptr += batch * v_stride[0] + (head // group).to(tl.int64) * v_stride[2]
    o_ptr += batch * o_stride[0] + row * o_stride[1] + head.to(tl.int64) * o_stride[2]
    lse_ptr += (batch * heads + head) * seq + row
    q = load_rows(q_ptr, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    i = tl.arange(0, BLOCK_M)
    q_pos = position + drawn(BLOCK_M, ALIGNED) * q_stripes

    # 2. The sums start from earlier calls (`into`), from a sink (a logit without a value), or from
    # 0.
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    BASE: tl.constexpr = 1.0 if q.dtype == tl.float32 else LOG2E
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    l = tl.zeros((BLOCK_M,), ACC)
    m = tl.full((BLOCK_M,), -float("inf"), ACC)
    if INTO:
        m = tl.load(lse_ptr + i, i < rows, -float("inf")) * BASE
        l = tl.where(m == -float("inf"), l, 1.0)
        o = load_rows(o_ptr, o_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
        acc = tl.where(m[:, None] == -float("inf"), acc, o)
    elif sinks_ptr is not None:
        m = l + tl.load(sinks_ptr + head) * BASE
        l = tl.where(m == -float("inf"), l, 1.0)

    # 3. Tiles of keys that all rows see, without a mask; then those that some rows see in part.
    FIRST: tl.constexpr = WINDOW or table_ptr is not None
    if table_ptr is not None:
        table_ptr += batch * table_stride + row
    first, last, ends = reach(
        position, rows, q_stripes, table_ptr, seq, window,
        True, not CAUSAL, WINDOW, BLOCK_M)  # fmt: skip
    acc, l, m = _fwd_steps(
        acc, l, m, q, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1],
        k_runs, ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP, ALIGNED,
        FIRST, CAUSAL or FIRST, False, BLOCK_N, D, BLOCK_D, HALVES)  # fmt: skip
    acc, l, m = _fwd_steps(
        acc, l, m, q, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1],
        k_runs, ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP, ALIGNED,
        FIRST, CAUSAL or FIRST, True, BLOCK_N, D, BLOCK_D, False)  # fmt: skip

    # 4. Normalize; l = 0 and m = -inf only in rows that saw no key. log2(l) is in units of m.
    l = tl.where(l == 0, 1.0, l)
    store_rows(o_ptr, o_stride[1], acc / l[:, None], rows, BLOCK_M, D, BLOCK_D, False)
    tl.store(lse_ptr + i, (m + tl.log2(l) * (BASE * LN2)) * (1 / BASE), i < rows)


# ---------------------------------------------------------------- launch


@no_graph
def block_fwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    *,
    sinks: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_fwd` of checked arguments: (o, lse) of these rows and keys."""
    options = resolved(options, q, k)
    q, k, v = launch.unit_stride(q, k, v)
    out_dtype = q.dtype if out_dtype is None else out_dtype
    sinks = None if sinks is None else sinks.detach().to(compute_dtype(q)).contiguous()
    if choose(options.impl, q) == "torch":
        return attention_fwd_cpu(q, k, v, options, sinks, out_dtype, into)
    if into is None:
        B, Sq, H, _ = q.shape
        o = torch.empty(q.shape, dtype=out_dtype, device=q.device)
        lse = torch.empty((B, H, Sq), dtype=compute_dtype(q), device=q.device)
    else:
        o, lse = into
    if o.numel():
        q, k, v, wide = launch.widened(q, q, k, v, o)
        with torch.cuda.device_of(q):
            _launch_attention_fwd(q, k, v, wide, lse, sinks, options, into is not None)
        launch.narrow_into(wide, o)
    return o, lse


def _launch_attention_fwd(q, k, v, o, lse, sinks, options: AttentionOptions, into: bool) -> None:
    B, _, H, D = q.shape
    variant = launch.variant_of(q, options, into)
    tile = launch.find_attention_tile("attention_fwd", q, variant)
    table, by_sample = launch.table_of(options, q)
    step, (of_q, of_k, of_v, of_o) = launch.shared_steps(q, k, v, o)
    attention_fwd_kernel[(launch.count_tiles(options.q_runs, tile.q) * H * B,)](
        q, k, v, o, lse, table, sinks,
        of_q, *launch.one_set(of_k, of_v), of_o, by_sample,
        *launch.numbers(options, H, H // k.shape[2]),
        *launch.constants(options, into, step, D, tile),
        HALVES=capability(q.device) // 10 == 9 and q.element_size() == 2 and not options.softcap,
        **launch.launch_options(tile, q, variant))  # fmt: skip
