"""ZeRO for a model of your own, by hooks on its blocks.

    ZeRO 3, blocks 0, 1, 2; the root unit (embedding, final norm, head) is gathered all the while
    forward   F0        F1        F2        B2        B1           B0
    network   gather 1  gather 2  -         gather 1  gather 0,    reduce-
                                                      reduce-      scatter 1
                                                      scatter 2    and then 0

A block's output passes through an autograd Function whose backward runs before the block's, and its
input through one whose backward runs after it: there parameters are gathered, and gradients reduced
(as in FSDP, Zhao et al. 2023, arXiv:2304.11277).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from warpweave.layers.records import collect_records
from warpweave.parallel.data.optimizer import AdamW, Rule
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.wrap.units import Sharded, make_units


class _Mark(torch.autograd.Function):
    """Return the tensors as they are; call `then` in backward."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.then()
        return None, *gradients


def _marked(value: Any, then: Callable[[], None]) -> Any:
    """Return `value`, a tree of tensors, with `then` called when its gradient is known."""
    leaves, tree = tree_flatten(value)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.requires_grad]
    if at:
        for i, x in zip(at, _Mark.apply(then, *(leaves[i] for i in at)), strict=True):
            leaves[i] = x
    return tree_unflatten(leaves, tree)


@dataclass(eq=False)
class _Visit:
    """A forward of a block, after that of the block `previous`."""

    previous: _Wrapped | None


class _Wrapped:
    """A module whose parameters are gathered, and whose gradients are reduced, together.

    Args:
        zero: the owner.
        module: the block, or the whole model for the root's parameters.
        units: its ZeRO units.
        is_root: the parameters stay gathered from the model's forward to the end of its backward.

    Attributes:
        following: the block after it in the last forward.
        calls: forwards since the last step whose backward has not ended.
    """

    def __init__(
        self, zero: Zero, module: nn.Module, units: tuple[Unit, ...], *, is_root: bool = False
    ) -> None:
        self.units, self.calls = units, 0
        self.following: _Wrapped | None = None
        self._zero, self._is_root = zero, is_root
        self._open: set[_Visit] = set()  # calls whose backward has begun and not ended
        self.in_backward = False
        module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        module.register_forward_hook(self._leave)

    def prefetch(self) -> None:
        """Start the all-gather of parameters that ZeRO 3 shards."""
        for unit in self.units:
            unit.parameters.unshard()

    def gather(self) -> None:
        """Wait until the parameters are there."""
        self.prefetch()
        for unit in self.units:
            unit.parameters.wait()

    def free(self) -> None:
        """Free parameters that ZeRO 3 shards."""
        for unit in self.units:
            unit.parameters.wait()
            unit.parameters.reshard()

    # ------------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.gather()
        if self.in_backward:  # activation checkpointing computes the block again
            return None
        previous = self._zero.entered(self, is_root=self._is_root)
        if self.following is not None:
            self.following.prefetch()
        if self._is_root or not torch.is_grad_enabled():
            return None
        self._call = _Visit(previous)
        return _marked((args, kwargs), partial(self._end_call, self._call))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.in_backward:
            return None
        if not torch.is_grad_enabled():
            self._zero.free() if self._is_root else self.free()
            return None
        if self._is_root:
            return _marked(output, self.before_backward)
        if not any(isinstance(x, Tensor) for x in tree_flatten(output)[0]):
            raise ValueError(
                f"{type(module).__name__} returned a {type(output).__name__} in which no tensor "
                "was found: a block must return tensors, or tuples, lists, or dicts of them"
            )
        self.calls += 1
        output = _marked(output, partial(self._begin_call, self._call))
        self.free()
        return output

    # ------------------------------------------------------------------ backward

    def _begin_call(self, call: _Visit) -> None:
        self._open.add(call)
        self.before_backward()
        if call.previous is not None:
            call.previous.prefetch()

    def _end_call(self, call: _Visit) -> None:
        self._open.discard(call)
        self.calls -= 1
        if not self._open:
            self.after_backward()

    def before_backward(self) -> None:
        """Prepare parameters and gradients, unless a backward has reached the block already."""
        self._zero.in_backward()
        if self.in_backward:
            return
        self.in_backward = True
        self.gather()
        for unit in self.units:
            unit.gradients.before_backward()

    def after_backward(self) -> None:
        """Start the reduction of the gradients, and free the parameters."""
        self.in_backward = False
        self._open.clear()
        for unit in self.units:
            unit.gradients.after_backward()
        self._zero.completed(self)
        self.free()


