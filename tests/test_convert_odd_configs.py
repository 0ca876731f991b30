"""config.json files with fields of the wrong type: an error of one line,
never a traceback or a guess."""

import itertools
import json
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from close import assert_same_bits
from refused import one_line
from safetensors.torch import load_file, save_file

from warpweave.checkpoint import save_checkpoint
from warpweave.convert import from_hf, to_hf
from warpweave.convert.families import canonical, read_config, write_config
from warpweave.convert.fields import ConvertError, read_json
from warpweave.convert.source import check_same_model, open_model, read_model_config
from warpweave.convert.write import _write_files
from warpweave.kernels.rope import RopeScaling
from warpweave.model.config import PRESETS
from warpweave.model.gpt import GPT

QWEN2 = {
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_head": 2, "n_layer": 1,
}  # fmt: skip
SHORT = {
    "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"],
}  # fmt: skip


QWEN2_ROPE = {"rope_parameters": {"full_attention": {"rope_theta": 77.0, "rope_type": "default"}}}


def _refused(words: str | None, call, *given) -> str:
    """Assert that a call is refused in one line with these words, and return the line."""
    with pytest.raises(ConvertError, match=words) as caught:
        call(*given)
    return one_line(caught)


@pytest.mark.parametrize(
    "odd",
    [
        {"model_type": ["llama"]}, {"rope_parameters": "yarn"}, SHORT,
        {"vocab_size": 97.0}, {"hidden_size": "32"}, {"num_hidden_layers": True},
        {"num_hidden_layers": 10**30}, {"rms_norm_eps": "1e-5"}, {"tie_word_embeddings": "false"},
        {"is_causal": False}, QWEN2_ROPE,
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_read_wrong_or_never_is_refused_in_one_line(odd):
    assert read_config(QWEN2)[0] == "qwen2"
    _refused(None, read_config, QWEN2 | odd)


def test_sizes_that_no_tensor_has_are_one_line(tmp_path):
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"vocab_size": 2**62}))
    _refused("these model sizes are invalid", from_hf, tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    _refused("is not JSON: maximum recursion depth", from_hf, tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_key_heads_of_null_are_as_many_as_heads(family):
    config = QWEN2 | {"model_type": family, "num_key_value_heads": None}  # from before GQA
    assert read_config(config)[1].kv_heads == 4


def test_mistral_with_layers_of_both_kinds_is_refused():
    mistral = QWEN2 | {"model_type": "mistral", "sliding_window": 8}
    assert read_config(mistral | {"layer_types": ["sliding_attention"] * 2})[1].window(1) == 8
    both = {"layer_types": ["full_attention", "sliding_attention"]}
    _refused("layer_types", read_config, mistral | both)


def _sizes(folder: Path) -> list[list[int]]:
    files = sorted(folder.glob("*.safetensors"))
    return [[t.nbytes for t in load_file(file).values()] for file in files]


def test_files_are_those_that_transformers_reads(tmp_path):
    """A single file takes precedence over an index left by an earlier save.
    No tensor is stored twice."""
    config = read_config(QWEN2)[1]
    to_hf(GPT(config, seed=0), tmp_path / "old", shard_bytes=8000, dtype=torch.bfloat16)
    index = json.loads((tmp_path / "old" / "model.safetensors.index.json").read_text())
    sizes = [sum(file) for file in _sizes(tmp_path / "old")]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(a <= 8000 < a + b for a, b in itertools.pairwise(sizes))  # none fits
    to_hf(GPT(config, seed=1), tmp_path / "new")
    wanted = (tmp_path / "new" / "model.safetensors").read_bytes()
    (tmp_path / "old" / "model.safetensors").write_bytes(wanted)
    found, new = (from_hf(tmp_path / name).load(GPT(config)) for name in ("old", "new"))
    assert torch.equal(found.embedding.weight, new.embedding.weight)
    (tmp_path / "old" / "model.safetensors").unlink()
    first, second, *_ = sorted((tmp_path / "old").glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    _refused(f"is in {first.name} and in {second.name}", from_hf, tmp_path / "old")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gemma2"])
def test_a_field_that_a_new_transformers_renamed_is_refused(kind):
    """transformers 5 writes every field; in older files a missing one has its default."""
    small = read_config(GPT2 if kind == "gpt2" else QWEN2 | {"model_type": kind})[1]
    whole = {**write_config(small, kind)[1], "model_type": kind}
    for version in ("5.24.0", "5.30.0.dev0", "12.1"):
        new = whole | {"transformers_version": version}
        assert read_config(new) == read_config(whole)
        for name in whole.keys() - {"model_type", "architectures", "head_dim"}:
            renamed = {f"new_{n}" if n == name else n: value for n, value in new.items()}
            _refused(rf"\b({name}|kv_heads)\b", read_config, renamed)
    old = {n: value for n, value in whole.items() if "eps" not in n}
    for version in ({}, {"transformers_version": "4.57.1"}):
        assert read_config(old | version)[1].norm_eps in (1e-5, 1e-6)


@pytest.mark.parametrize("name", ["num_hidden_layers", "n_layer"])
def test_more_than_10000_layers_are_refused(name):
    one = GPT2 if name == "n_layer" else QWEN2
    assert read_config(one | {name: 10_000})[1].layers == 10_000
    for many in (10_001, 10**30):
        words = f"^{name} = {many} is not a plausible number of layers$"
        _refused(words, read_config, one | {name: many})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_qwen_begin_with_layer_28_unless_it_is_said(family):
    many = QWEN2 | {"model_type": family, "num_hidden_layers": 31, "use_sliding_window": True}
    for said, first in (({}, 28), ({"max_window_layers": 30}, 30), ({"max_window_layers": 0}, 0)):
        found = read_config(many | {"sliding_window": 6} | said)[1]
        assert [found.window(i) for i in range(31)] == [None] * first + [6] * (31 - first)


REFUSED = {
    "heads of other widths": ("llama", {"hidden_size": 34, "head_dim": 8}, "34 is not divisible"),
    "gemma 2's": ("gemma2", {"hidden_size": 34, "head_dim": 8}, "34 is not divisible"),
    "gemma 3's": ("gemma3_text", {"hidden_size": 34, "head_dim": 8}, "34 is not divisible"),
    "a scaled phi": ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}},
                     "scaling of phi3 models"),
    "a part of a head": ("phi3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    "too few kinds": ("qwen3", {"layer_types": ["full_attention"]}, "has 1 entries for 2 layers"),
    "both ways": ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional"),
    "scores by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inv"),
    "plain scores": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_a_gpt_of_ours_cannot_be_is_refused_naming_the_field(name):
    family, odd, words = REFUSED[name]
    plain = GPT2 if family == "gpt2" else QWEN2 | {"model_type": family}
    assert read_config(plain)[0] == family
    _refused(words, read_config, plain | odd)


def test_layer_types_beyond_the_last_layer_are_ignored():
    kinds = ["full_attention", "full_attention", "sliding_attention"]
    found = read_config(QWEN2 | {"model_type": "gemma2", "layer_types": kinds})[1]
    assert found.windows == ()
    whole = {"sliding_window": None, "layer_types": kinds}
    assert read_config(QWEN2 | {"model_type": "gemma2"} | whole)[1].windows == ()


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_default_rope_scaling_bands_are_written_as_explicit_numbers(kind):
    own = RopeScaling(kind, 4.0, 16)
    config = replace(PRESETS["toy-llama"], rope_scaling=own, rope_theta=90.0)
    said = read_config(write_config(config, "llama")[1])[1].rope_scaling
    assert said == canonical(config).rope_scaling
    assert said.high is not None
    plain = 90.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)
    assert torch.equal(said.scale(plain, 90.0), own.scale(plain, 90.0))
    assert said.multiplier == own.multiplier


