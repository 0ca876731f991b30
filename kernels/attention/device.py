"""Device helpers of the attention kernels: loads, stores, exponentials, and dropout's draws.

`function` has the formulas and shapes, and `visible` determines the tiles to visit. Everything
beyond causal and full attention (a window, documents, a softcap, sinks, dropout, sums carried over
from earlier keys) is decided at compile time, so the plain kernels contain none of it.

Each loop over tiles runs twice: first over the tiles that every row sees entirely, without a mask,
and then over the others. Rows past the end of a run load zeros. In the backward, their lse = inf,
so p = 0.

Dropout draws a word of philox4x32-7 per probability, from counter (query position, key position,
head, sample) and key `seed`. All are global, so every tiling and every layout of the sequence,
heads or batch draws the same mask, and the backward draws it again. A draw gives four words:
positions enter the counter without their bit 3, and these two bits number the word.
"""

from __future__ import annotations

from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.kernels.runtime.dtypes import to_dtype

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
ROUNDS = tl.constexpr(7)  # of philox: the fewest that no known test rejects (Salmon et al. 2011)


@triton.jit
def elements(steps, STEP: tl.constexpr):
    """Convert steps from sample to sample, row to row and head to head to elements.

    They are given in multiples of STEP. Triton detects arguments that are multiples of 16, but must
    be told about multiples of 8 or less.
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
    """Load the tile [BLOCK, BLOCK_D] that begins `ahead` rows from `ptr`.

    It is zero from column D on and, if CHECK, from row `rows` on. In a loop that changes `ptr`, the
    offsets of its rows stay in registers. In a loop that changes `ahead`, an int32, they are
    multiplied again.
    """
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
    """Tile, head and batch of this program.

    Causal tiles with the most work should start first: the last tiles of queries, the first tiles
    of keys.
    """
    tiles = tl.cdiv(runs[1], BLOCK) + tl.cdiv(runs[3], BLOCK)
    pid = tl.program_id(0)
    tile = pid % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    return tile, (pid // tiles) % heads, (pid // tiles // heads).to(tl.int64)


@triton.jit
def tanh(x, PRECISE: tl.constexpr):
    """tanh(x) = 2 / (1 + exp(-2x)) - 1, with the quotient as the square of a reciprocal root.

    `activation` does the same. PRECISE uses a series near 0, where the difference cancels, to keep
    float32's relative accuracy.
    """
    root = tl.rsqrt(1 + tl.exp2(tl.minimum(x * (-2 * LOG2E), 115.0)))
    y = 2 * root * root - 1
    if PRECISE and x.dtype == tl.float32:
        x2 = x * x
        near = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315))))
        y = tl.where(x2 < 0.04, near, y)
    return y


@triton.jit
def exp(x, BASE: tl.constexpr):
    """exp of an exponent x that has BASE units per natural unit.

    BASE is log2(e): x is an exponent of two, which one fused multiply-add computes from a score. In
    float32 BASE is 1, because rounding lse once more, to an exponent of two, would cost accuracy
    for scores in the thousands.
    """
    return tl.exp2(x * (LOG2E / BASE))


@triton.jit
def drawn(BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """The rows of a tile that `draws` needs: all, or if ALIGNED those with bit 3 clear.

    Call it before the loop over tiles. Inside the loop, LLVM moves what the next loop also needs to
    a path around this one, together with the initial zeros of the sums. ptxas takes these zeros for
    writes to a running wgmma and serializes all of them (C7515).
    """
    if ALIGNED:
        i = tl.arange(0, BLOCK // 2)
        return i + (i & -8)
    else:
        return tl.arange(0, BLOCK)


@triton.jit
def draws(q, k, head, sample, seed, DROP: tl.constexpr, ALIGNED: tl.constexpr):
    """The dropout mask of a tile [queries, keys], true where kept; DROP is p in units of 2^-32.

    q and k are the positions of the rows from `drawn`. ALIGNED means that positions ascend one by
    one, on both sides from a multiple of 16. Then the four probabilities of a draw are 8 rows and 8
    columns apart, which mma and wgmma keep in one thread, and each draw is made once.
    """
    zero = (q[:, None] * 0 + k[None, :] * 0).to(tl.uint32)
    c0, c1 = zero + (q & ~8).to(tl.uint32)[:, None], zero + (k & ~8).to(tl.uint32)[None, :]
    c2, c3 = zero + head.to(tl.uint32), zero + sample.to(tl.uint32)
    w00, w01, w10, w11 = tl.philox(seed, c0, c1, c2, c3, n_rounds=ROUNDS)
    if ALIGNED:
        M: tl.constexpr = 2 * q.shape[0]
        N: tl.constexpr = 2 * k.shape[0]
        words = tl.join(tl.join(w00, w10), tl.join(w01, w11)).reshape(M // 16, 8, N // 16, 8, 2, 2)
        word = words.permute(0, 4, 1, 2, 5, 3).reshape(M, N)
    else:
        low, high = (q & 8 == 0)[:, None], (k & 8 != 0)[None, :]
        word = tl.where(low, tl.where(high, w01, w00), tl.where(high, w11, w10))
    return word >= tl.full((1, 1), DROP, tl.uint32)
