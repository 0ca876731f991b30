"""Start, watch, restart, and connect ranks, with errors that name the rank that failed.

On one machine all of our sockets listen on loopback only. Under ``torchrun`` (one machine or
several) the launcher has already opened its store on every interface, and we join it.

Signals (`interrupt`): `launch` passes on the first one, once, as SIGTERM; ranks finish their step
and save. A second one kills them. Ranks start with signals blocked (`processes`), and `join`
unblocks them. If `launch`'s own process or torchrun dies, even by SIGKILL, its ranks end at once.
"""

from __future__ import annotations

import gc
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from warpweave.cli.messages import one_line, say
from warpweave.launch.blame import End, rank_at_fault, recorded
from warpweave.launch.devices import connect, disagreement, share_cores, take_device
from warpweave.launch.heartbeat import SILENCE, Heartbeat, at_fault
from warpweave.launch.interrupt import STOPS, Interrupt
from warpweave.launch.processes import (
    DUMPS,
    Processes,
    end_with_parent,
    environment,
    leave,
    told_ranks,
    under_torchrun,
)
from warpweave.parallel.mesh import Mesh

# Seconds that the others have to end after a rank failed; on NCCL they first write the flight
# recorder's files and abort communicators. Zero after a death or a verdict, which is sufficient.
_LINGER = {"gloo": SILENCE + 1.0, "nccl": 30.0}

# torchrun's variables: whether it keeps the ranks' store, and how often it has restarted the ranks.
_AGENTS_STORE, _ATTEMPT = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"


class Stopped(SystemExit):
    """Exit after signal `number`, with 128 + number or the code that a rank then failed with."""

    def __init__(self, number: int, code: int = 0) -> None:
        super().__init__(code or 128 + number)
        self.number = number


def launch(
    entry: Callable[..., Any],
    args: tuple,
    mesh: Mesh,
    *,
    backend: str = "gloo",
    max_restarts: int = 0,
    processes: Processes | None = None,
) -> Any:
    """Run ``entry(*args, port)`` on every rank of `mesh` on this machine. Return rank 0's result.

    `port` is the port of the ranks' store in this process, for `join`. The store outlives any rank,
    so survivors can find out which rank is missing. `entry` must be importable (a module-level
    function), and its result must be JSON. `backend` is the one that the ranks will `join` with.
    After a failure, but not after a refusal (exit code 2), all ranks are restarted up to
    `max_restarts` times. `processes` runs the ranks if it was prepared earlier, on gloo. Must be
    called from the main thread.

    Exits with a rank's exit code (1 if the rank died) if a rank fails, and with `Stopped` after a
    signal. No rank outlives this call.
    """
    kept, began, dumps = keep_store(), time.time(), None
    folder = tempfile.mkdtemp(prefix="warpweave-") if backend == "nccl" else ""
    told = told_ranks(backend, folder)
    sys.stdout.flush()
    with environment(**told):
        started = Processes.of(entry, backend, processes)
    with Interrupt() as interrupt, started as processes:
        try:
            for attempt in range(max_restarts + 1):
                store = dist.PrefixStore(f"attempt_{attempt}", kept)
                given = mesh.world, kept.port, attempt, entry, args
                with environment(**told):
                    for rank in range(mesh.world):
                        processes.start(_rank_process, rank, *given)
                ends = _watch(processes, interrupt, store, backend)
                processes.end()
                if not ends:
                    break
                dumps = recorded(told.get(DUMPS), mesh.world, began)
                failure = _failure(ends, mesh, store, interrupt.number, dumps)
                if attempt == max_restarts or failure.code == 2 or interrupt.number is not None:
                    raise failure
                say(f"restarting all ranks (restart {attempt + 1} of {max_restarts})")
        except KeyboardInterrupt:
            say("stopped at once, without saving")
        except ChildProcessError as error:
            say(one_line(error))
            raise SystemExit(1) from None
        finally:
            if not dumps or DUMPS in os.environ:  # otherwise it has the flight recorders' files
                shutil.rmtree(folder, ignore_errors=True)
    if interrupt.number is not None:
        raise Stopped(interrupt.number)
    return json.loads(store.get("result/0"))


