"""Checks: a comparison, its limit, and its verdict."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from warpweave.cli.messages import one_line
from warpweave.launch.interrupt import Stopped


class Measured(NamedTuple):
    """An error and its limit; `said` adds details in words."""

    error: float
    limit: float
    said: str = ""


@dataclass(frozen=True)
class Check:
    """A comparison of the subject `name` with the truth `against`, made by `measure`."""

    name: str
    against: str
    measure: Callable[[], Measured]


@dataclass(frozen=True)
class Verdict:
    """The result of a check. `passed` is None if there was no time left to start it. `error` and
    `limit` are None if it raised an exception or was not started. `seconds` is its run time, and
    `said` has details in words, or the exception."""

    name: str
    against: str
    passed: bool | None
    error: float | None = None
    limit: float | None = None
    seconds: float = 0.0
    said: str = "no time left"


def run(checks: Iterable[Check], until: float) -> Iterator[Verdict]:
    """Yield a verdict for each check. A check that raises has failed; the others still run.

    No check starts after `until`, by `time.monotonic`. `Stopped` and KeyboardInterrupt are raised.
    """
    for check in checks:
        began = time.monotonic()
        if began > until:
            yield Verdict(check.name, check.against, None)
            continue
        error = limit = None
        try:
            error, limit, said = check.measure()
            passed = error <= limit  # False for NaN
            error = error if math.isfinite(error) else None  # for JSON
        except Stopped:
            raise
        except (Exception, SystemExit) as raised:  # a rank that died ends its launcher
            passed, said = False, f"{type(raised).__name__}: {one_line(raised)}"
        seconds = round(time.monotonic() - began, 2)
        yield Verdict(check.name, check.against, passed, error, limit, seconds, said)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected|; infinite for NaN or if the shapes differ."""
    if actual.shape != expected.shape:
        return math.inf
    difference = (actual.double() - expected.double()).abs().max().item()
    error = difference / (expected.double().abs().max().item() or 1.0)
    return math.inf if math.isnan(error) else error


def within_budget(actual: Tensor, plain: Tensor, truth: Tensor, terms: int = 1) -> Measured:
    """The error of `actual` against the float64 `truth`, and its limit: twice the error of `plain`
    (torch in the same dtype) plus one rounding.

    In float32 the error of `plain` counts as at least two roundings, and at least sqrt(n) / 4
    roundings for sums of n `terms`. Errors of sums that are computed term by term, as in a kernel,
    grow like sqrt(n) (Higham and Mary 2019); a library that splits a sum may have smaller ones.
    """
    eps = torch.finfo(actual.dtype).eps
    least = max(2.0, math.sqrt(terms) / 4) * eps if actual.dtype == torch.float32 else 0.0
    limit = 2 * max(relative_error(plain, truth), least) + eps
    return Measured(relative_error(actual, truth), limit)


def worst(found: dict[str, Measured]) -> Measured:
    """The measurement with the largest error relative to its limit, and its name."""
    name = max(found, key=lambda name: found[name].error / found[name].limit)
    return found[name]._replace(said=f"largest: {name}")
