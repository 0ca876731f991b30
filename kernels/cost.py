"""FLOPs and minimal bytes of every op, shared by benchmarks and MFU.

A multiply-add counts as two FLOPs; a division, exponential or root counts as one. Bytes are what a
perfectly fused kernel must move: every input is read once and every output is written once. Both
are exact integers computed from the shapes, regardless of the implementation. Divide them by the
measured time to get achieved TFLOP/s and GB/s.

`size` is the bytes per element (2 for bfloat16). Statistics (rstd, mean, lse) are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """FLOPs and bytes moved. You can add costs and multiply a cost by a count."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, count: int) -> Cost:
        return Cost(self.flops * count, self.bytes * count)

    __rmul__ = __mul__

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Roofline time, the larger of arithmetic and traffic; no kernel is faster."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def gemm(M: int, N: int, K: int, *, size: int = 2) -> Cost:
    """c[M, N] = a[M, K] @ b[K, N]."""
    return Cost(2 * M * N * K, (M * K + K * N + M * N) * size)


def symmetric_product(M: int, K: int, *, add: bool = False, size: int = 2) -> Cost:
    """out[M, M] = x[M, K] x^T, of which one triangle is computed.

    With `add`, another matrix is added, of which one triangle is read.
    """
    triangle = M * (M + 1) // 2
    return Cost(2 * triangle * K, (M * K + M * M + add * triangle) * size)


def fused_gemm(
    M: int,
    N: int,
    K: int,
    *,
    gated: bool = False,
    bias: bool = False,
    save_z: bool = False,
    residual: bool = False,
    size: int = 2,
) -> Cost:
    """y[M, N] (N/2 if gated) = epilogue(a[M, K] b[K, N]); the epilogue's arithmetic is not counted.

    With `save_z`, z[M, N] is also written.
    """
    out = M * N // 2 if gated else M * N
    moved = M * K + K * N + (N if bias else 0) + (M * N if save_z else 0)
    return Cost(2 * M * N * K, (moved + out * (2 if residual else 1)) * size)


def mlp(
    T: int,
    E: int,
    F: int,
    *,
    gated: bool = False,
    residual: bool = False,
    recompute: str = "activation",
    backward: bool = False,
    size: int = 2,
) -> Cost:
    """The fused feed-forward of x[T, E] with F hidden units, without biases.

    Forward: up with its activation, then down. Backward: dz and the activation (unless recompute is
    "nothing") from dy, W2 and z, and then separate products for dx, dW1 and dW2. With recompute
    "up", one more product computes z. Weight gradients have `size` bytes per element.
    """
    Z = 2 * F if gated else F
    up = fused_gemm(T, Z, E, gated=gated, save_z=recompute != "up", size=size)
    if not backward:
        return up + fused_gemm(T, E, F, residual=residual, size=size)
    hidden = 0 if recompute == "nothing" else T * F
    slope = Cost(2 * T * E * F, (T * E + E * F + 2 * T * Z + hidden) * size)
    again = gemm(T, Z, E, size=size) if recompute == "up" else Cost(0, 0)
    products = gemm(T, E, Z, size=size) + gemm(Z, E, T, size=size) + gemm(E, F, T, size=size)
    return slope + products + again


def qkv_rope(
    B: int,
    S: int,
    E: int,
    heads: int,
    kv_heads: int,
    D: int,
    *,
    backward: bool = False,
    size: int = 2,
) -> Cost:
    """q, k and v from x[B, S, E], rotated by float32 cos and sin[S, D/2] in the epilogue.

    Backward: one pass that rotates back (dq, dk, dv to dz), then the products dx and dW.
    """
    T, N, table = B * S, (heads + 2 * kv_heads) * D, S * D * 4
    turned = 3 * T * (heads + kv_heads) * D
    if not backward:
        return gemm(T, N, E, size=size) + Cost(turned, table)
    products = gemm(T, E, N, size=size) + gemm(N, E, T, size=size)
    return products + Cost(turned, 2 * T * N * size + table)


