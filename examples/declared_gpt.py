"""A GPT in plain torch, sharded by a plan of names: no layer, no collective, no mesh in the model.

    torchrun --nproc-per-node 4 examples/declared_gpt.py

This prints every layout that DTensor propagates, every collective with its bytes, and the loss next
to that of one rank. The parameters have the names and shapes of `warpweave.model.plain`, in the
styles of GPT-2 (learned positions, LayerNorm, GELU) and Llama (rotary embedding, RMSNorm, SwiGLU).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from warpweave import explain_sharding, shard
from warpweave.model.plain import PlainConfig, plain_init

# The roles of the mesh's axes, for any model; the first entry alone is data parallelism.
AXES = {"batch": "dp", "groups": "tp", "hidden": "tp", "vocab": "tp"}

# Megatron's block layout: columns, then rows, with the residual stream replicated on all ranks.
PLAN = {
    "(tokens)": "batch seq",
    "(labels)": "batch seq",
    "*embedding.weight": "vocab width",
    "*.qkv.*": "(groups rest) ...",  # each group: its query heads, one key, one value
    "*.attention.out.weight": "width (groups rest)",
    "*.up.*": "hidden ...",
    "*.down.weight": "width hidden",
    "embedding()": "batch seq width",
    "*norm()": "batch seq width",
    "*.attention()": "batch seq width",
    "*.mlp()": "batch seq width",
}

# The same with sequence parallelism: between the parts, the stream is sharded over tensor ranks.
SEQUENCE_AXES = AXES | {"seq": "tp"}
SEQUENCE_PLAN = PLAN | {
    "(tokens)": "batch whole",
    "(labels)": "batch whole",
    "*.attention(x)": "batch whole width",
    "*.mlp(x)": "batch whole width",
}


class Attention(nn.Module):
    """Causal attention; each key and value serves a group of query heads."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config, self.group = config, config.heads // config.kv_heads
        rows = config.kv_heads * (self.group + 2) * config.head_dim
        self.qkv = nn.Linear(config.width, rows, config.bias)
        self.out = nn.Linear(config.heads * config.head_dim, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        qkv = rearrange(
            self.qkv(x), "b s (kv each d) -> b s kv each d", kv=c.kv_heads, d=c.head_dim
        )
        parts = qkv.split((self.group, 1, 1), dim=-2)
        q, k, v = (rearrange(t, "b s kv each d -> b s (kv each) d") for t in parts)
        if c.positions == "rope":
            q, k = rotate(q, c.rope_theta), rotate(k, c.rope_theta)
        q, k, v = (rearrange(t, "b s h d -> b h s d") for t in (q, k, v))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(rearrange(o, "b h s d -> b s (h d)"))


def rotate(x: Tensor, theta: float) -> Tensor:
    """Apply the rotary embedding to x[B, S, H, D]: element j rotates with element j + D/2."""
    half = x.size(-1) // 2
    position = torch.arange(x.size(1), dtype=torch.float64, device=x.device)
    turn = theta ** (torch.arange(half, dtype=torch.float64, device=x.device) / -half)
    angle = (position[:, None] * turn)[:, None]
    a, b = x.chunk(2, dim=-1)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class MLP(nn.Module):
    """Two matrix products around GELU or SwiGLU, whose rows are gate, up, gate, up, ..."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.up = nn.Linear(config.width, config.hidden * (1 + self.gated), config.bias)
        self.down = nn.Linear(config.hidden, config.width, config.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if not self.gated:
            return self.down(F.gelu(x, approximate="tanh"))
        gate, up = x.unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(config), norm(config)
        self.attention, self.mlp = Attention(config), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def norm(config: PlainConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps)


class GPT(nn.Module):
    """A GPT with the parameters that `warpweave.model.plain.plain_shapes` lists."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.seq_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight
        self.config = config

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss for tokens and labels, int64 [B, S] each."""
        x = self.embedding(tokens)
        if self.config.positions == "learned":
            x = x + self.positions(torch.arange(tokens.size(1), device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def make(config: PlainConfig, dtype: torch.dtype = torch.float64) -> GPT:
    """Return a model with the parameters of ``plain_init(config, seed=0)``."""
    model = GPT(config).to(dtype)
    weights = plain_init(config, 0, dtype)
    if config.tied:
        weights["head.weight"] = weights["embedding.weight"]
    model.load_state_dict(weights)
    return model


def compare(device: str = "cpu") -> float:
    """Print what is sent and both losses; return their difference."""
    mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("dp", "tp"))
    config = PlainConfig(96, 16, 2, 32, 4, 2, 48)
    torch.manual_seed(0)
    tokens = torch.randint(96, (4, 16), device=device)
    labels = tokens.roll(-1, 1)
    plain = make(config).to(device)(tokens, labels)
    model = shard(make(config).to(device), PLAN, mesh, AXES)
    with explain_sharding(model) as seen:
        loss = model(tokens, labels)
        loss.backward()
    difference = (loss.full_tensor() - plain).abs().item()
    if dist.get_rank() == 0:
        print(seen)
        print(f"loss {plain.item():.6f} on one rank; on four it differs by {difference:.1e}")
    return difference


if __name__ == "__main__":
    where = "cuda" if torch.cuda.is_available() else "cpu"
    if where == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    compare(where)
    dist.destroy_process_group()
