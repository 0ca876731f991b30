"""Compile the kernels for GPUs that are not there, and report what the compiler made of them.

A case is a call of an ordinary launcher on meta tensors. In a subprocess without TRITON_INTERPRET,
under a driver that only names a target, every kernel the call launches goes through Triton's real
launch path (argument specialisation, tile table, num_warps) down to the cubin, and nothing runs. So
what is checked is exactly what a GPU would be sent.

To add a kernel, append a `Case` in `cases` below:

    Case("attention fwd bf16 D=128", lambda: attention_fwd(q, k, v, ...), tensor_cores=True)

with `m(*shape, dtype=torch.bfloat16)` for a tensor. `tensor_cores=True` asserts mma/wgmma/tcgen05
instructions; `float64=True` permits float64 ones, which otherwise are a constant that widened a
kernel; `targets=("sm_90", "sm_100")` restricts a case. In `cases`, import the kernels' modules
inside the function (they must be imported after the driver is faked). For the launcher's sake
  * `dispatch.choose` answers "triton" for meta tensors,
  * `dispatch.capability` and `dispatch.processors` answer for the target, so ask them, not
    torch.cuda,
  * values of tensors do not exist (`.item()`, `.tolist()` fail).
To look at one's own kernels:  python -P tests/compile_targets.py sm_90 attention
`test_compiles.py` asserts: no spills, shared memory within the target's limit, tensor cores where
claimed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from warpweave.kernels import dispatch
from warpweave.kernels.dispatch import tl, triton

TARGETS = ("sm_80", "sm_90", "sm_100")
SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
_PROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148}
_INSTRUCTIONS = {
    "tensor_core": r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b",
    "cp.async": r"\bcp\.async\.(?:cg|ca)\b",
    "tma": r"\bcp\.async\.bulk\.tensor\b",
    "load": r"\bld\.global\b",
    "load_128_bit": r"\bld\.global\S*\.v(?:4\.b32|2\.b64|8\.b16)\b",
    "atomic": r"\b(?:atom|red)\.",
    "float64": r"\b(?:add|mul|fma|div)\S*\.f64\b",
}


@dataclass(frozen=True)
class Case:
    """One call of a launcher."""

    name: str
    call: Callable[[], object]
    tensor_cores: bool = False
    float64: bool = False
    targets: tuple[str, ...] = TARGETS


@dataclass(frozen=True)
class Report:
    """What the compiler made of one kernel of one case; `stack` is in bytes and holds the
    spills."""

    target: str
    case: str
    kernel: str
    tensor_cores: bool
    float64: bool
    num_warps: int
    registers: int
    stack: int
    shared: int
    instructions: dict[str, int]


def m(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that has a shape and a dtype but no values."""
    return torch.empty(shape, dtype=dtype, device="meta")


def cases() -> list[Case]:
    """Every case; called in the subprocess only."""
    from warpweave.kernels import activation, adamw, attention, cross_entropy, dropout, norm, rope

    T, fp32 = 8192, torch.float32
    f, b, f2, h = m(1, dtype=fp32), m(1), m(128, 64, dtype=fp32), m(T, 4096)
    tokens = m(T, dtype=torch.int64)
    found = [
        Case("planted spill", lambda: _planted_kernel[(1,)](f, f, 16384, False, num_warps=1)),
        Case("planted tile", lambda: _planted_kernel[(1,)](b, b, 1024, True, num_warps=16)),
        Case(
            "planted claim",
            lambda: _planted_kernel[(1,)](f, f, 128, False, num_warps=4),
            tensor_cores=True,
        ),
        Case("rope", lambda: rope.rope_fwd(m(2, 128, 8, 128), f2, f2)),
        Case("gelu tanh fwd", lambda: activation.gelu_fwd(h)),
        Case("gelu tanh bwd", lambda: activation.gelu_bwd(h, h)),
        Case("gelu erf bwd", lambda: activation.gelu_bwd(h, h, approximate="none")),
        Case("swiglu fwd", lambda: activation.swiglu_fwd(h)),
        Case("swiglu bwd", lambda: activation.swiglu_bwd(m(T, 2048), h)),
        Case("dropout", lambda: dropout.dropout_fwd(h, 0.1, seed=7, site=3, tokens=tokens)),
    ]
    for E in (768, 8192):
        x, w, row = m(T, E), m(E), m(T, dtype=fp32)
        found += [
            Case(f"rms_norm fwd E={E}", lambda x=x, w=w: norm.rms_norm_fwd(x, w, residual=x)),
            Case(
                f"rms_norm bwd E={E}", lambda x=x, w=w, r=row: norm.rms_norm_bwd(x, x, w, r, ds=x)
            ),
            Case(f"layer_norm fwd E={E}", lambda x=x, w=w: norm.layer_norm_fwd(x, w, w)),
            Case(
                f"layer_norm bwd E={E}",
                lambda x=x, w=w, r=row: norm.layer_norm_bwd(x, x, w, r, r, ds=x),
            ),
        ]
    for D, dtype in ((64, torch.bfloat16), (128, torch.float16)):
        q, k = m(2, 4096, 16, D, dtype=dtype), m(2, 4096, 4, D, dtype=dtype)
        row = m(2, 16, 4096, dtype=fp32)
        found += [
            Case(
                f"attention fwd D={D}",
                lambda q=q, k=k: attention.attention_fwd(q, k, k),
                tensor_cores=True,
            ),
            Case(
                f"attention bwd D={D}",
                lambda q=q, k=k, r=row: attention.attention_bwd(q, q, k, k, r, r),
                tensor_cores=True,
            ),
        ]
    q, row = m(2, 4096, 16, 128), m(2, 16, 4096, dtype=fp32)
    found.append(Case("attention delta", lambda q=q, row=row: attention.attention_delta(q, q, row)))
    for V, dtype in [(256, torch.bfloat16), (50257, torch.bfloat16), (128256, fp32)]:
        z, t, row = m(T, V, dtype=dtype), m(T, dtype=torch.int64), m(T, dtype=fp32)
        name = f"V={V} {dtype}".replace("torch.", "")
        found += [
            Case(
                f"cross_entropy fwd {name}",
                lambda z=z, t=t: cross_entropy._fwd_triton(z, t, 0, z.shape[1], -100, True),
            ),
            Case(
                f"cross_entropy bwd {name}",
                lambda z=z, t=t, row=row: cross_entropy._bwd_triton(
                    row, z, t, row, 0, z.shape[1], -100, 0.1
                ),
            ),
        ]
    for dtype in (fp32, torch.float64):
        flat, low = m(10**7, dtype=dtype), m(10**7)
        one = m(dtype=fp32)
        found += [
            Case(
                f"adamw {dtype}".replace("torch.", ""),
                lambda flat=flat, low=low, one=one: adamw._adamw_triton(
                    flat, low, flat, flat, low, one, one, one, 1e-3, 0.9, 0.95, 1e-8, 0.1
                ),
                float64=True,  # the scalars of a step
            ),
            Case(
                f"sum_of_squares {dtype}".replace("torch.", ""),
                lambda flat=flat: adamw._sum_of_squares_triton(flat),
                float64=dtype == torch.float64,
            ),
        ]
    return found


