"""Declared sharding: a plan names mesh axes for dims, and DTensor propagates them through a model.

    axes = {"batch": "dp", "heads": "tp", "hidden": "tp", "vocab": "tp"}
    plan = {
        "(input_ids)":     "batch seq",                 # an argument of the model's forward
        "layers.*.q.weight": "(heads dim) width",       # parameters, by name
        "layers.*.out.weight": "width (heads dim)",
        "layers.*.up.weight": "hidden width",
        "layers.*.down.weight": "width hidden",
        "layers.*()":      "batch seq width",           # the output of a module
    }
    shard(model, plan, mesh, axes)

An entry lists the dims of a tensor. It is either a string of names, which `axes` maps to mesh axes
as in Mesh-TensorFlow (Shazeer et al. 2018, arXiv:1811.02084), or, as in GSPMD (Xu et al. 2021,
arXiv:2105.04663), a tuple with an axis, a tuple of axes or None per dim: ``("tp", None)``.
Parameters and buffers without an entry are replicated. DTensor chooses the layout of an activation
without an entry: the one that costs the least communication in the next operator.

The code of the model does not change: it sees logical shapes, so ``x.view(B, S, H, D)`` is right on
every mesh. Operators of ``warpweave.kernels`` also have sharding rules (`kernels.sharding`).
`warpweave.layers.sharding.explain` shows the resulting layouts and collectives.

    4 ranks, dp = 2 x tp = 2      dp 0, tp 0          dp 0, tp 1       dp 1: the same weights,
    x        batch seq width      first half of the batch, both        the other half of the batch
    up.weight   hidden width      first half of rows  second half
    down.weight width hidden      first columns       second columns   y: partial sums, all-reduced
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import wraps
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from warpweave.kernels.runtime.beside import as_dtensor
from warpweave.kernels.sharding import register_shardings
from warpweave.layers.sharding.memory import OneMemory, finished, register_item, remember
from warpweave.layers.sharding.rules import computed, register_reductions

Axes = Mapping[str, str | tuple[str, ...]]
Dims = str | Sequence[str | tuple[str, ...] | None]

_PLACE = re.compile(r"(?P<module>[^()]*)\((?P<argument>\w*)\)")
_TERM = re.compile(r"\(([^()]+)\)|([^\s()]+)")
_PART = re.compile(r"(?P<name>[^\W\d]\w*)(=(?P<size>[1-9]\d*))?")


class _Dim(NamedTuple):
    """One dim of a tensor: the mesh axes that shard it, and the sizes of its named parts."""

    over: tuple[str, ...]
    sizes: tuple[int | None, ...] = (None,)


# ---------------------------------------------------------------- parsing a plan


def _tuple(over: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if over is None else (over,) if isinstance(over, str) else tuple(over)


def _read(entry: str, dims: Dims, axes: Axes) -> list[_Dim | None]:
    """The dims of a plan's entry; None represents "...", any number of replicated dims."""
    if not isinstance(dims, str):
        return [_Dim(_tuple(over)) for over in dims]
    if re.sub(_TERM, "", dims).strip():
        raise ValueError(f"plan[{entry!r}]: {dims!r} has unbalanced parentheses")
    found: list[_Dim | None] = []
    for group, name in re.findall(_TERM, dims):
        if name == "..." and None not in found:
            found.append(None)
            continue
        parts = [re.fullmatch(_PART, part) for part in (group or name).split()]
        if not all(parts):
            raise ValueError(
                f"plan[{entry!r}]: {dims!r} may contain only names, name=size pairs and one '...', "
                f"got {group or name!r}"
            )
        first, *others = [_tuple(axes.get(part["name"])) for part in parts if part]
        if any(others):
            raise ValueError(
                f"plan[{entry!r}]: only the first name in ({group}) can be sharded; the shards of "
                "the other names are not contiguous"
            )
        sizes = (part["size"] for part in parts if part)
        found.append(_Dim(first, tuple(int(size) if size else None for size in sizes)))
    return found


