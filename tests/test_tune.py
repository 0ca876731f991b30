"""Tuning: the tile that is kept, launches use the written table, and the output.

No GPU is needed: a fake bench defines how fast a tile is and what it computes.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from refused import exits

from warpweave.kernels.devices import TARGETS
from warpweave.kernels.runtime import tiles
from warpweave.kernels.runtime.tile_table import AttentionTile, TileRow, write_table
from warpweave.machine.tune import aot, command, search
from warpweave.machine.tune.aot import Compiled
from warpweave.machine.tune.calls import Problem, problems
from warpweave.machine.tune.candidates import FUSED, candidates, resident
from warpweave.machine.tune.command import tune_here
from warpweave.machine.tune.options import TuneConfig, parse
from warpweave.machine.tune.search import Bench, add_rows, difference, tune

FWD = Problem("attention_fwd", "bf16", 64)
SHIPPED = AttentionTile(128, 64, 4, 3)  # for FWD on sm_90
FAST, OTHER = AttentionTile(64, 64, 4, 3), AttentionTile(128, 32, 4, 3)
GOOD = Compiled("_attention_fwd_kernel", 1, {}, 4, 128, 0, 65536, 2)


@pytest.fixture(autouse=True)
def table(monkeypatch, tmp_path):
    """Set the default path of the written table."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "tiles.json"
    tiles.load(None)


class FakeGpu:
    """A device on which the test decides a tile's time, result and compilation."""

    def __init__(self, ms, outputs=None, compiled=None, others=None):
        self.ms, self.outputs, self.compiled = ms, outputs or {}, compiled or {}
        self.others, self.running, self.timed = others or {}, None, []

    def call(self, problem):
        def run():
            where = problem.kernel, torch.device("cpu"), problem.size, problem.kind
            self.running = tiles.find_optional(*where)
            both = "attention_dq", "attention_dkdv"
            self.replaced = [tiles.find_optional(kernel, *where[1:]) for kernel in both]
            output = self.outputs.get(self.running, 1.0)
            if isinstance(output, Exception):
                raise output
            return torch.full((3,), 2.0), torch.full((2, 2), output, dtype=torch.bfloat16)

        return run

    def timer(self, call):
        call()
        self.timed.append(self.running)
        ms = self.ms.get(self.running, 1.5)
        return ms(len(self.timed)) if callable(ms) else ms

    def bench(self):
        compiled = lambda problem, tile: self.compiled.get(tile, [GOOD])  # noqa: E731
        others = lambda problem, tile: self.others.get(tile, "")  # noqa: E731
        return Bench("Planted GPU", TARGETS["sm_90"], self.timer, compiled, others, self.call)

    def tune(self, path, problem=FWD):
        """Return (the tile of the one row that is written, the report); the table is loaded."""
        report = tune([problem], self.bench(), path, minutes=1)
        [found] = report.rows
        assert found.shipped == problem.shipped(90)
        tiles.load(path)
        return found.tile, report


# ---------------------------------------------------------------- the tile that is kept


def test_the_fastest_tile_is_written_and_then_taken_by_launches(table) -> None:
    elsewhere = TileRow("Other GPU", "attention_fwd", 2, 64, OTHER, "3.0.0")
    before = TileRow("Planted GPU", "attention_fwd", 2, 64, OTHER, "3.0.0", 1.0, 2.0)
    write_table(table, [elsewhere, before])
    gpu = FakeGpu({SHIPPED: 1.0, FAST: 0.8, OTHER: 0.9})
    assert gpu.tune(table)[0] == FAST
    want = TileRow("Planted GPU", "attention_fwd", 2, 64, FAST, triton.__version__, 800.0, 1000.0)
    assert tiles.read_table(table, by="device") == [elsewhere, want]
    assert tiles.find_on("attention_fwd", 90, "Planted GPU", 2, 33) == FAST
    assert tiles.find_on("attention_fwd", 90, "Third GPU", 2, 33) == SHIPPED
    assert gpu.timed.count(SHIPPED) == gpu.timed.count(FAST) == search.ROUNDS + search.FINAL_ROUNDS


@pytest.mark.parametrize("output", [1.05, float("nan"), float("inf")])
def test_a_tile_that_computes_something_else_is_left_out_loudly(table, capsys, output) -> None:
    gpu = FakeGpu({SHIPPED: 1.0, FAST: 0.5, OTHER: 0.9}, {FAST: output})
    tile, report = gpu.tune(table)
    assert tile == OTHER
    assert FAST not in gpu.timed
    assert report.wrong == ["attention_fwd bf16 64 q=64 k=64 warps=4 stages=3"]
    message = "report: the result of attention_fwd bf16 64 q=64 k=64 warps=4 stages=3 differs"
    assert message in capsys.readouterr().err


