"""What the Triton kernels of attention share: loads, stores, exponentials, the draw of dropout.

Formulas and shapes stand in `function`, which tiles are visited in `visible`. Everything but causal
and full attention is decided at compile time (a window, documents, a softcap, sinks,
dropout, sums carried over from earlier keys), so the plain kernels contain none of it.

Each loop over tiles runs twice: over those that every row sees whole, without a mask, and over the
others. Rows past the end of a run load zeros, and in the backward lse = inf, hence p = 0.

Dropout draws a word of philox4x32-7 per probability, from counter (query position, key position,
head, sample) and key `seed`, all global: every tiling and every layout of the sequence, heads or
batch draws the same mask, and the backward draws it again. A draw is four words: positions go into
the counter without their bit 3, and the two bits number the word.
"""

from __future__ import annotations

from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ROUNDS = tl.constexpr(7)  # of philox: the fewest that no known test rejects (Salmon et al. 2011)


@triton.jit
def elements(steps, STEP: tl.constexpr):
    """Steps from sample to sample, row to row and head to head in elements, given in multiples of
    STEP: Triton sees by itself that an argument is a multiple of 16, of 8 or less it must be told.
    """
    if STEP == 1:
        return steps
    else:
        return (tl.cast(steps[0], tl.int64) * STEP, tl.cast(steps[1], tl.int64) * STEP,
                tl.cast(steps[2], tl.int64) * STEP)  # fmt: skip


@triton.jit
def load_rows(
    ptr,
    stride,
    rows,
    BLOCK: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
    ahead=0,
):
    """The tile [BLOCK, BLOCK_D] that begins `ahead` rows from `ptr`, zero from column D on and, if
    CHECK, from its row `rows` on. In a loop that changes `ptr` its rows' distances are kept in
    registers; in one that changes `ahead`, an int32, they are multiplied anew."""
    r, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    at = ptr + (ahead + r).to(tl.int64) * stride + d
    if CHECK and D != BLOCK_D:
        return tl.load(at, (r < rows) & (d < D), 0.0)
    elif CHECK:
        return tl.load(at, r < rows, 0.0)
    elif D != BLOCK_D:
        return tl.load(at, d < D, 0.0)
    else:
        return tl.load(at)


@triton.jit
def store_rows(
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
def program(runs, heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """Tile, head and batch of this program. Causal tiles with most work should start first: the
    last tiles of queries, the first ones of keys."""
    tiles = tl.cdiv(runs[1], BLOCK) + tl.cdiv(runs[3], BLOCK)
    pid = tl.program_id(0)
    tile = pid % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, (pid // tiles) % heads, (pid // tiles // heads).to(tl.int64)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh(x) = 2 / (1 + exp(-2x)) - 1, its quotient the square of a reciprocal root as in
    `activation`. PRECISE keeps float32's relative accuracy near 0, where the difference cancels, by
    the series."""
    root = tl.rsqrt(1 + tl.exp2(tl.minimum(x * (-2 * LOG2E), 115.0)))
    y = 2 * root * root - 1
    if PRECISE and x.dtype == tl.float32:
        x2 = x * x
        near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315))))
        y = tl.where(x2 < 0.04, near, y)
    return y


@triton.jit
def exp(x, BASE: tl.constexpr):
    """exp of an exponent that has BASE units per natural one: log2(e), powers of two, which come
    from scores by one fused multiply-add; but in float32 1. There lse rounded once more, to a power
    of two, would cost accuracy where scores are in the thousands."""
    return tl.exp2(x * (LOG2E / BASE))


@triton.jit
def drawn(BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Which rows of a tile `draws` asks for: all, or if ALIGNED those whose bit 3 is clear.

    To be called before the loop over tiles: inside it LLVM moves what the next loop needs too to a
    path around this one, with the zeros that the sums then are, and ptxas takes those for writes
    to a wgmma under way: it runs all of them one by one (C7515)."""
    if ALIGNED:
        i = tl.arange(0, BLOCK // 2)
        return i + (i & -8)
    else:
        return tl.arange(0, BLOCK)


@triton.jit
def draws(q, k, head, sample, seed, DROP: tl.constexpr, ALIGNED: tl.constexpr):
    """Which probabilities of a tile [queries, keys] dropout keeps; DROP is p in units of 2^-32.

    q and k are the positions of the rows that are `drawn`. ALIGNED: positions ascend one by one, on
    either side from a multiple of 16. Then the four probabilities of a draw lie 8 rows and 8
    columns apart, which mma and wgmma leave in one thread, and each draw is made once.
    """
    zero = (q[:, None] * 0 + k[None, :] * 0).to(tl.uint32)
    c0, c1 = zero + (q & ~8).to(tl.uint32)[:, None], zero + (k & ~8).to(tl.uint32)[None, :]
    c2, c3 = zero + head.to(tl.uint32), zero + sample.to(tl.uint32)
    w00, w01, w10, w11 = tl.philox(tl.cast(seed, tl.int64), c0, c1, c2, c3, n_rounds=ROUNDS)
    if ALIGNED:
        M: tl.constexpr = 2 * q.shape[0]
        N: tl.constexpr = 2 * k.shape[0]
        words = tl.join(tl.join(w00, w10), tl.join(w01, w11)).reshape(M // 16, 8, N // 16, 8, 2, 2)
        word = words.permute(0, 4, 1, 2, 5, 3).reshape(M, N)
    else:
        low, high = (q & 8 == 0)[:, None], (k & 8 != 0)[None, :]
        word = tl.where(low, tl.where(high, w01, w00), tl.where(high, w11, w10))
    return word >= tl.full((1, 1), DROP, tl.uint32)
