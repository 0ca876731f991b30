"""Memory of declared models: views, writes and host reads behave as they do on one device.

A DTensor shares memory only with views of its local part. A view that needs other ranks' elements
is a copy, and DTensor drops anything written to it. Its host reads return local values. Under
`OneMemory`, a declared model behaves like the plain one:

    y = x.clone()              y[B, S/cp, E]
    v = y[:, 1:]               gathers: v[B, S - 1, E] is a copy, which remembers y
    v += t                     v differs from y: y is gathered, written through v, resharded
    y.mul_(2)                  y differs from v
    v.sum().item()             v is copied from y first; the sum is reduced over ranks, then read

Version counters, which every write in torch advances, show which tensor is out of date. After each
operator, a copy that was written updates its base. Before each operator, a copy whose base was
written is updated. Both updates are ordinary differentiable operators. A plain tensor among
DTensors is treated the same way, as the base of the DTensor that replaces it.

Writes to a DTensor itself run on its parts if DTensor has a rule, and otherwise on the whole tensor
on every rank (`_runs_on_parts`). Only copies and such writes communicate, and only reads in the
model's code synchronize with the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_flatten, tree_leaves, tree_map, tree_unflatten

from warpweave.kernels.runtime.beside import as_dtensor, is_dtensor
from warpweave.layers.sharding.layouts import (
    RESHAPES,
    gather_where,
    has_strides,
    is_cut,
    is_partial,
    laid_out_like,
    reduced_truth,
    reshapable,
    sum_partial,
    whole_tensor,
    without_sums,
)

# Functions that read values, or whose result's shape depends on values. They run on whole tensors.
_READS = frozenset(
    ["tolist", "numpy", "__array__", "tensor", "as_tensor", "equal", "allclose", "isin"]
    + ["masked_select", "unique", "unique_consecutive", "bincount", "nonzero", "argwhere"]
)
# In-place functions for which DTensor has no rule or a wrong one.
_ON_WHOLE = frozenset(
    ["index_put_", "index_reduce_", "masked_scatter_", "put_", "tril_", "triu_", "fill_diagonal_"]
    + ["cumsum_", "cumprod_", "renorm_"]
)
# In-place functions that work along a dim. They are right on parts unless that dim is sharded.
_ALONG_DIM = frozenset(
    ["index_add_", "index_copy_", "index_fill_", "scatter_", "scatter_add_", "scatter_reduce_"]
)
# In-place functions that, on a partial sum, can act on each rank's summand.
_OF_SUMS = frozenset(
    ["add_", "sub_", "mul_", "div_", "iadd_", "isub_", "imul_", "itruediv_", "neg_", "copy_"]
    + ["zero_", "requires_grad_", "detach_"]
)
# Ranks draw their own numbers, so no rank can compute the whole. DTensor rejects partial sums.
_RANDOM = frozenset(
    ["bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_"]
    + ["uniform_", "rrelu_", "dropout_", "alpha_dropout_", "dropout1d_", "dropout2d_", "dropout3d_"]
    + ["feature_alpha_dropout_", "feature_dropout_"]
)
_RESHAPES = frozenset(
    ["squeeze_", "unsqueeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_"]
    + ["resize_as_", "set_", "as_strided_"]
)
# Functions that split a tensor along a dim.
_PIECES = frozenset(["unbind", "split", "split_with_sizes", "chunk", "tensor_split"])
_INPLACE_OPERATORS = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)


# ---------------------------------------------------------------- results


def finished(result: Any) -> Any:
    """A model's result with its copies up to date and its partial sums reduced. A single rank can
    then read it."""

    def finish(x: Any) -> Any:
        if isinstance(x, DTensor):
            refresh(x)
        return sum_partial(x)

    return tree_map(finish, result) if tree_any(is_dtensor, result) else result


@cache
def register_item() -> None:
    """Make `item` of a DTensor (and so float, int, bool and indices) read its logical value. If a
    tensor is not replicated, all ranks must read it. One call per process is enough."""

    def item(operator: Any, args: tuple, kwargs: dict) -> Any:
        with torch.no_grad():
            return operator(whole_tensor(args[0]))

    aten, handlers = torch.ops.aten, DTensor._op_dispatcher._custom_op_handlers
    for read in (aten._local_scalar_dense.default, aten.item.default):  # inference mode calls item
        handlers[read] = item  # type: ignore[assignment]


# ---------------------------------------------------------------- copies that represent views


class _Copy:
    """Link from a copy to its base: on one device, the copy would be the `view` of the base.
    Without a view, both would be the same tensor. `keep` keeps the base alive, as a view does."""

    def __init__(
        self, base: Tensor, view: Callable[[Tensor, bool], Tensor] | None = None, keep: bool = True
    ) -> None:
        self.base = (lambda: base) if keep else weakref.ref(base)
        self.view = view
        self.version = _version(base)  # of the base when they were last equal
        self.differentiable = torch.is_grad_enabled()

    def __reduce__(self) -> tuple[type[dict], tuple]:
        return dict, ()  # a tensor that is saved or deeply copied drops the link

    def update(self, copy: DTensor) -> None:
        """Copy from the base if the base was written."""
        if (base := self.base()) is None:
            return
        refresh(base)
        if _version(base) == self.version:
            return
        self.version = _version(base)
        with torch.set_grad_enabled(self.differentiable):
            new = as_dtensor(self.view(base, False) if self.view else base, copy.device_mesh)
            if not copy.is_leaf:
                copy.detach_()  # all of its previous values are overwritten
            copy.copy_(new)

    def write_back(self, copy: DTensor) -> None:
        """Apply to the base what was written to the copy."""
        if (base := self.base()) is None:
            return
        new: Tensor = copy
        if self.view is not None:
            new = whole_tensor(base).clone(memory_format=torch.contiguous_format)
            self.view(new, True).copy_(whole_tensor(copy))
        elif not isinstance(base, DTensor) or is_partial(base):
            new = whole_tensor(copy)
        base.copy_(as_dtensor(new, copy.device_mesh) if isinstance(base, DTensor) else new)
        self.version = _version(base)
        wrote(base)


def remember(copy: DTensor, base: Tensor, keep: bool = True) -> DTensor:
    """Link a copy to `base`, which is the same tensor on one device, and return the copy."""
    keep = keep or base._is_view() or hasattr(base, "_copy_of")
    copy._copy_of = _Copy(base, keep=keep)  # type: ignore[attr-defined]
    return copy


def _copied(x: DTensor, copy: DTensor) -> DTensor:
    """Return x itself if nothing was copied, else the copy, linked to x."""
    return x if copy is x else remember(copy, x)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version  # an inference tensor cannot be written


def _root_of(x: Tensor) -> Tensor:
    """The tensor of which x is a view, as autograd defines it; x itself if it is not a view."""
    return x._base if x._is_view() else x  # type: ignore[return-value]


def refresh(x: Tensor) -> None:
    """Update x if it is a copy, or a view of one, whose base was written."""
    memory = _root_of(x)
    if remembered := getattr(memory, "_copy_of", None):
        remembered.update(memory)


def wrote(x: Tensor) -> None:
    """Propagate a write of x to its base, and correct the layout of the gradient."""
    memory: Any = _root_of(x)
    differentiable = memory.grad_fn is not None and torch.is_grad_enabled()
    if memory is not x and differentiable and isinstance(memory, DTensor):
        # Autograd writes x's gradient through the same view of the memory's gradient, so that must
        # be sharded like the memory.
        where = without_sums(memory)
        memory.register_hook(lambda grad: grad.redistribute(placements=where))
    if remembered := getattr(memory, "_copy_of", None):
        remembered.write_back(memory)


def _shares_memory(x: Any, y: Any) -> bool:
    x, y = x._local_tensor.untyped_storage(), y._local_tensor.untyped_storage()
    return x._cdata == y._cdata


def _remember(func: Callable, args: tuple, kwargs: dict, at: int, view: DTensor) -> DTensor:
    """Turn the view that is result number `at` of func into a copy that remembers its base."""
    memory = view._base
    given = _tensors_among(args) + _tensors_among(kwargs.values())
    base = next((x for x in given if _root_of(x) is memory), None)
    copy = laid_out_like(view, view.to_local())  # autograd does not treat it as a view
    if base is None:  # a view of a tensor that func created and nothing else holds
        return copy

    def again(new: Tensor, plain: bool) -> Tensor:
        def replace(x: Any) -> Any:
            return new if x is base else whole_tensor(x) if plain else x

        again_args, again_kwargs = tree_map(replace, (args, kwargs))
        return tree_leaves(func(*again_args, **again_kwargs))[at]

    copy._copy_of = _Copy(base, again)  # type: ignore[attr-defined]
    return copy


# ---------------------------------------------------------------- the mode


class OneMemory(TorchFunctionMode):
    """Treat plain tensors as replicated, and make views, writes and reads of DTensors logical.
    `compute` calls an operator. Raises ValueError for writes that shards cannot follow: a change of
    shape in place, `x.data = ...`, or one operator that writes two copies of the same memory."""

    def __init__(self, mesh: DeviceMesh, compute: Callable[[Any, tuple, dict], Any]) -> None:
        super().__init__()
        self.mesh, self.compute = mesh, compute

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors_among(args) + _tensors_among(kwargs.values())
        sharded = sum(map(is_dtensor, tensors))
        if sharded and sharded < len(tensors):
            args, kwargs = tree_map(self._convert, (args, kwargs))
        return self._call(func, args, kwargs) if sharded else func(*args, **kwargs)

    def _convert(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            return x
        return remember(as_dtensor(x, self.mesh), x)

    def _call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        tensors: list[Any] = _tensors_among(args) + _tensors_among(kwargs.values())
        for x in tensors:
            refresh(x)
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            return self._set_item(*args)
        if kwargs.get("out") is not None:
            return self._to_out(func, args, dict(kwargs))
        if name in _PIECES:
            return self._pieces(func, args, kwargs)
        if name in RESHAPES and args and isinstance(args[0], DTensor) and has_strides(args[0]):
            args = (_copied(args[0], reshapable(func, args, kwargs)), *args[1:])
        if name in _READS or (name == "__getitem__" and not _is_basic(args[1], masks=False)):
            found = func(*map_whole(args), **map_whole(kwargs))
            return tree_map(lambda x: as_dtensor(x, self.mesh), found)
        if name == "__format__" and args[0].ndim == 0:
            return format(args[0].item(), *args[1:])
        if name == "where" and len(args) == 1 and not kwargs:
            return self._call(torch.nonzero, args, {"as_tuple": True})
        if kwargs.get("inplace"):
            name += "_"
        in_place = name in _INPLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))
        if in_place and args and isinstance(args[0], DTensor):
            if name == "fill_" and isinstance(args[1], Tensor):
                return self._call(Tensor.copy_, args, {})
            if not _runs_on_parts(name, args, kwargs):
                return self._on_whole(func, args, kwargs)
        elif func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise ValueError("x.data = y has no effect if x is a DTensor; write x.copy_(y)")
        return self._on_parts(func, args, kwargs, tensors)

    def _on_parts(self, func: Any, args: tuple, kwargs: dict, tensors: list[DTensor]) -> Any:
        """Call func on DTensors, update the bases of copies that it wrote, and link new copies."""
        before = [_version(x) for x in tensors]
        result = self.compute(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_") and name.endswith("_"):  # does not advance versions itself
            torch.autograd.graph.increment_version(args[0])
        versions = zip(tensors, before, strict=True)
        written = {id(_root_of(x)): x for x, version in versions if _version(x) != version}
        if len(written) > 1:
            _check_apart(func, [*written.values()])
        for x in written.values():
            wrote(x)

        def noted(at: int, x: Any) -> Any:
            if not isinstance(x, DTensor) or any(x is given for given in tensors):
                return x
            if x._is_view() and not _shares_memory(x, x._base):
                return _remember(func, args, kwargs, at, x)
            return reduced_truth(x)

        if not isinstance(result, tuple | list) or isinstance(result, torch.Size):
            return noted(0, result)
        leaves, spec = tree_flatten(result)
        return tree_unflatten([noted(at, x) for at, x in enumerate(leaves)], spec)

    def _on_whole(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Write to a whole copy of the first argument, then copy it to the argument."""
        new = whole_tensor(args[0]).clone()
        func(new, *map_whole(args[1:]), **map_whole(kwargs))
        self._call(Tensor.copy_, (args[0], as_dtensor(new, self.mesh)), {})
        return args[0]

    def _pieces(self, func: Any, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
        """Split a tensor along a dim like func, with a separate view for each piece. If func itself
        split it, autograd would fill in plain gradients for unused pieces, next to the DTensor
        gradients of the others. A sharded dim is gathered once."""
        if not args:
            kwargs = dict(kwargs)
            args = (kwargs.pop("tensor" if "tensor" in kwargs else "input"),)
        x, args, kwargs = args[0], map_whole(args[1:]), map_whole(kwargs)
        at = 0 if func.__name__ == "unbind" else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else 0)
        sizes = [y.shape for y in func(torch.empty(x.shape, device="meta"), *args, **kwargs)]
        dim %= max(x.ndim, 1)
        x = _copied(x, gather_where(x, [is_cut(p, dim) for p in x.placements]))
        if func.__name__ == "unbind":
            return tuple(self._call(Tensor.select, (x, dim, i), {}) for i in range(len(sizes)))
        lengths = [size[dim] for size in sizes]
        places = zip(accumulate(lengths, initial=0), lengths)
        return tuple(self._call(Tensor.narrow, (x, dim, *place), {}) for place in places)

    def _set_item(self, x: DTensor, index: Any, value: Any) -> None:
        if not _is_basic(index):
            self._on_whole(Tensor.__setitem__, (x, index, value), {})
            return
        place = self._call(Tensor.__getitem__, (x, index), {})
        if not isinstance(value, Tensor):
            self._call(Tensor.fill_, (place, value), {})
            return
        while value.ndim > place.ndim and value.shape[0] == 1:
            value = self._call(Tensor.__getitem__, (value, 0), {})
        self._call(Tensor.copy_, (place, value), {})

    def _to_out(self, func: Any, args: tuple, kwargs: dict) -> Any:
        out = kwargs.pop("out")
        results = self._call(func, args, kwargs)
        for x, new in zip(tree_leaves(out), tree_leaves(results), strict=True):
            if (found := tuple(x.shape)) != (wanted := tuple(new.shape)):
                raise ValueError(f"expected out= of shape {wanted}, got a DTensor of shape {found}")
            self._call(Tensor.copy_, (x, new), {})
        return out


