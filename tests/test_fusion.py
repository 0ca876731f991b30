"""Fused or unfused: both give the same values and gradients, and the table selects which runs."""

import re
import sys
from pathlib import Path

import pytest
import torch
from close import assert_close_f64, assert_error_budget
from plants import Plant, planted
from well_formed import told_right

from warpweave.kernels import mlp, reference
from warpweave.kernels.activation import ACTIVATIONS, activation_fwd
from warpweave.kernels.dropout import Drop
from warpweave.kernels.gemm import epilogue, fused
from warpweave.kernels.mlp import hidden
from warpweave.kernels.qkv import kernels, qkv_rope
from warpweave.kernels.qkv.kernels import _launch_qkv_fwd
from warpweave.kernels.rope import rope_table
from warpweave.kernels.runtime import fusion
from warpweave.kernels.runtime.fusion import FUSED, fused_or_unfused

SAVED = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "clock" / "fusion.md"
OPS = (
    *ACTIVATIONS, *(f"slope of {name}" for name in ACTIVATIONS),
    "dropout", "residual", "dropout and residual", "qkv", "bias",
)  # fmt: skip


@pytest.fixture
def gpu(monkeypatch):
    """Return gpu(way, op): it makes this CPU pass for an H100 on which everything except `op` runs
    that `way`, and returns a list that fills with the fused kernels that are launched."""

    def use(way: str, other: str = "") -> list[str]:
        ops = tuple(op for op in OPS if (way == "fused") != (op == other))
        monkeypatch.setattr(fusion, "FUSED", {90: ops})
        monkeypatch.setattr(fusion, "capability", lambda device: 90)
        choose = fusion.choose
        for name, module in list(sys.modules.items()):
            if name.startswith("warpweave.") and getattr(module, "choose", None) is choose:
                monkeypatch.setattr(module, "choose", lambda impl, *given: impl or "triton")
        ran: list[str] = []
        for module in (epilogue, hidden, kernels):
            find, name = module.find_tile, module.__name__.rpartition(".")[2]
            spy = lambda *a, f=find, n=name: (ran.append(n), f(*a))[1]  # noqa: E731
            monkeypatch.setattr(module, "find_tile", spy)
        return ran

    return use


# ---------------------------------------------------------------- both ways are equal


def _mlp(activation: str, dtype: torch.dtype = torch.float16):
    """Draw x, W1, W2, b1, b2, residual, dy; and the dropout."""
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
@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_an_mlp_is_right_either_way_and_takes_what_the_table_says(way, activation, gpu) -> None:
    ran = gpu(way)
    _check_mlp(activation)
    assert ran == (["epilogue", "epilogue", "hidden"] if way == "fused" else [])


@pytest.mark.parametrize("recompute", ["nothing", "up"])
@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_what_is_recomputed_is_made_the_same_way(way, recompute, gpu) -> None:
    ran = gpu(way)
    _check_mlp("swiglu", recompute=recompute)
    again = ["epilogue"] * (recompute == "up")
    assert ran == (["epilogue", "epilogue", *again, "hidden"] if way == "fused" else [])


@pytest.mark.parametrize("way", ["fused", "unfused"])
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
def test_float32_of_16_bits_is_not_rounded_unfused_either(activation, impl, gpu) -> None:
    gpu("unfused")
    (x, up, *_), _ = _mlp(activation)
    given = (x, up.flatten(0, -2).t())
    options = {"activation": activation, "out_dtype": torch.float32}
    y, _ = fused.fused_gemm(*given, **options, impl=impl)
    _, z = fused.fused_gemm(*given, activation=activation, save_z=True, impl=impl)
    assert_close_f64(y, activation_fwd(z.double(), activation, impl="torch"), 1e-6)


@pytest.mark.parametrize(
    ("product", "recompute"),
    [
        ("swiglu", "activation"), ("dropout and residual", "activation"),
        ("slope of swiglu", "activation"), ("slope of swiglu", "nothing"),
    ],
)  # fmt: skip
def test_each_product_is_decided_by_its_own_row(product, recompute, gpu, monkeypatch) -> None:
    ran, how = gpu("fused", product), set[str]()
    for place, name in ((fused, "activation_fwd"), (fused, "dropout"), (hidden, "activation_bwd")):
        half = getattr(place, name)
        spy = lambda *a, impl, f=half: (how.add(impl), f(*a, impl=impl))[1]  # noqa: E731
        monkeypatch.setattr(place, name, spy)
    _check_mlp("swiglu", recompute=recompute)
    slope = product.startswith("slope")
    assert ran == (["epilogue", "epilogue"] if slope else ["epilogue", "hidden"])
    assert how == {"triton"}  # the part after torch's product is ours


def test_unfused_too_h_is_made_where_it_is_wanted(gpu) -> None:
    gpu("unfused")
    (_, _, down, *_, dy), _ = _mlp("swiglu")
    for wanted in (True, False):
        _, h = hidden.hidden_bwd(dy, down, dy.new_ones(37, 48), activation="swiglu",
                                 want_hidden=wanted)  # fmt: skip
        assert (h is not None) == wanted


