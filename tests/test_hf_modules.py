"""Modules that `warpweave.hf` recognizes as norms, feed-forward layers and activations, and reports
about each: made-up modules that differ in one respect."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from threads import on_mesh  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import attention, mlp, norm, structure  # noqa: E402
from warpweave.hf.model import _check_mesh  # noqa: E402
from warpweave.hf.patch import is_patched, ours_always  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

E, HIDDEN = 16, 40


# ---------------------------------------------------------------- norms


class Norm(nn.Module):
    """RMSNorm or LayerNorm with options: the weight's offset, eps, and the output dtype."""

    def __init__(self, *, layer=False, offset=0, eps=1e-5, out="x", weight=True) -> None:
        super().__init__()
        self.layer, self.offset, self.out, self.variance_epsilon = layer, offset, out, eps
        self.weight = nn.Parameter(torch.ones(E)) if weight else None
        self.normalized_shape = (E,)
        if layer:
            self.bias = nn.Parameter(torch.zeros(E))

    def forward(self, x):
        y = x.float() - x.float().mean(-1, keepdim=True) if self.layer else x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.weight is not None:
            y = y * (self.weight.float() + self.offset)
        y = y + self.bias.float() if self.layer else y
        if self.out == "x" or self.weight is None:
            return y.to(x.dtype)
        wider = torch.promote_types(x.dtype, self.weight.dtype)
        return y.to(self.weight.dtype if self.out == "weight" else wider)


def form(layer=False, offset=0, out="x") -> norm.NormForm:
    return norm.NormForm(layer, offset, "variance_epsilon", out, False)


FORMS = {
    "rms": ({}, form()), "offset": ({"offset": 1}, form(offset=1)),
    "half an offset": ({"offset": 0.5}, None), "layer": ({"layer": True}, form(True)),
    "layer, offset": ({"layer": True, "offset": 1}, form(True, 1)),
    "large eps": ({"eps": 3e-3}, form()), "too large": ({"eps": 0.3}, None),
    "no eps": ({"eps": 0.0}, form()), "no weight": ({"weight": False}, form()),
    "wider": ({"out": "wider"}, form(out="wider")),
    "the weight's": ({"out": "weight"}, form(out="weight")),
}  # fmt: skip


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_a_norm_is_known_by_what_it_computes_and_computes_it_in_every_dtype(name, weights):
    options, wanted = FORMS[name]
    theirs = Norm(**options).to(weights)
    found = norm.find_norm_form(theirs)
    if wanted is None:
        assert found == "its forward does not match any RMSNorm or LayerNorm of warpweave"
        return
    if wanted.out == "weight" and weights == torch.float32:
        wanted = form(out="wider")  # the same form
    elif wanted.out == "wider" and weights == torch.bfloat16:
        wanted = form()
    assert found._replace(autocast=False) == wanted
    generator = torch.Generator().manual_seed(3)
    for p in theirs.parameters():
        p.data.add_(0.3 * torch.randn(p.shape, generator=generator))
    rows = torch.randn(4, E, generator=generator) * torch.tensor([1e-3, 0.1, 1, 30])[:, None]
    theirs.variance_epsilon *= 2  # it is read in every call
    for given in (torch.float32, torch.bfloat16):
        x = rows.to(given)
        with ours_always():
            y = found.forward(theirs, x)
        truth = theirs(x)
        assert y.dtype == truth.dtype
        limit = 1e-5 if truth.dtype == torch.float32 else 8e-3
        assert ((y - truth).abs() <= limit * truth.abs().amax(-1, keepdim=True)).all()


def with_part(**parts) -> nn.Module:
    module = Norm()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def without_eps() -> nn.Module:
    module = Norm()
    del module.variance_epsilon, module.normalized_shape
    return module


