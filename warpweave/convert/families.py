"""Read and write the config.json of each model family as a `GPTConfig`.

A family has a class name, a function for each direction, and the names of its modules (`tensors`).
A model is written as a family only if reading the result gives the same model (`write_config`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from warpweave.convert.fields import ConvertError, expect, given, read_rope, write_rope
from warpweave.model.config import GPTConfig


@dataclass(frozen=True)
class Family:
    """A model family of transformers."""

    architecture: str  # its class for causal language modeling
    read: Callable[[Mapping[str, Any]], GPTConfig]  # config.json's fields -> `GPTConfig`
    write: Callable[[GPTConfig], dict[str, Any]]  # -> the fields that this family can express
    # our module's name -> theirs, concatenated in this order; in a block, without its prefix
    modules: Mapping[str, tuple[str, ...]]
    blocks: str  # the prefix of a block, with a placeholder for its number
    base: str  # the prefix of everything but the head; files of a bare base model omit it
    transposed: tuple[str, ...] = ()  # our modules whose weights they store as (in, out)
    unused: tuple[str, ...] = ()  # suffixes of tensors that are not parameters


def read_config(fields: Mapping[str, Any]) -> tuple[str, GPTConfig]:
    """Return (model_type, our config) for the fields of a config.json. Raises `ConvertError` for an
    unknown family, a missing field, or a model that our GPT does not support."""
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise ConvertError(f"model_type {kind!r} is not supported; expected one of {known}")
    expect(fields, "quantization_config", None)
    expect(fields, "is_causal", True)
    for name in ("num_hidden_layers", "n_layer"):
        if isinstance(fields.get(name), int) and fields[name] > 10_000:
            raise ConvertError(f"{name} = {fields[name]} is not a plausible number of layers")
    try:
        config = canonical(FAMILIES[kind].read(fields))
        _check_complete(fields, FAMILIES[kind], config)
        return kind, config
    except KeyError as error:
        raise ConvertError(f"config.json of a {kind} model has no {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ConvertError(f"config.json of a {kind} model: {error}") from None


def _check_complete(fields: Mapping[str, Any], family: Family, config: GPTConfig) -> None:
    """Raise `ConvertError` if a file of transformers 5 or later lacks a field of its family. These
    versions write every field, so a missing one was renamed. Older versions omit fields that have
    their family's default."""
    version = str(fields.get("transformers_version"))
    major = version.partition(".")[0]
    if not major.isdigit() or int(major) < 5:
        return
    other = {"head_dim"} | ({"rope_parameters"} if "rope_theta" in fields else set())
    if missing := family.write(config).keys() - fields.keys() - other:
        raise ConvertError(
            f"it has no {', '.join(sorted(missing))}, which transformers {version} may have "
            "renamed; add the missing fields, or remove transformers_version to use their defaults"
        )


def write_config(config: GPTConfig, kind: str | None = None) -> tuple[str, dict[str, Any]]:
    """Return (model_type, fields) for our model; `kind` None tries all families in order. Raises
    `ConvertError`, which names the closest model, if no family (or not `kind`) can be it."""
    wanted = replace(canonical(config), dropout=0.0)
    misses = []
    for name in FAMILIES if kind is None else (kind,):
        written = {"model_type": name} | FAMILIES[name].write(wanted)
        try:
            found = read_config(written)[1]
        except ConvertError as error:
            misses.append((1.5, f"{name}, rejected ({error})"))  # worse than one wrong option
            continue
        if found == wanted:
            return name, {"architectures": [FAMILIES[name].architecture], **written}
        theirs, ours = (asdict(which) for which in (found, wanted))
        differ = [field for field in ours if theirs[field] != ours[field]]
        others = [f"{n} = {reprlib.repr(theirs[n])} (not {reprlib.repr(ours[n])})" for n in differ]
        misses.append((len(others), f"{name} with {', '.join(others)}"))
    tried = ", ".join(FAMILIES) if kind is None else kind
    nearest = min(misses, key=lambda miss: miss[0])[1]
    raise ConvertError(
        f"none of the model types tried ({tried}) can express this model; the closest is {nearest}"
    )


def canonical(config: GPTConfig) -> GPTConfig:
    """Return the same model with defaults filled in, so that equal models are equal records."""
    windows = tuple(config.window(i) or 0 for i in range(config.layers))
    norm_bias = config.bias if config.norm_bias is None else config.norm_bias
    scale, theta, scaling = config.attention_scale, config.local_rope_theta, config.rope_scaling
    if not any(windows) or (theta == config.rope_theta and scaling is None):
        theta = None
    if scaling is not None and scaling.high is None and scaling.kind in ("yarn", "llama3"):
        scaling = replace(scaling, high={"yarn": 32.0, "llama3": 4.0}[scaling.kind])
    return replace(
        config,
        kv_heads=config.num_kv_heads,
        hidden=config.num_hidden,
        head_size=config.head_dim,
        qkv_bias=config.bias if config.qkv_bias is None else config.qkv_bias,
        norm_bias=norm_bias if config.norm == "layer" else None,
        windows=windows if any(windows) else (),
        attention_scale=None if scale == config.head_dim**-0.5 else scale,
        local_rope_theta=theta,
        rope_scaling=scaling,
    )