def test_missing_folder_that_looks_like_a_hub_name_suggests_hf_download():
    for name, may in (("gpt2", True), ("owner/a-name.1", True), ("a/b/c", False), ("a b", False)):
        said = _refused(f"^{name} does not exist", read_json, Path(name) / "config.json")
        assert (f"hf download {name} --local-dir" in said) is may


# ---------------------------------------------------------------- several files


def test_a_file_holds_as_much_as_was_asked_for_and_not_a_byte_more(tmp_path):
    gpt = GPT(read_config(QWEN2)[1], seed=0)
    one_by_one = _sizes(to_hf(gpt, tmp_path / "each", shard_bytes=1))
    assert all(len(file) == 1 for file in one_by_one)
    first = sum(file[0] for file in one_by_one[:4])
    assert len(_sizes(to_hf(gpt, tmp_path / "four", shard_bytes=first))[0]) == 4
    assert len(_sizes(to_hf(gpt, tmp_path / "three", shard_bytes=first - 1))[0]) == 3


def test_rank_with_a_full_disk_consumes_all_tensors_and_returns_the_error(tmp_path):
    """They may be gathered from ranks that would otherwise wait."""
    drawn: list[str] = []

    def tensors():
        for n in range(6):
            drawn.append(name := f"t{n}")
            yield name, torch.ones(4)

    for failing in range(3):
        errors = [None] * failing + [OSError(28, "No space left")] + [None] * 9
        drawn.clear()
        with mock.patch("warpweave.convert.write.save_file", side_effect=errors):
            found = _write_files(tmp_path, 0, tensors(), None, 32)
        assert drawn == [f"t{n}" for n in range(6)]
        assert found.keys() == {"error"}
        assert "No space left" in found["error"]
    found = _write_files(tmp_path, 3, tensors(), torch.float16, 16)
    files = {f"rank00003-{n:05d}": {f"t{2 * n}": 8, f"t{2 * n + 1}": 8} for n in range(3)}
    assert found == {"files": files, "dtype": "float16"}
    assert _write_files(tmp_path, 1, iter(()), None, 16) == {"files": {}, "dtype": None}