@triton.jit
def _planted_kernel(x_ptr, y_ptr, N: tl.constexpr, DOT: tl.constexpr):
    """What the checks must catch: a row that no warp can hold, a product whose tiles are too
    large."""
    if DOT:
        k, i = tl.arange(0, N), tl.arange(0, 128)
        a = tl.load(x_ptr + i[:, None] * N + k[None, :])
        b = tl.load(y_ptr + i[None, :] + k[:, None] * 128)
        tl.store(x_ptr + i[:, None] * 128 + i[None, :], tl.dot(a, b).to(tl.bfloat16))
    else:
        k = tl.arange(0, N)
        x = tl.load(x_ptr + k)
        tl.store(y_ptr + k, x - tl.sum(x, 0))


# ---------------------------------------------------------------- in the subprocess


def _fake_driver(target):
    class Driver:
        get_current_target = staticmethod(lambda: target)
        get_current_device = staticmethod(lambda: 0)
        set_current_device = staticmethod(lambda device: None)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("meta"))
        get_device_properties = staticmethod(
            lambda device=0: {
                "max_shared_mem": SHARED_LIMIT[f"sm_{target.arch}"],
                "multiprocessor_count": _PROCESSORS[f"sm_{target.arch}"],
            }
        )
        map_python_to_cpp_type = staticmethod(lambda ty: ty)

    return Driver()


def _resources(cubin: bytes) -> dict[str, int]:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def _compile_here(target: str, only: str) -> list[Report]:
    """Compile, in this process, the cases whose name contains `only`."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.jit import JITFunction

    if dispatch.INTERPRET:
        raise RuntimeError("TRITON_INTERPRET is set: nothing would be compiled")
    arch = int(target.removeprefix("sm_"))
    triton.runtime.driver.set_active(_fake_driver(GPUTarget("cuda", arch, 32)))
    dispatch.choose = lambda impl, *tensors: "triton"
    dispatch.capability = lambda device: arch
    dispatch.processors = lambda device: _PROCESSORS[target]

    compiled = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    reports = []
    for case in cases():
        if target not in case.targets or only not in case.name:
            continue
        compiled.clear()
        case.call()
        if not compiled:
            raise RuntimeError(f"case {case.name!r} launched no kernel")
        for name, kernel in compiled:
            usage, ptx = _resources(kernel.asm["cubin"]), kernel.asm["ptx"]
            reports.append(
                Report(
                    target=target,
                    case=case.name,
                    kernel=name,
                    tensor_cores=case.tensor_cores,
                    float64=case.float64,
                    num_warps=kernel.metadata.num_warps,
                    registers=usage["REG"],
                    stack=usage["STACK"] + usage["LOCAL"],
                    shared=kernel.metadata.shared,
                    instructions={k: len(re.findall(v, ptx)) for k, v in _INSTRUCTIONS.items()},
                )
            )
    return reports


# ---------------------------------------------------------------- in the test process


def _compile_in_subprocess(target: str, only: str) -> list[Report]:
    with tempfile.TemporaryDirectory() as cache:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["TRITON_CACHE_DIR"] = cache
        done = subprocess.run(
            [sys.executable, "-P", __file__, target, only, "--json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )
    if done.returncode:
        raise RuntimeError(f"compiling for {target} failed:\n{done.stderr[-4000:]}")
    return [Report(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]


def compile_targets(targets: tuple[str, ...] = TARGETS, only: str = "") -> dict[str, list[Report]]:
    """Compile the cases whose name contains `only` for every target, two targets at a time."""
    with ThreadPoolExecutor(2) as pool:
        reports = pool.map(lambda target: _compile_in_subprocess(target, only), targets)
        return dict(zip(targets, reports))


if __name__ == "__main__":
    _arguments = [a for a in sys.argv[1:] if a != "--json"]
    _reports = _compile_here(_arguments[0], _arguments[1] if len(_arguments) > 1 else "")
    if "--json" in sys.argv:
        print(json.dumps([asdict(r) for r in _reports]))
    else:
        for _r in _reports:
            print(
                f"{_r.case:40} {_r.kernel:32} warps {_r.num_warps:2} regs {_r.registers:3} "
                f"stack {_r.stack:4} shared {_r.shared:6} {_r.instructions}"
            )
