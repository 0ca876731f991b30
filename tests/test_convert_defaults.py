"""Fields missing from a config.json have the defaults of transformers, singly and several at once,
when reading and writing. Every field that is read is omitted from every family, and set to null."""

from __future__ import annotations

import ast
import copy
import random
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
import torch
from close import relative_error

from warpweave.convert import families
from warpweave.convert import fields as shared
from warpweave.convert.families import FAMILIES, canonical, read_config, write_config
from warpweave.convert.fields import ConvertError
from warpweave.convert.folder import fill
from warpweave.convert.tensors import rules_of
from warpweave.kernels.rope import RopeScaling
from warpweave.model.config import GPTConfig
from warpweave.model.gpt import GPT

transformers = pytest.importorskip("transformers", reason="an extra of its own")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OTHER_YARN = {"type": "yarn", "factor": 2, "mscale": 0.7, "mscale_all_dim": 1.0, "beta_slow": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LINEAR = {"type": "linear", "factor": 2.0, "rope_theta": 50.0}
RAW_YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 20.0, "attention_factor": 1.5,
    "truncate": False, "rope_theta": 100.0,
}  # fmt: skip
SIZES = {
    "vocab_size": 53, "max_position_embeddings": 64, "num_hidden_layers": 3, "hidden_size": 24,
    "num_attention_heads": 4, "intermediate_size": 20, "pad_token_id": None, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip
EIGHT = SIZES | {"num_attention_heads": 8, "hidden_size": 48}  # as many as key heads by default
MANY = SIZES | {"num_attention_heads": 32, "hidden_size": 128}
FULL, SLIDING = "full_attention", "sliding_attention"
ROTARY = {
    "num_key_value_heads": (2, None), "rms_norm_eps": (1e-3,), "rope_theta": (77.0,),
    "tie_word_embeddings": (True, False), "hidden_act": ("silu",),
    "rope_parameters": (None, YARN, LLAMA3, {"rope_theta": 30.0}),
    "rope_scaling": (None, LINEAR, OTHER_YARN, RAW_YARN),
    "original_max_position_embeddings": (32,), "partial_rotary_factor": (1.0, 0.5),
}  # fmt: skip
WINDOWS = {
    "use_sliding_window": (True, False), "sliding_window": (5, None), "max_window_layers": (1,),
    "layer_types": (None, [SLIDING, FULL, SLIDING], [FULL] * 3),
}  # fmt: skip
GEMMA = {
    **{k: v for k, v in ROTARY.items() if k != "hidden_act"},
    "head_dim": (16,), "hidden_activation": ("gelu_pytorch_tanh",), "query_pre_attn_scalar": (20,),
    "attention_bias": (False, True), "use_bidirectional_attention": (None, False),
    "sliding_window": (5, 6), "layer_types": (None, [SLIDING, FULL, SLIDING], [FULL] * 3),
    "attn_logit_softcapping": (2.0, None), "final_logit_softcapping": (3.0, None),
}  # fmt: skip
# The sizes of each family, which no file omits, and its optional fields.
OPEN: dict[str, tuple[dict, dict]] = {
    "gpt2": (
        {"vocab_size": 53, "n_positions": 64, "n_layer": 3, "n_embd": 24, "n_head": 4},
        {
            "n_inner": (40, None), "activation_function": ("gelu", "gelu_pytorch_tanh", "relu"),
            "tie_word_embeddings": (False, True), "layer_norm_epsilon": (1e-3,),
            "num_attention_heads": (2,), "scale_attn_weights": (True, False),
            "scale_attn_by_inverse_layer_idx": (False, True), "add_cross_attention": (False,),
            "num_hidden_layers": (2,), "hidden_size": (32,), "max_position_embeddings": (48,),
        },
    ),
    "llama": (
        SIZES,
        ROTARY | {"attention_bias": (True, False), "mlp_bias": (True, False),
                  "head_dim": (10, None)},
    ),
    "mistral": (EIGHT, ROTARY | {"sliding_window": (5, None), "head_dim": (10, None)}),
    "qwen2": (MANY, ROTARY | WINDOWS),
    "qwen3": (MANY, ROTARY | WINDOWS | {"head_dim": (10,), "attention_bias": (False, True)}),
    "phi3": (SIZES, ROTARY | {"sliding_window": (5, None)}),
    "gemma2": (SIZES, GEMMA),
    "gemma3_text": (
        SIZES,
        GEMMA | {
            "rope_local_base_freq": (40.0,), "sliding_window_pattern": (2,),
            # transformers 5.23 looks for YaRN's `truncate` next to the kinds of layers, not in them
            "rope_scaling": (None, LINEAR, OTHER_YARN, RAW_YARN | {"truncate": True}),
            "rope_parameters": (None, {FULL: LLAMA3, SLIDING: {"rope_theta": 30.0}},
                                {FULL: {"rope_theta": 20.0}, SLIDING: None}),
        },
    ),
    "olmo2": (SIZES, ROTARY | {"attention_bias": (False, True)}),
}  # fmt: skip
# Configs that were once written as a model that transformers rejects, or not written at all.
ODD = {
    "mistral": (
        EIGHT | {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 8,
                 "sliding_window": None},
    ),
    "gemma3_text": (
        SIZES | {"layer_types": [FULL] * 3, "rope_parameters": {
            FULL: LLAMA3 | {"rope_theta": 90.0}, SLIDING: {"rope_theta": 30.0}}},
        SIZES | {"layer_types": [SLIDING, FULL, SLIDING],
                 "rope_parameters": dict.fromkeys((FULL, SLIDING), YARN | {"rope_theta": 90.0})},
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("kind", OPEN)


def _names() -> set[str]:
    """Return the fields that `families` and `fields` read, from their sources."""
    found: set[str] = set()
    trees = [ast.parse(Path(module.__file__).read_text()) for module in (families, shared)]
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.Subscript):
            found |= _words([node.slice])
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called.endswith(".get"):
                found |= _words(node.args[:1])
            elif called in ("given", "expect"):
                found |= _words(node.args[1:2])
    return found | {*families._SIZES.values(), *families._GPT2_SIZES.values()}


def _words(nodes: list[ast.expr]) -> set[str]:
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def _theirs(kind: str, fields: dict):
    """Return transformers' own record of a config.json, or None if it rejects it."""
    rest = {k: v for k, v in copy.deepcopy(fields).items() if k != "model_type"}
    try:
        config = transformers.AutoConfig.for_model(kind, **rest)
        config.validate_rope() if getattr(config, "rope_parameters", None) else None
    except Exception:
        return None
    return config


def _said(kind: str, fields: dict):
    """Return our model of a config.json, or None if we reject it."""
    try:
        return read_config({**fields, "model_type": kind})[1]
    except ConvertError:
        return None


def _both(kind: str, fields: dict) -> tuple:
    """Return (ours, theirs) of a config.json and assert that they are the same model; None if one
    rejects it."""
    ours, theirs = _said(kind, fields), _theirs(kind, fields)
    if ours is not None and theirs is not None:
        assert ours == _said(kind, theirs.to_dict()), fields
    return ours, theirs


def _drawn(kind: str, seed: int) -> dict:
    """Draw some of the open fields, each with one of its values."""
    draw = random.Random(seed)
    sizes, more = OPEN[kind]
    few = draw.sample(sorted(more), draw.randint(2, 5))
    return sizes | {name: draw.choice(more[name]) for name in few}


@EACH
def test_a_field_that_is_missing_or_null_is_what_transformers_takes_it_for(kind):
    sizes, more = OPEN[kind]
    bare, theirs = _both(kind, sizes)
    assert bare is not None
    assert theirs is not None
    explicit = theirs.to_dict()
    del explicit["transformers_version"]  # transformers then omits no field
    for name in _names() & set(explicit):
        without = {k: v for k, v in explicit.items() if k != name}
        ours, _ = _both(kind, without)
        assert (ours is None) == (name in sizes), name  # sizes have no defaults
        _both(kind, explicit | {name: None})
        _both(kind, sizes | {name: None})
    for name, values in more.items():
        for value in values:
            _both(kind, sizes | {name: value})


@EACH
def test_several_fields_at_once_are_the_model_of_transformers_there_and_back(kind):
    read = 0
    for fields in (*ODD.get(kind, ()), *(_drawn(kind, seed) for seed in range(24))):
        ours, theirs = _both(kind, fields)
        if ours is None or theirs is None:
            continue
        read += 1
        for family in (kind, None):
            name, written = write_config(ours, family)
            back = _theirs(name, written)
            assert back is not None, (fields, written)  # transformers accepts our files
            assert _said(name, back.to_dict()) == ours, (fields, written)
    assert read > 6


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_windows_are_those_of_the_number_of_layers_without_one_too(kind):
    """Older versions of transformers, which do not know layer_types, read that number."""
    layers = {"layer_types": [FULL, SLIDING, SLIDING], "use_sliding_window": True}
    ours = _said(kind, MANY | layers | {"sliding_window": 5})
    _, written = write_config(ours, kind)
    assert _said(kind, {k: v for k, v in written.items() if k != "layer_types"}) == ours
    for kinds, first in (([FULL, SLIDING, FULL], 1), ([SLIDING, FULL, FULL], 0), ([FULL] * 3, 3)):
        ours = _said(kind, MANY | layers | {"layer_types": kinds, "sliding_window": 5})
        written = write_config(ours, kind)[1]
        assert (written["max_window_layers"], written["layer_types"]) == (first, kinds)
        assert written["use_sliding_window"] == (first < 3)


def _computed(config) -> dict:
    """Compute the output of a model from its record, with defaults for missing fields."""
    windows = [config.window(i) for i in range(config.layers)]
    bias = config.bias if config.qkv_bias is None else config.qkv_bias
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return {
        "sizes": (config.num_kv_heads, config.num_hidden, config.head_dim), "windows": windows,
        "bias": (config.bias, bias), "scale": scale, "rope": config.rope(local=False),
        "local": config.rope(local=True) if any(windows) else None,
    }  # fmt: skip


@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 4.0)])
@pytest.mark.parametrize("local", [None, 50.0, 90.0])
@pytest.mark.parametrize("windows", [(), (0,), (5,), (5, 0), (0, 0, 5)])
def test_with_every_default_written_out_it_is_the_same_model(windows, local, scaling):
    for more in (
        {}, {"kv_heads": 2, "hidden": 40, "head_size": 10}, {"bias": False, "qkv_bias": True},
        {"attention_scale": 0.3}, {"attention_scale": 8**-0.5}, {"bias": False},
    ):  # fmt: skip
        config = GPTConfig(
            53, 64, 3, 32, 4, positions="rope", windows=windows, rope_theta=90.0,
            local_rope_theta=local, rope_scaling=scaling, **more,
        )  # fmt: skip
        written = canonical(config)
        assert _computed(written) == _computed(config)
        assert canonical(written) == written
        assert None not in (written.kv_heads, written.hidden, written.head_size, written.qkv_bias)


