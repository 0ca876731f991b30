"""The clock against arithmetic: a product of a known tile has known FLOPs, instructions and bytes.

As a program, this file compiles its kernels and prints the clock's readings: compiling needs a
process without TRITON_INTERPRET.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
import torch
from clock import HotLoop, read_loops, reading
from clock.disassembly import Instruction, disassemble, parse
from clock.instructions import class_of, copied, pipe_of, product_of, shared_cycles
from clock.kernel import read_kernel
from clock.loops import natural_loops

from warpweave.kernels import adamw
from warpweave.kernels.runtime.dispatch import tl, triton
from warpweave.machine.tune.aot import compiling

M, N, K, WARPS = 128, 64, 32, 4
# Data sheets: dense FLOPs per second in bfloat16 over multiprocessors and boost clock.
RATES = {
    "sm_80": 312e12 / 108 / 1.41e9,
    "sm_90": 989.4e12 / 132 / 1.83e9,
    "sm_100": 2.25e15 / 148 / 1.85e9,
}


@triton.jit
def _product_kernel(
    a_ptr, b_ptr, c_ptr, steps,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BUSY: tl.constexpr,
):  # fmt: skip
    """Compute c[M, N] = a[M, steps K] @ b[steps K, N]; BUSY applies a
    nonlinearity to each step's sums."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = a_ptr + m[:, None] * 4096 + k[None, :]
    b = b_ptr + k[:, None] * N + n[None, :]
    c = tl.zeros((M, N), tl.float32)
    for _ in range(steps):
        c = tl.dot(tl.load(a), tl.load(b), c)
        if BUSY:
            c = tl.exp2(c)
        a += K
        b += K * N
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


