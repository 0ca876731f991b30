"""What servers and workers exchange: headers through a store, tensors between two ranks.

    worker                         store                         server
    header, a line of JSON   ->    queue "server/0"        ->
                             <-    queue "visitor/3"       <-    header
    flat tensor              ----  process group of the two ----

Each pair of a worker and a server has a process group of its own, so that a worker that dies or
hangs breaks its own connections and nobody else's, and one may join at any time. The groups are
gloo's, over tensors in the host's memory, on whatever device a worker computes: a server computes
on the host. On one machine they listen on loopback only.
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

_PAUSE = 0.0002, 0.005  # seconds between looks into a queue, the first and the longest
_INTERFACE = "GLOO_SOCKET_IFNAME"
_LOOPBACK = ("lo", "lo0")


def check_loopback(host: str) -> None:
    """Refuse what would listen on the network for the ranks of one machine; with the store on
    loopback they are of one, and their tensors go over loopback, too.

    Raises:
        ValueError: `host` is this machine under an address of the network, or the environment
            names another interface for gloo.
    """
    interface = os.environ.get(_INTERFACE)
    if host in ("localhost", "::1") or host.startswith("127."):
        if interface not in (None, *_LOOPBACK):
            raise ValueError(
                f"{_INTERFACE}={interface} would open sockets to the network, and the store on "
                f"{host} is for ranks of this machine: use lo"
            )
        return
    try:
        ours = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        ours = set()
    if host in ("0.0.0.0", "::", "", socket.gethostname(), *ours):
        raise ValueError(
            f"the store on {host or 'every address'} is open to the network: ranks of one machine "
            "meet on 127.0.0.1"
        )


class Mailbox:
    """A queue of JSON headers in the ranks' store; anybody puts, one takes.

    Args:
        store: the ranks' store.
        name: of the queue.
    """

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store, name

    def put(self, **header: Any) -> None:
        """Append a header."""
        self._store.queue_push(self._name, json.dumps(header))

    def take(self, timeout: float) -> dict[str, Any] | None:
        """The first header, removed; None if there is none for `timeout` seconds."""
        deadline, (pause, longest) = time.monotonic() + timeout, _PAUSE
        while not self._store.queue_len(self._name):
            if time.monotonic() >= deadline:
                return None
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return json.loads(self._store.queue_pop(self._name))


class Pair:
    """A process group of two ranks, over which flat tensors go both ways.

    Args:
        store: the ranks' store.
        name: of the pair, the same on both sides.
        side: 0 or 1, another one on each side.
        timeout: seconds that connecting, and each message, may take.

    Raises:
        RuntimeError: the other side did not come; from the messages, too: it died, or is late.
    """

    def __init__(self, store: dist.Store, name: str, side: int, timeout: float) -> None:
        wait = timedelta(seconds=timeout)
        # Typed as what it is a backend of, whose methods its own stubs leave out.
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(name, store), side, 2, wait)
        self._peer = 1 - side

    def send(self, x: Tensor) -> dist.Work:
        """Start to send a contiguous tensor, which must stay as it is until the work is done."""
        return self._group.send([x], self._peer, 0)

    def receive(self, x: Tensor) -> None:
        """Wait until `x` holds the next tensor of the other side, of the same shape and dtype."""
        self._group.recv([x], self._peer, 0).wait()
