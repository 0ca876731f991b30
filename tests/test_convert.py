"""Checkpoints of transformers: equal numbers in our GPT, equal bits when written back, and
unreadable folders are rejected by name."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import re
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from close import assert_same_bits, relative_error
from refused import one_line
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from threads import run_threads

from warpweave.checkpoint import CheckpointError, save_checkpoint
from warpweave.convert import ConvertError, from_hf, to_hf
from warpweave.convert.families import FAMILIES, canonical, read_config, write_config
from warpweave.convert.fields import read_json
from warpweave.convert.write import _config_json
from warpweave.kernels.rope import RopeScaling
from warpweave.model.config import PRESETS, GPTConfig, ParallelPlan
from warpweave.model.engine import Engine
from warpweave.model.gpt import GPT
from warpweave.parallel.mesh import Mesh

SIZES = {
    "vocab_size": 53, "max_position_embeddings": 64, "num_hidden_layers": 3, "hidden_size": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 44,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0,
}  # fmt: skip
GPT2 = {
    "vocab_size": 53, "n_positions": 64, "n_layer": 3, "n_embd": 32, "n_head": 4,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip
GEMMA = SIZES | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 20}
MODELS = {
    "gpt2": ("GPT2", GPT2),
    "gpt2-erf-untied": (
        "GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 40, "tie_word_embeddings": False}
    ),
    "llama2": ("Llama", SIZES),
    "llama3": ("Llama", SIZES | {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biased": ("Llama", SIZES | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("Mistral", SIZES | {"sliding_window": 5, "head_dim": 10}),
    "mistral-whole": ("Mistral", SIZES | {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": (
        "Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
    ),
    "qwen3": ("Qwen3", SIZES | {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", GEMMA | {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "tie_word_embeddings": False,
    }),
    "olmo2": ("Olmo2", SIZES),
    "phi3": ("Phi3", SIZES | {"sliding_window": 7, "resid_pdrop": 0.0}),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", MODELS)


def _theirs(name: str, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Return a random transformers model in which no parameter has its initial value."""
    import transformers  # not on every rank

    family, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**options)
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager", dtype=dtype)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Save one folder of each kind, with a tokenizer next to the weights."""
    root = tmp_path_factory.mktemp("hf")
    for name in MODELS:
        _theirs(name).save_pretrained(root / name)
        (root / name / "tokenizer.json").write_text("{}")
        (root / name / "tokenizer_config.json").write_text('{"a": 1}')
    return {name: root / name for name in MODELS}


def _batch(length: int = 19) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(53, (2, length), generator=torch.Generator().manual_seed(3))
    labels = tokens.roll(-1, 1)
    labels[:, -1] = -100
    return tokens, labels


def _same_files(one: Path, other: Path) -> None:
    """Assert that all tensors of two folders are bitwise equal, under equal names."""
    a, b = (
        [(k, v) for file in folder.glob("*.safetensors") for k, v in load_file(file).items()]
        for folder in (one, other)
    )
    assert sorted(k for k, _ in a) == sorted(k for k, _ in b)  # each once
    a, b = dict(a), dict(b)
    assert all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------- the same model


@EACH
def test_logits_and_gradients_are_those_of_transformers(name, folders, tmp_path):
    theirs = _theirs(name)
    found = from_hf(folders[name])
    gpt = found.load(GPT(found.config))
    tokens, labels = _batch()
    assert relative_error(gpt(tokens), theirs(tokens).logits) < 1e-5
    theirs(tokens, labels=tokens).loss.backward()  # transformers shifts the labels itself
    gpt(tokens, labels).backward()
    with torch.no_grad():
        for param in gpt.parameters():
            param.copy_(param.grad)
    ours = load_file(to_hf(gpt, tmp_path / "grads", like=folders[name]) / "model.safetensors")
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    assert set(ours) == set(expected)
    for n, grad in expected.items():
        assert relative_error(ours[n], grad) < 1e-4, n


@pytest.mark.parametrize("name", ["gpt2", "gpt2-erf-untied"])
def test_in_float64_the_logits_are_equal_to_rounding(name, tmp_path):
    theirs = _theirs(name, torch.float64)
    theirs.save_pretrained(tmp_path / "saved")
    found = from_hf(tmp_path / "saved")
    assert found.dtype == torch.float64
    gpt = found.load(GPT(found.config, dtype=torch.float64))
    tokens, _ = _batch()
    assert relative_error(gpt(tokens), theirs(tokens).logits) < 1e-11


