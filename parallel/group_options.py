"""Options of process groups on NCCL: how much of a GPU a collective may occupy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def group_options(
    device_type: str, ctas: int, timeout: timedelta | None = None, *, urgent: bool = False
) -> Any:
    """`nccl_options` for a new process group; None if `device_type` does not use NCCL."""
    if f"{device_type}:nccl" not in dist.get_backend_config():
        return None
    return nccl_options(ctas, timeout, urgent=urgent)


def nccl_options(ctas: int, timeout: timedelta | None = None, *, urgent: bool = False) -> Any:
    """torch's options for a process group on NCCL.

    An operation runs as at most `ctas` thread blocks, each of which occupies one of the GPU's
    processors until it ends. `urgent` operations start first.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options.config.max_ctas = ctas
    if timeout is not None:
        options._timeout = timeout
    return options
