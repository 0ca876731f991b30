"""Whether a layer may use a submodule's parameters in a fused Function instead of calling it."""

from __future__ import annotations

from torch import nn


def fusable(module: nn.Module, kind: type[nn.Module]) -> bool:
    """True if `module` is a plain `kind` that nobody has wrapped, replaced, sharded or hooked.

    Adapters, quantisers and parametrizations replace a module or its class, FSDP2 changes its class
    and frees its parameters outside of its forward; they all count on its being called.
    """
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return type(module) is kind and not any(hooks)
