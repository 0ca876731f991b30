"""A module's forward replaced, its original within reach, and put back.

The new forward is an attribute in the module's own dictionary, so that its class, its parameters
and its place in the model stay as they are. It holds the module and a form, and reaches the
original through `original`, never through a closure, so that a copy of the model, deep or pickled,
has forwards of its own.
What a new forward does not read of its module is compared before each call, see `seen`: where it is
another than it was, the original runs.

Under accelerate's hooks (a model on several devices) `forward` is the hook's, and what it calls is
`_old_forward`: there it is that one which is replaced.

On a CPU and without gradients a new forward hands a `few` numbers to torch's own operators, or to
the original: where one token is generated, checking and dispatching a call of ours costs more than
computing it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from warpweave.hf import seen
from warpweave.hf.changes import changes_of, forget, known

FEW = 2**15  # numbers
_ours_always: ContextVar[bool] = ContextVar("warpweave_hf_ours_always", default=False)


class Form(Protocol):
    """What a module was seen to compute: a norm, a feed-forward layer, an activation, a loss.

    As a string, what a report says of it.
    """

    @property
    def live(self) -> tuple[str, ...]:
        """The attributes and children of the module that `forward` reads or calls."""

    @property
    def fields(self) -> seen.Fields:
        """What the module's own forward read of its configuration."""

    @property
    def forward(self) -> Callable:
        """A forward that computes it: a plain function of the module and the arguments."""


class _Original(NamedTuple):
    """A forward that was replaced; None is that of the module's class."""

    forward: Callable | None


class Guarded:
    """A form's forward, bound to a module, as long as what `seen.look` sees of the module is there.

    It behaves like a bound method, and can be pickled.
    """

    def __init__(self, module: nn.Module, form: Form) -> None:
        forward = form.forward

        @wraps(forward)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            if seen.changed(self):
                return original(self)(*args, **kwargs)
            return forward(self, *args, **kwargs)

        self.form, self.__self__, self.__func__ = form, module, guarded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def __reduce__(self) -> tuple:
        return Guarded, (self.__self__, self.form)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.__func__, self.__self__))


def patch(module: nn.Module, form: Form, blind: Collection[nn.Module] = ()) -> None:
    """Let a form's forward be the module's, as long as what `seen.look` sees of it now is there.

    `blind` are modules that the new forward calls with other numbers than the original would.
    """
    seen.look(module, form.live, form.fields, blind)
    changes, slot = changes_of(module), _slot(module)
    if _Original not in changes.facts:
        changes.facts[_Original] = _Original(module.__dict__.get(slot))

    changes.set(module, slot, Guarded(module, form))


def unpatch(module: nn.Module) -> None:
    """Put the forward back that `patch` replaced."""
    changes_of(module).restore(module, _slot(module))
    forget(module, _Original)
    forget(module, seen.Seen)


def is_patched(module: nn.Module) -> bool:
    """Whether `patch` replaced this module's forward."""
    return known(module, _Original) is not None


def is_foreign(module: nn.Module) -> bool:
    """Whether somebody else replaced this module's forward."""
    return _slot(module) in module.__dict__ and _slot(module) != "_old_forward"


def original(module: nn.Module) -> Callable:
    """The forward that `patch` replaced, bound to this module."""
    before: Any = known(module, _Original)
    return partial(type(module).forward, module) if before.forward is None else before.forward


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
