"""A training step and greedy generation of Hugging Face models, before and after `apply`.

Runs on one thread and measures CPU time, which other processes disturb least. Both models hold the
same weights at the same memory addresses.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence

import harness
import torch
import transformers

import warpweave.hf

CLAIM = "A Hugging Face model is at least as fast after warpweave.hf.apply as before, on a CPU."
THEIRS, OURS = "transformers", "warpweave.hf"
# layers, width, hidden, vocabulary, (batch, tokens) of a step, (batch, prompt, tokens) to generate
SIZES = {
    "tiny": (1, 32, 64, 97, (2, 16), (1, 5, 3)),
    "full": (4, 256, 688, 8192, (2, 256), (2, 64, 32)),
}


def make(family: str, size: str) -> transformers.PreTrainedModel:
    """Return a random model without dropout, with transformers' default attention (sdpa)."""
    layers, E, F, V, *_ = SIZES[size]
    torch.manual_seed(0)
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    if family == "llama":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=V, hidden_size=E, intermediate_size=F, num_hidden_layers=layers,
                num_attention_heads=4, num_key_value_heads=2, **tokens,
            )
        )  # fmt: skip
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_embd=E, n_layer=layers, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, **tokens,
        )
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    options = harness.parser(CLAIM).parse_args(arguments)
    size = "tiny" if options.quick else "full"
    *_, V, (batch, length), (prompts, prompt, new) = SIZES[size]
    rounds = options.rounds or (2 if options.quick else 31)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    header = harness.header(transformers=transformers.__version__, threads=1, clock="CPU time")
    report = harness.Report("hf_speed", CLAIM, header)
    for family in ("gpt2", "llama"):
        models = {THEIRS: make(family, size)}
        models[OURS] = copy.deepcopy(models[THEIRS])
        for ours, theirs in zip(*(m.parameters() for m in models.values()), strict=True):
            ours.data = theirs.data
        warpweave.hf.apply(models[OURS])
        ids = torch.randint(3, V, (batch, length))
        start = torch.randint(3, V, (prompts, prompt))

        def step(model, ids=ids):
            model.train()
            model.zero_grad()
            loss = model(ids, labels=ids).loss
            loss.backward()
            return loss.detach()

        def generate(model, start=start):
            model.eval()
            how = {"max_new_tokens": new, "do_sample": False}
            return model.generate(start, attention_mask=torch.ones_like(start), **how)

        for name, run, tokens, limit in (
            ("training step", step, batch * length, 1e-5),
            ("generate", generate, prompts * new, 0.0),
        ):
            ours, theirs = run(models[OURS]).double(), run(models[THEIRS]).double()
            report.checks.append(
                harness.assert_equal(f"{family} {name}", {"out": (ours, theirs)}, limit)
            )
            times = harness.interleave(
                {who: lambda run=run, model=model: run(model) for who, model in models.items()},
                rounds=rounds,
                clock=time.process_time,
            )
            report.add(times, [THEIRS], shape=f"{family} {name}", dtype="float32", tokens=tokens)
    report.finish(harness.results_folder(options))


if __name__ == "__main__":
    main()
