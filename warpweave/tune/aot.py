"""Compile kernels for GPUs that are not there, and report what the compiler made of them.

    with compiling("sm_90") as found:
        attention_fwd(q, k, v)                # an ordinary launcher, on meta tensors
    found[0].registers, found[0].shared, found[0].occupancy

Inside, every launch goes through Triton's real launch path (argument specialisation, tile table,
num_warps) down to the cubin, and nothing runs: what is checked is exactly what a GPU would be sent.
Outside, nothing remains changed. It needs Triton without TRITON_INTERPRET, and no GPU.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from warpweave.kernels.runtime import dispatch
from warpweave.tune.clock import HotLoop, read_loops
from warpweave.tune.clock.disassembly import run_tool
from warpweave.tune.parts import PARTS, Part, occupancy

_INSTRUCTIONS = {
    "tensor_core": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b",
    "cp.async": r"\bcp\.async\.(?:cg|ca)\b",
    "tma": r"\bcp\.async\.bulk\.tensor\b",
    "load": r"\bld\.global\b",
    "load_128_bit": r"\bld\.global\S*\.v(?:4\.b32|2\.b64|8\.b16)\b",
    "atomic": r"\b(?:atom|red)\.",
    "flag": r"\batom\.\S*\.exch\b",
    "float64": r"\b(?:add|mul|fma|div)\S*\.f64\b",
}
_PRODUCT = re.compile(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)[\w.:]*")
_SERIALISED = re.compile(r"\(C75\d\d\)[^\n]*")


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of one launch.

    Attributes:
        kernel: its name.
        programs: of the launch's grid.
        constants: the launch's numbers and flags by argument name, tile sizes among them.
        num_warps, registers (of a thread), shared (bytes).
        stack: bytes, spills included.
        occupancy: programs that one multiprocessor holds at once.
        product: the tensor-core instruction used most, "" if none is.
        instructions: how often each kind stands in the PTX.
        serialised: what ptxas says (C75xx) if it lets each wgmma wait for the one before, else "".
        unordered: what of its flags orders too little, see `unordered`; else "".
        loops, outside: hot loops and the stalls outside of them, by the clock if it is asked for;
            of kernels with products of 32 bits or fewer.
        unread: why the clock has not read those, else "".
    """

    kernel: str
    programs: int
    constants: dict[str, Any]
    num_warps: int
    registers: int
    stack: int
    shared: int
    occupancy: int
    product: str
    instructions: dict[str, int]
    serialised: str = ""
    unordered: str = ""
    loops: list[HotLoop] = field(default_factory=list)
    outside: int = 0
    unread: str = ""


@contextmanager
def compiling(target: str, *, clock: bool = False) -> Iterator[list[Compiled]]:
    """Compile, and do not run, every kernel launched inside; the list holds one entry per launch.

    Launchers see `target` ("sm_90") through `dispatch`: `choose` answers "triton", `capability` and
    `processors` are the target's. Tensors are meta tensors, so nothing may look at values. `clock`
    reads the hot loops too, which takes a third of a second a kernel. Raises ValueError for an
    unknown target, and without a compiler (no Triton, or TRITON_INTERPRET set).
    """
    if target not in PARTS:
        raise ValueError(f"target must be one of {', '.join(PARTS)}, got {target!r}")
    if not dispatch.HAS_TRITON or dispatch.INTERPRET:
        raise ValueError("compiling needs Triton, and TRITON_INTERPRET must not be set")
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    part, found = PARTS[target], list[Compiled]()
    run, active = JITFunction.run, driver._active  # asking for `active` itself would look for a GPU

    def compile_only(self, *args, grid, warmup, **options):
        with redirect_stdout(io.StringIO()) as log:  # where Triton prints what ptxas says
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        serialised = _SERIALISED.search(log.getvalue())
        if serialised:  # kept, as Triton keeps the kernel: the next launch does not compile it
            kernel.serialised = serialised[0]
        own = {name: value for name, value in options.items() if name in self.arg_names}
        bound = inspect.signature(self.fn).bind(*args, **own)
        compiled = _compiled(part, self.fn.__name__, kernel, grid, bound.arguments)
        found.append(_clocked(part, compiled, kernel.asm["cubin"]) if clock else compiled)
        return kernel

    fakes = {
        "choose": lambda impl, *tensors: "triton",
        "capability": lambda device: part.arch,
        "processors": lambda device: part.processors,
    }
    real = {name: getattr(dispatch, name) for name in fakes}
    driver.set_active(_driver(part, GPUTarget("cuda", part.arch, 32)))
    JITFunction.run = compile_only
    _replace(real, fakes)
    try:
        with knobs.nvidia.scope(), knobs.compilation.scope():
            knobs.nvidia.dump_ptxas_log = True
            knobs.compilation.always_compile = True  # Triton's cache on disk keeps no log
            yield found
    finally:
        _replace(fakes, real)
        JITFunction.run = run
        driver._active = active


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    """In all of our modules, whatever was imported from `dispatch` under one of these names."""
    for module in [m for name, m in sys.modules.items() if name.startswith("warpweave.")]:
        for name in old:
            if getattr(module, name, None) is old[name]:
                setattr(module, name, new[name])


def _driver(part: Part, target: Any) -> Any:
    """A driver that only names a target, which is its own device: Triton caches by device."""

    class Driver:
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: part.arch)
        set_current_device = staticmethod(lambda device: None)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("meta"))
        get_device_properties = staticmethod(
            lambda device=0: {
                "max_shared_mem": part.block_shared,
                "multiprocessor_count": part.processors,
            }
        )
        map_python_to_cpp_type = staticmethod(lambda ty: ty)

    return Driver()


def _compiled(part: Part, name: str, kernel: Any, grid: Any, arguments: Any) -> Compiled:
    usage, ptx = _resources(kernel.asm["cubin"]), kernel.asm["ptx"]
    products = Counter(_PRODUCT.findall(ptx)).most_common(1)
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    return Compiled(
        kernel=name,
        programs=prod(grid) if isinstance(grid, tuple) else 0,
        constants={n: v for n, v in arguments.items() if isinstance(v, (bool, int, float))},
        num_warps=warps,
        registers=usage["REG"],
        stack=usage["STACK"] + usage["LOCAL"],
        shared=shared,
        occupancy=occupancy(part, warps=warps, registers=usage["REG"], shared=shared),
        product=products[0][0] if products else "",
        instructions={k: len(re.findall(v, ptx)) for k, v in _INSTRUCTIONS.items()},
        serialised=getattr(kernel, "serialised", ""),
        unordered=unordered(ptx),
    )


def _clocked(part: Part, compiled: Compiled, cubin: bytes) -> Compiled:
    """With its hot loops. What multiplies in float64 is for proofs, and not read."""
    if not compiled.product or ".f64" in compiled.product:
        return compiled
    try:
        loops, outside = read_loops(cubin, arch=part.arch, warps=compiled.num_warps)
    except ValueError as error:
        return replace(compiled, unread=str(error))
    return replace(compiled, loops=loops, outside=outside)


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


def _resources(cubin: bytes) -> dict[str, int]:
    text = run_tool("cuobjdump", "--dump-resource-usage", cubin=cubin)
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
