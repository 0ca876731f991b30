"""Non-blocking host-to-device copies."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Copy `x` to `device`; from CPU to GPU through pinned memory, after the work queued there.

    ``x.to(device)`` with ordinary memory waits until the GPU has finished all its previous work.
    """
    if device.type == "cpu" or not x.is_cpu:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
