"""Processes of a run on one machine: they start with signals blocked and end with their parent.

A rank's imports need three seconds of CPU time. Ranks on the CPU are therefore forked from one
process that has finished the imports (Linux), and restarts are immediate:

    this process --- spawns ---> fork server --- forks ---> rank 0, rank 1, ...
         | <--- (pid, exit code) ---- |

On GPUs each rank is a new interpreter, because a process that has used CUDA cannot be forked.
Neither can a process with threads, which modules may start when they are imported.
multiprocessing's own fork server is not used: there is one for the whole program, with the
environment of its first use, and it lives until its last child ends.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cached_property
from importlib import import_module
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from warpweave.launch.interrupt import STOPS

DUMPS = "TORCH_FR_DUMP_TEMP_FILE"  # prefix of flight recorder files; torch appends the rank
# gloo's variable for the interface that it listens on, and its value for ranks of one machine
LOOPBACK = "GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0"
DRIVER = Path("/proc/driver/nvidia/version")  # exists on machines that may have CUDA


def under_torchrun() -> bool:
    """True in a process that a launcher started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def no_cache() -> dict[str, str]:
    """Environment variables that keep torch.compile from creating a cache folder: custom operators
    import it, but no rank compiles."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    return {name: os.environ.get(name, tempfile.gettempdir())}


def told_ranks(backend: str, folder: str | None = None) -> dict[str, str]:
    """Environment variables for the ranks, all on this machine.

    On gloo torch's log is silent, since one rank reports in one line why it failed. On NCCL the
    watchdog writes to the log, and flight recorders write to `folder`, if given, unless the user
    has set a different place."""
    told = no_cache() | {LOOPBACK[0]: os.environ.get(*LOOPBACK)}
    if backend == "gloo":
        return told | {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "FATAL")}
    if folder is None:
        return told
    prefix = os.environ.get(DUMPS, os.path.join(folder, "flight_recorder_rank_"))
    return told | {DUMPS: prefix, "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set environment variables for processes started in this block; restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Processes:
    """Starts and ends the processes of a run; `started` has those that `end` would end.

    Processes start with the signals of `STOPS` blocked and unblock them when they have handlers, so
    an early signal is neither lost nor causes a traceback. All are forked from one that has
    imported `module`, or are new interpreters if it is None. Use this class in the main thread.
    """

    def __init__(self, module: str | None = None) -> None:
        self.started: list[BaseProcess | Forked] = []
        self._ended: set[BaseProcess | Forked] = set()  # processes that `wait` has seen ended
        self._module = module if sys.platform == "linux" else None
        self._server = None if self._module is None else _ForkServer(self._module)

    @classmethod
    def early(cls, module: str) -> Processes | None:
        """Prepare processes for ranks on the CPU; they import `module` while this process does.
        None if ranks may run on GPUs, or if torchrun started them."""
        if DRIVER.exists() or under_torchrun():
            return None
        with environment(**told_ranks("gloo")):
            return cls(module)

    @classmethod
    def of(cls, entry: Callable[..., Any], backend: str, early: Processes | None) -> Processes:
        """Processes that run `entry` on `backend`; on gloo these are `early`, if given.

        On other backends they are never forked: torch may have used a GPU, and its log is silent in
        `early`.
        """
        if backend != "gloo":
            return cls()
        return early or cls(getattr(entry, "func", entry).__module__)  # `entry` may be a partial

    def start(self, target: Callable[..., Any], *args: Any) -> BaseProcess | Forked:
        """Run ``target(*args)`` in a new process with this one's environment. `target` is a
        module-level function; `args` must be picklable. Raises ChildProcessError if the fork server
        has ended."""
        if self._server and not self._server.process.is_alive():
            self._server = _ForkServer(self._module)
        if self._server and not self._server.forks:
            self._server = None
        started = self._server.start(target, args) if self._server else _spawned(target, *args)
        self.started.append(started)
        return started

    def wait(self, timeout: float) -> None:
        """Wait until a process has ended, at most `timeout` seconds."""
        running = [p for p in self.started if p not in self._ended]
        if all(p.exitcode is None for p in running):  # none has ended since the last call
            sentinels = [p.sentinel for p in running if isinstance(p, BaseProcess)]
            pipes = [self._server.pipe] if self._server else []
            connection.wait([*sentinels, *pipes], timeout)
        self._ended = {p for p in self.started if p.exitcode is not None}

    def end(self) -> None:
        """Kill the running processes and wait until they are gone."""
        end(self.started)
        self.started.clear()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.end()
        finally:
            if self._server:
                end([self._server.process])


def end(processes: Collection[BaseProcess | Forked]) -> None:
    """Kill the running processes and wait until they are gone."""
    for process in processes:
        process.kill()
    for process in processes:
        if isinstance(process, Forked):
            process.join(10.0)
            if process.exitcode is None:
                process.server.kill()  # it is stuck; all processes that it forked end with it
        process.join()


class Forked:
    """A forked process, with the part of multiprocessing's interface that is needed here."""

    def __init__(self, server: _ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.server = server.process  # which forked this one
        self._code: int | None = None

    @property
    def exitcode(self) -> int | None:
        """The exit code: None while the process runs, negative for a signal."""
        self._server.read()
        return self._code

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self.exitcode is None:
            with suppress(ProcessLookupError):  # it may just have ended
                os.kill(self.pid, number)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, at most `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while self.exitcode is None:
            left = None if until is None else until - time.monotonic()
            if (left is not None and left <= 0) or not connection.wait([self._server.pipe], left):
                return


class _ForkServer:
    """This process's end of the fork server: `pipe` sends what to run, and receives pids and exit
    codes from the server's `process`."""

    def __init__(self, module: str) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        with environment(OPENBLAS_NUM_THREADS="1"):  # numpy would start threads
            self.process = _spawned(_serve, theirs, module)
        theirs.close()
        self._running: dict[int, Forked] = {}

    @cached_property
    def forks(self) -> bool:
        """True if the server has no threads; the first use waits for its imports."""
        return self._received()

    def start(self, target: Callable[..., Any], args: tuple) -> Forked:
        self._send(dict(os.environ), bytes(ForkingPickler.dumps((target, args))))
        while (pid := self._next()) is None:
            pass
        self._running[pid] = Forked(self, pid)
        return self._running[pid]

    def read(self) -> None:
        """Record which processes have ended."""
        while self._running and self.pipe.poll():
            self._next()

    def _next(self) -> int | None:
        """Read a message. Return the pid if it reports a started process."""
        try:
            pid, code = self._received()
        except ChildProcessError:  # the server's children have ended with it
            if not self._running:
                raise
            pid, code = next(iter(self._running)), -signal.SIGKILL
        if code is None:
            return pid
        if (forked := self._running.pop(pid, None)) is not None:
            forked._code = code
        return None

    def _received(self) -> Any:
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            self._lost()

    def _send(self, *message: Any) -> None:
        try:
            self.pipe.send(message)
        except ConnectionError:
            self._lost()

    def _lost(self) -> NoReturn:
        """Wait for the end of the server, whose pipe broke a little earlier, so that the next start
        finds it dead."""
        end([self.process])
        raise ChildProcessError("the process that forks ranks has ended") from None


def import_for_good(module: str) -> ModuleType:
    """Import a module that this process needs until its end.

    Python's garbage collector does not run meanwhile, and skips everything that exists by then. A
    process that only imports torch then takes 1.05 s of CPU time instead of 1.75 s (AMD EPYC), half
    of it saved at its end. Forked processes keep sharing the memory, to which a collection would
    write.
    """
    if module in sys.modules:
        return sys.modules[module]
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def _serve(pipe: connection.Connection, module: str) -> None:
    """Run the fork server. It exits without waiting for its children, which end with it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        with suppress(EOFError):
            import_for_good(module)
            forks = len(os.listdir("/proc/self/task")) == 1
            pipe.send(forks)
            if forks:
                _fork_as_told(pipe)
    except BaseException:
        traceback.print_exc()
        leave(1)
    leave(0)


def _fork_as_told(pipe: connection.Connection) -> NoReturn:
    """Fork processes on request and report those that end; EOFError when the parent is gone."""
    context = multiprocessing.get_context("fork")
    running: list[Any] = []  # context.Process
    while True:
        # A sentinel is open as long as any child of the process lives.
        if pipe in connection.wait([pipe, *(child.sentinel for child in running)], 0.2):
            child = context.Process(target=_forked, args=(pipe, *pipe.recv()))
            child.start()
            running.append(child)
            pipe.send((child.pid, None))
        ended = [child for child in running if child.exitcode is not None]
        for child in sorted(ended, key=lambda child: child.exitcode):  # killed processes first
            running.remove(child)
            pipe.send((child.pid, child.exitcode))


def _forked(pipe: connection.Connection, environ: dict[str, str], given: bytes) -> None:
    pipe.close()
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    if "numpy.random" in sys.modules:  # a different state in each, as after a fresh import
        sys.modules["numpy.random"].seed()
    target, args = ForkingPickler.loads(given)
    _run(target, *args)


def _spawned(target: Callable[..., Any], *args: Any) -> BaseProcess:
    """Start a new interpreter that runs ``target(*args)``."""
    resource_tracker.ensure_running()  # starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    try:
        process = multiprocessing.get_context("spawn").Process(target=_run, args=(target, *args))
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _run(target: Callable[..., Any], *args: Any) -> None:
    end_with_parent()
    target(*args)


def end_with_parent() -> None:
    """Kill this process as soon as its parent is gone, even if this process is stuck.

    Linux does this even to a process that is stopped or holds the interpreter lock, and also when
    only the *thread* that started this process ends. On other systems, and for a child of
    multiprocessing's fork server, a thread waits for the end of the parent.
    """
    parent, starter = multiprocessing.parent_process(), os.getppid()
    if sys.platform == "linux" and (parent is None or parent.pid == starter):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != starter:  # the parent was already gone
            os.kill(os.getpid(), signal.SIGKILL)
        return

    def watch() -> None:
        if parent is not None:  # its pipe to this process breaks when it ends, even by SIGKILL
            connection.wait([parent.sentinel])
        while parent is None and os.getppid() == starter:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextmanager
def starting(early: Processes | None) -> Iterator[Processes | None]:
    """Run a command that starts its ranks in `early`, if given.

    This process then exits without torch's shutdown, which takes half a second of CPU time; it has
    done no other work."""
    try:
        with early or nullcontext():
            yield early
    except SystemExit as end:
        if early and isinstance(end.code, int):
            leave(end.code)
        raise


def leave(code: int) -> NoReturn:
    """End this process without the interpreter's shutdown.

    Threads of process groups may outlive the shutdown: after successful runs, one rank in some
    dozens aborted (torch 2.13, "terminate called without an active exception").
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
