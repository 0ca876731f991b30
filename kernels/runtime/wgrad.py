"""Weight gradients, where and when they are wanted: an ambient place that a backward pass fills.

A linear layer's backward owes two products: the gradient of its input, which the previous stage
waits for, and the gradient of its weight, which nobody waits for. Zero-bubble schedules (Qi et al.
2023, arXiv:2401.10241) run the second one later. torch's own input/weight split runs the whole
backward of a custom ``autograd.Function`` twice (pytorch#174017), so the Functions of this project
hand the second product over themselves: ``return dx, wgrad(weight, lambda: dy.T @ x)``.

With nothing active the gradient is computed and returned, and autograd (hooks, DDP, FSDP2) sees
nothing unusual. Within `collect` the closure is kept and ``None`` is returned;
``WeightGradients.run`` computes it. Within `accumulate` it is computed at once and added where the
parameter's gradient is kept, so that no layer's gradient is ever held beside that place, and the
rows of an embedding are added without a table of zeros around them.
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
    """The weight gradients of one backward pass (one stage, one micro-batch), and where they go.

    Args:
        buffers: parameter -> the gradient buffer, of its shape, in which its gradient is kept. A
            parameter whose ``.grad`` is None gets this buffer as its ``.grad``, overwritten. A
            parameter without a buffer gets the first gradient itself.
    """

    def __init__(self, buffers: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        self.buffers = buffers if buffers is not None else {}
        self._entries: list[tuple[torch.Tensor, _Make, _Into | None]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def append(self, weight: torch.Tensor, make: _Make, into: _Into | None = None) -> None:
        """Keep for `run` what `write` would do now."""
        self._entries.append((weight, make, into))

    @torch.no_grad()
    def write(self, weight: torch.Tensor, make: _Make, into: _Into | None = None) -> None:
        """Add ``make()`` to the ``.grad`` of `weight`, by ``into(buffer, True)`` if given."""
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
        """The ``.grad`` of `weight`, and whether to add to it; a new one is empty, of `dtype`."""
        add = weight.grad is not None
        if not add:
            own = self.buffers.get(weight)
            weight.grad = torch.empty_like(weight, dtype=dtype) if own is None else own
        return weight.grad, add

    def run(self) -> None:
        """Write every kept gradient, in order, and forget it."""
        entries, self._entries = self._entries, []
        for entry in entries:
            self.write(*entry)


_active: ContextVar[tuple[WeightGradients, bool] | None] = ContextVar(
    "warpweave_wgrad", default=None
)


@contextmanager
def _use(store: WeightGradients, later: bool) -> Iterator[WeightGradients]:
    """The backward pass runs in the calling thread: autograd's others do not see its variables."""
    token = _active.set((store, later))
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield store
    finally:
        _active.reset(token)


def collect(store: WeightGradients) -> AbstractContextManager[WeightGradients]:
    """Within this context, `store` keeps what weight gradients need, and ``store.run`` makes them.

    The backward pass runs in the calling thread meanwhile.
    """
    return _use(store, later=True)


def accumulate(store: WeightGradients) -> AbstractContextManager[WeightGradients]:
    """Within this context, gradients of parameters that have a buffer in `store` go there at once.

    The backward pass runs in the calling thread meanwhile; hooks on these parameters do not see
    their gradients, as autograd does not.
    """
    return _use(store, later=False)


def wgrad(weight: torch.Tensor, make: _Make, into: _Into | None = None) -> torch.Tensor | None:
    """Return ``make()``, or let the active context have it and return None.

    A gradient that is handed over is added to the ``.grad`` of `weight`. One that is computed from
    others (a weight norm, an adapter) has none: its gradient goes on through autograd.

    Args:
        weight: the leaf parameter.
        make: computes the gradient, in the shape of `weight` and its ``grad_dtype``.
        into: ``into(buffer, add)`` adds the same gradient to a buffer, or overwrites the buffer;
            given where that costs less than making it.
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
    """Whether the gradient of `weight` is made later, within `collect`."""
    active = None if torch.compiler.is_compiling() else _active.get()
    return active is not None and active[1] and weight.is_leaf


def wgrad_buffer(
    weight: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, bool, torch.Tensor | None]:
    """(buffer, add, gradient) of a weight gradient that cannot wait, as it comes with the input's.

    The caller adds it to `buffer`, or overwrites that, and returns `gradient`: the buffer, or None
    where the active context has it.
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
    """The dtype in which the gradient of a parameter is wanted."""
    # One computed from others (a weight norm, an adapter) has no say, and dynamo knows no say.
    if torch.compiler.is_compiling() or not parameter.is_leaf:
        return parameter.dtype
    return parameter.grad_dtype or parameter.dtype  # None means that any dtype will do


def leaf_of(parameter: torch.Tensor | None, *, bias: bool = False) -> torch.Tensor | None:
    """The leaf that `parameter` is a view of the whole of, or else `parameter` itself.

    Functions are given the leaf: through a view its gradient could be neither collected nor wider
    than the parameter, because autograd rounds it to the dtype of the view. They know a weight by
    its rows, so its leaf must have rows as long; that of a `bias` may have any shape.
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

    return wgrad(bias, make)