def attention(
    B: int,
    Sq: int,
    Sk: int,
    H: int,
    D: int,
    *,
    kv_heads: int | None = None,
    causal: bool = True,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    backward: bool = False,
    size: int = 2,
) -> Cost:
    """Attention by convention: 4 B H Sq Sk D forward, half if causal; backward 2.5 times that.

    (Forward has two products, backward five: S again, dP, dV, dQ, dK. Softmax is not counted.)
    Forward moves q, k, v, o and lse; backward also moves do, dq, dk and dv. `documents` are the
    lengths of packed documents. If n tokens see a window w <= n, the band 2 n w - w^2 counts
    instead of n^2. With a window or documents, raises ValueError unless Sq, Sk and the sum of the
    lengths are equal.
    """
    pairs = Sq * Sk
    if window is not None or documents is not None:
        lengths = [Sq] if documents is None else list(documents)
        if Sq != Sk or sum(lengths) != Sq:
            raise ValueError(
                "Sq, Sk and sum(documents) must be equal if a window or documents are given, got "
                f"{Sq}, {Sk} and {lengths}"
            )
        bands = [(n, n if window is None else min(window, n)) for n in lengths]
        pairs = sum(2 * n * w - w * w for n, w in bands)
    flops = 4 * B * H * pairs * D // (2 if causal else 1)
    q, kv, lse = B * Sq * H * D * size, B * Sk * (kv_heads or H) * D * size, B * H * Sq * 4
    if backward:
        return Cost(flops * 5 // 2, 4 * q + 4 * kv + lse)  # q o do dq, k v dk dv
    return Cost(flops, 2 * q + 2 * kv + lse)


def norm(
    rows: int,
    E: int,
    *,
    layer: bool = False,
    residual: bool = False,
    x_bias: bool = False,
    dropout: bool = False,
    backward: bool = False,
    size: int = 2,
    stream_size: int | None = None,
    out_size: int | None = None,
) -> Cost:
    """RMSNorm of x[rows, E], or with `layer` LayerNorm including its bias.

    `x_bias`, `dropout` and `residual` are the terms of s. s and residual have `stream_size` bytes
    per element and y has `out_size`; the default is the size of x. Parameter vectors have the size
    of x.

    Forward per element: square, add, two multiplies; LayerNorm also sums, centers and shifts.
    Backward: n, g, g n and its sum, n c, subtract, scale, two for dw; LayerNorm also centers, sums
    g, subtracts, and computes db.
    """
    per_element = (13 if layer else 9) if backward else (7 if layer else 4)
    per_element += residual + x_bias + dropout
    wide, out = size if stream_size is None else stream_size, size if out_size is None else out_size
    changed = residual or x_bias or dropout
    wide = wide if residual else size
    if backward:  # reads dy, s [, ds]; writes dx [and dresidual, if it differs from dx]
        apart = residual and (dropout or wide != size)
        passes = out + wide + size + wide * changed + wide * apart
        vectors = (3 if layer else 2) + x_bias  # w, dw [, db] [, dx_bias]
    else:  # reads x [, residual]; writes y [, s]
        passes = size + out + wide * residual + wide * changed
        vectors = (2 if layer else 1) + x_bias  # w [, b] [, x_bias]
    per_row = 4 * (2 if layer else 1) + 8 * dropout  # statistics, tokens
    return Cost(per_element * rows * E, (passes * rows + vectors * size) * E + per_row * rows)


def rope(B: int, S: int, H: int, D: int, *, rotary_dim: int | None = None, size: int = 2) -> Cost:
    """x[B, S, H, D] rotated by float32 cos and sin[S, R/2]; the backward costs the same.

    For queries and keys together, pass H + Hkv heads: they share the table.
    """
    R = D if rotary_dim is None else rotary_dim
    return Cost(3 * B * S * H * R, 2 * B * S * H * D * size + S * R * 4)


def activation(n: int, *, gated: bool = False, backward: bool = False, size: int = 2) -> Cost:
    """n outputs of GELU (tanh), or of SwiGLU with 2n inputs if `gated`.

    GELU takes 9 operations per output, 18 backward; SwiGLU takes 5, 12 backward.
    """
    if gated:
        return Cost((12 if backward else 5) * n, (5 if backward else 3) * n * size)
    return Cost((18 if backward else 9) * n, (3 if backward else 2) * n * size)


def dropout(rows: int, E: int, *, size: int = 2) -> Cost:
    """One multiply per element (the generator uses integers); the backward costs the same."""
    return Cost(rows * E, 2 * rows * E * size + 8 * rows)


def cross_entropy(N: int, V: int, *, backward: bool = False, size: int = 2) -> Cost:
    """Loss of logits[N, V]. Each logit costs max, subtract, exp and add; in the backward subtract,
    exp, subtract and scale."""
    rows = N * (8 + 4)  # a label, and lse or the loss's gradient
    return Cost(4 * N * V, (2 if backward else 1) * N * V * size + rows + 4 * N)


def linear_cross_entropy(T: int, V: int, E: int, *, backward: bool = False, size: int = 2) -> Cost:
    """Loss of x[T, E] w[V, E]^T without its logits; backward: dx and a float32 dw.

    Recomputing the logits is not counted.
    """
    products = gemm(T, V, E).flops * (2 if backward else 1)
    given = (T * E + V * E) * size + T * 8  # x, w, labels
    if backward:  # and lse and the losses' gradients; writes dx and dw
        return Cost(products + 4 * T * V, given + 8 * T + T * E * size + V * E * 4)
    return Cost(products + 4 * T * V, given + 8 * T)


def adamw(n: int, *, grad_size: int = 4, param_size: int = 0) -> Cost:
    """One step on n master weights: reads and writes master, m and v in float32, reads grad, writes
    the copy."""
    return Cost(16 * n, n * (24 + grad_size + param_size))


def gpt_weights(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    vocab: int,
    gated: bool,
) -> int:
    """The number of weights that multiply each token: the linear layers and the head.

    Norms, biases and the embedding do not count. (The embedding is a lookup, even if the head
    shares its matrix.)
    """
    qkv_out = width * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if gated else 2) * width * hidden
    return layers * (qkv_out + mlp) + width * vocab


