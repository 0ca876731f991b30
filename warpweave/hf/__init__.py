"""warpweave's kernels inside a Hugging Face model: `apply`, `revert`, `Report`.

    model = warpweave.hf.apply(AutoModelForCausalLM.from_pretrained(ID))

Modules are found by their structure, not by their model's name, and a forward is replaced only
after the old and the new one agree on a small probe. Parameters, their names, `state_dict`,
`save_pretrained` and the signature of `forward` stay as they are.

`model` the public calls · `report` what they print · `patch` replaces a forward and restores it ·
`probe` compares two forwards · `seen` detects later changes of a module · `norm`, `mlp` modules ·
`attention` the function that models call, `mask` the conversion of their masks · `loss` head and
loss, fused · `parallel` a model over ranks: `options` of it, `structure` where it can be sharded,
`plan` by which styles, `untouched` what users add to it · `styles` the same for a `tp_plan`.
"""

from typing import Any

try:
    import transformers
except ImportError:
    raise ImportError(
        "warpweave.hf needs transformers: pip install 'transformers>=5.4' 'accelerate>=1.1'"
    ) from None

from warpweave.hf.model import KINDS, apply, revert
from warpweave.hf.report import Entry, Report

# Before 5.23 transformers calls the words in another way: norms would get part of a gradient.
if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23):
    from warpweave.hf.styles import planned
else:

    def planned(how: Any, config: Any, *, overlap: str = "bulk") -> Any:
        """Refuse: the words of a `tp_plan` that are ours are not registered."""
        raise ImportError(
            f"warpweave.hf.planned needs transformers >= 5.23, this is {transformers.__version__}: "
            "warpweave.hf.apply(model, mesh=...) cuts a model with any"
        )


__all__ = ["KINDS", "Entry", "Report", "apply", "planned", "revert"]