def main() -> None:
    """Compile, read and print."""
    x, y = (torch.empty(2**20, dtype=t, device="meta") for t in (torch.bfloat16, torch.float32))
    found, cubins, pipeline = {}, {}, {"num_warps": WARPS, "num_stages": 3}
    for name in ("sm_80", "sm_90", "sm_100", "sm_90 busy", "sm_90 without loop"):
        steps = 1 if "without" in name else 64  # Triton treats an argument of 1 as a constant
        with compiling(target := name.split()[0]) as compiled:
            kernel = _product_kernel[(1,)](x, x, y, steps, M, N, K, "busy" in name, **pipeline)
        cubins[name] = kernel.asm["cubin"]
        read = read_kernel(compiled[0], target)
        found[name] = read.unread or [dataclasses.asdict(x) for x in read.loops]
    from triton.tools.tensor_descriptor import TensorDescriptor

    a = TensorDescriptor(x, [M, 4096], [4096, 1], [M, K])
    b = TensorDescriptor(x, [4096, N], [N, 1], [K, N])
    with compiling("sm_90") as compiled:
        _described_kernel[(1,)](a, b, y, 64, M, N, K, **pipeline)
    found["sm_90 by TMA"] = [dataclasses.asdict(x) for x in read_kernel(*compiled, "sm_90").loops]
    hopper = cubins["sm_90"]
    wrong = {"other part": (hopper, 80), "unknown part": (hopper, 70), "no cubin": (b"x", 90),
             "cut off": (hopper[: len(hopper) // 2], 90)}  # fmt: skip
    for name, (cubin, arch) in wrong.items():
        try:
            found[name] = str(read_loops(cubin, arch=arch, warps=WARPS))
        except ValueError as error:
            found[name] = str(error)
    found["adamw"] = _opcodes_of_adamw(y, x)
    print(json.dumps(found))


def _opcodes_of_adamw(flat: torch.Tensor, low: torch.Tensor) -> list[str]:
    """Return the opcodes of the update for float32 states, a gradient and a copy in bfloat16."""
    one, rates = flat[0], {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    with compiling("sm_90") as compiled:
        step = adamw.begin_adamw(one.double(), lr=1e-3, **rates)
        adamw._adamw_triton(flat, low, flat, flat, low, step, one, one, True)
    (cubin,) = (c.asm["cubin"] for c in compiled if c.kernel == "_adamw_kernel")
    return [instruction.base for part in disassemble(cubin, 90) for instruction in part]


@triton.jit
def _described_kernel(
    a_desc, b_desc, c_ptr, steps, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """`_product_kernel` by TMA."""
    c = tl.zeros((M, N), tl.float32)
    for k in range(steps):
        c = tl.dot(a_desc.load([0, k * K]), b_desc.load([k * K, 0]), c)
    m, n = tl.arange(0, M), tl.arange(0, N)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c)


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-P", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def loop_of(found: dict, name: str) -> HotLoop:
    (loop,) = found[name]
    return HotLoop(**loop)


def test_bytes_by_tma_are_those_that_its_barriers_expect(found) -> None:
    plain, described = loop_of(found, "sm_90"), loop_of(found, "sm_90 by TMA")
    assert "T" in described.order
    assert described.classes["copy"] < plain.classes["copy"]
    for what in ("flops", "global_bytes", "shared_bytes"):
        assert getattr(described, what) == getattr(plain, what)


def test_adamw_loads_before_it_stores_without_a_barrier_or_float64(found) -> None:
    """The scalars of a step, which need float64, have a kernel of their own."""
    opcodes = found["adamw"]
    assert not {"BAR", "DADD", "DMUL", "DFMA"} & {*opcodes}
    first_store, last_load = opcodes.index("STG"), len(opcodes) - opcodes[::-1].index("LDG")
    assert last_load <= first_store


@pytest.mark.parametrize("target", RATES)
def test_a_product_of_a_known_tile_has_known_figures(found, target) -> None:
    loop = loop_of(found, target)
    assert loop.flops == 2 * M * N * K / WARPS
    # A warp's share of a multiprocessor is a quarter of it; data sheets round peaks and clocks.
    assert loop.tensor == pytest.approx(loop.flops / (RATES[target] / 4), rel=0.02)
    small = M * N * K / (16 * 8 * 16) / WARPS
    products = {"sm_80": small, "sm_90": M / 64 * K / 16, "sm_100": K / 16}
    assert loop.classes["tensor"] == products[target]
    step = (M + N) * K * 2  # bytes that a program copies per iteration
    assert loop.global_bytes == step / WARPS
    # Each copy is written once; wgmma reads all of B for each 64 rows, tcgen05 for its 128.
    reads = {"sm_90": (M + M // 64 * N) * K * 2, "sm_100": step}
    if target in reads:
        assert loop.shared_bytes == (step + reads[target]) / WARPS
    assert loop.instructions <= loop.stalls <= 15 * loop.instructions
    assert 0 < min(loop.ideal, loop.serial) < 1
    assert loop.order.count("P") >= 1


def test_work_in_the_loop_is_seen_by_class_and_pipe(found) -> None:
    plain, busy = loop_of(found, "sm_90"), loop_of(found, "sm_90 busy")
    exponentials = M * N / (32 * WARPS)  # a warp's instructions
    assert busy.classes["special"] == exponentials
    assert "special" not in plain.classes
    # 16 lanes, of which a scheduler has 4
    assert busy.pipes["special"] == 32 * exponentials / (16 / 4)
    assert (busy.flops, busy.bound) == (plain.flops, "special")
    assert busy.serial < plain.serial


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sm_90 without loop", "no loop with a tensor-core product"),
        ("other part", "the cubin is for sm_90, not sm_80"),
        ("unknown part", "rates for sm_80, sm_90, sm_100, not for sm_70"),
        ("no cubin", "nvdisasm cannot read this cubin of 1 bytes"),
        ("cut off", "nvdisasm cannot read this cubin"),
    ],
)
def test_what_cannot_be_read_is_said_in_a_line(found, name, message) -> None:
    assert message in found[name]
    assert "\n" not in found[name]


# ---------------------------------------------------------------- text

HEAD = """
	.headerflags	@"EF_CUDA_SM90 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM90)"
	.section	.text.k,"ax",@progbits
"""


def text(*lines: str | tuple[str, int]) -> str:
    """A function: labels, and (instruction, high word)."""
    out, address = [HEAD], 0
    for line in lines:
        if isinstance(line, str):
            out.append(f"{line}:\n")
        else:
            word = "0x000000000000794d"
            out.append(f"        /*{address:04x}*/     {line[0]} ;  /* {word} */\n")
            out.append(f"    /* {line[1]:#018x} */\n")
            address += 16
    return "".join(out)


def test_stalls_and_targets_are_read_from_the_words() -> None:
    stall_13 = 13 << 41
    code = text(
        ("MOV R1, c[0x0][0x28]", 0xF << 37 | 1 << 45),  # bits next to the stall's, and yield
        ".L_x_0",
        ("@!P0 HMMA.16816.F32.BF16 R4, R8, R12.reuse, R4", stall_13 | 0b100001 << 52),
        ("@P1 BRA `(.L_x_0)", 0),
    )
    ((first, product, back),) = parse(code, 90)
    assert (first.stall, first.predicate) == (0, "")
    assert product == Instruction(16, "HMMA.16816.F32.BF16", "R4, R8, R12.reuse, R4", "@!P0", 13)
    assert (back.base, back.target) == ("BRA", 16)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (text(("NOP", 0)).replace("SM90", "SM80"), "the cubin is for sm_80, not sm_90"),
        (text(), "has no code"),
        ("", "names no part"),
        (text(("NOP", 0)).rsplit("\n", 2)[0], "has an unexpected form, .* 'the end'"),
        (text(("NOP", 0)).replace("    /* 0x0", "    // 0x0"), "has an unexpected form"),
        (text(("NOP", 0)).replace("/* 0x000000000000794d */", ""), "has an unexpected form"),
        (text(("BRA `(.L_x_0)", 0)), r"BRA goes to \.L_x_0, which is not defined"),
    ],
)
def test_text_of_another_form_is_refused(code, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse(code, 90)


def instruction(opcode: str, operands: str) -> Instruction:
    return Instruction(0, opcode, operands, "", 1)


@pytest.mark.parametrize(
    ("opcode", "operands", "expected"),
    [
        # (rows, columns, depth), warps, times a 16-bit FLOP, bytes of shared memory
        ("HMMA.16816.F32.BF16", "R4, R8, R12, R4", ((16, 8, 16), 1, 1, 0)),
        ("HMMA.1688.F32.TF32", "R4, R8, R12, R4", ((16, 8, 8), 1, 2, 0)),
        ("HGMMA.64x32x16.F32.BF16", "R24, gdesc[UR8], R24", ((64, 32, 16), 4, 1, 96 * 16 * 2)),
        ("HGMMA.64x32x16.F32", "R24, R4, gdesc[UR8], R24", ((64, 32, 16), 4, 1, 32 * 16 * 2)),
        ("HGMMA.64x32x8.F32.TF32", "R24, gdesc[UR8], R24", ((64, 32, 8), 4, 2, 96 * 8 * 4)),
        ("UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR2], idesc[UR3], UPT",
         ((128, 256, 16), None, 1, 384 * 16 * 2)),
        ("UTCHMMA", "tmem[UR4], gdesc[UR6], tmem[UR10], tmem[UR2], idesc[UR3], UPT",
         ((128, 256, 16), None, 1, 256 * 16 * 2)),
    ],
)  # fmt: skip
def test_products_are_those_of_the_instruction_set(opcode, operands, expected) -> None:
    # 128 rows / 16 from bit 24, 256 columns / 8 from bit 17, A and B bfloat16 (1), sums float32.
    descriptor = 8 << 24 | 32 << 17 | 1 << 10 | 1 << 7 | 1 << 4
    before = [
        instruction("UMOV", f"UR21, {descriptor:#x}"),
        instruction("UMOV", "UR3, UR21"),
        instruction("UMOV", "UR21, 0x0"),  # after it was copied: has no effect
    ]
    found = product_of(instruction(opcode, operands), before)
    assert (found.shape, found.warps, found.slower, found.reads) == expected


@pytest.mark.parametrize(
    ("opcode", "operands", "words"),
    [
        ("QGMMA.64x8x32.F32.E4M3.E4M3", "R24, gdesc[UR8], R24",
         "does not know the tensor-core instruction QGMMA"),
        ("HMMA", "R4, R8, R12, R4", "does not know the tensor-core instruction HMMA"),
        ("UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR2], idesc[UR3]",
         "no constant gives the size"),
    ],
)  # fmt: skip
def test_products_that_are_not_known_are_refused(opcode, operands, words) -> None:
    with pytest.raises(ValueError, match=words):
        product_of(instruction(opcode, operands), [instruction("UIADD3", "UR3, UR4, 0x1, URZ")])


# class, pipe and its cycles on an A100 and on an H100, cycles of shared memory, bytes loaded
HELD = {
    "FFMA": ("fp32", ("fma", 2), ("fma", 1), 0, 0),  # 64 and 128 per cycle
    "FMUL2": ("fp32", ("fma", 2), ("fma", 2), 0, 0),  # two results each
    "MUFU.EX2": ("special", ("special", 8), ("special", 8), 0, 0),
    "IMAD": ("imad", ("fma", 2), ("fma", 2), 0, 0),
    "IMAD.MOV.U32": ("move", ("", 0), ("", 0), 0, 0),
    "CS2R": ("move", ("", 0), ("", 0), 0, 0),
    "IADD3": ("integer", ("alu", 2), ("alu", 2), 0, 0),
    "UIADD3": ("uniform", ("uniform", 2), ("uniform", 2), 0, 0),
    "R2UR": ("uniform", ("uniform", 2), ("uniform", 2), 0, 0),
    "F2FP.BF16.F32.PACK_AB": ("convert", ("alu", 2), ("alu", 2), 0, 0),
    "HMMA.16816.F32.BF16": ("tensor", ("", 0), ("", 0), 0, 0),
    "UTCHMMA": ("tensor", ("", 0), ("", 0), 0, 0),
    "DFMA": ("fp64", ("", 0), ("", 0), 0, 0),
    "LDS.128": ("shared", ("", 0), ("", 0), 4, 0),
    "STS.64": ("shared", ("", 0), ("", 0), 2, 0),
    "STS": ("shared", ("", 0), ("", 0), 1, 0),
    "LDSM.16.M88.4": ("shared", ("", 0), ("", 0), 4, 0),
    "STSM.16.MT88.2": ("shared", ("", 0), ("", 0), 2, 0),
    "LDSM.16.M88": ("shared", ("", 0), ("", 0), 1, 0),
    "SHFL.BFLY": ("shuffle", ("", 0), ("", 0), 1, 0),
    "LDGSTS.E.BYPASS.128": ("copy", ("", 0), ("", 0), 4, 512),
    "LDGSTS.E": ("copy", ("", 0), ("", 0), 1, 128),
    "LDG.E.64": ("global", ("", 0), ("", 0), 0, 256),
    "STG.E.128": ("global", ("", 0), ("", 0), 0, 0),
    "LDL": ("spill", ("", 0), ("", 0), 0, 0),
    "BAR.SYNC": ("wait", ("", 0), ("", 0), 0, 0),
    "BRA": ("branch", ("", 0), ("", 0), 0, 0),
}


@pytest.mark.parametrize("opcode", HELD)
def test_an_instruction_holds_what_the_guide_says(opcode) -> None:
    i = instruction(opcode, "R4, R8")
    found = class_of(i), pipe_of(i, 80), pipe_of(i, 90), shared_cycles(i), copied(i)
    assert found == HELD[opcode]
    assert shared_cycles(dataclasses.replace(i, predicate="@!PT")) == 0


def test_the_figures_of_a_loop_are_those_of_its_instructions_added_by_hand() -> None:
    descriptor = 8 << 24 | 16 << 17 | 1 << 7  # 128 x 128
    opcodes = [
        ("UMOV", f"UR3, {descriptor:#x}"), ("MOV", "R7, 0x4000"), ("BAR.SYNC", ""),
        ("LDS.64", "R4, [R5]"), ("LDSM.16.M88.4", "R4, [R5]"),
        ("SYNCS.ARRIVE.TRANS64", "[UR4], R7"),
        ("UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR2], idesc[UR3], UPT"),
        ("UTCHMMA", "gdesc[UR4], gdesc[UR6], tmem[UR10], tmem[UR2], idesc[UR3], UPT"),
        ("WARPGROUP.DEPBAR.LE", ""), ("MUFU.EX2", ""), ("FFMA", ""), ("STS", ""), ("BRA", ""),
    ]  # fmt: skip
    code = [Instruction(16 * n, *what, "", 1 + n % 3) for n, what in enumerate(opcodes)]
    loop = reading._read(code[2:], code, 100, 8)
    flops = 2 * 2 * 128 * 128 * 16 / 8  # one warp's part of eight
    by_tma, reads = 0x4000 / 8, 2 * (128 + 128) * 16 * 2 / 8
    shared = (2 + 4 + 1) * 128 + by_tma + reads
    assert (loop.instructions, loop.flops) == (11, flops)
    assert loop.stalls == sum(i.stall for i in code[2:])
    assert loop.tensor == flops * 4 / 8192
    assert loop.global_bytes == by_tma
    assert loop.shared_bytes == shared
    assert loop.pipes == {"special": 8, "fma": 1, "shared memory": 4 * shared / 128}
    assert loop.classes["shared"] == 3
    assert loop.order == "B L2 Y P2 W E S"
    assert (loop.bound, loop.busy) == ("shared memory", 4 * shared / 128)
    assert loop.ideal == loop.tensor / loop.busy
    assert loop.serial == loop.tensor / (loop.tensor + loop.stalls)
    assert reading.main_loop([loop, dataclasses.replace(loop, stalls=1)]).stalls == 1


# ---------------------------------------------------------------- loops


def program(*steps: str) -> list[Instruction]:
    """Build a program of one instruction per item. "" falls through, "3" jumps to number 3, "=3"
    always jumps (predicate), "?3" may jump, "u3" may by an operand, "!3" may by a call, "." ends,
    "?." may end."""
    found = []
    for number, step in enumerate(steps):
        target = int(step.strip("?!=u")) if step.strip("?!=u.") else None
        opcode = "EXIT" if "." in step else "CALL" if "!" in step else "BRA" if step else "MOV"
        predicate = {"?": "@P0", "!": "@P0", "=": "@PT"}.get(step[:1], "")
        operands = "UP0, `(.L_x_0)" if "u" in step else "`(.LUP_0)"
        found.append(Instruction(number, opcode, operands, predicate, 1, target))
    return found


@pytest.mark.parametrize(
    ("steps", "loops"),
    [
        (("", "", "."), []),
        (("", "", "", "?1", "."), [[1, 2, 3]]),
        (("?0", "."), [[0]]),
        (("", "", "", "?2", "?1", "."), [[1, 2, 3, 4], [2, 3]]),  # one nested in the other
        (("", "?3", "", "", "?1", "."), [[1, 2, 3, 4]]),  # with a branch inside
        (("", "?4", "", "?1", "", "."), [[1, 2, 3]]),  # left in the middle
        (("", "?5", "", "?1", ".", "?5", "2"), [[1, 2, 3], [5]]),  # wait loops after its end
        (("", "?3", "", "", "?2", "."), []),  # entered at two places: not a natural loop
        (("", ".", "", "2"), []),  # unreachable
        (("", "", "", "?1", "?1", "."), [[1, 2, 3, 4]]),  # two back edges
        # the second is reached by a far call
        (("", "", "!4", "1", "", "?4", "."), [[1, 2, 3], [4, 5]]),
        (("", "=3", "?1", "", "."), []),  # an unconditional jump does not fall through
        (("", "u3", "1", "."), [[1, 2]]),
        (("", "?.", "1"), [[1, 2]]),
    ],
)
def test_natural_loops_of_drawn_programs(steps, loops) -> None:
    found = natural_loops(program(*steps))
    assert [[i.address for i in loop] for loop in found] == loops


if __name__ == "__main__":
    main()
