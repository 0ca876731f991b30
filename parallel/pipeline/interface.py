"""The protocols that the executor expects of a stage and of a transport."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from warpweave.parallel.schedule.actions import Action, Link, Schedule

Like = tuple[Sequence[int], torch.dtype, torch.device]
OnAction = Callable[[int, int], None]  # (rank, index of the action in its list)


class Stage(Protocol):
    """A pipeline stage. `x`, `y`, `dx`, `dy` are tensors without an autograd graph. The stage owns
    the memory of `x` and `dy` until the micro-batch's backward is over."""

    def input_like(self, mb: int) -> Like:
        """Return (shape, dtype, device) of the input of `forward`; not called for stage 0."""

    def start(self) -> None:
        """Begin a run of the lists: the current weights are version 0."""

    def forward(self, mb: int, x: Tensor | None, version: int) -> Tensor | None:
        """Return the output for micro-batch `mb` with the weights of `version`.

        The backward of `mb` uses the same version. Stage 0 has its own input (x is None); the last
        stage returns None. Losses stay with their stage, whose backward also starts from them
        (`losses`). Raises ValueError if the stage does not hold that version.
        """

    def backward(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Add all gradients of `mb` to the parameters' gradients; return dx (None on stage 0)."""

    def backward_input(self, mb: int, dy: Tensor | None) -> Tensor | None:
        """Like `backward`, but defer the weight gradients to `backward_weight`
        (`runtime.wgrad`)."""

    def backward_weight(self, mb: int) -> None:
        """Compute the deferred weight gradients and add them to the parameters'."""

    def reduce(self) -> None:
        """Sum the accumulated gradients over the data ranks of this stage."""

    def tie(self) -> Tensor | None:
        """Return the tied weight's gradient, to which the other end's is added in place; None if
        the stage has already summed the two.
        """

    def update(self) -> None:
        """Make the optimizer step, which produces the next version."""


class Receive(NamedTuple):
    """A coroutine's request to wait for the message of `action`, which is the next on `link`."""

    link: Link
    action: Action
    like: Like


class Transport(Protocol):
    """Send tensors between the ranks of a schedule, and run the ranks that are in this process."""

    def ranks(self, lists: Schedule) -> Sequence[int]:
        """Return the ranks that this process runs."""

    def open(self, lists: Schedule, stages: Mapping[int, Stage]) -> None:
        """Prepare a run; called before each. Raise if the lists or the stages do not fit."""

    def like(self, stage: int, mb: int) -> Like:
        """Return (shape, dtype, device) of any stage's input for `mb`, including other ranks'."""

    def reach(self, rank: int, index: int) -> None:
        """Post the receives that are due before action `index` of `rank`'s list."""

    def send(self, link: Link, action: Action, tensor: Tensor) -> None:
        """Start a send without blocking. Don't write to the tensor afterwards."""

    def drive(self, programs: dict[int, Generator[Receive, Tensor, None]]) -> None:
        """Run the coroutines (rank -> coroutine) to completion."""


def check_version(mb: int, version: int, held: Sequence[int]) -> None:
    """Raise ValueError unless a stage holds the weights' `version` that micro-batch `mb` reads."""
    if version not in held:
        raise ValueError(
            f"micro-batch {mb} reads version {version} of the weights, but the stage holds only "
            f"versions {[*held]}"
        )
