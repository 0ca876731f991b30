"""Random tiny Hugging Face models, their results, and comparisons of two
models, for tests over ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from plants import Plant, planted
from torch import nn

V = 61  # odd: the last rank has one row fewer


def make(family: str, **more) -> nn.Module:
    torch.manual_seed(0)
    if family == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=V, n_embd=32, n_layer=2, n_head=4, n_positions=32, attn_pdrop=0.0,
                bos_token_id=1, eos_token_id=2, **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, **more},
            )
        )  # fmt: skip
    options = {
        "vocab_size": V, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32,
        "pad_token_id": 0, "eos_token_id": None, **more,
    }  # fmt: skip
    if family == "gemma2":  # alternating windows, capped scores and logits
        caps = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "sliding_window": 5}
        return transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(**options | caps | {"head_dim": 8, "bos_token_id": None})
        )
    if family == "gemma3":  # a scaled embedding, which is tied to the head
        own = {"head_dim": 8, "sliding_window": 5, "bos_token_id": None, "query_pre_attn_scalar": 8}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**options | own))
    if family == "starcoder2":
        more = {"residual_dropout": 0.0, "embedding_dropout": 0.0, "bos_token_id": None}
        return transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**options | more))
    if family == "olmo2":  # queries and keys are normalized over all heads at once
        return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**options))
    if family == "gpt_oss":  # sinks, alternating windows, experts
        options |= {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
        more = {"head_dim": 8, "sliding_window": 5, "bos_token_id": None, "rope_parameters": None}
        return transformers.GptOssForCausalLM(transformers.GptOssConfig(**options | more))
    if family == "phi3":  # queries, keys and values in one layer, gate and up in another
        return transformers.Phi3ForCausalLM(transformers.Phi3Config(**options))
    if family == "qwen3":
        # three layers: one is neither the first nor the last
        own = {"head_dim": 12, "num_hidden_layers": 3}
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**options | own | more))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))


def perturbed(family: str, **more) -> nn.Module:
    """Change every parameter that has a constant initial value: biases and norm weights."""
    model = make(family, **more)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def reported(model: nn.Module, **options) -> Any:
    """Apply `warpweave.hf.apply` to a model and return its report."""
    import warpweave.hf as ww

    ww.apply(model, report=(report := ww.Report()), **options)
    return report


def batch(padding: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, V, (2, 16), generator=generator)
    ids[1, 9] = 0  # the padding token among the others; its embedding has no gradient
    found = {"input_ids": ids, "labels": ids.clone()}
    found["labels"][1, 3:8] = -100
    if padding:
        found["attention_mask"] = torch.ones_like(ids)
        found["attention_mask"][0, :5] = 0
        found["input_ids"][0, :5] = 0
        found["labels"][0, :6] = -100  # predictions of padding are undefined
    return found


def computed(model: nn.Module, padding: bool = False, items: int | None = 17) -> dict:
    """Return logits, loss and whole gradients."""
    from warpweave.layers.sharding.dtensor import whole

    inputs = batch(padding)
    labels = inputs.pop("labels")
    with torch.no_grad():
        logits = model.eval()(**inputs, use_cache=False).logits
    loss = model.train()(**inputs, labels=labels, num_items_in_batch=items).loss
    model.zero_grad()
    loss.backward()
    found = {n: whole(p.grad).clone() for n, p in model.named_parameters()}
    real = inputs.get("attention_mask", torch.ones_like(labels)).bool()
    return {"logits": logits[real], "loss": loss.detach(), **found}


def assert_all_close(found: dict, wanted: dict, limit: float = 1e-5) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        assert found[name].shape == x.shape, name
        error = (found[name] - x).abs().max() / x.abs().max()
        assert error <= limit, (name, error.item())


def counted(run: Callable[[], Any]) -> tuple[Any, Counter]:
    """Return the result of `run()` and two counts: products that hid their messages (by kind), and
    attention calls over context ranks that began messages."""
    from warpweave.parallel import messages
    from warpweave.parallel.context import gather
    from warpweave.parallel.tensor import chunked

    calls: Counter = Counter()
    products = ("gather_product", "product_scatter", "product_reduce")
    spied = [(chunked, name) for name in products]
    spied += [(messages, "start_batch"), (messages, "start_all_to_all")]
    spied += [(gather, "start_all_gather")]

    def spy(name, function):
        def called(*args, **options):
            calls[name] += 1
            return function(*args, **options)

        return called

    with planted(*(Plant(where, name, partial(spy, name)) for where, name in spied)):
        return run(), calls


class Lora(nn.Module):
    """A stand-in for peft's LoRA in place of a linear layer, with the same names.

    It has three adapters, of which some are active. Each has a separate rank and scale, and one has
    dropout.
    """

    merged = disable_adapters = False

    def __init__(self, base: nn.Linear, *active: str) -> None:
        super().__init__()
        self.base_layer, self.active_adapters = base, [*active]
        ranks, (out, width) = {"a": 2, "b": 3, "c": 1}, base.weight.shape
        self.lora_A = nn.ModuleDict({n: nn.Linear(width, r, bias=False) for n, r in ranks.items()})
        self.lora_B = nn.ModuleDict({n: nn.Linear(r, out, bias=False) for n, r in ranks.items()})
        drops = {"a": nn.Identity(), "b": nn.Dropout(0.5), "c": nn.Identity()}
        self.lora_dropout = nn.ModuleDict(drops)
        self.scaling, self.lora_variant = {"a": 0.7, "b": 2.0, "c": -1.5}, {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base_layer(x)
        for n in () if self.disable_adapters else self.active_adapters:
            if n in self.lora_A:
                y = y + self.lora_B[n](self.lora_A[n](self.lora_dropout[n](x))) * self.scaling[n]
        return y
