"""The baselines of a training step: a GPT in plain torch for torch.compile, and transformers'.

Both compute with weights of one dtype (bfloat16 when timed) and keep float32 masters. torch's fused
AdamW updates the masters after clipping by the global norm, with the same arithmetic as our engine.
The plain model is nanoGPT's recipe (one compiled model, F.scaled_dot_product_attention, a
vocabulary padded to a multiple of 64) for GPT-2 and for Llama. nanoGPT itself keeps float32 weights
and a float32 residual stream under autocast, which moves more bytes.

Weights are a dict under our names, with rows in the order of torch's models: qkv is q, k, v (each
by heads), up is gate, up. `order` converts from our order.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from harness import torch_adamw
from torch import Tensor, nn

from warpweave.model.gpt import GPTConfig

LR, BETAS, EPS, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
Weights = Mapping[str, Tensor]


def order(name: str, config: GPTConfig) -> Tensor | slice:
    """Return the rows of our weight or bias in the order in which the plain model has them."""
    if ".qkv." in name:
        group = config.heads // config.num_kv_heads
        rows = torch.arange((config.heads + 2 * config.num_kv_heads) * config.head_dim)
        rows = rows.view(config.num_kv_heads, group + 2, config.head_dim)
        parts = (rows[:, :group], rows[:, group], rows[:, group + 1])
        return torch.cat([part.flatten() for part in parts])
    if ".up." in name and config.activation == "swiglu":
        return torch.arange(2 * config.num_hidden).view(-1, 2).t().flatten()
    return slice(None)


def shifted(tokens: Tensor) -> Tensor:
    """Return the next tokens; the last one has none."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


# ---------------------------------------------------------------- plain torch


def plain_loss(weights: Weights, tokens: Tensor, config: GPTConfig) -> Tensor:
    """Return the mean loss of tokens[B, S] predicting the next, in the weights' dtype.

    A head (or tied embedding) with more rows than the vocabulary is padded: its columns are
    dropped.
    """
    S = tokens.shape[1]
    x = F.embedding(tokens, weights["embedding.weight"])
    if config.positions == "learned":
        x = x + weights["positions.weight"][:S]
    angles = _angles(S, config, x) if config.positions == "rope" else None
    for i in range(config.layers):
        at = f"blocks.{i}."
        h = _norm(x, weights, f"{at}attention_norm", config)
        x = x + _attention(h, weights, f"{at}attention", config, angles)
        h = _norm(x, weights, f"{at}mlp_norm", config)
        x = x + _mlp(h, weights, f"{at}mlp", config)
    x = _norm(x, weights, "final_norm", config)
    head = weights["embedding.weight" if config.tied else "head.weight"]
    logits = (x @ head.t())[..., : config.vocab_size].flatten(0, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), shifted(tokens).flatten())


def _norm(x: Tensor, weights: Weights, name: str, config: GPTConfig) -> Tensor:
    shape, weight = (config.width,), weights[f"{name}.weight"]
    if config.norm == "rms":
        return F.rms_norm(x, shape, weight, config.norm_eps)
    return F.layer_norm(x, shape, weight, weights.get(f"{name}.bias"), config.norm_eps)


def _linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _angles(S: int, config: GPTConfig, x: Tensor) -> Tensor:
    """Return the rotary angles [S, D/2], at least in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    half = config.head_dim // 2
    exponent = torch.arange(half, device=x.device, dtype=wide) / half
    return torch.arange(S, device=x.device, dtype=wide)[:, None] * config.rope_theta**-exponent


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x[B, H, S, D]: element j rotates with element j + D/2."""
    a, b = x.to(angles.dtype).chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def _attention(
    x: Tensor, weights: Weights, name: str, config: GPTConfig, angles: Tensor | None
) -> Tensor:
    heads = (config.heads, config.num_kv_heads, config.num_kv_heads)
    parts = _linear(x, weights, f"{name}.qkv").split([n * config.head_dim for n in heads], -1)
    q, k, v = (part.unflatten(-1, (n, -1)).transpose(1, 2) for part, n in zip(parts, heads))
    if angles is not None:
        q, k = _rotate(q, angles), _rotate(k, angles)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
    return _linear(o.transpose(1, 2).flatten(2), weights, f"{name}.out")


def _mlp(x: Tensor, weights: Weights, name: str, config: GPTConfig) -> Tensor:
    z = _linear(x, weights, f"{name}.up")
    if config.activation == "swiglu":
        gate, up = z.chunk(2, -1)
        return _linear(F.silu(gate) * up, weights, f"{name}.down")
    return _linear(F.gelu(z, approximate="tanh"), weights, f"{name}.down")


# ---------------------------------------------------------------- training with torch


