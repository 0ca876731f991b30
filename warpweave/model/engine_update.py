"""A pipeline stage of the engine: the tie, the update at the end of a step, and its result."""

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
        losses: name -> loss over the whole global batch, before the update. "loss" is the mean over
            its valid tokens; the others are auxiliary losses (`pipeline.losses`).
        norm: global gradient norm before clipping.
        interrupts: number of ranks that were interrupted, plus a half if a rank requested some
            other action between steps.
        overflow: True if the norm is not finite because of fp16's loss scale, which can still
            shrink.
        finite: bool[2], True if this rank's own losses, or gradients, are finite.

    Examples:
        >>> from warpweave import Engine, GPTConfig, Mesh
        >>> config = GPTConfig(vocab_size=256, seq_len=16, layers=2, width=64, heads=8)
        >>> engine, tokens = Engine(config, Mesh().connect()), torch.randint(0, 256, (1, 1, 16))
        >>> result = engine.step(tokens, tokens.roll(-1, 1), torch.zeros(1, 1).long(), lr=1e-3)
        >>> sorted(result.losses), result.norm.isfinite()
        (['loss'], tensor(True))
    """

    losses: Mapping[str, Tensor]
    norm: Tensor
    interrupts: Tensor
    overflow: Tensor
    finite: Tensor

    def clone(self) -> StepResult:
        """A copy of all tensors."""
        losses = {name: loss.clone() for name, loss in self.losses.items()}
        rest = (self.norm, self.interrupts, self.overflow, self.finite)
        return StepResult(losses, *(x.clone() for x in rest))

    @property
    def loss(self) -> Tensor:
        """The sum of all losses; the step uses its gradient."""
        first, *others = self.losses.values()
        return sum(others, start=first)

    @property
    def stops(self) -> Tensor:
        """True if training stops here: a loss or norm is not finite, or a rank was interrupted."""
        good = self.loss.isfinite() & (self.norm.isfinite() | self.overflow)
        return ~good | (self.interrupts >= 1)

    def all(self) -> Tensor:
        """Return [loss, norm, interrupts, overflow] as one tensor, for one transfer to the host."""
        every = self.loss, self.norm, self.interrupts, self.overflow
        return torch.stack([x.to(self.loss) for x in every])


class RankUpdate:
    """The optimizer step of all stages of a rank, run at the UPDATE of the last stage.

    It includes the work of the outer optimizer before and after. The global norm needs every
    stage's gradients. Meanwhile, the losses are summed over ranks.

    Args:
        optimizer: the optimizer of all units of the rank.
        updates: number of UPDATEs of the rank in a step, one for each of its stages.
        outer: the outer optimizer, or None.
    """

    def __init__(
        self, optimizer: ZeroOptimizer, updates: int, outer: OuterOptimizer | None = None
    ) -> None:
        self.optimizer, self.updates, self.outer = optimizer, updates, outer
        self.square: Tensor | None = None

    def begin(
        self, lr: float | Tensor | None, halted: Tensor | None, start_losses: Callable[[], Pending]
    ) -> None:
        """Prepare a step. If `lr` is None, the step computes only the norm and keeps gradients."""
        self._lr, self._halted = lr, halted
        self._start_losses, self._missing = start_losses, self.updates

    def arrive(self) -> None:
        """Note that a stage's gradients are reduced and tied; the last stage starts the update."""
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
    """The optimizer steps of a stage of an asynchronous schedule.

    Each UPDATE of the stage runs one step, with the stage's own gradients only. After the last
    UPDATE of a pass, the losses are summed over ranks. The optimizer has the stage's units, and the
    norm is that of the stage.
    """

    def arrive(self) -> None:
        """Run a step; `square` becomes the mean square of the norms of the pass's steps."""
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
        """The reduced gradient of the tied embedding; the executor adds that of the other end.

        Both ends shard the embedding's unit equally, so this rank's slice matches its peer's.
        """
        return next((u.gradients.reduced for u in self.units if u.tied), None)

    def update(self) -> None:
        """Report that this stage is ready for the optimizer step."""
        self._update.arrive()
        self.updated()
