"""Instructions of a cubin, with their stall counts, as printed by Triton's own nvdisasm.

An instruction is two lines: its address, its text and the low 64 bits of its encoding, then the
high 64 bits. From Volta to Blackwell, 4 bits of these, from bit 41 up, are the stall: the cycles
until this warp's next instruction may be issued (Jia et al., "Dissecting the NVIDIA Volta GPU
Architecture via Microbenchmarking", 2018, section 2.1, has the layout).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from warpweave.machine.tune.aot import run_tool

_SECTION = re.compile(r"^\s*\.section\s+(\.\S+?),", re.MULTILINE)
_LABEL = re.compile(r"^(\.L\w+):")
_CODE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/"
)
_HIGH = re.compile(r"^\s*/\* (0x[0-9a-f]{16}) \*/")
_TARGET = re.compile(r"`\((\.L\w+)\)")
_ARCH = re.compile(r"EF_CUDA_SM(\d+)|^\s*\.target\s+sm_(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        address: in its function, in bytes.
        opcode: with its modifiers, "HMMA.16816.F32.BF16".
        operands: as text.
        predicate: the predicate under which it is executed, "" if always.
        stall: cycles until its warp's next instruction.
        target: the address that it may branch to.
    """

    address: int
    opcode: str
    operands: str
    predicate: str
    stall: int
    target: int | None = None

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


def disassemble(cubin: bytes, arch: int) -> list[list[Instruction]]:
    """The instructions of each function of a cubin for capability `arch` (90).

    Raises ValueError if it is not a cubin, is for a different part or has no code, or if the text
    does not have the form in the module's docstring.
    """
    code_only, no_data_flow = "-c", "-ndf"
    return parse(run_tool("nvdisasm", code_only, no_data_flow, "-hex", cubin=cubin), arch)


def parse(text: str, arch: int) -> list[list[Instruction]]:
    """`disassemble` for the text that nvdisasm printed."""
    if (found := _ARCH.search(text)) is None:
        raise ValueError("nvdisasm's text has an unexpected form: it names no part")
    if int(found[1] or found[2]) != arch:
        raise ValueError(f"the cubin is for sm_{found[1] or found[2]}, not sm_{arch}")
    _, *parts = _SECTION.split(text)  # name, lines, name, lines ...
    code = (lines for name, lines in zip(parts[::2], parts[1::2]) if name.startswith(".text."))
    functions = [_function(lines.splitlines()) for lines in code]
    if not any(functions):
        raise ValueError("the cubin has no code")
    return [function for function in functions if function]


def _function(lines: list[str]) -> list[Instruction]:
    """The instructions of one section."""
    codes: list[tuple[re.Match[str], int]] = []
    labels: dict[str, int] = {}
    pending: list[str] = []
    first: re.Match[str] | None = None  # of an instruction's two lines
    for line in lines:
        if label := _LABEL.match(line):
            pending.append(label[1])
        elif first is not None:
            if (high := _HIGH.match(line)) is None:
                raise _other_form(line)
            codes.append((first, int(high[1], 16)))
            first = None
        elif first := _CODE.match(line):
            labels |= dict.fromkeys(pending, int(first[1], 16))
            pending = []
        elif line.lstrip().startswith("/*"):
            raise _other_form(line)
    if first is not None:
        raise _other_form("the end")
    return [_instruction(code, high, labels) for code, high in codes]


def _other_form(line: str) -> ValueError:
    return ValueError(
        "nvdisasm's text has an unexpected form, expected an address, an instruction and two "
        f"words, got {' '.join(line.split())[:60]!r}"
    )


def _instruction(code: re.Match[str], high: int, labels: dict[str, int]) -> Instruction:
    opcode, _, operands = code[3].partition(" ")
    target = _TARGET.search(operands)
    if target and target[1] not in labels:
        raise ValueError(
            f"nvdisasm's text has an unexpected form: {opcode} goes to {target[1]}, "
            "which is not defined"
        )
    return Instruction(
        address=int(code[1], 16),
        opcode=opcode,
        operands=operands.strip(),
        predicate=code[2] or "",
        stall=high >> 41 & 15,
        target=labels[target[1]] if target else None,
    )
