"""The protocols of a stage and of a transport, as the executor uses them."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from warpweave.parallel.schedule.actions import Action, Link, Schedule

Like = tuple[Sequence[int], torch.dtype, torch.device]


class Stage(Protocol):
    """A pipeline stage. `x`, `y`, `dx`, `dy` are tensors without an autograd graph; the memory of
    `x` and `dy` is the stage's until the micro-batch's backward is over."""

    def input_like(self, mb: int) -> Like:
        """(shape, dtype, device) of the input of `forward`; not called for stage 0."""

    def start(self) -> None:
        """Called when a run of the lists begins: the current weights are version 0."""

    def forward(self, mb: int, x: Tensor | None, version: int) -> Tensor | None:
        """The output for micro-batch `mb` with the weights of `version`, also used by its backward.

        Stage 0 has its own input (x None), the last returns None. Losses stay with their stage,
        whose backward starts from them, too (`losses`). Raises ValueError if the stage does not
        hold that version.
        """

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """All gradients of `mb`, added to the parameters'; returns dx (stage 0: None)."""

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """As `backward`, with the weight gradients deferred to `backward_weight`
        (`runtime.wgrad`)."""

    def backward_weight(self, mb: int) -> None:
        """Compute the deferred weight gradients and add them to the parameters'."""

    def reduce(self) -> None:
        """Sum the accumulated gradients over the data ranks of this stage."""

    def tie(self) -> Tensor | None:
        """The tied weight's gradient, to which the other end's is added in place; None if the stage
        has summed the two itself.
        """

    def update(self) -> None:
        """The optimizer step, which produces the next version."""


class Receive(NamedTuple):
    """Yielded by a coroutine to wait for the next message on `link`, that of `action`."""

    link: Link
    action: Action
    like: Like


class Transport(Protocol):
    """Sends tensors between the ranks of a schedule, and runs those that are in this process."""

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """The ranks that this process runs."""

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Called before each run; raises when lists or stages do not fit."""

    def like(self, stage: int, mb: int) -> Like:
        """(shape, dtype, device) of the input of any stage for `mb`, also on other ranks."""

    def reach(self, rank: int, index: int) -> None:
        """Called before action `index` of `rank`'s list: posts the receives that are due there."""

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Start a send without blocking; the tensor must not be written to afterwards."""

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Run the coroutines (rank -> coroutine) to their ends."""
