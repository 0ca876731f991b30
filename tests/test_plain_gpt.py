"""The plain model compared with transformers' GPT-2 and Llama, torch's
AdamW, and philox vectors."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from close import assert_close_f64, relative_error
from einops import rearrange

from warpweave.model import plain as plain_gpt
from warpweave.model.plain import (
    PlainConfig,
    philox4x32,
    plain_adamw_step,
    plain_gpt_logits,
    plain_gpt_loss,
    plain_init,
    plain_shapes,
)

GPT2 = PlainConfig(
    vocab_size=53, seq_len=19, layers=2, width=24, heads=3, kv_heads=3, hidden=40, norm_eps=1e-5
)
LLAMA = PlainConfig(
    vocab_size=47, seq_len=17, layers=2, width=48, heads=6, kv_heads=2, hidden=37, positions="rope",
    norm="rms", activation="swiglu", bias=False, tied=False, norm_eps=1e-6, rope_theta=500.0,
)  # fmt: skip


def _batch(config: PlainConfig, B: int = 3, S: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(config.vocab_size, (B, S))
    labels = torch.randint(config.vocab_size, (B, S))
    labels[0, 3:7] = -100
    labels[1] = -100
    return tokens, labels


def _random(config: PlainConfig, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Draw parameters, none at its initial value, so that a bias in the wrong place shows."""
    return {
        name: torch.randn(shape, dtype=dtype) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0)
        for name, shape in plain_shapes(config).items()
    }


def _gradients(loss: torch.Tensor, params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(zip(params, torch.autograd.grad(loss, list(params.values()))))


# ------------------------------------------------------------------- against transformers


def _from_gpt2(state: dict[str, torch.Tensor], config: PlainConfig) -> dict[str, torch.Tensor]:
    """Convert from transformers, which keeps (in, out) matrices and q, k, v
    as three blocks of columns."""

    def qkv(x: torch.Tensor) -> torch.Tensor:  # (..., 3E) -> (3E, ...)
        x = x.T if x.ndim == 2 else x
        return rearrange(x, "(qkv h d) ... -> (h qkv d) ...", qkv=3, h=config.heads)

    out = {
        "embedding.weight": state["transformer.wte.weight"],
        "positions.weight": state["transformer.wpe.weight"],
    }
    for i in range(config.layers):
        h = f"transformer.h.{i}"
        for kind in ("weight", "bias"):
            out[f"blocks.{i}.attention_norm.{kind}"] = state[f"{h}.ln_1.{kind}"]
            out[f"blocks.{i}.attention.qkv.{kind}"] = qkv(state[f"{h}.attn.c_attn.{kind}"])
            out[f"blocks.{i}.mlp_norm.{kind}"] = state[f"{h}.ln_2.{kind}"]
            for ours, theirs in (
                ("attention.out", "attn.c_proj"),
                ("mlp.up", "mlp.c_fc"),
                ("mlp.down", "mlp.c_proj"),
            ):
                x = state[f"{h}.{theirs}.{kind}"]
                out[f"blocks.{i}.{ours}.{kind}"] = x.T if x.ndim == 2 else x
    for kind in ("weight", "bias"):
        out[f"final_norm.{kind}"] = state[f"transformer.ln_f.{kind}"]
    return out


def _from_llama(state: dict[str, torch.Tensor], config: PlainConfig) -> dict[str, torch.Tensor]:
    G, D, E = config.heads // config.kv_heads, config.head_dim, config.width
    out = {
        "embedding.weight": state["model.embed_tokens.weight"],
        "final_norm.weight": state["model.norm.weight"],
        "head.weight": state["lm_head.weight"],
    }
    for i in range(config.layers):
        h = f"model.layers.{i}"
        q, k, v = (
            state[f"{h}.self_attn.{p}_proj.weight"].view(config.kv_heads, -1, D, E) for p in "qkv"
        )
        assert q.shape[1] == G
        gate, up = (state[f"{h}.mlp.{p}_proj.weight"] for p in ("gate", "up"))
        out |= {
            f"blocks.{i}.attention_norm.weight": state[f"{h}.input_layernorm.weight"],
            f"blocks.{i}.attention.qkv.weight": torch.cat([q, k, v], 1).reshape(-1, E),
            f"blocks.{i}.attention.out.weight": state[f"{h}.self_attn.o_proj.weight"],
            f"blocks.{i}.mlp_norm.weight": state[f"{h}.post_attention_layernorm.weight"],
            f"blocks.{i}.mlp.up.weight": torch.stack([gate, up], 1).reshape(-1, E),
            f"blocks.{i}.mlp.down.weight": state[f"{h}.mlp.down_proj.weight"],
        }
    return out


def _hugging_face(style: str) -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if style == "gpt2":
        c = GPT2
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=c.vocab_size, n_positions=c.seq_len, n_embd=c.width, n_layer=c.layers,
                n_head=c.heads, n_inner=c.hidden, attn_implementation="eager", bos_token_id=0,
                eos_token_id=0,
            )
        )  # fmt: skip
    else:
        c = LLAMA
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=c.vocab_size,
                max_position_embeddings=c.seq_len,
                hidden_size=c.width,
                intermediate_size=c.hidden,
                num_hidden_layers=c.layers,
                num_attention_heads=c.heads,
                num_key_value_heads=c.kv_heads,
                rms_norm_eps=c.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
                attn_implementation="eager",
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    model = model.double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.3)
    return model


