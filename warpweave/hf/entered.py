"""Modules and parameters that enter a spread model after `apply`: summed over ranks, or refused.

A layer sees only some of the tokens or heads, so the gradient of each parameter in it must be
summed over the ranks that see the others. `apply` installs these sums in existing modules. A
`Watch` compares modules, parameter names, hooks and forwards of the layers before each forward. If
they have changed,

    hooks, forwards     that would see a part are refused, see `untouched`
    adapters            compute over ranks, see `adapters`
    other modules       get the sums of their place, except inside a module that is sharded over tp
    everything else     such as a parameter that is used outside its module: a walk through the
                        autograd graph of the next training forward finds parameters whose gradient
                        would differ from that on one device, and refuses them by name

The comparison reads a dozen attributes per module, and nothing waits for a device. It runs outside
compiled graphs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from warpweave.hf import adapters
from warpweave.hf.adapters import check_dropout
from warpweave.hf.changes import changes_of, known
from warpweave.hf.options import Spread, some_groups
from warpweave.hf.plan import Tokens
from warpweave.hf.seen import HOOKS
from warpweave.hf.structure import CutPart
from warpweave.hf.untouched import Untouched
from warpweave.layers.sharding.dtensor import Groups, check_alike, sums_of, use_local
from warpweave.parallel.collectives import copy_to, gather, moved_by, scatter

_Reentrant = CheckpointFunction._backward_cls  # it builds its graph in the backward pass


class Watch:
    """Watch the layers of a spread model; a fact of the model (`changes`). `layers` are the
    model's, in order; `parts` are sharded over tensor ranks, or over tokens."""

    untouched: Untouched

    def __init__(
        self, model: Any, layers: list[nn.Module], parts: list[CutPart], tokens: Tokens,
        spread: Spread,
    ) -> None:  # fmt: skip
        self.model, self.layers, self.parts = model, layers, parts
        held = {m: layer for layer in layers for m in layer.modules()}
        self.layer_of = {part.module: held.get(part.module) for part in parts}
        self.tokens, self.tp = tokens, spread.mesh.group("tp")
        self.ranks = some_groups(spread.mesh)
        axes = ("tp", "cp") if spread.sequence_parallel else ("cp",)
        self.shared = some_groups(spread.mesh, *axes)
        self.dropouts: dict[Any, str] = {}
        self.names: dict[int, str] = {}  # of parameters, by their id
        self.seen: list[Any] = []
        self.entered = False  # True if the layers have changed since `look`
        self.unchecked = False  # True if the graph of the current forward must be walked through
        self.columns: list[Any] = []  # nodes at which a walk from a row ends
        self.last: Any = None  # the handle of `_last`
        for part in parts if self.tp is not None else ():
            changes_of(part.row).hooks.append(part.row.register_forward_pre_hook(self._enter_row))
            for column in part.columns:
                before = column.register_forward_pre_hook(self._enter_column)
                after = column.register_forward_hook(self._leave_column)
                changes_of(column).hooks += [before, after]

    def begin(self, untouched: Untouched) -> None:
        """Start to compare before each forward. Call this after `apply` has changed all modules."""
        self.untouched, stack = untouched, untouched.stack
        # A wrapper such as peft's calls the model's forward directly and skips the model's hooks.
        first = stack if stack is not self.model else self.layers[0]
        changes_of(first).hooks.append(first.register_forward_pre_hook(self._first))

    # ------------------------------------------------------------ 1. the current modules

    def look(self) -> None:
        """Let new modules compute over ranks, or raise ValueError with their name."""
        entered: list[tuple[str, nn.Parameter]] = []
        inside = {m for layer in self.layers for m in layer.modules()}
        names = {m: n for n, m in self.model.named_modules()}
        self.dropouts = {m: n for m, n in names.items() if isinstance(m, nn.Dropout)}
        for module, name in names.items():
            if adapters.is_wrapper(module) and not adapters.is_current(module):
                if module not in inside and known(module.base_layer, adapters.ShardedLayer) is None:
                    continue  # sees all tokens, and is whole
                shared = self.shared if module in inside else ()
                entered += adapters.enter(module, name, self.tp, shared)
        self._check_parts(inside, names)
        for layer in self.layers:
            for module in adapters.plain_modules(layer):
                entered += self._sum(module, names[module])
        if entered:
            check_alike(entered, self.ranks)

    def _check_parts(self, inside: Collection[nn.Module], names: dict[nn.Module, str]) -> None:
        for part in self.parts:
            kind = type(part.module).__name__
            if part.module not in inside:
                if self.layer_of[part.module] in self.layers and part.kind == "attention":
                    raise ValueError(
                        f"{kind}: an attention module was replaced after apply(mesh=...); replace "
                        "it before apply(mesh=...)"
                    )
                continue
            for module in adapters.plain_modules(part.module) if self.tp is not None else ():
                for name in sorted(module._parameters.keys() - sums_of(module).keys()):
                    raise ValueError(
                        f"{names[module]}.{name}: a parameter was added to a {kind} that is "
                        "sharded over tensor-parallel ranks; add it before apply(mesh=...)"
                    )

    def _sum(self, module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
        """Sum the gradients of a module's new parameters; return (name, parameter) for each."""
        for buffer, value in module._buffers.items():
            if isinstance(value, DTensor):
                raise ValueError(
                    f"{name}.{buffer} is computed (for example, by pruning) from a parameter that "
                    "is now a DTensor; make the pruning permanent (prune.remove) before "
                    "apply(mesh=...)"
                )
        sums = sums_of(module)
        new = [n for n, p in module._parameters.items() if p is not None and n not in sums]
        if not new:
            return []
        if not sums:
            changes_of(module).hooks += use_local(module, sums)
        sums.update(dict.fromkeys(new, self.shared))
        return [(f"{name}.{n}", p) for n, p in module._parameters.items() if n in new]

    def _signature(self) -> list[Any]:
        """Everything that changes if something enters: modules of the layers, parameter names and
        their requires_grad, hooks and forwards."""
        found: list[Any] = []
        rest = [*self.layers]
        while rest:
            module = rest.pop()
            own = module.__dict__
            found += (module, type(module).forward, own.get("forward"))
            for name, p in own["_parameters"].items():
                found += (name, p is not None and p.requires_grad)
            for kind in HOOKS:
                found += (*own[kind], kind)
            rest += (child for child in own["_modules"].values() if child is not None)
        return found

    # ------------------------------------------------------------ 2. during every call

    @torch.compiler.disable
    def adapt(self, wrapper: Any) -> bool:
        """Return True for an adapter in a sharded layer's place, and let it compute over ranks."""
        if adapters.is_wrapper(wrapper) and not adapters.is_current(wrapper):
            self.look()
        return adapters.is_wrapper(wrapper)

    @torch.compiler.disable
    def _first(self, module: nn.Module, args: tuple) -> None:
        """Compare before a forward (pre-hook of the layers' caller, or of the first layer)."""
        self.untouched.check_outside()
        self.layers = self.untouched.layers_now()
        self.columns = []
        if self.tp is not None:
            self.adapt(self.model.get_input_embeddings())
            self.adapt(self.model.get_output_embeddings())
        if self._signature() != self.seen:
            self.untouched.check_layers()
            self.seen, self.entered = self._signature(), True
        if self.entered and (torch.is_grad_enabled() or module.training):
            self.look()
            self.names = {id(p): n for n, p in self.model.named_parameters()}
            self._hook_last()
            self.seen = self._signature()
            self.entered, self.unchecked = False, True
        for module, name in self.dropouts.items():
            if module.training:
                check_dropout(module, name)

    def _hook_last(self) -> None:
        """Make `_last` the last hook of the last layer, after those that have entered."""
        if self.last is not None:
            self.last.remove()
        layer = self.layers[-1]
        self.last = layer.register_forward_hook(self._last, with_kwargs=True)
        changes_of(layer).hooks.append(self.last)

    @torch.compiler.disable
    def _last(self, layer: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Hook of the last layer, whose forward has gathered the tokens."""
        if not self._walks():
            return
        inside = any(x.is_leaf and x.requires_grad for x in _tensors_in((args, kwargs)))
        if inside or any(isinstance(n, _Reentrant) for n, _ in _nodes_between(out, ())):
            raise ValueError(
                "reentrant gradient checkpointing hides what was added to the layers after "
                "apply(mesh=...); use gradient_checkpointing_enable({'use_reentrant': False})"
            )
        if self.shared and self.tokens.are_cut():
            self._refuse(_nodes_between(out, self.shared))
        self.unchecked = False

    @torch.compiler.disable
    def _enter_column(self, column: nn.Module, args: tuple) -> None:
        """Pre-hook of a column-parallel layer."""
        cut = known(column, adapters.ShardedLayer) if self._walks() else None
        if cut is not None and cut.inside:
            self._refuse(_nodes_inside(args, self.tp, ()))

    @torch.compiler.disable
    def _leave_column(self, column: nn.Module, args: tuple, y: torch.Tensor) -> None:
        """Hook of a column-parallel layer."""
        if self._walks():
            self.columns.append(y.grad_fn)

    @torch.compiler.disable
    def _enter_row(self, row: nn.Module, args: tuple) -> None:
        """Pre-hook of a row-parallel layer."""
        if self._walks():
            self._refuse(_nodes_inside(args, self.tp, self.columns))
            self.columns = []

    def _walks(self) -> bool:
        """Return True if the graph of the current forward must be walked through."""
        return self.unchecked and torch.is_grad_enabled()

    # ------------------------------------------------------------ 3. gradients without a sum

    def _refuse(self, nodes: Iterator[tuple[Any, frozenset]]) -> None:
        """Raise ValueError if a parameter of these nodes would not get the same gradient as on one
        device."""
        for node, wrong in nodes:
            leaf = getattr(node, "variable", None)
            if leaf is None or all(g is self.tp and _is_sharded(leaf) for g in wrong):
                continue
            other = f"a parameter of shape {[*leaf.shape]} that does not belong to the model"
            name = self.names.get(id(leaf), other)
            raise ValueError(
                f"{name} is used outside its own module's forward (for example by a hook, pruning, "
                "or a weight norm), so its gradient would miss some tokens or heads; remove the "
                "hook, pruning, or norm, or call warpweave.hf.revert first"
            )


def _nodes_between(out: Any, groups: Groups) -> Iterator[tuple[Any, frozenset]]:
    """The autograd nodes behind a layer's `out`, which holds all tokens, each with the groups over
    which its gradient would be wrong: it receives only a part, or all of it and sums it."""
    done: set[tuple[Any, frozenset]] = set()
    rest: list[tuple[Any, frozenset]] = [(x.grad_fn, frozenset()) for x in _tensors_in(out)]
    while rest:
        node, wrong = rest.pop()
        if node is None or (node, wrong) in done:
            continue
        done.add((node, wrong))
        move, group = moved_by(node)
        if group in groups:
            if move is gather:
                wrong |= {group}
            elif move is scatter:
                wrong -= {group}
            elif move is copy_to and _is_of_leaf(node):
                wrong ^= {group}
        yield node, wrong
        rest += [(parent, wrong) for parent, _ in node.next_functions]


def _nodes_inside(x: Any, tp: Any, stops: Collection[Any]) -> Iterator[tuple[Any, frozenset]]:
    """The autograd nodes behind `x` in a module that is sharded over tensor ranks. The walk ends at
    `stops` and where gradients are summed over these ranks."""
    done: set[Any] = set()
    rest = [x.grad_fn for x in _tensors_in(x)]
    while rest:
        node = rest.pop()
        if node is None or node in done or node in stops or moved_by(node)[1] is tp:
            continue
        done.add(node)
        yield node, frozenset((tp,))
        rest += [parent for parent, _ in node.next_functions]


def _is_of_leaf(node: Any) -> bool:
    """Return True if a node's input is computed from a single leaf, not from activations."""
    while len(node.next_functions) == 1:
        node = node.next_functions[0][0]
    return hasattr(node, "variable")


def _is_sharded(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
