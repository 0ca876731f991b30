"""Supervise the processes of a run, and keep their store.

Launches, elastic runs, and parameter servers differ only in what they do when a process has ended.
The first signal (`interrupt`) is passed on to all processes, once, as SIGTERM; they finish their
step and save. A second one kills them. If this process dies, even by SIGKILL, they end at once
(`processes`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from warpweave.cli.messages import one_line, say
from warpweave.launch.interrupt import AT_ONCE, Interrupt, Stopped
from warpweave.launch.processes import Processes

REFUSED = 2  # exit code of a process that refuses its options
_INTERVAL = 0.05  # seconds between two calls of `watch` while no process ends


def supervise(
    processes: Processes, start: Callable[[], None], watch: Callable[[int | None], int | None]
) -> None:
    """Call `start`, then `watch` until it returns an exit code. No process outlives this call.

    `start` starts the first of `processes`. `watch` handles what has happened since its last call,
    and returns None to continue. It is called at regular intervals, and at once after a process has
    ended, with the number of the first signal or None. Must be called from the main thread.

    Raises:
        SystemExit: the exit code is not 0, or a process could not be started (1).
        Stopped: a signal stopped the run; with the exit code if it is not 0.
    """
    stop: int | None = None
    code: int | None = None
    with Interrupt() as interrupt, processes:
        try:
            start()
            while code is None:
                processes.wait(_INTERVAL)
                if stop is None and interrupt.number is not None:
                    stop = interrupt.number
                    for process in processes.started:
                        process.terminate()
                code = watch(stop)
        except KeyboardInterrupt:
            say(AT_ONCE)
        except ChildProcessError as error:
            say(one_line(error))
            code = 1
    if interrupt.number is not None:
        raise Stopped(interrupt.number, code or 0)
    if code:
        raise SystemExit(code)


def keep_store() -> dist.TCPStore:
    """Open a store in this process for ranks of this machine, on a free loopback port.

    It outlives any rank, so survivors can find out which rank is missing."""
    listener = loopback_listener(0)
    port, fd = listener.getsockname()[1], listener.detach()
    keep = {"is_master": True, "wait_for_workers": False, "master_listen_fd": fd}
    return dist.TCPStore("127.0.0.1", port, **keep)


def kept_store(port: int, timeout: float = 30.0) -> dist.TCPStore:
    """Connect to the store that `keep_store` has opened on `port`; `timeout` is in seconds."""
    wait = timedelta(seconds=timeout)
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)


def loopback_listener(port: int) -> socket.socket:
    """Open a socket that listens on 127.0.0.1 only; port 0 selects a free port."""
    try:
        return socket.create_server(("127.0.0.1", port), backlog=128)
    except OSError as error:
        why = f"the ranks' store cannot listen on 127.0.0.1:{port}: {os.strerror(error.errno)}"
        raise OSError(error.errno, why) from None
