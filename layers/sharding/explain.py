"""Report of the layouts and collectives, with bytes, that DTensor derived from a model's plan.

    with explain_sharding(model) as seen:
        model(tokens, labels).backward()
    print(seen)

An activation that the plan does not mention may drift to a layout that costs collectives later. The
table shows where this happens. An entry for the module prevents it (`declare`). Only DTensor's
collectives are listed, not those that a model calls directly (``dist.all_reduce``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode


class _Sent(NamedTuple):
    """One collective."""

    phase: str
    module: str
    name: str
    axis: str
    bytes: int  # that leave a rank


# Bytes that leave each of R ranks, in units of the collective's local input, by the bandwidth-
# optimal algorithms (Thakur et al. 2005).
_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda R: 2 * (R - 1) / R,
    "all_gather_into_tensor": lambda R: R - 1,
    "reduce_scatter_tensor": lambda R: (R - 1) / R,
    "all_to_all_single": lambda R: (R - 1) / R,
    "broadcast": lambda R: 1.0,
}


class Explanation:
    """Layouts and collectives recorded by `explain_sharding`; ``str()`` gives a table of each.

    Attributes:
        layouts: name of a parameter, or "name()" for the output of a module -> its dims and
            sharding, such as "[4/dp, 16, 32] {partial tp}".
        sent: the collectives in order.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from warpweave import explain_sharding, shard
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = nn.Sequential(nn.Linear(8, 32))
        >>> model = shard(model, {"0.weight": "out in"}, mesh, {"out": "tp"})
        >>> with explain_sharding(model) as seen:
        ...     y = model(torch.randn(2, 8))
        >>> sorted(seen.layouts)
        ['()', '0()', '0.bias', '0.weight']
    """

    def __init__(self) -> None:
        self.layouts: dict[str, str] = {}
        self.sent: list[_Sent] = []

    def counts(self, axis: str, phase: str) -> Counter[str]:
        """The number of collectives of each kind over an axis in "forward" or "backward"."""
        return Counter(s.name for s in self.sent if (s.axis, s.phase) == (axis, phase))

    def __str__(self) -> str:
        width = max(map(len, self.layouts), default=0)
        lines = [f"{name:{width}}  {layout}" for name, layout in self.layouts.items()]
        rows: dict[tuple, list[int]] = {}
        for sent in self.sent:
            rows.setdefault(sent[:4], []).append(sent.bytes)
        lines += ["", f"{'phase':9} {'axis':6} {'collective':22} {'times':>5} {'bytes':>9}  module"]
        for (phase, module, name, axis), sizes in rows.items():
            lines.append(f"{phase:9} {axis:6} {name:22} {len(sizes):5} {sum(sizes):9}  {module}")
        return "\n".join(lines)


def _layout(x: DTensor) -> str:
    placed = [*zip(x.device_mesh.mesh_dim_names or (), x.placements, strict=True)]
    cuts = [[axis for axis, p in placed if p == Shard(d)] for d in range(x.ndim)]
    dims = ", ".join("/".join([str(n), *axes]) for n, axes in zip(x.shape, cuts, strict=True))
    partial = [axis for axis, p in placed if p.is_partial()]
    return f"[{dims}]" + (f" {{partial {' '.join(partial)}}}" if partial else "")


class _Listener(TorchDispatchMode):
    """Record the collectives that DTensor's operators call."""

    def __init__(self, seen: Explanation, mesh: DeviceMesh) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        self.axes = {mesh.get_group(axis).group_name: axis for axis in names}
        self.seen, self.modules = seen, [""]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor runs it; its collectives come back here
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name in _FACTORS:
            own, axis = args[0], self.axes.get(args[-1], "?")
            ranks = dist.get_world_size(_resolve_process_group(args[-1]))
            nbytes = round(own.numel() * own.element_size() * _FACTORS[name](ranks))
            phase = "backward" if torch._C._current_graph_task_id() != -1 else "forward"
            module = self.modules[-1] if phase == "forward" else ""
            self.seen.sent.append(_Sent(phase, module, name, axis, nbytes))
        return func(*args, **(kwargs or {}))


@contextmanager
def explain_sharding(model: nn.Module) -> Iterator[Explanation]:
    """Record the layouts and collectives of a model that `declare.shard` sharded.

    Raises ValueError for a model without DTensor parameters or buffers.

    Examples:
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from warpweave import shard
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = shard(nn.Linear(8, 32), {"weight": "out in"}, mesh, {"out": "tp"})
        >>> with explain_sharding(model) as seen:
        ...     y = model(torch.randn(2, 8))
        >>> seen.layouts["weight"]
        '[32/tp, 8]'
    """
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sharded = {name: x for name, x in held.items() if isinstance(x, DTensor)}
    if not sharded:
        kind = type(model).__name__
        raise ValueError(f"no parameter or buffer of {kind} is a DTensor; shard the model first")
    seen = Explanation()
    seen.layouts |= {name: _layout(x) for name, x in sharded.items()}
    listener = _Listener(seen, next(iter(sharded.values())).device_mesh)

    def enter(name: str) -> Callable[..., None]:
        return lambda *_: listener.modules.append(name)

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, result: Any) -> None:
            listener.modules.pop()
            first = result[0] if isinstance(result, tuple) else result
            if isinstance(first, DTensor):
                seen.layouts[f"{name}()"] = _layout(first)

        return hook

    with ExitStack() as hooks, listener:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(enter(name), prepend=True))
            hooks.enter_context(module.register_forward_hook(leave(name)))
        yield seen
