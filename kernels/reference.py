"""The definition of every op in plain torch, for any float dtype: the contract and the oracle.

Each function computes in float64 for float64 inputs and in float32 otherwise, and casts at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import einsum, rearrange, repeat


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype an op computes in: float64 for float64 inputs, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- normalization


def norm_sum(x, residual=None, x_bias=None, keep=None, dropout=0.0):
    """s = residual + dropout(x + x_bias); elements of x where `keep` is false are dropped."""
    s = x if x_bias is None else (x + x_bias).to(x.dtype)
    if keep is not None:
        s = torch.where(keep, s / (1 - dropout), 0).to(x.dtype)
    return s if residual is None else s + residual


def rms_norm(
    x, weight, eps=1e-6, *, residual=None, x_bias=None, keep=None, dropout=0.0, out_dtype=None
):
    """s / sqrt(mean(s^2) + eps) * weight over dim -1, with s from `norm_sum`.

    Returns (y, s), or only y if s is x.
    """
    s = norm_sum(x, residual, x_bias, keep, dropout)
    wide = s.to(compute_dtype(s))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    y = y.to(out_dtype or x.dtype)
    return y if s is x else (y, s)


def layer_norm(
    x,
    weight,
    bias=None,
    eps=1e-5,
    *,
    residual=None,
    x_bias=None,
    keep=None,
    dropout=0.0,
    out_dtype=None,
):
    """(s - mean) / sqrt(var + eps) * weight + bias over dim -1; otherwise like `rms_norm`."""
    s = norm_sum(x, residual, x_bias, keep, dropout)
    wide = s.to(compute_dtype(s))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    y = y.to(out_dtype or x.dtype)
    return y if s is x else (y, s)


# ---------------------------------------------------------------- rotary embedding


def apply_rope(x, cos, sin, *, interleaved=False):
    """Rotate the first R dims of x[B, S, H, D]; copy the rest.

    The pairs (i, i + R/2), or (2i, 2i + 1) if `interleaved`, are complex numbers. They are
    multiplied by (cos + i sin)[S, R/2].
    """
    wide, half = compute_dtype(x), cos.shape[-1]
    turning, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :].to(wide)
    dims = "(r pair)" if interleaved else "(pair r)"
    x1, x2 = rearrange(turning, f"... {dims} -> pair ... r", pair=2)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    turned = [x1 * cos - x2 * sin, x2 * cos + x1 * sin]
    y = rearrange(turned, f"pair ... r -> ... {dims}")
    return torch.cat((y, rest), -1).to(x.dtype)


# ---------------------------------------------------------------- activations


def gelu(x, *, approximate="tanh"):
    """x * Phi(x), Phi by erf ("none") or (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2 ("tanh")."""
    wide = x.to(compute_dtype(x))
    if approximate == "none":
        phi = (1 + torch.erf(wide / 2**0.5)) / 2
    else:
        phi = (1 + torch.tanh((2 / torch.pi) ** 0.5 * (wide + 0.044715 * wide**3))) / 2
    return (wide * phi).to(x.dtype)


def swiglu(gate_up):
    """silu(gate) * up for interleaved pairs gate_up[..., 2F] = gate0, up0, gate1, up1, ..."""
    gate, up = rearrange(gate_up.to(compute_dtype(gate_up)), "... (f pair) -> pair ... f", pair=2)
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


def geglu(gate_up):
    """gelu(gate) * up (tanh form) for interleaved pairs, as in `swiglu`."""
    gate, up = rearrange(gate_up.to(compute_dtype(gate_up)), "... (f pair) -> pair ... f", pair=2)
    return (gelu(gate) * up).to(gate_up.dtype)


def relu2(x):
    """max(x, 0)^2."""
    return x.to(compute_dtype(x)).relu().square().to(x.dtype)


def activate(x, activation):
    """Apply the activation named "gelu", "gelu_erf", "relu2", "swiglu" or "geglu"."""
    if activation == "gelu_erf":
        return gelu(x, approximate="none")
    return {"gelu": gelu, "relu2": relu2, "swiglu": swiglu, "geglu": geglu}[activation](x)


# ---------------------------------------------------------------- dropout


def philox(counter, key, rounds=10):
    """philox4x32 of Salmon et al. 2011: four words from four counter words and two key words.

    Words are ints or int64 tensors below 2^32. Products wrap in int64, with all 64 bits correct.
    """
    low = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(rounds):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & low) ^ c1 ^ k0, b & low
        c2, c3 = ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def dropout(x, p, *, seed, site, tokens):
    """x[T, E] / (1 - p) where the random word of [t, e] is at least p * 2^32, else 0.

    The word is philox((token lo, token hi, e // 4, site), (seed lo, seed hi))[e % 4].
    """
    low, column = 0xFFFFFFFF, torch.arange(x.shape[1], device=x.device)
    token = tokens[:, None].expand(x.shape)
    counter = (token & low, (token >> 32) & low, (column // 4).expand(x.shape), site)
    words = torch.stack(philox(counter, (seed & low, seed >> 32)))
    word = words.gather(0, (column % 4).expand(1, *x.shape))[0]
    wide = x.to(compute_dtype(x))
    return torch.where(word >= round(p * 2**32), wide * (1 / (1 - p)), 0).to(x.dtype)


# ---------------------------------------------------------------- attention and merge


class Run(NamedTuple):
    """Sequence positions of `length` consecutive rows: start, start + stripes, ..."""

    start: int
    length: int
    stripes: int = 1

    @property
    def positions(self) -> range:
        """The global position of each row."""
        return range(self.start, self.start + self.length * self.stripes, self.stripes)


def positions(runs: Sequence[tuple[int, ...]] | None, length: int) -> torch.Tensor:
    """The global positions int64[length] of rows that hold these runs; by default 0, 1, 2, ...

    A run is (start, length) or (start, length, stripes).
    """
    runs = (Run(0, length),) if runs is None else runs
    of_runs = (Run(*run).positions for run in runs)
    return torch.cat([torch.arange(at.start, at.stop, at.step) for at in of_runs])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    window: int | None = None,
    documents: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    dropout: float = 0.0,
    dropout_seed: int = 0,
    dropout_origin: Sequence[int] = (0, 0),
    q_runs: Sequence[tuple[int, ...]] | None = None,
    k_runs: Sequence[tuple[int, ...]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v and the log of its normalizer, both differentiable.

    q[B, Sq, Hq, D], k and v[B, Sk, Hkv, D]; each of the Hkv heads serves Hq / Hkv consecutive
    query heads. `visible` defines the mask. softcap: s becomes softcap tanh(s / softcap).
    sinks[Hq]: one more logit per head, without a value, counted in the normalizer and in lse.
    dropout: see `attention_dropout`; lse is computed before dropout. Returns o[B, Sq, Hq, D] and
    lse[B, Hq, Sq] (natural logarithm). A row that sees neither a key nor a sink has o = 0, lse =
    -inf and no gradient.
    """
    dtype, scale = compute_dtype(q), q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    kc, vc = (repeat(x.to(dtype), "b k h d -> b k (h group) d", group=group) for x in (k, v))
    scores = scale * einsum(q.to(dtype), kc, "b q h d, b k h d -> b h q k")
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    q_pos, k_pos = positions(q_runs, q.shape[1]), positions(k_runs, k.shape[1])
    seen = visible(q_pos, k_pos, causal=causal, window=window, documents=documents).to(q.device)
    logit = torch.full((q.shape[2],), -float("inf"), dtype=dtype, device=q.device)
    logit = logit if sinks is None else sinks.to(dtype)
    logit = repeat(logit, "h -> b h q 1", b=q.shape[0], q=q.shape[1])
    scores = torch.cat((scores.masked_fill(~seen, -float("inf")), logit), -1)
    # Give an empty row scores of 0 and overwrite its results, so that -inf - -inf never occurs.
    empty = scores.isneginf().all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty[..., 0], -float("inf"))
    weights = scores.softmax(-1).masked_fill(empty, 0.0)[..., :-1]
    if dropout:
        where = (torch.arange(q.shape[0]), torch.arange(q.shape[2]), q_pos, k_pos)
        keep = attention_dropout(dropout, dropout_seed, dropout_origin, *where)
        weights = weights * keep.to(q.device, dtype)
    return einsum(weights, vc, "b h q k, b k h d -> b q h d").to(q.dtype), lse


def visible(
    q_pos: torch.Tensor,
    k_pos: torch.Tensor,
    *,
    causal: bool,
    window: int | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """bool[Sq, Sk] (or [B, 1, Sq, Sk]): the keys at k_pos that the queries at q_pos see.

    causal: key position <= query position. window: positions are less than `window` apart.
    documents: cumulative boundaries [n + 1], [B, n + 1] or [B, 2, n + 1], the last separate for
    queries and keys. A query sees a key if equally many boundaries lie at or below both positions.
    """
    distance = q_pos[:, None] - k_pos[None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance.abs() < window)
    if documents is not None:
        bounds = documents.cpu()
        of_q, of_k = bounds.unbind(1) if bounds.ndim == 3 else (bounds, bounds)
        q_doc, k_doc = (
            (of[..., None, :] <= pos[:, None]).sum(-1) for of, pos in ((of_q, q_pos), (of_k, k_pos))
        )
        same = q_doc[..., :, None] == k_doc[..., None, :]
        seen = seen & (same if documents.ndim == 1 else same[:, None])
    return seen


def attention_dropout(p, seed, origin, samples, heads, q_pos, k_pos) -> torch.Tensor:
    """0 or 1 / (1 - p), float64[samples, heads, Sq, Sk]: 0 where a word is below p * 2^32.

    Four probabilities share one philox4x32-7 of ((q_pos, k_pos, head, sample), (seed lo, seed hi)),
    with bit 3 of both positions cleared. They use word 2 [bit 3 of q_pos] + [bit 3 of k_pos]. Heads
    and samples are counted from `origin` = (sample, head).
    """
    low, bit = 0xFFFFFFFF, 8
    c2, c3 = (heads + origin[1])[:, None, None], (samples + origin[0])[:, None, None, None]
    counter = torch.broadcast_tensors(q_pos[:, None] & ~bit, k_pos & ~bit, c2, c3)
    words = torch.stack(philox([x & low for x in counter], (seed & low, seed >> 32), rounds=7))
    number = 2 * (q_pos & bit != 0)[:, None] + (k_pos & bit != 0)
    word = words.gather(0, number.expand(1, *words.shape[1:]))[0]
    return (word >= round(p * 2**32)).double() / (1 - p)


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys, given o[B, S, H, D] and lse of each."""
    peak = torch.maximum(lse_a, lse_b).nan_to_num(neginf=0.0)
    a, b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = a + b
    share = torch.where(total > 0, total, 1.0)
    of_a, of_b = (rearrange(x / share, "b h s -> b s h 1") for x in (a, b))
    return o_a * of_a + o_b * of_b, peak + total.log()


# ---------------------------------------------------------------- cross entropy


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """The loss of every row of logits[N, V] against labels[N]; 0 in rows with `ignore_index`.

    With smoothing s the target distribution is (1 - s) at the label plus s / V everywhere. Columns
    from `vocab_size` on are padding and not part of the vocabulary V. The z-loss is z_loss times
    the square of the log-sum-exp.
    """
    logits = logits[:, :vocab_size].to(compute_dtype(logits))
    ignored = labels == ignore_index
    negative = -torch.log_softmax(logits, dim=1)
    losses = negative.gather(1, labels.masked_fill(ignored, 0)[:, None])[:, 0]
    if label_smoothing != 0.0:
        losses = (1.0 - label_smoothing) * losses + label_smoothing * negative.mean(dim=1)
    if z_loss != 0.0:
        losses = losses + z_loss * logits.logsumexp(1).square()
    return losses.masked_fill(ignored, 0.0)


def linear_cross_entropy(x, weight, labels, **options):
    """`cross_entropy`, with its options, of the logits x[T, E] weight[V, E]^T."""
    return cross_entropy(x @ weight.t(), labels, **options)


# ---------------------------------------------------------------- AdamW


def adamw_step(
    master: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (master, m, v) after step number `step` (1, 2, ...), out of place."""
    g = grad.to(master.dtype) * grad_scale
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    update = (m / (1.0 - beta1**step)) / ((v / (1.0 - beta2**step)).sqrt() + eps)
    return master - lr * weight_decay * master - lr * update, m, v


def orthogonalize(g, steps=5):
    """Muon's Newton-Schulz steps on g[m, n] / |g|: approximately U V^T for g = U S V^T."""
    x = g / (torch.linalg.matrix_norm(g) + 1e-7)
    x = x.t() if len(x) > x.shape[1] else x
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if g.shape[0] > g.shape[1] else x


# ---------------------------------------------------------------- linear layers


def fused_gemm(a, b, bias=None, *, activation=None, drop=None, residual=None):
    """residual + dropout(act(a[M, K] b[K, N] + bias[N])); drop = (p, seed, site, tokens)."""
    y = a @ b if bias is None else a @ b + bias
    y = y if activation is None else activate(y, activation)
    if drop is not None:
        p, seed, site, tokens = drop
        y = dropout(y, p, seed=seed, site=site, tokens=tokens)
    return y if residual is None else residual + y


def mlp(
    x,
    up_weight,
    down_weight,
    up_bias=None,
    down_bias=None,
    *,
    activation,
    drop=None,
    residual=None,
):
    """residual + dropout(act(x[..., E] W1^T + b1) W2^T + b2), with W1[F, E] or gated [F, 2, E]."""
    rows = x.flatten(0, -2) if x.ndim > 1 else x[None]
    up_bias = None if up_bias is None else up_bias.flatten()
    h = fused_gemm(rows, up_weight.flatten(0, -2).t(), up_bias, activation=activation)
    y = fused_gemm(h, down_weight.t(), down_bias, drop=drop).view(x.shape)
    return y if residual is None else residual + y


def qkv_rope(x, weight, bias, cos, sin):
    """q[B, S, Hkv G, D], k and v[B, S, Hkv, D] from x[B, S, E]; `apply_rope` rotates q and k.

    weight[Hkv, G + 2, D, E]: for each KV head its G query heads, then its key, then its value.
    """
    qkv = einsum(x, weight, "b s e, h g d e -> b s h g d")
    qkv = qkv if bias is None else qkv + bias
    q, k, v = (
        rearrange(part, "b s h g d -> b s (h g) d")
        for part in qkv.split((weight.shape[1] - 2, 1, 1), 3)
    )
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v
