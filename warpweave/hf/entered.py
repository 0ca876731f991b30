"""What enters the layers of a spread model after `apply`: summed over the ranks, or refused.

Layers see some of the tokens or some of the heads, so the gradient of each parameter in them must
be summed over the ranks that see the others. `apply` installs these sums in modules that are there.
A `Watch` compares modules, names of parameters and hooks of the layers before each training
forward. If they are different,

    adapters            compute over ranks, see `adapters`
    other modules       get the sums of their place, except inside a module that is sharded over tp
    everything else     as a parameter that a hook uses, or that is used outside of its module: a
                        walk through the autograd graph of that forward finds those that no sum
                        reaches, and they are refused by name

The comparison takes a microsecond per module, and nothing waits for a device. Compilers are left
for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from warpweave.changes import changes_of, known
from warpweave.hf import adapters
from warpweave.hf.adapters import check_dropout
from warpweave.hf.options import Spread
from warpweave.hf.plan import Tokens
from warpweave.hf.structure import CutPart
from warpweave.parallel.collectives import gathered_over, summed_over
from warpweave.shards import Groups, check_alike, sums_of, use_local

_REENTRANT = "CheckpointFunctionBackward"  # whose graph is made in the backward pass


class Watch:
    """Watches the layers of a spread model; a fact of the model.

    Args:
        model: the model, spread.
        layers: its layers, in order.
        parts: the modules that are sharded over tensor ranks, or over tokens.
    """

    def __init__(
        self, model: Any, layers: list[nn.Module], parts: list[CutPart], tokens: Tokens,
        spread: Spread,
    ) -> None:  # fmt: skip
        self.model, self.layers, self.parts = model, layers, parts
        self.name = next(n for n, m in model.named_modules() if [*m.children()] == layers)
        self.tokens, self.tp = tokens, spread.mesh.group("tp")
        groups = (spread.mesh.group("tp"), spread.mesh.group("cp"))
        self.ranks = tuple(g for g in groups if g is not None)
        self.shared = tuple(g for g in groups[not spread.sequence_parallel :] if g is not None)
        self.dropouts: dict[Any, str] = {}
        self.seen: list[Any] = []
        self.unchecked = False  # whether the forward that runs is walked through
        self.columns: list[Any] = []  # nodes at which a walk from a row ends
        changes_of(layers[0]).hooks.append(layers[0].register_forward_pre_hook(self._first))
        changes_of(layers[-1]).hooks.append(
            layers[-1].register_forward_hook(self._last, with_kwargs=True)
        )
        for part in parts if self.tp is not None else ():
            changes_of(part.row).hooks.append(part.row.register_forward_pre_hook(self._enter_row))
            for column in part.columns:
                hooks = [
                    column.register_forward_pre_hook(self._enter_column),
                    column.register_forward_hook(self._leave_column),
                ]
                changes_of(column).hooks += hooks

    # ------------------------------------------------------------ 1. what is there

    def look(self) -> None:
        """Let what has entered compute over ranks, or raise ValueError with its name."""
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
                if part.kind == "attention":
                    raise ValueError(
                        f"{kind}: an attention of a model over ranks was replaced: replace it "
                        "before apply(mesh=...)"
                    )
                continue
            for module in adapters.plain_modules(part.module) if self.tp is not None else ():
                for name in sorted(module._parameters.keys() - sums_of(module).keys()):
                    raise ValueError(
                        f"{names[module]}.{name}: a new parameter in a {kind} that is sharded over "
                        "tensor ranks: change it before apply(mesh=...)"
                    )

    def _sum(self, module: nn.Module, name: str) -> list[tuple[str, nn.Parameter]]:
        """Sum the gradients of a module's parameters that are new; their names and themselves."""
        for buffer, value in module._buffers.items():
            if isinstance(value, DTensor):
                raise ValueError(
                    f"{name}.{buffer}: made of a parameter that ranks share, as by pruning: make "
                    "it permanent (prune.remove) before apply(mesh=...)"
                )
        sums = sums_of(module)
        new = [n for n, p in module._parameters.items() if p is not None and n not in sums]
        if not new:
            return []
        if not sums:
            changes_of(module).hooks += use_local(module, sums)
        sums.update(dict.fromkeys(new, self.shared))
        found: Any = [(f"{name}.{n}", module._parameters[n]) for n in new]
        return found

    def _signature(self) -> list[Any]:
        """What decides whether something entered: modules, names of parameters and whether they
        learn, hooks and forwards."""
        found: list[Any] = []
        rest = [*self.layers]
        while rest:
            module = rest.pop()
            own = module.__dict__
            found.append(module)
            for name, p in own["_parameters"].items():
                found += (name, p is not None and p.requires_grad)
            found += (*own["_forward_pre_hooks"], 0, *own["_forward_hooks"], own.get("forward"))
            rest += (child for child in own["_modules"].values() if child is not None)
        return found

    # ------------------------------------------------------------ 2. in every call

    @torch.compiler.disable
    def adapt(self, wrapper: Any) -> bool:
        """Whether a module in the place of a sharded layer is an adapter, which then computes over
        ranks."""
        if adapters.is_wrapper(wrapper) and not adapters.is_current(wrapper):
            self.look()
        return adapters.is_wrapper(wrapper)

    @torch.compiler.disable
    def _first(self, layer: nn.Module, args: tuple) -> None:
        """A pre-hook of the first layer."""
        if [*self.model.get_submodule(self.name).children()] != self.layers:
            raise ValueError(
                f"{self.name}: other layers than when the model was spread over ranks: change them "
                "before apply(mesh=...), or call warpweave.hf.revert first"
            )
        self.columns = []
        if self.tp is not None:
            self.adapt(self.model.get_input_embeddings())
            self.adapt(self.model.get_output_embeddings())
        if (torch.is_grad_enabled() or layer.training) and self._signature() != self.seen:
            self.look()
            self.seen, self.unchecked = self._signature(), True
        for module, name in self.dropouts.items():
            if module.training:
                check_dropout(module, name)

    @torch.compiler.disable
    def _last(self, layer: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """A hook of the last layer, before tokens are gathered."""
        if not self._walks():
            return
        inside = any(x.is_leaf and x.requires_grad for x in _tensors_in((args, kwargs)))
        if inside or any(type(n).__name__ == _REENTRANT for n, _ in _nodes(out, self.ranks)):
            raise ValueError(
                "reentrant checkpoints hide what entered the layers after apply(mesh=...): use "
                "gradient_checkpointing_enable({'use_reentrant': False})"
            )
        if self.shared and self.tokens.are_cut():
            self._refuse(out, self.shared)
        self.unchecked = False

    @torch.compiler.disable
    def _enter_column(self, column: nn.Module, args: tuple) -> None:
        """A pre-hook of a column-parallel layer."""
        if self._walks() and adapters.takes_gathered(column):
            self._refuse(args, (self.tp,))

    @torch.compiler.disable
    def _leave_column(self, column: nn.Module, args: tuple, y: torch.Tensor) -> None:
        """A hook of a column-parallel layer."""
        if self._walks():
            self.columns.append(y.grad_fn)

    @torch.compiler.disable
    def _enter_row(self, row: nn.Module, args: tuple) -> None:
        """A pre-hook of a row-parallel layer."""
        if self._walks():
            self._refuse(args, (self.tp,), self.columns)
            self.columns = []

    def _walks(self) -> bool:
        """Whether the forward that runs is walked through."""
        return self.unchecked and torch.is_grad_enabled()

    # ------------------------------------------------------------ 3. what no sum reaches

    def _refuse(self, out: Any, groups: Groups, stops: Collection[Any] = ()) -> None:
        """Raise ValueError if a parameter gets only this rank's part of its gradient."""
        for leaf in _unsummed(out, groups, self.tp, stops):
            names = {id(p): n for n, p in self.model.named_parameters()}
            name = names.get(id(leaf), f"a parameter {[*leaf.shape]} that is not the model's")
            raise ValueError(
                f"{name}: its gradient would be that of one rank's tokens or heads, as it is used "
                "outside its own module's forward (by a hook, pruning, a weight norm): remove "
                "that, or call warpweave.hf.revert first"
            )


def _unsummed(out: Any, groups: Groups, tp: Any, stops: Collection[Any]) -> Iterator[torch.Tensor]:
    """Leaves of the autograd graph of `out` whose gradient is not summed over all groups, and which
    are not sharded over those."""
    for node, left in _nodes(out, groups, stops):
        leaf = getattr(node, "variable", None)
        if leaf is not None and any(g is not tp or not _is_sharded(leaf) for g in left):
            yield leaf


def _nodes(out: Any, groups: Groups, stops: Collection[Any] = ()) -> Iterator[tuple[Any, Groups]]:
    """The nodes of the autograd graph of `out`, each with the groups over which no node behind it
    sums; to `stops`, and to where tokens were sharded."""
    done: set[tuple[Any, Groups]] = set()
    rest = [(x.grad_fn, groups) for x in _tensors_in(out)]
    while rest:
        node, left = rest.pop()
        if node is None or (node, left) in done or node in stops:
            continue
        done.add((node, left))
        if gathered_over(node) in groups:
            continue
        group = summed_over(node)
        left = tuple(g for g in left if g is not group)
        if left:
            yield node, left
            rest += [(parent, left) for parent, _ in node.next_functions]


def _is_sharded(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, DTensor) and not all(p.is_replicate() for p in leaf.placements)


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
