"""Compiler facts about one kernel of one case, and its failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from clock import HotLoop

from warpweave.kernels.devices import TARGETS

SHARED_LIMIT = {target: part.block_shared for target, part in TARGETS.items()}
# Cases of kernels that read rows, in which at least half of the loads must take 128 bits
# (statistics and labels are single values).
ROWWISE = ("dropout", "gelu", "layer_norm", "rms_norm", "rope", "swiglu")
# Kernels in which ranks signal to each other with flags in memory, set by atomic exchanges.
TELLING = ("_publish_kernel", "_partials_kernel", "_gather_kernel",
           "_gather_gemm_kernel", "_gather_qkv_kernel")  # fmt: skip
# Kernels of one program that compute scalars in float64.
SCALARS = ("_adamw_scalars_kernel",)


@dataclass(frozen=True)
class Report:
    """Compiler facts about one kernel of one case: see `clock.kernel.ReadKernel`.

    `cost` is the case's [FLOPs, bytes]; `error` is the compiler's error, if it failed.
    """

    target: str
    case: str
    kernel: str
    tensor_cores: bool
    float64: bool
    num_warps: int
    registers: int
    stack: int
    shared: int
    occupancy: int
    programs: int
    product: str
    constants: dict[str, Any]
    instructions: dict[str, int]
    cost: tuple[int, int] | None
    error: str = ""
    serialised: str = ""
    unordered: str = ""
    loops: list[HotLoop] = field(default_factory=list)
    outside: int = 0
    unread: str = ""


def failures(reports: list[Report]) -> list[str]:
    """One line for each failure of a kernel."""
    wrong = []
    for r in reports:
        where = f"{r.target} {r.case} ({r.kernel})"
        limit = SHARED_LIMIT[r.target]
        if r.error:
            wrong.append(f"{where}: {r.error}")
            continue
        if r.stack and "float64" not in r.case:  # float64 is for proofs: it may spill but must fit
            wrong.append(f"{where}: {r.registers} registers and {r.stack} bytes of stack")
        if r.shared > limit:
            wrong.append(f"{where}: {r.shared} bytes of shared memory > {limit}")
        elif not r.occupancy:
            wrong.append(f"{where}: not even one program fits")
        if r.tensor_cores and not r.instructions["tensor_core"]:
            wrong.append(f"{where}: no tensor-core instruction")
        elif r.tensor_cores and not r.product.startswith(_product(r)):
            wrong.append(f"{where}: {r.product} instead of {_product(r)}")
        if r.serialised:
            wrong.append(f"{where}: {r.serialised}")
        if r.unordered:
            wrong.append(f"{where}: {r.unordered}")
        if r.instructions["float64"] and not r.float64 and r.kernel not in SCALARS:
            wrong.append(f"{where}: {r.instructions['float64']} float64 instructions")
        if r.instructions["atomic"] != r.instructions["flag"]:
            wrong.append(f"{where}: {r.instructions['atomic']} atomic instructions")
        if r.instructions["flag"] and r.kernel not in TELLING:
            wrong.append(
                f"{where}: {r.instructions['flag']} flags in a kernel that must not signal"
            )
        wide, loads = r.instructions["load_128_bit"], r.instructions["load"]
        if r.case.startswith(ROWWISE) and not 2 * wide >= loads > 0:
            wrong.append(f"{where}: {wide} of {loads} loads take 128 bits")
    return wrong


def _product(r: Report) -> str:
    """The tensor-core instruction that a kernel must use.

    wgmma takes at least 64 keys. On Hopper, dk and dv of heads past 128 have enough registers for
    that only in plain attention, so mma.sync is accepted there.
    """
    few = r.kernel == "attention_dkdv_kernel" and r.constants.get("BLOCK_N", 64) < 64
    return "mma.sync" if r.target == "sm_90" and few else TARGETS[r.target].product
