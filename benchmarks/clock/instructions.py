"""Classes of instructions, what they compute and move, and for how long they hold their pipe.

Rates are results per cycle and multiprocessor (CUDA C++ Programming Guide, "Arithmetic
Instructions": table of throughput per compute capability). Here they are the cycles for which an
instruction of 32 lanes holds the pipe of one of the four schedulers. Tensor cores: dense 16-bit
FLOPs per cycle and multiprocessor, from the data sheets' peaks divided by processors and boost
clock.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from clock.disassembly import Instruction

TENSOR_RATE = {80: 2048, 90: 4096, 100: 8192}  # FLOPs per cycle of a multiprocessor
SCHEDULERS, SHARED_RATE = 4, 128  # of a multiprocessor; bytes per cycle of its shared memory

_CLASSES = {
    "tensor": "HGMMA QGMMA IGMMA HMMA IMMA QMMA OMMA DMMA UTCHMMA UTCQMMA UTCIMMA UTCOMMA",
    "special": "MUFU",
    "fp32": "FFMA FMUL FADD FFMA2 FMUL2 FADD2 FFMA32I FMUL32I",
    "fp64": "DFMA DMUL DADD DSETP",
    "imad": "IMAD",
    "convert": "F2F F2FP F2I I2F I2FP FRND HADD2 HMUL2 HFMA2 HMNMX2",
    "shared": "LDS LDSM STS STSM ATOMS MOVM",
    "copy": "LDGSTS UTMALDG UTMASTG UBLKCP",
    "global": "LDG STG LD ST ATOMG ATOM RED LDC LDCU ULDC",
    "spill": "LDL STL",
    "shuffle": "SHFL REDUX",
    "tensor memory": "LDTM STTM UTCBAR UTCATOMSWS UTCCP",
    "wait": "BAR SYNCS WARPGROUP DEPBAR LDGDEPBAR LDTDEPBAR WARPSYNC NANOSLEEP ERRBAR FENCE MEMBAR "
    "ELECT CCTL BSSY BSYNC UTMACMDFLUSH ARRIVES WARPGROUPSET DEPBAR_ALL",
    "branch": "BRA EXIT CALL RET BREAK BRX JMP NOP",
}
_CLASS = {opcode: name for name, opcodes in _CLASSES.items() for opcode in opcodes.split()}

# (pipe, cycles of a scheduler's pipe); an opcode in no class is "integer" or, if uniform,
# "uniform".
_PIPES = {
    "special": ("special", 8),  # 16 results per cycle
    "fp32": ("fma", 1),  # 128, A100: 64
    "imad": ("fma", 2),  # 64
    "integer": ("alu", 2),  # 64
    "convert": ("alu", 2),  # 64
    "uniform": ("uniform", 2),
}
_MATRIX = re.compile(r"(\d+)x(\d+)x(\d+)")
_HMMA = re.compile(r"HMMA\.168(16|8)\.")  # 16 rows, 8 columns, and a depth


@dataclass(frozen=True)
class Product:
    """A matrix product of one instruction.

    Attributes:
        shape: rows, columns and depth.
        warps: the number that issue it together (`None`: one thread for its whole program).
        slower: the time of a FLOP relative to 16-bit operands: 2 for TF32.
        reads: bytes of shared memory.
    """

    shape: tuple[int, int, int]
    warps: int | None
    slower: int
    reads: int

    @property
    def flops(self) -> int:
        """Two for each multiply and add."""
        return 2 * prod(self.shape)


def class_of(i: Instruction) -> str:
    """The class of an instruction."""
    if i.base in ("MOV", "CS2R", "S2R") or i.opcode.startswith("IMAD.MOV"):
        return "move"
    uniform = i.base.startswith("U") or i.base in ("R2UR", "S2UR")
    return _CLASS.get(i.base, "uniform" if uniform else "integer")


def pipe_of(i: Instruction, arch: int) -> tuple[str, int]:
    """(pipe, cycles for which it is held); ("", 0) if it holds only the scheduler."""
    pipe, cycles = _PIPES.get(kind := class_of(i), ("", 0))
    two_results = i.base in ("FFMA2", "FMUL2", "FADD2")
    return pipe, 2 if two_results or (kind == "fp32" and arch == 80) else cycles


def product_of(i: Instruction, before: Sequence[Instruction]) -> Product:
    """The product of a tensor-core instruction; `before` are the instructions before it, in order.

    Raises ValueError if the clock does not know the instruction.
    """
    if i.base == "HGMMA" and (sizes := _MATRIX.search(i.opcode)):
        m, n, k = map(int, sizes.groups())
        size = 4 if k == 8 else 2
        rows = 0 if re.match(r"R\d+, R\d+", i.operands) else m  # A comes from registers
        return Product((m, n, k), 4, size // 2, (rows + n) * k * size)
    if depth := _HMMA.match(i.opcode):
        return Product((16, 8, int(depth[1])), 1, 2 if "TF32" in i.opcode else 1, 0)
    if i.base == "UTCHMMA":
        return _fifth_generation(i, before)
    raise ValueError(f"the clock does not know the tensor-core instruction {i.opcode}")


def _fifth_generation(i: Instruction, before: Sequence[Instruction]) -> Product:
    """The product of tcgen05.mma, from its instruction descriptor.

    It has the kind of A from bit 7, columns / 8 from bit 17, and rows / 16 from bit 24 (PTX ISA,
    tcgen05, "Instruction descriptor").
    """
    descriptor = _constant(re.search(r"idesc\[(UR\d+)\]", i.operands), before)
    if descriptor is None:
        raise ValueError(f"{i.opcode} at {i.address:#x}: no constant gives the size of its product")
    m, n = (descriptor >> 24 & 31) * 16, (descriptor >> 17 & 63) * 8
    size = 4 if descriptor >> 7 & 7 == 2 else 2
    depth = 32 // size
    rows = 0 if i.operands.startswith("tmem") else m
    return Product((m, n, depth), None, size // 2, (rows + n) * depth * size)


def expected(i: Instruction, before: Sequence[Instruction]) -> int:
    """Bytes of TMA that an mbarrier is told to expect, for the whole program.

    0 for anything else, and if no constant gives the number.
    """
    if not i.opcode.startswith("SYNCS.ARRIVE.TRANS64"):
        return 0
    return _constant(re.search(r"\], (U?R\d+)$", i.operands), before) or 0


def _constant(register: re.Match[str] | None, before: Sequence[Instruction]) -> int | None:
    """The value of a register, traced back through moves."""
    name = register[1] if register else ""
    for earlier in reversed(before):
        to, _, source = earlier.operands.partition(", ")
        if to == name:
            source = source.removeprefix("RZ, RZ, ")  # of IMAD.MOV
            if earlier.base not in ("UMOV", "MOV") and not earlier.opcode.startswith("IMAD.MOV"):
                return None
            if source.startswith("0x"):
                return int(source, 16)
            name = source
    return None


def shared_cycles(i: Instruction) -> float:
    """The least cycles of the multiprocessor's shared memory for one warp's instruction.

    These are without bank conflicts, and operands of tensor cores are added to them. Shuffles also
    pass through it.
    """
    if i.predicate == "@!PT":  # Triton's fences on Blackwell: loads that never happen
        return 0
    if i.base == "SHFL":
        return 1
    if i.base in ("LDSM", "STSM"):
        return 4 if ".4" in i.opcode else 2 if ".2" in i.opcode else 1
    if i.base in ("LDS", "STS"):
        return 4 if ".128" in i.opcode else 2 if ".64" in i.opcode else 1
    if i.base == "LDGSTS":
        return copied(i) / SHARED_RATE
    return 0


def copied(i: Instruction) -> int:
    """Bytes that a warp's instruction itself loads from global memory, or copies from it to shared
    memory, without TMA's."""
    if i.base not in ("LDGSTS", "LDG"):
        return 0
    return 32 * (16 if ".128" in i.opcode else 8 if ".64" in i.opcode else 4)
