"""Fused or apart: both ways give the same values and gradients, the one that is predicted to be
faster runs, and what is said of it is what was predicted."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from close import assert_close_f64, assert_error_budget

from warpweave.kernels import mlp, qkv, reference
from warpweave.kernels.activation import ACTIVATIONS, activation_fwd
from warpweave.kernels.cross_entropy import linear
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import epilogue, fused
from warpweave.kernels.mlp import explain_mlp, hidden
from warpweave.kernels.qkv import kernels, qkv_rope
from warpweave.kernels.rope import rope_table
from warpweave.kernels.runtime import fusion
from warpweave.kernels.runtime.fusion import Fusion, Rates, choose_way, explain
from warpweave.tune.clock import predict as model
from warpweave.tune.clock.predict import CLOCK, CONSTANTS, START, Kernel, Work
from warpweave.tune.parts import PARTS

ROOT = Path(__file__).resolve().parent.parent
CHEAP, DEAR = Rates(1.0, 1.0, 0.0), Rates(2.0, 2.0, 0.0)
NAMES = [op for _, op in fusion.shipped()]


@pytest.fixture
def gpu(monkeypatch):
    """gpu(way, op): this CPU passes for an H100 on which `way` is predicted to win, always but for
    `op`; the list that it returns holds the fused kernels that are launched."""

    def use(way: str, other: str = "") -> list[str]:
        ways = {"fused": (CHEAP, DEAR), "apart": (DEAR, CHEAP)}
        rates, others = ways.pop(way), *ways.values()
        table = {(90, op): Fusion(90, op, 0, *(others if op == other else rates)) for op in NAMES}
        monkeypatch.setattr(fusion, "shipped", lambda: table)
        monkeypatch.setattr(fusion, "capability", lambda device: 90)
        choose = fusion.choose
        for name, module in list(sys.modules.items()):
            if name.startswith("warpweave.") and getattr(module, "choose", None) is choose:
                monkeypatch.setattr(module, "choose", lambda impl, *given: impl or "triton")
        ran: list[str] = []
        for module in (epilogue, hidden, kernels):
            find, name = module.find_tile, module.__name__.rpartition(".")[2]
            monkeypatch.setattr(
                module, "find_tile", lambda *a, f=find, n=name: (ran.append(n), f(*a))[1]
            )
        return ran

    return use


# ---------------------------------------------------------------- both ways are equal


def _mlp(activation: str, dtype: torch.dtype = torch.float16):
    """x, W1, W2, b1, b2, residual, dy; and what drops out."""
    T, E, F = 37, 20, 24
    units = (F, 2) if ACTIVATIONS[activation].gated else (F,)
    shapes = [(T, E), (*units, E), (E, F), units, (E,), (T, E), (T, E)]
    drawn = [torch.randn(s, dtype=torch.float64) for s in shapes]
    drawn[1], drawn[2] = drawn[1] / E**0.5, drawn[2] / F**0.5
    drop = Drop(0.3, 2**40 + 5, 3, torch.arange(T) * 7919)
    return [t.to(dtype) for t in drawn], drop


def _run(op, tensors, **options):
    *given, dy = (t.detach() for t in tensors)
    *given, residual = (t.requires_grad_() for t in given)
    y = op(*given, residual=residual, **options)
    return y, *torch.autograd.grad(y, (*given, residual), dy)


def _check_mlp(activation: str, **how) -> None:
    tensors, drop = _mlp(activation)
    options = {"activation": activation, "drop": drop}
    ours = _run(mlp.mlp, tensors, **options, **how)
    same = _run(reference.mlp, tensors, **options)
    truth = _run(reference.mlp, [t.double() for t in tensors], **options)
    for a, b, t in zip(ours, same, truth, strict=True):
        assert a.dtype == torch.float16
        assert_error_budget(a, b, t)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("way", ["fused", "apart"])
def test_an_mlp_is_right_either_way_and_takes_the_faster(way, activation, gpu) -> None:
    ran = gpu(way)
    _check_mlp(activation)
    assert ran == (["epilogue", "epilogue", "hidden"] if way == "fused" else [])


@pytest.mark.parametrize("recompute", ["nothing", "up"])
@pytest.mark.parametrize("way", ["fused", "apart"])
def test_what_is_recomputed_is_made_the_same_way(way, recompute, gpu) -> None:
    ran = gpu(way)
    _check_mlp("swiglu", recompute=recompute)
    again = ["epilogue"] * (recompute == "up")
    assert ran == (["epilogue", "epilogue", *again, "hidden"] if way == "fused" else [])


@pytest.mark.parametrize("way", ["fused", "apart"])
def test_a_compiler_of_any_length_finds_no_way_while_it_traces(way, gpu) -> None:
    ran, options = gpu(way), {"activation": "swiglu", "recompute": "up"}
    (x, *weights), _ = _mlp("swiglu")
    given = [x, *(t.requires_grad_() for t in weights[:2])]
    compiled = torch.compile(mlp.mlp, backend="aot_eager", fullgraph=True, dynamic=True)
    found = [
        torch.autograd.grad(op(*given, **options).float().sum(), given[1:])
        for op in (mlp.mlp, compiled)
    ]
    assert all(map(torch.equal, *found))
    once = ["epilogue", "epilogue", "hidden"]  # y's product has nothing to fuse
    assert ran == (once * 2 if way == "fused" else [])


@pytest.mark.parametrize("impl", ["torch", None])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_float32_of_16_bits_is_not_rounded_apart_either(activation, impl, gpu) -> None:
    gpu("apart")
    (x, up, *_), _ = _mlp(activation)
    given = (x, up.flatten(0, -2).t())
    options = {"activation": activation, "out_dtype": torch.float32}
    y, _ = fused.fused_gemm(*given, **options, impl=impl)
    _, z = fused.fused_gemm(*given, activation=activation, save_z=True, impl=impl)
    assert_close_f64(y, activation_fwd(z.double(), activation, impl="torch"), 1e-6)


PRODUCTS = {  # of an MLP, and the recompute with which each is among them
    "swiglu": "activation",
    "dropout and residual": "activation",
    "slope of swiglu": "activation",
    "slope of swiglu, h kept": "nothing",
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_each_product_is_decided_by_its_own_row(product, gpu, monkeypatch) -> None:
    ran, how = gpu("fused", product), set[str]()
    for place, name in ((fused, "activation_fwd"), (fused, "dropout"), (hidden, "activation_bwd")):
        half = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *a, impl, f=half: (how.add(impl), f(*a, impl=impl))[1]
        )
    _check_mlp("swiglu", recompute=PRODUCTS[product])
    slope = product.startswith("slope")
    assert ran == (["epilogue", "epilogue"] if slope else ["epilogue", "hidden"])
    assert how == {"triton"}  # what follows torch's product is ours


def test_apart_too_h_is_made_where_it_is_wanted(gpu) -> None:
    gpu("apart")
    (_, _, down, *_, dy), _ = _mlp("swiglu")
    for wanted in (True, False):
        _, h = hidden.hidden_bwd(dy, down, dy.new_ones(37, 48), activation="swiglu",
                                 want_hidden=wanted)  # fmt: skip
        assert (h is not None) == wanted


def test_who_asks_for_the_kernel_gets_it_and_float32_is_not_predicted(gpu) -> None:
    ran = gpu("apart")
    _check_mlp("gelu", impl="triton")
    tensors, _ = _mlp("gelu", torch.float32)
    _run(mlp.mlp, tensors, activation="gelu")
    assert ran == ["epilogue", "epilogue", "hidden"] * 2


def _qkv(dtype: torch.dtype, turned: bool, impl: str | None = None):
    torch.manual_seed(1)
    x, w = torch.randn(2, 9, 20).double(), torch.randn(2, 4, 8, 20).double() / 5
    given = [t.to(dtype).requires_grad_() for t in (x, w, torch.randn(2, 4, 8).double())]
    table = rope_table(torch.arange(9), 8) if turned else (None, None)
    found = qkv_rope(*given, *table, impl=impl)
    dy = [torch.randn(t.shape, dtype=torch.float64).to(dtype) for t in found]
    return *found, *torch.autograd.grad(found, given, dy)


def _check_qkv(turned: bool) -> None:
    truth, same = (_qkv(d, turned, "torch") for d in (torch.float64, torch.float16))
    ours = _qkv(torch.float16, turned)
    assert all(t.is_contiguous() for t in ours[:3])  # as attention reads them
    for a, b, t in zip(ours, same, truth, strict=True):
        assert_error_budget(a, b, t)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("way", ["fused", "apart"])
def test_qkv_is_right_either_way_and_takes_the_faster(way, turned, gpu) -> None:
    ran = gpu("fused" if way == "apart" else "apart", "qkv")  # all others the other way
    _check_qkv(turned)
    assert ran == (["kernels"] if way == "fused" else [])


def _no_bias(product):
    return lambda a, b, bias, dtype: product(a, b, None, dtype)


def _other(half):
    return lambda *given, **options: half(*given[:-1], "geglu", **options)


def _added_twice(dropout):
    return lambda y, drop, **options: dropout(dropout(y, drop, **options), drop, **options)


FAULTS = {
    "the bias is forgotten": (fused.gemm_cpu, "product", _no_bias),
    "another activation": (fused, "activation_fwd", _other),
    "another slope": (hidden, "activation_bwd", _other),
    "h of another": (hidden, "activation_fwd", _other),
    "dropped out twice": (fused, "dropout", _added_twice),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slip_apart_is_noticed(fault, gpu, monkeypatch) -> None:
    gpu("apart")
    place, name, broken = FAULTS[fault]
    monkeypatch.setattr(place, name, broken(getattr(place, name)))
    with pytest.raises(AssertionError):
        _check_mlp("swiglu")


def test_keys_that_are_not_turned_are_noticed(gpu, monkeypatch) -> None:
    gpu("apart")
    turn = kernels.rope_qk_fwd

    def broken(q, k, *table, impl):
        turned = turn(q, k, *table, impl=impl)
        return turned if impl == "torch" else (turned[0], k)

    monkeypatch.setattr(kernels, "rope_qk_fwd", broken)
    with pytest.raises(AssertionError):
        _check_qkv(True)


# ---------------------------------------------------------------- the choice


def _only(monkeypatch, **rates: Rates) -> None:
    row = Fusion(90, "gelu", 10_000, **rates)
    monkeypatch.setattr(fusion, "shipped", lambda: {row.key: row})


def test_the_smaller_prediction_is_taken_and_said(monkeypatch) -> None:
    # Worked out by hand: 2e9 FLOPs at 1 and 2 fs; 1e6 elements at 4,000 and 1,500 ps; 500 us.
    _only(monkeypatch, fused=Rates(2.0, 1500.0, 0.0), apart=Rates(1.0, 4000.0, 500.0))
    where = {"dtype": torch.bfloat16, "arch": 90}
    assert explain("gelu", 1000, 1000, 1000, **where) == (
        "gelu of [1000, 1000] [1000, 1000]: one Triton kernel; PREDICTED 1.504 ms fused, "
        "4.502 ms apart"
    )
    deep = choose_way("gelu", 1000, 1000, 1_500_001, **where)  # 3,000 us are 3e12 FLOPs at 1 fs
    assert not deep.fused
    assert choose_way("gelu", 1000, 1000, 1_499_999, **where).fused
    for op, M, more in (
        ("swiglu", 1000, {}),
        ("gelu", 9, {}),
        ("gelu", 1000, {"arch": 120}),
        ("gelu", 1000, {"dtype": torch.float32}),
    ):
        way = choose_way(op, M, 1000, 1_500_001, **where | more)
        assert way.fused, more
        assert way.why.startswith("nothing is predicted")
    least = [choose_way("gelu", M, 100, 10**9, **where).why[:7] for M in (99, 100)]
    assert least == ["nothing", "PREDICT"]  # from 10,000 elements on


def test_an_mlp_explains_each_of_its_products() -> None:
    x, up, down = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in
                   ((2, 8192, 4096), (14336, 2, 4096), (4096, 14336)))  # fmt: skip
    options = {"activation": "swiglu", "residual": x, "arch": 90}
    assert explain_mlp(x, up, down, **options) == [
        explain(op, 16384, *sizes, dtype=x.dtype, arch=90)
        for op, *sizes in (
            ("swiglu", 28672, 4096), ("residual", 4096, 14336), ("slope of swiglu", 14336, 4096)
        )
    ]  # fmt: skip
    nothing = Drop(0.0, 0, 0, torch.arange(16384))
    for more in ({"drop": nothing, "residual": None}, {"residual": x.float()}):
        assert len(explain_mlp(x, up, down, **options | more)) == 2  # nothing to fuse with y
    with pytest.raises(ValueError, match="recompute must be one of"):
        explain_mlp(x, up, down, **options, recompute="all")
    assert explain_mlp(x, up, down, **options | {"impl": "triton"}) == ["mlp: triton, asked for"]
    x, up, down = (torch.empty(s) for s in ((2, 3), (4, 3), (3, 4)))
    assert explain_mlp(x, up, down, activation="gelu") == ["mlp: torch, as on every cpu"]
    assert "nothing is predicted" in explain_mlp(x, up, down, activation="gelu", arch=90)[0]


ROW = {"capability": 90, "op": "gelu", "least": 1, "fused": [1.0, 1.0, 1.0], "apart": [1.0] * 3}


@pytest.mark.parametrize("wrong", [{"more": 1}, {"fused": [1.0, -1.0, 0.0]}, {"apart": [1.0, 2.0]},
                                   {"apart": [1.0, 2.0, "3"]}, {"fused": 3}, {"least": "1"},
                                   {"least": -1}, {"op": ["gelu"]}, {"capability": 9.0}]
)  # fmt: skip
def test_a_broken_table_is_one_line_that_names_file_and_row(wrong, tmp_path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"format": fusion.FORMAT, "rows": [ROW]}))
    assert fusion.read_table(path)[90, "gelu"].apart == Rates(1.0, 1.0, 1.0)
    path.write_text(json.dumps({"format": fusion.FORMAT, "rows": [ROW | wrong]}))
    with pytest.raises(ValueError, match=r"the fusion table .* cannot be used: row 1: "):
        fusion.read_table(path)


# ---------------------------------------------------------------- predictions


@pytest.fixture(scope="module")
def script():
    """benchmarks/fusion.py."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("fusion")
    sys.path.remove(str(ROOT / "benchmarks"))


