"""config.json files whose fields are of odd kinds: one line, never a traceback, never a guess."""

import pytest

from warpweave.convert.families import ConvertError, read_config

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