def test_two_roundings_are_no_difference() -> None:
    x = torch.randn(4096)
    rounded = (x * (1 + 2**-9)).bfloat16()
    assert 0 < difference(rounded, x) < search.TOLERANCES["bf16"]
    assert difference(torch.zeros(3), torch.zeros(3)) == 0
    a, b = torch.randn(64, 640), torch.randn(640, 64)
    without_one_step_of_64 = difference(a[:, 10:] @ b[10:], a @ b)
    assert without_one_step_of_64 > 5 * search.TOLERANCES["bf16"]


def test_tiles_that_spill_do_not_fit_or_do_not_compile_are_never_run(table, capsys) -> None:
    spilled, none = dataclasses.replace(GOOD, stack=8), dataclasses.replace(GOOD, occupancy=0)
    third = AttentionTile(128, 64, 4, 2)
    compiled = {FAST: [GOOD, spilled], OTHER: [none], third: "CompilationError: at 1:2"}
    gpu = FakeGpu({SHIPPED: 1.0, FAST: 0.5, OTHER: 0.6, third: 0.7}, compiled=compiled)
    assert gpu.tune(table)[0] == SHIPPED
    assert not {FAST, OTHER, third} & {*gpu.timed}
    refused = triton.OutOfResources(300_000, 232_448, "shared memory")
    gpu = FakeGpu({SHIPPED: 1.0, FAST: 0.5, OTHER: 0.6}, {FAST: refused})
    assert gpu.tune(table)[0] == OTHER
    assert "q=64 k=64 warps=4 stages=3 does not launch: out of res" in capsys.readouterr().err


def test_a_shipped_tile_that_does_not_compile_is_an_error(table) -> None:
    with pytest.raises(ValueError, match=r"fwd bf16 64: the shipped tile does not compile: bad"):
        FakeGpu({}, compiled={SHIPPED: "bad"}).tune(table)


def test_who_was_only_lucky_in_the_first_pass_loses_in_the_second(table) -> None:
    tried = len(candidates(FWD, TARGETS["sm_90"], 2)) * search.ROUNDS
    lucky = {FAST: lambda timed: 0.5 if timed <= tried else 1.1}
    assert FakeGpu({SHIPPED: 1.0, OTHER: 0.9} | lucky).tune(table)[0] == OTHER


def test_a_products_residents_are_what_the_compiler_says_fit(table) -> None:
    problem = Problem("gemm", "bf16", "heavy")
    shipped = problem.shipped(90)
    assert resident(shipped, [GOOD, dataclasses.replace(GOOD, occupancy=5)]).residents == 2
    assert resident(SHIPPED, [GOOD]) == SHIPPED
    fast = shipped._replace(m=64, residents=2)
    tile, _ = FakeGpu({shipped: 1.0, fast: 0.7}).tune(table, problem)
    assert tile == fast == tiles.find_on("gemm", 90, "Planted GPU", 2, "heavy")
    large = tiles.find_on("gemm", 90, "Planted GPU", 2, "large")
    assert large == dataclasses.replace(problem, kind="large").shipped(90)


def test_a_row_is_begun_in_the_minutes_that_are_given_and_none_after(table, monkeypatch) -> None:
    clock = iter(range(0, 1000, 100))  # in seconds, at each reading
    monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    todo = problems(("attention_fwd", "attention_dq"), ("bf16",), (32, 64, 128))
    report = tune(todo, FakeGpu({}).bench(), table, minutes=5, steps=1)
    assert [row.problem for row in report.rows] == todo[:3]
    assert report.left_out == [str(problem) for problem in todo[3:]]


def test_a_broken_table_is_refused_before_anything_is_measured(table) -> None:
    table.write_text("{}")
    gpu = FakeGpu({})
    with pytest.raises(ValueError, match=r"tiles\.json cannot be used"):
        gpu.tune(table)
    assert not gpu.timed
    assert table.read_text() == "{}"


def test_rows_replace_those_of_their_key_only(tmp_path) -> None:
    path = tmp_path / "new" / "tiles.json"
    first, second = (TileRow("X", "attention_fwd", 2, D, FAST, "3") for D in (64, 128))
    add_rows(path, [first, second])
    add_rows(path, [dataclasses.replace(second, tile=OTHER)])
    rows = tiles.read_table(path, by="device")
    assert [row.tile for row in rows] == [FAST, OTHER]