def _placements(what: str, dims: list[_Dim | None], shape: torch.Size, mesh: DeviceMesh) -> list:
    """Shard or Replicate per axis of the mesh, for a tensor of this logical shape.

    Raises ValueError naming `what` if the number of dims differs, the mesh does not have an axis,
    an axis shards two dims, the axes of a dim are not in the mesh's order, a size differs, or a
    sharded size is not divisible by the ranks.
    """
    names = mesh.mesh_dim_names or ()
    if None in dims:
        at = dims.index(None)
        dims = [*dims[:at], *[_Dim(())] * (len(shape) - len(dims) + 1), *dims[at + 1 :]]
    if len(dims) != len(shape):
        raise ValueError(f"{what} has shape {tuple(shape)}, but the plan names {len(dims)} dims")
    placements: list[Any] = [Replicate()] * mesh.ndim
    for d, (dim, size) in enumerate(zip(dims, shape, strict=True)):
        assert dim is not None
        for axis in dim.over:
            if axis not in names:
                raise ValueError(f"{what}: the mesh has axes {names}, not {axis!r}")
            if placements[names.index(axis)] != Replicate():
                raise ValueError(f"{what}: axis {axis!r} would shard two dims of {tuple(shape)}")
            placements[names.index(axis)] = Shard(d)
        if [*dim.over] != [axis for axis in names if axis in dim.over]:
            raise ValueError(f"{what}: dim {d} lists axes {dim.over}; use the mesh's order {names}")
        ranks = prod(mesh.size(names.index(axis)) for axis in dim.over)
        _check_dim(f"{what}: dim {d}", dim.sizes, size, ranks)
    return placements


def _check_dim(what: str, sizes: tuple[int | None, ...], size: int, ranks: int) -> None:
    """Raise ValueError unless parts of these `sizes` fill a dim and `ranks` can shard the first."""
    known = prod(part for part in sizes if part is not None)
    if size % known or (None not in sizes and known != size):
        raise ValueError(
            f"{what} has size {size}, which does not match the sizes {sizes} in the plan (None "
            "means not specified)"
        )
    first = sizes[0]
    if first is None:
        first = size // known if sizes.count(None) == 1 else size
    if first % ranks:
        of = "" if first == size else f" (dim size {size} = {first} x {size // first})"
        raise ValueError(f"{what}: size {first} is not divisible by {ranks} ranks{of}")


# ---------------------------------------------------------------- the model


def shard(
    model: nn.Module, plan: Mapping[str, Dims], mesh: DeviceMesh, axes: Axes | None = None
) -> nn.Module:
    """Shard a model in place as `plan` declares, and return it.

    Parameters and buffers become DTensors with the values of the mesh's first ranks. Create the
    optimizer afterwards. A gradient has the placement of its parameter; the backward sums it over
    mesh axes. Plain tensors that the forward combines with DTensors (masks, positions, inputs
    without an entry) are assumed to be the same on all ranks. Views, writes and host reads have the
    same meaning as on one device, or raise an error that names the operation
    (`warpweave.layers.sharding.memory`).

    Args:
        plan: entries; the first one that matches applies. A key is an `fnmatch` pattern for names
            of parameters or buffers, or for names of modules followed by "()" for their output (a
            tensor, or the first item of a tuple) or by the name of a forward argument in
            parentheses. A value lists dims, either as names in a string ("(heads dim)" for a merged
            dim, "heads=8" to check a size, "..." for any other dims) or as a tuple of mesh axes.
        mesh: must have named axes.
        axes: name of a dim -> the axis that shards it, or several axes in the mesh's order.

    The layouts are kept by hooks on tensors and modules. A deep copy, a module created later, or a
    parameter unfrozen later does not have them. Dropout on sharded activations draws from each
    rank's own generator: give data ranks different seeds, and tensor ranks the same seed.

    For an argument with an entry, a plain tensor is the logical tensor, the same on all ranks, and
    each rank uses its own part. If each rank loads only its part, pass ``DTensor.from_local``.

    Raises:
        ValueError: an entry matches nothing, a name in `axes` occurs in no entry, or dims, axes and
            ranks do not fit (the message names the parameter or module). Activations are checked
            when the model is called.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8))
        >>> plan = {"0.weight": "hidden width", "0.bias": "hidden", "1.weight": "width hidden"}
        >>> plan |= {"1()": "batch width"}
        >>> shard(model, plan, mesh, {"hidden": "tp"})(torch.randn(2, 8)).shape
        torch.Size([2, 8])
    """
    if mesh.mesh_dim_names is None:
        raise ValueError("shard needs a mesh whose axes have names (mesh_dim_names)")
    register_shardings()
    register_reductions()
    register_item()
    axes = axes or {}
    entries = {key: _read(key, dims, axes) for key, dims in plan.items()}
    text = " ".join(dims for dims in plan.values() if isinstance(dims, str))
    unknown = set(axes) - set(re.findall(r"[^\s()=]+", text))
    if unknown:
        raise ValueError(f"axes: {sorted(unknown)} do not occur in the plan")
    unused = dict.fromkeys(entries)
    _shard_tensors(model, entries, mesh, unused)
    _shard_activations(model, entries, mesh, unused)
    if unused:
        raise ValueError(f"plan: no parameter or module matches {sorted(unused)}")
    model.forward = _replicating(model.forward, mesh)
    return model


