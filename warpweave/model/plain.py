"""A GPT in torch and einops alone: the plain reference that every layout is compared with.

This file imports nothing from warpweave and shares no code with it, not even the random numbers of
dropout. It computes in the dtype of its parameters (float64 for sharp proofs). Autograd computes
the gradients, and every step is one visible line of algebra.

A model is a dict from parameter name to tensor, with the names and shapes of `plain_shapes`:

    embedding.weight (V, E)            positions.weight (max S, E)     only learned positions
    blocks.{i}.attention_norm.weight (E)
    blocks.{i}.attention.qkv.weight (Hkv * (G + 2) * D, E)    each KV head: its G query heads, k, v
    blocks.{i}.attention.q_norm.weight, .k_norm.weight (D)         only with q/k norms, which may
                                       be over all heads: (H * D), (Hkv * D)
    blocks.{i}.attention.out.weight (E, H * D)
    blocks.{i}.attention_post_norm.weight (E)              only with norms after a branch
    blocks.{i}.mlp_norm.weight (E)
    blocks.{i}.mlp.up.weight (F, E), for a gate (2F, E): rows gate, up, gate, up, ...
    blocks.{i}.mlp.down.weight (E, F)
    blocks.{i}.mlp_post_norm.weight (E)                    only with norms after a branch
    final_norm.weight (E)              head.weight (V, E)              only untied

With biases, each except embedding, positions and head also has a `.bias` with the size of its rows
(an RMS norm has none). The architectures are GPT-2 (Radford et al. 2019), Llama (Touvron et al.
2023, arXiv:2302.13971), Mistral's windows (arXiv:2310.06825), Qwen's biases and norms
(arXiv:2407.10671, arXiv:2505.09388), Gemma 2 and 3 (arXiv:2408.00118, arXiv:2503.19786), OLMo 2
(arXiv:2501.00656), Primer's squared ReLU (arXiv:2109.08668) and everything between them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import numpy as np
import torch
from einops import einsum, rearrange, repeat
from torch import Tensor

IGNORED = -100  # the label of a token that has no loss


@dataclass(frozen=True)
class PlainConfig:
    """Sizes and style of a GPT. The defaults are GPT-2's style."""

    vocab_size: int
    seq_len: int  # maximum sequence length; also numbers the tokens for dropout
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    positions: str = "learned"  # or "rope"
    norm: str = "layer"  # or "rms", or "rms1p": RMSNorm multiplied by 1 + weight
    activation: str = "gelu"  # tanh; or "gelu_erf", "relu2", gated "swiglu", "geglu" (tanh)
    bias: bool = True
    tied: bool = True
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    dropout: float = 0.0
    head_size: int | None = None  # None means width / heads
    qkv_bias: bool | None = None  # None means the same as bias
    norm_bias: bool | None = None  # of a LayerNorm; None means the same as bias
    qk_norm: bool = False
    windows: tuple[int, ...] = ()  # assigned to the layers in turn; 0 means none
    norm_place: str = "pre"  # before a branch; or "post", or "sandwich" (both)
    qk_norm_whole: bool = False  # over all heads together
    attention_scale: float | None = None  # None means 1 / sqrt(head_dim)
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap)
    sinks: bool = False  # one more logit in each query head's softmax, without a value
    logit_softcap: float | None = None
    embedding_scale: float | None = None
    local_rope_theta: float | None = None  # of layers with a window, without rope_scaling
    rope_scaling: dict | None = None  # kind, factor, original_length, low, high, ...

    def __post_init__(self) -> None:
        for field, allowed in (
            ("positions", ("learned", "rope")),
            ("norm", ("layer", "rms", "rms1p")),
            ("activation", ("gelu", "gelu_erf", "swiglu", "geglu", "relu2")),
            ("norm_place", ("pre", "sandwich", "post")),
        ):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {allowed}, got {getattr(self, field)!r}")
        divides = self.head_size is not None or self.width % self.heads == 0
        if not divides or self.heads % self.kv_heads:
            raise ValueError(
                f"width must be divisible by heads and heads by kv_heads, got width={self.width}, "
                f"heads={self.heads}, kv_heads={self.kv_heads}"
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs an even head size, got {self.head_dim}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        return self.width // self.heads if self.head_size is None else self.head_size


def plain_shapes(config: PlainConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and logical shape, in the order that the model uses them."""
    E, F, D = config.width, config.hidden, config.head_dim
    group = config.heads // config.kv_heads
    shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (config.vocab_size, E)}
    if config.positions == "learned":
        shapes["positions.weight"] = (config.seq_len, E)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (E,)
        bias = config.bias if config.norm_bias is None else config.norm_bias
        if bias and config.norm == "layer":
            shapes[f"{name}.bias"] = (E,)

    def linear(name: str, rows: int, columns: int, bias: bool = config.bias) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(config.layers):
        before, after = config.norm_place != "post", config.norm_place != "pre"
        if before:
            norm(f"blocks.{i}.attention_norm")
        qkv_bias = config.bias if config.qkv_bias is None else config.qkv_bias
        linear(f"blocks.{i}.attention.qkv", config.kv_heads * (group + 2) * D, E, qkv_bias)
        if config.qk_norm:
            q, k = (config.heads, config.kv_heads) if config.qk_norm_whole else (1, 1)
            shapes[f"blocks.{i}.attention.q_norm.weight"] = (q * D,)
            shapes[f"blocks.{i}.attention.k_norm.weight"] = (k * D,)
        if config.sinks:
            shapes[f"blocks.{i}.attention.sinks"] = (config.heads,)
        linear(f"blocks.{i}.attention.out", E, config.heads * D)
        if after:
            norm(f"blocks.{i}.attention_post_norm")
        if before:
            norm(f"blocks.{i}.mlp_norm")
        linear(f"blocks.{i}.mlp.up", 2 * F if config.activation.endswith("glu") else F, E)
        linear(f"blocks.{i}.mlp.down", E, F)
        if after:
            norm(f"blocks.{i}.mlp_post_norm")
    norm("final_norm")
    if not config.tied:
        shapes["head.weight"] = (config.vocab_size, E)
    return shapes


def plain_init(
    config: PlainConfig, seed: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Initial parameters, each drawn only from (seed, its name) in float32, then cast to `dtype`.

    Matrices have standard deviation 0.02, except that the two projections back into the residual
    stream have 0.02 / sqrt(2 * layers), as in GPT-2. Norm weights are 1 (0 if the norm adds 1 to
    them); biases and sinks are 0.
    """
    params = {}
    for name, shape in plain_shapes(config).items():
        if name.endswith((".bias", ".sinks")):
            params[name] = torch.zeros(shape, dtype=dtype)
        elif len(shape) == 1:
            one = 0.0 if config.norm == "rms1p" else 1.0
            params[name] = torch.full(shape, one, dtype=dtype)
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            key = int.from_bytes(digest[:8], "big") & (2**63 - 1)
            residual = name.endswith((".attention.out.weight", ".mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * config.layers) if residual else 0.02
            draw = torch.randn(shape, generator=torch.Generator().manual_seed(key))
            params[name] = (draw * std).to(dtype)
    return params


def philox4x32(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    counter[..., 4] are 32-bit words held in uint64, and key is two 32-bit words. Returns four
    random 32-bit words per counter, in the same form.
    """
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(10):
        first = c0 * np.uint64(0xD2511F53)  # below 2**64: both factors are below 2**32
        second = c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (second >> half) ^ c1 ^ np.uint64(k0),
            second & low,
            (first >> half) ^ c3 ^ np.uint64(k1),
            first & low,
        )
        k0 = (k0 + 0x9E3779B9) % 2**32
        k1 = (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1)


def _dropout(x: Tensor, p: float, seed: int, site: int, tokens: Tensor) -> Tensor:
    """Zero x[B, S, E] with probability p, drawn only from (seed, site, tokens[B, S], e)."""
    if p == 0.0:
        return x
    index = tokens.cpu().numpy().astype(np.uint64)
    quads = (x.shape[-1] + 3) // 4
    counter = np.zeros((*index.shape, quads, 4), dtype=np.uint64)
    counter[..., 0] = (index & np.uint64(0xFFFFFFFF))[..., None]
    counter[..., 1] = (index >> np.uint64(32))[..., None]
    counter[..., 2] = np.arange(quads, dtype=np.uint64)
    counter[..., 3] = site
    words = philox4x32(counter, (seed % 2**32, (seed >> 32) % 2**32))
    words = words.reshape(*index.shape, quads * 4)[..., : x.shape[-1]]
    keep = torch.from_numpy(words >= round(p * 2**32)).to(x.device)
    return torch.where(keep, x / (1.0 - p), 0.0)


def _norm(
    x: Tensor, params: dict[str, Tensor], name: str, config: PlainConfig, *, center: bool = True
) -> Tensor:
    """The norm of the config; without `center`, a layer norm becomes an RMS norm."""
    if config.norm == "layer" and center:
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps)
    weight = params[f"{name}.weight"]
    x = x * (1.0 + weight if config.norm == "rms1p" else weight)
    return x + params[f"{name}.bias"] if f"{name}.bias" in params else x


def _linear(x: Tensor, params: dict[str, Tensor], name: str) -> Tensor:
    y = x @ params[f"{name}.weight"].T
    return y + params[f"{name}.bias"] if f"{name}.bias" in params else y


def _frequencies(half: int, theta: float, scaling: dict | None) -> tuple[list[float], float]:
    """The angles by which the `half` pairs rotate per position, and the factor of queries and keys.

    The kinds of scaling are those of transformers."""
    plain = [theta ** (-i / half) for i in range(half)]
    if scaling is None:
        return plain, 1.0
    kind, factor, length = (scaling[name] for name in ("kind", "factor", "original_length"))
    slow = [f / factor for f in plain]
    if kind == "linear":
        return slow, 1.0
    if kind == "ntk":
        theta = theta * factor ** (half / (half - 1))
        return [theta ** (-i / half) for i in range(half)], 1.0
    if kind == "llama3":
        low, high = scaling["low"], scaling["high"] or 4.0
        stay = [(length * f / (2 * math.pi) - low) / (high - low) for f in plain]
        multiplier = 1.0
    else:  # yarn
        low, high = scaling["low"], scaling["high"] or 32.0
        # The pair that makes n turns in `length` positions: theta ** (-i / half) = 2 pi n / length.
        first, last = (half * math.log(length / (2 * math.pi * n), theta) for n in (high, low))
        if scaling["truncate"]:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        stay = [1 - (i - first) / (last - first or 0.001) for i in range(half)]
        multiplier = 0.1 * math.log(factor) + 1
    if scaling["attention_factor"] is not None:
        multiplier = scaling["attention_factor"]
    mixed = [min(max(s, 0.0), 1.0) for s in stay]
    return [s * f + (1 - s) * g for s, f, g in zip(mixed, plain, slow)], multiplier


def _rotate(x: Tensor, theta: float, scaling: dict | None) -> Tensor:
    """Rotary embedding of x[B, S, H, D]; element j pairs with element j + D/2, as in Llama."""
    half = x.shape[-1] // 2
    turn, multiplier = _frequencies(half, theta, scaling)
    position = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)
    angle = position[:, None] * torch.tensor(turn, dtype=torch.float64, device=x.device)
    cos, sin = (
        (multiplier * f(angle)).to(x.dtype)[None, :, None, :] for f in (torch.cos, torch.sin)
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _attention(
    x: Tensor,
    params: dict[str, Tensor],
    name: str,
    layer: int,
    config: PlainConfig,
    document: Tensor | None,
) -> Tensor:
    S, D, group = x.shape[1], config.head_dim, config.heads // config.kv_heads
    qkv = _linear(x, params, f"{name}.qkv")
    qkv = rearrange(qkv, "b s (kv each d) -> b s kv each d", kv=config.kv_heads, d=D)
    q, k, v = (
        rearrange(part, "b s kv each d -> b s (kv each) d") for part in qkv.split((group, 1, 1), 3)
    )
    if config.qk_norm:
        if config.qk_norm_whole:
            q, k = (rearrange(t, "b s h d -> b s (h d)") for t in (q, k))
        q = _norm(q, params, f"{name}.q_norm", config, center=False)
        k = _norm(k, params, f"{name}.k_norm", config, center=False)
        if config.qk_norm_whole:
            q, k = (rearrange(t, "b s (h d) -> b s h d", d=D) for t in (q, k))
    window = config.windows[layer % len(config.windows)] if config.windows else 0
    if config.positions == "rope":
        theta, scaling = config.rope_theta, config.rope_scaling
        if window and config.local_rope_theta is not None:
            theta, scaling = config.local_rope_theta, None
        q, k = _rotate(q, theta, scaling), _rotate(k, theta, scaling)
    k, v = (repeat(part, "b s kv d -> b s (kv group) d", group=group) for part in (k, v))
    scale = config.attention_scale
    scale = 1 / math.sqrt(config.head_dim) if scale is None else scale
    scores = einsum(q, k, "b q h d, b k h d -> b h q k") * scale
    scores = _capped(scores, config.softcap)
    back = torch.arange(S, device=x.device)[:, None] - torch.arange(S, device=x.device)
    hidden = back < 0
    if window:
        hidden = hidden | (back >= window)
    if document is not None:
        hidden = hidden | (document[:, None, :, None] != document[:, None, None, :])
    scores = scores.masked_fill(hidden, -math.inf)
    if config.sinks:
        sink = repeat(params[f"{name}.sinks"], "h -> b h q 1", b=len(x), q=S)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., :S]
    out = einsum(weights, v, "b h q k, b k h d -> b q h d")
    return _linear(rearrange(out, "b q h d -> b q (h d)"), params, f"{name}.out")


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _mlp(x: Tensor, params: dict[str, Tensor], name: str, config: PlainConfig) -> Tensor:
    x = _linear(x, params, f"{name}.up")
    if config.activation == "gelu":
        x = _gelu_tanh(x)
    elif config.activation == "gelu_erf":
        x = 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    elif config.activation == "relu2":
        x = torch.where(x > 0.0, x * x, 0.0)
    else:
        gate, up = rearrange(x, "b s (f pair) -> pair b s f", pair=2)
        x = (gate * torch.sigmoid(gate) if config.activation == "swiglu" else _gelu_tanh(gate)) * up
    return _linear(x, params, f"{name}.down")


def plain_gpt_logits(
    params: dict[str, Tensor],
    tokens: Tensor,
    config: PlainConfig,
    *,
    dropout: float | None = None,
    seed: int = 0,
    sample_ids: Tensor | None = None,
    document: Tensor | None = None,
) -> Tensor:
    """The logits[B, S, V] of tokens[B, S] (int64) for next-token prediction.

    `dropout` defaults to config.dropout. Its draws are keyed by `seed` (different in each step), by
    the site (0 after the embedding, 1 + 2i and 2 + 2i after block i's attention and MLP) and by the
    token's number sample_id * config.seq_len + position. sample_ids[B] defaults to 0, 1, ...

    document[B, S] gives the number of the packed document that each token belongs to, in
    non-decreasing order. A token attends to its own document, and learned positions count from its
    start.
    """
    B, S = tokens.shape
    limit = config.seq_len
    if limit < S:
        raise ValueError(f"the sequence is longer than config.seq_len: {S} > {limit}")
    p = config.dropout if dropout is None else dropout
    if sample_ids is None:
        sample_ids = torch.arange(B, device=tokens.device)
    number = sample_ids[:, None] * config.seq_len + torch.arange(S, device=tokens.device)

    x = params["embedding.weight"][tokens]
    if config.embedding_scale is not None:
        x = x * config.embedding_scale
    before, after = config.norm_place != "post", config.norm_place != "pre"
    if config.positions == "learned":
        position = torch.arange(S, device=tokens.device).expand(B, S)
        if document is not None:  # subtract the tokens of earlier documents
            position = position - (document[:, None, :] < document[:, :, None]).sum(-1)
        x = x + params["positions.weight"][position]
    x = _dropout(x, p, seed, 0, number)
    for i in range(config.layers):
        y = _norm(x, params, f"blocks.{i}.attention_norm", config) if before else x
        y = _attention(y, params, f"blocks.{i}.attention", i, config, document)
        y = _norm(y, params, f"blocks.{i}.attention_post_norm", config) if after else y
        x = x + _dropout(y, p, seed, 1 + 2 * i, number)
        y = _norm(x, params, f"blocks.{i}.mlp_norm", config) if before else x
        y = _mlp(y, params, f"blocks.{i}.mlp", config)
        y = _norm(y, params, f"blocks.{i}.mlp_post_norm", config) if after else y
        x = x + _dropout(y, p, seed, 2 + 2 * i, number)
    x = _norm(x, params, "final_norm", config)
    logits = x @ params["embedding.weight" if config.tied else "head.weight"].T
    return _capped(logits, config.logit_softcap)


def plain_gpt_loss(
    params: dict[str, Tensor],
    tokens: Tensor,
    labels: Tensor,
    config: PlainConfig,
    *,
    dropout: float | None = None,
    seed: int = 0,
    sample_ids: Tensor | None = None,
    document: Tensor | None = None,
) -> tuple[Tensor, int]:
    """The sum of the token losses (0-dim, the parameters' dtype) and the number of valid tokens.

    labels[B, S] are int64; -100 marks a token without a loss. Otherwise as in `plain_gpt_logits`.
    """
    logits = plain_gpt_logits(
        params,
        tokens,
        config,
        dropout=dropout,
        seed=seed,
        sample_ids=sample_ids,
        document=document,
    )
    valid = labels != IGNORED
    chosen = torch.log_softmax(logits, dim=-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -torch.where(valid, chosen, 0.0).sum(), int(valid.sum())


def is_muons(name: str) -> bool:
    """Return True if Muon updates this parameter: the weight of a linear layer in a block."""
    return name.endswith(("qkv.weight", "out.weight", "up.weight", "down.weight"))


def _matrices(name: str, weight: Tensor, config: PlainConfig) -> list[Tensor]:
    """Views of the matrices in a weight: queries, keys and values of all heads, or gate and up."""
    if name.endswith("qkv.weight"):
        groups = weight.unflatten(0, (config.kv_heads, -1, config.head_dim))
        return list(groups.split((groups.shape[1] - 2, 1, 1), 1))
    if name.endswith("up.weight") and config.activation in ("swiglu", "geglu"):
        return list(weight.unflatten(0, (-1, 2)).split(1, 1))
    return [weight]


def _newton_schulz(g: Tensor) -> Tensor:
    """Muon's orthogonalization of a matrix (Jordan et al. 2024)."""
    x = g / (g.norm() + 1e-7)
    for _ in range(5):
        flat = x @ x.T if len(x) <= x.shape[1] else x.T @ x
        p = -4.7750 * flat + 2.0315 * flat @ flat
        x = 3.4445 * x + (p @ x if len(x) <= x.shape[1] else x @ p)
    return x


@torch.no_grad()
def plain_adamw_step(
    params: dict[str, Tensor],
    grads: dict[str, Tensor],
    state: dict[str, dict[str, Tensor]],
    step: int,
    *,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip: float | None = None,
    muon: PlainConfig | None = None,
    momentum: float = 0.95,
) -> Tensor:
    """Do one AdamW step (Loshchilov and Hutter 2019, arXiv:1711.05101) in place; return the norm.

    `state` maps each name to its moments {"m", "v"}; start with {}. `step` counts from 1. The norm
    is that of all gradients together before clipping. Clipping multiplies every gradient by
    min(1, clip / (norm + 1e-6)), like torch. Decay is lr * weight_decay on matrices only: names
    that end in .weight with at least two dimensions, so on embeddings but not on norms and biases.
    If `muon` (the model's configuration) is given, Muon updates the matrices of the blocks, with
    the scale of Moonlight (arXiv:2502.16982); their "v" stays zero.
    """
    norm = torch.sqrt(sum((g * g).sum() for g in grads.values()))
    scale = 1.0 if clip is None else min(1.0, clip / (norm.item() + 1e-6))
    for name, param in params.items():
        if name not in state:
            state[name] = {"m": torch.zeros_like(param), "v": torch.zeros_like(param)}
        m, v = state[name]["m"], state[name]["v"]
        g = grads[name] * scale
        if name.endswith(".weight") and param.ndim >= 2:
            param.mul_(1.0 - lr * weight_decay)
        if muon is not None and is_muons(name):
            m.copy_(momentum * m + (1.0 - momentum) * g)
            u = momentum * m + (1.0 - momentum) * g
            for part, of in zip(_matrices(name, param, muon), _matrices(name, u, muon)):
                o = _newton_schulz(of.flatten(0, -2))
                part.sub_((lr * 0.2 * max(o.shape) ** 0.5 * o).view(part.shape))
            continue
        m.copy_(beta1 * m + (1.0 - beta1) * g)
        v.copy_(beta2 * v + (1.0 - beta2) * g * g)
        m_hat = m / (1.0 - beta1**step)
        v_hat = v / (1.0 - beta2**step)
        param.sub_(lr * m_hat / (torch.sqrt(v_hat) + eps))
    return norm
