"""Compare random tiny models of many Hugging Face families before and after `warpweave.hf.apply`.

The reference is the untouched model with eager attention. For each family: logits, the loss and all
gradients in float32, also padded on either side and packed; logits and gradients in float64 if
Hugging Face's own forward stays in float64; generated tokens, greedy from a left-padded batch with
a dynamic and a static cache, and with beam search. Writes
``benchmarks/results/hf/families.json`` and ``families.md``.

    python benchmarks/hf_families.py [--only llama gpt2 ...]
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import logging
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode

import warpweave.hf
from warpweave.hf.patch import ours_always

RESULTS = Path(__file__).resolve().parent / "results" / "hf"
V, E, F, L, H = 101, 64, 112, 2, 4
BATCH, LENGTH = 3, 19
PADDED = (0, 3, 7)  # padding tokens of each sample
LIMITS = {"failed": 0.0, "logits": 1e-5, "loss": 1e-5, "gradients": 1e-4, "float64": 1e-11}

# ---------------------------------------------------------------- 1. families

_LLAMA = {
    "vocab_size": V, "hidden_size": E, "intermediate_size": F, "num_hidden_layers": L,
    "num_attention_heads": H, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
_PLAIN = {k: v for k, v in _LLAMA.items() if k != "num_key_value_heads"}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4}
_BERT = {**_PLAIN, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT2 = {
    "vocab_size": V, "n_embd": E, "n_layer": L, "n_head": H, "n_positions": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}  # fmt: skip
_SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
_ROPE3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip

# family: (config class, its arguments, model class)
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", _LLAMA, "LlamaForCausalLM"),
    "llama bias": (
        "LlamaConfig", {**_LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 24},
        "LlamaForCausalLM"),
    "llama 3 rope": ("LlamaConfig", {**_LLAMA, "rope_parameters": _ROPE3}, "LlamaForCausalLM"),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 6}, "MistralForCausalLM"),
    "ministral": (
        "MinistralConfig", {**_LLAMA, **_SLIDING, "head_dim": 16}, "MinistralForCausalLM"),
    "mixtral": (
        "MixtralConfig", {**_LLAMA, "num_local_experts": 4, "sliding_window": None},
        "MixtralForCausalLM"),
    "qwen2": ("Qwen2Config", _LLAMA, "Qwen2ForCausalLM"),
    "qwen2 window": (
        "Qwen2Config", {**_LLAMA, **_SLIDING, "use_sliding_window": True}, "Qwen2ForCausalLM"),
    "qwen2 moe": (
        "Qwen2MoeConfig", {**_LLAMA, **_MOE, "shared_expert_intermediate_size": 24},
        "Qwen2MoeForCausalLM"),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 24}, "Qwen3ForCausalLM"),
    "qwen3 moe": ("Qwen3MoeConfig", {**_LLAMA, **_MOE, "head_dim": 24}, "Qwen3MoeForCausalLM"),
    "gemma": ("GemmaConfig", {**_LLAMA, "head_dim": 24}, "GemmaForCausalLM"),
    "gemma2": ("Gemma2Config", {**_LLAMA, **_SLIDING, "head_dim": 24}, "Gemma2ForCausalLM"),
    "gemma3 text": (
        "Gemma3TextConfig", {**_LLAMA, **_SLIDING, "head_dim": 24}, "Gemma3ForCausalLM"),
    "phi": ("PhiConfig", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "PhiForCausalLM"),
    "phi3": ("Phi3Config", {**_LLAMA, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, "Phi3ForCausalLM"),
    "olmo": ("OlmoConfig", _LLAMA, "OlmoForCausalLM"),
    "olmo2": ("Olmo2Config", _LLAMA, "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", {**_LLAMA, **_SLIDING}, "Olmo3ForCausalLM"),
    "olmoe": ("OlmoeConfig", {**_LLAMA, **_MOE}, "OlmoeForCausalLM"),
    "gpt2": ("GPT2Config", _GPT2, "GPT2LMHeadModel"),
    "gpt bigcode": ("GPTBigCodeConfig", _GPT2, "GPTBigCodeForCausalLM"),
    "gpt neox": (
        "GPTNeoXConfig", {**_PLAIN, "attention_dropout": 0.0, "hidden_dropout": 0.0},
        "GPTNeoXForCausalLM"),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 8}, "GPTJForCausalLM"),
    "gpt neo": (
        "GPTNeoConfig",
        {"vocab_size": V, "hidden_size": E, "num_layers": L, "num_heads": H, "window_size": 6,
         "attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "resid_dropout": 0.0,
         "embed_dropout": 0.0, "attention_dropout": 0.0},
        "GPTNeoForCausalLM"),
    "codegen": ("CodeGenConfig", {**_GPT2, "rotary_dim": 8}, "CodeGenForCausalLM"),
    "gpt oss": (
        "GptOssConfig",
        {**_LLAMA, **_SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24,
         "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "GptOssForCausalLM"),
    "falcon": (
        "FalconConfig",
        {**_PLAIN, "alibi": False, "new_decoder_architecture": False, "multi_query": True,
         "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "FalconForCausalLM"),
    "falcon alibi": (
        "FalconConfig",
        {**_PLAIN, "alibi": True, "new_decoder_architecture": False, "multi_query": False,
         "parallel_attn": False, "bias": True, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        "FalconForCausalLM"),
    "opt": (
        "OPTConfig",
        {**_PLAIN, "ffn_dim": F, "dropout": 0.0, "word_embed_proj_dim": E}, "OPTForCausalLM"),
    "bloom": (
        "BloomConfig",
        {"vocab_size": V, "hidden_size": E, "n_layer": L, "n_head": H, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": None},
        "BloomForCausalLM"),
    "mpt": (
        "MptConfig",
        {"vocab_size": V, "d_model": E, "n_layers": L, "n_heads": H, "max_seq_len": 64,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None},
        "MptForCausalLM"),
    "stablelm": ("StableLmConfig", _LLAMA, "StableLmForCausalLM"),
    "stablelm qk norm": (
        "StableLmConfig", {**_LLAMA, "qk_layernorm": True, "use_parallel_residual": True},
        "StableLmForCausalLM"),
    "starcoder2": (
        "Starcoder2Config",
        {**_LLAMA, "sliding_window": 6, "residual_dropout": 0.0, "embedding_dropout": 0.0},
        "Starcoder2ForCausalLM"),
    "cohere": ("CohereConfig", {**_LLAMA, "logit_scale": 0.25}, "CohereForCausalLM"),
    "cohere2": ("Cohere2Config", {**_LLAMA, **_SLIDING}, "Cohere2ForCausalLM"),
    "granite": (
        "GraniteConfig",
        {**_LLAMA, "logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
         "embedding_multiplier": 2.0},
        "GraniteForCausalLM"),
    "glm": ("GlmConfig", {**_LLAMA, "head_dim": 16}, "GlmForCausalLM"),
    "glm4": ("Glm4Config", {**_LLAMA, "head_dim": 16}, "Glm4ForCausalLM"),
    "nemotron": ("NemotronConfig", _LLAMA, "NemotronForCausalLM"),
    "smollm3": ("SmolLM3Config", _LLAMA, "SmolLM3ForCausalLM"),
    "helium": ("HeliumConfig", {**_LLAMA, "head_dim": 16}, "HeliumForCausalLM"),
    "arcee": ("ArceeConfig", _LLAMA, "ArceeForCausalLM"),
    "exaone4": ("Exaone4Config", {**_LLAMA, **_SLIDING}, "Exaone4ForCausalLM"),
    "ernie4.5": ("Ernie4_5Config", {**_LLAMA, "head_dim": 16}, "Ernie4_5ForCausalLM"),
    "seed oss": (
        "SeedOssConfig",
        {**_LLAMA, "head_dim": 16, "residual_dropout": 0.0, "attention_dropout": 0.0},
        "SeedOssForCausalLM"),
    "persimmon": (
        "PersimmonConfig", {**_PLAIN, "hidden_dropout": 0.0}, "PersimmonForCausalLM"),
    "deepseek v2": (
        "DeepseekV2Config",
        {**_PLAIN, "num_key_value_heads": H, "moe_intermediate_size": 24, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 16, "n_group": 1, "topk_group": 1, "head_dim": 8},
        "DeepseekV2ForCausalLM"),
    "deepseek v3": (
        "DeepseekV3Config",
        {**_PLAIN, "num_key_value_heads": H, "moe_intermediate_size": 24, "n_routed_experts": 4,
         "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
         "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
         "v_head_dim": 16, "n_group": 1, "topk_group": 1},
        "DeepseekV3ForCausalLM"),
    "bert": ("BertConfig", _BERT, "BertForMaskedLM"),
    "bert causal": ("BertConfig", {**_BERT, "is_decoder": True}, "BertLMHeadModel"),
    "roberta": ("RobertaConfig", {**_BERT, "max_position_embeddings": 96}, "RobertaForMaskedLM"),
    "distilbert": (
        "DistilBertConfig",
        {"vocab_size": V, "dim": E, "hidden_dim": F, "n_layers": L, "n_heads": H, "dropout": 0.0,
         "attention_dropout": 0.0, "max_position_embeddings": 64, "pad_token_id": 0},
        "DistilBertForMaskedLM"),
    "electra": ("ElectraConfig", {**_BERT, "embedding_size": E}, "ElectraForMaskedLM"),
    "albert": ("AlbertConfig", {**_BERT, "embedding_size": E}, "AlbertForMaskedLM"),
    "modernbert": (
        "ModernBertConfig",
        {**_PLAIN, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1,
         "sep_token_id": 2},
        "ModernBertForMaskedLM"),
    "t5": (
        "T5Config",
        {"vocab_size": V, "d_model": E, "d_kv": 16, "d_ff": F, "num_layers": L, "num_heads": H,
         "dropout_rate": 0.0, "pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": None},
        "T5ForConditionalGeneration"),
    "bart": (
        "BartConfig",
        {"vocab_size": V, "d_model": E, "encoder_layers": L, "decoder_layers": L,
         "encoder_attention_heads": H, "decoder_attention_heads": H, "encoder_ffn_dim": F,
         "decoder_ffn_dim": F, "max_position_embeddings": 64, "dropout": 0.0, "pad_token_id": 0,
         "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
         "forced_eos_token_id": None},
        "BartForConditionalGeneration"),
}  # fmt: skip


def make(family: str) -> transformers.PreTrainedModel:
    """Return a model of that family, with weights large enough for mistakes to show."""
    config, arguments, model = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**arguments)
    made = getattr(transformers, model)._from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.add_(0.1 * noise) if p.ndim == 1 else p.copy_(0.15 * noise)
    return made


# ---------------------------------------------------------------- 2. comparisons


@dataclass
class Row:
    """The results of one family: errors relative to the largest value, and if tokens are equal."""

    family: str
    errors: dict[str, float] = field(default_factory=dict)
    tokens: dict[str, bool] = field(default_factory=dict)
    replaced: dict[str, int] = field(default_factory=dict)
    kept: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # with the reason of either model

    @property
    def good(self) -> bool:
        limits = {name: LIMITS[name.split(":")[0]] for name in self.errors}
        return all(self.tokens.values()) and all(self.errors[n] <= limits[n] for n in limits)


class StaysWide(TorchFunctionMode):
    """Detect an operation on the way to a gradient that leaves float64."""

    narrowed = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.requires_grad and out.dtype == torch.float32:
            self.narrowed = True
        return out


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))


def inputs_of(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, V, (BATCH, LENGTH), generator=generator)
    found = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = torch.randint(3, V, (BATCH, 9), generator=generator)
    return found


def logits_of(model, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**inputs, use_cache=False).logits if _is_causal(model) else model(**inputs).logits


def _is_causal(model) -> bool:
    return model.can_generate()


def gradients_of(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def largest_error(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest gradient error, each relative to its largest element, or to a thousandth
    of the model's largest."""
    if ours.keys() != theirs.keys():
        return float("inf")
    floor = 1e-3 * max(g.abs().max().item() for g in theirs.values())
    return max(
        float((ours[n] - g).abs().max()) / max(g.abs().max().item(), floor)
        for n, g in theirs.items()
    )


