"""The choice of an implementation, and errors for implementations that cannot run."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refused import check

from warpweave import kernels
from warpweave.kernels.norm import norm_fwd
from warpweave.kernels.runtime import dispatch
from warpweave.kernels.runtime.dispatch import (
    choose,
    once_differentiable,
    refuse_graph,
    refuse_tangents,
)


class _On:
    """The only thing that `choose` may read: a tensor's device."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)


def test_default_is_triton_on_cuda_and_torch_elsewhere() -> None:
    assert choose(None, _On("cuda:0"), None, _On("cuda:0")) == "triton"
    assert choose(None, torch.empty(1)) == "torch"
    assert choose(None, torch.empty(1, device="meta")) == "torch"
    assert choose(None, _On("mps")) == "torch"


def test_explicit_choice_is_honoured() -> None:
    assert choose("torch", _On("cuda:0")) == "torch"
    assert choose("torch", torch.empty(1)) == "torch"
    assert choose("triton", torch.empty(1)) == "triton"  # interpreted


def test_unknown_names_mixed_devices_and_no_tensor_raise() -> None:
    for impl in ("cuda", "Triton", "TORCH", "", 1):
        check(partial(choose, impl, torch.empty(1)), rf"impl must be None.*{impl!r}")
    check(lambda: choose(None, _On("cuda:0"), _On("cuda:1")), "one device, got cuda:0 and cuda:1")
    check(lambda: choose(None, torch.empty(1), 0.5), r"expected a tensor, got float 0\.5")
    check(lambda: choose(None, None), "^expected at least one tensor, got none$")
    check(lambda: choose("triton", torch.empty(1, device="meta")), "got meta")


def test_triton_on_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "INTERPRET", False)
    check(lambda: choose("triton", torch.empty(1)), "TRITON_INTERPRET=1")
    assert choose(None, _On("cuda:0")) == "triton"


def test_cuda_without_triton_raises_instead_of_falling_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "HAS_TRITON", False)
    check(lambda: choose(None, _On("cuda:0")), "Triton is not installed")
    check(lambda: choose("triton", torch.empty(1)), "Triton is not installed")