def test_who_asks_for_the_kernel_gets_it_and_float32_is_fused(gpu) -> None:
    ran = gpu("unfused")
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
    assert all(t.stride(3) == 1 for t in ours[:3])  # the layout that attention reads
    if turned:  # a view would keep the product, queries and keys included, until the backward
        assert all(t.untyped_storage().nbytes() == t.nbytes for t in ours[:3])
    for a, b, t in zip(ours, same, truth, strict=True):
        assert_error_budget(a, b, t)


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("way", ["fused", "unfused"])
def test_qkv_is_right_either_way_and_takes_what_the_table_says(way, turned, gpu) -> None:
    ran = gpu("fused" if way == "unfused" else "unfused", "qkv")  # all others run the other way
    _check_qkv(turned)
    assert ran == (["kernels"] if way == "fused" else [])
    x, w = torch.randn(2, 9, 20).half(), torch.randn(2, 4, 8, 20).half()
    table = rope_table(torch.arange(9), 8) if turned else (None, None)
    told_right(_launch_qkv_fwd, x, w, None, *table, None, "auto")


def _no_bias(product):
    return lambda a, b, bias, dtype: product(a, b, None, dtype)


def _other(half):
    return lambda *given, **options: half(*given[:-1], "geglu", **options)


def _added_twice(dropout):
    return lambda y, drop, **options: dropout(dropout(y, drop, **options), drop, **options)


FAULTS = {
    "the bias is forgotten": Plant(fused.gemm_cpu, "product", _no_bias),
    "another activation": Plant(fused, "activation_fwd", _other),
    "another slope": Plant(hidden, "activation_bwd", _other),
    "h of another": Plant(hidden, "activation_fwd", _other),
    "dropped out twice": Plant(fused, "dropout", _added_twice),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_slip_unfused_is_noticed(fault, gpu) -> None:
    gpu("unfused")
    with planted(FAULTS[fault]), pytest.raises(AssertionError):
        _check_mlp("swiglu")


def _keys_not_turned(turn):
    def broken(q, k, *table, impl):
        turned = turn(q, k, *table, impl=impl)
        return turned if impl == "torch" else (turned[0], k)

    return broken


def test_keys_that_are_not_turned_are_noticed(gpu) -> None:
    gpu("unfused")
    with planted(Plant(kernels, "rope_qk_fwd", _keys_not_turned)), pytest.raises(AssertionError):
        _check_qkv(True)


# ---------------------------------------------------------------- the table


def test_the_table_is_for_16_bits_on_its_gpus_where_nobody_asked(monkeypatch) -> None:
    monkeypatch.setattr(fusion, "FUSED", {80: (), 90: ("gelu",)})

    def way(impl: str, op: str, arch: int = 90, dtype: torch.dtype = torch.bfloat16) -> str:
        monkeypatch.setattr(fusion, "capability", lambda device: arch)
        return fused_or_unfused(impl, op, torch.empty(1, dtype=dtype))

    assert (way("auto", "gelu"), way("auto", "swiglu")) == ("triton", "unfused")
    assert way("auto", "gelu", arch=80) == way("auto", "swiglu", dtype=torch.float16) == "unfused"
    for elsewhere in ({"arch": 120}, {"arch": 0}, {"dtype": torch.float32}):
        assert way("auto", "swiglu", **elsewhere) == "triton", elsewhere
    assert [way(impl, "swiglu") for impl in ("triton", "torch")] == ["triton", "torch"]


def test_the_table_is_its_sources() -> None:
    """Ops that `fusion.md` calls faster fused on a GPU are fused there, and no others."""
    found = {}
    for part in SAVED.read_text().split("\n## ")[1:]:
        name, *lines = part.splitlines()
        rows = re.findall(
            r"^\| ([\w ]+) \|.*\| (fused|unfused) \|$", "\n".join(lines), re.MULTILINE
        )
        assert {op for op, _ in rows} == {*OPS}
        found[name] = {op for op, way in rows if way == "fused"}
    names = {"A100": 80, "H100": 90, "B200": 100}
    assert found == {name: {*FUSED[arch]} for name, arch in names.items()}


@pytest.mark.parametrize("activation", [None, "geglu"])
def test_an_epilogue_is_named_by_what_it_does_first_and_then(activation) -> None:
    drop, rest = Drop(0.5, 1, 2, torch.arange(3)), torch.zeros(3, 4)
    first = [] if activation is None else [activation]
    for dropped, added in ((0, 0), (1, 0), (0, 1), (1, 1)):
        words = [*first, *["dropout"] * dropped, *["residual"] * added]
        after = epilogue.Epilogue(
            torch.zeros(4), activation, drop=drop if dropped else None,
            residual=rest if added else None,
        )  # fmt: skip
        assert after.name == (" and ".join(words) or "bias")
        of_drop = (None, drop.tokens) if dropped else (None, None)
        assert after.tensors == (after.bias, after.residual, *of_drop)
