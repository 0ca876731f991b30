"""Kernels compiled for GPUs that are not present: no spills, smem fits, tensor cores used.

This file tests one case of each family for one GPU, and that errors are reported. ``make compiled``
compiles all cases and every shipped tile for every GPU, in minutes.
"""

import dataclasses
import json
from pathlib import Path

import pytest
from clock.kernel import read_kernel, unordered
from gate.cases import GATED, cases
from gate.compile import compile_targets
from gate.report import SHARED_LIMIT, TELLING, Report, failures
from gate.tiles import tile_cases

from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime.tiles import triton_version
from warpweave.machine.tune.aot import Compiled, compiling, occupancy

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.timeout(3600)
# Substrings of case names.
CASES = (
    "planted", "gelu tanh bwd", "attention dropout", "rms_norm fwd E=768", "layer_norm bwd E=768",
    "rms_norm chain fwd E=768", "R=32 interleaved", "attention delta", "fwd V=256 ",
    "z-loss V=256 ", "adamw float3", "squares float32", "gemm dropout", "mlp swiglu bwd, h kept",
    "qkv fwd D=128 beside", "qkv bwd", "qkv bounded", "gather_gemm gelu", "unrounded bounded",
    "two shots",
)  # fmt: skip


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    return compile_targets(("sm_90",), "|".join(CASES))["sm_90"]


def test_a_kernel_of_each_family_fits_the_target(reports) -> None:
    assert not failures([r for r in reports if not r.case.startswith("planted")])
    assert all(any(word in r.case for r in reports) for word in CASES)
    assert {r.kernel for r in reports if r.instructions["flag"]} == set(TELLING)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ("spill", "bytes of stack"),
        ("tile", "bytes of shared memory"),
        ("claim", "no tensor-core instruction"),
        ("order", "wgmma.mma_async instructions are serialized"),
    ],
)
def test_planted_fault_is_reported(reports, planted, message) -> None:
    if planted == "order" and triton_version() >= (3, 8):
        pytest.skip("ptxas of Triton 3.8 and newer does not serialize this kernel's wgmma")
    (line,) = failures([r for r in reports if r.case == f"planted {planted}"])
    assert message in line


def test_every_case_says_what_it_costs() -> None:
    named = [c for c in cases() if "float64" not in c.name]
    assert [c.name for c in named if c.cost is None] == []


@pytest.mark.parametrize("target", GATED)
def test_what_is_committed_is_of_the_cases_that_there_are(target) -> None:
    path = ROOT / "benchmarks" / "results" / "compiled" / f"{target}.json"
    compiled = {c.name for c in [*cases(), *tile_cases()] if target in c.targets}
    assert {row["case"] for row in json.loads(path.read_text())["rows"]} == compiled


def test_every_failure_is_named() -> None:
    counts = {
        "tensor_core": 1, "float64": 0, "atomic": 0, "flag": 0, "load": 2, "load_128_bit": 1
    }  # fmt: skip
    good = Report(
        "sm_90", "rope", "k", True, False, 4, 64, 0, 0, 8, 1, "wgmma.mma_async", {}, counts, None
    )
    assert failures([good]) == []
    wrong = {
        "16 bytes of stack": {"stack": 16},
        "bytes of shared memory >": {"shared": SHARED_LIMIT["sm_90"] + 1},
        "mma.sync.aligned instead of wgmma": {"product": "mma.sync.aligned"},
        "not even one program fits": {"occupancy": 0},
        "(C7515) Potential": {"serialised": "(C7515) Potential Performance Loss: wgmma"},
        "a store before": {"unordered": "a store before atom.release"},
        "CompilationError: at 1:2": {"error": "CompilationError: at 1:2"},
        "no tensor-core instruction": {"tensor_core": 0},
        "2 float64 instructions": {"float64": 2},
        "3 atomic instructions": {"atomic": 3},
        "4 flags in a kernel": {"flag": 4, "atomic": 4},
        "0 of 2 loads": {"load_128_bit": 0},
        "0 of 0 loads": {"load": 0, "load_128_bit": 0},
    }
    for message, change in wrong.items():
        if change.keys() <= counts.keys():
            change = {"instructions": counts | change}
        (line,) = failures([dataclasses.replace(good, **change)])
        assert message in line
        assert line.startswith("sm_90 rope (k)")


# ---------------------------------------------------------------- the machinery


