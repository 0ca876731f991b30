"""LoRA adapters on a model that is spread over ranks: y = W x + s B A x, before or after `apply`.

peft puts a wrapper with the layers A[r, E] and B[F, r] around a linear layer W. Both remain whole,
plain tensors on every rank. A rank computes with the part that matches its part of W. Gradients are
summed, so every rank has the whole gradients (tp: tensor ranks, t: ranks that share the tokens)::

    W               A x                                 B                       sums of A    of B
    column, x R     h = A x, of all tokens              its rows                tp, t        tp, t
    column, x I     h = A x, copied or gathered over tp its rows                t            tp, t
    row             h = sum over tp of its columns      all, of its tokens      tp, t        t
    vocabulary      as on one device                    as on one device        none         none
    not sharded     of its tokens                       of its tokens           t            t

"x R" marks columns whose module has copied or gathered x for all of them, "x I" the other columns.
Other kinds of adapters, and variants of LoRA that need all of W (DoRA), are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from warpweave.hf.changes import changes_of, known, note
from warpweave.hf.mlp import Conv1D, out_features
from warpweave.hf.plan import Tokens, rows_of_blocks, take_input
from warpweave.layers.sharding.dtensor import Groups, use_local
from warpweave.parallel.collectives import own_slice, reduce_from, reduce_scatter

_BASES = (nn.Linear, Conv1D, nn.Embedding)


class ShardedLayer(NamedTuple):
    """The sharding of a layer over tensor ranks; a fact of the layer (`changes`)."""

    kind: str  # "column", "row" or "vocabulary" (the embedding and the head)
    tokens: Tokens  # of x[B, S, E]
    inside: bool = False  # True if the enclosing module has already gathered x
    blocks: int = 1  # number of equal blocks of output features, each of which is sharded


class _Entered(NamedTuple):
    """The adapters that compute over ranks; a fact of the wrapper, and of each A and B."""

    parts: list[Any]


# ---------------------------------------------------------------- 1. finding adapters


def is_wrapper(module: Any) -> bool:
    """Return True if a module wraps a linear layer or an embedding, as peft's adapters do."""
    return isinstance(getattr(module, "_modules", {}).get("base_layer"), _BASES)


def wrapped(module: Any) -> Any:
    """The layer that an adapter wraps; for any other module, the module itself."""
    return module.base_layer if is_wrapper(module) else module


def plain_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules without adapters; a wrapper yields the wrapped layer."""
    module = wrapped(module)
    yield module
    for child in module.children():
        yield from plain_modules(child)


def is_current(wrapper: nn.Module) -> bool:
    """Return True if all adapters of a wrapper compute over ranks."""
    entered = known(wrapper, _Entered)
    return entered is not None and entered.parts == _adapters_in(wrapper)


@contextmanager
def taken_out(model: nn.Module) -> Iterator[None]:
    """Replace every wrapper by the layer it wraps, within the context."""
    found = [(m, n, c) for m in model.modules() for n, c in m._modules.items() if is_wrapper(c)]
    for parent, name, wrapper in found:
        parent._modules[name] = wrapped(wrapper)
    try:
        yield
    finally:
        for parent, name, wrapper in found:
            parent._modules[name] = wrapper


def adapted(model: nn.Module) -> set[nn.Module]:
    """The modules that have a wrapper among their children."""
    return {m for m in model.modules() if any(map(is_wrapper, m.children()))}


def _adapters_in(wrapper: Any) -> list[Any]:
    """The identity of a wrapper's adapters: their layers A, or an embedding's parameter names."""
    modules = wrapper._modules
    found = [*getattr(modules.get("lora_A"), "_modules", {}).values()]
    return found + [*getattr(modules.get("lora_embedding_A"), "_parameters", {})]


# ---------------------------------------------------------------- 2. entering


def enter(wrapper: Any, name: str, tp: Any, shared: Groups) -> list[tuple[str, nn.Parameter]]:
    """Let a wrapper's adapters compute over ranks; return their parameters with their names.

    Args:
        name: the name of the wrapper, for errors.
        tp: the tensor ranks, or None.
        shared: the groups whose ranks have different tokens at the wrapper.

    Raises ValueError, naming `name` and the reason, for adapters that compute more than B A x.
    """
    base = wrapped(wrapper)
    _check_lora(wrapper, name)
    changes, cut = changes_of(wrapper), known(base, ShardedLayer)
    sharded = isinstance(getattr(base, "weight", None), DTensor)
    if sharded and "get_delta_weight" not in vars(wrapper):
        changes.set(wrapper, "get_delta_weight", MethodType(_replicated_delta, wrapper))
    for adapter, a in wrapper.lora_A.items():
        b = wrapper.lora_B[adapter]
        if cut is not None:
            _put_together(base, a, b, f"{name}.{adapter}")
        for layer, hook in ((a, _hook_first), (b, _hook_second)):
            if known(layer, _Entered) is None:
                changes_of(layer).hooks += hook(layer, cut, tp, shared)
                note(layer, _Entered([]))
    note(wrapper, _Entered(_adapters_in(wrapper)))
    return [(f"{name}.{n}", p) for n, p in wrapper.named_parameters() if "base_layer" not in n]


def _check_lora(wrapper: Any, name: str) -> None:
    kind = type(wrapper).__name__
    parts = [getattr(wrapper, part, None) for part in ("lora_A", "lora_B")]
    plain = all(isinstance(part, nn.ModuleDict) for part in parts)  # AdaLoRA's hold parameters
    if not plain or any(type(layer) is not nn.Linear for part in parts for layer in part.values()):
        raise ValueError(
            f"{name}: {kind} of {type(wrapper).__module__} does not compute B A x, but "
            "apply(mesh=...) supports only LoRA adapters; remove this adapter, or merge it before "
            "apply(mesh=...)"
        )
    if not hasattr(wrapper, "lora_variant"):
        raise ValueError(
            f"{name}: {kind} has no lora_variant, which distinguishes LoRA from its variants; "
            "install the version of peft in constraints.txt"
        )
    for adapter, variant in wrapper.lora_variant.items():
        raise ValueError(
            f"{name}: adapter {adapter!r} is a {type(variant).__name__}, which needs the whole "
            "weight, but each rank has only a part of it; use plain LoRA instead (for DoRA, set "
            "use_dora=False)"
        )
    for adapter, dropout in wrapper.lora_dropout.items():
        check_dropout(dropout, f"{name}.lora_dropout.{adapter}")


def check_dropout(module: Any, name: str) -> None:
    """Raise ValueError if a module draws dropout, which ranks would draw differently."""
    p = 0.0 if isinstance(module, nn.Identity) else getattr(module, "p", "of an unknown kind")
    if p != 0:
        raise ValueError(f"{name}: dropout {p} is not supported with apply(mesh=...); set it to 0")


def _hook_first(a: nn.Module, cut: ShardedLayer | None, tp: Any, shared: Groups) -> list[Any]:
    """Hooks that let A compute this rank's part."""
    if cut is None:
        return _sum_layer(a, shared)
    if cut.kind == "row":
        columns = {"weight": partial(own_slice, group=tp, dim=1)}
        add = a.register_forward_hook(partial(_add_features, cut.tokens, tp))
        return [add, *_sum_layer(a, _with_tp(tp, shared), columns)]
    if cut.kind == "column":
        return _sum_layer(a, _with_tp(tp, shared) if cut.inside else shared)
    return []


