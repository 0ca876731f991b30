"""Plain tensors next to DTensors among the arguments of an operator.

torch refuses such a mixture deep inside an operator or in its backward, and its message names
torch's own operators. These functions decide at the call. A plain parameter, table or label is
whole and equal on all ranks, so it becomes a replicated DTensor, and its gradient is summed over
the ranks. A plain activation may be one rank's part, so it is refused. In the forward of a declared
model (`warpweave.shard`) every plain tensor is replicated.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_flatten, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")
_MODULE = "torch.distributed.tensor"


def beside_dtensors(*activations: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate an operator: if an argument is a DTensor, plain tensors become replicated DTensors.

    The operator then raises ValueError if one of the arguments named in `activations` is plain.
    """

    def decorate(operator: Callable[P, R]) -> Callable[P, R]:
        signature, name = inspect.signature(operator), operator.__name__  # type: ignore[attr-defined]

        @wraps(operator)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if torch.compiler.is_compiling() or not _has_dtensor(args, kwargs):
                return operator(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            leaves, tree = tree_flatten(bound.arguments)
            at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
            tensors = [leaves[i] for i in at]
            if has_torch_function(tensors):  # the mode of a declared model replicates plain tensors
                tensors = handle_torch_function(_as_given, tensors, *tensors)
            for i, x in zip(at, tensors, strict=True):
                leaves[i] = x
            bound.arguments = tree_unflatten(leaves, tree)
            for which in activations:
                x = bound.arguments.get(which)
                if isinstance(x, torch.Tensor) and not is_dtensor(x):
                    raise ValueError(
                        f"{name} got a plain tensor for {which} together with a DTensor; pass "
                        f"{which} as a DTensor (use DTensor.from_local with the placements of "
                        f"{which})"
                    )
            mesh = next(x for x in tensors if is_dtensor(x)).device_mesh
            bound.arguments = tree_unflatten([as_dtensor(x, mesh) for x in leaves], tree)
            return operator(*bound.args, **bound.kwargs)

        return run

    return decorate


def whole_features(x: torch.Tensor) -> torch.Tensor:
    """x[..., E], gathered if it is a DTensor sharded on E, as `sharding` does for operators."""
    if not hasattr(x, "placements"):
        return x
    from torch.distributed.tensor import DTensor, Replicate  # already imported, as x is a DTensor

    whole = cast(DTensor, x)
    places = [Replicate() if place.is_shard(x.ndim - 1) else place for place in whole.placements]
    return x if places == [*whole.placements] else whole.redistribute(placements=places)


def is_dtensor(x: Any) -> bool:
    """Return True for a DTensor, without importing its module, which takes seconds."""
    module = sys.modules.get(_MODULE)
    return module is not None and isinstance(x, module.DTensor)


def as_dtensor(x: Any, mesh: Any) -> Any:
    """Turn a plain tensor into a DTensor replicated on all ranks; return anything else unchanged.

    Nothing is sent.
    """
    if not isinstance(x, torch.Tensor) or is_dtensor(x):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _has_dtensor(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return True if an argument is a DTensor. Every call of an operator calls this."""
    module = sys.modules.get(_MODULE)
    if module is None:
        return False
    kind = module.DTensor
    for x in args:
        if isinstance(x, kind):
            return True
    return any(isinstance(x, kind) for x in kwargs.values()) if kwargs else False


def _as_given(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors, or what a mode of torch functions turns them into."""
    return [*tensors]
