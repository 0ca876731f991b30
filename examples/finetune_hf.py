"""Fine-tune a Hugging Face model with the layers of warpweave, and save it under its own names.

python examples/finetune_hf.py --steps 30

The model is a random tiny Llama in place of one from `from_pretrained`, so nothing is downloaded.
A copy that keeps transformers' layers is trained as well, to show that the losses are the same.
"""

import copy
import json
import tempfile
from dataclasses import dataclass

import torch
import tyro
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import warpweave.hf


@dataclass(frozen=True)
class Config:
    """The length of the training and its learning rate."""

    steps: int = 30
    lr: float = 3e-3


def batch(step: int) -> torch.Tensor:
    """Return eight sentences of a language in which each word is three more than the previous."""
    first = torch.randint(97, (8, 1), generator=torch.Generator().manual_seed(step))
    return (first + 3 * torch.arange(24)) % 97


def train(model: torch.nn.Module, config: Config) -> list[float]:
    """Train with AdamW and return the losses; a transformers Trainer does the same."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), config.lr), []
    for step in range(config.steps):
        tokens = batch(step)
        loss = model(tokens, labels=tokens).loss  # transformers shifts the labels itself
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(config: Config) -> dict[str, float]:
    """Train both, save ours, load it again without warpweave; return the figures."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=97, num_hidden_layers=2, **sizes))
    plain = copy.deepcopy(model)
    warpweave.hf.apply(model)
    ours, theirs = train(model, config), train(plain, config)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        kept = (loaded(batch(0)).logits - model.eval()(batch(0)).logits).abs().max()
    return {
        "first_loss": ours[0],
        "last_loss": ours[-1],
        "from_transformers_losses": max(abs(a - b) for a, b in zip(ours, theirs)),
        "saved_and_loaded_logits": kept.item(),
    }


if __name__ == "__main__":
    print(json.dumps(main(tyro.cli(Config))))
