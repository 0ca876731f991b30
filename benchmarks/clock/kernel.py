"""A compiled kernel, with facts from its PTX, ptxas' log and its hot loops."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field, replace

from clock.reading import HotLoop, read_loops
from warpweave.kernels.devices import TARGETS
from warpweave.machine.tune.aot import Compiled

_INSTRUCTIONS = {
    "tensor_core": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b",
    "cp.async": r"\bcp\.async\.(?:cg|ca)\b",
    "tma": r"\bcp\.async\.bulk\.tensor\b",
    "load": r"\bld\.global\b",
    "load_128_bit": r"\bld\.global\S*\.v(?:4\.b32|2\.b64|8\.b16)\b",
    "atomic": r"\b(?:atom|red)\.(?!\S*\.add\.[su]32\b)",  # adding to a counter is not a sum
    "flag": r"\batom\.\S*\.exch\b",
    "float64": r"\b(?:add|mul|fma|div)\S*\.f64\b",
}
_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
_SERIALISED = re.compile(r"\(C75\d\d\)[^\n]*")


@dataclass(frozen=True)
class ReadKernel(Compiled):
    """A compiled kernel that was read.

    Attributes:
        product: the tensor-core instruction used most, "" if there is none.
        instructions: the number of occurrences of each kind in the PTX.
        serialised: ptxas' warning (C75xx) if it lets each wgmma wait for the previous one, else "".
        unordered: a flag that orders too little, see `unordered`; else "".
        loops, outside: hot loops and the stalls outside them, if requested; for kernels with
            products of 32 bits or fewer.
        unread: why those could not be read, else "".
    """

    product: str = ""
    instructions: dict[str, int] = field(default_factory=dict)
    serialised: str = ""
    unordered: str = ""
    loops: list[HotLoop] = field(default_factory=list)
    outside: int = 0
    unread: str = ""


def read_kernel(kernel: Compiled, target: str, *, clock: bool = True) -> ReadKernel:
    """Read `kernel`, which was compiled for `target` ("sm_90").

    `clock` also reads the hot loops, which takes a third of a second.
    """
    ptx = kernel.asm["ptx"]
    products = Counter(_PRODUCT.findall(ptx)).most_common(1)
    serialised = _SERIALISED.search(kernel.log)
    found = ReadKernel(
        **vars(kernel),
        product=products[0][0] if products else "",
        instructions={k: len(re.findall(v, ptx)) for k, v in _INSTRUCTIONS.items()},
        serialised=serialised[0] if serialised else "",
        unordered=unordered(ptx),
    )
    # Kernels that multiply in float64 are for proofs, and not read.
    if not clock or not found.product or ".f64" in found.product:
        return found
    arch, warps = TARGETS[target].arch, kernel.num_warps
    try:
        loops, outside = read_loops(kernel.asm["cubin"], arch=arch, warps=warps)
    except ValueError as error:
        return replace(found, unread=str(error))
    return replace(found, loops=loops, outside=outside)


def unordered(ptx: str) -> str:
    """The first release or acquire in the text that orders only the operations of its own thread.

    A program's other threads need a barrier between their stores and a release, and between an
    acquire and their loads. Asynchronous stores must be over before a release. "" if there is none.
    """
    stored = bulk = acquired = False
    for line in map(str.strip, ptx.splitlines()):
        if "bar.sync" in line:
            stored = acquired = False
        elif re.search(r"\bcp\.async\.bulk\.wait_group \d", line):
            bulk = False
        elif re.search(r"\bcp\.async\.bulk\S*\.global\.shared", line):
            bulk = True
        elif ".release" in line:
            if stored or bulk:
                return f"{'a store' if stored else 'an asynchronous store'} before {line}"
        elif ".acquire" in line:
            acquired = True
        elif re.search(r"\bst\.global\b", line):
            stored = True
        elif acquired and re.search(r"\b(?:ld\.global|cp\.async\.c[ag])\b", line):
            return f"no barrier between an acquire and {line}"
    return ""
