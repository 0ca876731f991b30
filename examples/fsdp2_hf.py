"""Train a Hugging Face model that has the layers of warpweave under FSDP2, on two CPU ranks.

torchrun --nproc-per-node 2 examples/fsdp2_hf.py

Call `apply` first, then `fully_shard` on each decoder layer and on the whole model. The head stays
in the whole model's unit, because the fused loss reads its weight. Every rank holds its share of
each parameter and sees its share of the batch. The losses are those of one process with all of it.
"""

import copy
import json

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

import warpweave.hf

STEPS = 20


def train(model: torch.nn.Module, rows: slice) -> list[float]:
    """Return the losses for these rows of every batch; FSDP2 averages gradients over the ranks."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(STEPS):
        first = torch.randint(97, (8, 1), generator=torch.Generator().manual_seed(step))[rows]
        tokens = (first + 3 * torch.arange(24)) % 97
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare() -> dict[str, float]:
    """Train sharded over the default group's ranks, and whole on this one; return the figures."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, **sizes))
    alone = copy.deepcopy(model)
    warpweave.hf.apply(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    share = 8 // ranks
    mean = torch.tensor(train(model, slice(rank * share, (rank + 1) * share))) / ranks
    dist.all_reduce(mean)
    whole = torch.tensor(train(alone, slice(None)))
    here = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    return {
        "share_of_parameters": here / sum(p.numel() for p in alone.parameters()),
        "first_loss": mean[0].item(),
        "last_loss": mean[-1].item(),
        "from_one_process": (mean - whole).abs().max().item(),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    figures = compare()
    if dist.get_rank() == 0:
        print(json.dumps(figures))
    dist.destroy_process_group()
