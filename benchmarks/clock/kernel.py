"""A compiled kernel with what its PTX, ptxas' log and its hot loops say of it."""

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
    "atomic": r"\b(?:atom|red)\.(?!\S*\.add\.[su]32\b)",  # that adds a count sums nothing
    "flag": r"\batom\.\S*\.exch\b",
    "float64": r"\b(?:add|mul|fma|div)\S*\.f64\b",
}
_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
_SERIALISED = re.compile(r"\(C75\d\d\)[^\n]*")


@dataclass(frozen=True)
class ReadKernel(Compiled):
    """A compiled kernel that was read.

    Attributes:
        product: the tensor-core instruction used most, "" if none is.
        instructions: how often each kind stands in the PTX.
        serialised: what ptxas says (C75xx) if it lets each wgmma wait for the one before, else "".
        unordered: what of its flags orders too little, see `unordered`; else "".
        loops, outside: hot loops and the stalls outside of them, if they are asked for; of kernels
            with products of 32 bits or fewer.
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
    """`kernel`, which was compiled for `target` ("sm_90"), read. `clock` reads the hot loops too,
    which takes a third of a second."""
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
    # What multiplies in float64 is for proofs, and not read.
    if not clock or not found.product or ".f64" in found.product:
        return found
    arch, warps = TARGETS[target].arch, kernel.num_warps
    try:
        loops, outside = read_loops(kernel.asm["cubin"], arch=arch, warps=warps)
    except ValueError as error:
        return replace(found, unread=str(error))
    return replace(found, loops=loops, outside=outside)


def unordered(ptx: str) -> str:
    """The first release or acquire, as they stand in the text, that orders only what its own thread
    does: a program's other threads need a barrier between their stores and a release, and between
    an acquire and their loads; asynchronous stores must be over before a release. "" if there is
    none."""
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