def test_model_in_several_files_is_read_with_the_dtype_of_its_embedding(tmp_path):
    gpt = GPT(read_config(QWEN2)[1], seed=0)
    folder = to_hf(gpt, tmp_path / "parts", shard_bytes=7000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    found = from_hf(folder)
    assert found.dtype == torch.float32
    assert_same_bits(found.load(GPT(found.config, seed=1)).parameters(), gpt.parameters())
    name = "model.embed_tokens.weight"
    weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = load_file(folder / weights[name])
    save_file(tensors | {name: tensors[name].bfloat16()}, folder / weights[name])
    mixed = from_hf(folder)
    assert mixed.dtype == torch.bfloat16
    record = GPT(found.config, device="meta").parameter_records()["final_norm.weight"]
    (folder / weights["model.norm.weight"]).unlink()
    _refused(f"^cannot read model.norm.weight: {folder}/model-", mixed.tensor, record)
    _refused(f"^cannot read {folder}/model-.*: ", from_hf, folder)


@pytest.mark.parametrize("odd", [None, ["model.safetensors"], {"a": 1}, {"a": "../b", "c": "d"}])
def test_an_index_that_names_no_files_is_refused(odd, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({} if odd is None else {"weight_map": odd}))
    _refused(r"weight_map$|weight_map.* must|must not contain a folder", from_hf, tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "b", "c": "d/e"}}))
    _refused(r"file names in .* must not contain a folder, got 'd/e'", from_hf, tmp_path)


BUFFERS = {
    "gpt2": ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"),
    "llama": ("model.layers.1.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"),
}


@pytest.mark.parametrize("family", BUFFERS)
def test_buffers_that_older_versions_saved_are_no_parameters(family, tmp_path):
    preset = PRESETS["toy" if family == "gpt2" else "toy-llama"]
    config = replace(preset, layers=2, width=16, heads=2, hidden=24, vocab_size=31)
    folder = to_hf(GPT(config, seed=0), tmp_path / "model")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {name: torch.ones(3) for name in BUFFERS[family]}, file)
    assert from_hf(folder).config == read_model_config(folder)
    save_file(load_file(file) | {BUFFERS[family][0] + "s": torch.ones(3)}, file)
    _refused("unexpected tensor", from_hf, folder)


# ---------------------------------------------------------------- initial models


def test_checkpoint_is_read_with_its_config_and_unknown_fields_are_rejected(tmp_path):
    config = replace(PRESETS["toy"], layers=2, width=16, heads=2, vocab_size=31, dropout=0.25)
    gpt, fields = GPT(config, seed=0), asdict(config)
    tensors = [(name, p.detach()) for name, p in gpt.named_parameters()]
    folder = save_checkpoint(tmp_path / "checkpoints", 3, tensors, config=fields, state={})
    for place in (folder, tmp_path):
        assert read_model_config(place) == open_model(place).config == config
        check_same_model(config, place)
        for layers, words in (
            (3, r"^blocks.2.attention_norm.weight: .* has no such tensor, but .* shape \(16,"),
            (1, r"^blocks.1.attention_norm.weight: .* has shape \(16,\), but .* no such tensor"),
        ):
            with pytest.raises(ValueError, match=words):
                check_same_model(replace(config, layers=layers), place)
    for step, more in enumerate(({"flux": 1}, {"heads": 0}, {"heads": None})):
        newer = save_checkpoint(tmp_path / "new", step, tensors, config=fields | more, state={})
        for read in (read_model_config, open_model):
            _refused(f"^{newer} has a model that this version of warp", read, newer)