def keep_store() -> dist.TCPStore:
    """Open a store in this process for ranks of this machine, on a free loopback port."""
    listener = _loopback_listener(0)
    port, fd = listener.getsockname()[1], listener.detach()
    keep = {"is_master": True, "wait_for_workers": False, "master_listen_fd": fd}
    return dist.TCPStore("127.0.0.1", port, **keep)


def _rank_process(
    rank: int, world: int, port: int, attempt: int, entry: Callable[..., Any], args: tuple
) -> None:
    """Run one rank in this process, with the environment variables that torchrun would set."""
    for name, value in (("RANK", rank), ("WORLD_SIZE", world)):
        os.environ[name] = os.environ[f"LOCAL_{name}"] = str(value)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {_AGENTS_STORE: "True", _ATTEMPT: str(attempt)}
    result = json.dumps(entry(*args, port))
    _store(rank, world, world, timedelta(seconds=30)).set(f"result/{rank}", result)
    leave(0)


def _watch(
    processes: Processes, interrupt: Interrupt, store: dist.Store, backend: str
) -> list[End]:
    """Wait until all ranks have ended; pass on a signal, and kill ranks that outlive a failure.

    Returns the ranks that failed, in the order in which they ended; one without a result has died.
    """
    running = dict(enumerate(processes.started))
    ends: list[End] = []
    passed_on, deadline = False, math.inf
    while running:
        processes.wait(0.1)
        codes = {rank: p.exitcode for rank, p in running.items() if p.exitcode is not None}
        for rank in sorted(codes, key=codes.__getitem__):  # if simultaneous, killed ranks first
            del running[rank]
            end = End(rank, codes[rank])
            if end.code or not store.check([f"result/{rank}"]):
                ends.append(end)
                speaks = end.code > 0 or (end.aborted and backend == "nccl")
                linger = _LINGER[backend] if speaks and not store.check(["verdict"]) else 0.0
                deadline = min(deadline, time.monotonic() + linger)
        if interrupt.number is not None and not passed_on:
            passed_on = True
            for process in running.values():
                process.terminate()
        if time.monotonic() >= deadline:
            for process in running.values():
                process.kill()
    return ends


def _failure(
    ends: list[End],
    mesh: Mesh,
    store: dist.Store,
    stopped: int | None,
    dumps: dict[int, Path] | None,
) -> SystemExit:
    """Report what the ranks could not report themselves. Return the exception to exit with.

    `stopped` is the number of the signal that requested a stop."""
    code = ends[0].code
    if stopped is not None and code <= 0:
        return Stopped(stopped)
    if (line := rank_at_fault(ends, mesh, store, dumps)) is not None:
        say(line)
    code = code if code > 0 else 1
    return SystemExit(code) if stopped is None else Stopped(stopped, code)