def test_one_kernel_for_the_backward_gets_a_row_only_where_it_is_faster(table) -> None:
    """A row from an earlier measurement goes if it is slower now; others stay."""
    problem = Problem("attention_bwd", "bf16", 64)
    other = TileRow("Other GPU", "attention_bwd", 2, 64, FUSED, "3.0.0")
    mine = dataclasses.replace(other, where="Planted GPU")
    write_table(table, [other, mine])
    assert FakeGpu({None: 1.0, FUSED: 1.1}).tune(table, problem)[0] is None
    assert tiles.read_table(table, by="device") == [other]
    gpu = FakeGpu({None: 1.0, FUSED: 0.8})
    tile, report = gpu.tune(table, problem)
    assert tile == FUSED == tiles.find_on("attention_bwd", 90, "Planted GPU", 2, 64)
    assert "(separate kernels) 1000.0 us -> q=64 k=128 warps=8" in str(report.rows[0])


def test_it_is_compared_with_the_best_tiles_of_the_kernels_that_it_replaces(table) -> None:
    todo = problems(("attention_bwd", "attention_dq", "attention_dkdv"), ("bf16",), (64,))
    assert [problem.kernel for problem in todo[:2]] == ["attention_dq", "attention_dkdv"]
    fast = [problem.shipped(90)._replace(stages=1) for problem in todo[:2]]
    tune(todo[:2], FakeGpu(dict.fromkeys(fast, 0.5)).bench(), table, minutes=1)
    gpu = FakeGpu({})
    tune(todo[2:], gpu.bench(), table, minutes=1)
    assert gpu.replaced == fast


# ---------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is none; pass --dry --target sm_90 to only list the tiles that compile"),
        (["--dry", "--output", "x.json"],
         "--dry does not write a table; leave out --output x.json"),
        (["--head-dims", "64", "257"], "head dims must be 1..256, got [257]"),
        (["--steps", "0"], "steps must be 1 or 2, got 0"),
        (["--minutes", "0"], "minutes must be in (0, 1440], got 0.0"),
        (["--dry"], "needs Triton with TRITON_INTERPRET unset"),
        (["--target", "sm_80"],
         "--target sm_80 requires --dry: without it, tune measures this GPU"),
        (["--dry", "--kernels"], "nothing to tune: --kernels, --dtypes, or --head-dims is empty"),
    ],
)  # fmt: skip
def test_it_says_in_one_line_what_it_cannot_do(capsys, table, arguments, message) -> None:
    error = exits(lambda: command.run(parse(arguments)), capsys)
    assert message in error
    assert (error[:11], error.count("\n")) == ("warpweave: ", 0)
    assert not table.exists()


def test_it_prints_old_against_new_and_sums_up(table, capsys) -> None:
    gpu = FakeGpu({SHIPPED: 1.0, FAST: 0.8}, {OTHER: 1.05})
    config = TuneConfig(kernels=("attention_fwd",), head_dims=(64, 256), steps=1)
    summary = tune_here(config, gpu.bench)
    first, second = capsys.readouterr().out.splitlines()
    assert " ".join(first.split()) == (
        "attention_fwd bf16 64 q=128 k=64 warps=4 stages=3 1000.0 us -> "
        "q=64 k=64 warps=4 stages=3 800.0 us, 1.250 times as fast"
    )
    assert second.endswith("q=128 k=64 warps=8 stages=2 1500.0 us, unchanged")
    assert summary.pop("seconds") >= 0
    assert summary == {
        "device": "Planted GPU", "table": table.name, "triton": triton.__version__, "tuned": 2,
        "changed": 1, "wrong": [f"{FWD} {search.short(OTHER)}"], "left_out": [],
    }  # fmt: skip
    other = table.parent / "elsewhere.json"
    config = dataclasses.replace(config, output=other)
    late = tune_here(dataclasses.replace(config, minutes=1e-9), gpu.bench)
    assert late["left_out"] == ["attention_fwd bf16 64", "attention_fwd bf16 256"]
    assert (late["tuned"], tiles.read_table(other, by="device")) == (0, [])
    todo = config.problems()
    assert {*gpu.timed} <= {t for p in todo for t in candidates(p, TARGETS["sm_90"], config.steps)}
    tune_here(config, gpu.bench)
    assert tiles.read_table(other, by="device") == tiles.read_table(table, by="device")


