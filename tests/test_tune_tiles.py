"""Tuning: candidate tiles, errors of a tile, and the calls that compare them."""

import contextlib
import dataclasses
import itertools

import pytest
import torch

from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import (
    KERNELS,
    KINDS,
    OPTIONAL_KERNELS,
    SIZES,
    AttentionTile,
)
from warpweave.machine.tune import candidates as tile_candidates
from warpweave.machine.tune import search
from warpweave.machine.tune.aot import Compiled
from warpweave.machine.tune.calls import Problem, other_calls, problems, timed_call
from warpweave.machine.tune.candidates import (
    FUSED,
    around,
    candidates,
    compile_tile,
    could_fit,
    fault,
    target_of,
)
from warpweave.machine.tune.search import difference
from warpweave.machine.tune.timing import interleave

FWD = Problem("attention_fwd", "bf16", 64)
SHIPPED = AttentionTile(128, 64, 4, 3)  # for FWD on sm_90
FAST, OTHER = AttentionTile(64, 64, 4, 3), AttentionTile(128, 32, 4, 3)
ALL = problems(tuple(KERNELS), ("bf16", "fp32", "fp64"), (64, 96, 128, 256))
GOOD = Compiled("_attention_fwd_kernel", 1, {}, 4, 128, 0, 65536, 2)


# ---------------------------------------------------------------- candidates


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_candidates_begin_with_the_shipped_tile_and_can_stand_in_a_table(target) -> None:
    for problem in ALL:
        found = candidates(problem, TARGETS[target], 2)
        shipped = problem.shipped(TARGETS[target].arch)
        assert found[0] == shipped
        assert len(found) == len({*found}) <= 50
        if shipped is None:  # the kernels that run instead come first
            assert problem.kernel in OPTIONAL_KERNELS
            found = found[1:]
            if problem.dtype == "bf16" and problem.head_dim <= 128:
                assert found[0] == FUSED
        else:
            assert len(found) >= 10
        for tile in found:
            assert all(size in SIZES[name] for name, size in tile._asdict().items())
            assert could_fit(problem, tile, TARGETS[target])


def test_candidates_are_at_most_two_steps_away_nearest_first() -> None:
    def steps(tile):
        pairs = [sorted(pair) for pair in zip(tile[:3], SHIPPED[:3])]
        doubled = sum((far // near).bit_length() - 1 for near, far in pairs)
        return abs(tile.stages - SHIPPED.stages) + doubled

    assert {tile.warps for tile in around(SHIPPED, 2)} == {4, 8}  # tensor cores use fours
    found = [steps(tile) for tile in around(SHIPPED, 2)]
    assert found == sorted(found)
    assert {*found} == {1, 2}
    assert FAST in around(SHIPPED, 1)
    assert SHIPPED not in around(SHIPPED, 2)


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (FWD, SHIPPED._replace(q=512)),  # 512 x 64 sums and as many scores in 128 threads
        (Problem("attention_fwd", "fp32", 256), AttentionTile(16, 128, 8, 2)),  # 2 x 128 KB
        (Problem("attention_dkdv", "bf16", 128), AttentionTile(32, 256, 8, 1)),  # 2 x 256 x 128
        (Problem("gemm", "bf16", "large"), (256, 512, 64, 8, 1, 8, 3)),
        (Problem("gemm", "fp64", "large"), (128, 128, 128, 8, 1, 8, 3)),
    ],
)
def test_what_cannot_fit_is_not_compiled(problem, tile) -> None:
    assert not could_fit(problem, KERNELS[problem.kernel](*tile), TARGETS["sm_90"])


def test_what_fits_in_one_buffer_less_than_stages_is_compiled() -> None:
    """Some versions of Triton keep one of the stages in registers; in float64 a sum uses two."""
    byte, part = 128 * 64 * 2 * 2, TARGETS["sm_90"]  # K and V of a step in bfloat16
    stages = part.block_shared // byte + 1
    problem = Problem("attention_fwd", "bf16", 128)
    for more, fits in ((0, True), (1, False)):
        assert could_fit(problem, AttentionTile(64, 64, 4, stages + more), part) is fits
    for kernel, tile in (
        ("attention_fwd", AttentionTile(128, 128, 8, 1)),  # 128 x 128 sums and as many scores
        ("attention_dkdv", AttentionTile(64, 128, 8, 1)),  # twice 128 x 128 and 128 x 64
    ):
        rows = tile.k if kernel == "attention_dkdv" else tile.q
        sums = (2 if kernel == "attention_dkdv" else 1) * rows * 128 + tile.q * tile.k
        for warps, size in ((4, "fp32"), (8, "fp32"), (8, "fp64"), (16, "fp64")):
            wide = 2 if size == "fp64" else 1
            free = dataclasses.replace(part, block_shared=2**40)
            wanted = sums * wide <= 255 * 32 * warps
            found = could_fit(Problem(kernel, size, 128), tile._replace(warps=warps), free)
            assert found is wanted