# ---------------------------------------------------------------- Llama and its descendants

_SIZES = {  # our field -> theirs
    "vocab_size": "vocab_size", "seq_len": "max_position_embeddings", "layers": "num_hidden_layers",
    "width": "hidden_size", "heads": "num_attention_heads", "hidden": "intermediate_size",
}  # fmt: skip


def _expect_whole_heads(c: Mapping[str, Any]) -> None:
    """Require heads of equal width, as some families' config classes do."""
    width, heads = c["hidden_size"], c["num_attention_heads"]
    if width % heads:
        raise ConvertError(
            f"hidden_size = {width} is not divisible by num_attention_heads = {heads}"
        )


def _read_rotary(c: Mapping[str, Any], *, kv_heads: int | None = None, **more: Any) -> GPTConfig:
    """Read a decoder with rotary positions, RMSNorm and a gate. `kv_heads` is the family's default
    if the field is missing; null means as many as `heads`."""
    if "activation" not in more:
        expect(c, "hidden_act", "silu")
    theta, scaling = read_rope(c)
    usual = {"norm": "rms", "activation": "swiglu", "bias": False}
    usual["tied"] = given(c, "tie_word_embeddings", False)
    return GPTConfig(
        **{ours: c[theirs] for ours, theirs in _SIZES.items()},
        kv_heads=c.get("num_key_value_heads", kv_heads),
        head_size=c.get("head_dim"),
        positions="rope",
        norm_eps=given(c, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        **(usual | more),
    )


def _write_rotary(c: GPTConfig) -> dict[str, Any]:
    return {theirs: getattr(c, ours) for ours, theirs in _SIZES.items()} | {
        "intermediate_size": c.num_hidden,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tied,
        "rms_norm_eps": c.norm_eps,
        "rope_parameters": write_rope(c),
    }


def _read_llama(c: Mapping[str, Any]) -> GPTConfig:
    _expect_whole_heads(c)
    bias = c.get("attention_bias", False)
    expect({"mlp_bias": c.get("mlp_bias", False)}, "mlp_bias", bias)
    return _read_rotary(c, bias=bias)


def _write_llama(c: GPTConfig) -> dict[str, Any]:
    return _write_rotary(c) | {"attention_bias": c.bias, "mlp_bias": c.bias}


def _read_mistral(c: Mapping[str, Any]) -> GPTConfig:
    window = c.get("sliding_window", 4096)
    kind = "full_attention" if window is None else "sliding_attention"
    expect({"layer_types": set(c.get("layer_types") or [kind])}, "layer_types", {kind})
    return _read_rotary(c, kv_heads=8, windows=() if window is None else (window,))


def _write_mistral(c: GPTConfig) -> dict[str, Any]:
    return _write_rotary(c) | {"sliding_window": c.window(0)}


def _read_phi3(c: Mapping[str, Any]) -> GPTConfig:
    window = c.get("sliding_window")
    if read_rope(c)[1] is not None:
        raise ConvertError("RoPE scaling of phi3 models is not supported")
    c = {**c, "rms_norm_eps": given(c, "rms_norm_eps", 1e-5), "head_dim": None}
    return _read_rotary(c, windows=() if window is None else (window,))


def _write_phi3(c: GPTConfig) -> dict[str, Any]:
    fields = _write_rotary(c) | {"sliding_window": c.window(0)}
    fields["rope_parameters"]["partial_rotary_factor"] = 1.0
    fields |= {"original_max_position_embeddings": c.seq_len, "resid_pdrop": 0.0}
    return {name: value for name, value in fields.items() if name != "head_dim"}


_KINDS = ("full_attention", "sliding_attention")


def _windows_of(c: Mapping[str, Any], window: int | None, default: Callable[[int], bool]) -> tuple:
    """Return each layer's window, from ``layer_types`` or where `default` of its number is true."""
    layers = c["num_hidden_layers"]
    kinds = c.get("layer_types") or [_KINDS[default(i)] for i in range(layers)]
    if len(kinds) < layers:
        raise ConvertError(f"layer_types has {len(kinds)} entries for {layers} layers")
    for kind in kinds:
        expect({"layer_types": kind}, "layer_types", *_KINDS)
    if window is None and "sliding_attention" in kinds[:layers]:
        raise ConvertError("sliding_window = None is not supported with sliding_attention layers")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _kinds_of(c: GPTConfig) -> list[str]:
    return [_KINDS[c.window(i) is not None] for i in range(c.layers)]


def _qwen_windows(c: Mapping[str, Any]) -> tuple[int, ...]:
    first, used = c.get("max_window_layers", 28), c.get("use_sliding_window", False)
    window = c.get("sliding_window", 4096) if used else None
    return _windows_of(c, window, lambda i: window is not None and i >= first)


def _write_qwen(c: GPTConfig) -> dict[str, Any]:
    sizes, kinds = {w for w in c.windows if w}, _kinds_of(c)
    return _write_rotary(c) | {
        "use_sliding_window": bool(sizes),
        "sliding_window": min(sizes, default=None),
        "max_window_layers": kinds.index("sliding_attention") if sizes else c.layers,
        "layer_types": kinds,
    }


def _read_qwen2(c: Mapping[str, Any]) -> GPTConfig:
    return _read_rotary(c, kv_heads=32, qkv_bias=True, windows=_qwen_windows(c))


def _read_qwen3(c: Mapping[str, Any]) -> GPTConfig:
    expect(c, "attention_bias", False)
    c = {**c, "head_dim": given(c, "head_dim", 128)}
    return _read_rotary(c, kv_heads=32, qk_norm=True, windows=_qwen_windows(c))


def _read_gemma(c: Mapping[str, Any], **more: Any) -> GPTConfig:
    """Read the options that Gemma 2 and 3 share."""
    _expect_whole_heads(c)
    expect(c, "hidden_activation", "gelu_pytorch_tanh", None)
    expect(c, "attention_bias", False)
    expect(c, "use_bidirectional_attention", False, None)
    return _read_rotary(
        {**c, "head_dim": given(c, "head_dim", 256)}, kv_heads=4, norm="rms1p", activation="geglu",
        norm_place="sandwich", tied=given(c, "tie_word_embeddings", True),
        attention_scale=given(c, "query_pre_attn_scalar", 256) ** -0.5,
        embedding_scale=c["hidden_size"] ** 0.5, **more,
    )  # fmt: skip


def _write_gemma(c: GPTConfig) -> dict[str, Any]:
    scale = c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale
    return {k: v for k, v in _write_rotary(c).items() if k != "hidden_act"} | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": round(scale**-2),
        "sliding_window": max(c.windows, default=0) or 4096,
        "layer_types": _kinds_of(c),
        "attn_logit_softcapping": c.softcap,
        "final_logit_softcapping": c.logit_softcap,
    }


