"""Settings shared by all tests.

Triton runs in its interpreter, and each process uses one thread unless OMP_NUM_THREADS is set. With
WARPWEAVE_TEST_DEVICE=cuda the kernel tests run on a GPU instead (`support/on_gpu.py`).
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

if os.environ.get("WARPWEAVE_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated, so before any import
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# a checkout that is not installed; child processes need it as well
if find_spec("warpweave") is None:
    _CHECKOUT = str(Path(__file__).resolve().parents[1])
    sys.path.append(_CHECKOUT)
    _given = filter(None, (os.environ.get("PYTHONPATH"), _CHECKOUT))
    os.environ["PYTHONPATH"] = os.pathsep.join(_given)

import fault_plugin
import on_gpu
import pytest
import quick_interpreter
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
ON_GPU = os.environ.get("WARPWEAVE_TEST_DEVICE") == "cuda"
if not ON_GPU:
    quick_interpreter.install()

# Files that take half a minute or more, in the order in which parallel workers should start them.
_LONGEST = (
    "deaths", "launch", "prove", "hf_adapters", "hf_hooks", "declare_rules", "agree",
    "compile_counts", "train", "hf", "benchmarks", "graph",
    "attention", "fused", "gemm", "planted_faults", "compiles", "tune", "gpt", "zero", "typecheck",
    "hf_training", "hf_parallel", "elastic", "checkpoint", "attention_mask", "restart",
    "overlap_fuzz", "generate", "styles", "packaging",
)  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-layouts", action="store_true", help="test faults on all their layouts")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(fault_plugin)
    if ON_GPU:
        config.pluginmanager.register(on_gpu.OnGpu())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest files first if several processes share the suite, so that they finish
    together. A single process keeps the given order."""
    if hasattr(config, "workerinput"):
        place = {f"test_{name}": i for i, name in enumerate(_LONGEST)}
        items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let Python's garbage collector skip everything imported and collected so far: it stays, and
    looking through it again and again took a seventh of the CPU time of numeric tests."""
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _fresh_compiler() -> Iterator[None]:
    """Reset the compiler, so that recompilations in one file do not count
    against the limit of the next."""
    yield
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="module")
def _no_rank_beats_on() -> Iterator[None]:
    """Stop heartbeats that a test has left running: they would see what later tests patch, such as
    the time."""
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
    for thread in left:
        thread.join(10)
    assert not any(thread.is_alive() for thread in left), "a session was not closed"


class _AtOnce:
    """A thread that runs to completion in start()."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self.start, self.join = target, lambda: None


@pytest.fixture
def saved_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write checkpoints in the thread that saves. Where ranks are threads, no other thread belongs
    to a rank."""
    from warpweave.checkpoint import background

    monkeypatch.setattr(background, "threading", SimpleNamespace(Thread=_AtOnce))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the loss curve of a run without points. Drawing takes half as long as all the steps."""
    from warpweave.train.metrics import Metrics

    monkeypatch.setattr(Metrics, "_plot", lambda self, path: path.write_bytes(b"\x89PNG"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _process() -> dict[str, object]:
    """Fail a test that leaves changes in the process which tests of other files would see."""
    theirs = ("_", "PYTEST_CURRENT_TEST", "TORCHINDUCTOR_")  # pytest and torch may set these
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
