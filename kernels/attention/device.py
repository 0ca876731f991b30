"""The Triton kernels of attention: forward; delta; dk and dv; dq. `attention.py` launches them.

Formulas and shapes stand there, which tiles are visited in `attention_mask.py`. Everything but
causal and full attention is decided at compile time (a window, documents, a softcap, sinks,
dropout, sums carried over from earlier keys), so the plain kernels contain none of it.

Each loop over tiles runs twice: over those that every row sees whole, without a mask, and over the
others. Rows past the end of a run load zeros, and in the backward lse = inf, hence p = 0.

Dropout draws a word of philox4x32-10 per probability, from counter (query position, key position,
head, sample) and key `seed`, all global: every tiling and every layout of the sequence, heads or
batch draws the same mask, and the backward draws it again.
"""

from __future__ import annotations

from warpweave.kernels.attention.visible import nth_tile, reach, span, tile_at
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.numeric import dot, to_dtype, upcast

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)

# They change from one ring hop, layer or step to the next: plain arguments (Triton specialises the
# elements of a tuple whatever one says), so that none of them compiles a kernel of its own.
_RUNTIME = ["q_start0", "q_start1", "k_start0", "k_start1", "window", "seed", "sample", "head0"]

# ---------------------------------------------------------------- device helpers


@triton.jit
def _elements(steps, STEP: tl.constexpr):
    """Steps from sample to sample, row to row and head to head in elements, given in multiples of
    STEP: Triton sees by itself that an argument is a multiple of 16, of 8 or less it must be told.
    """
    if STEP == 1:
        return steps
    else:
        return (tl.cast(steps[0], tl.int64) * STEP, tl.cast(steps[1], tl.int64) * STEP,
                tl.cast(steps[2], tl.int64) * STEP)  # fmt: skip


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
def _store(
    ptr,
    stride,
    x,
    rows,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ADD: tl.constexpr,
):
    """Write the tile x at `ptr`, or with ADD add it to what is there."""
    r, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = ptr + r.to(tl.int64) * stride + d
    inside = (r < rows) & (d < D)
    if ADD:
        x += tl.load(at, inside, 0.0)
    tl.store(at, to_dtype(x, ptr.dtype.element_ty), inside)


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
def _tanh(x, PRECISE: tl.constexpr):
    """tanh(x) = 2 sigmoid(2x) - 1. PRECISE keeps float32's relative accuracy near 0, where the
    difference cancels, by the series."""
    y = 2 * tl.sigmoid(2 * x) - 1
    if PRECISE and x.dtype == tl.float32:
        x2 = x * x
        near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315))))
        y = tl.where(x2 < 0.04, near, y)
    return y


@triton.jit
def _exp(x, BASE: tl.constexpr):
    """exp of an exponent that has BASE units per natural one: log2(e), powers of two, which come
    from scores by one fused multiply-add; but in float32 1. There lse rounded once more, to a power
    of two, would cost accuracy where scores are in the thousands."""
    return tl.exp2(x * (_LOG2E / BASE))


@triton.jit
def _kept(q_pos, k_pos, head, sample, seed, DROP: tl.constexpr):
    """Which probabilities dropout keeps; DROP is p in units of 2^-32, q_pos and k_pos broadcast."""
    zero = (q_pos * 0 + k_pos * 0).to(tl.uint32)
    c0, c1 = zero + q_pos.to(tl.uint32), zero + k_pos.to(tl.uint32)
    c2, c3 = zero + head.to(tl.uint32), zero + sample.to(tl.uint32)
    word, _, _, _ = tl.philox(tl.cast(seed, tl.int64), c0, c1, c2, c3)
    return word.to(tl.int64) >= DROP


# ---------------------------------------------------------------- forward


