"""Predicted times: by hand, against planted constants, and against published measurements."""

import dataclasses
import json
from pathlib import Path

import clock_fit
import pytest
from clock import HotLoop
from clock import predict as model
from clock.kernel import ReadKernel
from clock.predict import CLOCK, START, Constants, Kernel, Work, cycles, predicted, terms

from warpweave.kernels.cost import Cost
from warpweave.kernels.devices import TARGETS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
H100 = TARGETS["sm_90"]
# Two warps per scheduler; buffers for three iterations, of 32 kB each.
KERNEL = Kernel(
    flops=1e6, busy=500.0, stalls=300, loaded=4096.0, outside=700, warps=8, occupancy=1,
    shared=98304,
)  # fmt: skip
WORK = Work(items=2 * 132, flops=2 * 132 * 8 * 1e6 * 10)  # two waves of ten iterations


def test_terms_are_those_of_a_launch_counted_by_hand() -> None:
    # 20 iterations, each of two warps per scheduler; one iteration of the program, 1000 cycles,
    # hides part of the load's 32768 / 32 cycles; two waves.
    assert terms(KERNEL, WORK, H100, 32) == (20 * 1000, 20 * 600, 20 * 24, 2 * 1400, 2000)
    assert cycles((10, 20, 30, 40, 50), Constants(1, 2, 3, 4, 5, 0, 0)) == START + 550


@pytest.mark.parametrize(
    ("kernel", "work", "ratio"),
    [
        ({"shared": 65536}, {}, (1, 1, 1024 / 24, 1, 1)),  # two buffers hide nothing
        ({"shared": 4 * 32768}, {}, (1, 1, 0, 1, 1)),  # four hide it all
        ({"loaded": 0.0}, {}, (1, 1, 0, 1, 1)),
        ({"occupancy": 2}, {}, (1, 1, 1 / 2, 1, 1 / 2)),  # one wave of both
        # a third wave for one program
        ({}, {"items": 2 * 132 + 1}, (1.5 * 264 / 265,) * 3 + (1.5, 1.5)),
        ({}, {"items": 2 * 132 + 1, "uneven": True}, (1, 1, 1, 265 / 264, 265 / 264)),
    ],
)
def test_buffers_residents_and_waves_change_what_they_should(kernel, work, ratio) -> None:
    base = terms(KERNEL, WORK, H100, 32)
    new = terms(dataclasses.replace(KERNEL, **kernel), dataclasses.replace(WORK, **work), H100, 32)
    assert [a / b for a, b in zip(new, base)] == pytest.approx(ratio)


def test_a_prediction_has_an_interval_and_is_no_faster_than_the_memory() -> None:
    found = model.predict(KERNEL, WORK, H100)
    constants = model.CONSTANTS[90]
    us = cycles(terms(KERNEL, WORK, H100, constants.rate), constants) / CLOCK[90] * 1e6
    assert (found.us, found.high) == (us, us * (1 + constants.spread))
    assert found.low == us / (1 + constants.spread)
    slow = model.predict(KERNEL, dataclasses.replace(WORK, bytes=3.35e12), H100)
    assert slow.us == slow.low == pytest.approx(1e6)


def test_a_compiled_product_is_priced_by_its_tiles_and_what_spills_is_not() -> None:
    loop = HotLoop(100, 300, 1e6, 500.0, {}, {}, 0.0, 4096.0, "")
    sizes = {"M": 1280, "N": 2560, "BLOCK_M": 128, "BLOCK_N": 256}
    kernel = ReadKernel("_gemm_kernel", 132, sizes, 8, 200, 0, 98304, 1, loops=[loop], outside=700)
    cost = Cost(8 * 10**6 * 100 * 10, 1)  # ten passes of each of 10 x 10 tiles
    by_hand = model.predict(KERNEL, Work(100, cost.flops, bytes=1), H100)
    assert predicted(kernel, cost, H100) == by_hand
    for change in ({"stack": 8}, {"loops": []}, {"occupancy": 0}, {"kernel": "other"}):
        assert predicted(dataclasses.replace(kernel, **change), cost, H100) is None
    assert predicted(kernel, None, H100) is None
    assert predicted(kernel, cost, TARGETS["sm_120"]) is None


