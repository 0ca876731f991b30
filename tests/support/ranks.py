"""Functions on several gloo ranks in tenths of a second: children of a preloaded forkserver.

``run_ranks(4, fn, *args)`` calls ``fn(rank, *args)`` in four processes whose default process group
is already connected over loopback, and returns the four results. The first rank to fail decides the
exception, with its own traceback; the others are stopped. No process outlives the one that started
it, even if that is killed.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from warpweave.launch.processes import Processes

# Imports that ranks of many files need and that take longer than most tests: the whole package, the
# dependencies of Triton's interpreter, torch.compile and FSDP2, and pytest, which test files
# import. None of them is a test file: before Python 3.13 a forkserver lacks the path of the process
# that starts it, and skips modules that it does not find.
_PRELOAD = [
    "torch", "torch.distributed", "torch.distributed.device_mesh", "torch.testing._comparison",
    "pytest", "torch._dynamo.backends.debugging", "triton.experimental.gluon.language",
    "warpweave.prove", "warpweave.train.command",
]  # fmt: skip
_FREEZE = "freeze_garbage"  # after the others
# Preloaded only if this process has imported transformers: it costs two more seconds.
_TRANSFORMERS = ["transformers.models.llama.modeling_llama", "transformers.trainer"]


def _context() -> mp.context.ForkServerContext:
    context = mp.get_context("forkserver")
    more = _TRANSFORMERS if "transformers" in sys.modules else []
    context.set_forkserver_preload([*_PRELOAD, *more, _FREEZE])
    return context


class QuickProcesses(Processes):
    """Children of that forkserver in place of those that `warpweave` would start.

    Their output is appended to the files stdout and stderr of `folder`. Without a folder it goes to
    the output of the forkserver.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder = folder

    def start(self, target: Callable[..., Any], *args: Any) -> mp.process.BaseProcess:
        if self._folder is not None:
            target, args = _printing, (str(self._folder), target, args)
        self.started.append(_context().Process(target=target, args=args))
        self.started[-1].start()
        return self.started[-1]


def _printing(folder: str, target: Callable[..., Any], args: tuple) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(os.path.join(folder, name), flags, 0o600), number)
    target(*args)


def _child(
    rank: int, world: int, store: str, timeout: float, fn: Callable[..., Any], args: tuple,
    pipe: Any,
) -> None:  # fmt: skip
    import datetime

    import quick_interpreter
    import torch
    import torch.distributed as dist

    from warpweave.launch.processes import end_with_parent

    end_with_parent()
    quick_interpreter.install()
    _look_at_leisure()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    torch.manual_seed(0)
    try:
        try:
            how = {"rank": rank, "world_size": world}
            how["timeout"] = datetime.timedelta(seconds=timeout)
            dist.init_process_group("gloo", init_method=f"file://{store}", **how)
        except RuntimeError as error:
            raise NotMetError(error) from error
        result = fn(rank, *args)
        # Not pipe.send: it shares tensors by handles, which die with this process.
        pipe.send_bytes(pickle.dumps((True, result)))
    except BaseException as error:
        told = None if isinstance(error, NotMetError) else False
        pipe.send_bytes(pickle.dumps((told, traceback.format_exc())))
        pipe.close()
        os._exit(1)  # peers must see the connection drop at once, not after interpreter shutdown
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _look_at_leisure() -> None:
    """Make a kernel that waits in Triton's interpreter sleep between polls, for up to 8
    milliseconds, longer each time: the rank that it waits for needs the processor."""
    from triton.runtime.interpreter import InterpreterBuilder

    look, last, pause = InterpreterBuilder.create_atomic_rmw, None, 0.0

    def patient(builder, op, ptr, val, mask, sem, scope):
        nonlocal last, pause
        if sem.name == "ACQUIRE":
            this = ptr.data.item(), builder.grid_idx
            pause = min(2 * pause, 0.008) if this == last else 0.0005
            if this == last:
                time.sleep(pause)
            last = this
        return look(builder, op, ptr, val, mask, sem, scope)

    InterpreterBuilder.create_atomic_rmw = patient


class NotMetError(Exception):
    """gloo did not connect the ranks, so this rank ran nothing of the test."""


class NotedWork:
    """Several works of torch.distributed as one; `events` notes that they are
    (p)osted and (w)aited for."""

    def __init__(self, works: list, events: list[str]) -> None:
        events.append("p")
        self._works, self._events = works, events

    def wait(self) -> None:
        self._events.append("w")
        for work in self._works:
            work.wait()


def run_ranks(world: int, fn: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Call ``fn(rank, *args)`` on `world` connected gloo ranks; return their results in rank order.

    Raises ``AssertionError`` with the traceback of the first rank that failed, and ``TimeoutError``
    naming the silent ranks when `timeout` seconds pass. If gloo does not connect the ranks, they
    are started again, at most twice: on a busy machine a loopback handshake was once dropped.
    """
    for _ in range(2):
        try:
            return _run_ranks(world, fn, args, timeout)
        except NotMetError:
            continue
    return _run_ranks(world, fn, args, timeout)


def _run_ranks(world: int, fn: Callable[..., Any], args: tuple, timeout: float) -> list[Any]:
    context = _context()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        pipes, processes = {}, []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_child, args=(rank, world, store, timeout, fn, args, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        try:
            while pipes:
                ready = wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise TimeoutError(f"ranks {sorted(pipes.values())} silent for {timeout} s")
                for pipe in ready:
                    rank = pipes.pop(pipe)
                    try:
                        ok, value = pickle.loads(pipe.recv_bytes())
                    except EOFError:
                        ok, value = False, f"the process died, exit code {processes[rank].exitcode}"
                    if ok is None:
                        raise NotMetError(value)
                    if not ok:
                        raise AssertionError(f"rank {rank} of {world} failed:\n{value}")
                    results[rank] = value
        finally:
            for process in processes:
                if len(results) < world:
                    process.kill()
                process.join(10)
        return [results[rank] for rank in range(world)]
