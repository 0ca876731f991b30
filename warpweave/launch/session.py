"""One rank's connection to the others, with errors that name the rank that failed.

On one machine all of our sockets listen on loopback only. Under ``torchrun`` (one machine or
several) the launcher has already opened its store on every interface, and we join it.

Ranks start with signals blocked (`processes`), and `join` unblocks them. If torchrun dies, even by
SIGKILL, its ranks end at once, as those of `ranks.launch` do.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from warpweave.cli.messages import one_line, say, tell_torchrun
from warpweave.launch.devices import connect, disagreement, share_cores, take_device
from warpweave.launch.heartbeat import Heartbeat, at_fault
from warpweave.launch.interrupt import AT_ONCE, STOPS
from warpweave.launch.processes import LOOPBACK, end_with_parent, leave, under_torchrun
from warpweave.launch.supervise import loopback_listener
from warpweave.parallel.mesh import Mesh

# torchrun's variables: whether it keeps the ranks' store, and how often it has restarted the ranks.
AGENTS_STORE, ATTEMPT = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"


@dataclass
class Session:
    """One rank's connection to the others; as a context manager, it leaves them at the end.

    Attributes:
        device, where: the device that this rank computes on, and the device and backend in words.
        rank, world: this rank and the size of the default process group.
        store: the key-value store that the ranks share; None for a single process.
        timeout: seconds that any collective may take.
        mesh: the mesh's sizes, for the names of ranks in messages.
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
        kept, attempt = getattr(self.store, "underlying_store", None), os.environ.get(ATTEMPT, "0")
        earlier = [dist.PrefixStore(f"attempt_{n}", kept) for n in range(int(attempt)) if kept]
        return any(store.check(["begun"]) for store in earlier)

    def begin(self) -> None:
        """Record that work has begun, so that a restarted launch continues it."""
        if self.store is not None:
            self.store.set("begun", "")

    def beat(self, step: int, phase: str) -> None:
        """Record this rank's progress, for others to report if it hangs."""
        if self.heartbeat is not None:
            self.heartbeat.note(step, phase)

    def explain(self, error: BaseException, common: tuple[type, ...] = ()) -> str | None:
        """`error` as one line that names the rank at fault; None if another rank reports it.

        Errors of the types in `common` are raised on all ranks and already name the rank. A rank
        with any error except a lost connection is the cause and reports it. If ranks lost their
        peers, the first one to find the rank at fault by `heartbeat` reports it.
        """
        words, plain = one_line(error), isinstance(error, (ValueError, *common))
        text = words if plain else f"{type(error).__name__}: {words}".removesuffix(": ")
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

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave the process group. After an error its peers may be stuck in it, so stay."""
        if error is None:
            self.close()

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
        say(AT_ONCE)
        leave(130)
    except BaseException as error:
        if (line := session.explain(error, common)) is not None:
            refusals = (ValueError, OSError, MemoryError, torch.OutOfMemoryError, *common)
            if not isinstance(error, refusals) and not is_connection_error(error):
                traceback.print_exception(error)
            say(line)
            tell_torchrun(line)
        leave(2 if isinstance(error, refused) else 1)


def _tell_of_unhandled() -> None:
    """At exit, let torchrun's report end with the error that ended this program, if any."""
    if error := getattr(sys, "last_value", None):  # Python sets it when it prints the traceback
        tell_torchrun(" ".join("".join(traceback.format_exception_only(error)).split()))


def is_connection_error(error: BaseException) -> bool:
    """True for an error that torch.distributed raises for a lost or late peer."""
    words = ("gloo", "NCCL", "Connection", "Timed out", "timeout")
    plain = type(error) is RuntimeError and any(word in str(error) for word in words)
    return plain or isinstance(error, dist.DistError)


def join(
    mesh: Mesh, *, timeout: float = 300.0, backend: str | None = None, port: int | None = None
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
        atexit.register(_tell_of_unhandled)
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
        env.setdefault(*LOOPBACK)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    hosts = rank == 0 and env.get(AGENTS_STORE) != "True"
    options: dict[str, Any] = {}
    if hosts and world == local_world:
        address, options = "127.0.0.1", {"master_listen_fd": loopback_listener(port).detach()}
    store = dist.TCPStore(address, port, world, is_master=hosts, timeout=timeout, **options)
    return dist.PrefixStore(f"attempt_{env.get(ATTEMPT, '0')}", store)