def _packed(rules: dict, state: dict, record) -> torch.Tensor:
    return rules[record.name].pack(state.__getitem__)


def _with_every_value(kind: str) -> Iterator[tuple]:
    """Return pairs of records, ours and transformers', that cover each value of each field,
    together with other values if that is a valid model."""
    sizes, more = OPEN[kind]
    left = {(name, i) for name, values in more.items() for i in range(len(values))}
    yield _both(kind, sizes)
    alone = [{key} for key in sorted(left)]
    draw = random.Random(0)
    for keys in (*({(n, draw.randrange(len(more[n]))) for n in more} for _ in range(60)), *alone):
        both = _both(kind, sizes | {name: more[name][i] for name, i in keys})
        if left & keys and None not in both:
            left -= keys
            yield both


@EACH
def test_a_model_of_any_value_of_any_field_has_transformers_logits(kind):
    tokens = torch.randint(53, (1, 19), generator=torch.Generator().manual_seed(3))
    for ours, theirs in _with_every_value(kind):
        torch.manual_seed(0)
        auto = transformers.AutoModelForCausalLM
        model = auto.from_config(theirs, attn_implementation="eager").eval()
        with torch.no_grad():
            for name, param in model.named_parameters():
                scale = 0.01 if "emb" in name or "wte" in name else 0.2
                param.copy_(torch.randn_like(param) * scale)
            state, rules = model.state_dict(), rules_of(ours, FAMILIES[kind])
            gpt = fill(GPT(ours), partial(_packed, rules, state))
            assert relative_error(gpt(tokens), model(tokens).logits) < 1e-4, ours