def compare(family: str) -> Row:
    """Run all comparisons of one family."""
    row, theirs = Row(family), make(family).eval()
    ours = copy.deepcopy(theirs)
    warpweave.hf.apply(ours, report=(report := warpweave.hf.Report()))
    row.replaced = dict(Counter(e.kind for e in report.replaced()))
    row.kept = dict(Counter(f"{e.kind}: {e.module}: {e.why}" for e in report.kept()))
    ours.eval()
    inputs = inputs_of(theirs)
    _compare_logits(row, ours, theirs, inputs)
    _compare_training(row, ours, theirs, inputs)
    _compare_float64(row, ours, theirs, inputs)
    if _is_causal(theirs):
        _compare_tokens(row, ours, theirs, inputs)
    return row


def _compare_logits(row: Row, ours, theirs, inputs) -> None:
    masks = {"whole": torch.ones(BATCH, LENGTH, dtype=torch.int64)}
    for side in ("left", "right"):
        masks[side] = masks["whole"].clone()
        for sample, n in enumerate(PADDED):
            masks[side][sample, slice(0, n) if side == "left" else slice(LENGTH - n, LENGTH)] = 0
    with torch.no_grad(), ours_always():
        for name, mask in masks.items():
            more = {} if name == "whole" else {"attention_mask": mask}
            real = mask.bool()
            a, b = (logits_of(m, {**inputs, **more}) for m in (ours, theirs))
            if theirs.config.is_encoder_decoder:
                row.errors[f"logits:{name}"] = error(a, b)
            else:
                row.errors[f"logits:{name}"] = error(a[real], b[real])
        if not _is_causal(theirs) or theirs.config.is_encoder_decoder:
            return
        lengths = (8, 5, 6)
        position_ids = torch.cat([torch.arange(n) for n in lengths]).expand(BATCH, -1)
        try:
            wanted = logits_of(theirs, {**inputs, "position_ids": position_ids})
        except TypeError:
            row.refused["packed"] = "does not accept position_ids"
            return
        found = logits_of(ours, {**inputs, "position_ids": position_ids})
        row.errors["logits:packed"] = error(found, wanted)