def test_rates_are_the_clocks_own_prediction(script) -> None:
    """Of whole waves of tiles, at any depth; on A100 stalls beyond a plain kernel's come on top,
    of two warps a scheduler in each of three waves."""
    for target in ("sm_80", "sm_90", "sm_100"):
        part = PARTS[target]
        kernel = Kernel(5e5, 500.0, 400, 3072.0, 3000, warps=8, occupancy=1, shared=147456)
        rates = script.fused_rates(kernel, (128, 256), 1000, part)
        for K in (1024, 8192):
            M, N = 128 * part.processors, 256 * 3
            work = Work(3 * part.processors, 2.0 * M * N * K)
            beyond = 0.0
            if target == "sm_80":
                beyond = 3 * 2 * 2000 * CONSTANTS[80].stalls / CLOCK[80] * 1e6
            want = model.predict(kernel, work, part).us + beyond
            assert rates.us(M, N, K) == pytest.approx(want, rel=1e-9)


def test_a_product_apart_is_fitted_and_its_passes_are_bytes(script) -> None:
    part = PARTS["sm_90"]
    start = START / CLOCK[90] * 1e6
    planted = Rates(1.5, 0.2, start)
    sizes = [(8192, 8192, K) for K in (512, 4096, 16384)]
    published = [(*s, 2e-6 * s[0] * s[1] * s[2] / planted.us(*s)) for s in sizes]
    fitted = script.fit_product(published, part)
    assert fitted == pytest.approx(planted)
    apart = script.apart_rates(fitted, (4.0, 6.0), part)
    assert apart == pytest.approx((1.5, 0.2 + 10 / (0.9 * 3.35e12) * 1e12, 3 * start))
    square = [(n, n, n, 200.0 + n / 1000) for n in (2048, 4096)]  # faster where it is smaller
    assert script.fit_product([(*s[:3], 400 - s[3]) for s in square], part).element == 0.0