def _compare(style: str, config: PlainConfig) -> tuple[float, float]:
    """Return the relative errors of the logits and of the worst gradient against transformers."""
    model = _hugging_face(style)
    convert = _from_gpt2 if style == "gpt2" else _from_llama
    theirs = dict(model.named_parameters())
    params = {k: v.detach().clone().requires_grad_() for k, v in convert(theirs, config).items()}
    assert {k: tuple(v.shape) for k, v in params.items()} == plain_shapes(config)
    tokens, labels = _batch(config)

    logits = model(tokens).logits
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    loss, valid = plain_gpt_loss(params, tokens, labels, config)
    assert valid == int((labels != -100).sum()) == 22
    gradients = _gradients(loss, params)
    true_gradients = convert({k: p.grad for k, p in theirs.items()}, config)
    worst = max(relative_error(gradients[k], true_gradients[k]) for k in params)
    outputs = plain_gpt_logits(params, tokens, config)
    return max(relative_error(outputs, logits), relative_error(loss, expected)), worst


# transformers rounds Llama's rotary table and its RMS norm to float32, so its error is float32's.
@pytest.mark.parametrize(("style", "rtol"), [("gpt2", 1e-12), ("llama", 2e-6)])
def test_logits_loss_and_every_gradient_equal_those_of_transformers(style, rtol):
    config = GPT2 if style == "gpt2" else LLAMA
    logits, gradient = _compare(style, config)
    assert logits <= rtol
    assert gradient <= 10 * rtol


@pytest.mark.parametrize(
    ("style", "fault"),
    [("gpt2", {"norm_eps": 1e-3}), ("llama", {"rope_theta": 499.0}), ("llama", {"norm_eps": 1e-4})],
)
def test_a_slightly_different_style_is_seen(style, fault):
    config = dataclasses.replace(GPT2 if style == "gpt2" else LLAMA, **fault)
    logits, gradient = _compare(style, config)
    assert logits > 1e-5
    assert gradient > 1e-5


# ------------------------------------------------------------------- against torch's own functions