def _tensors_among(given: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, including those in lists, tuples, dicts and slices."""
    found = []
    for x in given:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, list | tuple):
            found += _tensors_among(x)
        elif isinstance(x, dict):
            found += _tensors_among(x.values())
        elif isinstance(x, slice):
            found += _tensors_among((x.start, x.stop, x.step))
    return found


def map_whole(given: Any) -> Any:
    return tree_map(whole_tensor, given)


def _is_basic(index: Any, masks: bool = True) -> bool:
    """Return True for an index that gives a view: only numbers, slices, None and "...". With
    masks=False, also return True for tensors of positions, which DTensor can index by."""

    def is_basic(x: Any) -> bool:
        if isinstance(x, Tensor) and not masks:
            return x.dtype not in (torch.bool, torch.uint8)
        if isinstance(x, Tensor):
            return x.ndim == 0 and x.dtype != torch.bool
        known = x is None or x is Ellipsis or isinstance(x, int | slice | np.integer)
        return known and not isinstance(x, bool)

    return all(map(is_basic, index if isinstance(index, tuple) else (index,)))


def _runs_on_parts(name: str, args: tuple, kwargs: dict) -> bool:
    """Return True for an in-place function that is right on each rank's part of its argument.
    Raises ValueError for one that changes the shape."""
    x = args[0]
    placed = [y.placements for y in tree_leaves((args[1:], kwargs)) if isinstance(y, DTensor)]
    name = name.strip("_") + "_"
    if name in _RESHAPES:
        raise ValueError(
            f"{name} cannot change the shape of a DTensor in place; use {name[:-1]}, which returns "
            "a new tensor"
        )
    if is_partial(x):
        adds_number = not placed and name in ("add_", "sub_", "iadd_", "isub_")
        cut = any(is_cut(p) for y in placed for p in y)
        return name in _RANDOM or (name in _OF_SUMS and not adds_number and not cut)
    if has_strides(x) and (name in _ALONG_DIM or name == "fill_"):
        return False
    if name in _ALONG_DIM:
        dim = kwargs["dim"] if "dim" in kwargs else args[1]
        own = x.placements
        alike = all(p in (q, Replicate()) for y in placed for p, q in zip(y, own, strict=True))
        return alike and not any(p.is_shard(dim % max(x.ndim, 1)) for p in own)
    return name not in _ON_WHOLE


def _check_apart(func: Any, written: list[DTensor]) -> None:
    """Raise ValueError if one operator wrote two copies of the same memory, in unknown order."""
    seen = set()
    for x in written:
        memory: Any = _root_of(x)
        while (copy := getattr(memory, "_copy_of", None)) and (base := copy.base()) is not None:
            memory = _root_of(base)
        if id(memory) in seen:
            raise ValueError(
                f"{func.__name__} writes to two views of the same sharded tensor at once; write to "
                "them one at a time"
            )
        seen.add(id(memory))
