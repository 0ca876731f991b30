"""warpweave's kernels inside a Hugging Face model: `apply`, `revert`, `Report`.

    model = warpweave.hf.apply(AutoModelForCausalLM.from_pretrained(ID))

Modules are recognized by their structure, not by the name of their model. A forward is replaced
only after the old and the new one agree on a small probe. Parameters, their names, `state_dict`,
`save_pretrained` and the signature of `forward` do not change.

`model` the public calls · `report` what they print · `patch` replaces a forward and restores it ·
`probe` compares two forwards · `seen` detects later changes of a module · `norm`, `mlp` modules ·
`attention` the function that models call, `mask` the conversion of their masks · `loss` fused head
and loss · `parallel` shards a model over ranks, with `options`, the `structure` that can be
sharded, the `plan` of styles, and checks of what users add (`untouched`) · `styles` the same for a
`tp_plan`.
"""

try:
    import transformers
except ImportError:
    raise ImportError(
        "warpweave.hf needs transformers; pip install 'transformers>=5.23' 'accelerate>=1.13'"
    ) from None

# Before 5.23, transformers has different names for some things read here, without any error.
if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23):
    raise ImportError(
        f"warpweave.hf needs transformers >= 5.23, got {transformers.__version__}; "
        "pip install 'transformers>=5.23'"
    )
else:
    from warpweave.hf.model import KINDS, apply, revert
    from warpweave.hf.report import Entry, Report
    from warpweave.hf.styles import planned

__all__ = ["KINDS", "Entry", "Report", "apply", "planned", "revert"]
