"""ZeRO for a model of your own, by hooks on its blocks.

    ZeRO 3, blocks 0, 1, 2; the root's parameters (embedding, final norm, head) stay gathered
    forward   F0        F1        F2        B2        B1           B0
    network   gather 1  gather 2  -         gather 1  gather 0,    reduce-
                                                      reduce-      scatter 1
                                                      scatter 2    and then 0

A hook on a block's output tensors runs before the block's backward and gathers its parameters. A
hook on its input tensors runs after the block's backward and starts the reduction of its gradients
(as in FSDP, Zhao et al. 2023, arXiv:2304.11277). Autograd runs the nodes that were created last
first, so all of the block's nodes have run by then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves

from warpweave.layers.records import collect_records
from warpweave.parallel.data.optimizer import AdamW, Rule, check_lr, check_rule
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.mesh import ConnectedMesh, connected
from warpweave.wrap.units import Sharded, make_units, share_buffers


@dataclass(eq=False)
class _Visit:
    """A forward of a block, after that of the block `previous`."""

    previous: _Wrapped | None


class _Wrapped:
    """A module whose parameters are gathered, and whose gradients are reduced, together: a block of
    `zero`, or with `is_root` the whole model for the root's parameters, which stay gathered from
    the model's forward to the end of its backward.

    Attributes:
        following: the block after it in the last forward.
        calls: forwards since the last step whose backward has not ended.
        in_backward: a backward has reached the block and not ended.
    """

    def __init__(
        self, zero: Zero, module: nn.Module, units: tuple[Unit, ...], *, is_root: bool = False
    ) -> None:
        self.units, self.calls, self.in_backward = units, 0, False
        self.following: _Wrapped | None = None
        self._zero, self._is_root = zero, is_root
        sharded = [p for unit in units if unit.placement.param for _, p in unit.params]
        self._views = [(p, p.data) for p in sharded]  # of buffers that are freed in between
        self._open: set[_Visit] = set()  # whose backward has begun and not ended
        self._visit = _Visit(None)
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
        self.lay_out()

    def lay_out(self) -> None:
        """Give parameters that ZeRO 3 shards their shapes again."""
        for p, view in self._views:
            p.data = view

    def free(self) -> None:
        """Free parameters that ZeRO 3 shards. They become empty, so that a use of them fails."""
        for unit in self.units:
            unit.parameters.wait()
            unit.parameters.reshard()
        for p, view in self._views:
            p.data = view.new_empty(0)

    # ------------------------------------------------------------------ forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.in_backward:  # else activation checkpointing computes the block again
            self._zero.check_ended()
        self.gather()
        if self.in_backward:
            return
        previous = self._zero.entered(self, is_root=self._is_root)
        if self.following is not None:
            self.following.prefetch()
        if self._is_root or not torch.is_grad_enabled():
            return
        self._visit = _Visit(previous)
        inputs = [x for x in _trainable_tensors((args, kwargs)) if x.grad_fn is not None]
        if inputs:
            register_multi_grad_hook(inputs, partial(self._end_visit, self._visit))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.in_backward:
            return
        if not torch.is_grad_enabled():
            self._zero.free() if self._is_root else self.free()
            return
        leaves = tree_leaves(output)
        if not self._is_root and not any(isinstance(x, Tensor) for x in leaves):
            raise ValueError(
                f"{type(module).__name__} returned a {type(output).__name__} in which no tensor "
                "was found: a block must return tensors, or tuples, lists, or dicts of them"
            )
        outputs = [x for x in _trainable_tensors(output) if x.grad_fn is not None]
        # A hook on a view is lost if the view is then modified in place: the base keeps its own.
        bases = (x._base for x in outputs if x._base is not None)
        outputs += [base for base in bases if base.grad_fn is not None]
        if self._is_root:
            if outputs:
                register_multi_grad_hook(outputs, lambda _: self.before_backward(), mode="any")
            return
        if outputs:
            self.calls += 1
            begin = partial(self._begin_visit, self._visit)
            register_multi_grad_hook(outputs, begin, mode="any")
        self.free()

    # ------------------------------------------------------------------ backward

    def _begin_visit(self, visit: _Visit, gradient: Tensor) -> None:
        self._open.add(visit)
        self.before_backward()
        if visit.previous is not None:
            visit.previous.prefetch()

    def _end_visit(self, visit: _Visit, gradients: object) -> None:
        if visit not in self._open:  # of an input that reaches the loss on other ways only
            return
        self._open.discard(visit)
        self.calls -= 1
        if not self._open:
            self.after_backward()

    def before_backward(self) -> None:
        """Gather the parameters, unless a backward has reached the block already."""
        self._zero.in_backward()
        if self.in_backward:
            return
        self.in_backward = True
        self.gather()
        for unit in self.units:
            unit.gradients.receive()

    def after_backward(self) -> None:
        """Start the reduction of the gradients, and free the parameters."""
        self.in_backward = False
        self._open.clear()
        for unit in self.units:
            unit.gradients.adopt()
            unit.gradients.after_backward()
        self._zero.completed(self)
        self.free()


class Zero(Sharded):
    """A model whose parameters, gradients, and optimizer state are sharded over data ranks.

    Call the model as usual, and ``zero.step(lr)`` instead of an optimizer's step::

        zero = Zero(model, Mesh(dp=2).connect(), stage=3)
        loss = criterion(model(x), y)
        loss.backward()
        zero.step(lr=1e-3)

    Gradients are averaged over the data ranks, as in DDP and FSDP, and summed over micro-batches. A
    step whose gradient norm is not finite changes nothing. A parameter that no gradient reaches
    counts as having a gradient of zero.

    Args:
        model: the model, on this rank's device. Tensor-parallel layers of `warpweave.layers` may be
            in it. Frozen parameters and buffers are replicated.
        mesh: the connected mesh; data ranks are those of dp and cp.
        stage: the ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 also the gradients, 3 also
            the parameters.
        rule: the optimizer's arithmetic, by default ``AdamW()``.
        blocks: the modules whose parameters are gathered together, such as ``model.layers``; by
            default the children of every outermost `nn.ModuleList` and `nn.Sequential`. All other
            parameters, and those that blocks share, are gathered with the model.
        clip: the largest global gradient norm, or None.
        microbatches: backward passes before each step. ZeRO 0 and 1 reduce gradients in the last.

    Parameters and buffers start with the values of the first data rank. Every rank must call the
    same blocks in the same order. ZeRO 3 has parameters only inside the forward and backward of the
    model and its blocks: call those, not their children or other methods.

    Raises:
        ValueError: another stage than 0 to 3, pipeline or outer ranks, blocks that contain each
            other or are not in the model, a second `Zero` of one model, or nothing to train.

    Examples:
        >>> from warpweave import Mesh
        >>> model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        >>> zero = Zero(model, Mesh().connect(), stage=2)  # under torchrun: Mesh(dp=2).connect()
        >>> model(torch.randn(8, 16)).square().mean().backward()
        >>> norm = zero.step(lr=1e-3)
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
        mesh = connected(mesh)
        chosen = list(dict.fromkeys(_lists_in(model) if blocks is None else blocks))
        _check_zero(model, mesh, chosen, microbatches)
        rule = AdamW() if rule is None else rule
        check_rule(rule, clip)  # before the model changes
        self.model, self.microbatches, self._backwards = model, microbatches, 0
        share_buffers(model, mesh)
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
        every = [unit for block in (self._root, *self._blocks) for unit in block.units]
        super().__init__(every, mesh, rule, clip, divisor=mesh.size("data"))
        self._guard(model)
        self._trained = {p for unit in self.units for _, p in unit.params}
        self._last_entered: _Wrapped | None = None
        self._reducing: list[Unit] = []
        self._started: set[Unit] = set()  # units whose last reduction of the step has started
        self._is_queued = False
        self._reset()

    def step(self, lr: float) -> Tensor:
        """Update every parameter; return the global gradient norm before clipping, 0-dim.

        Raises ValueError unless there were `microbatches` backward passes since the last step, or
        if a parameter requires a gradient that was frozen when `Zero` was made, or if the learning
        rate is negative or not finite.
        """
        check_lr(lr)
        if self._backwards != self.microbatches:
            raise ValueError(
                "the number of backward passes before zero.step() must be microbatches = "
                f"{self.microbatches}, got {self._backwards}"
            )
        for name, p in self.model.named_parameters():
            if p.requires_grad and p not in self._trained:
                raise ValueError(
                    f"{name} requires a gradient, but was frozen when this Zero was created; "
                    "create a new Zero"
                )
        self.free()  # what a forward without a backward has left
        for unit in self.units:
            unit.gradients.finish()
        self.optimizer.sum_partials()
        norm = self.optimizer.step(lr)
        for unit in self.units:
            unit.parameters.wait()  # someone may read them before the next forward
        self._reset()
        return norm

    def _reset(self) -> None:
        self._backwards = 0
        for block in (self._root, *self._blocks):
            block.calls = 0
            block.free()
        for unit in self.units:
            unit.gradients.clear()
            unit.gradients.release()

    # ------------------------------------------------------------------ called by blocks

    def free(self) -> None:
        """Free all parameters that ZeRO 3 shards, also those gathered ahead of a use that did not
        come."""
        for block in (self._root, *self._blocks):
            block.free()

    def check_ended(self) -> None:
        """Raise RuntimeError if a backward has begun and not ended."""
        if self._is_queued and torch._C._current_graph_task_id() == -1:
            raise RuntimeError("the last backward pass did not finish; create a new Zero")

    def entered(self, block: _Wrapped, *, is_root: bool) -> _Wrapped | None:
        """Note the order of blocks in a forward, and return the previous one."""
        previous, self._last_entered = self._last_entered, None if is_root else block
        if is_root or previous is None:
            return None
        previous.following = block
        return previous

    def in_backward(self) -> None:
        """Have `_end` called when this backward is over.

        Raises RuntimeError if the step after the last `microbatches` backward passes is missing.
        """
        if self._backwards == self.microbatches:
            raise RuntimeError(
                "the number of backward passes before zero.step(lr) must be microbatches = "
                f"{self.microbatches}, got {self._backwards + 1}; calling another optimizer's "
                "step() does not replace zero.step(lr)"
            )
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
                unit.gradients.release()
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
        for block in (*reversed(self._blocks), self._root):
            if block.in_backward:
                block.after_backward()
        self.free()
        if self._backwards == self.microbatches - 1:
            for block in (self._root, *self._blocks):
                self._start_rest(block)
        while self._reducing:
            self._reducing.pop(0).gradients.advance()
        self._started.clear()
        self._backwards += 1
        self._is_queued = False

    def _start_rest(self, block: _Wrapped) -> None:
        """Start the last reduction of a block's other units, with zeros if no gradient came."""
        rest = [unit for unit in block.units if unit not in self._started]
        if rest:
            block.lay_out()
        for unit in rest:
            unit.gradients.receive()
            unit.gradients.adopt()
            unit.gradients.after_backward()
            unit.gradients.start()
            if unit.gradients.sharded_accumulation:
                unit.gradients.release()
        block.free()