def test_dry_run_reports_each_tiles_worst_kernel_shipped_tile_first(monkeypatch, capsys) -> None:
    second = dataclasses.replace(GOOD, registers=99, shared=70_000, occupancy=1)
    spilled = dataclasses.replace(GOOD, stack=8)
    compiled = {FAST: [GOOD], SHIPPED: [GOOD, second], OTHER: [spilled]}

    def compile_tile(target, problem, tile):
        assert (target, problem) == ("sm_90", FWD)
        return compiled.get(tile, "does not compile")

    monkeypatch.setattr(command, "compile_tile", compile_tile)
    config = TuneConfig(kernels=("attention_fwd",), head_dims=(64,), steps=1, dry=True)
    summary = command.dry_run(config)
    worst = {"registers": 128, "shared": 70_000, "occupancy": 1}
    alone = {"registers": 128, "shared": 65_536, "occupancy": 2}
    assert summary["rows"] == [
        {"problem": str(FWD), "tile": tile._asdict(), **figures}
        for tile, figures in ((SHIPPED, worst), (FAST, alone))
    ]
    lines = capsys.readouterr().out.splitlines()[-2:]
    assert ["(shipped)" in line for line in lines] == [True, False]
    assert " ".join(lines[0].split()).startswith(
        "attention_fwd bf16 64 q=128 k=64 warps=4 stages=3 registers 128 shared 70000 occupancy 1"
    )
    assert (summary["tuned"], summary["left_out"], summary["table"]) == (0, [], None)
    late = command.dry_run(dataclasses.replace(config, minutes=1e-9))
    assert (late["rows"], late["left_out"]) == ([], [str(FWD)])


def test_what_is_said_of_a_compiled_kernel_is_what_the_tools_print_of_it(monkeypatch) -> None:
    printed = "Function k:\n REG:40 STACK:8 SHARED:0 LOCAL:16 CONSTANT[0]:500 TEXTURE:0"
    monkeypatch.setattr(aot, "run_tool", lambda tool, option, cubin: printed)
    metadata = SimpleNamespace(num_warps=4, shared=50_000)
    kernel = SimpleNamespace(asm={"cubin": b"", "ptx": "bar.sync"}, metadata=metadata)
    arguments = {"x": torch.ones(1), "BLOCK": 64, "CAUSAL": True, "scale": 0.5, "name": "a"}
    found = aot._compiled(TARGETS["sm_90"], "k", kernel, (3, 4), arguments)
    constants = {"BLOCK": 64, "CAUSAL": True, "scale": 0.5}
    assert found == Compiled("k", 12, constants, 4, 40, 24, 50_000, 4, kernel.asm)
    kernel.ptxas_log = "(C7510) waits"
    found = aot._compiled(TARGETS["sm_90"], "k", kernel, lambda meta: (1,), {})
    assert (found.programs, found.log) == (0, "(C7510) waits")


def test_the_default_is_every_kernel_in_bf16() -> None:
    assert len(TuneConfig().problems()) == 3 * 3 + 3


DRY = """
from warpweave.kernels.runtime.tile_table import AttentionTile, GemmTile
from warpweave.machine.tune.calls import Problem
from warpweave.machine.tune import candidates, command
from warpweave.machine.tune.candidates import around, compile_tile, fault, first_fault
from warpweave.machine.tune.options import parse
fwd, product = Problem("attention_fwd", "bf16", 128), Problem("gemm", "bf16", "large")
tile, wide = AttentionTile(128, 128, 4, 2), GemmTile(128, 256, 128, 8, 1, 8, 3)
print(first_fault("sm_90", fwd, tile))
print(fault(compile_tile("sm_90", product, wide), product))
candidates.around = lambda tile, steps: around(tile, steps)[:3]  # of ten
words = "--dry --target sm_80 --kernels attention_dq --head-dims 64 --steps 1"
command.run(parse(words.split()))
"""


def test_dry_lists_the_tiles_that_compile_and_writes_nothing(tmp_path, table) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "cache")
    command = [sys.executable, "-P", "-c", DRY]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    full, wide, *words, last = done.stdout.splitlines()
    rows = words[3:]
    assert full.startswith("full: spills ")
    assert re.search(r"2949\d\d bytes of shared memory", wide)  # with its copies' barriers
    summary = json.loads(last)
    assert (summary["dry"], summary["target"], summary["table"]) == (True, "sm_80", None)
    assert len(rows) == len(summary["rows"]) >= 2
    shipped = tiles.find_on("attention_dq", 80, "", 2, 64)._asdict()
    assert [row["tile"] == shipped for row in summary["rows"]] == [True] + [False] * len(rows[1:])
    assert ["(shipped)" in line for line in rows] == [True] + [False] * len(rows[1:])
    assert all(row["occupancy"] >= 1 and row["registers"] <= 255 for row in summary["rows"])
    assert not table.exists()