def _read_gemma2(c: Mapping[str, Any]) -> GPTConfig:
    return _read_gemma(
        c,
        windows=_windows_of(c, c.get("sliding_window", 4096), lambda i: i % 2 == 0),
        softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
    )


def _read_gemma3(c: Mapping[str, Any]) -> GPTConfig:
    """Read Gemma 3. Layers with windows have a separate RoPE base, ``rope_local_base_freq`` before
    transformers 5. Scores have no softcap: transformers ignores ``attn_logit_softcapping``."""
    every, both = given(c, "sliding_window_pattern", 6), c.get("rope_parameters") or {}
    if not set(both) <= {"full_attention", "sliding_attention"}:
        raise ConvertError(
            "rope_parameters must have only the keys full_attention and sliding_attention, got "
            f"{', '.join(both)}"
        )
    full, local = (both.get(kind) or {"rope_type": "default"} for kind in _KINDS)
    full = {"rope_theta": given(c, "rope_theta", 1e6)} | full | (c.get("rope_scaling") or {})
    local = {"rope_theta": given(c, "rope_local_base_freq", 1e4)} | local
    old = ("rope_scaling", "original_max_position_embeddings")
    c = {k: v for k, v in c.items() if k not in old}
    windows = _windows_of(c, c.get("sliding_window", 4096), lambda i: (i + 1) % every != 0)
    theta, scaling = read_rope(c | {"rope_parameters": local})
    if (
        any(windows)
        and scaling is not None
        and (theta, scaling) != read_rope(c | {"rope_parameters": full})
    ):
        raise ConvertError(
            "RoPE scaling of sliding_attention is supported only if full_attention has the same "
            "rope_theta and scaling"
        )
    return _read_gemma(
        c | {"rope_parameters": full},
        qk_norm=True,
        windows=windows,
        logit_softcap=c.get("final_logit_softcapping"),
        local_rope_theta=theta if scaling is None else None,
    )


