"""Weight gradients: returned to autograd, deferred, or added to a gradient buffer at once.

    context       return dx, wgrad(weight, lambda: dy.T @ x)
    none          computes dW and returns it to autograd (hooks, DDP and FSDP2 see nothing unusual)
    collect       keeps the closure and returns None; ``WeightGradients.run`` computes dW later
    accumulate    computes dW at once, adds it to the parameter's gradient buffer, and returns None

A linear layer's backward has two products: the input gradient, which the previous pipeline stage
waits for, and the weight gradient, which no other stage waits for. So zero-bubble schedules (Qi et
al. 2023, arXiv:2401.10241) compute the weight gradient later: `collect`. torch's own input/weight
split runs the whole backward of a custom ``autograd.Function`` twice (pytorch#174017), so Functions
pass the second product to `wgrad` themselves. With `accumulate`, a layer's gradient is not held in
addition to the buffer, and an embedding adds rows to the buffer instead of a table of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar

import torch

from warpweave.kernels.reference import compute_dtype

_Make = Callable[[], torch.Tensor]
_Into = Callable[[torch.Tensor, bool], object]


class WeightGradients:
    """The deferred weight gradients of one backward pass (one stage, one micro-batch), and the
    buffers of all weight gradients.

    Args:
        buffers: parameter -> gradient buffer of the same shape. If a parameter's ``.grad`` is None,
            the buffer becomes its ``.grad`` and is overwritten; later gradients are added. A
            parameter without a buffer gets the first gradient as its ``.grad``.
    """

    def __init__(self, buffers: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        self.buffers = buffers if buffers is not None else {}
        self._entries: list[tuple[torch.Tensor, _Make, _Into | None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, weight: torch.Tensor, make: _Make, into: _Into | None = None) -> None:
        """Defer `write` until `run`."""
        self._entries.append((weight, make, into))

    @torch.no_grad()
    def write(self, weight: torch.Tensor, make: _Make, into: _Into | None = None) -> None:
        """Add ``make()`` to the ``.grad`` of `weight`, using ``into(buffer, True)`` if given."""
        add = weight.grad is not None
        if not add:
            if weight not in self.buffers:
                weight.grad = make()
                return
            weight.grad = self.buffers[weight]
        if into is not None:
            into(weight.grad, add)
        elif add:
            weight.grad.add_(make())
        else:
            weight.grad.copy_(make())

    def buffer(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, bool]:
        """The ``.grad`` of `weight`, and True if it must be added to; a new one is empty."""
        add = weight.grad is not None
        if not add:
            own = self.buffers.get(weight)
            weight.grad = torch.empty_like(weight, dtype=dtype) if own is None else own
        return weight.grad, add

    def run(self) -> None:
        """Compute and add all deferred gradients, in order."""
        entries, self._entries = self._entries, []
        for entry in entries:
            self.write(*entry)


_active: ContextVar[tuple[WeightGradients, bool] | None] = ContextVar(
    "warpweave_wgrad", default=None
)


@contextmanager
def _use(store: WeightGradients, later: bool) -> Iterator[WeightGradients]:
    """Run the backward pass in the calling thread: autograd's other threads do not see its
    variables."""
    token = _active.set((store, later))
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield store
    finally:
        _active.reset(token)


def collect(store: WeightGradients) -> AbstractContextManager[WeightGradients]:
    """A context in which weight gradients are deferred to ``store.run``.

    Meanwhile the backward pass runs in the calling thread.
    """
    return _use(store, later=True)


def accumulate(store: WeightGradients) -> AbstractContextManager[WeightGradients]:
    """A context in which gradients of parameters with a buffer in `store` are added to it at once.

    Meanwhile the backward pass runs in the calling thread. Hooks on these parameters do not see
    their gradients, because autograd does not see them.
    """
    return _use(store, later=False)


def wgrad(weight: torch.Tensor, make: _Make, into: _Into | None = None) -> torch.Tensor | None:
    """Return ``make()``, or pass it to the active context and return None.

    The context adds the gradient to the ``.grad`` of `weight`. A weight that is computed from other
    tensors (a weight norm, an adapter) has no ``.grad``: its gradient is returned to autograd.

    Args:
        weight: the leaf parameter.
        make: computes the gradient, in the shape of `weight` and its ``grad_dtype``.
        into: ``into(buffer, add)`` adds the same gradient to a buffer, or overwrites the buffer.
            Pass it if that is cheaper than ``make``.
    """
    active = None if torch.compiler.is_compiling() else _active.get()
    if active is None or not weight.is_leaf:
        return make()
    store, later = active
    if later:
        store.append(weight, make, into)
    elif weight in store.buffers:
        store.write(weight, make, into)
    else:
        return make()
    return None


def waits(weight: torch.Tensor) -> bool:
    """Return True if `collect` defers the gradient of `weight`."""
    active = None if torch.compiler.is_compiling() else _active.get()
    return active is not None and active[1] and weight.is_leaf


def wgrad_buffer(
    weight: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
    """(buffer, add, gradient) for a weight gradient that is computed together with the input's.

    This gradient is not deferred. The caller adds it to `buffer` if `add`, else overwrites
    `buffer`, and returns `gradient` to autograd: the buffer, or None if it belongs to the active
    context.
    """
    active = None if torch.compiler.is_compiling() else _active.get()
    if active is not None and weight.is_leaf:
        store, later = active
        if later or weight in store.buffers:
            return *store.buffer(weight, dtype), None
    buffer = torch.empty_like(weight, dtype=dtype)
    return buffer, False, buffer


# ---------------------------------------------------------------- of parameters


def grad_dtype(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of a parameter's gradient: its ``grad_dtype``, by default the parameter's dtype."""
    # Only leaves have a grad_dtype, and dynamo does not know it.
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # None accepts any dtype


def leaf_of(parameter: torch.Tensor | None, *, bias: bool = False) -> torch.Tensor | None:
    """The leaf parameter if `parameter` is a view of all of it, else `parameter` itself.

    Functions use the leaf. Through a view, the gradient could not be deferred, and autograd would
    round it to the view's dtype, so it could not be wider than the parameter. The rows of a
    weight's leaf must be as long as the view's; the leaf of a `bias` may have any shape.
    """
    if parameter is None or torch.compiler.is_compiling() or parameter.is_leaf:
        return parameter
    if parameter.grad_fn.name() != "ViewBackward0":
        return parameter
    leaf = getattr(parameter.grad_fn.next_functions[0][0], "variable", parameter)
    return leaf if bias or leaf.shape[-1:] == parameter.shape[-1:] else parameter


def rows(x: torch.Tensor) -> torch.Tensor:
    """x[..., K] as [T, K]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])  # -1 is ambiguous without features


def bias_gradient(bias: torch.Tensor, dy: torch.Tensor) -> torch.Tensor | None:
    """db[N] = sum over tokens of dy[..., N], or None: see `wgrad`.

    Summed in float32 (float64 for float64) in one order: deterministic.
    """

    def make() -> torch.Tensor:
        total = rows(dy).sum(0, dtype=compute_dtype(dy))
        return total.to(grad_dtype(bias)).view(bias.shape)

    def into(buffer: torch.Tensor, add: bool) -> None:
        if add:
            buffer.add_(make())
        elif buffer.dtype == compute_dtype(dy):
            torch.sum(rows(dy), 0, dtype=buffer.dtype, out=buffer.view(-1))
        else:
            buffer.copy_(make())

    return wgrad(bias, make, into)