STORE, BARRIER = "@%p1 st.global.b32 [ %rd1 + 0 ], %r1;", "bar.sync 0;"
RELEASE = "@%p1 atom.global.sys.release.exch.b64 %rd1, [ %rd2 + 0 ], %rd3;"
ACQUIRE = "@%p1 ld.global.sys.acquire.b64 %rd1, [ %rd2 + 0 ];"
LOAD, COPY = "ld.global.b32 %r1, [ %rd1 + 0 ];", "cp.async.cg.shared.global [ %r1 ], [ %rd1 ], 16;"
BULK = "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];"
READ, DONE = "cp.async.bulk.wait_group.read 0;", "cp.async.bulk.wait_group 0;"


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ((STORE, BARRIER, RELEASE), ""),
        ((STORE, RELEASE), "a store before"),
        ((BARRIER, STORE, RELEASE), "a store before"),
        ((BULK, DONE, BARRIER, RELEASE), ""),
        ((BULK, READ, BARRIER, RELEASE), "an asynchronous store before"),
        ((ACQUIRE, ACQUIRE, BARRIER, LOAD), ""),
        ((ACQUIRE, LOAD), "no barrier between an acquire and"),
        ((ACQUIRE, COPY), "no barrier between an acquire and"),
        ((LOAD, STORE), ""),
    ],
)
def test_flags_that_order_too_little_are_told(lines, fault) -> None:
    found = unordered("\n".join(lines))
    assert found.startswith(fault) if fault else found == ""


def test_what_is_read_of_a_kernel_is_what_stands_in_its_ptx_and_log() -> None:
    ptx = "\n".join([
        "mma.sync.aligned.m16n8k8.f64", "mma.sync.aligned.m16n8k16.f64",
        "mma.sync.aligned.m16n8k16.f64", "ld.global.v4.b32 {%r1}", "ld.global.b16 %r2",
        "cp.async.cg.shared.global", "cp.async.bulk.tensor.2d", "atom.global.add", "red.global.add",
        "atom.acq_rel.gpu.exch", "fma.rn.f64", "st.global.b32",
    ])  # fmt: skip
    kernel = Compiled("k", 12, {}, 4, 40, 24, 50_000, 4, {"ptx": ptx, "cubin": b""})
    found = read_kernel(kernel, "sm_90")
    assert found.product == "mma.sync.aligned.m16n8k16.f64"
    assert found.instructions == {
        "tensor_core": 3, "cp.async": 1, "tma": 1, "load": 2, "load_128_bit": 1, "atomic": 3,
        "flag": 1, "float64": 1,
    }  # fmt: skip
    assert (found.serialised, found.loops, found.unread) == ("", [], "")  # float64, for proofs
    kernel = dataclasses.replace(kernel, log="ptxas info: (C7510) waits\nmore", asm={
        "ptx": ptx.replace(".f64", ".f32"), "cubin": b"",
    })  # fmt: skip
    found = read_kernel(kernel, "sm_90")
    assert found.serialised == "(C7510) waits"
    assert "nvdisasm cannot read this cubin of 0 bytes" in found.unread
    assert read_kernel(kernel, "sm_90", clock=False).unread == ""


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "programs"),
    [
        ("sm_80", 4, 32, 0, 16),  # warps: 64 / 4
        ("sm_80", 1, 16, 0, 32),  # program slots
        ("sm_89", 1, 16, 0, 24),
        ("sm_90", 8, 128, 0, 2),  # registers: 65536 / (8 * 32 * 128)
        # in units of 256 per warp: 65536 / (8 * 4352), and 15 warps are 12
        ("sm_90", 8, 129, 0, 1),
        ("sm_90", 4, 255, 0, 2),
        ("sm_90", 1, 129, 0, 12),  # 15 would fit, but each of four schedulers has equally many
        ("sm_90", 1, 97, 0, 16),  # 3328 per warp, not 3104
        ("sm_90", 4, 256, 0, 0),  # more than a thread may have
        ("sm_80", 4, 32, 80 * 1024, 2),  # shared memory: 164 KB over 80 + 1
        ("sm_80", 4, 32, 82 * 1024, 1),
        ("sm_80", 4, 32, 54946, 2),  # in units of 128: three would need 256 bytes more
        ("sm_80", 4, 32, 164 * 1024, 0),  # more than a program may have
        ("sm_90", 4, 32, 164 * 1024, 1),
        ("sm_80", 4, 32, 163 * 1024, 1),  # the most a program may have
        ("sm_90", 4, 32, 227 * 1024, 1),
        ("sm_90", 4, 32, 227 * 1024 + 1, 0),
    ],
)
def test_occupancy_is_the_least_of_what_each_limit_allows(
    target, warps, registers, shared, programs
) -> None:
    part = TARGETS[target]
    assert occupancy(part, warps=warps, registers=registers, shared=shared) == programs


def test_compiling_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"target must be one of sm_80, .*, got 'sm_70'"):
        compiling("sm_70").__enter__()
    with pytest.raises(ValueError, match="needs Triton with TRITON_INTERPRET unset"):
        compiling("sm_90").__enter__()
