"""Close the connections of a generation, so that no wait for a peer outlives it.

gloo: aborting a group leaves its sockets open (torch 2.13). A group is freed only when nothing
refers to it and none of its operations is in flight, and such an operation may wait for a peer that
waits for this rank. So the sockets themselves are shut down, as if every peer had died, and all
operations in flight end with an error. NCCL: ``ncclCommAbort`` of all communicators, as in torch's
``_abort_process_group``. This requires that the watchdog does not handle errors itself
(`NCCL_SETTINGS`), because that would end this process.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from contextlib import suppress

import torch.distributed as dist

# The watchdog records errors and timeouts, and leaves aborting to us.
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


class Connections:
    """The connections that this process opens between `open` and `complete`."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        """Count new connections as the next generation's from now on."""
        self._before, self._ours = _sockets(), set[tuple[int, int]]()

    def complete(self) -> None:
        """End the list of the generation's connections: later ones do not belong to it."""
        self._ours = _sockets() - self._before

    def close(self) -> None:
        """Shut down all of them; any thread may call this."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        ours = self._ours or _sockets() - self._before
        for number, inode in ours:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if os.fstat(end.fileno()).st_ino == inode and not listens:
                    end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Close them and free the groups, in the thread that used them."""
        self.close()
        gc.collect()  # objects built on the groups keep them and their threads alive in cycles
        if dist.is_initialized():
            dist.destroy_process_group()


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of each of this process's sockets."""
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the folder's own descriptor is already closed
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found
