"""A device that computes on the CPU but is distinct from it, of torch's private-use type.

Its tensors know that they are on another device, and each holds a CPU tensor with its values. As on
a GPU, an operation on tensors of both devices raises, except for scalars and copies. So a complete
proof, values included, can run on a pretended GPU (`pretend_gpu.py` only tracks devices and
computes nothing).

Run this file as a program, because the device is registered for the whole process. It proves a
layout of one rank and one of two ranks on the device, the first also with each fault of `FAULTS`.
It prints one JSON object: the worst error of each, or the exception.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from typing import Any

import torch
from plants import Plant, planted
from threads import on_mesh
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from warpweave.parallel.mesh import ConnectedMesh, Mesh
from warpweave.prove import Layout, expected, proof
from warpweave.prove import truth as truths

DEVICE = "elsewhere"
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default)


class Elsewhere(torch.Tensor):
    """A tensor on the device; `here` holds its values."""

    here: torch.Tensor

    @staticmethod
    def __new__(cls, here: torch.Tensor) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(),
            dtype=here.dtype, device=torch.device(DEVICE, 0),
        )  # fmt: skip
        made.here = here
        return made

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.here.untyped_storage()

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    @property
    def data(self) -> Elsewhere:
        return self.detach()

    @data.setter
    def data(self, value: Elsewhere) -> None:
        _set_data(self, value)


_DATA = torch.Tensor.data


def _set_data(x: torch.Tensor, value: torch.Tensor) -> None:
    """Set ``x.data = value``, where `x` may be a parameter that is not on the device."""
    if not isinstance(value, Elsewhere):
        _DATA.__set__(x, value)
        return
    x.__class__, x._is_param, x.here = Elsewhere, isinstance(x, torch.nn.Parameter), value.here
    torch._C._swap_tensor_impl(x, value.detach().requires_grad_(x.requires_grad))


def _run(func, args: tuple, kwargs: dict) -> Any:
    """Run `func` on the CPU. Its results are on the device if a tensor or the option is."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    strangers = [x for x in tensors if not isinstance(x, Elsewhere) and x.ndim and there]
    if strangers and func not in _COPIES and func is not aten.index.Tensor:
        raise RuntimeError(f"{func} of tensors on the CPU and on {DEVICE}")
    device = kwargs.get("device")
    elsewhere = bool(there) if device is None else torch.device(device).type == DEVICE
    options = {**kwargs, "device": torch.device("cpu")} if device is not None else kwargs
    args_here, options = tree_map(
        lambda x: x.here if isinstance(x, Elsewhere) else x, (args, options)
    )
    found = func(*args_here, **options)
    if func is aten.copy_.default:
        return args[0]
    if not elsewhere:
        return found
    wrapped = tree_map(lambda x: Elsewhere(x) if isinstance(x, torch.Tensor) else x, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class Factories(TorchDispatchMode):
    """A mode in which tensors made on the device or moved to it are placed there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is aten.is_pinned:
            return False
        if func.overloadpacket in (aten.pin_memory, aten._pin_memory):
            return args[0].clone()
        return _run(func, args, kwargs or {})


def prove(mesh: ConnectedMesh, layout: Layout) -> float:
    with Factories():
        return proof.prove_layout(layout, mesh).worst


def _moved_home(right):
    """Plant a fault: the engine ignores the layout's device."""
    return lambda layout, *rest: right(dataclasses.replace(layout, device="cpu"), *rest)


def _stays(right):
    """Plant a fault: the plain model's weights are on the device, but its tokens are not."""
    return lambda device, *tensors: [*tensors]


FAULTS = {
    "engine": Plant(proof, "make_engine", _moved_home),
    "plain model's batch": Plant(expected, "_on", _stays),
}


def _noted(seen: set[str], at: int) -> Callable[[Any], Any]:
    """Note the device of argument number `at`, which is a device or a tensor."""

    def plant(right):
        def call(*args):
            seen.add(str(getattr(args[at], "device", args[at])))
            return right(*args)

        return call

    return plant


def _proven(layout: Layout) -> dict[str, Any]:
    """Return the worst error, and the devices of the plain model's training
    and the layout's results."""
    plain, results = set[str](), set[str]()
    expected.train.cache_clear()
    with planted(
        Plant(truths, "train", _noted(plain, 4)),
        Plant(proof._Comparison, "tensor", _noted(results, 3)),
    ):
        worst = max(on_mesh(layout.mesh, prove, layout))
    return {"worst": worst, "plain model": sorted(plain), "results": sorted(results)}


def main() -> None:
    warnings.simplefilter("ignore")
    make = torch.tensor  # bypasses every mode to write to the device
    torch.tensor = lambda data, device=None, **how: make(data, **how).to(device)
    torch.nn.Parameter.data = property(_DATA.__get__, _set_data)
    _setup_privateuseone_for_python_backend(DEVICE)
    alone = Layout(Mesh(), style="llama", packed=True, device=DEVICE)
    ranks = Layout(Mesh(dp=2), device=DEVICE, dtype="fp32")
    expected.STEPS = proof.STEPS = 1
    found: dict[str, Any] = {"alone": _proven(alone), "ranks": _proven(ranks)}
    for name, fault in FAULTS.items():
        with planted(fault):
            try:
                found[name] = _proven(alone)
            except RuntimeError as error:
                found[name] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
