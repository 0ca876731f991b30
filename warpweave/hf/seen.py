"""Detect changes made to a module after its forward was replaced.

A replaced forward reads weights, linear layers and eps of its module at each call. The module's own
forward also reads other things: an activation, numbers, fields of the configuration. `look` records
these when both forwards are compared. `changed` compares the record with the current state and
detects hooks that would not fire. In these cases, the original forward runs, so a change,
replacement or hook made after `apply` has the same effect as without `apply`.

The comparison is a dozen identity checks. Nothing waits for a device, and compilers guard on the
same objects.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PretrainedConfig
from transformers.utils.output_capturing import _active_collector as _collector

from warpweave.hf import changes
from warpweave.layers.linear import has_hooks

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", changes.NAME}
# Prefixes of attributes that transformers and accelerate set on modules; no forward computes with
# them.
_NOTES = ("_is_h", "_hf_", "_old_forward")
_MUTABLE = (list, dict, set)
Fields = tuple[tuple[tuple[str, ...], Any], ...]  # path and value, in a configuration


class Seen(NamedTuple):
    """Record of a module, and of its submodules that are no longer called."""

    attributes: tuple[tuple[nn.Module, str, Any], ...]  # module, name, value
    children: tuple[tuple[nn.Module, str, Any], ...]  # module, name, child
    forwards: tuple[tuple[nn.Module, Any], ...]  # module, the forward of its class
    weights: tuple[tuple[str, bool], ...]  # name, True if the module has it
    bypassed: tuple[nn.Module, ...]  # modules no longer called, or called without values
    fields: Fields


def look(
    module: nn.Module,
    live: Collection[str] = (),
    fields: Fields = (),
    blind: Collection[nn.Module] = (),
) -> None:
    """Record on a module everything that its replacement does not read.

    Args:
        live: names of the attributes and children that the replacement reads or calls.
        fields: the fields of the configuration that the original reads, from `noted`.
        blind: modules that are called, but with different values than the original would use.
    """
    children = [(module, n, c) for n, c in module.named_children() if n not in live]
    bypassed = tuple(dict.fromkeys(part for _, _, child in children for part in child.modules()))
    bypassed += tuple(blind)
    attributes = [(module, n, v) for n, v in _attributes(module) if n not in live]
    for part in bypassed:
        children += [(part, n, c) for n, c in part.named_children() if part not in blind]
        attributes += [(part, n, v) for n, v in _attributes(part)]
        attributes.append((part, "forward", part.__dict__.get("forward")))
    found = Seen(
        tuple((m, n, copy.copy(v) if isinstance(v, _MUTABLE) else v) for m, n, v in attributes),
        tuple(children), tuple((part, type(part).forward) for part in (module, *bypassed)),
        tuple((n, p is not None) for n, p in module._parameters.items()), bypassed, fields,
    )  # fmt: skip
    changes.note(module, found)


def changed(module: nn.Module) -> bool:
    """Return True if a module has changed since `look`, or has a hook that would not fire. Only
    things that the replaced forward does not read are compared."""
    seen = changes.known(module, Seen)
    if seen is None:
        return False
    for part, name, value in seen.attributes:
        found = part.__dict__.get(name)
        if found is not value and not _equal(found, value):
            return True
    for part, name, child in seen.children:
        if part._modules.get(name) is not child:
            return True
    for part, forward in seen.forwards:
        if type(part).forward is not forward:
            return True
    for name, given in seen.weights:
        if (module._parameters.get(name) is not None) is not given:
            return True
    for part in seen.bypassed:
        if has_hooks(part):
            return True
    for path, value in seen.fields:
        found = module.config
        for name in path:
            found = getattr(found, name)
        if found is not value and not _equal(found, value):
            return True
    return bool(seen.bypassed) and not torch.compiler.is_compiling() and _has_any_global_hook()


# Packages whose hooks do not change activations: ours; transformers', which only collect; peft's,
# which pass names of adapters; FSDP's; and those that compute a weight from other parameters.
_HARMLESS = ("warpweave.", "transformers.", "peft.", "torch.distributed.", "torch.nn.utils.")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked(module: nn.Module, kinds: Collection[str] = HOOKS) -> str | None:
    """The kind of hook that other code put on a module, or None."""
    return _outside_kind({kind: module.__dict__.get(kind, {}) for kind in kinds})


def hooked_everywhere() -> str | None:
    """The kind of global module hook that other code registered, or None."""
    kinds = [f"_global{kind}" for kind in HOOKS] if _has_any_global_hook() else []
    return _outside_kind({kind: vars(torch.nn.modules.module)[kind] for kind in kinds})


def _outside_kind(hooks: dict[str, Any]) -> str | None:
    """The first kind that has a hook of other code, in words."""
    for kind, held in hooks.items():
        if any(map(is_from_outside, held.values())):
            return kind.strip("_").removesuffix("s").replace("_", " ")
    return None


def is_from_outside(hook: Any) -> bool:
    """Return True for other code's hook or forward, which may change a module's results."""
    while isinstance(hook, partial):
        hook = hook.func
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return not f"{where}.".startswith(_HARMLESS)


def requested() -> set[str]:
    """The outputs of layers that transformers collects in the current forward."""
    return {name for name in _collector.get() or () if not name.startswith("_")}


def in_backward() -> bool:
    """Return True during a backward pass, which recomputes checkpointed layers."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def owns_numbers(module: nn.Module, known: Collection[str] = ()) -> bool:
    """Return True if a module has tensors besides the `known` ones; `look` cannot track them."""
    tensors = [*module._parameters.items(), *module._buffers.items(), *vars(module).items()]
    return any(isinstance(v, torch.Tensor) and n not in known for n, v in tensors)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        note = name.startswith(_NOTES)
        if not note and name not in _OF_EVERY_MODULE and not isinstance(value, PretrainedConfig):
            yield name, value


def _equal(a: Any, b: Any) -> bool:
    """Compare numbers, strings and containers by value; other objects equal only themselves."""
    return type(a) is type(b) and isinstance(a, (int, float, str, tuple, *_MUTABLE)) and a == b


# ---------------------------------------------------------------- fields of a configuration


@contextmanager
def noted(module: nn.Module) -> Iterator[dict[tuple[str, ...], Any]]:
    """Record the fields of its configuration that a module's own forward reads in the context."""
    fields: dict[tuple[str, ...], Any] = {}
    config = module.__dict__.get("config")
    if not isinstance(config, PretrainedConfig):
        yield fields
        return
    module.__dict__["config"] = _Noting(config, fields, ())
    try:
        yield fields
    finally:
        module.__dict__["config"] = config


class _Noting:
    """Stand-in for a configuration that records which fields are read."""

    def __init__(self, config: PretrainedConfig, fields: dict, path: tuple[str, ...]) -> None:
        self.__dict__.update(_config=config, _fields=fields, _path=path)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._config)

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._config, name), (*self._path, name)
        if isinstance(value, PretrainedConfig):
            return _Noting(value, self._fields, path)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self)
        self._fields[path] = value
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)
