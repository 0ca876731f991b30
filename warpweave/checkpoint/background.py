"""Save while training continues: snapshot and persist, as CheckFreq (Mohan et al. 2021, FAST '21)
calls the two halves.

    rank 0  steps    | step 7 | snapshot | step 8 | step 9 | step 10 | step 11 |
            thread                       | write, hash, flush | reports | publish step_00000007
    rank 1  steps    | step 7 | snapshot | step 8 | step 9 | step 10 | step 11 |
            thread                       | write, hash, flush ... | reports |

The snapshot copies to host memory what this rank writes. A thread then runs `save_checkpoint`. Its
ranks communicate on a group that no step uses, so the order of a step's and a save's collectives
does not matter.
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
    """`save_checkpoint` in a thread, one step at a time.

    Each save reuses the snapshot memory of the previous one. Tensors on a GPU are copied into
    pinned memory, in the order of the current stream: neither the host nor previously queued work
    waits, and work that is queued afterwards may overwrite the tensors.

    Used as a context manager, it waits at the end for a save in flight, even if the block failed,
    but not after Ctrl-C.

    Args:
        group: the ranks that save; None for a single one. Collective over the default group: a
            separate gloo group is created for the saves.
        timeout: seconds that a rank waits for the others after writing its files.

    Attributes:
        path: the newest completely saved step that `wait` has returned; None without one.

    Examples:
        >>> with BackgroundSaver(None) as saver:
        ...     saver.save("background", 1, [("weight", torch.ones(4))], config={}, state={})
        ...     saver.wait().name
        'step_00000001'
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
        """True if a save is in flight on this rank."""
        return self._thread is not None and self._result is None

    @property
    def failed(self) -> bool:
        """True if the save in flight has failed on this rank: `wait` will raise its error."""
        return isinstance(self._result, BaseException)

    def save(
        self,
        folder: str | Path,
        step: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        **options: Any,
    ) -> None:
        """Start to save a step, after the previous save is complete.

        Arguments are those of `save_checkpoint`, but `tensors` may be on any device, and you may
        overwrite them when this returns. Every rank calls it. Raises what `wait` raises.
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
        """Wait for the save in flight, if there is one; return `path`.

        Raises:
            CheckpointError: the save failed; the same on every rank.
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
            with suppress(Exception):  # raise the block's error instead
                self.wait()

    def _copy(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        held = self._host.get(name)
        if held is None or (held.shape, held.dtype) != (tensor.shape, tensor.dtype):
            held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host[name] = held
        return held.copy_(tensor, non_blocking=True)