class Trained:
    """Parameters trained by torch: masters, clipping, fused AdamW.

    Args:
        params: the parameters used in the computation.
        loss: the loss of tokens[B, S]; it uses every parameter.
    """

    def __init__(self, params: list[nn.Parameter], loss: Callable[[Tensor], Tensor]) -> None:
        self.params, self.loss = params, loss
        wide = torch.promote_types(params[0].dtype, torch.float32)
        self.masters = [p.detach().to(wide, copy=True) for p in params]
        self.optimizer = torch_adamw(self.masters, LR, BETAS, EPS, DECAY)

    def backward(self, tokens: Tensor) -> Tensor:
        """Return the loss; gradients are in the parameters' `grad`."""
        for p in self.params:
            p.grad = None
        loss = self.loss(tokens)
        loss.backward()
        return loss.detach()

    @torch.no_grad()
    def update(self) -> Tensor:
        """Clip, step, and round the masters into the parameters; return the norm."""
        for master in self.masters:
            master.grad = torch.empty_like(master)
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.params])
        for p in self.params:
            p.grad = None
        norm = nn.utils.clip_grad_norm_(self.masters, CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        torch._foreach_copy_(self.params, self.masters)
        return norm

    def step(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Train one step; return the loss before it and the gradients' norm, on the device."""
        loss = self.backward(tokens)
        return loss, self.update()


class Plain(Trained):
    """`plain_loss` under torch.compile, with the vocabulary padded to a multiple of 64."""

    def __init__(self, weights: Weights, config: GPTConfig) -> None:
        padding = (0, 0, 0, -config.vocab_size % 64)
        head = ("embedding.weight", "head.weight")
        self.named = {
            name: nn.Parameter(F.pad(w, padding) if name in head else w.clone())
            for name, w in weights.items()
        }
        run = torch.compile(plain_loss, dynamic=False, fullgraph=True)
        super().__init__(list(self.named.values()), lambda tokens: run(self.named, tokens, config))


class Transformers(Trained):
    """transformers' GPT-2 or Llama with SDPA attention, and with Liger's kernels if requested."""

    def __init__(self, weights: Weights, config: GPTConfig, liger: bool) -> None:
        self.config, self.shapes = config, {name: w.shape for name, w in weights.items()}
        some = weights["embedding.weight"]
        with some.device:
            self.model = _transformers_model(config, some.dtype)
            loss = self._default_loss
            if liger and config.norm == "layer":
                loss = _liger_gpt2(self.model)
            elif liger:
                from liger_kernel.transformers import apply_liger_kernel_to_llama

                apply_liger_kernel_to_llama(model=self.model)
        self.model.train()
        self.named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                for theirs, part in transformers_parts(name, weight, config):
                    self.named[theirs].copy_(part)
        super().__init__(list(self.named.values()), loss)

    def _default_loss(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss  # it shifts

    def gradients(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and its gradients, in the plain model's format."""
        loss = self.backward(tokens)
        found = {name: loss.new_empty(shape) for name, shape in self.shapes.items()}
        for name, gradient in found.items():
            for theirs, part in transformers_parts(name, gradient, self.config):
                part.copy_(self.named[theirs].grad)
        return loss, found


def missing(*packages: str) -> str:
    """Return why a baseline that needs `packages` is absent, or "" if they are installed."""
    lacking = [p for p in packages if importlib.util.find_spec(p.replace("-", "_")) is None]
    return f"{', '.join(lacking)} not installed" if lacking else ""


def _transformers_model(config: GPTConfig, dtype: torch.dtype) -> nn.Module:
    """Make a model with AutoModel's `dtype`, which keeps Llama's rotary frequencies in float32."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    if config.norm == "layer":
        theirs = GPT2Config(
            vocab_size=config.vocab_size, n_positions=config.seq_len, n_embd=config.width,
            n_layer=config.layers, n_head=config.heads, n_inner=config.num_hidden,
            layer_norm_epsilon=config.norm_eps, activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=config.tied,
            bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    else:
        theirs = LlamaConfig(
            vocab_size=config.vocab_size, max_position_embeddings=config.seq_len,
            hidden_size=config.width, intermediate_size=config.num_hidden,
            num_hidden_layers=config.layers, num_attention_heads=config.heads,
            num_key_value_heads=config.num_kv_heads, rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
    return AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")


def _liger_gpt2(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Use Liger's LayerNorm everywhere, and its fused head and loss (it has no GPT-2 patch)."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss, LigerLayerNorm

    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                theirs = LigerLayerNorm(child.normalized_shape[0], child.eps, bias=True)
                setattr(module, name, theirs.to(child.weight.dtype))
    criterion = LigerFusedLinearCrossEntropyLoss()

    def loss(tokens: Tensor) -> Tensor:
        x = model.transformer(input_ids=tokens, use_cache=False).last_hidden_state
        return criterion(model.lm_head.weight, x.flatten(0, 1), shifted(tokens).flatten())

    return loss


_GPT2 = {
    "attention_norm": "ln_1", "attention.qkv": "attn.c_attn", "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
}  # fmt: skip
_LLAMA = {
    "attention_norm": ("input_layernorm",), "mlp_norm": ("post_attention_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",), "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}  # fmt: skip
_OUTSIDE = {
    "layer": {"embedding": "transformer.wte", "positions": "transformer.wpe",
              "final_norm": "transformer.ln_f", "head": "lm_head"},
    "rms": {"embedding": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
}  # fmt: skip


def transformers_parts(name: str, plain: Tensor, config: GPTConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and view of each part of a plain tensor that transformers keeps separate."""
    module, kind = name.rsplit(".", 1)
    if not module.startswith("blocks."):
        yield f"{_OUTSIDE[config.norm][module]}.{kind}", plain
        return
    _, layer, module = module.split(".", 2)
    if config.norm == "layer":  # Conv1D weights are (in, out)
        turned = plain.t() if plain.ndim == 2 else plain
        yield f"transformer.h.{layer}.{_GPT2[module]}.{kind}", turned
        return
    group = config.heads // config.num_kv_heads
    shares = {1: [1], 2: [1, 1], 3: [group, 1, 1]}[len(_LLAMA[module])]
    rows = len(plain) // sum(shares)
    for theirs, part in zip(_LLAMA[module], plain.split([rows * n for n in shares]), strict=True):
        yield f"model.layers.{layer}.{theirs}.{kind}", part