def _compare_training(row: Row, ours, theirs, inputs) -> None:
    labels = inputs.get("decoder_input_ids", inputs["input_ids"]).clone()
    labels[0, :4] = -100
    with_labels = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}
    losses, gradients = [], []
    for model in (ours, theirs):
        model.train()
        loss = model(**with_labels, labels=labels).loss
        losses.append(loss.detach())
        gradients.append(gradients_of(model, loss))
        model.eval()
    row.errors["loss"] = error(*losses)
    row.errors["gradients"] = largest_error(*gradients)


def _compare_float64(row: Row, ours, theirs, inputs) -> None:
    ours, theirs = copy.deepcopy(ours).double(), copy.deepcopy(theirs).double()
    for implementation in ("eager", "sdpa"):  # some eager ones compute softmax in float32
        try:
            theirs.set_attn_implementation(implementation)
        except ValueError:
            break
        try:
            with StaysWide() as mode:
                wanted = logits_of(theirs, inputs)
        except RuntimeError as refusal:  # grouped products of experts
            row.refused["float64"] = f"Hugging Face: {refusal}"
            return
        if not mode.narrowed:
            break
    if mode.narrowed:
        row.refused["float64"] = "Hugging Face's forward leaves float64"
        return
    found = logits_of(ours, inputs)
    weight = torch.randn(wanted.shape, dtype=wanted.dtype)
    row.errors["float64:logits"] = error(found.detach(), wanted.detach())
    row.errors["float64:gradients"] = largest_error(
        gradients_of(ours, (found * weight).sum()), gradients_of(theirs, (wanted * weight).sum())
    )


