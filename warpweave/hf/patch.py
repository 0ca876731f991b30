"""A module's forward replaced, its original within reach, and put back.

The new forward is a method in the module's own dictionary, so that its class, its parameters and
its place in the model stay as they are, and a deep copy of the model has forwards of its own: for
the same reason a new forward reaches the original through `original`, never through a closure.
What a new forward does not read of its module is compared before each call, see `seen`: where it is
another than it was, the original runs.

Under accelerate's hooks (a model on several devices) `forward` is the hook's, and what it calls is
`_old_forward`: there it is that one which is replaced.

On a CPU and without gradients a new forward hands a `few` numbers to torch's own operators, or to
the original: where one token is generated, checking and dispatching a call of ours costs more than
computing it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import MethodType

import torch
from torch import nn

from warpweave.hf import seen

FEW = 2**15  # numbers
_ours_always: ContextVar[bool] = ContextVar("warpweave_hf_ours_always", default=False)

_BEFORE = "_forward_before_warpweave"  # {name of the attribute: what the module's dict had, if any}


def is_patched(module: nn.Module) -> bool:
    """Whether `patch` replaced this module's forward."""
    return _BEFORE in module.__dict__


def is_foreign(module: nn.Module) -> bool:
    """Whether somebody else replaced this module's forward."""
    return _slot(module) in module.__dict__ and _slot(module) != "_old_forward"


def patch(module: nn.Module, forward: Callable) -> None:
    """Let `forward`, a plain function of self and the arguments, be the module's forward, as long
    as what `seen.look` saw of the module is there."""
    slot = _slot(module)

    @wraps(forward)
    def guarded(self, *args, **kwargs):
        if seen.changed(self):
            return original(self)(*args, **kwargs)
        return forward(self, *args, **kwargs)

    module.__dict__[_BEFORE] = {slot: module.__dict__.get(slot)}
    module.__dict__[slot] = MethodType(guarded, module)


def original(module: nn.Module) -> Callable:
    """The forward that `patch` replaced, bound to this module."""
    (before,) = module.__dict__[_BEFORE].values()
    return partial(type(module).forward, module) if before is None else before


def unpatch(module: nn.Module) -> None:
    """Put the forward back that `patch` replaced."""
    seen.forget(module)
    for slot, before in module.__dict__.pop(_BEFORE).items():
        del module.__dict__[slot]
        if before is not None:
            module.__dict__[slot] = before


def _slot(module: nn.Module) -> str:
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def few(x: torch.Tensor) -> bool:
    """Whether calling torch's own operators directly takes less time than ours, measured."""
    if torch.compiler.is_compiling():
        return False
    cheap = x.is_cpu and x.numel() <= FEW
    return cheap and not torch.is_grad_enabled() and not always_ours()


def always_ours() -> bool:
    """Whether `ours_always` holds."""
    return _ours_always.get()


@contextmanager
def ours_always() -> Iterator[None]:
    """Meanwhile nothing is `few`: to compare and to test."""
    token = _ours_always.set(True)
    try:
        yield
    finally:
        _ours_always.reset(token)
