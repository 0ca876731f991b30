"""Settings that every test shares: Triton runs in its interpreter, one thread per process."""

import os
import signal
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


def _process() -> dict[str, object]:
    """What tests of other files in this process would see, were it changed."""
    theirs = "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"  # torch's, when it is first asked
    ours = {n: v for n, v in os.environ.items() if n[0] != "_" and n not in theirs}
    return ours | {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
    }


@pytest.fixture(autouse=True)
def _process_is_left_as_it_was() -> Iterator[None]:
    before = _process()
    yield
    assert _process() == before