def _loopback_listener(port: int) -> socket.socket:
    """Open a socket that listens on 127.0.0.1 only; port 0 selects a free port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        why = f"the ranks' store cannot listen on 127.0.0.1:{port}: {error.strerror}"
        raise OSError(error.errno, why) from None
    return listener


@dataclass
class Session:
    """One rank's connection to the others.

    Attributes:
        device: the device that this rank computes on.
        rank, world: this rank and the size of the default process group.
        store: the key-value store that the ranks share; None for a single process.
        timeout: seconds that any collective may take.
        mesh: the mesh's sizes, for the names of ranks in messages.
        where: the device and backend in words.
        launched: `launch` started this rank and reports for ranks that are silent.

    Examples:
        >>> from warpweave import Mesh, join
        >>> session = join(Mesh())
        >>> x = torch.ones(4, device=session.device)
        >>> session.close()
    """

    device: torch.device
    rank: int
    world: int
    store: dist.Store | None
    timeout: float
    mesh: Mesh
    where: str = "cpu"
    launched: bool = False
    _renewals: int = 0

    def __post_init__(self) -> None:
        self.heartbeat = None if self.store is None else Heartbeat(self.store, self.rank)

    @property
    def goes_on(self) -> bool:
        """True if an earlier attempt of this launch reached `begin`."""
        kept, attempt = getattr(self.store, "underlying_store", None), os.environ.get(_ATTEMPT, "0")
        earlier = [dist.PrefixStore(f"attempt_{n}", kept) for n in range(int(attempt)) if kept]
        return any(store.check(["begun"]) for store in earlier)

    def begin(self) -> None:
        """Record that work has begun, so that a restarted launch continues it."""
        if self.store is not None:
            self.store.set("begun", "")

    def beat(self, step: int, phase: str) -> None:
        """Record the progress of this rank in the store, for others to report if it hangs."""
        if self.heartbeat is not None:
            self.heartbeat.note(step, phase)

    def explain(self, error: BaseException, common: tuple[type, ...] = ()) -> str | None:
        """`error` as one line that names the rank at fault; None if another rank reports it.

        Errors of the types in `common` are raised on all ranks and already name the rank. A rank
        with any error except a lost connection is the cause and reports it. If ranks lost their
        peers, the first one to find the rank at fault by `heartbeat` reports it.
        """
        words = one_line(error)
        text = words if isinstance(error, (ValueError, *common)) else type(error).__name__
        if text is not words and words:
            text = f"{text}: {words}"
        if self.store is None:
            return text
        name = self.mesh.describe(self.rank)
        try:
            if not is_connection_error(error):  # this rank is (one of) the cause
                first = self.store.add("causes", 1) == 1
                self.store.set(f"failed/{self.rank}", text)
                if not first:
                    return None
                return text if isinstance(error, common) else f"{name} failed: {text}"
            self.store.set(f"failed/{self.rank}", text)
            found = at_fault(self.store, self.rank, self.world)
            if self.store.add("causes", 0) > 0 or self.store.add("speakers", 1) > 1:
                return None
            named = [why.format(self.mesh.describe(r)) for r, why in sorted(found.items())]
            verdict = "; ".join(named) or f"{name}: {text}"
            if not self.launched:
                return verdict
            self.store.set("verdict", verdict)
            return None
        except RuntimeError:  # the store is also gone
            keeper = "the process that started the ranks" if self.launched else "the launcher"
            return f"{name} is stopping because {keeper} is gone"

    def renew(self, mesh: Mesh) -> None:
        """Replace all process groups with a new default one; collective over `mesh`.

        Every group keeps threads and sockets, and torch reuses the names of groups that were
        destroyed one by one, so a process that builds many engines starts over instead. The first
        ranks remain, as many as `mesh` has; the others must have left.
        """
        if self.store is None:
            return
        gc.collect()  # objects built on the old groups keep them and their threads alive in cycles
        dist.destroy_process_group()
        self._renewals += 1
        self.mesh, self.world = mesh, mesh.world
        store = dist.PrefixStore(f"renewal_{self._renewals}", self.store)
        connect(self.device, store, self.rank, self.world, self.timeout)

    def close(self) -> None:
        """Leave the process group."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def reported(
    session: Session, common: tuple[type, ...] = (), *, refused: tuple[type, ...] = ()
) -> Iterator[None]:
    """End this process on an error, after one rank has named the rank at fault in one line.

    The exit code is 2 for the types in `refused`, 130 for KeyboardInterrupt, and otherwise 1.
    Errors that are bugs are printed with their traceback, once. `common` is as in
    `Session.explain`. Skips the interpreter's shutdown, because a process group cannot be destroyed
    cleanly after a peer is gone.
    """
    try:
        yield
    except KeyboardInterrupt:
        say("stopped at once, without saving")
        leave(130)
    except BaseException as error:
        line = session.explain(error, common)
        if line is not None:
            refusals = (ValueError, OSError, MemoryError, torch.OutOfMemoryError, *common)
            if not isinstance(error, refusals) and not is_connection_error(error):
                traceback.print_exception(error)
            say(line)
        leave(2 if isinstance(error, refused) else 1)