CANDIDATES = {
    "a norm": (Norm(), True),
    "of torch": (nn.LayerNorm(4), True),
    "without weights": (nn.LayerNorm(4, elementwise_affine=False), True),
    "one more weight": (with_part(scale=nn.Parameter(torch.ones(E))), False),
    "a matrix": (with_part(weight=nn.Parameter(torch.ones(2, E))), False),
    "a child": (with_part(child=nn.Tanh()), False),
    "a tensor": (with_part(mean=torch.ones(E)), False),
    "batch norm": (nn.BatchNorm1d(4), False),
    "a layer": (nn.Linear(4, 4), False),
    "no eps": (without_eps(), False),
}


def test_what_has_other_parts_than_a_norm_is_none():
    for name, (module, known) in CANDIDATES.items():
        assert norm.is_norm_candidate(module) is known, name


# ---------------------------------------------------------------- feed-forward layers


class Mlp(nn.Module):
    """Gated or plain, gate and up in one layer or two, with a dropout inside or at the end."""

    def __init__(self, act, *, gated=False, fused="", drop="", p=0.5, bias=True) -> None:
        super().__init__()
        self.fused, self.drop, self.gated, self.act = fused, drop, gated, act
        self.up = nn.Linear(E, 2 * HIDDEN if fused else HIDDEN, bias)
        if gated and not fused:
            self.gate = nn.Linear(E, HIDDEN, bias)
        self.down = nn.Linear(HIDDEN, E, bias)
        if drop:
            self.dropout = nn.Dropout(p)

    def forward(self, x):
        h = self.up(x)
        if self.fused:
            gate, up = h.chunk(2, -1) if self.fused == "gate, up" else h.chunk(2, -1)[::-1]
            h = self.act(gate) * up
        elif self.gated:
            h = self.act(self.gate(x)) * h
        else:
            h = self.act(h)
        y = self.down(self.dropout(h) if self.drop == "inside" else h)
        return self.dropout(y) if self.drop == "after" else y


def tanh_gelu(x):
    return F.gelu(x, approximate="tanh")


def relu2(x):
    return x.relu().square()


