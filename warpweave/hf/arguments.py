"""Recognition of the arguments that transformers passes between modules.

transformers renames arguments (`past_key_values` became `cache` in 5.24) and passes some of them by
position (GPT-2's cache), so a missing name proves nothing. We recognize arguments by their type,
and refuse unknown ones.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Cache, PretrainedConfig

_CACHES = ("cache", "past")  # parts of the names of arguments that hold keys and values
_PLAIN = (bool, int, float, str, torch.Tensor, torch.dtype, torch.device, PretrainedConfig)
_PART = "_warpweave_part"  # set on a cache that holds the keys of only some tokens


def cache_of(module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Cache | None:
    """The cache of keys and values among a module's arguments; None if there is none. Raises
    ValueError, naming the module and the argument, if an argument may be a cache but is not a
    `transformers.Cache`."""
    given = [*((f"argument {i}", x) for i, x in enumerate(args)), *kwargs.items()]
    for name, value in given:
        if not isinstance(value, Cache) and _may_be_cache(name, value):
            raise ValueError(
                f"{type(module).__name__}: {name} is a {type(value).__name__}, which may be a "
                "cache but is not a transformers.Cache; pass use_cache=False with apply(mesh=...)"
            )
    return next((value for _, value in given if isinstance(value, Cache)), None)


def _may_be_cache(name: str, value: Any) -> bool:
    if value is None or isinstance(value, _PLAIN):
        return False  # `use_cache`, `cache_position`
    if not isinstance(value, (tuple, list, Mapping)):
        return True
    parts = list(value.values() if isinstance(value, Mapping) else value)
    named = any(word in name for word in _CACHES)
    return (named and bool(parts)) or any(_may_be_cache(name, part) for part in parts)


def note_part(cache: Cache) -> None:
    """Record that a cache receives only the keys of this rank's tokens."""
    setattr(cache, _PART, True)


def check_whole(module: nn.Module, cache: Cache | None) -> None:
    """Raise ValueError if a cache holds the keys of only some tokens."""
    if cache is not None and hasattr(cache, _PART):
        raise ValueError(
            f"{type(module).__name__}: this cache was filled while gradients were enabled, so it "
            "holds only this rank's tokens; fill a new cache under torch.no_grad()"
        )


def unknown(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Names of the given arguments that are neither None nor among the `known` ones."""
    return [name for name, value in given.items() if value is not None and name not in known]


def own(owner: Any, name: str) -> Any:
    """Return an attribute that an object or a class of transformers must have. Raises ValueError if
    it is missing. After a renaming, a default would be silently wrong."""
    try:
        return getattr(owner, name)
    except AttributeError:
        kind = owner if isinstance(owner, type) else type(owner)
        raise ValueError(
            f"{kind.__name__} of transformers {transformers.__version__} has no {name}, "
            "which warpweave.hf reads; install a version that docs/install.md lists"
        ) from None