def gpt_step(
    *,
    tokens: int,
    seq_len: int,
    weights: int,
    layers: int,
    heads: int,
    head_dim: int,
    causal: bool = True,
    windows: Sequence[int | None] = (),
) -> int:
    """Model FLOPs of one training step on `tokens` tokens in sequences of `seq_len`.

    This is the numerator of MFU:

        3 * tokens * (2 * weights + layers * 4 * seq_len * heads * head_dim [/ 2 if causal])

    `weights` comes from `gpt_weights`. `windows` holds the sliding window of each causal layer,
    None for no window. With a window W < seq_len a token sees W (1 - W / (2 seq_len)) keys on
    average instead of seq_len / 2.

    Forward counts once, backward twice. Recomputation (attention's scores, checkpointed layers) and
    elementwise ops do not count. MFU = gpt_step / (step seconds * devices * peak FLOP/s). PaLM's
    formula (Chowdhery et al. 2022, arXiv:2204.02311, appendix B; 6 N + 12 L H Q T per token) does
    not halve causal attention. Pass causal=False to compare with figures computed by it.
    """
    visible = layers * seq_len * 2 * seq_len  # keys of 2 seq_len tokens, summed over the layers
    if causal:
        reach = [min(window or seq_len, seq_len) for window in windows or [None] * layers]
        visible = sum(w * (2 * seq_len - w) for w in reach)
    return 6 * tokens * weights + 12 * tokens * heads * head_dim * visible // (2 * seq_len)
