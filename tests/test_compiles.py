"""Every kernel compiled for GPUs that are not there: no spills, smem fits, tensor cores used."""

import pytest
from compile_targets import SHARED_LIMIT, TARGETS, Report, compile_targets


@pytest.fixture(scope="module")
def reports() -> dict[str, list[Report]]:
    return compile_targets()


def _failures(reports: list[Report]) -> list[str]:
    """One line for each thing that is wrong with a kernel."""
    wrong = []
    for r in reports:
        where = f"{r.target} {r.case} ({r.kernel})"
        if r.stack and "float64" not in r.case:  # float64 is for proofs: it must fit, not be fast
            wrong.append(f"{where}: {r.registers} registers and {r.stack} bytes of stack")
        if r.shared > SHARED_LIMIT[r.target]:
            wrong.append(f"{where}: {r.shared} bytes of shared memory > {SHARED_LIMIT[r.target]}")
        if r.tensor_cores and not r.instructions["tensor_core"]:
            wrong.append(f"{where}: no tensor-core instruction")
        if r.instructions["float64"] and not r.float64:
            wrong.append(f"{where}: {r.instructions['float64']} float64 instructions")
    return wrong


@pytest.mark.timeout(400)  # the first test waits for every compilation
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_fits_the_target(reports, target) -> None:
    faulty = [r for r in reports[target] if r.case.startswith("planted")]
    assert not _failures([r for r in reports[target] if r not in faulty])
    found = "\n".join(_failures(faulty))
    for planted in ("bytes of stack", "bytes of shared memory", "no tensor-core instruction"):
        assert found.count(planted) == 1, found


def test_elementwise_kernels_load_128_bits_at_a_time(reports) -> None:
    """Most of their loads: those of x; a row's statistics and labels are single values."""
    names = ("norm", "rope", "gelu", "swiglu", "dropout")
    found = [
        r for rs in reports.values() for r in rs if r.case.startswith(names) or "norm" in r.case
    ]
    assert len(found) >= 15 * len(TARGETS)
    for r in found:
        assert 2 * r.instructions["load_128_bit"] > r.instructions["load"], r
