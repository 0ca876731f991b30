"""What GPUs offer, in figures, and how many programs of a kernel that leaves room for.

`PARTS` holds the limits of each architecture (CUDA C++ Programming Guide, "Technical specifications
per compute capability"); for the three that are aimed at `kernels.devices` has the peaks.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpweave.kernels.devices import find_device

KB = 1024


@dataclass(frozen=True)
class Part:
    """What one GPU offers.

    Attributes:
        device: the product whose figures these are.
        arch: compute capability as major * 10 + minor.
        processors: its multiprocessors.
        block_shared: bytes of shared memory that one program may use.
        shared, warps, blocks, registers: of one multiprocessor.
        product: the instruction that reaches `flops` (PTX ISA); all parts have mma.sync as well.
    """

    device: str
    arch: int
    processors: int
    block_shared: int
    shared: int
    warps: int
    blocks: int
    product: str = "mma.sync"
    registers: int = 64 * KB

    @property
    def flops(self) -> float:
        """Stated peak per second in bfloat16; 0 where none is quoted."""
        known = find_device(self.device)
        return 0.0 if known is None else known.half

    @property
    def bandwidth(self) -> float:
        """Stated bytes per second of its memory; 0 where none is quoted."""
        known = find_device(self.device)
        return 0.0 if known is None else known.memory


PARTS = {
    "sm_80": Part("A100", 80, 108, 163 * KB, 164 * KB, 64, 32),
    "sm_86": Part("A40", 86, 84, 99 * KB, 100 * KB, 48, 16),
    "sm_89": Part("L40S", 89, 142, 99 * KB, 100 * KB, 48, 24),
    "sm_90": Part("H100", 90, 132, 227 * KB, 228 * KB, 64, 32, "wgmma"),
    "sm_100": Part("B200", 100, 148, 227 * KB, 228 * KB, 64, 32, "tcgen05"),
    "sm_120": Part("RTX PRO 6000 Blackwell", 120, 188, 99 * KB, 100 * KB, 48, 24),
}


def occupancy(part: Part, *, warps: int, registers: int, shared: int) -> int:
    """How many programs of `warps` warps one multiprocessor holds; 0 if not even one fits.

    The least of what warps, program slots, registers and shared memory allow. Registers go to warps
    in units of 256, and warps to one of four schedulers; each program's shared memory is rounded to
    128 bytes after the kilobyte that the system takes (CUDA occupancy calculator; Programming
    Guide, "Multiprocessor level").
    """
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = part.registers // max(per_warp, 256) // 4 * 4 // warps
    by_shared = part.shared // (-(-(shared + KB) // 128) * 128)
    if shared > part.block_shared or registers > 255:
        return 0
    return min(part.warps // warps, part.blocks, by_registers, by_shared)
