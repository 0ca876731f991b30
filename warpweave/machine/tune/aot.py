"""Ahead-of-time compilation of kernels for a GPU that is not present, with resource usage.

    with compiling("sm_90") as found:
        attention_fwd(q, k, v)                # an ordinary launcher, on meta tensors
    found[0].registers, found[0].shared, found[0].occupancy

Inside the block, every launch goes through Triton's real launch path (argument specialization, tile
table, num_warps) down to the cubin, but nothing runs: the cubin is exactly what a GPU would get.
All changes are undone afterwards. It needs Triton without TRITON_INTERPRET, but no GPU.
"""

from __future__ import annotations

import inspect
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from warpweave.kernels.devices import KB, TARGETS, Device
from warpweave.kernels.runtime import dispatch


@dataclass(frozen=True)
class Compiled:
    """The compiled kernel of one launch.

    Attributes:
        kernel, programs: its name, and the number of programs in the launch's grid.
        constants: the launch's numbers and flags by argument name, including tile sizes.
        num_warps, registers (per thread), shared (bytes).
        stack: bytes, including spills.
        occupancy: programs that one multiprocessor holds at once.
        asm: the compiler's stages: "ptx" as text, "cubin" as bytes.
        log: the output of ptxas.
    """

    kernel: str
    programs: int
    constants: dict[str, Any]
    num_warps: int
    registers: int
    stack: int
    shared: int
    occupancy: int
    asm: Mapping[str, Any] = field(default_factory=dict, repr=False)
    log: str = field(default="", repr=False)


@contextmanager
def compiling(target: str) -> Iterator[list[Compiled]]:
    """Compile, but do not run, every kernel launched inside; the list has one entry per launch.

    Launchers see `target` ("sm_90") through `dispatch`: `choose` returns "triton", and `capability`
    and `processors` are the target's. Tensors are meta tensors, so launchers must not read values.
    Raises ValueError for an unknown target, and without a compiler (no Triton, or TRITON_INTERPRET
    set).
    """
    from triton import knobs
    from triton.runtime.jit import JITFunction

    with pretending(target) as part:
        run, found = JITFunction.run, list[Compiled]()

        def compile_only(self, *args, grid, warmup, **options):
            with redirect_stdout(io.StringIO()) as log:  # Triton prints the output of ptxas there
                kernel = run(self, *args, grid=grid, warmup=True, **options)
            if said := log.getvalue():  # keep it with the kernel, which Triton compiles only once
                kernel.ptxas_log = said
            own = {name: value for name, value in options.items() if name in self.arg_names}
            bound = inspect.signature(self.fn).bind(*args, **own)
            found.append(_compiled(part, self.fn.__name__, kernel, grid, bound.arguments))
            return kernel

        JITFunction.run = compile_only
        try:
            with knobs.nvidia.scope(), knobs.compilation.scope():
                knobs.nvidia.dump_ptxas_log = True
                knobs.compilation.always_compile = True  # Triton's disk cache keeps no log
                yield found
        finally:
            JITFunction.run = run


@contextmanager
def pretending(target: str) -> Iterator[Device]:
    """Inside, launches compile for `target` ("sm_90") and then do nothing; see `compiling`.

    Every launch goes through Triton's whole path: binding of arguments, specialization, cache, and
    the call of a launcher, which does nothing. So this also shows what launches cost the host,
    without the driver. Tensors may be on any device; their values are not read or written.
    """
    if target not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {target!r}")
    if not dispatch.HAS_TRITON or dispatch.INTERPRET:
        raise ValueError("compiling needs Triton with TRITON_INTERPRET unset")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    part, active = TARGETS[target], driver._active  # the property `active` would look for a GPU
    fakes = {
        "choose": _choose,
        "capability": lambda device: part.arch,
        "processors": lambda device: part.processors,
    }
    real = {name: getattr(dispatch, name) for name in fakes}
    driver.set_active(_driver(part, GPUTarget("cuda", part.arch, 32)))
    _replace(real, fakes)
    try:
        yield part
    finally:
        _replace(fakes, real)
        driver._active = active


def _choose(impl: str | None, *tensors: torch.Tensor | None) -> str:
    """As `dispatch.choose` on CUDA tensors."""
    dispatch.check_impl(impl)
    return impl or "triton"


def _replace(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Replace the functions of these names in all of our modules that imported them."""
    for module in [m for name, m in sys.modules.items() if name.startswith("warpweave.")]:
        for name in old:
            if getattr(module, name, None) is old[name]:
                setattr(module, name, new[name])


def _driver(part: Device, target: Any) -> Any:
    """Make a driver that only names a target. Each target is a separate device, as Triton caches
    by device."""
    properties = {"max_shared_mem": part.block_shared, "multiprocessor_count": part.processors}

    class Utils:
        load_binary = staticmethod(lambda name, kernel, shared, device: (1, 1, 128, 0, 1024))
        get_device_properties = staticmethod(lambda device=0: properties)

    class Driver:
        utils = Utils
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: part.arch)
        set_current_device = staticmethod(lambda device: None)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("meta"))
        launcher_cls = staticmethod(lambda source, metadata: lambda *args: None)
        get_device_properties = staticmethod(Utils.get_device_properties)
        map_python_to_cpp_type = staticmethod(lambda ty: ty)

    return Driver()


def _compiled(part: Device, name: str, kernel: Any, grid: Any, arguments: Any) -> Compiled:
    text = run_tool("cuobjdump", "--dump-resource-usage", cubin=kernel.asm["cubin"])
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    warps, registers, shared = kernel.metadata.num_warps, usage["REG"], kernel.metadata.shared
    return Compiled(
        kernel=name, programs=prod(grid) if isinstance(grid, tuple) else 0,
        constants={n: v for n, v in arguments.items() if isinstance(v, (bool, int, float))},
        num_warps=warps, registers=registers, stack=usage["STACK"] + usage["LOCAL"], shared=shared,
        occupancy=occupancy(part, warps=warps, registers=registers, shared=shared), asm=kernel.asm,
        log=getattr(kernel, "ptxas_log", ""),
    )  # fmt: skip


def run_tool(tool: str, *options: str, cubin: bytes) -> str:
    """Run one of Triton's binary tools on a cubin. Return its output.

    Raises ValueError if this Triton does not include the tool, or if it cannot read the cubin."""
    import triton.backends.nvidia

    path = Path(triton.backends.nvidia.__file__).parent / "bin" / tool
    if not path.exists():
        raise ValueError(f"reading cubins needs {tool}, which this Triton does not include")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(path), *options, file.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["nothing"])[0]
        raise ValueError(f"{tool} cannot read this cubin of {len(cubin)} bytes: {said}")
    return done.stdout


def occupancy(part: Device, *, warps: int, registers: int, shared: int) -> int:
    """Programs of `warps` warps that one multiprocessor holds at once; 0 if none fits.

    The minimum of the limits by warps, program slots, registers, and shared memory. A
    multiprocessor has 65,536 registers, allocated to warps in units of 256, and assigns each warp
    to one of four schedulers. Each program's shared memory, including the kilobyte that the system
    reserves, is rounded to 128 bytes (CUDA occupancy calculator; Programming Guide,
    "Multiprocessor level").
    """
    per_warp = -(-registers * 32 // 256) * 256
    by_registers = 65_536 // max(per_warp, 256) // 4 * 4 // warps
    by_shared = part.shared // (-(-(shared + KB) // 128) * 128)
    if shared > part.block_shared or registers > 255:
        return 0
    return min(part.warps // warps, part.blocks, by_registers, by_shared)