def test_shared_memory_and_registers_may_be_full() -> None:
    """Covers a product's operands and sums; a head dim uses the next power of two."""
    part = TARGETS["sm_90"]
    tile, heads = KERNELS["gemm"](128, 256, 64, 8, 1, 8, 3), AttentionTile(64, 32, 4, 2)
    for kernel, kind, of, need in (
        ("gemm", "large", tile, 2 * (128 + 256) * 64),
        *(("attention_fwd", D, heads, 64 * wide) for D, wide in ((96, 128), (128, 128), (7, 16))),
        ("attention_dkdv", 40, heads, 2 * 64 * 64),
    ):  # fmt: skip
        for dtype, size in (("bf16", 2), ("fp32", 4)):
            for less, fits in ((0, True), (1, False)):
                full = dataclasses.replace(part, block_shared=need * size - less)
                assert could_fit(Problem(kernel, dtype, kind), of, full) is fits, (kernel, kind)
    free = dataclasses.replace(part, block_shared=2**40)
    for m, (dtype, warps) in itertools.product((255, 256), (("fp32", 8), ("fp64", 16))):
        of = tile._replace(m=m, n=256, warps=warps)
        assert could_fit(Problem("gemm", dtype, "small"), of, free) is (m == 255)


def test_what_the_shipped_tile_spills_in_another_call_others_may_too(monkeypatch) -> None:
    """The message names the call. In float64 any tile may spill."""
    spilled = {SHIPPED: {"full": 16}, FAST: {"full": 16}, OTHER: {"full": 24}}
    wide = dataclasses.replace(FWD, dtype="fp64")

    def compiled(target, problem, tile, call):
        assert (target, problem) in (("sm_90", FWD), ("sm_90", wide))
        return [GOOD, dataclasses.replace(GOOD, stack=spilled[tile].get(call, 0))]

    calls = lambda problem, make: {name: name for name in ("full", "softcap")}  # noqa: E731
    monkeypatch.setattr(tile_candidates, "other_calls", calls)
    monkeypatch.setattr(tile_candidates, "_compile", compiled)
    first_fault = tile_candidates.first_fault
    assert [first_fault("sm_90", FWD, tile) for tile in (SHIPPED, FAST)] == ["", ""]
    assert first_fault("sm_90", FWD, OTHER) == "full: spills 24 bytes"
    assert first_fault("sm_90", wide, OTHER) == ""
    spilled[FAST] = {"softcap": 8}
    assert first_fault("sm_90", FWD, FAST) == "softcap: spills 8 bytes"


def test_faults_are_named_and_float64_may_spill() -> None:
    spilled = dataclasses.replace(GOOD, stack=16)
    assert fault([GOOD], FWD) == ""
    assert fault([GOOD, spilled], FWD) == fault([spilled], FWD, 15) == "spills 16 bytes"
    assert fault([spilled], FWD, 16) == ""
    assert fault([spilled], Problem("gemm", "fp64", "large")) == ""
    none = dataclasses.replace(GOOD, occupancy=0, shared=250_000)
    memory = "250000 bytes of shared memory, 128 registers per thread"
    too_much = f"does not fit on a multiprocessor ({memory})"
    assert fault([none], FWD) == fault([none], FWD, 16) == too_much
    assert fault("CompilationError", FWD) == "CompilationError"
    assert target_of(90) == "sm_90"
    with pytest.raises(ValueError, match=r"this GPU \(sm_75\) is not supported: expected sm_80, "):
        target_of(75)