def _compare_tokens(row: Row, ours, theirs, inputs) -> None:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for sample, n in enumerate(PADDED):
        mask[sample, :n] = 0
    ids = inputs["input_ids"].masked_fill(mask == 0, 0)
    how = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ways = {
        "dynamic": how,
        "static": {**how, "cache_implementation": "static"},
        "beams": {**how, "num_beams": 3},
    }
    for name, way in ways.items():
        try:
            wanted = theirs.generate(ids, attention_mask=mask, **way)
        except Exception as refusal:  # the family's own generate() refuses
            row.refused[name] = " ".join(str(refusal).split())[:100]
            continue
        found = ours.generate(ids, attention_mask=mask, **way)
        with ours_always():  # even for few tokens, where torch's operators would be used
            again = ours.generate(ids, attention_mask=mask, **way)
        row.tokens[name] = torch.equal(found, wanted) and torch.equal(again, wanted)


# ---------------------------------------------------------------- 3. report


def table(rows: list[Row]) -> str:
    lines = [
        "| family | norm | mlp | attention | loss "
        "| logits | gradients | float64 | generate | kept |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        logits, gradients, wide = (
            max((e for n, e in row.errors.items() if n.startswith(kind)), default=None)
            for kind in ("logits", "gradients", "float64")
        )
        kinds = [str(row.replaced.get(kind, 0)) for kind in warpweave.hf.KINDS]
        figures = ["-" if e is None else f"{e:.0e}" for e in (logits, gradients, wide)]
        tokens = " ".join(n for n, equal in row.tokens.items() if equal) or "-"
        kept = "; ".join(
            sorted({k.split(": ", 2)[0] + " (" + k.split(": ", 2)[2] + ")" for k in row.kept
                    if not k.startswith("rotary")})
        )  # fmt: skip
        lines.append(f"| {row.family} | " + " | ".join([*kinds, *figures, tokens, kept]) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=FAMILIES, help="only these; write no files")
    only = parser.parse_args().only
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    rows = []
    for family in only or FAMILIES:
        start = time.perf_counter()
        try:
            row = compare(family)
        except Exception as failure:
            traceback.print_exc()
            row = Row(family, {"failed": float("inf")}, refused={"failed": repr(failure)})
        rows.append(row)
        took = time.perf_counter() - start
        print(f"{family:18} {'good' if row.good else 'BAD '} {took:5.1f} s  {row.replaced}")
        if not row.good or only:
            print(json.dumps(dataclasses.asdict(row), indent=1))
    if not only:
        RESULTS.mkdir(parents=True, exist_ok=True)
        header = {"transformers": transformers.__version__, "torch": torch.__version__}
        found = {**header, "limits": LIMITS, "rows": [dataclasses.asdict(r) for r in rows]}
        (RESULTS / "families.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "families.md").write_text(table(rows))
    print(json.dumps({"families": len(rows), "good": sum(r.good for r in rows)}))
    return 0 if all(r.good for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