def _shard_tensors(
    model: nn.Module, entries: dict[str, Any], mesh: DeviceMesh, unused: dict[str, None]
) -> None:
    """Make every parameter and buffer a DTensor, and tied ones the same DTensor."""
    entries = {key: dims for key, dims in entries.items() if not _PLACE.fullmatch(key)}
    done: dict[int, tuple[str, Any]] = {}
    for prefix, module in model.named_modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None:
                    continue
                full = f"{prefix}.{name}".lstrip(".")
                key = next((key for key in entries if fnmatchcase(full, key)), None)
                unused.pop(key, None)
                dims = None if key is None else entries[key]
                first, new = done.get(id(tensor), (full, None))
                where = [Replicate()] * mesh.ndim
                if dims is not None:
                    where = _placements(full, dims, tensor.shape, mesh)
                if new is None:
                    new = _sharded(tensor, mesh, where)
                    done[id(tensor)] = full, new
                elif dims is not None and list(new.placements) != where:
                    raise ValueError(f"{full} is tied to {first}; shard them the same way")
                held[name] = new


def _sharded(tensor: Tensor, mesh: DeviceMesh, where: list) -> Tensor:
    """A parameter or buffer as a DTensor; a gradient gets the parameter's placement."""
    cut = distribute_tensor(tensor.detach(), mesh, where)
    if not isinstance(tensor, nn.Parameter):
        return cut
    new = nn.Parameter(cut, tensor.requires_grad)
    if tensor.requires_grad:
        _sum_gradient(new)
    return new


def _sum_gradient(x: Any) -> None:
    """Give x's gradient the placements of x. DTensor would leave partial sums in it."""
    where = x.placements
    x.register_hook(lambda grad: grad.redistribute(placements=where))


def _shard_activations(
    model: nn.Module, entries: dict[str, Any], mesh: DeviceMesh, unused: dict[str, None]
) -> None:
    """Add hooks that give arguments and results of modules the layouts of their entries."""
    for name, module in model.named_modules():
        places = ((key, _PLACE.fullmatch(key)) for key in entries)
        named = {k: p["argument"] for k, p in places if p and fnmatchcase(name, p["module"])}
        for argument in dict.fromkeys(named.values()):
            key = next(key for key, given in named.items() if given == argument)
            unused.pop(key, None)
            what = f"{name or 'the model'}({argument})"
            put = _placer(what, entries[key], mesh)
            if not argument:
                module.register_forward_hook(_on_result(what, put))
                continue
            known = [*inspect.signature(module.forward).parameters]
            if argument not in known:
                raise ValueError(f"{what}: forward has only the arguments {known}")
            hook = _on_argument(put, argument, known.index(argument))
            module.register_forward_pre_hook(hook, with_kwargs=True)


def _placer(what: str, dims: list[_Dim | None], mesh: DeviceMesh) -> Callable[[Any], Any]:
    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        where = _placements(what, dims, x.shape, mesh)
        given, x = x, as_dtensor(x, mesh)
        y = remember(x.redistribute(placements=where), given, keep=False)
        if x.requires_grad:  # sum once, and by reduce-scatter: on the side without partial sums
            partial = any(p.is_partial() for p in x.placements)
            _sum_gradient(y if partial else x)
        return y

    return place


def _on_result(what: str, place: Callable[[Any], Any]) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple, result: Any) -> Any:
        if isinstance(result, Tensor):
            return place(result)
        if type(result) is tuple and result and isinstance(result[0], Tensor):
            return (place(result[0]), *result[1:])
        raise ValueError(
            f"{what} returns a {type(result).__name__}, but a plan entry for an output needs a "
            "tensor, or a tuple whose first item is a tensor"
        )

    return hook


def _on_argument(place: Callable[[Any], Any], argument: str, at: int) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if argument in kwargs:
            return args, kwargs | {argument: place(kwargs[argument])}
        if at < len(args):
            args = (*args[:at], place(args[at]), *args[at + 1 :])
        return args, kwargs

    return hook


def _replicating(forward: Callable[..., Any], mesh: DeviceMesh) -> Callable[..., Any]:
    """Wrap a model's forward so that plain tensors may meet DTensors in it."""

    @wraps(forward)  # Hugging Face reads the signature
    def run(*args: Any, **kwargs: Any) -> Any:
        # Writes are detected by version counters, which do not exist in inference mode.
        grads = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(grads):
            with OneMemory(mesh, computed):
                result = forward(*args, **kwargs)
            return finished(result)

    return run