def test_what_is_compiled_is_the_kernels_of_the_problem_under_its_tile(monkeypatch) -> None:
    """Otherwise the first error is reported, in a line of at most 200 characters."""
    other, device = dataclasses.replace(GOOD, kernel="_rope_kernel"), torch.device("cpu")
    made, asked = [GOOD, other], []

    @contextlib.contextmanager
    def compiling(target):
        asked.append(target)
        yield made

    def call():
        where = ("attention_fwd", device, 2, 64), ("gemm", device, 2, "large")
        asked.append(tuple(tiles.find(*of) for of in where))
        for step in then:
            step()

    then: list = []
    monkeypatch.setattr(tile_candidates, "compiling", compiling)
    monkeypatch.setattr(tile_candidates, "timed_call", lambda problem, make: call)
    product, usual = Problem("gemm", "bf16", "small"), Problem("gemm", "bf16", "large").shipped(0)
    tile = usual._replace(k=usual.k * 2)
    assert compile_tile("sm_80", FWD, FAST) == [GOOD]
    assert compile_tile("sm_90", product, tile) == [GOOD, other]
    assert asked == ["sm_80", (FAST, usual), "sm_90", (asked[3][0], tile)]
    assert asked[3][0] != FAST

    def fails() -> None:
        try:
            try:
                raise LookupError("where\n  it is " + 99 * "so ")
            except LookupError as error:
                raise ArithmeticError("between") from error
        except ArithmeticError as error:
            raise ValueError("outside") from error

    then[:] = [fails]
    said = compile_tile("sm_80", FWD, FAST)
    assert said.startswith("LookupError: where it is so so ")
    assert (len(said), "\n" in said) == (200, False)

    def alone() -> None:
        with contextlib.suppress(KeyError):
            raise KeyError
        raise MemoryError("full")

    then[:] = [alone]
    assert compile_tile("sm_80", FWD, FAST) == "MemoryError: full"
    made.pop(0)
    then.clear()
    with pytest.raises(RuntimeError, match=r"^attention_fwd bf16 64 did not launch its kernel$"):
        compile_tile("sm_80", FWD, FAST)


# ---------------------------------------------------------------- the calls


def _small(*sizes, dtype):
    return torch.randn(sizes, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("problem", problems(tuple(KERNELS), ("fp32",), (16,)), ids=str)
def test_every_call_of_a_problem_takes_its_tile(problem) -> None:
    """With a tile that no kernel accepts, each of them fails in the interpreter."""
    tile = problem.shipped(0) or FUSED
    broken = tile._replace(**{tile._fields[0]: 48})
    calls = other_calls(problem, _small, 64, 64)
    assert len(calls) >= (1 if problem.kernel in OPTIONAL_KERNELS else 5)
    for call in (timed_call(problem, _small, 64, 64), *calls.values()):
        with tiles.pinned(problem.pins(broken)), pytest.raises(Exception, match="power of 2"):
            call()


@pytest.mark.parametrize("problem", problems(tuple(KERNELS), ("fp32",), (16,)), ids=str)
def test_timed_calls_compute_the_same_under_another_tile(problem) -> None:
    outputs = []
    for tile in candidates(problem, TARGETS["sm_90"], 1)[:2]:
        torch.manual_seed(0)
        call = timed_call(problem, _small, 64, 32)
        with tiles.pinned(problem.pins(tile)):
            outputs.append([x.clone() for x in call()])
    first, second = outputs
    assert max(map(difference, first, second)) <= search.TOLERANCES["fp32"]
    assert all(x.isfinite().all() and x.any() for x in first)


def test_problems_are_rows_of_the_table() -> None:
    assert len(problems(("gemm",), ("bf16", "fp32"), ())) == 2 * len(KINDS)
    assert [p.kind for p in problems(("attention_dq",), ("fp64",), (40, 64))] == [40, 64]
    assert Problem("gemm", "fp64", "small").pins(FAST) == {("gemm", 8, k): FAST for k in KINDS}
    assert FWD.pins(FAST) == {("attention_fwd", 2, 64): FAST}


def test_the_shipped_tile_of_a_problem_is_that_of_its_row_on_its_device() -> None:
    found = {}
    for target in TARGETS.values():
        for problem in problems(KERNELS, ("bf16", "fp32", "fp64"), (64, 128)):
            rows = tiles.shipped_rows(problem.kernel, target.arch, problem.size, tiles.PLAIN)
            if problem.kernel in OPTIONAL_KERNELS:
                assert not rows
                assert problem.shipped(target.arch) is None
                continue
            kind = problem.kind
            if isinstance(kind, int):
                kind = min(head_dim for head_dim in rows if head_dim >= kind)
            row = rows[kind] if kind in rows else rows["large"]  # without a "heavy" one
            found[problem, target.arch] = problem.shipped(target.arch)
            assert found[problem, target.arch] == row.tile
    small, large = (found[Problem("gemm", "bf16", kind), 90] for kind in ("small", "large"))
    assert small != large


def test_variants_take_turns_in_an_order_drawn_anew() -> None:
    done, timed = [], []
    calls = {name: lambda name=name: done.append(name) for name in "abc"}

    def timer(call):
        call()
        timed.append(done[-1])
        return float(len(timed))

    times = interleave(calls, timer, rounds=20, warmup=2)
    rounds = ["".join(timed[i : i + 3]) for i in range(0, 60, 3)]
    assert done[:6] == [*"abcabc"]
    assert {"".join(sorted(r)) for r in rounds} == {"abc"}
    assert len({*rounds}) > 3
    assert all(times[name] == [i + 1.0 for i, x in enumerate(timed) if x == name] for name in "abc")
