"""Tuning at its edges: repeated timing and minimum gains, sizes and options of the calls, valid and
invalid numbers, and the command's arguments."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refused import check, exits
from test_tune import FWD, GOOD, SHIPPED, FakeGpu
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from warpweave.kernels.devices import TARGETS
from warpweave.kernels.norm import function as norm
from warpweave.kernels.runtime import dispatch, tiles
from warpweave.kernels.runtime.dtypes import NAMED_DTYPES
from warpweave.kernels.runtime.tile_table import KINDS, GemmTile
from warpweave.machine.tune import aot, calls, command, search
from warpweave.machine.tune.calls import Problem, other_calls, problems, timed_call
from warpweave.machine.tune.candidates import candidates
from warpweave.machine.tune.options import TuneConfig
from warpweave.machine.tune.search import Bench, SearchReport, difference

TILES = [SHIPPED, *candidates(FWD, TARGETS["sm_90"], 2)[1:7]]


# ---------------------------------------------------------------- choosing the best


@pytest.fixture(autouse=True)
def _no_table():
    yield
    tiles.load(None)


def _best(gpu: FakeGpu, found: list) -> tuple:
    return search.best(FWD, found, gpu.bench())


def test_the_three_fastest_of_the_first_pass_are_timed_again() -> None:
    ms = dict(zip(TILES, (1.0, 0.9, 0.95, 0.8, 0.97, 0.85, 0.99)))
    gpu = FakeGpu(ms)
    assert _best(gpu, TILES) == (TILES[3], pytest.approx(800.0), pytest.approx(1000.0))
    counts = [gpu.timed.count(tile) for tile in TILES]
    again = search.ROUNDS + search.FINAL_ROUNDS
    first = search.ROUNDS
    assert counts == [again, again, first, again, first, again, first]


@pytest.mark.parametrize(
    ("ms", "wins"), [(0.98, True), (0.9899, True), (0.99, True), (0.9901, False)]
)
def test_a_gain_is_a_hundredth_at_least(ms: float, wins: bool) -> None:
    tile, us, shipped = _best(FakeGpu({SHIPPED: 1.0, TILES[1]: ms}), TILES[:2])
    assert tile == (TILES[1] if wins else SHIPPED)
    assert (us, shipped) == (pytest.approx(1000 * (ms if wins else 1.0)), 1000.0)


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    """Rounds with a clock ten times as slow give the same ratios as the others."""
    times = {SHIPPED: [1.0, 10.0, 1.0, 10.0, 1.0], TILES[1]: [0.9, 9.0, 0.9, 9.0, 9.9],
             TILES[2]: [1.1, 1.1, 1.1, 11.0, 1.1]}  # fmt: skip
    assert search._ratios(times, SHIPPED) == {
        SHIPPED: 1.0, TILES[1]: pytest.approx(0.9), TILES[2]: pytest.approx(1.1),
    }  # fmt: skip


def test_microseconds_are_those_of_the_second_pass_and_of_the_tile_itself() -> None:
    """The best differs between rounds: the tile that is faster in most of them wins by its ratios,
    and reports its own medians."""
    first, passes = 2 * search.ROUNDS, {SHIPPED: (5.0, [1.0, 1.0, 4.0, 4.0, 1.0]),
                                        TILES[1]: (3.0, [0.75, 0.75, 2.0, 2.0, 2.0])}  # fmt: skip
    gpu = FakeGpu({})

    def took(tile):
        before, after = passes[tile]
        turns = itertools.cycle(after)
        return lambda timed: before if timed <= first else next(turns)

    gpu.ms = {tile: took(tile) for tile in passes}
    assert _best(gpu, TILES[:2]) == (TILES[1], 2000.0, 1000.0)  # by ratios of 0.75, .5 and 2


def test_a_tile_with_a_fault_in_another_call_loses_to_the_next_that_gains(capsys) -> None:
    ms = dict(zip(TILES, (1.0, 0.9, 0.95, 0.995)))
    gpu = FakeGpu(ms, others={TILES[1]: "full: spills 8 bytes"})
    assert _best(gpu, TILES[:4])[0] == TILES[2]
    gpu = FakeGpu(ms, others=dict.fromkeys(TILES[1:3], "full: spills 8 bytes"))
    assert _best(gpu, TILES[:4])[:2] == (SHIPPED, 1000.0)
    assert capsys.readouterr().err.count("faster, but full: spills 8 bytes") == 3
    assert _best(gpu, [SHIPPED])[0] == SHIPPED  # nothing else compiles


def _computing(outputs: Callable) -> Bench:
    """Make a bench whose calls fill a tensor with each of the numbers that a tile computes."""

    def call(problem: Problem):
        def run():
            tile = tiles.find(problem.kernel, torch.device("cpu"), problem.size, problem.kind)
            return tuple(torch.full((4,), x, dtype=torch.float64) for x in outputs(tile))

        return run

    return dataclasses.replace(FakeGpu({}).bench(), call=call)


@pytest.mark.parametrize("dtype", search.TOLERANCES)
def test_a_tile_agrees_up_to_its_dtypes_tolerance_in_every_output(dtype: str) -> None:
    problem = dataclasses.replace(FWD, dtype=dtype)
    limit = search.TOLERANCES[dtype]
    off = {TILES[1]: (limit * 0.99, 0.0), TILES[2]: (limit * 1.01, 0.0),
           TILES[3]: (0.0, limit * 1.01), TILES[4]: (0.0, limit * 0.99)}  # fmt: skip
    bench = _computing(lambda tile: (2 * (1 + x) for x in off.get(tile, (0.0, 0.0))))
    report = SearchReport()
    assert search.agreeing(problem, TILES[:5], bench, report) == [SHIPPED, TILES[1], TILES[4]]
    assert report.wrong == [f"{problem} {search.short(TILES[n])}" for n in (2, 3)]


def test_a_difference_of_just_the_tolerance_is_admitted() -> None:
    at, beyond = 2.0 * (1 + search.TOLERANCES["bf16"]), 2.0 * (1 + 1.001 * 2**-6)
    outputs = {TILES[1]: at, TILES[2]: beyond}
    bench = _computing(lambda tile: [outputs.get(tile, 2.0)])
    assert search.agreeing(FWD, TILES[:3], bench, SearchReport()) == TILES[:2]


def test_a_difference_is_of_all_elements_and_infinite_for_what_is_no_number() -> None:
    t = torch.tensor
    assert difference(t([3.0, 0.0]), t([0.0, 4.0])) == pytest.approx(5 / 4)
    assert difference(t([0.5, 0.0]), t([0.0, 0.0])) == 0.5
    assert difference(t([float("nan"), 1.0]), t([1.0, 1.0])) == float("inf")
    assert difference(t([1.0]), t([float("nan")])) == float("inf")
    # 16-bit numbers, with a difference that is zero or not finite.
    for dtype, a, b in ((torch.bfloat16, 1.0, -256.0), (torch.float16, 60000.0, -60000.0)):
        found = difference(torch.tensor([a, b], dtype=dtype), torch.tensor([b, b], dtype=dtype))
        held = [float(x) for x in torch.tensor([a, b], dtype=dtype)]
        assert found == pytest.approx((held[0] - held[1]) / (-held[1] * 2**0.5), rel=1e-12)


# ---------------------------------------------------------------- the calls


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_attention_is_timed_in_the_sizes_of_an_8b_llama(monkeypatch, dtype: str) -> None:
    """Two sequences of 4,096 tokens, with a quarter as many heads of keys as of queries."""
    made: list[tuple] = []
    asked: list[tuple] = []

    def make(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        made.append((sizes, dtype))
        return torch.empty(sizes, dtype=dtype, device="meta")

    for name in ("attention_fwd", "attention_bwd"):
        call = lambda *of, n=name, **how: asked.append((n, of, how))  # noqa: E731
        monkeypatch.setattr(calls.attention, name, call)
    wide = torch.float64 if dtype == "fp64" else torch.float32
    for kernel, D in itertools.product(("attention_fwd", "attention_dkdv", "attention_dq"),
                                       (64, 128, 256)):  # fmt: skip
        made.clear()
        heads, kv = 4096 // D, 1024 // D
        timed_call(Problem(kernel, dtype, D), make)()
        q, k, rows = (2, 4096, heads, D), (2, 4096, kv, D), (2, heads, 4096)
        assert made == [(q, NAMED_DTYPES[dtype]), (k, NAMED_DTYPES[dtype]), (rows, wide)]
        name, of, how = asked.pop()
        assert how == {"impl": "triton"}
        forward = kernel == "attention_fwd"
        assert name == ("attention_fwd" if forward else "attention_bwd")
        shapes = [tuple(x.shape) for x in of]
        assert shapes == ([q, k, k] if forward else [q, q, k, k, rows, rows])
    made.clear()
    timed_call(Problem("attention_fwd", dtype, 128), make, 64, 256)
    assert made[1][0] == (2, 32, 1, 128)  # at least one head


def test_each_other_call_of_attention_passes_the_option_in_its_name(monkeypatch) -> None:
    asked: list[dict] = []
    for name in ("attention_fwd", "attention_bwd"):
        monkeypatch.setattr(calls.attention, name, lambda *of, **how: asked.append(how))
    for kernel in ("attention_fwd", "attention_dkdv", "attention_dq"):
        problem = Problem(kernel, "bf16", 64)
        found = other_calls(problem, lambda *s, dtype: torch.zeros(s, dtype=dtype), 512, 256)
        for call in found.values():
            call()
        options = dict(zip(found, asked))
        asked.clear()
        assert all(how.pop("impl") == "triton" for how in options.values())
        carried, packed = options.pop("carried")["into"], options.pop("packed window")
        assert (packed.pop("window"), packed["documents"].tolist()) == (
            512, [0, 32, 64, 96, 128, 160, 192, 224, 256],
        )  # fmt: skip
        assert options == {
            "full": {"causal": False}, "softcap": {"softcap": 50.0},
            "dropout": {"dropout": 0.1, "dropout_seed": 7},
        }  # fmt: skip
        q, kv, rows = (2, 256, 4, 64), (2, 256, 1, 64), (2, 4, 256)
        wanted = [q, rows] if kernel == "attention_fwd" else [q, kv, kv]
        assert [tuple(x.shape) for x in carried] == wanted
        assert all(x.dtype == torch.float32 for x in carried)


def test_the_other_calls_of_a_product_are_those_that_take_its_tile() -> None:
    def names(kind: str, dtype: str) -> set[str]:
        make = lambda *s, dtype: torch.empty(s, dtype=dtype, device="meta")  # noqa: E731
        return {*other_calls(Problem("gemm", dtype, kind), make, 64, 64)}

    acts = ("gelu", "gelu_erf", "relu2", "swiglu", "geglu")
    wide = {"tf32", "tf32x3"}
    for dtype in ("bf16", "fp32", "fp64"):
        several = wide if dtype == "fp32" else set()
        heavy = {"adding", "everything"} | {f"gradient of {a}" for a in acts}
        heavy |= {f"gradient of gelu in {p}" for p in several}
        large = {"swiglu", "qkv", "gelu_erf", "relu2", "plain"} | {f"in {p}" for p in several}
        large |= {f"gradient and value of {a}" for a in acts}
        large |= {f"gradient and value of gelu in {p}" for p in several}
        assert names("heavy", dtype) == heavy
        assert names("large", dtype) == large
        assert names("small", dtype) == heavy | large | {"odd sizes"}


class _Asked:
    """Record the requested products by name, with shapes instead of tensors, in order."""

    def __init__(self, monkeypatch) -> None:
        self.each: list[tuple] = []
        for module, name, result in (
            (calls.gemm, "fused_gemm", None), (calls.gemm, "gemm_into", None),
            (calls.mlp, "hidden_bwd", (None, None)), (calls.qkv, "qkv_fwd", None),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self._instead_of(name, result))

    def _instead_of(self, name: str, result: object):
        def told(x: object) -> object:
            if isinstance(x, torch.Tensor):
                return tuple(x.shape)
            return [told(y) for y in x] if isinstance(x, tuple) else x

        def asked(*of: object, **how: object) -> object:
            assert how.pop("impl") == "triton"
            self.each.append((name, [told(x) for x in of], {n: told(x) for n, x in how.items()}))
            return result

        return asked


def _make(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_products_are_timed_in_the_sizes_of_an_8b_llama(monkeypatch, dtype: str) -> None:
    """Up with GELU; a heavy product first accumulates a gradient, then multiplies by a slope."""
    made: list[torch.dtype] = []

    def make(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        made.append(dtype)
        return _make(*sizes, dtype=dtype)

    asked, gelu = _Asked(monkeypatch), {"activation": "gelu", "save_z": True}
    for kind in KINDS:
        timed_call(Problem("gemm", dtype, kind), make)()
    rows, wide, E, few, F = 8192, 14336, 4096, 256, 2048
    assert asked.each == [
        ("fused_gemm", [(rows, E), (E, wide), (wide,)], gelu),
        ("gemm_into", [(E, rows), (rows, wide), (E, wide), True], {}),
        ("hidden_bwd", [(rows, E), (E, wide), (rows, wide)], {"activation": "gelu"}),
        ("fused_gemm", [(few, E), (E, F), (F,)], gelu),
    ]
    low, sums = NAMED_DTYPES[dtype], torch.float64 if dtype == "fp64" else torch.float32
    assert made == [*[low] * 3, *[low] * 3, sums, *[low] * 3]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_each_other_call_of_a_product_passes_what_its_name_says(monkeypatch, dtype: str) -> None:
    asked, T, E = _Asked(monkeypatch), 64, 256
    F, D = E * 7 // 2, E // 4
    found = other_calls(Problem("gemm", dtype, "small"), _make, T, E)
    for call in found.values():
        call()
    by_name = dict(zip(found, asked.each, strict=True))
    z, row = {"save_z": True}, (T, F)
    up, plain = [(T, E), (E, 2 * F), (2 * F,)], [(T, E), (E, F), (F,)]
    drop = [0.1, 7, 3, (T,)]
    wanted: dict[str, tuple] = {
        "adding": ("gemm_into", [(E, T), row, (E, F), True], {}),
        "everything": (
            "fused_gemm", up, z | {"activation": "geglu", "drop": drop, "residual": row}
        ),
        "swiglu": ("fused_gemm", up, z | {"activation": "swiglu", "residual": row}),
        "qkv": (
            "qkv_fwd", [(2, T // 2, E), (1, 6, D, E), None, *[(T // 2, D // 2)] * 2], {}
        ),
        "odd sizes": ("fused_gemm", [(T - 1, E - 1), (E - 1, E + 2)],
                      z | {"activation": "swiglu", "residual": (T - 1, (E + 2) // 2)}),
    }  # fmt: skip
    names = [(name, name, None) for name in ("gelu_erf", "relu2")] + [("plain", None, None)]
    slopes = [(name, name, None) for name in ("gelu", "gelu_erf", "relu2", "swiglu", "geglu")]
    if dtype == "fp32":
        names += [(f"in {p}", "gelu", p) for p in ("tf32", "tf32x3")]
        slopes += [(f"gelu in {p}", "gelu", p) for p in ("tf32", "tf32x3")]
    for name, activation, precision in names:
        how = {"activation": activation, "save_z": activation is not None, "precision": precision}
        wanted[name] = ("fused_gemm", plain, how)
    for name, activation, precision in slopes:
        saved = (T, 2 * F) if activation in ("swiglu", "geglu") else row
        for kind, hidden in (("gradient of", False), ("gradient and value of", True)):
            how = {"activation": activation, "want_hidden": hidden, "precision": precision}
            wanted[f"{kind} {name}"] = ("hidden_bwd", [(T, E), (E, F), saved], how)
    assert by_name == wanted


def test_problems_come_dtype_by_dtype_and_kernel_by_kernel() -> None:
    found = problems(("gemm", "attention_dq"), ("fp32", "bf16"), (96, 64))
    assert [str(problem) for problem in found] == [
        "gemm fp32 large", "gemm fp32 heavy", "gemm fp32 small",
        "attention_dq fp32 96", "attention_dq fp32 64",
        "gemm bf16 large", "gemm bf16 heavy", "gemm bf16 small",
        "attention_dq bf16 96", "attention_dq bf16 64",
    ]  # fmt: skip
    sizes = [Problem("gemm", d, "large").size for d in ("bf16", "fp32", "fp64")]
    assert sizes == [2, 4, 8]


# ---------------------------------------------------------------- options and arguments


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({"head_dims": (1, 256)}, True), ({"head_dims": (0,)}, False),
        ({"head_dims": (64, 257)}, False), ({"steps": 1}, True), ({"steps": 2}, True),
        ({"steps": 3}, False), ({"steps": 0}, False), ({"minutes": 1440.0}, True),
        ({"minutes": 1440.1}, False), ({"minutes": 1e-9}, True), ({"minutes": 0.0}, False),
        ({"minutes": float("nan")}, False), ({"dtypes": ()}, False), ({"kernels": ()}, False),
        ({"head_dims": ()}, True), ({"head_dims": (), "kernels": ("attention_fwd",)}, False),
        ({"dry": True, "target": "sm_120"}, True), ({"target": "sm_100"}, False),
        ({"dry": True, "output": Path("x.json")}, False), ({"output": Path("x.json")}, True),
    ],
)  # fmt: skip
def test_numbers_are_admitted_up_to_their_limit(given: dict, fits: bool) -> None:
    words = r"must be|leave out|requires --dry|nothing to tune"
    check(TuneConfig(**given).problems, None if fits else words)


def test_dry_run_compiles_for_its_target_and_stops_after_its_minutes(monkeypatch, capsys) -> None:
    asked: list[tuple] = []
    tried = GemmTile(64, 64, 32, 8, 1, 4, 3)

    def fitting(problem, part, compiler, steps):
        asked.append((problem, part, steps, compiler(problem, tried)))
        return {tried: [GOOD]}

    monkeypatch.setattr(command, "fitting", fitting)
    monkeypatch.setattr(command, "compile_tile", lambda *of: of)
    config = TuneConfig(("gemm",), ("bf16",), steps=2, dry=True, target="sm_89")
    found = command.dry_run(config)
    every = [Problem("gemm", "bf16", kind) for kind in KINDS]
    assert asked == [(p, TARGETS["sm_89"], 2, ("sm_89", p, tried)) for p in every]
    assert (found["dry"], found["target"], found["tuned"]) == (True, "sm_89", 0)
    assert found["device"] == f"{TARGETS['sm_89'].name} (compiled for it, not run on it)"
    assert [row["problem"] for row in found["rows"]] == [str(p) for p in every]
    clock = itertools.count(0.0, 50.0)
    monkeypatch.setattr(command, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    asked.clear()
    found = command.dry_run(dataclasses.replace(config, minutes=50 / 60))
    assert [problem for problem, *_ in asked] == every[:1]  # at 50 seconds
    assert found["left_out"] == [str(problem) for problem in every[1:]]
    assert len(every) > 2
    capsys.readouterr()


@pytest.mark.parametrize(
    "error", [ValueError("two\nlines"), OSError(28, "disk full"), torch.OutOfMemoryError("none")]
)
def test_an_error_is_one_line_and_exit_status_2(monkeypatch, capsys, error: Exception) -> None:
    def fails(config):
        raise error

    for name, config in (("tune_here", TuneConfig()), ("dry_run", TuneConfig(dry=True))):
        monkeypatch.setattr(command, name, fails)
        said = exits(partial(command.run, config), capsys)
        assert (said.count("\n"), said[:11]) == (0, "warpweave: ")


def test_a_tool_that_is_missing_or_fails_is_told(monkeypatch) -> None:
    with pytest.raises(ValueError, match="needs no-such-tool, which this Triton does not"):
        aot.run_tool("no-such-tool", cubin=b"x")
    asked: list[list[str]] = []

    def run(words, **how):
        asked.append(words)
        assert Path(words[-1]).read_bytes() == b"12345"
        return done

    monkeypatch.setattr(subprocess, "run", run)
    done = subprocess.CompletedProcess([], 0, "REG:4", "a warning")
    assert aot.run_tool("cuobjdump", "--one", "--two", cubin=b"12345") == "REG:4"
    (words,) = asked
    assert (Path(words[0]).name, words[1:3]) == ("cuobjdump", ["--one", "--two"])
    for said, line in (("\n first \nsecond", "first "), ("  ", "nothing")):
        done = subprocess.CompletedProcess([], 3, "", said)
        with pytest.raises(ValueError, match=f"cannot read this cubin of 5 bytes: {line}$"):
            aot.run_tool("cuobjdump", cubin=b"12345")


def _changed() -> tuple:
    """Return all that `compiling` changes: Triton's launch and driver, the choice of what runs."""
    asked = ("choose", "capability", "processors")
    ours = [m for name, m in sorted(sys.modules.items()) if name.startswith("warpweave.")]
    return (
        JITFunction.run, driver._active, knobs.nvidia.dump_ptxas_log,
        knobs.compilation.always_compile,
        *(getattr(module, name, None) for module in ours for name in asked),
    )  # fmt: skip


def test_outside_of_compiling_nothing_remains_changed(monkeypatch) -> None:
    """This holds after an error, within another target's context, and the second time."""
    monkeypatch.setattr(dispatch, "INTERPRET", False)
    before = _changed()

    def seen() -> tuple:
        kinds = {m.choose(None) for m in (dispatch, norm) if hasattr(m, "choose")}
        target = driver.active.get_current_target()
        return kinds, dispatch.capability(None), dispatch.processors(None), target.arch

    def of(target: str) -> tuple:
        part = TARGETS[target]
        return {"triton"}, part.arch, part.processors, part.arch

    def fails() -> None:
        with aot.compiling("sm_80") as found:
            assert (found, seen()) == ([], of("sm_80"))
            with aot.compiling("sm_90"):
                assert seen() == of("sm_90")
                assert driver.active.get_device_properties(0) == {
                    "max_shared_mem": TARGETS["sm_90"].block_shared,
                    "multiprocessor_count": TARGETS["sm_90"].processors,
                }
            assert seen() == of("sm_80")
            assert knobs.compilation.always_compile
            raise ArithmeticError

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            fails()
        assert _changed() == before
