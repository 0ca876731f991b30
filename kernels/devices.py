"""Data-sheet figures of the GPUs that the project targets; the only place for these figures.

The limits of a multiprocessor follow from the compute capability (CUDA C++ Programming Guide,
"Technical specifications per compute capability"). Speeds are from NVIDIA's data sheets for A100
80GB SXM, H100 SXM, H200, HGX H800, HGX B200, A40 and L40S: dense FLOP/s, and half of the stated
bidirectional NVLink bytes/s. InfiniBand speeds are those of the DGX systems, one adapter per GPU:
HDR 200 Gbit/s for A100, NDR 400 Gbit/s for later ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

KB = 1024
# NCCL's thread blocks for the operations of one axis. A product that runs at the same time and
# waits for peers leaves this many multiprocessors free. This is a guess, not a data-sheet figure:
# NCCL itself uses up to 32 within a node, and needs 8 with NVLS.
CTAS = 16


@dataclass(frozen=True)
class Device:
    """Data-sheet figures of a GPU; speeds are per second, and 0 where none is quoted.

    Attributes:
        name: a word of the device name that CUDA reports.
        arch: compute capability as major * 10 + minor.
        processors: number of multiprocessors.
        block_shared: bytes of shared memory that one program may use.
        shared, warps, blocks: limits of one multiprocessor: bytes of shared memory, and the warps
            and programs that it holds at once.
        product: the instruction that reaches `half` (PTX ISA); all devices also have mma.sync.
        half: 16-bit FLOP/s.
        memory: bytes/s of memory.
        nvlink, network: bytes/s in one direction over NVLink and over the GPU's share of the
            network.
    """

    name: str
    arch: int
    processors: int
    block_shared: int
    shared: int
    warps: int
    blocks: int
    product: str = "mma.sync"
    half: float = 0.0
    memory: float = 0.0
    nvlink: float = 0.0
    network: float = 0.0


A100 = Device(
    "A100", 80, 108, 163 * KB, 164 * KB, 64, 32,
    half=312e12, memory=2.039e12, nvlink=300e9, network=25e9,
)  # fmt: skip
A40 = Device("A40", 86, 84, 99 * KB, 100 * KB, 48, 16, half=149.7e12, memory=696e9)
L40S = Device("L40S", 89, 142, 99 * KB, 100 * KB, 48, 24, half=362e12, memory=864e9)
H100 = Device(
    "H100", 90, 132, 227 * KB, 228 * KB, 64, 32, "wgmma",
    half=989e12, memory=3.35e12, nvlink=450e9, network=50e9,
)  # fmt: skip
H200 = replace(H100, name="H200", memory=4.8e12)
H800 = replace(H100, name="H800", nvlink=200e9)
B200 = Device(
    "B200", 100, 148, 227 * KB, 228 * KB, 64, 32, "tcgen05",
    half=2.25e15, memory=8.0e12, nvlink=900e9, network=50e9,
)  # fmt: skip
RTX_PRO_6000 = Device("RTX PRO 6000 Blackwell", 120, 188, 99 * KB, 100 * KB, 48, 24)

DEVICES = (A100, A40, L40S, H100, H200, H800, B200, RTX_PRO_6000)
TARGETS = {f"sm_{d.arch}": d for d in (A100, A40, L40S, H100, B200, RTX_PRO_6000)}
"""Compile targets for kernels, each with one device; the device need not be present."""


def find_device(name: str) -> Device | None:
    """The device whose name is a word of `name`, as reported by CUDA; None if there is none."""
    return next((d for d in DEVICES if re.search(rf"\b{d.name}\b", name)), None)