@triton.jit
def _fwd_steps(acc, l, m, q, q_pos, first, last, k_ptr, v_ptr, k_step, v_step, k_runs, ends,
               head, sample, seed,
               SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
               KEEP: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MASK: tl.constexpr,
               BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    BASE: tl.constexpr = 1.0 if q.dtype == tl.float32 else _LOG2E
    UNIT: tl.constexpr = BASE if CAP > 0 else SCALE * BASE
    n = tl.arange(0, BLOCK_N)[None, :]
    ahead = n * k_runs[4]
    span0 = span(ends, k_runs[0], k_runs[1], k_runs[4], MASK, FIRST, LAST, False, BLOCK_N)
    span1 = span(ends, k_runs[2], k_runs[3], k_runs[4], MASK, FIRST, LAST, False, BLOCK_N)
    for j in range(span0[1] + span1[1]):
        # 1. Scores of one tile of keys.
        index = nth_tile(j, span0, span1, tl.cdiv(k_runs[1], BLOCK_N), MASK and FIRST)
        row, position, rows = tile_at(index, k_runs, BLOCK_N)
        k = _load(k_ptr + row * k_step, k_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        s = dot(q, tl.trans(k), tl.zeros((q.shape[0], BLOCK_N), acc.dtype))
        if CAP > 0:
            s = CAP * _tanh(s * (SCALE / CAP), q.dtype == tl.float32)
        if MASK:
            visible = n < rows
            if FIRST:
                visible = visible & (position + ahead >= first[:, None])
            if LAST:
                visible = visible & (position + ahead <= last[:, None])
            s = tl.where(visible, s, -float("inf"))

        # 2. Online softmax; the pivot of a row that has seen no key yet is 0.
        m_new = tl.maximum(m, tl.max(s, 1) * UNIT)
        pivot = m_new
        if MASK:
            pivot = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = _exp(s * UNIT - pivot[:, None], BASE)
        shrink = _exp(m - pivot, BASE)

        # 3. Accumulate. The normaliser is that of the row before dropout; p is summed before it is
        #    rounded, so that no two copies of it are held.
        v = _load(v_ptr + row * v_step, v_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        l = l * shrink + tl.sum(p, 1)
        weight = p
        if DROP:
            kept = _kept(q_pos[:, None], position + ahead, head, sample, seed, DROP)
            weight = tl.where(kept, p * KEEP, 0.0)
        acc = dot(to_dtype(weight, v.dtype), v, acc * shrink[:, None])
        m = m_new
    return acc, l, m


@triton.jit(do_not_specialize=_RUNTIME)
def attention_fwd_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, table_ptr, sinks_ptr,
                         q_stride, k_stride, v_stride, o_stride, table_stride,
                         q_start0, q_len0, q_start1, q_len1, q_stripes,
                         k_start0, k_len0, k_start1, k_len1, k_stripes,
                         heads, group, window, seed, sample, head0,
                         SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                         KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                         INTO: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr,
                         BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                         BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of queries of one head. v_stride is None where it is k_stride: then one set of
    #    addresses serves both.
    if v_stride is None:
        v_stride = k_stride
    q_stride, k_stride = _elements(q_stride, STEP), _elements(k_stride, STEP)
    v_stride, o_stride = _elements(v_stride, STEP), _elements(o_stride, STEP)
    q_runs = (q_start0, q_len0, q_start1, q_len1, q_stripes)
    k_runs = (k_start0, k_len0, k_start1, k_len1, k_stripes)
    tile, head, batch = _program(q_runs, heads, BLOCK_M, True)
    row, position, rows = tile_at(tile, q_runs, BLOCK_M)
    seq = q_runs[1] + q_runs[3]
    q_ptr += batch * q_stride[0] + row * q_stride[1] + head.to(tl.int64) * q_stride[2]
    k_ptr += batch * k_stride[0] + (head // group).to(tl.int64) * k_stride[2]
    v_ptr += batch * v_stride[0] + (head // group).to(tl.int64) * v_stride[2]
    o_ptr += batch * o_stride[0] + row * o_stride[1] + head.to(tl.int64) * o_stride[2]
    lse_ptr += (batch * heads + head) * seq + row
    q = _load(q_ptr, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    i = tl.arange(0, BLOCK_M)
    q_pos = position + i * q_stripes

    # 2. Nothing is seen yet but what earlier calls carry over, or a sink: a logit without a value.
    ACC: tl.constexpr = lse_ptr.dtype.element_ty
    BASE: tl.constexpr = 1.0 if q.dtype == tl.float32 else _LOG2E
    acc = tl.zeros((BLOCK_M, BLOCK_D), ACC)
    l = tl.zeros((BLOCK_M,), ACC)
    m = tl.full((BLOCK_M,), -float("inf"), ACC)
    if INTO:
        m = tl.load(lse_ptr + i, i < rows, -float("inf")) * BASE
        l = tl.where(m == -float("inf"), l, 1.0)
        o = _load(o_ptr, o_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
        acc = tl.where(m[:, None] == -float("inf"), acc, o)
    elif sinks_ptr is not None:
        m = l + tl.load(sinks_ptr + head) * BASE
        l = tl.where(m == -float("inf"), l, 1.0)

    # 3. The keys that all of its rows see, then those at the ends of intervals and of runs.
    FIRST: tl.constexpr = WINDOW or table_ptr is not None
    if table_ptr is not None:
        table_ptr += batch * table_stride + row
    first, last, ends = reach(
        position, rows, q_stripes, table_ptr, seq, window,
        True, not CAUSAL, WINDOW, BLOCK_M)  # fmt: skip
    acc, l, m = _fwd_steps(
        acc, l, m, q, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1], k_runs,
        ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP,
        FIRST, CAUSAL or FIRST, False, BLOCK_N, D, BLOCK_D)  # fmt: skip
    acc, l, m = _fwd_steps(
        acc, l, m, q, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1], k_runs,
        ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP,
        FIRST, CAUSAL or FIRST, True, BLOCK_N, D, BLOCK_D)  # fmt: skip

    # 4. Normalise; l = 0 and m = -inf only in rows that saw no key. log2(l) in units of m.
    l = tl.where(l == 0, 1.0, l)
    _store(o_ptr, o_stride[1], acc / l[:, None], rows, BLOCK_M, D, BLOCK_D, False)
    tl.store(lse_ptr + i, (m + tl.log2(l) * (BASE * _LN2)) * (1 / BASE), i < rows)


# ---------------------------------------------------------------- backward


@triton.jit
def attention_delta_kernel(o_ptr, do_ptr, dlse_ptr, delta_ptr, o_stride, do_stride, dlse_stride,
                           heads, seq, STEP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr,
                           BLOCK_D: tl.constexpr):  # fmt: skip
    o_stride, do_stride = _elements(o_stride, STEP), _elements(do_stride, STEP)
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


@triton.jit
def _dkdv_steps(dk, dv, k, v, k_pos, first, last, q_ptr, do_ptr, lse_ptr, delta_ptr,
                q_stride, do_stride, q_runs, ends, group, head, sample, seed,
                SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                KEEP: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MASK: tl.constexpr,
                BLOCK_M: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    BASE: tl.constexpr = 1.0 if k.dtype == tl.float32 else _LOG2E
    UNIT: tl.constexpr = BASE if CAP > 0 else SCALE * BASE
    i = tl.arange(0, BLOCK_M)
    ahead = i[None, :] * q_runs[4]
    span0 = span(ends, q_runs[0], q_runs[1], q_runs[4], MASK, FIRST, LAST, True, BLOCK_M)
    span1 = span(ends, q_runs[2], q_runs[3], q_runs[4], MASK, FIRST, LAST, True, BLOCK_M)
    count = span0[1] + span1[1]
    # Through the tiles of one head after another, in one loop: two nested ones take up to 60
    # registers more.
    for j in range(group * count):
        # 1. One tile of queries of head g. Rows past the end of a run get lse = inf, hence p = 0.
        g = j // tl.maximum(count, 1)
        index = nth_tile(j - g * count, span0, span1, tl.cdiv(q_runs[1], BLOCK_M), MASK and LAST)
        row, position, rows = tile_at(index, q_runs, BLOCK_M)
        g = g.to(tl.int64)
        q_at = q_ptr + row * q_stride[1] + g * q_stride[2]
        do_at = do_ptr + row * do_stride[1] + g * do_stride[2]
        at = row + g * (q_runs[1] + q_runs[3]) + i
        q = _load(q_at, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
        do = _load(do_at, do_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
        lse = tl.load(lse_ptr + at, i < rows, float("inf"))
        delta = tl.load(delta_ptr + at, i < rows, 0.0)

        # 2. p, transposed: [keys, queries].
        zero = tl.zeros((k.shape[0], BLOCK_M), dk.dtype)
        s = dot(k, tl.trans(q), zero)
        if CAP > 0:
            t = _tanh(s * (SCALE / CAP), q.dtype == tl.float32)
            s = CAP * t
        p = _exp(s * UNIT - (lse * BASE)[None, :], BASE)
        if MASK and LAST:
            q_pos = position + ahead
            p = tl.where((first[:, None] <= q_pos) & (q_pos <= last[:, None]), p, 0.0)
        elif MASK:
            p = tl.where(first[:, None] <= position + ahead, p, 0.0)

        # 3. ds and the products with the queries' side.
        weight = p
        if DROP:
            kept = _kept(position + ahead, k_pos[:, None], head + g, sample, seed, DROP)
            weight = tl.where(kept, p * KEEP, 0.0)
        dv = dot(to_dtype(weight, do.dtype), do, dv)
        dp = dot(v, tl.trans(do), zero)
        if DROP:
            dp = tl.where(kept, dp * KEEP, 0.0)
        ds = p * (dp - delta[None, :])
        if CAP > 0:
            ds *= 1 - t * t
        dk = dot(to_dtype(ds, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=_RUNTIME)
def attention_dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
                          table_ptr,
                          q_stride, k_stride, v_stride, do_stride, dk_stride, dv_stride,
                          table_stride,
                          q_start0, q_len0, q_start1, q_len1, q_stripes,
                          k_start0, k_len0, k_start1, k_len1, k_stripes,
                          kv_heads, group, window, seed, sample, head0,
                          SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                          KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                          INTO: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr,
                          BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                          BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of keys of one key-value head.
    q_stride, do_stride = _elements(q_stride, STEP), _elements(do_stride, STEP)
    k_stride, v_stride = _elements(k_stride, STEP), _elements(v_stride, STEP)
    dk_stride, dv_stride = _elements(dk_stride, STEP), _elements(dv_stride, STEP)
    q_runs = (q_start0, q_len0, q_start1, q_len1, q_stripes)
    k_runs = (k_start0, k_len0, k_start1, k_len1, k_stripes)
    tile, kv_head, batch = _program(k_runs, kv_heads, BLOCK_N, False)
    row, position, rows = tile_at(tile, k_runs, BLOCK_N)
    kv_head = kv_head.to(tl.int64)
    k_ptr += batch * k_stride[0] + row * k_stride[1] + kv_head * k_stride[2]
    v_ptr += batch * v_stride[0] + row * v_stride[1] + kv_head * v_stride[2]
    k = _load(k_ptr, k_stride[1], rows, BLOCK_N, D, BLOCK_D, True)
    v = _load(v_ptr, v_stride[1], rows, BLOCK_N, D, BLOCK_D, True)
    k_pos = position + tl.arange(0, BLOCK_N) * k_stripes
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
    dk, dv = _dkdv_steps(
        dk, dv, k, v, k_pos, first, last, q_ptr, do_ptr, lse_ptr + at, delta_ptr + at,
        q_stride, do_stride, q_runs, ends, group, head0 + head, sample + batch, seed,
        SCALE, CAP, DROP, KEEP, CAUSAL or LAST, LAST, False, BLOCK_M, D, BLOCK_D)  # fmt: skip
    if CAUSAL or LAST:
        dk, dv = _dkdv_steps(
            dk, dv, k, v, k_pos, first, last, q_ptr, do_ptr, lse_ptr + at, delta_ptr + at,
            q_stride, do_stride, q_runs, ends, group, head0 + head, sample + batch, seed,
            SCALE, CAP, DROP, KEEP, CAUSAL or LAST, LAST, True, BLOCK_M, D, BLOCK_D)  # fmt: skip

    # 4. Store; ds was the gradient of scale q k^T.
    dk_ptr += batch * dk_stride[0] + row * dk_stride[1] + kv_head * dk_stride[2]
    dv_ptr += batch * dv_stride[0] + row * dv_stride[1] + kv_head * dv_stride[2]
    _store(dk_ptr, dk_stride[1], dk * SCALE, rows, BLOCK_N, D, BLOCK_D, INTO)
    _store(dv_ptr, dv_stride[1], dv, rows, BLOCK_N, D, BLOCK_D, INTO)


@triton.jit
def _dq_steps(dq, q, do, lse, delta, q_pos, first, last, k_ptr, v_ptr, k_step, v_step, k_runs, ends,
              head, sample, seed,
              SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
              KEEP: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, MASK: tl.constexpr,
              BLOCK_N: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    BASE: tl.constexpr = 1.0 if q.dtype == tl.float32 else _LOG2E
    UNIT: tl.constexpr = BASE if CAP > 0 else SCALE * BASE
    n = tl.arange(0, BLOCK_N)[None, :]
    ahead = n * k_runs[4]
    span0 = span(ends, k_runs[0], k_runs[1], k_runs[4], MASK, FIRST, LAST, False, BLOCK_N)
    span1 = span(ends, k_runs[2], k_runs[3], k_runs[4], MASK, FIRST, LAST, False, BLOCK_N)
    for j in range(span0[1] + span1[1]):
        # 1. p of one tile of keys.
        index = nth_tile(j, span0, span1, tl.cdiv(k_runs[1], BLOCK_N), MASK and FIRST)
        row, position, rows = tile_at(index, k_runs, BLOCK_N)
        k = _load(k_ptr + row * k_step, k_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        v = _load(v_ptr + row * v_step, v_step, rows, BLOCK_N, D, BLOCK_D, MASK)
        zero = tl.zeros((q.shape[0], BLOCK_N), dq.dtype)
        s = dot(q, tl.trans(k), zero)
        if CAP > 0:
            t = _tanh(s * (SCALE / CAP), q.dtype == tl.float32)
            s = CAP * t
        p = _exp(s * UNIT - (lse * BASE)[:, None], BASE)
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
            kept = _kept(q_pos[:, None], position + ahead, head, sample, seed, DROP)
            dp = tl.where(kept, dp * KEEP, 0.0)
        ds = p * (dp - delta[:, None])
        if CAP > 0:
            ds *= 1 - t * t
        dq = dot(to_dtype(ds, k.dtype), k, dq)
    return dq


@triton.jit(do_not_specialize=_RUNTIME)
def attention_dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, table_ptr,
                        q_stride, k_stride, v_stride, do_stride, dq_stride, table_stride,
                        q_start0, q_len0, q_start1, q_len1, q_stripes,
                        k_start0, k_len0, k_start1, k_len1, k_stripes,
                        heads, group, window, seed, sample, head0,
                        SCALE: tl.constexpr, CAP: tl.constexpr, DROP: tl.constexpr,
                        KEEP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
                        INTO: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr,
                        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                        BLOCK_D: tl.constexpr):  # fmt: skip
    # 1. One tile of queries of one head; rows past its end get lse = inf, hence p = 0.
    if v_stride is None:  # as in the forward
        v_stride = k_stride
    q_stride, k_stride = _elements(q_stride, STEP), _elements(k_stride, STEP)
    v_stride, do_stride = _elements(v_stride, STEP), _elements(do_stride, STEP)
    dq_stride = _elements(dq_stride, STEP)
    q_runs = (q_start0, q_len0, q_start1, q_len1, q_stripes)
    k_runs = (k_start0, k_len0, k_start1, k_len1, k_stripes)
    tile, head, batch = _program(q_runs, heads, BLOCK_M, True)
    row, position, rows = tile_at(tile, q_runs, BLOCK_M)
    seq = q_runs[1] + q_runs[3]
    q_ptr += batch * q_stride[0] + row * q_stride[1] + head.to(tl.int64) * q_stride[2]
    do_ptr += batch * do_stride[0] + row * do_stride[1] + head.to(tl.int64) * do_stride[2]
    dq_ptr += batch * dq_stride[0] + row * dq_stride[1] + head.to(tl.int64) * dq_stride[2]
    k_ptr += batch * k_stride[0] + (head // group).to(tl.int64) * k_stride[2]
    v_ptr += batch * v_stride[0] + (head // group).to(tl.int64) * v_stride[2]
    at = (batch * heads + head) * seq + row
    i = tl.arange(0, BLOCK_M)
    q_pos = position + i * q_stripes
    q = _load(q_ptr, q_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    do = _load(do_ptr, do_stride[1], rows, BLOCK_M, D, BLOCK_D, True)
    lse = tl.load(lse_ptr + at + i, i < rows, float("inf"))
    delta = tl.load(delta_ptr + at + i, i < rows, 0.0)
    dq = tl.zeros((BLOCK_M, BLOCK_D), lse_ptr.dtype.element_ty)

    # 2. The keys that all of its rows see, then those at the ends of intervals and of runs.
    FIRST: tl.constexpr = WINDOW or table_ptr is not None
    if table_ptr is not None:
        table_ptr += batch * table_stride + row
    first, last, ends = reach(
        position, rows, q_stripes, table_ptr, seq, window,
        True, not CAUSAL, WINDOW, BLOCK_M)  # fmt: skip
    dq = _dq_steps(
        dq, q, do, lse, delta, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1],
        k_runs, ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP,
        FIRST, CAUSAL or FIRST, False, BLOCK_N, D, BLOCK_D)  # fmt: skip
    dq = _dq_steps(
        dq, q, do, lse, delta, q_pos, first, last, k_ptr, v_ptr, k_stride[1], v_stride[1],
        k_runs, ends, head0 + head, sample + batch, seed, SCALE, CAP, DROP, KEEP,
        FIRST, CAUSAL or FIRST, True, BLOCK_N, D, BLOCK_D)  # fmt: skip
    _store(dq_ptr, dq_stride[1], dq * SCALE, rows, BLOCK_M, D, BLOCK_D, INTO)
