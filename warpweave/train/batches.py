"""Batches of one data replica, on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from warpweave.data import boundaries
from warpweave.kernels.runtime.transfer import upload
from warpweave.train.options import TrainConfig


class Batches:
    """Training and validation batches of data replica `replica`, as tensors on `device`."""

    def __init__(self, config: TrainConfig, replica: int, device: torch.device) -> None:
        self.config, self.replica, self.device = config, replica, device
        self.train, self.validation = config.open_data("train"), config.open_data("validation")

    def step(self, step: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Samples of a step: tokens and labels [m, b, S], documents, and sample ids [m, b]."""
        ids = self.config.plan.deal(self.config.replicas, self.config.batch)[self.replica]
        cut = self._micro_batches(*self.train.batch(step, ids.flatten().tolist()))
        return *cut, upload(ids, self.device)

    def held_out(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Fixed samples for an evaluation: tokens and labels [eval_batches, b, S], documents."""
        c = self.config
        count = c.eval_batches * c.batch
        mine = range(self.replica * count, (self.replica + 1) * count)
        return self._micro_batches(*self.validation.fixed_batch(mine, count=count * c.replicas))

    def _micro_batches(self, *samples: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Split tokens and labels [n * b, S] into micro-batches [n, b, S] and add documents."""
        packed = self.config.packed
        every = (*samples, boundaries(samples[1])) if packed else samples
        cut = [upload(x.unflatten(0, (-1, self.config.batch)), self.device) for x in every]
        return cut[0], cut[1], cut[2] if packed else None
