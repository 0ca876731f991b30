"""How far off a layout is: every error by kind, the largest over all ranks, and the limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from warpweave.dtypes import DTYPES
from warpweave.exchange import exchange
from warpweave.parallel.mesh import ConnectedMesh
from warpweave.prove.expected import truth
from warpweave.prove.layouts import Layout

# Largest relative error allowed: float64 leaves no room for anything but the order of sums. For low
# dtypes, how many times the error that the plain model has there on one device.
LIMITS = {"fp64": 1e-11, "fp32": 5e-5, "bf16": 8.0, "fp16": 8.0}


@dataclass(frozen=True)
class Errors:
    """Largest relative errors of a layout, and what the largest of them was of.

    `evaluation` is that of losses without training; `token` is by how much, of their range, the
    plain logit of a generated token is below the largest: 0 for the one that the plain model takes.
    """

    loss: float
    grad: float
    norm: float
    weight: float
    moment: float
    evaluation: float
    token: float
    where: str

    @property
    def each(self) -> dict[str, float]:
        """The errors by name."""
        return {k: v for k, v in dataclasses.asdict(self).items() if k != "where"}

    @property
    def worst(self) -> float:
        """The largest of all; NaN is as wrong as can be, and `max` would pass over it."""
        return max(e if e == e else float("inf") for e in self.each.values())


def relative(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected|; infinite for other shapes or NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected).abs().max().item()
    scale = expected.abs().max().item()
    error = difference / scale if scale else difference
    return error if error == error else float("inf")


class Comparison:
    """This rank's largest error of each kind, and what the largest of all was of.

    In a low dtype errors are counted in those of the plain model in that dtype.
    """

    def __init__(self, layout: Layout) -> None:
        dtype = DTYPES[layout.dtype]
        self.expected = truth(layout.model, layout.sizes)
        self.low = truth(layout.model, layout.sizes, dtype) if dtype.itemsize < 4 else None
        self.eps = torch.finfo(dtype).eps
        self.errors: dict[str, float] = {}
        self.where = ""

    def add(self, kind: str, what: str, error: float) -> None:
        """Count an error in."""
        if error > max(self.errors.values(), default=0.0):
            self.where = what
        self.errors[kind] = max(error, self.errors.get(kind, 0.0))

    def tensor(
        self, kind: str, what: str, actual: Tensor, cut: Callable[[Tensor], Tensor] = lambda t: t
    ) -> None:
        """Compare `actual` with the (cut of the) value whose words are `what`."""
        expected = cut(self.expected.values[what])
        error = relative(actual, expected)
        if self.low is not None:
            plain = relative(cut(self.low.values[what]), expected)
            error = error / (plain + self.eps) if math.isfinite(plain) else float("inf")
        self.add(kind, what, error)

    def text(self, text: Tensor, start: Tensor, step: int, new: int) -> None:
        """By how much of their range the plain logits of the `new` tokens after `start` are low."""
        if len(text) != len(start) + new or not torch.equal(text[: len(start)], start):
            self.add("token", f"text after step {step}", float("inf"))
            return
        for at in range(len(start), len(text)):
            logits = self.expected.logits(text[:at], step)
            best, least = logits.max(), logits.min()
            error = float((best - logits[text[at]]) / (best - least))
            self.add("token", f"text after step {step}", error / (self.eps if self.low else 1.0))


def worst_rank(own: Errors, mesh: ConnectedMesh) -> Errors:
    """Every error at its largest over all ranks, and the words of the rank with the largest."""
    ranks = [Errors(**e) for e in exchange(dataclasses.asdict(own), mesh.group("world"))]
    rank = max(range(len(ranks)), key=lambda r: ranks[r].worst)
    largest = {kind: max(errors.each[kind] for errors in ranks) for kind in own.each}
    return Errors(**largest, where=f"{ranks[rank].where} on {mesh.sizes.describe(rank)}")
