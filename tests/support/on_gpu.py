"""The kernel tests on a GPU: kernels are compiled, and tensors that a test makes are on the GPU.

    WARPWEAVE_TEST_DEVICE=cuda pytest tests/test_norm.py

In the mode `Placed` the tensors that a test makes (``torch.randn``, ``torch.tensor``, ...) are
drawn on the CPU, so their values are the same as ever, and then moved. Tensors that the library
makes stay on the device that the library chooses.
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
    """A mode that moves tensors made by lines of `tests/` to `device` unless they name another."""

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
    """Return True if the frame that called torch is in a test or a helper."""
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
