"""A pipeline stage of the engine: the tie and the update that a step ends with, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from warpweave.parallel.collectives import Pending
from warpweave.parallel.data.outer import OuterOptimizer
from warpweave.parallel.data.unit import Unit
from warpweave.parallel.data.zero import ZeroOptimizer
from warpweave.parallel.pipeline import Like
from warpweave.parallel.pipeline.stage import ChainStage, Segment


@dataclass(frozen=True)
class StepResult:
    """The results of a step: 0-dim tensors on the device, the same on every rank.

    Attributes:
        losses: name -> loss over the whole global batch, before the update: "loss" is the mean
            over its valid tokens, others are auxiliary ones (`pipeline.losses`).
        norm: global gradient norm before clipping.
        interrupts: number of ranks that were interrupted, and a half if one asked for something
            else between steps.
        overflow: the norm is not finite, but for fp16's loss scale, which can still shrink.
        finite: bool[2], whether this rank's own losses and gradients are finite.
    """

    losses: Mapping[str, Tensor]
    norm: Tensor
    interrupts: Tensor
    overflow: Tensor
    finite: Tensor

    @property
    def loss(self) -> Tensor:
        """The sum of all losses, whose gradient the step uses."""
        first, *others = self.losses.values()
        return sum(others, start=first)

    @property
    def stops(self) -> Tensor:
        """Whether training stops with this step: a number is not finite, or a rank interrupted."""
        good = self.loss.isfinite() & (self.norm.isfinite() | self.overflow)
        return ~good | (self.interrupts >= 1)

    def all(self) -> Tensor:
        """[loss, norm, interrupts, overflow] as one tensor, for one transfer to the host."""
        every = self.loss, self.norm, self.interrupts, self.overflow
        return torch.stack([x.to(self.loss) for x in every])


class RankUpdate:
    """The optimizer step of all stages of a rank, and what the outer optimizer does before and
    after it, run at the UPDATE of the last of them.

    The global norm needs every stage's gradients; the losses are summed over ranks meanwhile.

    Args:
        optimizer: of all units of the rank.
        updates: UPDATEs of the rank in a step, one for each of its stages.
        outer: the outer optimizer, if there is one.
    """

    def __init__(
        self, optimizer: ZeroOptimizer, updates: int, outer: OuterOptimizer | None = None
    ) -> None:
        self.optimizer, self.updates, self.outer = optimizer, updates, outer
        self.square: Tensor | None = None

    def begin(
        self, lr: float | None, halted: Tensor | None, start_losses: Callable[[], Pending]
    ) -> None:
        """Before a step; with `lr` None only the norm is computed, and gradients are kept."""
        self._lr, self._halted = lr, halted
        self._start_losses, self._missing = start_losses, self.updates

    def arrive(self) -> None:
        """Called by each stage when its gradients are reduced and tied; the last starts the
        update."""
        self._missing -= 1
        if self._missing:
            return
        self.optimizer.sum_partials()
        if self.outer is not None:
            self.outer.before_update()
        self.losses = self._start_losses()
        if self._lr is None:
            self.norm = self.optimizer.norm()
            return
        self.norm = self.optimizer.step(self._lr, self._halted)
        if self.outer is not None:
            self.outer.after_update()


class StageUpdate(RankUpdate):
    """The optimizer steps of an asynchronous schedule's stage: one at each of its UPDATEs, by its
    own gradients alone; after the last of a pass the losses are summed over ranks.

    The optimizer is of the stage's units, and its norm the stage's.
    """

    def arrive(self) -> None:
        """A step; `square` becomes the mean over the pass's of the squares of their norms."""
        self.optimizer.sum_partials()
        self.norm = self.optimizer.step(self._lr)
        square = self.norm.square() / self.updates
        again = self.square is not None and self._missing < self.updates
        self.square = self.square + square if again else square
        self._missing -= 1
        if not self._missing:
            self.losses = self._start_losses()


class EngineStage(ChainStage):
    """A `ChainStage` with the tie and the update of a step."""

    def __init__(
        self,
        segments: list[Segment],
        update: RankUpdate,
        message: Like,
        *,
        shared: list[Unit],
        versions: int = 1,
    ) -> None:
        super().__init__(segments, shared=shared, versions=versions)
        self.message, self._update = message, update

    def input_like(self, mb: int) -> Like:
        """(shape, dtype, device) of a pipeline message: one micro-batch's residual stream."""
        return self.message

    def tie(self) -> Tensor | None:
        """The reduced gradient of the tied embedding, to which the other end's is added.

        Both ends shard the embedding's unit equally, so that this rank's slice matches its peer's.
        """
        return next((u.gradients.reduced for u in self.units if u.tied), None)

    def update(self) -> None:
        """This stage is ready for the optimizer step."""
        self._update.arrive()
        self.updated()
