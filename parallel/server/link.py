"""Communication of servers and workers: headers through a store, tensors between two ranks.

    worker                         store                         server
    header, a line of JSON   ->    queue "server/0"        ->
                             <-    queue "visitor/3"       <-    header
    flat tensor              ----  process group of the two ----

Each pair of a worker and a server has a separate process group. A worker that dies or hangs breaks
only its own connections, and a worker may join at any time. The groups use gloo, over tensors in
host memory. This does not depend on the worker's device, because servers compute on the host. On
one machine the groups listen on loopback only.
"""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

_PAUSE = 0.0002, 0.005  # seconds between looks into a queue: the first and the longest
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = ("lo", "lo0")


def check_loopback(host: str) -> None:
    """Reject anything that would listen on the network although all ranks are on one machine.

    If the store is on loopback, the ranks are on one machine, and their tensors must also use
    loopback.

    Raises:
        ValueError: `host` is a network address of this machine, or the environment names an
            interface other than loopback for gloo.
    """
    interface = os.environ.get(_INTERFACE)
    if host in ("localhost", "::1") or host.startswith("127."):
        if interface not in (None, *_LOOPBACK):
            raise ValueError(
                f"{_INTERFACE}={interface} would open sockets on the network, but the store on "
                f"{host} is only for ranks on this machine; set {_INTERFACE}=lo"
            )
        return
    try:
        ours = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        ours = set()
    if host in ("0.0.0.0", "::", "", socket.gethostname(), *ours):
        raise ValueError(
            f"the store on {host or 'every address'} is open to the network; all ranks are on one "
            "machine, so use 127.0.0.1"
        )


class Mailbox:
    """A queue of JSON headers in the ranks' store, with many writers and one reader.

    Args:
        store: the ranks' store.
        name: the name of the queue.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, name

    def put(self, **header: Any) -> None:
        """Append a header."""
        self._store.queue_push(self._name, json.dumps(header))

    def take(self, timeout: float) -> dict[str, Any] | None:
        """Remove the first header and return it; None if none arrives within `timeout` seconds."""
        deadline, (pause, longest) = time.monotonic() + timeout, _PAUSE
        while not self._store.queue_len(self._name):
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return json.loads(self._store.queue_pop(self._name))


class Pair:
    """A process group of two ranks, which sends flat tensors in both directions.

    Args:
        store: the ranks' store.
        name: the pair's name, the same on both sides.
        side: 0 on one side and 1 on the other.
        timeout: seconds that connecting, and each message, may take.

    Raises:
        RuntimeError: the other side did not connect. Messages also raise it if the other side died
            or is late.
    """

    def __init__(self, store: dist.Store, name: str, side: int, timeout: float) -> None:
        wait = timedelta(seconds=timeout)
        # Any: the stubs of the gloo backend lack the methods of its base class.
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), side, 2, wait)
        self._peer = 1 - side

    def send(self, x: Tensor) -> dist.Work:
        """Start to send a contiguous tensor. Don't change it until the work is done."""
        return self._group.send([x], self._peer, 0)

    def receive(self, x: Tensor) -> None:
        """Wait until `x` holds the other side's next tensor, which has the same shape and dtype."""
        self._group.recv([x], self._peer, 0).wait()
