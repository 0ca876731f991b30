"""The dtypes that ops compute in, that of a call, and autocast, which must not choose another."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What ops compute in."""

DTYPES = (*FLOATS, torch.int64, torch.int32)
"""Every dtype that ranks send one another. One byte on the wire: its place in this list, to which
new ones are appended."""


def operand_dtype(
    name: str, x: torch.Tensor, parameters: Mapping[str, torch.Tensor | None]
) -> torch.dtype:
    """The dtype to compute in: autocast's, or the one that x and its parameters have.

    Raises ValueError, in the name of `name`, if there is no such dtype.
    """
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    if any(p is not None and p.dtype != x.dtype for p in parameters.values()):
        found = ", ".join(f"{k} {p.dtype}" for k, p in parameters.items() if p is not None)
        raise ValueError(f"{name}: dtypes differ: x {x.dtype}, {found}")
    return x.dtype


def no_autocast(x: torch.Tensor) -> AbstractContextManager[object]:
    """A context in which autocast leaves what is on x's device alone: inside a Function the dtypes
    are settled."""
    device = x.device.type
    on = not x.is_meta and torch.is_autocast_enabled(device)
    return torch.autocast(device, enabled=False) if on else nullcontext()