def _hook_second(b: nn.Module, cut: ShardedLayer | None, tp: Any, shared: Groups) -> list[Any]:
    """Hooks that let B compute this rank's part."""
    if cut is None or cut.kind == "row":
        return _sum_layer(b, shared)
    if cut.kind == "column":
        rows = partial(rows_of_blocks, group=tp, blocks=cut.blocks)
        hooks = _sum_layer(b, _with_tp(tp, shared), {"weight": rows, "bias": rows})
        if not cut.inside:
            hooks.append(b.register_forward_pre_hook(partial(_gather_taken, cut.tokens, tp)))
        return hooks
    return []


def _sum_layer(layer: nn.Module, groups: Groups, parts: dict | None = None) -> list[Any]:
    return use_local(layer, dict.fromkeys(layer._parameters, groups), parts) if groups else []


def _with_tp(tp: Any, shared: Groups) -> Groups:
    return (tp, *(group for group in shared if group is not tp))


def _add_features(tokens: Tokens, tp: Any, a: nn.Module, _: tuple, h: torch.Tensor) -> torch.Tensor:
    """Sum h over all features of a row-parallel layer's input, for its output's tokens."""
    return reduce_from(h, tp) if tokens.dim(a, h) is None else reduce_scatter(h, tp, dim=1)


def _gather_taken(tokens: Tokens, tp: Any, b: nn.Module, args: tuple) -> tuple:
    """Gather h of all tokens, for the features of a column-parallel layer's output."""
    return (take_input(tokens, b, args[0], tp),)


# ---------------------------------------------------------------- 3. whole tensors


def _put_together(base: Any, a: Any, b: Any, name: str) -> None:
    """Join the ranks' parts of an adapter that peft made as wide as a rank's part of the weight."""
    out = out_features(base)
    width = base.weight.numel() // out
    for p, dim, size in ((a.weight, 1, width), (b.weight, 0, out), (b.bias, 0, out)):
        if p is None or p.shape[dim] == size:
            continue
        local = base.weight.to_local().shape[dim]
        if isinstance(p, DTensor) or p.shape[dim] != local or isinstance(base, Conv1D):
            raise ValueError(
                f"{name}: dim {dim} must have {size} features, got shape {[*p.shape]}; add the "
                "adapter before apply(mesh=...), or call the model once before fully_shard"
            )
        whole = torch.empty([size if d == dim else n for d, n in enumerate(p.shape)], device="meta")
        mesh, where, stride = base.weight.device_mesh, base.weight.placements, whole.stride()
        p.data = DTensor.from_local(
            p.detach(), mesh, where, run_check=False, shape=whole.shape, stride=stride
        ).full_tensor()


def _replicated_delta(wrapper: Any, adapter: str) -> torch.Tensor:
    """s B A, replicated on the ranks of the sharded weight, to which `merge` adds it."""
    delta = type(wrapper).get_delta_weight(wrapper, adapter)
    mesh = wrapped(wrapper).weight.device_mesh
    return DTensor.from_local(delta, mesh, [Replicate()] * mesh.ndim, run_check=False)
