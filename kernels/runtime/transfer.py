"""What goes to the device while the host goes on."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`: from the CPU to a GPU by pinned memory, behind what is queued there.

    ``x.to(device)`` of ordinary memory waits until the GPU has done all that it was given before.
    """
    if device.type == "cpu" or not x.is_cpu:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
