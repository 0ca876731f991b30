"""Activations and feed-forward layers that `warpweave.hf` recognizes by their parts, and reasons
for keeping others; detection of changes in modules that are no longer called."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

transformers = pytest.importorskip("transformers", reason="an extra of its own")

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import mlp, probe, seen  # noqa: E402

E, HIDDEN = 6, 10


# ---------------------------------------------------------------- activations


class SomeActivation(nn.Module):
    def forward(self, x):
        return x.relu().square()


NAMES = "QuickGELU", "ReLUSquared", "Smooth"
QuickGELU, ReLUSquared, Smooth = (type(name, (SomeActivation,), {}) for name in NAMES)


def with_more(**parts) -> nn.Module:
    made = SomeActivation()
    for name, part in parts.items():
        setattr(made, name, part)
    return made


def with_buffer() -> nn.Module:
    made = SomeActivation()
    made.register_buffer("scale", torch.ones(1))
    return made


ACTIVATIONS = {
    "activation": (SomeActivation(), True), "gelu": (QuickGELU(), True),
    "of torch": (nn.GELU(), True), "relu": (ReLUSquared(), True),
    "another name": (Smooth(), False), "silu": (nn.SiLU(), False),
    "a child": (with_more(child=nn.Tanh()), False), "a number": (with_more(alpha=0.3), True),
    "a weight": (nn.PReLU(), False), "a buffer": (with_buffer(), False),
    "a tensor": (with_more(scale=torch.ones(1)), False),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_named_so_and_has_no_parts_and_no_tensors(name):
    module, known = ACTIVATIONS[name]
    assert mlp.is_activation(module) is known


NAMED = {
    "silu": F.silu, "gelu": lambda x: F.gelu(x, approximate="tanh"), "gelu_erf": F.gelu,
    "relu2": lambda x: x.relu().square(),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
def test_activation_is_recognized_by_its_values_and_not_if_any_differs(name):
    function = NAMED[name]
    assert mlp.name_of(function) == name
    others = {
        "clipped above": lambda x: function(x.clamp(max=500.0)),
        "clipped below": lambda x: function(x) * (x > -500) - (x <= -500).float(),
        "clipped near": lambda x: function(x).clamp(max=6.0),
        "shifted": lambda x: function(x) + 1e-4,
        "scaled": lambda x: function(x) * 1.0001,
        "of another shape": lambda x: function(x)[None],
        "shorter": lambda x: function(x)[1:],
        "a tuple": lambda x: (function(x),),
        "raises": lambda x: function(x, 1, 2, 3, 4),
        "doubles its input in place": lambda x: function(x.mul_(2)),
    }
    for what, other in others.items():
        assert mlp.name_of(other) is None, what
    for other in (torch.tanh, torch.relu, nn.functional.mish, torch.sigmoid):
        assert mlp.name_of(other) is None


# ---------------------------------------------------------------- feed-forward modules


class Parts(nn.Module):
    """Linear layers of these widths around an activation, and further parts."""

    def __init__(self, *widths: tuple[int, int], act=F.silu, **more) -> None:
        super().__init__()
        for n, (out, into) in enumerate(widths):
            setattr(self, f"linear{n}", nn.Linear(into, out))
        self.act = act
        for name, part in more.items():
            setattr(self, name, part)


GATED = ((HIDDEN, E), (HIDDEN, E), (E, HIDDEN))
PLAIN = ((HIDDEN, E), (E, HIDDEN))
CANDIDATES = {
    "gated": (Parts(*GATED), True), "plain": (Parts(*PLAIN), True),
    "gate and up in one": (Parts((2 * E, E), (E, E)), True),
    "one": (Parts((HIDDEN, E)), False), "four": (Parts(*GATED, (E, HIDDEN)), False),
    "three widths": (Parts((HIDDEN, E), (7, HIDDEN), (E, 7)), False),
    "no activation": (Parts(*PLAIN, act=3), False),
    "a module": (Parts(*PLAIN, act=nn.SiLU()), True),
    "a dropout": (Parts(*PLAIN, act=nn.Dropout()), False),
    "an identity": (Parts(*PLAIN, act=nn.Identity()), False),
    "a dropout too": (Parts(*PLAIN, drop=nn.Dropout()), True),
    "a class": (Parts(*PLAIN, act=nn.SiLU), False),
    "a weight": (Parts(*PLAIN, scale=nn.Parameter(torch.ones(E))), False),
    "a tensor": (Parts(*PLAIN, scale=torch.ones(E)), False),
    "a norm": (Parts(*PLAIN, norm=nn.LayerNorm(E)), False),
    "a norm without weights": (Parts(*PLAIN, norm=nn.LayerNorm(E, elementwise_affine=False)), True),
    "an activation with a weight": (Parts(*PLAIN, act=nn.PReLU()), False),
    "one within": (Parts(*PLAIN, act=nn.Sequential(nn.Tanh(), nn.PReLU())), False),
    "no layers": (nn.Tanh(), False),
}  # fmt: skip


@pytest.mark.parametrize("name", CANDIDATES)
def test_mlp_candidate_has_two_or_three_linears_and_no_other_parameters(name):
    module, known = CANDIDATES[name]
    assert mlp.is_mlp_candidate(module) is known


class Mlp(Parts):
    def forward(self, x):
        return self.linear1(self.act(self.linear0(x)))


class Takes(Mlp):
    def forward(self, x, scale=1.0):
        return scale * super().forward(x)


class TakesNamed(Mlp):
    def forward(self, x, *, scale=1.0):
        return scale * super().forward(x)


class TakesAll(Mlp):
    def forward(self, x, *args, **kwargs):
        return super().forward(x)


class Residual(Mlp):
    def forward(self, x):
        return x + super().forward(x)


class Late(Mlp):
    """A module that computes something else in training mode."""

    def forward(self, x):
        return super().forward(x) * (1.01 if self.training else 1.0)


SEVERAL = "it has several activations, or one that warpweave does not support"
NO_MLP = "its forward does not match any MLP of warpweave"
STAY = {
    "takes more": (Takes(*PLAIN, act=F.gelu), "its forward also accepts scale"),
    "by name": (TakesNamed(*PLAIN, act=F.gelu), "its forward also accepts scale"),
    "whatever": (TakesAll(*PLAIN, act=F.gelu), "its forward also accepts args, kwargs"),
    "two activations": (Mlp(*PLAIN, act=F.gelu, other=F.silu), SEVERAL),
    "one of ours": (Mlp(*PLAIN, act=F.gelu, other=torch.tanh), SEVERAL),
    "none of ours": (Mlp(*PLAIN, act=torch.tanh), SEVERAL),
    "gated only": (Mlp(*PLAIN, act=F.silu), NO_MLP),
    "residual": (Residual(*PLAIN, act=F.gelu), NO_MLP),
    "training": (Late(*PLAIN, act=F.gelu), NO_MLP),
}


@pytest.mark.parametrize("name", STAY)
def test_why_a_feed_forward_layer_stays(name):
    module, why = STAY[name]
    assert mlp.is_mlp_candidate(module)
    assert mlp.find_mlp_form(module) == why
    assert isinstance(mlp.find_mlp_form(Mlp(*PLAIN, act=F.gelu)), mlp.MLPForm)


def test_a_form_says_its_activation_and_whether_it_is_gated():
    plain = mlp.MLPForm("gelu", "up", "down")
    gated = plain._replace(gate="gate")
    fused = plain._replace(fused="gate, up")
    assert list(map(str, (plain, gated, fused))) == ["mlp, gelu", "gated gelu", "gated gelu"]
    assert plain._replace(inside=("a",), after=("b",)).live == ("up", "down", "a", "b")
    assert gated.live == ("up", "down", "gate")
    assert str(mlp.ActivationForm("relu2")) == "activation, relu2"


@pytest.mark.parametrize("name", ["forward_hook", "forward_pre_hook"])
@pytest.mark.parametrize("part", ["linear0", "linear1"])
def test_a_linear_layer_that_is_hooked_afterwards_is_called(part, name):
    for act, learns in itertools.product((F.gelu, lambda x: x.relu().square()), (True, False)):
        torch.manual_seed(0)
        module, x, calls = Mlp(*PLAIN, act=act), torch.randn(3, E), []
        wanted = module(x)
        ww.apply(module, report=ww.Report())
        with torch.set_grad_enabled(learns):
            torch.testing.assert_close(module(x), wanted)
            hook = getattr(module.get_submodule(part), f"register_{name}")
            handle = hook(lambda *_, calls=calls: calls.append(1))
            torch.testing.assert_close(module(x), wanted)
            assert calls == [1]
            handle.remove()
            torch.testing.assert_close(module(x), wanted)
            assert calls == [1]


# ---------------------------------------------------------------- detected changes of a module


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called, self.bypassed = nn.Linear(2, 2), nn.Sequential(nn.Tanh())
        self.things = {"list": [1], "dict": {"a": 1}, "set": {1}, "tuple": (1, 2)}
        for name, value in self.things.items():
            setattr(self, name, value)
        self.number, self.truth, self.other = 1, True, object()


def looked(live=("called",), **more) -> Holder:
    module = Holder()
    seen.look(module, live, **more)
    assert not seen.changed(module)
    return module


def test_changes_inside_containers_and_replaced_values_are_detected():
    for name, change, back in (
        ("list", lambda c: c.append(2), lambda c: c.pop()),
        ("dict", lambda c: c.update(b=2), lambda c: c.pop("b")),
        ("set", lambda c: c.add(2), lambda c: c.remove(2)),
    ):
        module = looked()
        change(getattr(module, name))
        assert seen.changed(module), name
        back(getattr(module, name))
        assert not seen.changed(module), name
        change(module.things[name])  # it is the same object
        assert seen.changed(module), name
    module = looked()
    module.list, module.dict, module.set, module.tuple = [1], {"a": 1}, {1}, (1, 2)
    assert not seen.changed(module)  # they are equal
    for name, value in (("tuple", [1, 2]), ("tuple", (2, 1)), ("number", True), ("truth", 1),
                        ("number", 1.0), ("other", object()), ("other", None)):  # fmt: skip
        module = looked()
        before = getattr(module, name)
        setattr(module, name, value)
        assert seen.changed(module), (name, value)
        setattr(module, name, before)
        assert not seen.changed(module)


def test_a_global_hook_counts_where_a_module_is_called_no_more():
    bypassing, calling = looked(), Holder()
    seen.look(calling, ("called", "bypassed"))
    handle = register_module_forward_hook(lambda *_: None)
    try:
        assert seen.changed(bypassing)
        assert not seen.changed(calling)
    finally:
        handle.remove()
    assert not seen.changed(bypassing)


def test_the_class_of_a_module_and_of_those_below_counts(monkeypatch):
    class Other(nn.Tanh):
        pass

    module = looked()
    for part, counts in ((module.called, False), (module.bypassed[0], True), (module, True)):
        with monkeypatch.context() as patched:
            patched.setattr(type(part), "forward", lambda self, x: x)
            assert bool(seen.changed(module)) is counts
        assert not seen.changed(module)
    module.bypassed[0].__class__ = Other
    assert not seen.changed(module)  # its forward is the same


def test_what_libraries_note_on_a_module_changes_nothing():
    """This holds if a note existed before and then changes or disappears."""
    notes = ("_is_hf_initialized", "_hf_hook", "_hf_more", "_old_forward", "_is_hooked")
    for name in notes:
        for at in ("", "bypassed", "bypassed.0"):
            module = Holder()
            part = module.get_submodule(at)
            setattr(part, name, 1)
            seen.look(module, ("called",))
            setattr(part, name, 2)
            assert not seen.changed(module), (name, at)
            delattr(part, name)
            assert not seen.changed(module), (name, at)
    module = looked()
    for part in (module, module.bypassed, module.bypassed[0]):
        for name in notes:
            setattr(part, name, 1)
    assert not seen.changed(module)
    module.bypassed.train(False)  # a mode is not a change
    assert not seen.changed(module)


def test_blind_modules_are_called_but_hooks_of_theirs_count():
    module = Holder()
    seen.look(module, ("called", "bypassed"), blind=[module.bypassed])
    assert not seen.changed(module)
    module.bypassed[0] = nn.ReLU()  # it is called
    assert not seen.changed(module)
    handle = module.bypassed.register_forward_hook(lambda *_: None)
    assert seen.changed(module)
    handle.remove()
    module.bypassed.more = 1
    assert not seen.changed(module)


def test_a_module_owns_its_parameters_buffers_and_plain_tensors():
    for give in (
        lambda m: setattr(m, "a", nn.Parameter(torch.ones(1))),
        lambda m: m.register_buffer("a", torch.ones(1)),
        lambda m: m.register_buffer("a", torch.ones(1), persistent=False),
        lambda m: setattr(m, "a", torch.ones(1)),
    ):
        module = nn.Tanh()
        assert not seen.owns_numbers(module)
        give(module)
        assert seen.owns_numbers(module)
        assert seen.owns_numbers(module, ("b",))
        assert not seen.owns_numbers(module, ("b", "a"))
    module = nn.Sequential(nn.Linear(2, 2))
    module.register_parameter("a", None)
    assert not seen.owns_numbers(module)  # only its child does


def test_a_configuration_is_read_and_written_through_what_takes_note_of_it():
    module = nn.Module()
    module.config = config = transformers.PretrainedConfig(eps=1.0, width=3)
    config.text = transformers.PretrainedConfig(eps=2.0)

    def read_and_write() -> None:
        assert isinstance(module.config, transformers.PretrainedConfig)
        module.config.width = 7
        module.config.text.eps += 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), seen.noted(module) as fields:
        read_and_write()
    assert module.config is config
    assert (config.width, config.text.eps) == (7, 3.0)
    assert fields["text", "eps"] == 2.0
    assert ("eps",) not in fields
    other = nn.Module()
    other.config = {"eps": 1.0}  # of a different kind
    with seen.noted(other) as fields:
        assert other.config["eps"] == 1.0
    assert not fields


def test_what_a_forward_takes_besides_hidden_states_is_said():
    assert probe.takes_more(nn.LayerNorm(2)) is None
    assert probe.takes_more(Takes(*PLAIN)) == "its forward also accepts scale"
    assert "query, key" not in str(probe.takes_more(nn.MultiheadAttention(2, 1)))  # the first is x
    assert "key, value" in probe.takes_more(nn.MultiheadAttention(2, 1))
