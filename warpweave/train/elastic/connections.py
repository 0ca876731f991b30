"""Closing the connections of a generation, so that no wait for a peer outlives it.

gloo: ``abort`` of its groups leaves sockets open (torch 2.13), and a group is freed only when
nothing refers to it and none of its operations is in flight, which may wait for a peer that waits
for this rank. So the sockets themselves are shut down, as if every peer had died: all operations in
flight end with an error. NCCL: ``ncclCommAbort`` of all communicators, as torch's
``_abort_process_group`` has it; it asks for a watchdog that does not handle errors itself
(`NCCL_SETTINGS`), which would end this process.
"""

from __future__ import annotations

import gc
import os
import socket
import stat
from contextlib import suppress

import torch.distributed as dist

# The watchdog notes errors and time-outs, and leaves it to us to abort.
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}


class Connections:
    """The connections that this process opens from `open` on, until `complete`."""

    def __init__(self) -> None:
        self._before, self._ours = _sockets(), set[tuple[int, int]]()

    def open(self) -> None:
        """From now on connections belong to the next generation."""
        self._before, self._ours = _sockets(), set[tuple[int, int]]()

    def complete(self) -> None:
        """The generation's connections are made: what is opened later is no rank's."""
        self._ours = _sockets() - self._before

    def close(self) -> None:
        """Shut all of them down; by any thread."""
        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        ours = self._ours or _sockets() - self._before
        for number, inode in ours:
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
                if os.fstat(end.fileno()).st_ino == inode and not _listens(end):
                    end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Close them and free the groups, in the thread that has used them."""
        self.close()
        gc.collect()  # what was built on the groups holds them, and their threads, in cycles
        if dist.is_initialized():
            dist.destroy_process_group()


def _listens(end: socket.socket) -> bool:
    return bool(end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> set[tuple[int, int]]:
    """(descriptor, inode) of this process's sockets."""
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):  # the folder's own descriptor is closed again
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found
