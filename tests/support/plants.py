"""Faults planted in running code: an attribute of a module, class or object is replaced.

A fault lasts as long as its context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

import torch

from warpweave.parallel.collectives import reduce_from


class Plant(NamedTuple):
    """A fault: value(right) replaces `right`, the attribute `name` of `place`."""

    place: Any
    name: str
    value: Callable[[Any], Any]


def instead(place: Any, name: str, value: Any) -> Plant:
    """Return the plant of a `value` that does not need the value it replaces."""
    return Plant(place, name, lambda right: value)


def replacing(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return the `value` of a plant that calls change(right, ...) in place of right(...)."""

    @wraps(change)
    def value(right: Any) -> Any:
        return lambda *args, **options: change(right, *args, **options)

    return value


@contextmanager
def planted(*plants: Plant) -> Iterator[None]:
    """Plant the faults within the context, and restore the originals afterwards."""
    with ExitStack() as places:
        for place, name, value in plants:
            changed = value(getattr(place, name))
            places.enter_context(mock.patch.object(place, name, changed))
        yield


def noticed(group: Any, check: Callable[..., object], *args: object, **options: object) -> int:
    """Count the ranks of `group` where check(*args, **options) fails an assertion; collective."""
    try:
        check(*args, **options)
        failed = torch.zeros(())
    except AssertionError:
        failed = torch.ones(())
    return int(reduce_from(failed, group))