@pytest.mark.parametrize(
    ("name", "share", "sizes", "items"),
    [
        ("attention_fwd_kernel", 1.0, {"CAUSAL": True}, 264),
        ("attention_dkdv_kernel", 4 / 5, {"CAUSAL": False}, 264),  # four of its five products
        ("attention_dq_kernel", 3 / 5, {"CAUSAL": True}, 264),
        ("_hidden_bwd_kernel", 1.0, {"T": 1000, "F": 600, "BLOCK_T": 128, "BLOCK_F": 64}, 8 * 10),
        ("_gemm_kernel", 1.0, {"M": 129, "N": 64, "BLOCK_M": 128, "BLOCK_N": 64}, 2),
    ],
)
@pytest.mark.parametrize("moved", [1, 10**12])
def test_a_kernel_is_priced_by_what_it_executes_its_programs_and_its_bytes(
    name, share, sizes, items, moved
) -> None:
    masked = HotLoop(100, 900, 1e6, 500.0, {}, {}, 0.0, 4096.0, "")
    loop = dataclasses.replace(masked, stalls=300)
    kernel = ReadKernel(name, 264, sizes, 8, 200, 0, 98304, 1, loops=[masked, loop], outside=700)
    work = Work(items, 10**12 * share, uneven=sizes.get("CAUSAL", False), bytes=moved)
    for part in ("sm_80", "sm_90", "sm_100"):
        found = predicted(kernel, Cost(10**12, moved), TARGETS[part])
        assert found == model.predict(KERNEL, work, TARGETS[part])


# ---------------------------------------------------------------- calibration


def planted(constants: Constants) -> list:
    """Return points that obey `constants` exactly: kernels of all kinds and sizes."""
    points = []
    for n in range(12):
        kernel = dataclasses.replace(
            KERNEL, busy=400.0 + 37 * n, stalls=200 + 61 * (n * 7 % 11), outside=300 * (n % 5),
            shared=32768 * (1 + n % 4), occupancy=1 + n % 2,
        )  # fmt: skip
        for waves in (1, 5):
            work = Work(waves * 132 * 2, waves * 132 * 2 * 8e6 * (10 + n))
            took = cycles(terms(kernel, work, H100, constants.rate), constants) / CLOCK[90]
            launch, rate = {f"k{n}": (kernel, work)}, work.flops / took / 1e12
            points.append(clock_fit.Point(H100, f"s{n % 3}", launch, work.flops, rate))
    return points


def test_constants_that_made_the_figures_are_found_again() -> None:
    # Without one source several rates fit exactly. The default rate is then chosen, so it is the
    # truth.
    truth = Constants(1.1, 0.8, 0.7, 2.0, 3.0, model.CONSTANTS[90].rate, 0.0)
    points = planted(truth)
    found, summary = clock_fit.calibrate(points)
    assert vars(found) == pytest.approx(vars(truth), rel=1e-3, abs=1e-3)
    for kept in ("kept out", "whole sources kept out"):
        assert summary[kept]["largest"] < 1e-3
    # Half of the values are twice as fast: nothing fits both.
    wrong = [p._replace(tflops=p.tflops * (1 + n // 2 % 2)) for n, p in enumerate(points)]
    assert clock_fit.calibrate(wrong)[1]["kept out"]["mean error"] > 0.15


def test_published_figures_are_met_as_the_package_says(tmp_path, capsys) -> None:
    assert clock_fit.main(["--results", str(tmp_path)]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ok"]
    assert max(last["kept out"]["80"], last["kept out"]["90"]) < 0.1
    points, words = clock_fit.read(BENCHMARKS / "results" / "clock" / "points.json")
    assert len(points) >= 40
    assert {p.part.arch for p in points} == set(model.CONSTANTS)
    assert {p.source for p in points} == set(words["sources"])
    peaks = {80: 312, 90: 989, 100: 2250}
    assert all(0 < p.tflops < peaks[p.part.arch] for p in points)


def test_the_pages_of_performance_and_fusions_say_how_far_the_clock_errs() -> None:
    results = BENCHMARKS / "results" / "clock"
    table = json.loads((results / "calibration.json").read_text())
    parts = [table[f"sm_{arch}"] for arch in model.CONSTANTS]

    def said(words: str, first: str, second: str) -> str:
        return words.format(*(round(100 * part[first][second]) for part in parts))

    mean = said("{}% on A100, {}% on H100, and {}% on B200", "kept out", "mean error")
    within = said("within {}, {}, and {}%", "constants", "spread")
    unseen = said("average error is {}, {}, and {}%", "whole sources kept out", "mean error")
    points = f"half of {sum(part['points'] for part in parts)} published figures"
    page, fusions = (
        " ".join(path.read_text().split()).replace(" %", "%")
        for path in (BENCHMARKS.parent / "docs" / "performance.md", results / "fusion.md")
    )
    assert [x for x in (mean, within, unseen, points) if x not in page] == []
    assert [x for x in (mean, within) if x.replace(", and", " and") not in fusions] == []