def _trainable_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree that require a gradient."""
    for x in tree_leaves(value):
        if isinstance(x, Tensor) and x.requires_grad:
            yield x


def _lists_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of every outermost nn.ModuleList and nn.Sequential. A container inside a
    list has no forward, so the modules inside it count."""
    if isinstance(module, nn.Sequential):
        yield from module
    elif isinstance(module, nn.ModuleList):
        for inner in module:
            container = isinstance(inner, (nn.ModuleList, nn.ModuleDict))
            yield from _lists_in(inner) if container else (inner,)
    else:
        for child in module.children():
            yield from _lists_in(child)


def _shared(model: nn.Module, blocks: list[nn.Module]) -> set[nn.Parameter]:
    """Return the parameters that several blocks, or a block and the rest of the model, hold."""
    users = Counter(p for block in blocks for p in block.parameters())
    inside = {module for block in blocks for module in block.modules()}
    others = (module for module in model.modules() if module not in inside)
    outside = {p for module in others for p in module.parameters(recurse=False)}
    return {p for p, count in users.items() if count > 1 or p in outside}


def _check_zero(
    model: nn.Module, mesh: ConnectedMesh, blocks: list[nn.Module], microbatches: int
) -> None:
    """Raise ValueError for what `Zero` does not accept."""
    if mesh.size("pp") > 1 or mesh.size("outer") > 1:
        raise ValueError(
            f"Zero needs pp = 1 and outer = 1, got {mesh.size('pp')} and {mesh.size('outer')}; use "
            "Pipeline(zero=...) for pipeline ranks"
        )
    if type(microbatches) is not int or microbatches < 1:
        raise ValueError(f"microbatches must be an integer of at least 1, got {microbatches!r}")
    hooks = model._forward_pre_hooks.values()
    if any(isinstance(getattr(hook, "__self__", None), _Wrapped) for hook in hooks):
        raise ValueError(f"{type(model).__name__} already has a Zero")
    inside = {*model.modules()}
    for block in blocks:
        if block not in inside:
            raise ValueError(f"the block {type(block).__name__} is not in the model")
        for name, inner in block.named_modules():
            if inner is not block and inner in blocks:
                raise ValueError(
                    f"the block {name} is inside another block, a {type(block).__name__}; pass "
                    "only the outer blocks or only the inner blocks"
                )
