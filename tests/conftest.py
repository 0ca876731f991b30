"""Settings that every test shares: Triton runs in its interpreter, one thread per process."""

import os
import signal
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
if find_spec("warpweave") is None:  # a checkout that is not installed; processes want it, too
    _CHECKOUT = str(Path(__file__).resolve().parents[1])
    sys.path.append(_CHECKOUT)
    _given = filter(None, (os.environ.get("PYTHONPATH"), _CHECKOUT))
    os.environ["PYTHONPATH"] = os.pathsep.join(_given)

import pytest
import torch
from triton.runtime import interpreter

torch.set_num_threads(1)


def _prepare_the_language_once() -> None:
    """Triton's interpreter replaces the functions of `triton.language` by its own at every call of
    a device function, which is up to half of its time: here once a launch for each module."""
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang
    prepared: set[str] = set()

    def launch_afresh(self, *args, **options):
        prepared.clear()
        return launch(self, *args, **options)

    def prepare_once(function):
        if (module := function.__globals__["__name__"]) in prepared:
            return None  # of a device function, which takes nothing back
        prepared.add(module)
        return prepare(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launch_afresh, prepare_once


_prepare_the_language_once()


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
    theirs = ("_", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_")  # which pytest and torch may set
    ours = {n: v for n, v in os.environ.items() if not n.startswith(theirs)}
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