def _by_torch(params: dict[str, torch.Tensor], tokens: torch.Tensor, config: PlainConfig):
    """Compute the logits of GPT-2 with a squared ReLU, with torch's functions for its layers."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, params[f"{name}.weight"], params.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = params[f"{name}.weight"], params.get(f"{name}.bias")
        return F.layer_norm(x, (config.width,), weight, bias, config.norm_eps)

    x = F.embedding(tokens, params["embedding.weight"])
    x = x + params["positions.weight"][: tokens.shape[1]]
    for i in range(config.layers):
        block = f"blocks.{i}"
        qkv = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv")
        q, k, v = rearrange(qkv, "b s (h qkv d) -> qkv b h s d", qkv=3, h=config.heads)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(rearrange(o, "b h s d -> b s (h d)"), f"{block}.attention.out")
        h = F.relu(linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.up")).square()
        x = x + linear(h, f"{block}.mlp.down")
    return F.linear(norm(x, "final_norm"), params["embedding.weight"])


@pytest.mark.parametrize("norm_bias", [None, False])
def test_squared_relu_and_layer_norm_without_bias_equal_torch(norm_bias):
    config = dataclasses.replace(GPT2, activation="relu2", norm_bias=norm_bias)
    assert ("final_norm.bias" in plain_shapes(config)) == (norm_bias is None)
    params = {name: p.requires_grad_() for name, p in _random(config).items()}
    tokens, _ = _batch(config)
    other = dataclasses.replace(config, activation="gelu")
    for logits, least, most in (
        (plain_gpt_logits(params, tokens, config), 0.0, 1e-12),
        (plain_gpt_logits(params, tokens, other), 1e-2, math.inf),
    ):
        truth = _by_torch(params, tokens, config)
        grads = [_gradients(y.square().sum(), params) for y in (logits, truth)]
        errors = [relative_error(grads[0][name], grads[1][name]) for name in params]
        assert least <= relative_error(logits, truth) <= most
        assert least <= max(errors) <= most


@pytest.mark.parametrize("kind", [None, "linear", "llama3", "yarn"])
def test_every_pair_turns_as_in_transformers_under_every_scaling(kind):
    """Covers bases and lengths at which a ramp begins before the first
    pair, or ends after the last."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for half, theta, length, more in itertools.product(
        (1, 4, 9), (2.0, 500.0, 1e6), (3, 64, 100_000), RAMPS.get(kind, ({},))
    ):
        ours = {"kind": kind, "factor": 4.0, "original_length": length, "low": 1.0, "high": None,
                "attention_factor": None, "truncate": True} | more  # fmt: skip
        found, multiplier = plain_gpt._frequencies(half, theta, kind and ours)
        if kind is None:
            expected, factor = [1 / theta ** (i / half) for i in range(half)], 1.0
        else:
            named = {k: v for k, v in ours.items() if v is not None}
            if kind == "llama3":
                named.setdefault("high", 4.0)  # it has no default there
            fields = {"rope_type": kind, "rope_theta": theta, "factor": 4.0}
            fields |= {t: named[k] for k, t in THEIRS.get(kind, {}).items() if k in named}
            config = LlamaConfig(
                head_dim=2 * half, max_position_embeddings=4 * length, rope_parameters=fields
            )
            expected, factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        assert found == pytest.approx(list(map(float, expected)), rel=1e-5), (half, theta, ours)
        assert multiplier == pytest.approx(factor), ours


RAMPS = {
    "llama3": ({}, {"low": 0.5, "high": 2.0}),
    "yarn": ({}, {"truncate": False}, {"low": 0.5, "high": 3.0, "attention_factor": 0.7}),
}
THEIRS = {
    "llama3": {"original_length": "original_max_position_embeddings", "low": "low_freq_factor",
               "high": "high_freq_factor"},
    "yarn": {"original_length": "original_max_position_embeddings", "low": "beta_slow",
             "high": "beta_fast", "truncate": "truncate", "attention_factor": "attention_factor"},
}  # fmt: skip


# ------------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers from Random123, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)  # fmt: skip
def test_philox_gives_the_published_vectors(counter, key, expected):
    words = philox4x32(np.array(counter, dtype=np.uint64), key)
    assert tuple(int(w) for w in words) == expected


