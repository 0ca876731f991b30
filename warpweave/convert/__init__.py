"""Checkpoints of Hugging Face transformers into our GPT, and back, bit for bit.

``from_hf(folder)`` reads GPT-2, Llama 2 and 3, Mistral, Qwen 2 and 3, Phi 3, Gemma 2 and 3 (text)
and OLMo 2: the sizes at once, each tensor when somebody asks for it, so that no rank ever holds
more than its own part and one whole tensor. ``to_hf(model, folder)`` writes what
``AutoModelForCausalLM.from_pretrained`` loads, every rank its own tensors, with the tokenizer that
the model was trained with. transformers itself is not needed.

What a folder says and our GPT cannot do is refused by name: another kind of RoPE scaling, a bias
where none can be, a tensor that is missing, too many, of another shape or quantized. Dropout is no
property of the weights: what is read has none.

`fields` that families share · `families` one family's config.json as a `GPTConfig` and back ·
`tensors` which of their tensors make one of ours · `folder` reading · `beside` tokenizer, ends of
texts, card · `source` reading, or a checkpoint of ours · `write` writing.
"""

from typing import TYPE_CHECKING

from warpweave.cli.lazy import names_of

if TYPE_CHECKING:
    from warpweave.convert.fields import ConvertError
    from warpweave.convert.folder import HFFolder, from_hf
    from warpweave.convert.write import to_hf

__all__ = ["ConvertError", "HFFolder", "from_hf", "to_hf"]

__getattr__ = names_of(
    "warpweave.convert",
    {"fields": ("ConvertError",), "folder": ("HFFolder", "from_hf"), "write": ("to_hf",)},
)
