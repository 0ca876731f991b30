"""Replacement of a module's forward, with access to the original, and its restoration.

The new forward is an attribute in the module's own dictionary, so the module's class, parameters
and place in the model do not change. It holds the module and a form. It gets the original from
`original`, never from a closure, so a deep or pickled copy of the model has its own forwards.
Anything in the module that the new forward does not read is compared before each call (`seen`). If
it has changed, the original runs.

Under accelerate's hooks (a model on several devices), `forward` belongs to the hook, which calls
`_old_forward`. In that case, `_old_forward` is replaced.

On a CPU and without gradients, a new forward passes inputs of a `few` elements to torch's own
operators, or to the original. When a single token is generated, checking and dispatching one of our
calls costs more than the computation.
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

FEW = 2**15  # elements
_ours_always: ContextVar[bool] = ContextVar("warpweave_hf_ours_always", default=False)


class Form(Protocol):
    """The function that a module computes: a norm, a feed-forward layer, an activation, a loss.
    ``str()`` gives its description in a report."""

    @property
    def live(self) -> tuple[str, ...]: ...  # attributes and children that `forward` reads or calls

    @property
    def fields(self) -> seen.Fields: ...  # of the configuration, that the module's own forward read

    @property
    def forward(self) -> Callable: ...  # a plain function of the module and the arguments


class _Original(NamedTuple):
    """A forward that was replaced; None means the forward of the module's class."""

    forward: Callable | None


class Guarded:
    """A form's forward bound to a module; the original runs if the module has changed (`seen`). It
    behaves like a bound method, and can be pickled."""

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
    """Replace a module's forward by a form's, as long as the module does not change (`seen.look`).
    `blind` are modules that the new forward calls with different values than the original would."""
    seen.look(module, form.live, form.fields, blind)
    changes, slot = changes_of(module), _slot(module)
    changes.facts.setdefault(_Original, _Original(module.__dict__.get(slot)))
    changes.set(module, slot, Guarded(module, form))


def unpatch(module: nn.Module) -> None:
    """Restore the forward that `patch` replaced."""
    changes_of(module).restore(module, _slot(module))
    forget(module, _Original)
    forget(module, seen.Seen)


def is_patched(module: nn.Module) -> bool:
    """Return True if `patch` replaced this module's forward."""
    return known(module, _Original) is not None


def is_foreign(module: nn.Module) -> bool:
    """Return True if other code replaced this module's forward."""
    return _slot(module) in module.__dict__ and _slot(module) != "_old_forward"


def original(module: nn.Module) -> Callable:
    """The forward that `patch` replaced, bound to this module."""
    before: Any = known(module, _Original)
    return partial(type(module).forward, module) if before.forward is None else before.forward


def _slot(module: nn.Module) -> str:
    return "_old_forward" if hasattr(module, "_hf_hook") else "forward"


def few(x: torch.Tensor) -> bool:
    """Return True if torch's own operators are measurably faster than ours because x is small."""
    cheap = not torch.compiler.is_compiling() and x.is_cpu and x.numel() <= FEW
    return cheap and not torch.is_grad_enabled() and not always_ours()


def always_ours() -> bool:
    """Return True inside `ours_always`."""
    return _ours_always.get()


@contextmanager
def ours_always() -> Iterator[None]:
    """Disable `few` within the context, for comparisons and tests."""
    token = _ours_always.set(True)
    try:
        yield
    finally:
        _ours_always.reset(token)
