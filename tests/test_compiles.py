"""Every kernel compiled for GPUs that are not there: no spills, smem fits, tensor cores used.

Every shipped tile is compiled by ``make compiled``, which takes minutes.
"""

import dataclasses

import pytest
from compile_targets import SHARED_LIMIT, TARGETS, Report, compile_targets, failures

from warpweave.tune.aot import compiling, unordered
from warpweave.tune.parts import PARTS, occupancy

pytestmark = pytest.mark.timeout(3600)  # it takes both cores for two minutes if they are idle


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return compile_targets()


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_fits_the_target(reports, target) -> None:
    faulty = [r for r in reports[target] if r.case.startswith("planted")]
    assert not failures([r for r in reports[target] if r not in faulty])
    found = "\n".join(failures(faulty))
    assert all(r.cost for r in reports[target] if r not in faulty and "float64" not in r.case)
    for planted in ("bytes of stack", "bytes of shared memory", "no tensor-core instruction"):
        assert found.count(planted) == 1, found
    assert found.count("wgmma.mma_async instructions are serialized") == (target == "sm_90"), found


def test_elementwise_kernels_load_128_bits_at_a_time(reports) -> None:
    """At least half of their loads: those of rows; statistics and labels are single values."""
    names = ("norm", "rope", "gelu", "swiglu", "dropout")
    found = [
        r for rs in reports.values() for r in rs if r.case.startswith(names) or "norm" in r.case
    ]
    assert len(found) >= 15 * len(TARGETS)
    for r in found:
        assert 2 * r.instructions["load_128_bit"] >= r.instructions["load"] > 0, r


def test_no_kernel_adds_atomically(reports) -> None:
    """So every result is deterministic. What ranks tell one another by are exchanges."""
    found = [r for rs in reports.values() for r in rs if not r.error]
    assert {"attention_dkdv_kernel", "norm_bwd_kernel"} <= {r.kernel for r in found}
    assert [r for r in found if r.instructions["atomic"] != r.instructions["flag"]] == []
    telling = {r.kernel for r in found if r.instructions["flag"]}
    gathering = {"_arrived_kernel", "_gather_kernel", "_gather_gemm_kernel", "_gather_qkv_kernel"}
    assert telling == {"_publish_kernel", "_partials_kernel"} | gathering


def test_every_failure_is_named() -> None:
    good = Report(
        "sm_90", "x", "k", True, False, 4, 64, 0, 0, 8, 1, "wgmma.mma_async", {},
        {"tensor_core": 1, "float64": 0}, None,
    )  # fmt: skip
    assert failures([good]) == []
    wrong = {
        "16 bytes of stack": {"stack": 16},
        "bytes of shared memory >": {"shared": SHARED_LIMIT["sm_90"] + 1},
        "no tensor-core instruction": {"instructions": {"tensor_core": 0, "float64": 0}},
        "mma.sync.aligned instead of wgmma": {"product": "mma.sync.aligned"},
        "2 float64 instructions": {"instructions": {"tensor_core": 1, "float64": 2}},
        "not one program fits": {"occupancy": 0},
        "(C7515) Potential": {"serialised": "(C7515) Potential Performance Loss: wgmma"},
        "a store before": {"unordered": "a store before atom.release"},
        "CompilationError: at 1:2": {"error": "CompilationError: at 1:2"},
    }
    for message, change in wrong.items():
        (line,) = failures([dataclasses.replace(good, **change)])
        assert message in line
        assert line.startswith("sm_90 x (k)")


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


@pytest.mark.parametrize(
    ("target", "warps", "registers", "shared", "programs"),
    [
        ("sm_80", 4, 32, 0, 16),  # warps: 64 / 4
        ("sm_80", 1, 16, 0, 32),  # program slots
        ("sm_89", 1, 16, 0, 24),
        ("sm_90", 8, 128, 0, 2),  # registers: 65536 / (8 * 32 * 128)
        ("sm_90", 8, 129, 0, 1),  # in units of 256 a warp: 65536 / (8 * 4352), and 15 warps are 12
        ("sm_90", 4, 255, 0, 2),
        ("sm_80", 4, 32, 80 * 1024, 2),  # shared memory: 164 KB over 80 + 1
        ("sm_80", 4, 32, 82 * 1024, 1),
        ("sm_80", 4, 32, 164 * 1024, 0),  # more than a program may have
        ("sm_90", 4, 32, 164 * 1024, 1),
    ],
)
def test_occupancy_is_the_least_of_what_each_limit_allows(
    target, warps, registers, shared, programs
) -> None:
    part = PARTS[target]
    assert occupancy(part, warps=warps, registers=registers, shared=shared) == programs


def test_compiling_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"target must be one of sm_80, .*, got 'sm_70'"):
        compiling("sm_70").__enter__()
    with pytest.raises(ValueError, match="TRITON_INTERPRET must not be set"):
        compiling("sm_90").__enter__()
