"""Options of process groups on NCCL: how much of a GPU a collective may occupy."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


def group_options(
    device_type: str, ctas: int, timeout: timedelta | None = None, *, urgent: bool = False
) -> Any:
    """`nccl_options` of a new process group; None where `device_type` does not use NCCL."""
    if f"{device_type}:nccl" not in dist.get_backend_config():
        return None
    return nccl_options(ctas, timeout, urgent=urgent)


def nccl_options(ctas: int, timeout: timedelta | None = None, *, urgent: bool = False) -> Any:
    """torch's options of a process group on NCCL: an operation runs as at most `ctas` thread
    blocks, which occupy as many of a GPU's processors until it ends, and `urgent` ones start
    first."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
    options.config.max_ctas = ctas
    if timeout is not None:
        options._timeout = timeout
    return options
