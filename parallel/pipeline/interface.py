"""What the executor asks of a stage and of a transport."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from warpweave.parallel.schedule.actions import Action, Link, Schedule

Like = tuple[Sequence[int], torch.dtype, torch.device]


class Stage(Protocol):
    """What a pipeline stage must offer. `x`, `y`, `dx`, `dy` are plain data without a graph."""

    def input_like(self, mb: int) -> Like:
        """(shape, dtype, device) of the x that `forward` takes; not asked of stage 0."""

    def start(self) -> None:
        """A run of the lists begins: the weights of now are version 0."""

    def forward(self, mb: int, x: Tensor | None, version: int) -> Tensor | None:
        """Output of micro-batch `mb` by the weights of `version`, which its backward uses too.

        Stage 0 has its own input (x None), the last returns None. Losses stay with their stage,
        whose backward starts from them, too (`losses`). Raises ValueError if the stage does not
        hold that version.
        """

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """All gradients of `mb`, added to the parameters'; returns dx (stage 0: None)."""

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """As `backward`, with weight gradients left for `backward_weight` (`runtime.wgrad`)."""

    def backward_weight(self, mb: int) -> None:
        """The weight gradients that `backward_input` left, added to the parameters'."""

    def unshard(self) -> None:
        """Gather the parameters (ZeRO-3)."""

    def reshard(self) -> None:
        """Drop the gathered parameters."""

    def reduce(self) -> None:
        """Sum the gradients so far over the ranks that hold this stage."""

    def tie(self) -> Tensor | None:
        """The shared weight's gradient, to which the other end's is added in place.

        None when the stage has summed the two by itself.
        """

    def update(self) -> None:
        """The optimizer step, which makes the next version."""


class Receive(NamedTuple):
    """What a coroutine yields: it waits for the next message on `link`, which is for `action`."""

    link: Link
    action: Action
    like: Like


class Transport(Protocol):
    """Moves tensors between the ranks of a schedule, and runs those that live in this process."""

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """The ranks that this process runs."""

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Called before each run; raises when lists or stages do not fit."""

    def like(self, stage: int, mb: int) -> Like:
        """What stage `stage` takes as input for `mb`; stages of other ranks included."""

    def reach(self, rank: int, index: int) -> None:
        """`rank` comes to action `index` of its list: what is to be posted before it, is."""

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Hand over a message without blocking; nobody may write to the tensor afterwards."""

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Run the coroutines (rank -> coroutine) to their ends."""
