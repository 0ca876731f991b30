"""Ranks: started by torchrun's launcher, connected, and able to say which of them failed.

On one machine every socket listens on loopback only. Under ``torchrun`` (one machine or several)
the launcher has opened its store already and we join it.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
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
    """Run ``entry(*args)`` on every rank of `mesh` on this machine; exits non-zero if one fails.

    `entry` must be importable (a module-level function). No restarts: a run is resumed from its
    last checkpoint by the same command with ``--resume``.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # torch would open the ranks' store on all interfaces; so the ranks open it, on loopback.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
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
    )
    sys.stdout.flush()
    try:
        elastic_launch(config, entry)(*args)
    except ChildFailedError as error:
        for rank, failure in sorted(error.failures.items()):
            if failure.exitcode < 0:
                name = signal.Signals(-failure.exitcode).name
                if name != "SIGTERM":  # that is how the launcher stops the survivors
                    _say(f"{mesh.describe(rank)} was killed by {name}")
        codes = [f.exitcode for f in error.failures.values() if f.exitcode > 0]
        sys.exit(codes[0] if codes else 1)
    except (SignalException, KeyboardInterrupt):
        sys.exit(130)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _say(message: str) -> None:
    print(f"warpweave: {message}", file=sys.stderr, flush=True)


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

        Every rank that saw an error reports it and waits a moment for the others. A rank that
        reports an error of its own is the cause; otherwise the ranks that stay silent are.
        """
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if self.store is None:
            return text
        own = not _is_connection_error(error)
        try:
            self.store.set(f"failed/{self.rank}", json.dumps([own, text]))
            reports = self._reports()
        except Exception:
            if self.rank == 0:
                return text
            return f"rank 0 is gone with the store it kept; {self.mesh.describe(self.rank)}: {text}"
        causes = {r: line for r, (is_own, line) in reports.items() if is_own}
        silent = [r for r in range(self.world) if r not in reports]
        if self.rank != min(reports):
            return None
        if causes:
            rank = min(causes)
            return f"{self.mesh.describe(rank)} failed: {causes[rank]}"
        if silent:
            return "; ".join(self._last_word(r) for r in silent)
        return f"{self.mesh.describe(self.rank)}: {text}"

    def _reports(self) -> dict[int, tuple[bool, str]]:
        """What the ranks that saw an error say, after waiting for all of them for a moment."""
        assert self.store is not None
        reports: dict[int, tuple[bool, str]] = {}
        deadline = time.monotonic() + _GRACE
        while len(reports) < self.world and time.monotonic() < deadline:
            for rank in range(self.world):
                if rank not in reports and self.store.check([f"failed/{rank}"]):
                    own, line = json.loads(self.store.get(f"failed/{rank}"))
                    reports[rank] = (own, line)
            time.sleep(0.05)
        return reports

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


def _is_connection_error(error: BaseException) -> bool:
    """True for what torch.distributed raises when a peer is gone or late."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(
            word in str(error) for word in ("gloo", "NCCL", "Connection", "Timed out", "timeout")
        )
    )


def join(mesh: Mesh, *, timeout: float = 300.0, backend: str | None = None) -> Session:
    """Connect this process to the others, as the launcher's environment says.

    With one rank and no launcher there is nothing to connect. `backend` is "gloo", "nccl", or None
    for NCCL where every local rank has a GPU of its own.

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
    store = _store(rank, world, local_world, timedelta(seconds=timeout))
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        device_id=device if backend == "nccl" else None,
    )
    return Session(device, rank, world, store, timeout, mesh)


def _store(rank: int, world: int, local_world: int, timeout: timedelta) -> dist.Store:
    """The ranks' store: the launcher's if it keeps one, otherwise rank 0's.

    Keys are scoped by the launcher's attempt, because restarted gloo workers would otherwise read
    the addresses of the dead attempt and hang.
    """
    env = os.environ
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    hosts = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    descriptor = None
    if world == local_world:
        env.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        if hosts:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
            address, descriptor = "127.0.0.1", listener.detach()
    options: dict[str, Any] = {} if descriptor is None else {"master_listen_fd": descriptor}
    store = dist.TCPStore(address, port, world, is_master=hosts, timeout=timeout, **options)
    return dist.PrefixStore(f"attempt_{env.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
