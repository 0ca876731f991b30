"""Reusable message buffers.

A point-to-point operation of NCCL marks its tensors as used by another stream (record_stream).
Their memory, once freed, is nobody's until the device has come that far, and the host may be many
micro-batches ahead of it: each message would hold memory of its own. So messages lie in buffers
that their owner gives back instead, when it has waited for them, to take them again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `mesh` imports this file, and does without torch where it only counts ranks
    import torch
    from torch import Tensor


class Buffers:
    """The buffers of one rank that no message is in, by shape, dtype, device and stream."""

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer, whose contents are what was in it last."""
        import torch

        free = self._free[_key(torch.Size(shape), dtype, device)]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def give_back(self, *buffers: Tensor) -> None:
        """Let the next `take` on the current stream have them: their messages have been waited
        for on it, and nothing that is queued later reads them."""
        for buffer in buffers:
            self._free[_key(buffer.shape, buffer.dtype, buffer.device)].append(buffer)


def _key(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return shape, dtype, device, stream
