"""What every op means, in plain torch, for any float dtype: the contract and the oracle.

Each function computes in float64 for float64 inputs and in float32 otherwise, and casts at the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype an op computes in: float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---------------------------------------------------------------- normalisation


def rms_norm(x, weight, eps=1e-6, *, residual=None):
    """s / sqrt(mean(s^2) + eps) * weight over dim -1, s = x + residual.

    Returns (y, s) with a residual, else y.
    """
    s = x if residual is None else x + residual
    wide = s.to(compute_dtype(x))
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(wide.dtype)
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), s)


def layer_norm(x, weight, bias=None, eps=1e-5, *, residual=None):
    """(s - mean) / sqrt(var + eps) * weight + bias over dim -1; the rest as `rms_norm`."""
    s = x if residual is None else x + residual
    wide = s.to(compute_dtype(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype) if residual is None else (y.to(x.dtype), s)


# ---------------------------------------------------------------- rotary embedding


def apply_rope(x, cos, sin):
    """x[B, S, H, D] with (x1 + i x2) of its halves multiplied by (cos + i sin)[S, D/2]."""
    wide = compute_dtype(x)
    x1, x2 = x.to(wide).chunk(2, -1)
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), -1).to(x.dtype)


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
    """silu(gate) * up of the interleaved pairs gate_up[..., 2F] = gate0, up0, gate1, up1, ..."""
    wide = gate_up.to(compute_dtype(gate_up))
    gate, up = wide[..., 0::2], wide[..., 1::2]
    return (gate * torch.sigmoid(gate) * up).to(gate_up.dtype)


# ---------------------------------------------------------------- dropout


def philox(counter, key):
    """philox4x32-10 of Salmon et al. 2011: four words from four counter words and two key words.

    Words are ints or int64 tensors below 2^32; products wrap in int64 with all 64 bits right.
    """
    low = 0xFFFFFFFF
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((b >> 32) & low) ^ c1 ^ k0, b & low
        c2, c3 = ((a >> 32) & low) ^ c3 ^ k1, a & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def dropout(x, p, *, seed, site, tokens):
    """x[T, E] / (1 - p) where the word of [t, e] is at least p * 2^32, else 0.

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


def positions(runs: Sequence[tuple[int, int]] | None, length: int) -> torch.Tensor:
    """The global positions int64[length] of rows that hold the runs ((start, length), ...)."""
    runs = ((0, length),) if runs is None else runs
    return torch.cat([torch.arange(start, start + n) for start, n in runs])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    q_runs: Sequence[tuple[int, int]] | None = None,
    k_runs: Sequence[tuple[int, int]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale q k^T + mask) v and the log of its normaliser, both differentiable.

    q[B, Sq, Hq, D], k and v[B, Sk, Hkv, D]; each of the Hkv heads serves Hq / Hkv neighbouring
    query heads. causal: key position <= query position. Returns o[B, Sq, Hq, D] and lse[B, Hq, Sq]
    (natural logarithm). A row that sees no key has o = 0, lse = -inf and no gradient.
    """
    dtype, scale = compute_dtype(q), q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    qc, kc, vc = q.to(dtype), *(x.to(dtype).repeat_interleave(group, 2) for x in (k, v))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", qc, kc)
    visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if causal:
        visible = positions(q_runs, q.shape[1])[:, None] >= positions(k_runs, k.shape[1])[None, :]
    visible = visible.to(q.device)
    empty = ~visible.any(1)
    # An empty row is given scores of 0 and its results are overwritten: no -inf - -inf anywhere.
    scores = scores.masked_fill(~visible, -float("inf")).masked_fill(empty[:, None], 0.0)
    lse = scores.logsumexp(-1).masked_fill(empty, -float("inf"))
    probabilities = scores.softmax(-1).masked_fill(empty[:, None], 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", probabilities, vc).to(q.dtype), lse


def merge(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from each one's o[B, S, H, D], lse."""
    peak = torch.maximum(lse_a, lse_b).nan_to_num(neginf=0.0)
    a, b = (lse_a - peak).exp(), (lse_b - peak).exp()
    total = a + b
    share = torch.where(total > 0, total, 1.0)
    o = o_a * (a / share).transpose(1, 2)[..., None] + o_b * (b / share).transpose(1, 2)[..., None]
    return o, peak + total.log()


# ---------------------------------------------------------------- cross entropy


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    vocab_size: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> torch.Tensor:
    """The loss of every row of logits[N, V] against labels[N]; rows with `ignore_index` lose 0.

    With smoothing s the target distribution is (1 - s) at the label plus s / V everywhere. Columns
    from `vocab_size` on are padding: no part of the vocabulary V.
    """
    logits = logits[:, :vocab_size].to(compute_dtype(logits))
    ignored = labels == ignore_index
    negative = -torch.log_softmax(logits, dim=1)
    losses = negative.gather(1, labels.masked_fill(ignored, 0)[:, None])[:, 0]
    if label_smoothing != 0.0:
        losses = (1.0 - label_smoothing) * losses + label_smoothing * negative.mean(dim=1)
    return losses.masked_fill(ignored, 0.0)


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
    """The (master, m, v) that follow from step number `step` (1, 2, ...); nothing is in place."""
    g = grad.to(master.dtype) * grad_scale
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    update = (m / (1.0 - beta1**step)) / ((v / (1.0 - beta2**step)).sqrt() + eps)
    return master - lr * weight_decay * master - lr * update, m, v
