"""FLOPs and minimal bytes of every op: benchmarks, MFU and `warpweave plan` use the same numbers.

FLOPs count a multiply-add as two, a division, exponential or root as one. Bytes are what a
perfectly fused kernel must move: every input read once, every output written once, nothing else.
Both are exact integers of the shapes, whatever an implementation does; achieved TFLOP/s and GB/s
divide them by measured time.

`size` is the bytes of an element (2 for bfloat16). Statistics (rstd, mean, lse) are float32.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cost:
    """Floating point operations and bytes moved; costs add, and multiply by a count."""

    flops: int
    bytes: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, count: int) -> Cost:
        return Cost(self.flops * count, self.bytes * count)

    __rmul__ = __mul__

    @property
    def intensity(self) -> float:
        """FLOPs per byte: below a device's FLOP/s over bytes/s, memory bounds the op."""
        return self.flops / self.bytes

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The roofline: no kernel is faster than the slower of its arithmetic and its traffic."""
        return max(self.flops / flops_per_second, self.bytes / bytes_per_second)


def gemm(M: int, N: int, K: int, *, size: int = 2) -> Cost:
    """c[M, N] = a[M, K] @ b[K, N]."""
    return Cost(2 * M * N * K, (M * K + K * N + M * N) * size)


def attention(
    B: int,
    Sq: int,
    Sk: int,
    H: int,
    D: int,
    *,
    kv_heads: int | None = None,
    causal: bool = True,
    backward: bool = False,
    size: int = 2,
) -> Cost:
    """The field's convention: 4 B H Sq Sk D forward, half of it when causal, backward 2.5 times
    forward.

    (Forward has two products, backward five: S again, dP, dV, dQ, dK. Softmax is not counted.)
    Forward moves q, k, v, o and lse; backward those and do, dq, dk, dv.
    """
    flops = 4 * B * H * Sq * Sk * D // (2 if causal else 1)
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
    backward: bool = False,
    size: int = 2,
) -> Cost:
    """RMSNorm, or with `layer` LayerNorm and its bias, of x[rows, E].

    Forward per element: square, add, two multiplies; LayerNorm also sums, centres and shifts.
    Backward: n, g, g n and its sum, n c, subtract, scale, dw's two; LayerNorm also centres, sums g,
    subtracts, db.
    """
    per_element = ((13 if layer else 9) if backward else (7 if layer else 4)) + residual
    if backward:  # reads dy, s [, ds]; writes dx
        passes, vectors = 3 + residual, 3 if layer else 2  # w, dw [, db]
    else:  # reads x [, residual]; writes y [, s]
        passes, vectors = 2 + 2 * residual, 2 if layer else 1  # w [, b]
    statistics = rows * 4 * (2 if layer else 1)
    return Cost(per_element * rows * E, (passes * rows + vectors) * E * size + statistics)


def rope(B: int, S: int, H: int, D: int, *, size: int = 2) -> Cost:
    """x[B, S, H, D] rotated by float32 cos and sin[S, D/2]; the backward costs the same."""
    return Cost(3 * B * S * H * D, 2 * B * S * H * D * size + S * D * 4)


def gelu(n: int, *, backward: bool = False, size: int = 2) -> Cost:
    """GELU (tanh) of n elements: 9 operations each, 18 backward."""
    return Cost((18 if backward else 9) * n, (3 if backward else 2) * n * size)


def swiglu(n: int, *, backward: bool = False, size: int = 2) -> Cost:
    """SwiGLU with n outputs of 2n inputs: 5 operations each, 12 backward."""
    return Cost((12 if backward else 5) * n, (5 if backward else 3) * n * size)


def dropout(rows: int, E: int, *, size: int = 2) -> Cost:
    """One multiply per element (the generator works in integers); the backward costs the same."""
    return Cost(rows * E, 2 * rows * E * size + 8 * rows)


def cross_entropy(N: int, V: int, *, backward: bool = False, size: int = 2) -> Cost:
    """Loss of logits[N, V]: max, subtract, exp, add each; backward: subtract, exp, subtract,
    scale."""
    rows = N * (8 + 4)  # a label, and lse or the loss's gradient
    return Cost(4 * N * V, (2 if backward else 1) * N * V * size + rows + 4 * N)


def adamw(n: int, *, grad_size: int = 4, param_size: int = 0) -> Cost:
    """One step on n float32 masters: reads and writes master, m, v; reads grad, writes the copy."""
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
    """How many weights multiply each token: the linear layers and the head.

    Not the embedding (a lookup, also when the head shares its matrix), norms or biases.
    """
    qkv_out = width * head_dim * (2 * heads + 2 * kv_heads)
    mlp = (3 if gated else 2) * width * hidden
    return layers * (qkv_out + mlp) + width * vocab


def gpt_step(
    *,
    tokens: int,
    seq_len: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    hidden: int,
    vocab: int,
    gated: bool,
    causal: bool = True,
) -> int:
    """Model FLOPs of one training step on `tokens` tokens in sequences of `seq_len`; the MFU
    numerator.

        3 * tokens * (2 * gpt_weights + layers * 4 * seq_len * heads * head_dim [/ 2 if causal])

    Forward once, backward twice; what is recomputed (attention's scores, checkpointed layers) does
    not count, and neither do elementwise ops. MFU = gpt_step / (step seconds * devices * peak
    FLOP/s). PaLM's formula (Chowdhery et al. 2022, arXiv:2204.02311, appendix B; 6 N + 12 L H Q T
    per token) does not halve causal attention: pass causal=False to compare with figures made by
    it.
    """
    weights = gpt_weights(
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        vocab=vocab,
        gated=gated,
    )
    scores = layers * 4 * seq_len * heads * head_dim // (2 if causal else 1)
    return 3 * tokens * (2 * weights + scores)