def _write_gemma3(c: GPTConfig) -> dict[str, Any]:
    theta, scaling = c.rope(local=True)
    local = write_rope(replace(c, rope_theta=theta, rope_scaling=scaling))
    fields = _write_gemma(c)
    rope = {"full_attention": fields["rope_parameters"], "sliding_attention": local}
    return fields | {"rope_parameters": rope}


def _read_olmo2(c: Mapping[str, Any]) -> GPTConfig:
    expect(c, "attention_bias", False)
    c = {**c, "rms_norm_eps": given(c, "rms_norm_eps", 1e-5)}
    return _read_rotary(c, norm_place="post", qk_norm=True, qk_norm_whole=True)


_ROTARY = {
    "embedding": ("model.embed_tokens",),
    "final_norm": ("model.norm",),
    "head": ("lm_head",),
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_ROTARY_NAMES = {
    "modules": _ROTARY, "blocks": "model.layers.{}.", "base": "model.",
    "unused": (".rotary_emb.inv_freq",),
}  # fmt: skip
_POST_NORMS = {
    "attention_post_norm": ("post_attention_layernorm",),
    "mlp_norm": ("pre_feedforward_layernorm",),
    "mlp_post_norm": ("post_feedforward_layernorm",),
}
_POST_NORM_NAMES = {**_ROTARY_NAMES, "modules": _ROTARY | _POST_NORMS}
_PHI3_MODULES = {"attention.qkv": ("self_attn.qkv_proj",), "mlp.up": ("mlp.gate_up_proj",)}
_PHI3_NAMES = {**_ROTARY_NAMES, "modules": _ROTARY | _PHI3_MODULES}

# ---------------------------------------------------------------- GPT-2

_GPT2_GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_erf"}
_GPT2_SIZES = {
    "vocab_size": "vocab_size", "seq_len": "n_positions", "layers": "n_layer", "width": "n_embd",
    "heads": "n_head",
}  # fmt: skip
# The other families' names take precedence over GPT-2's own.
_GPT2_ALIASES = {_SIZES[ours]: own for ours, own in _GPT2_SIZES.items() if ours != "vocab_size"}


def _read_gpt2(c: Mapping[str, Any]) -> GPTConfig:
    c = {**c, **{own: c[alias] for alias, own in _GPT2_ALIASES.items() if alias in c}}
    expect(c, "scale_attn_weights", True)
    expect(c, "scale_attn_by_inverse_layer_idx", False)
    expect(c, "add_cross_attention", False)
    return GPTConfig(
        **{ours: c[theirs] for ours, theirs in _GPT2_SIZES.items()},
        hidden=c.get("n_inner"),
        activation=_GPT2_GELU[expect(c, "activation_function", *_GPT2_GELU)],
        tied=given(c, "tie_word_embeddings", True),
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
    )


def _write_gpt2(c: GPTConfig) -> dict[str, Any]:
    return {theirs: getattr(c, ours) for ours, theirs in _GPT2_SIZES.items()} | {
        "n_inner": c.num_hidden,
        "activation_function": "gelu" if c.activation == "gelu_erf" else "gelu_new",
        "tie_word_embeddings": c.tied,
        "layer_norm_epsilon": c.norm_eps,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


_GPT2 = {
    "embedding": ("transformer.wte",),
    "positions": ("transformer.wpe",),
    "final_norm": ("transformer.ln_f",),
    "head": ("lm_head",),
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.out": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_GPT2_NAMES = {
    "modules": _GPT2, "blocks": "transformer.h.{}.", "base": "transformer.",
    "transposed": ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
    "unused": (".attn.bias", ".attn.masked_bias"),
}  # fmt: skip

# ---------------------------------------------------------------- all families

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", _read_gpt2, _write_gpt2, **_GPT2_NAMES),
    "llama": Family("LlamaForCausalLM", _read_llama, _write_llama, **_ROTARY_NAMES),
    "mistral": Family("MistralForCausalLM", _read_mistral, _write_mistral, **_ROTARY_NAMES),
    "qwen2": Family("Qwen2ForCausalLM", _read_qwen2, _write_qwen, **_ROTARY_NAMES),
    "qwen3": Family("Qwen3ForCausalLM", _read_qwen3, _write_qwen, **_ROTARY_NAMES),
    "phi3": Family("Phi3ForCausalLM", _read_phi3, _write_phi3, **_PHI3_NAMES),
    "gemma2": Family("Gemma2ForCausalLM", _read_gemma2, _write_gemma, **_POST_NORM_NAMES),
    "gemma3_text": Family("Gemma3ForCausalLM", _read_gemma3, _write_gemma3, **_POST_NORM_NAMES),
    "olmo2": Family("Olmo2ForCausalLM", _read_olmo2, _write_rotary, **_POST_NORM_NAMES),
}
