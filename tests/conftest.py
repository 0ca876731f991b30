"""Settings that every test shares: Triton runs in its interpreter, one thread per process."""

import os
import sys
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    """What one file compiles does not count against the next one's limit of recompilations."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
