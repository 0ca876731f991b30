"""Ranks: started by torchrun's launcher, connected, and able to say which of them failed.

On one machine every socket listens on loopback only. Under ``torchrun`` (one machine or several)
the launcher has opened its store already and we join it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from warpweave.parallel.mesh import Mesh

_GRACE = 3.0  # seconds in which ranks that saw an error wait for the others' reports


def under_torchrun() -> bool:
    """True in a process that a launcher started as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(entry: Callable[..., None], args: tuple, mesh: Mesh) -> None:
    """Run ``entry(*args, port)`` on every rank of `mesh` on this machine.

    `port` is where this process keeps the ranks' store, for `join`; the store outlives any rank, so
    that the survivors can ask it who is missing. Exits non-zero if a rank fails. `entry` must be
    importable (a module-level function). No restarts: a run is resumed from its
    last checkpoint by the same command with ``--resume``.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("agent.server.api", "agent.server.local_elastic_agent", "multiprocessing.api"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    # A rank's failure is told in one line (`Session.explain`), not in every peer's C++ stack.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10")  # seconds, for a rank that hangs
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    # torch would open a store for the ranks on all interfaces; ours is on loopback.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    listener = _loopback_listener(0)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    folder = tempfile.mkdtemp(prefix="warpweave-")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=mesh.world,
        run_id="warpweave",
        rdzv_backend="c10d",
        rdzv_endpoint=os.path.join(folder, "rendezvous"),
        rdzv_configs={"store_type": "file"},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr="127.0.0.1",
        signals_to_handle="SIGQUIT",  # the rest is handled below: ranks may take time to save
    )
    sys.stdout.flush()
    asked: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        """Ask the ranks to stop; they finish their step, save and exit."""
        asked.append(number)
        for child in multiprocessing.active_children():
            if child.pid is not None and len(asked) == 1:
                os.kill(child.pid, signal.SIGTERM)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        elastic_launch(config, entry)(*args, port)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                if name != "SIGTERM":  # that is how the launcher stops the survivors
                    say(f"{mesh.describe(rank)} was killed by {name}")
        codes = [f.exitcode for f in error.failures.values() if f.exitcode > 0]
        sys.exit(codes[0] if codes else 1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        shutil.rmtree(folder, ignore_errors=True)
        del store
    if asked:
        sys.exit(128 + asked[0])


def _loopback_listener(port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1 only; port 0 takes a free one."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def say(message: str) -> None:
    """One line on stderr, below whatever progress bar is there."""
    print(f"\nwarpweave: {message}", file=sys.stderr, flush=True)


@dataclass
class Session:
    """One rank's connection to the others.

    Attributes:
        device: where this rank computes.
        rank, world: in the default process group.
        store: the key-value store that the ranks share; None for a single process.
        timeout: seconds that any collective may take.
    """

    device: torch.device
    rank: int
    world: int
    store: dist.Store | None
    timeout: float
    mesh: Mesh

    def beat(self, step: int, phase: str) -> None:
        """Leave word of where this rank is, for the others to read if it falls silent."""
        if self.store is not None:
            self.store.set(f"beat/{self.rank}", json.dumps([step, phase, time.time()]))

    def explain(self, error: BaseException) -> str | None:
        """Turn `error` into one line that names the rank at fault; None if another rank says it.

        A rank with an error of its own is the cause and says so. A rank that only lost its peers
        waits a moment for reports; the ranks that stay silent are the ones at fault.
        """
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if self.store is None:
            return text
        try:
            if not _is_connection_error(error):  # this rank is (one of) the cause
                first = self.store.add("causes", 1) == 1
                self.store.set(f"failed/{self.rank}", text)
                return f"{self.mesh.describe(self.rank)} failed: {text}" if first else None
            self.store.set(f"failed/{self.rank}", text)
            reported = self._reported()
            if self.store.add("causes", 0) > 0 or self.rank != min(reported):
                return None
            silent = [r for r in range(self.world) if r not in reported]
            if not silent:
                return f"{self.mesh.describe(self.rank)}: {text}"
            return "; ".join(self._last_word(r) for r in silent)
        except RuntimeError:  # the store is gone too, there is no one left to ask
            return f"{self.mesh.describe(self.rank)}: {text}"

    def _reported(self) -> set[int]:
        """The ranks that saw an error, after waiting a moment for all of them."""
        assert self.store is not None
        reported: set[int] = set()
        deadline = time.monotonic() + _GRACE
        while len(reported) < self.world and time.monotonic() < deadline:
            for rank in set(range(self.world)) - reported:
                if self.store.check([f"failed/{rank}"]):
                    reported.add(rank)
            if self.store.add("causes", 0) > 0:
                break
            time.sleep(0.05)
        return reported

    def _last_word(self, rank: int) -> str:
        assert self.store is not None
        name = self.mesh.describe(rank)
        if not self.store.check([f"beat/{rank}"]):
            return f"no word from {name}: it died or hangs, before its first step"
        step, phase, then = json.loads(self.store.get(f"beat/{rank}"))
        return (
            f"no word from {name}: it died or hangs, last seen at step {step} ({phase}), "
            f"{time.time() - then:.1f} s ago"
        )

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def reported(session: Session) -> Iterator[None]:
    """End this process on an error, after one rank has said in one line which rank is at fault.

    Not by the interpreter's usual way out: a process group cannot be left in order once a peer is
    gone.
    """
    try:
        yield
    except BaseException as error:
        line = session.explain(error)
        if line is not None:
            say(line)
        os._exit(1)


def _is_connection_error(error: BaseException) -> bool:
    """True for what torch.distributed raises when a peer is gone or late."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
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
    """Connect this process to the others, as the launcher's environment says.

    With one rank and no launcher there is nothing to connect. `backend` is "gloo", "nccl", or None
    for NCCL where every local rank has a GPU of its own. `port` is what `launch` passes on.

    Raises:
        ValueError: the mesh does not have as many ranks as were started.
    """
    env = os.environ
    local_world = int(env.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend is None:
        backend = "nccl" if gpus >= local_world else "gloo"
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(env.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    if not under_torchrun():
        if mesh.world != 1:
            raise ValueError(f"the mesh needs {mesh.world} ranks, but 1 process is running")
        return Session(device, 0, 1, None, timeout, mesh)
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    if mesh.world != world:
        raise ValueError(
            f"mesh dp={mesh.dp} x cp={mesh.cp} x tp={mesh.tp} x pp={mesh.pp} needs {mesh.world} "
            f"ranks, but {world} were started"
        )
    store = _store(rank, world, local_world, timedelta(seconds=timeout), port)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )
    return Session(device, rank, world, store, timeout, mesh)


def _store(
    rank: int, world: int, local_world: int, timeout: timedelta, port: int | None
) -> dist.Store:
    """The ranks' store: that of `launch`, else torchrun's if it keeps one, else rank 0's own.

    Keys are scoped by the launcher's attempt, because restarted gloo workers would otherwise read
    the addresses of the dead attempt and hang.
    """
    env = os.environ
    if world == local_world:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    if port is not None:
        return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    hosts = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options: dict[str, Any] = {}
    if hosts and world == local_world:
        address = "127.0.0.1"
        options["master_listen_fd"] = _loopback_listener(port).detach()
    store = dist.TCPStore(address, port, world, is_master=hosts, timeout=timeout, **options)
    return dist.PrefixStore(f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
