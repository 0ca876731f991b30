"""Saving while training goes on: snapshot and persist, as CheckFreq (Mohan et al. 2021, FAST '21)
calls the two halves.

    rank 0  steps    | step 7 | snapshot | step 8 | step 9 | step 10 | step 11 |
            thread                       | write, hash, flush | reports | publish step_00000007
    rank 1  steps    | step 7 | snapshot | step 8 | step 9 | step 10 | step 11 |
            thread                       | write, hash, flush ... | reports |

The snapshot is a copy, to host memory, of what this rank writes; a thread does the rest, which is
`save_checkpoint`. Ranks meet in it on a group that no step uses, so that a step's collectives and a
save's have no order between them to keep.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from warpweave.checkpoint.save import save_checkpoint


class BackgroundSaver:
    """`save_checkpoint` in a thread, of one step at a time.

    The snapshot's memory is used again by the next save. A GPU's tensors are copied into pinned
    memory, in the order of the current stream: neither the host nor what it queues before waits,
    and what is queued afterwards may overwrite them.

    As a context it waits at the end for what is in flight, also if the block failed; a Ctrl-C does
    not wait.

    Args:
        group: the ranks that save; None for one. Collective over the default group: they get a gloo
            group of their own for it.
        timeout: seconds that a rank waits for the others, when it has written its files.

    Attributes:
        path: the newest step that is saved whole, as far as `wait` has seen; None without one.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, timeout: float = 300.0) -> None:
        self.path: Path | None = None
        self._group: dist.ProcessGroup | None = None
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
            self._group = dist.new_group(ranks, timedelta(seconds=timeout), backend="gloo")
        self._host: dict[str, torch.Tensor] = {}
        self._thread: threading.Thread | None = None
        self._result: Path | BaseException | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is in flight on this rank."""
        return self._thread is not None and self._result is None

    @property
    def failed(self) -> bool:
        """Whether the save in flight has failed on this rank: `wait` raises its error."""
        return isinstance(self._result, BaseException)

    def save(
        self,
        folder: str | Path,
        step: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        **options: Any,
    ) -> None:
        """Begin to save a step, after the one before; arguments as of `save_checkpoint`, but that
        `tensors` may be of any device and are free again on return.

        Every rank calls it. Raises what `wait` does.
        """
        self.wait()
        snapshot = [(name, self._copy(name, tensor)) for name, tensor in tensors]
        copied = None
        if any(tensor.is_pinned() for _, tensor in snapshot):
            copied = torch.cuda.Event(blocking=True)
            copied.record()

        def write() -> None:
            try:
                if copied is not None:
                    copied.synchronize()
                self._result = save_checkpoint(folder, step, snapshot, group=self._group, **options)
            except BaseException as error:
                self._result = error

        self._thread = threading.Thread(target=write, name=f"save step {step}", daemon=True)
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait for the save in flight, if there is one; `path`.

        Raises:
            CheckpointError: it failed; the same on every rank.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        result, self._result = self._result, None
        if isinstance(result, BaseException):
            raise result
        self.path = result or self.path
        return self.path

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, Exception):
            with suppress(Exception):  # that of the block is the one to raise
                self.wait()

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._host.get(name)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            self._host[name] = torch.empty(
                tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda
            )
        return self._host[name].copy_(tensor, non_blocking=True)
