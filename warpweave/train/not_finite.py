"""Find the rank and the module where a NaN or infinity first appears.

A step whose gradient norm is not finite has changed nothing, so it is run again. Each rank notes,
in order, whether its modules' outputs, their gradients, and its inputs to collectives and messages
are finite. NaN spreads through collectives and messages: a rank got it from another rank if that
one put NaN into a shared collective before this rank's own first NaN, or sent it in a message.
Receives are posted long before their values are used, so a message counts only if a module's input
is NaN or the gradient of something that was sent is NaN. The ranks that did not get it from others
are the origins:

    two tensor ranks, NaN in rank 1's part of blocks.0.mlp
    rank 0    attention ok    input of reduce_scatter 7: ok     mlp NaN, after 7: got it from rank 1
    rank 1    attention ok    input of reduce_scatter 7: NaN    its first NaN: this is the origin
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from warpweave.model.engine import Engine
from warpweave.model.engine_update import StepResult
from warpweave.parallel.exchange import exchange
from warpweave.parallel.observe import Observer, Operation
from warpweave.train.batches import Batches


class _Note(NamedTuple):
    key: str  # the operation's key; "" for a module
    bad: bool
    where: str
    received: bool = False  # the operation is a receive
    given: bool = False  # the bad value may have come in a message


class _Notes(Observer):
    """Notes of this rank, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[_Note] = []
        self.within = "the step"  # the last module entered
        self._left: list[str] = []  # the last module left, and its submodules with the same output
        self._out: object = None
        self._given: list[bool] = []  # True for each entered module with bad inputs
        self._sent: set[str] = set()  # modules whose outputs are sent to another stage

    def before(self, operation: Operation) -> None:
        received = operation.side == "recv"
        if operation.side == "send":
            self._sent.update(self._left)
        bad = not received and _bad(operation.given)
        where = f"the input of {operation.what.partition(' of ')[0]} in {self.within}"
        self.notes.append(_Note(operation.key, bad, where, received))

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Also take notes on every module of the model."""
        with ExitStack() as hooks, self:
            for name, module in model.named_modules():
                if name:
                    enter, leave = partial(self._enter, name), partial(self._leave, name)
                    hooks.enter_context(module.register_forward_pre_hook(enter))
                    hooks.enter_context(module.register_forward_hook(leave))
            yield

    def _enter(self, name: str, module: nn.Module, inputs: Any) -> None:
        self.within = name
        self._given.append(_bad(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor)))

    def _leave(self, name: str, module: nn.Module, inputs: Any, out: Any) -> None:
        found = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        self.notes.append(_Note("", _bad(found), name, given=self._given.pop()))
        before, self._out = self._out, next(iter(found), None)
        self._left = [*self._left, name] if self._out is before else [name]
        for x in found:
            if x.requires_grad:
                x.register_hook(partial(self._gradient, name))

    def _gradient(self, name: str, dy: torch.Tensor) -> None:
        self.within = f"the gradient of {name}"
        self.notes.append(_Note("", _bad([dy]), self.within, given=name in self._sent))


def _bad(tensors: Any) -> bool:
    """True for NaN or plus infinity; attention masks and empty maxima hold minus infinity."""
    floats = (x.detach() for x in tensors if x.is_floating_point())
    return not all(bool((x < torch.inf).all()) for x in floats)


def origins(engine: Engine, again: Callable[[], object]) -> dict[int, str]:
    """Run `again` and map each rank where NaN or infinity originates to the module it starts in.

    Ranks that got it from another rank are left out. Collective, with the same result on all ranks.
    """
    notes, world = _Notes(), engine.mesh.group("world")
    with notes.of(engine.gpt):
        again()
    of_all = exchange([note.key for note in notes.notes if note.key and note.bad], world)
    others = {key for rank, keys in enumerate(of_all) if rank != engine.mesh.rank for key in keys}
    where, received = None, False
    for note in notes.notes:
        if note.received:
            received |= note.key in others
        elif note.bad or note.key in others:
            from_others = not note.bad or (received and note.given)
            where = None if from_others else note.where
            break
    return {rank: name for rank, name in enumerate(exchange(where, world)) if name is not None}


def first_seen(
    engine: Engine, batches: Batches, step: int, what: str, result: StepResult | None
) -> str:
    """Describe where the "loss" of `step`, the "validation loss", or a gradient first was not
    finite, such as "first seen on rank 1 (dp=1)". Collective.

    If the step cannot be run again, or is finite when run again, name the ranks whose losses or
    gradients were not finite. Tensor ranks share their sums, so their whole group is named.
    """
    mesh, tp = engine.mesh.sizes, engine.mesh.size("tp")
    again: Callable[[], object] | None = None
    if what != "loss":
        again = partial(engine.evaluate, *batches.held_out())
    elif engine.outer is None and not engine.passes.asynchronous:
        tokens, labels, documents, ids = batches.step(step)
        key = batches.config.dropout_key(step)
        again = partial(engine.step, tokens, labels, ids, lr=None, key=key, documents=documents)
    flagged = engine.not_finite_ranks(result)  # before the next run
    if again is not None and (found := origins(engine, again)):
        ranks: dict[str, list[int]] = {}
        for rank, where in found.items():
            ranks.setdefault(where, []).append(rank)
        seen = ", ".join(f"{mesh.names(those)} in {where}" for where, those in ranks.items())
        return f"first seen on {seen}"
    groups = dict.fromkeys(rank // tp * tp for rank in flagged)
    alike = ", within this tensor-parallel group" * (tp > 1)
    names = ", ".join(mesh.names(range(first, first + tp)) + alike for first in groups)
    once = "; a rerun did not reproduce it" * (again is not None)
    return (f"first seen on {names}" if names else "not seen on any single rank") + once
