"""config.json files whose fields are of odd kinds: one line, never a traceback, never a guess."""

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from warpweave.convert import from_hf, to_hf
from warpweave.convert.families import read_config
from warpweave.convert.fields import ConvertError
from warpweave.gpt import GPT

QWEN2 = {
    "model_type": "qwen2", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
SHORT = {
    "use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"],
}  # fmt: skip


@pytest.mark.parametrize(
    "odd", [{"model_type": ["llama"]}, {"rope_parameters": "yarn"}, SHORT], ids=str
)
def test_odd_fields_are_refused_in_one_line(odd):
    assert read_config(QWEN2)[0] == "qwen2"
    with pytest.raises(ConvertError) as caught:
        read_config(QWEN2 | odd)
    assert "\n" not in str(caught.value)


QWEN2_ROPE = {"rope_parameters": {"full_attention": {"rope_theta": 77.0, "rope_type": "default"}}}


@pytest.mark.parametrize(
    "odd",
    [
        {"vocab_size": 97.0}, {"hidden_size": "32"}, {"num_hidden_layers": True},
        {"num_hidden_layers": 10**30}, {"rms_norm_eps": "1e-5"}, {"tie_word_embeddings": "false"},
        {"is_causal": False}, QWEN2_ROPE,
    ],
    ids=str,
)  # fmt: skip
def test_what_would_be_read_wrong_or_never_is_refused(odd):
    with pytest.raises(ConvertError) as caught:
        read_config(QWEN2 | odd)
    assert "\n" not in str(caught.value)


def test_sizes_that_no_tensor_has_are_one_line(tmp_path):
    save_file({"lm_head.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(QWEN2 | {"vocab_size": 2**62}))
    with pytest.raises(ConvertError, match="no model has these sizes") as caught:
        from_hf(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConvertError, match="cannot read"):
        from_hf(tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_key_heads_of_null_are_as_many_as_heads(family):
    config = QWEN2 | {"model_type": family, "num_key_value_heads": None}  # from before GQA
    assert read_config(config)[1].kv_heads == 4


def test_mistral_with_layers_of_both_kinds_is_refused():
    mistral = QWEN2 | {"model_type": "mistral", "sliding_window": 8}
    assert read_config(mistral | {"layer_types": ["sliding_attention"] * 2})[1].window(1) == 8
    with pytest.raises(ConvertError, match="layer_types"):
        read_config(mistral | {"layer_types": ["full_attention", "sliding_attention"]})


def test_files_are_those_that_transformers_reads(tmp_path):
    """One file goes before an index that was left from another save; no tensor stands twice."""
    config = read_config(QWEN2)[1]
    to_hf(GPT(config, seed=0), tmp_path / "old", shard_bytes=8000, dtype=torch.bfloat16)
    index = json.loads((tmp_path / "old" / "model.safetensors.index.json").read_text())
    files = (tmp_path / "old").glob("*.safetensors")
    assert index["metadata"]["total_size"] == sum(
        t.nbytes for file in files for t in load_file(file).values()
    )
    sizes = [
        sum(t.nbytes for t in load_file(file).values())
        for file in sorted((tmp_path / "old").glob("*.safetensors"))
    ]
    assert all(a <= 8000 < a + b for a, b in itertools.pairwise(sizes))  # none fits
    to_hf(GPT(config, seed=1), tmp_path / "new")
    wanted = (tmp_path / "new" / "model.safetensors").read_bytes()
    (tmp_path / "old" / "model.safetensors").write_bytes(wanted)
    found, new = (from_hf(tmp_path / name).load(GPT(config)) for name in ("old", "new"))
    assert torch.equal(found.embedding.weight, new.embedding.weight)
    (tmp_path / "old" / "model.safetensors").unlink()
    first, second, *_ = sorted((tmp_path / "old").glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, second)
    with pytest.raises(ConvertError, match=f"is in {first.name} and in {second.name}"):
        from_hf(tmp_path / "old")