# ---------------------------------------------------------------- there and back


@EACH
def test_the_way_back_is_bitwise_and_carries_the_tokenizer(name, folders, tmp_path):
    found = from_hf(folders[name])
    gpt = found.load(GPT(found.config))
    back = to_hf(gpt, tmp_path / "back", like=folders[name])
    _same_files(folders[name], back)
    assert json.loads((back / "config.json").read_text()) == found.fields
    assert {p.name for p in back.iterdir()} >= {"tokenizer.json", "tokenizer_config.json"}
    # Without a source: transformers reads the same model from our files.
    plain = to_hf(gpt, tmp_path / "plain", shard_bytes=20000)
    files = [load_file(file) for file in plain.glob("model-*.safetensors")]
    assert len(files) > 1
    theirs = folders[name].glob("*.safetensors")
    for file in (*theirs, *plain.glob("model-*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    index = json.loads((plain / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for f in files for t in f.values())
    if name != "phi3":  # without a hint it is written as the equivalent Mistral
        _same_files(folders[name], plain)
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(
        plain, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values())
    tokens, _ = _batch()
    with torch.no_grad():
        assert relative_error(loaded.eval()(tokens).logits, _theirs(name)(tokens).logits) < 1e-6
    assert from_hf(plain).config == found.config


def _on_ranks(rank: int, folders: dict[str, Path], losses: dict[str, torch.Tensor]) -> None:
    """Load on every rank, compare with one device, and write each rank's share."""
    for name, sizes, sp, zero in (
        ("llama3", Mesh(tp=2, pp=2), True, 0),  # tied, on two stages
        ("qwen2", Mesh(tp=2, pp=2), False, 0),  # a bias that is sharded; an untied head
        ("gpt2", Mesh(tp=2, pp=2), False, 0),  # transposed
        ("gemma2", Mesh(tp=2, pp=2), True, 0),  # capped logits, a scaled embedding
        ("gemma3", Mesh(cp=2, tp=2), True, 0),  # two rotary tables
        ("olmo2", Mesh(dp=2, tp=2), True, 3),  # a norm whose weight is sharded
    ):
        mesh, found = sizes.connect(), from_hf(folders[name])
        plan = ParallelPlan(sequence_parallel=sp, zero=zero, microbatches=2)
        gpt = found.load(GPT(found.config, mesh=mesh, plan=plan))
        out = folders[name].parent / f"{name}-back"
        _same_files(folders[name], to_hf(gpt, out / "gpt", like=folders[name], shard_bytes=9000))
        engine = Engine(found.config, mesh, plan, micro_batch_size=2)
        engine.load("param", found.tensor)
        tokens, labels = (t.expand(2, 2, -1) for t in _batch(64))
        assert relative_error(engine.evaluate(tokens, labels), losses[name]) < 1e-5
        _same_files(folders[name], to_hf(engine, out / "engine"))


def test_ranks_of_a_mesh_each_read_and_write_their_part(folders, tmp_path):
    mine, losses, (tokens, labels) = {}, {}, _batch(64)
    for name in ("llama3", "qwen2", "gpt2", "gemma2", "gemma3", "olmo2"):
        mine[name] = Path(shutil.copytree(folders[name], tmp_path / name))
        logits = _theirs(name)(tokens).logits.detach()
        losses[name] = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    run_threads(4, _on_ranks, mine, losses)


def test_bf16_weights_come_back_as_they_were_also_from_an_engine(tmp_path):
    _theirs("qwen3", torch.bfloat16).save_pretrained(tmp_path / "bf16")
    found = from_hf(tmp_path / "bf16")
    assert found.dtype == torch.bfloat16
    engine = Engine(found.config, Mesh().connect(), dtype=torch.bfloat16)
    engine.load("param", found.tensor)
    back = to_hf(engine, tmp_path / "back")
    _same_files(tmp_path / "bf16", back)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    for model in (engine, GPT(found.config, dtype=torch.bfloat16)):
        own = tmp_path / type(model).__name__
        wide = to_hf(model, own, dtype=torch.float32, like=tmp_path / "bf16")
        assert {t.dtype for t in load_file(wide / "model.safetensors").values()} == {torch.float32}
        assert json.loads((wide / "config.json").read_text())["dtype"] == "float32"


def test_a_checkpoint_of_ours_is_written_too(folders, tmp_path):
    found = from_hf(folders["mistral"])
    gpt = found.load(GPT(found.config))
    tensors = [(name, p.detach()) for name, p in gpt.named_parameters()]
    tensors.append(("exp_avg/final_norm.weight", torch.ones(3)))
    given = {"config": dataclasses.asdict(found.config), "state": {}}
    saved = save_checkpoint(tmp_path / "ours", 3, tensors, **given)
    _same_files(folders["mistral"], to_hf(saved, tmp_path / "back"))
    assert "okenizer" not in (tmp_path / "back" / "README.md").read_text()  # no tokenizer is known
    half = load_file(to_hf(saved, tmp_path / "half", dtype=torch.bfloat16) / "model.safetensors")
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    for dtype in (torch.bfloat16, torch.float16, torch.float64):  # the dtype of the model itself
        own = {name: p.to(dtype) for name, p in tensors[:-1]}
        saved = save_checkpoint(tmp_path / f"{dtype}", 3, own.items(), **given)
        back = to_hf(saved, tmp_path / f"back {dtype}")
        assert from_hf(back).fields["dtype"] == str(dtype).removeprefix("torch.")
        for name, x in from_hf(back).load(GPT(found.config, dtype=dtype)).named_parameters():
            assert torch.equal(x, own[name])
        assert {t.dtype for t in load_file(back / "model.safetensors").values()} == {dtype}


def test_what_the_source_said_besides_stays_when_the_model_has_changed(folders, tmp_path):
    found = from_hf(folders["llama3"])
    config = dataclasses.replace(found.config, seq_len=8, dropout=0.1, norm_eps=1e-3)
    back = to_hf(GPT(config), tmp_path / "back", like=folders["llama3"])
    fields = json.loads((back / "config.json").read_text())
    assert {k for k in fields if fields[k] != found.fields[k]} == {"rms_norm_eps"}
    assert from_hf(back).config.norm_eps == 1e-3


@EACH
def test_source_config_of_the_same_model_is_copied_whatever_the_dropout(name, folders, tmp_path):
    """Dropout belongs to training, and the source's value is kept."""
    fields = json.loads((folders[name] / "config.json").read_text())
    fields |= {"attention_dropout": 0.25, "more": [1]}
    found = from_hf(folders[name])
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for dropout in (0.0, 0.1):
        config = dataclasses.replace(found.config, dropout=dropout)
        assert _config_json(config, tmp_path)[1] == fields


@EACH
def test_what_has_changed_is_said_and_how_long_rotary_texts_may_be_is_not(name, folders):
    """The source says otherwise."""
    config = from_hf(folders[name]).config
    rotary = config.positions == "rope"
    for change in (
        {"seq_len": config.seq_len // 2},
        {"norm_eps": 3e-3},
        {"vocab_size": 71},
        {"tied": not config.tied},
        {"seq_len": 2 * config.seq_len, "hidden": 24},
        {"dropout": 0.3},  # does not concern the weights
    ):
        changed = dataclasses.replace(config, **change)
        wanted = dataclasses.replace(changed, dropout=0.0)
        wanted = dataclasses.replace(wanted, seq_len=config.seq_len) if rotary else wanted
        kind, fields = _config_json(changed, folders[name])
        assert read_config(fields) == (kind, canonical(wanted))


# ---------------------------------------------------------------- configurations


@pytest.mark.parametrize("name", ["toy", "toy-llama", "llama-8b", "gpt2-xl"])
def test_presets_are_models_of_a_family(name):
    kind, fields = write_config(PRESETS[name])
    assert kind == ("llama" if "llama" in name else "gpt2")
    assert read_config(fields) == (kind, canonical(PRESETS[name]))


def test_rope_scaling_from_before_transformers_5_is_read():
    fields = {
        "model_type": "llama", **SIZES, "rope_theta": 5e5, "rope_scaling": {
            "type": "yarn", "factor": 2.0, "mscale": 0.5, "mscale_all_dim": 1.0},
    }  # fmt: skip
    _, config = read_config(fields)
    above, below = (0.1 * scale * math.log(2) + 1 for scale in (0.5, 1.0))
    assert config.rope_theta == 5e5
    assert config.rope_scaling == RopeScaling(
        "yarn", 2.0, 64, low=1.0, high=32.0, attention_factor=above / below
    )
    for one in ({}, {"mscale": 0.5}, {"mscale_all_dim": 1.0}, {"mscale": 0.5, "mscale_all_dim": 0}):
        scaling = {"type": "yarn", "factor": 2.0} | one  # the ratio applies both
        found = read_config(fields | {"rope_scaling": scaling})[1].rope_scaling
        assert found == RopeScaling("yarn", 2.0, 64, low=1.0, high=32.0)
        found = read_config(fields | {"rope_scaling": scaling | {"attention_factor": 1.5}})[1]
        assert found.rope_scaling.attention_factor == 1.5
    linear = fields | {"rope_scaling": {"type": "linear", "factor": 3}}
    assert read_config(linear)[1].rope_scaling == RopeScaling("linear", 3.0)


def test_a_scaling_from_before_transformers_5_is_not_kept_beside_another(tmp_path):
    old = {"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 3.0}}
    (tmp_path / "config.json").write_text(json.dumps(old))
    for scaling in (None, RopeScaling("linear", 2.0)):
        config = dataclasses.replace(read_config(old)[1], rope_scaling=scaling)
        assert read_config(_config_json(config, tmp_path)[1])[1] == config


def test_gemma_3_from_before_transformers_5_is_read():
    fields = {
        "model_type": "gemma3_text", **SIZES, "num_hidden_layers": 7, "head_dim": 16,
        "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 64,
    }  # fmt: skip
    _, config = read_config(fields)
    assert config.windows == (8, 8, 8, 8, 8, 0, 8)
    assert config.rope(local=False) == (1e6, RopeScaling("linear", 8.0))
    assert config.rope(local=True) == (1e4, None)
    assert (config.attention_scale, config.embedding_scale) == (0.125, math.sqrt(32))
    assert (config.softcap, config.logit_softcap, config.tied) == (None, None, True)
    kind, written = write_config(config)
    assert kind == "gemma3_text"
    assert read_config(written)[1] == config


_LLAMA = PRESETS["toy-llama"]


@pytest.mark.parametrize(
    ("config", "kind", "nearest"),
    [
        (GPTConfig(53, 8, 1, 8, 2, positions="rope"), None,
         "gpt2 with positions = 'learned' (not 'rope')"),
        (dataclasses.replace(_LLAMA, rope_scaling=RopeScaling("ntk", 2.0)), None,
         "llama, rejected (config.json of a llama model: RoPE scaling of type 'ntk' is not "
         "supported; expected linear, llama3 or yarn)"),
        (dataclasses.replace(_LLAMA, qk_norm=True, qkv_bias=True), None,
         "qwen2 with qk_norm = False (not True)"),
        (dataclasses.replace(_LLAMA, activation="geglu", qk_norm=True), None,
         "qwen3 with activation = 'swiglu' (not 'geglu')"),
        (dataclasses.replace(_LLAMA, sinks=True), "llama", "llama with sinks = False (not True)"),
        (dataclasses.replace(_LLAMA, bias=True), "gpt2",
         "gpt2 with activation = 'gelu' (not 'swiglu'), norm = 'layer' (not 'rms'), "
         "norm_bias = True (not None), kv_heads = 4 (not 2), positions = 'learned' (not 'rope')"),
        (dataclasses.replace(PRESETS["toy"], activation="relu2"), None,
         "gpt2 with activation = 'gelu' (not 'relu2')"),
        (dataclasses.replace(PRESETS["toy"], norm_bias=False), None,
         "gpt2 with norm_bias = True (not False)"),
        (dataclasses.replace(_LLAMA, windows=(3, 0)), "mistral",
         "mistral with windows = (3, 3) (not (3, 0))"),
        (dataclasses.replace(_LLAMA, windows=(3,)), "llama",
         "llama with windows = () (not (3, 3))"),
    ],
)  # fmt: skip
def test_a_model_that_no_family_can_be_is_refused_beside_the_nearest(config, kind, nearest):
    with pytest.raises(ConvertError) as caught:
        write_config(config, kind)
    tried = kind or "gpt2, llama, mistral, qwen2, qwen3, phi3, gemma2, gemma3_text, olmo2"
    words = f"none of the model types tried ({tried}) can express this model; the closest is "
    assert one_line(caught) == f"{words}{nearest}"


def test_the_docs_name_the_options_of_each_family():
    page = (Path(__file__).parents[1] / "docs" / "from_hugging_face.md").read_text()
    table, found = page.partition("| options of the model | family |")[2].splitlines()[2:], {}
    for row in itertools.takewhile(lambda line: line.startswith("|"), table):
        said, family = (cell.strip() for cell in row.strip("|").split("|"))
        given = dict(found.get("".join(re.findall(r"^as (\w+),", said)), {}))
        given |= {n: json.loads(value) for n, value in re.findall(r"`(\w+) = ([^`]+)`", said)}
        found[family.split()[0]] = given
        sizes = {"vocab_size": 64, "seq_len": 16, "layers": 2, "width": 256, "heads": 4}
        assert write_config(GPTConfig(**sizes, **given))[0] == family.split()[0]
    assert {*found} == {*FAMILIES} - {"phi3"}


@pytest.mark.parametrize(
    ("preset", "other"),
    [("toy", {"norm_bias": True}), ("toy-llama", {"norm_bias": False}), ("toy", {"dropout": 0.1})],
)
def test_an_option_that_says_what_holds_anyhow_changes_no_conversion(preset, other):
    config = PRESETS[preset]
    assert write_config(dataclasses.replace(config, **other)) == write_config(config)


# ---------------------------------------------------------------- unreadable files


def _refused(folder: Path | str, words: str) -> str:
    """Assert that a folder is refused in one line with these words, and return the line."""
    with pytest.raises(ConvertError, match=words) as caught:
        from_hf(folder)
    return one_line(caught)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama2", {"model_type": "bert"}, "model_type 'bert' is not supported; expected one of "),
        ("llama2", {"quantization_config": {"bits": 4}}, "quantization_config = .* not supported"),
        ("llama2", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; expected silu"),
        ("llama2", {"attention_bias": True}, "mlp_bias = False is not supported; expected True"),
        ("llama2", {"vocab_size": 54}, r"tensor model.embed_tokens.weight has shape \[53, 32\], "),
        ("llama2", {"num_hidden_layers": 2},
         "tensor model.layers.2.input_layernorm.weight: warpweave's"),
        ("llama2", {"num_hidden_layers": 4}, "tensor model.layers.3.* is missing"),
        ("llama2", {"rope_parameters": {"rope_type": "dynamic"}}, "RoPE scaling of type 'dynamic'"),
        ("llama2", {"rope_parameters": {"rope_type": "linear"}}, "config.json .* has no 'factor'"),
        ("llama2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("llama2", {"num_key_value_heads": 3}, r"heads \(4\) is not divisible by kv_heads \(3\)"),
        ("llama2", {"hidden_size": "wide"}, "config.json of a llama model: "),
        ("llama2", "intermediate_size", "config.json of a llama model has no 'intermedia"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("qwen2", {"layer_types": ["linear"] * 3}, "layer_types = 'linear' is not supported"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation = 'gelu' is not supported"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer_types = 'chunked_attention'"),
        ("gemma3", {"rope_parameters": {"full_attention": {}, "sliding_attention": {
            "rope_type": "linear", "factor": 2.0}}},
         "RoPE scaling of sliding_attention is supported only if full_attention has the same"),
        ("gemma3", {"rope_parameters": {"rope_type": "default"}},
         "rope_parameters must have only the keys .* and sliding_attention, got rope_type"),
        ("gemma2", {"sliding_window": None},
         "sliding_window = None is not supported with sliding_attention"),
        ("olmo2", {"attention_bias": True}, "attention_bias = True is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
    ],
)  # fmt: skip
def test_a_model_that_ours_cannot_be_is_refused_by_name(name, change, message, folders, tmp_path):
    folder = Path(shutil.copytree(folders[name], tmp_path / name))
    path = folder / "config.json"
    fields = {k: v for k, v in json.loads(path.read_text()).items() if k != change}
    path.write_text(json.dumps(fields if isinstance(change, str) else fields | change))
    assert _refused(folder, message).startswith(f"{folder}")


def _rewrite(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "tensor model.norm.weight is missing$"),
        (lambda t: t.update(extra=torch.ones(1)),
         "unexpected tensor extra: warpweave's Qwen2ForCaus"),
        (lambda t: t.update({"model.norm.weight": torch.ones(31)}), r"has shape \[31\], but conf"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
         "tensor model.norm.weight has dtype I8; expected one of F64, F32, F16, BF16"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_named(change, message, folders, tmp_path):
    folder = Path(shutil.copytree(folders["qwen2"], tmp_path / "x"))
    _rewrite(folder, change)
    _refused(folder, message)


def test_a_tied_head_that_is_stored_must_be_the_embedding(folders, tmp_path):
    folder = Path(shutil.copytree(folders["llama3"], tmp_path / "x"))
    _rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert from_hf(folder).config.tied
    _rewrite(folder, lambda t: t["lm_head.weight"].add_(1))
    _refused(folder, r"lm_head.weight differs from model.embed_tokens.weight, but")


@pytest.mark.parametrize("name", ["gpt2", "gpt2-erf-untied"])
def test_names_without_the_base_models_prefix_and_buffers_are_understood(name, folders, tmp_path):
    folder = Path(shutil.copytree(folders[name], tmp_path / "x"))

    def strip(tensors: dict[str, torch.Tensor]) -> None:  # like gpt2 on the hub
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 4, 4)

    _rewrite(folder, strip)
    found, whole = from_hf(folder), from_hf(folders[name])
    assert_same_bits(*(f.load(GPT(f.config)).parameters() for f in (found, whole)))


def test_folders_that_hold_no_model_are_refused(folders, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    _refused(empty, f"^{empty} is not a transformers model: it has no config")
    _refused(tmp_path / "nowhere", f"^{tmp_path}/nowhere does not exist$")
    _refused("owner/name", r"^owner/name does not exist; .* hf download owner/na")
    _refused(300 * "a", r"^a{300} does not exist")
    (empty / "config.json").write_text("{")
    _refused(empty, f"^{empty}/config.json is not JSON: ")
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32-be"):  # encodings that JSON allows
        (empty / "config.json").write_text('{"\u00e9": "\u20ac"}', encoding=encoding)
        assert read_json(empty / "config.json") == {"\u00e9": "\u20ac"}
    for no_object in ("[]", "[1]", "null", "1"):
        (empty / "config.json").write_text(no_object)
        _refused(empty, r"config\.json must be an object, got \S+$")
    shutil.copy(folders["llama2"] / "config.json", empty)
    (empty / "pytorch_model.bin").write_bytes(b"")
    _refused(empty, r": no model.safetensors or .* \(only safetensors")
    (empty / "model.safetensors").write_bytes(b"no such thing")
    _refused(empty, f"^cannot read {empty}/model.safetensors: ")
    (empty / "model.safetensors").unlink()  # this file takes precedence over an index
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (empty / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(empty, r"must not contain a folder, got '../secret.safetensors'")


def test_a_model_of_other_sizes_is_not_filled(folders):
    found = from_hf(folders["llama2"])
    with pytest.raises(ConvertError, match=r"has shape \[53, 32\] for embedding.weight, but the"):
        found.load(GPT(dataclasses.replace(found.config, vocab_size=54)))
    with pytest.raises(ConvertError, match=r"has nothing for positions.weight"):
        found.load(GPT(dataclasses.replace(found.config, positions="learned")))


def test_nothing_is_written_over_and_a_failure_leaves_nothing(folders, tmp_path):
    found = from_hf(folders["llama2"])
    gpt = GPT(found.config)
    with pytest.raises(CheckpointError, match=f"{folders['llama2']} already exists"):
        to_hf(gpt, folders["llama2"])
    full = OSError(28, "No space left")
    for fault, said in ((full, CheckpointError), (KeyboardInterrupt,) * 2, (SystemExit,) * 2):
        words = "No space left" if fault is full else None  # the others: Ctrl-C, a signal's handler
        with (
            mock.patch("warpweave.convert.write.save_file", side_effect=fault),
            pytest.raises(said, match=words),
        ):
            to_hf(gpt, tmp_path / "stopped")
    assert not list(tmp_path.iterdir())