def test_what_is_published_is_what_dispatch_takes(script) -> None:
    """Each row of fusion.md is the packaged row's, and says what is taken."""
    text = (script.RESULTS / "fusion.md").read_text()
    for target in script.TARGETS:
        part, cases = PARTS[target], script.cases()
        rows = {op: row for (arch, op), row in fusion.shipped().items() if arch == part.arch}
        assert [*rows] == [name for name in cases if "z not" not in name]
        for line in script.words(target, rows, script.cublas(target)).splitlines():
            assert line in text
            if (name := line.split(" | ")[0].strip("| ")) in rows:
                way = choose_way(name, *cases[name].sizes, dtype=torch.bfloat16, arch=part.arch)
                assert line.endswith("| fused |" if way.fused else "| apart |")


FIGURES = re.compile(r"(\w[\w ]*): epilogue ([\d.]+) ms, passes ([\d.]+) ms")
SAID = {fused: 3, hidden: 2, qkv: 1}


@pytest.mark.parametrize("module", SAID, ids=lambda module: module.__name__)
def test_docstrings_say_what_is_published_of_an_h100(module, script) -> None:
    rows = (script.RESULTS / "fusion.md").read_text().partition("## H100")[2].partition("\n## ")[0]
    said = FIGURES.findall(" ".join(module.__doc__.split()))
    assert len(said) == SAID[module]
    for op, own, passes in said:
        (row,) = (line for line in rows.splitlines() if line.startswith(f"| {op} |"))
        assert row.split(" | ")[2:4] == [own, passes], op


def test_the_loss_head_says_what_its_passes_take(script) -> None:
    """Statistics read each logit, gradients read it and write it; four products."""
    logits, part = 16384 * 128256, PARTS["sm_90"]
    passes = (2 + 4) * logits / (script.REACHED * part.bandwidth) * 1e3
    row = fusion.shipped()[90, "bias"].apart
    products = 4 * row.us(16384, 128256, 4096) / 1e3
    said = re.search(
        r"passes ([\d.]+) ms beside products of ([\d.]+) ms",
        " ".join(linear.__doc__.split()),
    )
    assert [float(x) for x in said.groups()] == [round(passes, 1), round(products, 1)]