def is_connection_error(error: BaseException) -> bool:
    """True for an error that torch.distributed raises for a lost or late peer."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError
        and any(
            word in str(error) for word in ("gloo", "NCCL", "Connection", "Timed out", "timeout")
        )
    )


def join(
    mesh: Mesh,
    *,
    timeout: float = 300.0,
    backend: str | None = None,
    port: int | None = None,
) -> Session:
    """Connect this process to the other ranks, by the launcher's environment variables.

    With one rank and no launcher there is nothing to connect, and torch keeps its threads.
    `backend` is "gloo" (CPU), "nccl" (GPUs), or None for NCCL if there are GPUs. `port` comes from
    `launch`. On the CPU the local ranks share the cores, whatever OMP_NUM_THREADS is (torchrun sets
    it to 1).

    Raises:
        ValueError: the mesh does not have as many ranks as were started, or their GPUs cannot be
            used (`devices`); every rank raises the same error.

    Examples:
        >>> from warpweave import Mesh
        >>> session = join(Mesh())  # under torchrun: join(Mesh(tp=2)) on two ranks
        >>> session.rank, session.world
        (0, 1)
        >>> session.close()
    """
    env = os.environ
    if port is None and "TORCHELASTIC_RUN_ID" in env:
        end_with_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # see `launch`
    backend, device, own = take_device(backend, launched=port is not None)
    if not under_torchrun():
        if mesh.world != 1:
            raise ValueError(f"the mesh needs {mesh.world} ranks, but 1 process is running")
        if (line := disagreement(None, 0, mesh, own)) is not None:
            raise ValueError(line)
        return Session(device, 0, 1, None, timeout, mesh, own["name"])
    local_world = int(env.get("LOCAL_WORLD_SIZE", "1"))
    if backend == "gloo":
        share_cores(local_world)
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    if mesh.world != world:
        raise ValueError(
            f"mesh dp={mesh.dp} x cp={mesh.cp} x tp={mesh.tp} x pp={mesh.pp} needs {mesh.world} "
            f"ranks, but {world} were started"
        )
    store = _store(rank, world, local_world, timedelta(seconds=timeout))
    where, launched = f"{own['name']}, {backend}", port is not None
    session = Session(device, rank, world, store, timeout, mesh, where, launched=launched)
    assert session.heartbeat is not None
    session.heartbeat.start()
    if (line := disagreement(store, rank, mesh, own)) is not None:
        session.close()
        if port is None:
            raise ValueError(line)
        store.set("verdict", line)  # `launch` prints it, as no rank does
        sys.exit(2)
    connect(device, store, rank, world, timeout)
    return session


def _store(rank: int, world: int, local_world: int, timeout: timedelta) -> dist.Store:
    """The ranks' store: the launcher's if it keeps one, otherwise rank 0's own.

    Keys are scoped by the launcher's attempt, because restarted gloo workers would otherwise read
    the addresses of the dead attempt and hang.
    """
    env = os.environ
    if world == local_world:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    hosts = rank == 0 and env.get(_AGENTS_STORE) != "True"
    options: dict[str, Any] = {}
    if hosts and world == local_world:
        address = "127.0.0.1"
        options["master_listen_fd"] = _loopback_listener(port).detach()
    store = dist.TCPStore(address, port, world, is_master=hosts, timeout=timeout, **options)
    return dist.PrefixStore(f"attempt_{env.get(_ATTEMPT, '0')}", store)
