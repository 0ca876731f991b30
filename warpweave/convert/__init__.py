"""Convert checkpoints of Hugging Face transformers into our GPT, and back, bit for bit.

``from_hf(folder)`` reads GPT-2, Llama 2 and 3, Mistral, Qwen 2 and 3, Phi 3, Gemma 2 and 3 (text)
and OLMo 2. It reads the sizes at once and each tensor on request, so that no rank ever holds more
than its own part and one whole tensor. ``to_hf(model, folder)`` writes what
``AutoModelForCausalLM.from_pretrained`` loads. Every rank writes its own tensors, and the tokenizer
of the training is included. transformers itself is not needed.

If a folder asks for something our GPT does not support, an error names it: an unknown kind of RoPE
scaling, an unexpected bias, or a tensor that is missing, unexpected, quantized or of a wrong shape.
Dropout is not a property of the weights: a model that was read has none.

`fields` shared config.json fields · `families` each family's config.json to `GPTConfig` and back ·
`tensors` rules that combine their tensors into ours · `folder` reading · `beside` tokenizer, end
tokens, card · `source` reading, or a checkpoint of ours · `write` writing.
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
