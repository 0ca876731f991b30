"""The arguments that a call passes to the function that computes, recorded by a mock."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def told(module: Any, name: str, call: Callable[[], object], result: Any = None) -> dict[str, Any]:
    """Return the arguments that `call` passes to ``module.name``, by name."""
    own = inspect.signature(getattr(module, name))
    with mock.patch.object(module, name, return_value=result) as asked:
        call()
    (heard,) = asked.call_args_list
    given = dict(own.bind(*heard.args, **heard.kwargs).arguments)
    return given | given.pop("keywords", {})


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal if isinstance(value, Tensor) else lambda a, b: a == b
        assert same(found[name], value), (name, found[name], value)
