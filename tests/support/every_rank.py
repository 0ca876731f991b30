"""Tests whose body runs on every rank, written under the name of the test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from threads import run_threads


def every_rank(world: int, run: Callable[..., Any] = run_threads):
    """Run the body of a test on `world` ranks, with its rank as the only argument.

    `run` is `run_threads` or `ranks.run_ranks`, whose processes import the body by its name.
    """

    def decorate(body: Callable[[int], object]) -> Callable[[], None]:
        def test() -> None:
            run(world, body)

        test.__name__, test.__module__, test.__doc__ = body.__name__, body.__module__, body.__doc__
        test.body, body.__qualname__ = body, f"{body.__name__}.body"
        return test

    return decorate