ACTS = {"gelu": tanh_gelu, "gelu_erf": F.gelu, "relu2": relu2, "silu": F.silu}
SHAPES = {
    "plain": {}, "gated": {"gated": True}, "without biases": {"gated": True, "bias": False},
    "fused": {"fused": "gate, up"}, "fused up": {"fused": "up, gate"},
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_a_feed_forward_layer_computes_the_same_in_every_mode(shape, act):
    torch.manual_seed(0)
    drop = ("", "inside", "after")[([*SHAPES].index(shape) + [*ACTS].index(act)) % 3]
    options = SHAPES[shape]
    theirs = Mlp(ACTS[act], drop=drop, **options).double()
    found = mlp.find_mlp_form(theirs)
    known = act != "relu2"
    if shape == "plain":
        known = act != "silu" and drop != "inside"
    if not known:
        assert found == "its forward does not match any MLP of warpweave"
        return
    assert found.activation == act
    assert (found.fused, found.plain) == (options.get("fused", ""), shape == "plain")
    assert found.inside == ("dropout",) * (drop == "inside")
    assert found.after == ("dropout",) * (drop == "after")
    ours, x = found.forward, torch.randn(2, 3, E, dtype=torch.float64)
    ww.apply(theirs, only="mlp", report=ww.Report())
    for training, p, learns in itertools.product((True, False), (0.0, 0.5), (True, False)):
        theirs.train(training)
        if drop:
            theirs.dropout.p = p
        results = []
        for run in (theirs, lambda x: Mlp.forward(theirs, x), lambda x: ours(theirs, x)):
            theirs.zero_grad()
            torch.manual_seed(4)
            with torch.set_grad_enabled(learns):
                y = run(x)
            if learns:
                y.square().sum().backward()
            results.append([y.detach(), *(p.grad for p in theirs.parameters() if learns)])
        for applied, wanted, alone in zip(*results, strict=True):
            torch.testing.assert_close(applied, wanted, rtol=0, atol=1e-11)
            torch.testing.assert_close(alone, wanted, rtol=0, atol=1e-11)


def linear(change=lambda module: None, kind=nn.Linear) -> nn.Module:
    module = kind(4, 6)
    change(module)
    return module


class Other(nn.Linear):
    pass


def integers(module) -> None:
    module.weight = nn.Parameter(torch.ones(6, 4, dtype=torch.int8), requires_grad=False)


HOOKS = ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook")
LINEAR = {
    "plain": (linear(), True),
    "half": (linear().bfloat16(), True),
    "without a bias": (nn.Linear(4, 6, bias=False), True),
    "of GPT-2": (transformers.pytorch_utils.Conv1D(6, 4), True),
    "a subclass": (linear(kind=Other), False),
    "another": (nn.Tanh(), False),
    "its own forward": (linear(lambda m: setattr(m, "forward", len)), False),
    "integers": (linear(integers), False),
    "no weight": (linear(lambda m: setattr(m, "weight", None)), False),
} | {k: (linear(lambda m, k=k: getattr(m, f"register_{k}")(len)), False) for k in HOOKS}


def test_a_linear_layer_with_anything_more_is_called_not_read():
    for name, (module, known) in LINEAR.items():
        assert mlp.is_plain_linear(module) is known, name


class Exchanged(nn.LayerNorm):
    """A module that multiplies by its bias and adds its weight."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.bias, self.weight, self.eps)


def test_a_norm_that_exchanges_weight_and_bias_is_none_of_ours():
    for dtype in (torch.float32, torch.bfloat16):
        found = norm.find_norm_form(Exchanged(E).to(dtype))
        assert found == "its forward does not match any RMSNorm or LayerNorm of warpweave"


@pytest.mark.parametrize("part", ["up", "down"])
@pytest.mark.parametrize(
    ("shape", "drop"),
    [("plain", "after"), ("gated", "after"), ("gated", "inside"), ("fused up", "after")],
)
def test_with_a_hook_on_a_linear_layer_each_dropout_is_drawn_once_in_place(shape, drop, part):
    torch.manual_seed(0)
    module = Mlp(F.gelu, drop=drop, **SHAPES[shape]).double()
    ww.apply(module, only="mlp", report=ww.Report())
    module.get_submodule(part).register_forward_hook(lambda _, args, y: 2 * y)
    x = torch.randn(2, 3, E, dtype=torch.float64)
    for training, learns in itertools.product((True, False), repeat=2):
        results = []
        with torch.set_grad_enabled(learns):
            for forward in (module.train(training), functools.partial(Mlp.forward, module)):
                torch.manual_seed(3)
                results.append(forward(x))
        torch.testing.assert_close(*results)


# ---------------------------------------------------------------- attention split over ranks

D, HEADS = 8, 4


class Attention(nn.Module):
    """Attention with four heads of eight; `how` lists extra or changed parts."""

    def __init__(self, *how: str, kv: int = 2, kind=nn.Linear) -> None:
        super().__init__()
        self.how, self.sinks = how, None
        if "qkv" in how:
            self.qkv = kind(E, (HEADS + 2 * kv) * D)
        else:
            self.q = kind(E, HEADS * D)
            widths = {"kv": 2 * kv * D} if "kv" in how else {"k": kv * D, "v": kv * D}
            for name, width in widths.items():
                setattr(self, name, kind(E, width))
        self.o = kind(HEADS * D, E)
        if "norms" in how:
            self.q_norm, self.k_norm = nn.RMSNorm(HEADS * D, 1e-5), nn.RMSNorm(kv * D, 1e-5)
        wide = {"norm of all": 3 * HEADS * D, "norms of heads": D, "norm of half a head": D // 2}
        for name in wide.keys() & {*how}:
            self.q_norm = nn.RMSNorm(wide[name], 1e-5)
        if "a norm of x" in how:
            self.norm = nn.RMSNorm(HEADS * D, 1e-5)
        if "sinks" in how:
            self.sinks = nn.Parameter(torch.zeros(HEADS))
        if "a number" in how:
            self.number = nn.Parameter(torch.ones(HEADS))
        if "one more layer" in how:
            self.more = kind(E, E)

    def made(self, x):
        if "qkv" in self.how:
            y = self.qkv(x)
            return (self.q_norm(y) if "norm of all" in self.how else y).chunk(3, -1)
        q = self.q(x)
        k, v = self.kv(x).chunk(2, -1) if "kv" in self.how else (self.k(x), self.v(x))
        return (self.q_norm(q), self.k_norm(k), v) if "norms" in self.how else (q, k, v)

    def forward(self, x, more=None):
        if "one more layer" in self.how:
            x = x + self.more(x) if self.training else x
        x = self.norm(x.repeat(1, 1, 2))[..., :E] if "a norm of x" in self.how else x
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in self.made(x))
        q = q.roll(1, 1) if "rolled" in self.how else q
        q = self.q_norm(q) if "norms of heads" in self.how else q
        o, _ = attention.attention_forward(self, q, k, v, None, s_aux=self.sinks)
        if "twice" in self.how:
            o, _ = attention.attention_forward(self, o.transpose(1, 2), k, v, None)
        o = o.flatten(2)
        return self.o(o.roll(1, -1) if "turned" in self.how else o)


PARTS = {  # options, KV heads, and blocks of the columns
    "apart": ((), 2, {"q": 1, "k": 1, "v": 1}),
    "one layer": (("qkv",), 4, {"qkv": 3}),
    "keys and values": (("kv",), 2, {"q": 1, "kv": 2}),
    "norms of all heads": (("norms",), 2, {"q": 1, "k": 1, "v": 1}),
    "norms of each head": (("norms of heads",), 2, {"q": 1, "k": 1, "v": 1}),
    "with sinks": (("sinks",), 4, {"q": 1, "k": 1, "v": 1}),
}


def cut(*how: str, ranks: int = 2, **more) -> tuple[nn.Module, structure.CutPart]:
    module = Attention(*how, **more)
    call = structure._Call((torch.randn(2, 5, E),), {})
    return module, structure._attention_part(module, call, ranks)


@pytest.mark.parametrize("name", PARTS)
def test_what_makes_the_heads_is_a_column_and_what_reads_them_the_row(name):
    how, kv, columns = PARTS[name]
    module, part = cut(*how, kv=kv)
    names = {m: n for n, m in module.named_modules()}
    assert {names[c]: blocks for c, blocks in part.columns.items()} == columns
    assert (part.kind, part.module, part.row) == ("attention", module, module.o)
    wide = {"q_norm", "k_norm"} if "norms" in how else set()
    assert {names[m] for m in part.norms} == wide
    assert part.sinks is module.sinks
    assert part.width == min(kv * D, HEADS * D)


SHARED_BY_NONE = {
    "its own linear layer": (("apart",), {"kind": Other}, "quantized, wrapped or hooked"),
    "two attentions": (("twice",), {}, "must call attention exactly once"),
    "a layer that is not called": (("one more layer",), {}, "must call attention exactly once"),
    "a norm in front": (
        ("a norm of x",), {}, "a linear layer's output width must directly follow a linear"
    ),
    "a number": (("a number",), {}, "its own parameters cannot be assigned to heads"),
    "and sinks": (("a number", "sinks"), {}, "its own parameters cannot be assigned to heads"),
    "one key head": ((), {"kv": 1}, r"1 key heads are not divisible by tp \(2\)"),
    "three ranks": ((), {"ranks": 3}, r"4 query heads are not divisible by tp \(3\)"),
    "turned": (("turned",), {}, "does not read the concatenated heads"),
    "rolled": (("rolled",), {}, "must form one, two or three blocks of equal width"),
    "a norm of all": (("qkv", "norm of all"), {"kv": 4}, "norm spans queries, keys and values"),
    "half": (("norm of half a head",), {}, "outside its linear layers and per-head"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED_BY_NONE)
def test_attention_that_ranks_cannot_share_is_refused_for_what_it_is(name):
    how, more, words = SHARED_BY_NONE[name]
    with pytest.raises(ValueError, match=words):
        cut(*how, **more)


# ---------------------------------------------------------------- the report on a model


class GELUActivation(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(2, E, E))


def test_every_module_is_reported_once_with_what_became_of_it():
    foreign = nn.LayerNorm(E)
    foreign.forward = lambda x: x
    theirs = Mlp(GELUActivation())
    theirs.forward = lambda x: x
    model = nn.ModuleDict({
        "norm": nn.LayerNorm(E), "again": nn.LayerNorm(E), "other": nn.LayerNorm(E, eps=3e-3),
        "foreign": foreign, "ffn": Mlp(GELUActivation()), "tanh": Mlp(torch.tanh),
        "act": GELUActivation(), "relu": nn.ReLU(), "experts": Experts(), "linear": nn.Linear(E, E),
        "deep": Mlp(nn.Sequential(GELUActivation())), "theirs": theirs,
    })  # fmt: skip
    ww.apply(model, report=(report := ww.Report()))
    found = {(e.name, e.kind): (e.module, e.replaced, e.why) for e in report.entries}
    assert len(found) == len(report.entries)
    layer = ("LayerNorm", True, "layer_norm")
    assert found == {
        ("norm", "norm"): layer, ("again", "norm"): layer, ("other", "norm"): layer,
        ("foreign", "norm"): ("LayerNorm", False, "its forward was replaced by other code"),
        ("ffn", "mlp"): ("Mlp", True, "mlp, gelu_erf"),
        ("tanh", "mlp"): (
            "Mlp", False, "it has several activations, or one that warpweave does not support",
        ),
        ("act", "mlp"): ("GELUActivation", True, "activation, gelu_erf"),
        ("experts", "mlp"): ("Experts", False, "products of grouped experts"),
        ("deep", "mlp"): ("Mlp", True, "mlp, gelu_erf"),  # together with its activation
        ("theirs.act", "mlp"): ("GELUActivation", True, "activation, gelu_erf"),
        ("", "attention"): ("ModuleDict", False, "no transformers model"),
        ("", "loss"): ("ModuleDict", False, "no transformers model"),
    }  # fmt: skip
    patched = {name for name, module in model.named_modules() if is_patched(module)}
    assert patched == {"norm", "again", "other", "ffn", "act", "deep", "theirs.act"}
    ww.revert(model)
    assert not any(is_patched(module) for module in model.modules())


def _checked(mesh, model) -> str | None:
    how = {"mesh": mesh, "sequence_parallel": True, "overlap": "none", "strategy": "ring"}
    try:
        options = _check_mesh(model, {"attention"}, **how)
    except ValueError as error:
        return str(error)
    return None if options is None else f"{options[1:]}"


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({}, None), ({"dp": 2}, None), ({"pp": 2}, None),
        ({"tp": 2}, "(True, 'none', 'ring')"), ({"cp": 2}, "(False, 'none', 'ring')"),
        ({"pp": 2, "tp": 2}, "LlamaForCausalLM: apply does not support pipeline stages; use pp = 1")
    ],
)  # fmt: skip
def test_a_mesh_spreads_a_model_over_tensor_and_context_ranks_only(sizes, said):
    config = transformers.LlamaConfig(
        vocab_size=5, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=2
    )
    model, mesh = transformers.LlamaForCausalLM(config), Mesh(**sizes)
    assert on_mesh(mesh, _checked, model) == [said] * mesh.world