_WITHOUT_TRITON = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "triton" else found(name, *a)
import torch
from warpweave.kernels import activation, dropout, norm, rope
from warpweave.kernels.runtime import dispatch
assert not dispatch.HAS_TRITON and "triton" not in sys.modules
x = torch.randn(3, 8, requires_grad=True)
y, _ = norm.rms_norm(x, torch.ones(8), residual=x)
y = dropout.dropout(y, dropout.Drop(0.5, 1, 2, torch.arange(3)))
cos, sin = rope.rope_table(torch.arange(3), 4)
y = rope.apply_rope(y.view(1, 3, 2, 4), cos, sin)
activation.activate(activation.activate(y, "gelu"), "swiglu").sum().backward()
assert x.grad is not None
"""


def test_the_torch_path_works_where_triton_is_not_installed() -> None:
    words = [sys.executable, "-P", "-c", _WITHOUT_TRITON]
    done = subprocess.run(words, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr


def test_all_registers_are_those_of_a_multiprocessor_or_a_thread(monkeypatch) -> None:
    assert dispatch.all_registers(4) == {"num_warps": 4, "maxnreg": 255}
    assert dispatch.all_registers(8) == {"num_warps": 8, "maxnreg": 255}
    assert dispatch.all_registers(16) == {"num_warps": 16, "maxnreg": 128}
    assert dispatch.all_registers(32) == {"num_warps": 32, "maxnreg": 64}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert dispatch.all_registers(8) == {"num_warps": 8}  # maxnreg is an option of ptxas


# ---------------------------------------------------------------- halves have no gradient


def _halves() -> dict[str, object]:
    """List every public half of an autograd Function in kernels, by module and name."""
    found = {}
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        if module.name.endswith(".reference"):
            continue  # plain torch, which is differentiable
        for name, value in vars(importlib.import_module(module.name)).items():
            own = inspect.isfunction(value) and value.__module__ == module.name
            if own and re.fullmatch(
                r"[a-z]\w*_(fwd|bwd|fwd_bwd|delta|dsinks)|merge_?|sum_of_squares", name
            ):
                found[f"{module.name.rpartition('.')[2]}.{name}"] = value
    return found


def test_every_public_half_refuses_what_wants_a_gradient_through_it() -> None:
    halves = _halves()
    assert len(halves) == 28
    leaf = torch.zeros(2, requires_grad=True)
    computed = leaf + 1
    for name, half in halves.items():
        named = inspect.signature(half).parameters.values()
        given = {p.name: torch.zeros(2) for p in named if p.default is p.empty}
        own = name.partition(".")[2]
        message = rf"^{own} is not differentiable, but an argument of shape \[2\] requires grad"
        for argument in given:  # the check comes before all others
            for x in (leaf, computed):
                check(partial(half, **given | {argument: x}), message)
        _, *others = given
        check(partial(half, leaf, **{name: given[name] for name in others}), message)


def test_a_half_runs_where_no_gradient_is_wanted() -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    with torch.no_grad():
        y, *_ = norm_fwd(x, weight, layer=False)
    assert torch.equal(y, norm_fwd(x.detach(), weight.detach(), layer=False)[0])
    assert norm_fwd.__doc__.startswith("(y, s, mean or None, rstd)")


# ---------------------------------------------------------------- missing derivatives


class _Cubed(torch.autograd.Function):
    """x^3 w, whose gradient is computed from constants; `saved` selects what it keeps."""

    @staticmethod
    def forward(ctx, x, w, saved):
        y = x**3 * w
        ctx.constants = x.detach(), w.detach()
        ctx.save_for_backward(*{"inputs": (x, w), "output": (y,), "x": (x,), "nothing": ()}[saved])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, w = ctx.constants
        return 3 * dy * x**2 * w, dy * x**3, None


def _cubed(saved: str, leaf: bool = True) -> tuple[torch.Tensor, ...]:
    """Return two inputs, and the gradients of a loss that also reaches both by other paths."""
    x, w = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = (x, w) if leaf else (x * 1, w * 1)
    loss = _Cubed.apply(*given, saved).sum() + (x * x).sum() + (w * w).sum()
    return x, w, *torch.autograd.grad(loss, (x, w), create_graph=True)


@pytest.mark.parametrize(
    ("saved", "leaf"),
    [(saved, True) for saved in ("inputs", "output", "x", "nothing")]
    + [("inputs", False), ("output", False)],
)
def test_a_second_derivative_raises_whatever_else_leads_to_the_input(saved, leaf) -> None:
    x, w, dx, dw = _cubed(saved, leaf)
    for of in (dx, dw, dx + x**2, dw + w**2):
        for to in (x, w):
            with pytest.raises(RuntimeError, match="_Cubed does not support second derivatives"):
                torch.autograd.grad(of.sum(), to, retain_graph=True)
    # create_graph alone is allowed
    assert torch.equal(torch.autograd.grad((x**2).sum(), x)[0], 2 * x)


def test_a_function_that_saved_too_little_to_raise_later_raises_at_once() -> None:
    for saved in ("x", "nothing"):
        words = r"_Cubed does not support .* an input of _Cubed was computed by MulBackward0; "
        with pytest.raises(RuntimeError, match=words):
            _cubed(saved, leaf=False)


def test_a_second_derivative_through_the_incoming_gradient_raises() -> None:
    x, w = (torch.randn(3, requires_grad=True) for _ in range(2))
    (dx,) = torch.autograd.grad(_Cubed.apply(x, w.detach(), "inputs"), x, w * 2, create_graph=True)
    with pytest.raises(RuntimeError, match="_Cubed does not support second derivatives"):
        torch.autograd.grad(dx.sum() + w.sum(), w)


def test_a_tangent_is_refused_by_what_would_drop_it() -> None:
    x = torch.randn(3, 8)
    refuse_tangents("it", x, None, 3)
    with pytest.raises(RuntimeError, match="it has no forward-mode derivative"):
        torch.func.jvp(lambda x: refuse_tangents("it", None, x), (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        norm_fwd(x, torch.ones(8), layer=False)  # it has no gradient
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="norm_fwd has no forward-mode derivative"):
            norm_fwd(dual, torch.ones(8), layer=False)


def test_every_operator_is_opchecked() -> None:
    """Each operator that the sources register is named in a test file that calls opcheck."""
    here = Path(__file__).resolve().parent
    files = [path for of in ("kernels", "parallel") for path in (here.parent / of).rglob("*.py")]
    registered = re.compile(r'^@operator\(\s*"(\w+)".*?^def (\w+)', re.MULTILINE | re.DOTALL)
    ops = {pair for path in files for pair in registered.findall(path.read_text())}
    tests = [p.read_text() for p in here.glob("test_*.py")]
    called = re.compile(r"opcheck\(\s*(?:torch\.)?ops\.(?:warpweave\.)?(\w+)\.default")
    by_name = {name for text in tests for name in called.findall(text)}
    well_formed = re.compile(r"\bwell_formed\(\s*(?:\w+\.)?(\w+)")
    by_op = {name for text in tests for name in well_formed.findall(text)}
    assert len(ops) > 20
    assert not {name for name, op in ops if name not in by_name and op not in by_op}


def test_a_refusal_names_the_first_that_requires_a_gradient() -> None:
    given = (torch.zeros(n, requires_grad=n > 2) for n in range(1, 6))
    words = r"^it is not differentiable, but an argument of shape \[3\] requires"
    check(lambda: refuse_graph("it", None, *given), words)


def test_what_a_device_can_do_is_asked_of_that_device(monkeypatch) -> None:
    one, other, cpu = (torch.device(name) for name in ("cuda:0", "cuda:1", "cpu"))
    found = {one: (9, 0), other: (12, 1)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", found.__getitem__)
    capability, processors = dispatch.capability.__wrapped__, dispatch.processors.__wrapped__
    assert [capability(device) for device in (one, other, cpu)] == [90, 121, 0]
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert capability(one) == 0
    many = {one: SimpleNamespace(multi_processor_count=132),
            other: SimpleNamespace(multi_processor_count=7)}  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", many.__getitem__)
    assert [processors(device) for device in (one, other, cpu)] == [132, 7, 4]
