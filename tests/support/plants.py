"""Faults planted in what runs: an attribute of a module, class or object is replaced.

A fault lasts as long as the context that plants it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch

from warpweave.parallel.collectives import reduce_from


class Plant(NamedTuple):
    """value(right) in the place of `right`, which is the attribute `name` of `place`."""

    place: Any
    name: str
    value: Callable[[Any], Any]


def instead(place: Any, name: str, value: Any) -> Plant:
    """The plant of a `value` that does not ask for what it replaces."""
    return Plant(place, name, lambda right: value)


@contextmanager
def planted(*plants: Plant) -> Iterator[None]:
    """Within it they are in their places, and afterwards what was there before."""
    with ExitStack() as places:
        for place, name, value in plants:
            changed = value(getattr(place, name))
            places.enter_context(mock.patch.object(place, name, changed))
        yield


def noticed(group: Any, check: Callable[..., object], *args: object, **options: object) -> int:
    """On how many ranks of `group` check(*args, **options) fails an assertion; collective."""
    try:
        check(*args, **options)
        failed = torch.zeros(())
    except AssertionError:
        failed = torch.ones(())
    return int(reduce_from(failed, group))