def test_dropout_keeps_by_the_word_of_its_global_index():
    p, seed, site = 0.3, (7 << 32) + 5, 4
    token = (3 << 32) + 11  # past 32 bits: the second counter word matters
    x = torch.ones(1, 1, 10, dtype=torch.float64)
    y = plain_gpt._dropout(x, p, seed, site, torch.tensor([[token]]))
    for e in range(10):
        word = philox4x32(np.array([11, 3, e // 4, site], dtype=np.uint64), (5, 7))[e % 4]
        assert y[0, 0, e] == (1 / 0.7 if int(word) >= round(p * 2**32) else 0.0)


def test_dropout_drops_the_asked_share_and_keeps_the_mean():
    x = torch.ones(4, 50, 100, dtype=torch.float64)
    y = plain_gpt._dropout(x, 0.25, 1, 0, torch.arange(200).view(4, 50))
    assert abs((y == 0).double().mean() - 0.25) < 0.02  # 6 standard deviations
    assert abs(y.mean() - 1) < 0.03


def test_dropout_is_a_function_of_sample_ids_not_of_the_batch():
    config = dataclasses.replace(GPT2, dropout=0.4)
    params = _random(config)
    tokens, labels = _batch(config)
    ids = torch.tensor([5, 2, 9])
    loss, _ = plain_gpt_loss(params, tokens, labels, config, seed=1, sample_ids=ids)
    order = torch.tensor([2, 0, 1])
    given = tokens[order], labels[order]
    moved, _ = plain_gpt_loss(params, *given, config, seed=1, sample_ids=ids[order])
    assert_close_f64(moved, loss, 1e-13)
    others = [
        plain_gpt_loss(params, tokens, labels, config, seed=1)[0],
        plain_gpt_loss(params, tokens, labels, config, seed=2, sample_ids=ids)[0],
        plain_gpt_loss(params, tokens, labels, config, dropout=0.0, sample_ids=ids)[0],
    ]
    assert all(relative_error(other, loss) > 1e-3 for other in others)


# ------------------------------------------------------------------- optimizer and initialization


def test_adamw_with_clipping_equals_torch_over_steps():
    config = GPT2
    params = _random(config)
    twins = {k: v.clone().requires_grad_(True) for k, v in params.items()}
    groups = [
        {"params": [p for p in twins.values() if (p.ndim >= 2) == (decay > 0)],
         "weight_decay": decay} for decay in (0.2, 0.0)
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6)
    state: dict[str, dict[str, torch.Tensor]] = {}
    for step in range(1, 5):
        grads = {k: torch.randn_like(v) for k, v in params.items()}
        for k, twin in twins.items():
            twin.grad = grads[k].clone()
        expected = torch.nn.utils.clip_grad_norm_(list(twins.values()), 2.5)
        optimizer.step()
        norm = plain_adamw_step(
            params, grads, state, step, lr=0.01, beta1=0.8, beta2=0.9, eps=1e-6,
            weight_decay=0.2, clip=2.5,
        )  # fmt: skip
        assert_close_f64(norm, expected, 1e-13)
    for k in params:
        assert_close_f64(params[k], twins[k], 1e-12)


def test_initial_parameters_depend_on_seed_and_name_alone():
    params = plain_init(LLAMA, seed=3)
    deeper = plain_init(dataclasses.replace(LLAMA, kv_heads=3, layers=3), seed=3)
    other = plain_init(LLAMA, seed=4)
    name = "blocks.1.mlp.up.weight"
    assert torch.equal(params[name], deeper[name])
    assert not torch.equal(params[name], other[name])
    assert not torch.equal(params[name], params["blocks.0.mlp.up.weight"])
    double = plain_init(LLAMA, seed=3, dtype=torch.float64)
    assert all(torch.equal(double[k], params[k].double()) for k in params)


def test_initial_parameters_have_their_standard_deviation():
    params = plain_init(dataclasses.replace(GPT2, width=96, layers=8), seed=0)
    assert list(params) == list(plain_shapes(dataclasses.replace(GPT2, width=96, layers=8)))
    assert abs(params["blocks.2.attention.qkv.weight"].std() - 0.02) < 0.0005
    assert abs(params["blocks.2.attention.out.weight"].std() - 0.005) < 0.0002
    assert params["blocks.2.mlp_norm.weight"].unique().tolist() == [1.0]
    assert params["blocks.2.mlp.down.bias"].unique().tolist() == [0.0]
    flat = plain_init(dataclasses.replace(LLAMA, norm="rms1p", sinks=True), seed=0)
    assert {v.sum().item() for n, v in flat.items() if v.ndim == 1} == {0.0}


class _Reads(dict):
    """Parameters that record the order in which they are first read."""

    def __getitem__(self, name):
        self.__dict__.setdefault("order", {})[name] = None
        return super().__getitem__(name)


def test_names_come_in_the_order_in_which_the_model_reads_them():
    every = {"qk_norm": True, "sinks": True, "norm_place": "sandwich", "tied": False}
    for config in (GPT2, LLAMA, *(dataclasses.replace(c, **every) for c in (GPT2, LLAMA))):
        params = _Reads(_random(config))
        plain_gpt_logits(params, torch.zeros(1, 3, dtype=torch.int64), config)
        assert list(params.order) == list(params) == list(plain_shapes(config))


def test_what_is_not_said_of_a_model_is_as_in_gpt2():
    sizes = {"vocab_size": 7, "seq_len": 5, "layers": 2, "width": 8, "heads": 4, "kv_heads": 4,
             "hidden": 9}  # fmt: skip
    said = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True,
            "tied": True, "norm_eps": 1e-5, "rope_theta": 10000.0, "dropout": 0.0,
            "norm_place": "pre", "windows": ()}  # fmt: skip
    off = {"qk_norm": False, "qk_norm_whole": False, "sinks": False}
    assert dataclasses.asdict(PlainConfig(**sizes)) == sizes | said | off | dict.fromkeys(
        ("head_size", "qkv_bias", "norm_bias", "attention_scale", "softcap", "logit_softcap",
         "embedding_scale", "local_rope_theta", "rope_scaling")
    )  # fmt: skip


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="20 > 19"):
        plain_gpt_logits(_random(GPT2), torch.zeros(1, 20, dtype=torch.int64), GPT2)
