"""A check: what is compared with what, within which limit, and what came of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from warpweave.cli.messages import one_line
from warpweave.launch.session import Stopped


class Measured(NamedTuple):
    """An error and its limit; `said` is more, in words."""

    error: float
    limit: float
    said: str = ""


@dataclass(frozen=True)
class Check:
    """`measure` compares the subject `name` with the truth `against`."""

    name: str
    against: str
    measure: Callable[[], Measured]


@dataclass(frozen=True)
class Verdict:
    """What came of a check.

    Attributes:
        name, against: of the check.
        passed: None if there was no time left to begin it.
        error, limit: None if it raised, or was not begun.
        seconds: that it took.
        said: more in words, or what was raised.
    """

    name: str
    against: str
    passed: bool | None
    error: float | None = None
    limit: float | None = None
    seconds: float = 0.0
    said: str = "no time left"


def run(checks: Iterable[Check], until: float) -> Iterator[Verdict]:
    """A verdict for each check; one that raises has failed, and the next one follows.

    None is begun after `until`, by `time.monotonic`. `Stopped` and KeyboardInterrupt end it.
    """
    for check in checks:
        began = time.monotonic()
        if began > until:
            yield Verdict(check.name, check.against, None)
            continue
        error = limit = None
        try:
            error, limit, said = check.measure()
            passed = error <= limit  # NaN is not
            error = error if math.isfinite(error) else None  # for JSON
        except Stopped:
            raise
        except (Exception, SystemExit) as raised:  # a rank that died ends its launcher
            passed, said = False, f"{type(raised).__name__}: {one_line(raised)}"
        seconds = round(time.monotonic() - began, 2)
        yield Verdict(check.name, check.against, passed, error, limit, seconds, said)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max|actual - expected| / max|expected|; infinite for other shapes or for NaN."""
    if actual.shape != expected.shape:
        return float("inf")
    difference = (actual.double() - expected.double()).abs().max().item()
    error = difference / (expected.double().abs().max().item() or 1.0)
    return error if error == error else float("inf")


def within_budget(actual: Tensor, plain: Tensor, truth: Tensor, terms: int = 1) -> Measured:
    """The error of `actual` against the float64 `truth`: at most twice that of `plain`, torch in
    the same dtype, and one rounding.

    In float32 two roundings count at least, and sqrt(n) / 4 where sums have n `terms`: errors of
    sums that are made term by term, as a kernel makes them, grow like sqrt(n) (Higham and Mary
    2019). A library that cuts a sum into parts may be off by less.
    """
    eps = torch.finfo(actual.dtype).eps
    least = max(2.0, math.sqrt(terms) / 4) * eps if actual.dtype == torch.float32 else 0.0
    limit = 2 * max(relative_error(plain, truth), least) + eps
    return Measured(relative_error(actual, truth), limit)


def worst(found: dict[str, Measured]) -> Measured:
    """The one that is nearest to its limit, or furthest beyond, and its name."""
    name = max(found, key=lambda name: found[name].error / found[name].limit)
    return found[name]._replace(said=f"largest: {name}")
