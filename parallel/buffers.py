"""Reusable message buffers.

NCCL's point-to-point operations mark their tensors as used by another stream (record_stream). Once
freed, that memory cannot be reused until the device has reached the same point, and the host may be
many micro-batches ahead of it. Each message would then need new memory. Instead, the owner of a
buffer gives it back after it has waited for the message, and takes it again for a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `mesh` imports this file, and needs no torch if it only counts ranks
    import torch
    from torch import Tensor


class Buffers:
    """The free buffers of one rank, by shape, dtype, device and stream.

    Examples:
        >>> from warpweave.parallel.context import context_attention
        >>> from warpweave.parallel.layout import SequenceLayout
        >>> q, k, v = (torch.randn(2, 16, 4, 8) for _ in range(3))
        >>> layout, buffers = SequenceLayout(16, 1), Buffers()  # one for all layers
        >>> o = context_attention(q, k, v, layout=layout, group=None, buffers=buffers)
    """

    def __init__(self) -> None:
        self._free: dict[Any, list[Tensor]] = defaultdict(list)

    def take(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a free buffer. It still holds its previous contents."""
        import torch

        free = self._free[_key(torch.Size(shape), dtype, device)]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def give_back(self, *buffers: Tensor) -> None:
        """Return buffers for reuse by the next `take` on the current stream. Call this after that
        stream has waited for their messages; nothing queued later may read them."""
        for buffer in buffers:
            self._free[_key(buffer.shape, buffer.dtype, buffer.device)].append(buffer)


def _key(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Any:
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return shape, dtype, device, stream
