"""What the data sheets say of the GPUs that the project aims at: the one place for these figures.

NVIDIA's data sheets of A100 80GB SXM, H100 SXM, H200, HGX H800 and HGX B200 (dense FLOP/s; NVLink
as half of the stated two-way bytes/s); InfiniBand of their DGX systems, one adapter per GPU: HDR
200 Gbit/s for A100, NDR 400 Gbit/s later.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """A GPU's figures, per second: FLOPs in 16 bits and in float32, bytes of memory, and in one
    direction over NVLink and over its share of the network."""

    name: str
    processors: int
    half: float
    single: float
    memory: float
    nvlink: float
    network: float


DEVICES = (
    Device("A100", 108, 312e12, 19.5e12, 2.039e12, 300e9, 25e9),
    Device("H100", 132, 989e12, 67e12, 3.35e12, 450e9, 50e9),
    Device("H200", 132, 989e12, 67e12, 4.8e12, 450e9, 50e9),
    Device("H800", 132, 989e12, 67e12, 3.35e12, 200e9, 50e9),
    Device("B200", 148, 2.25e15, 80e12, 8.0e12, 900e9, 50e9),
)


def find_device(name: str) -> Device | None:
    """The device whose name is part of `name`, as CUDA tells it; None if its figures are not
    known."""
    return next((device for device in DEVICES if device.name in name), None)