class Zero(Sharded):
    """A model whose parameters, gradients, and optimizer state are sharded over data ranks.

    Train it like any module, with ``zero.step(lr)`` in the place of an optimizer's step::

        zero = Zero(model, Mesh(dp=2).connect(), stage=3)
        loss = criterion(model(x), y)
        loss.backward()
        zero.step(lr=1e-3)

    Gradients are averaged over the data ranks, as in DDP and FSDP, and summed over micro-batches.

    Args:
        model: the model, on this rank's device. Tensor-parallel layers of `warpweave.layers` may be
            in it. Frozen parameters are replicated.
        mesh: the connected mesh; data ranks are those of dp and cp.
        stage: the ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 the gradients, too, 3 the
            parameters, too.
        rule: the optimizer's arithmetic, by default ``AdamW()``.
        blocks: the modules whose parameters are gathered together, such as ``model.layers``; by
            default the children of every outermost `nn.ModuleList` and `nn.Sequential`. All other
            parameters, and those that blocks share, are gathered with the model.
        clip: the largest global gradient norm, or None.
        microbatches: backward passes before each step. ZeRO 0 and 1 reduce gradients in the last.

    Parameters start with the values of the first data rank. Every rank must call the same blocks in
    the same order. Checkpoint activations with ``use_reentrant=False``.

    Raises:
        ValueError: another stage than 0 to 3, blocks that contain each other, or a model with
            nothing to train.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ConnectedMesh,
        *,
        stage: int = 3,
        rule: Rule | None = None,
        blocks: Iterable[nn.Module] | None = None,
        clip: float | None = None,
        microbatches: int = 1,
    ) -> None:
        self.model, self.microbatches, self._backwards = model, microbatches, 0
        chosen = list(dict.fromkeys(_lists_in(model) if blocks is None else blocks))
        _check_disjoint(chosen)
        records, names = collect_records(model), {p: n for n, p in model.named_parameters()}
        shared = _shared(model, chosen)
        self._blocks: list[_Wrapped] = []
        for block in chosen:
            name = next(n for n, m in model.named_modules() if m is block)
            own = [p for p in block.parameters() if p not in shared]
            units = make_units(name, [(records[names.pop(p)], p) for p in own], mesh, stage)
            self._blocks.append(_Wrapped(self, block, units))
        rest = [(records[name], p) for p, name in names.items()]
        self._root = _Wrapped(self, model, make_units("model", rest, mesh, stage), is_root=True)
        every = (unit for block in (self._root, *self._blocks) for unit in block.units)
        super().__init__(every, mesh, rule or AdamW(), clip, divisor=mesh.size("data"))
        self._guard(model)
        self._last_entered: _Wrapped | None = None
        self._reducing: list[Unit] = []
        self._started: set[Unit] = set()  # units whose last reduction of the step has started
        self._is_queued = False

    def step(self, lr: float) -> Tensor:
        """Update every parameter; return the global gradient norm before clipping, 0-dim.

        Raises ValueError unless there were `microbatches` backward passes since the last step.
        """
        if self._backwards != self.microbatches:
            raise ValueError(
                f"expected microbatches = {self.microbatches} backward passes before a step, got "
                f"{self._backwards}"
            )
        self.free()  # what a forward without a backward has left
        for unit in self.units:
            unit.gradients.finish()
        self.optimizer.sum_partials()
        norm = self.optimizer.step(lr)
        self._backwards = 0
        for block in self._blocks:
            block.calls = 0
        return norm

    # ------------------------------------------------------------------ called by blocks

    def free(self) -> None:
        """Free all parameters that ZeRO 3 shards, also those gathered ahead of a use that did not
        come."""
        for block in (self._root, *self._blocks):
            block.free()

    def entered(self, block: _Wrapped, *, is_root: bool) -> _Wrapped | None:
        """Note the order of blocks in a forward, and return the previous one."""
        previous, self._last_entered = self._last_entered, None if is_root else block
        if is_root or previous is None:
            return None
        previous.following = block
        return previous

    def in_backward(self) -> None:
        """Have `_end` called when this backward is over."""
        if not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
            self._root.before_backward()

    def completed(self, block: _Wrapped) -> None:
        """Start the reduction of a block's gradients, if it is due."""
        is_last = self._backwards == self.microbatches - 1
        for unit in block.units:
            if unit.gradients.sharded_accumulation:
                ends = is_last and block.calls <= 0
                unit.gradients.start(last=ends)
                self._reducing.append(unit)
                if ends:
                    self._started.add(unit)
                if len(self._reducing) > 2:  # bounds the memory of unreduced gradients
                    self._reducing.pop(0).gradients.advance()
            elif is_last and block.calls <= 0:
                unit.gradients.start()
                self._started.add(unit)

    def _end(self) -> None:
        """End a backward: blocks without a gradient of their input, then the root."""
        self._is_queued = False
        for block in (*reversed(self._blocks), self._root):
            if block.in_backward:
                block.after_backward()
        self.free()
        if self._backwards == self.microbatches - 1:
            for unit in self.units:
                if unit not in self._started:  # also zeros of a unit that no gradient reached
                    unit.gradients.before_backward()
                    unit.gradients.after_backward()
                    unit.gradients.start()
        while self._reducing:
            self._reducing.pop(0).gradients.advance()
        self._started.clear()
        self._backwards += 1


def _lists_in(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of every outermost nn.ModuleList and nn.Sequential."""
    for child in (model,) if isinstance(model, nn.Sequential) else model.children():
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            yield from child
        else:
            yield from _lists_in(child)


def _shared(model: nn.Module, blocks: list[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that several blocks, or a block and the rest of the model, hold."""
    users = Counter(p for block in blocks for p in block.parameters())
    inside = {module for block in blocks for module in block.modules()}
    outside = {
        p
        for module in model.modules()
        if module not in inside
        for p in module.parameters(recurse=False)
    }
    return {p for p, count in users.items() if count > 1 or p in outside}


def _check_disjoint(blocks: list[nn.Module]) -> None:
    """Raise ValueError if a block contains another one."""
    for block in blocks:
        for name, inner in block.named_modules():
            if inner is not block and inner in blocks:
                raise ValueError(
                    f"{name} of {type(block).__name__} is a block inside a block: pass only the "
                    "outer or only the inner ones"
                )
