"""The tests of kernels on a GPU: compiled instead of interpreted, what a test makes lies there.

    WARPWEAVE_TEST_DEVICE=cuda pytest tests/test_norm.py

`Placed` is a mode in which the tensors that a test makes (``torch.randn``, ``torch.tensor``, ...)
are drawn on the CPU, of the same numbers as ever, and moved. What the library makes lies where the
library says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

_TESTS = str(Path(__file__).resolve().parents[1])


class Placed(TorchFunctionMode):
    """Tensors that lines of `tests/` make, and no others, are on `device` unless they say where."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.factories = device, _device_constructors()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func not in self.factories or kwargs.get("device") is not None or not _asked_by_test():
            return func(*args, **kwargs)
        grad = kwargs.pop("requires_grad", False)
        return func(*args, **kwargs).to(self.device).requires_grad_(grad)


def _asked_by_test() -> bool:
    """Whether the frame that called torch is a test's or a helper's."""
    return sys._getframe(2).f_code.co_filename.startswith(_TESTS)


class OnGpu:
    """The plugin that `conftest` registers."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        with Placed("cuda"):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with Placed("cuda"):
            return (yield)
