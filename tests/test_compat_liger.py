"""Liger's modules against their documentation, in plain float64 torch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from refused import one_line
from torch import Tensor, nn

from warpweave.compat import liger

E, V, N = 12, 31, 17
TOLERANCE = 1e-12


@pytest.fixture(autouse=True)
def _doubles():
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _agree(ours, truth, tensors) -> None:
    """Compare the result and its gradients by `tensors`."""
    ours, truth = (x if isinstance(x, tuple) else (x,) for x in (ours, truth))
    with torch.random.fork_rng():
        weights = [torch.randn_like(x) for x in truth]
    torch.testing.assert_close(ours, truth, rtol=0, atol=TOLERANCE)
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(each, weights)), tensors)
        for each in (ours, truth)
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=TOLERANCE)


SIGNATURES = {
    "LigerRMSNorm": "hidden_size eps=1e-06 offset=0.0 casting_mode=llama init_fn=ones "
    "in_place=True row_mode=None elementwise_affine=True",
    "LigerLayerNorm": "hidden_size eps=1e-06 bias=False init_fn=ones",
    "LigerSwiGLUMLP": "config",
    "LigerGEGLUMLP": "config",
    "LigerCrossEntropyLoss": "weight=None ignore_index=-100 lse_square_scale=0.0 "
    "label_smoothing=0.0 reduction=mean softcap=None return_z_loss=False "
    "return_token_accuracy=False return_predicted_tokens=False",
    "LigerFusedLinearCrossEntropyLoss": "ce_weight=None ignore_index=-100 lse_square_scale=0.0 "
    "label_smoothing=0.0 reduction=mean softcap=None return_z_loss=False accum_dtype=None "
    "use_token_scaling=False return_token_accuracy=False return_predicted_tokens=False",
    "liger_rotary_pos_emb": "q k cos sin position_ids=None unsqueeze_dim=1",
    "LigerFusedLinearCrossEntropyLoss.forward": "self lin_weight _input target bias=None",
    "LigerCrossEntropyLoss.forward": "self _input target",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_arguments_have_their_order_and_defaults(name):
    thing = liger
    for part in name.split("."):
        thing = getattr(thing, part)
    found = [
        p.name if p.default is p.empty else f"{p.name}={p.default}"
        for p in inspect.signature(thing).parameters.values()
    ]
    assert found == SIGNATURES[name].split()


# The state of Liger's modules if only the size is given: every attribute that Liger (ead96b6) sets
# from an argument, and its parameters, all of which are trained.
LOSS = {"ignore_index": -100, "lse_square_scale": 0.0, "label_smoothing": 0.0, "reduction": "mean",
        "softcap": None, "return_z_loss": False, "return_token_accuracy": False,
        "return_predicted_tokens": False}  # fmt: skip
MLP = {"gate_proj.weight": (20, E), "up_proj.weight": (20, E), "down_proj.weight": (E, 20)}
DEFAULTS = {
    "LigerRMSNorm": ({"weight": torch.ones(E)}, {
        "variance_epsilon": 1e-6, "offset": 0.0, "casting_mode": "llama", "in_place": True,
        "row_mode": None, "elementwise_affine": True}),
    "LigerLayerNorm": ({"weight": torch.ones(E), "bias": torch.zeros(E)},
                       {"hidden_size": E, "eps": 1e-6, "variance_epsilon": 1e-6}),
    "LigerSwiGLUMLP": (MLP, {"hidden_size": E, "intermediate_size": 20}),
    "LigerGEGLUMLP": (MLP, {"hidden_size": E, "intermediate_size": 20}),
    "LigerCrossEntropyLoss": ({}, LOSS | {"weight": None}),
    "LigerFusedLinearCrossEntropyLoss": (
        {}, LOSS | {"ce_weight": None, "accum_dtype": None, "use_token_scaling": False},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_module_of_defaults_is_ligers(name):
    parameters, attributes = DEFAULTS[name]
    act = "gelu_pytorch_tanh" if "GEGLU" in name else "silu"
    size = {"Norm": (E,), "MLP": (_config(act),), "Loss": ()}
    module = getattr(liger, name)(*next(v for k, v in size.items() if name.endswith(k)))
    assert {each: getattr(module, each) for each in attributes} == attributes
    found = dict(module.named_parameters())
    assert [*found] == [*module.state_dict()] == [*parameters]
    for each, wanted in parameters.items():
        assert found[each].requires_grad
        if isinstance(wanted, Tensor):
            assert torch.equal(found[each], wanted.to(found[each]))
        else:
            assert found[each].shape == wanted


GIVEN = {  # each argument that a module keeps under its own name, with a value not its default
    "LigerRMSNorm": {
        "hidden_size": 5, "offset": 0.5, "casting_mode": "none", "in_place": False,
        "row_mode": True, "elementwise_affine": False,
    },
    "LigerLayerNorm": {"hidden_size": 5, "eps": 0.1},
    "LigerCrossEntropyLoss": {
        "ignore_index": 3, "lse_square_scale": 0.1, "label_smoothing": 0.2, "reduction": "sum",
        "softcap": 2.0, "return_token_accuracy": True, "return_predicted_tokens": True,
    },
    "LigerFusedLinearCrossEntropyLoss": {
        "ignore_index": 3, "lse_square_scale": 0.1, "label_smoothing": 0.2, "reduction": "none",
        "softcap": 2.0, "accum_dtype": torch.float32, "return_token_accuracy": True,
        "return_predicted_tokens": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GIVEN)
def test_a_module_keeps_what_it_is_given_under_its_name(name):
    module = getattr(liger, name)(**GIVEN[name])
    assert {each: getattr(module, each) for each in GIVEN[name]} == GIVEN[name]


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize("casting_mode", ["llama", "gemma", "none"])
@pytest.mark.parametrize(("offset", "init_fn"), [(0.0, "ones"), (1.0, "zeros"), (-0.5, "ones")])
def test_rms_norm(offset, init_fn, casting_mode):
    norm = liger.LigerRMSNorm(E, 1e-5, offset, casting_mode, init_fn)
    assert [*norm.state_dict()] == ["weight"]
    assert torch.equal(norm.weight, torch.full((E,), float(init_fn == "ones")))
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, E, requires_grad=True)
    truth = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (offset + norm.weight)
    _agree(norm(x), truth, [x, norm.weight])


def test_in_bfloat16_an_offset_and_a_softcap_round_once():
    """1 + w and capped logits have more digits than bfloat16 keeps. No element of the result may
    lose more than one rounding."""
    x, y = torch.randn(64, E).bfloat16(), torch.randint(E, (64,))
    norm = liger.LigerRMSNorm(E, offset=1.0, init_fn="zeros").bfloat16()
    nn.init.constant_(norm.weight, 0.003)
    rstd = (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    truth = x.double() * rstd * (1 + norm.weight.double())
    assert ((norm(x) - truth) / truth).mean().abs() < 5e-4  # it is 3e-3 if 1.003 became 1
    x = 20 * x
    loss = liger.LigerCrossEntropyLoss(softcap=30.0)(x, y)
    truth = nn.functional.cross_entropy(30 * torch.tanh(x.double() / 30), y)
    assert (loss - truth).abs() < 1e-5 * truth


def test_rms_norm_without_a_weight():
    norm, x = liger.LigerRMSNorm(E, elementwise_affine=False), torch.randn(4, E, requires_grad=True)
    assert [*norm.state_dict()] == []
    _agree(norm(x), x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(), [x])


@pytest.mark.parametrize("bias", [False, True])
def test_layer_norm(bias):
    norm = liger.LigerLayerNorm(E, 1e-3, bias)
    assert [*norm.state_dict()] == ["weight", "bias"]
    assert torch.equal(norm.bias, torch.zeros(E))
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(3, 5, E, requires_grad=True)
    truth = F.layer_norm(x, (E,), norm.weight, norm.bias, 1e-3)
    _agree(norm(x), truth, [x, norm.weight, norm.bias])


# ---------------------------------------------------------------- MLPs

MLPS = {
    "silu": (liger.LigerSwiGLUMLP, F.silu),
    "swish": (liger.LigerSwiGLUMLP, F.silu),
    "gelu_pytorch_tanh": (liger.LigerGEGLUMLP, lambda x: F.gelu(x, approximate="tanh")),
}


def _config(act: str) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=E, intermediate_size=20, hidden_act=act)


def _mlp_truth(mlp: nn.Module, x: Tensor, act) -> Tensor:
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    return F.linear(act(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("act", MLPS)
def test_a_gated_mlp(act):
    kind, function = MLPS[act]
    mlp, x = kind(_config(act)), torch.randn(2, 5, E, requires_grad=True)
    names = [f"{name}_proj.weight" for name in ("gate", "up", "down")]
    assert [*mlp.state_dict()] == names
    assert mlp.gate_proj.weight.shape == (20, E)
    _agree(mlp(x), _mlp_truth(mlp, x, function), [x, *mlp.parameters()])


def test_a_gemma_says_its_activation_under_another_name_which_goes_first():
    sizes = {"hidden_size": E, "intermediate_size": 20}
    gemma = SimpleNamespace(hidden_activation="gelu_pytorch_tanh", hidden_act="gelu", **sizes)
    assert liger.LigerGEGLUMLP(gemma).up_proj.weight.shape == (20, E)
    with pytest.raises(ValueError, match="got 'gelu_pytorch_tanh'"):
        liger.LigerSwiGLUMLP(gemma)
    for kind in (liger.LigerGEGLUMLP, liger.LigerSwiGLUMLP):
        for unsaid in ({"hidden_activation": None}, {"hidden_act": None}):
            kind(SimpleNamespace(**sizes, **unsaid))
        with pytest.raises(ValueError, match="has neither hidden_act nor hidden_activation"):
            kind(SimpleNamespace(**sizes, hidden_function="gelu"))
    older = SimpleNamespace(hidden_activation=None, hidden_act="silu", **sizes)
    with pytest.raises(ValueError, match="got 'silu'"):
        liger.LigerGEGLUMLP(older)


def test_each_mlp_takes_all_names_of_its_own_activation_and_no_other():
    gelu = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_tanh")
    names = {liger.LigerSwiGLUMLP: ("silu", "swish"), liger.LigerGEGLUMLP: gelu}
    for kind, own in names.items():
        for act in (*names[liger.LigerSwiGLUMLP], *gelu, "gelu", "relu"):
            if act in own:
                assert kind(_config(act)).config.hidden_act == act
            else:
                with pytest.raises(ValueError, match=f"one of {', '.join(own)}, got '{act}'$"):
                    kind(_config(act))


def test_a_printed_module_says_its_size_and_numbers():
    rms, layer = liger.LigerRMSNorm(E, 1e-3, 1.0), liger.LigerLayerNorm(E, 1e-4)
    assert str(rms) == f"LigerRMSNorm({E}, eps=0.001, offset=1.0)"
    assert str(layer) == f"LigerLayerNorm({E}, eps=0.0001)"


@pytest.mark.parametrize("act", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_an_adapter_in_an_mlp_is_called(name, act):
    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    kind, function = MLPS[act]
    mlp, x = kind(_config(act)), torch.randn(3, E, requires_grad=True)
    old = getattr(mlp, name)
    new = Twice(old.in_features, old.out_features, bias=False)
    new.weight.data.copy_(old.weight / 2)
    truth = _mlp_truth(mlp, x, function)
    setattr(mlp, name, new)
    _agree(mlp(x), truth, [x])


# ---------------------------------------------------------------- losses


def _case(ignored: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    x, head = torch.randn(N, E, requires_grad=True), torch.randn(V, E, requires_grad=True)
    labels = torch.randint(V, (N,))
    labels[:ignored] = -100
    return x, head, labels


OPTIONS = {
    "plain": {},
    "z-loss and smoothing": {"lse_square_scale": 1e-2, "label_smoothing": 0.1},
    "class weights": {"weight": torch.linspace(0.2, 3.0, V, dtype=torch.float64)},
    "softcap": {"softcap": 2.0},
    "softcap, z-loss and smoothing": {
        "softcap": 1.5, "lse_square_scale": 3e-2, "label_smoothing": 0.2,
    },
    "softcap and class weights": {
        "softcap": 1.5, "weight": torch.linspace(0.002, 0.03, V, dtype=torch.float64),  # sum < 1
    },
    "smoothing of all": {"label_smoothing": 1.0},
}  # fmt: skip


def _loss_truth(logits, labels, reduction, *, weight=None, lse_square_scale=0.0,
                label_smoothing=0.0, softcap=None):  # fmt: skip
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(
        logits, labels, weight, reduction=reduction, label_smoothing=label_smoothing
    )
    valid = labels != -100
    squares = lse_square_scale * logits.logsumexp(1).square() * valid
    if reduction == "none":
        return loss + squares
    return loss + squares.sum() / (valid.sum() if reduction == "mean" else 1)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy(options, reduction):
    logits, labels = torch.randn(N, V, requires_grad=True), _case()[2]
    options = OPTIONS[options]
    loss = liger.LigerCrossEntropyLoss(reduction=reduction, **options)
    assert [*loss.state_dict()] == []
    before = logits.detach().clone()
    _agree(loss(logits, labels), _loss_truth(logits, labels, reduction, **options), [logits])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_fused_linear_cross_entropy(options, biased, reduction):
    x, head, labels = _case()
    bias = torch.randn(V, requires_grad=True) if biased else None
    options = OPTIONS[options]
    renamed = {{"weight": "ce_weight"}.get(name, name): value for name, value in options.items()}
    loss = liger.LigerFusedLinearCrossEntropyLoss(
        reduction=reduction, accum_dtype=torch.float32, **renamed
    )
    truth = _loss_truth(F.linear(x, head, bias), labels, reduction, **options)
    _agree(loss(head, x, labels, bias), truth, [x, head] if bias is None else [x, head, bias])


@pytest.mark.parametrize("options", OPTIONS)
def test_the_mean_over_no_labels_is_zero_and_so_are_its_gradients(options):
    x, head, labels = _case(ignored=N)
    logits = torch.randn(N, V, requires_grad=True)
    more = dict(OPTIONS[options])
    weight = more.pop("weight", None)
    for loss, given in ((CE, (logits,)), (FUSED, (head, x))):
        found = loss(weight, **more, return_token_accuracy=True)(*given, labels)
        assert (found.loss.item(), found.token_accuracy.item()) == (0, 0)
        for grad in torch.autograd.grad(found.loss, given):
            assert not grad.any()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)])
def test_accuracy_and_predicted_tokens_come_beside_the_loss(asked, reduction):
    """As in Liger: -1 and a miss if the label is ignored, a mean over the others unless "none"."""
    x, head, labels = _case()
    with torch.no_grad():
        head[labels[-3:]] += 9 * x[-3:]  # three hits
    bias = torch.randn(V)
    logits = F.linear(x, head, bias)
    best, ignored = logits.argmax(1), labels == -100
    hits = ((best == labels) & ~ignored).float()
    assert hits.sum() >= 3
    options = dict(zip(("return_token_accuracy", "return_predicted_tokens"), asked))
    options |= {"reduction": reduction, "softcap": 20.0}
    for found, kind in (
        (liger.LigerCrossEntropyLoss(**options)(logits, labels), CE),
        (liger.LigerFusedLinearCrossEntropyLoss(**options)(head, x, labels, bias), FUSED),
    ):
        options = {"reduction": reduction, "softcap": 20.0}
        given = (logits, labels) if kind is CE else (head, x, labels, bias)
        assert torch.equal(found.loss, kind(**options)(*given))
        assert found.z_loss is None
        accuracy = hits if reduction == "none" else hits.sum() / (~ignored).sum()
        assert asked[0] == (found.token_accuracy is not None)
        if asked[0]:
            assert found.token_accuracy.dtype == torch.float32
            torch.testing.assert_close(found.token_accuracy, accuracy.float())
        assert asked[1] == (found.predicted_tokens is not None)
        if asked[1]:
            assert torch.equal(found.predicted_tokens, best.masked_fill(ignored, -1))


def test_class_weights_and_a_bias_may_have_another_dtype():
    """For example a loss in float32 with float64 weights, or a head of bfloat16, whose products are
    summed in float32, and whose largest logits may round to the same number."""
    x, head, labels = (t.detach() for t in _case())
    for dtype, limit in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):  # one rounding
        weight = torch.linspace(0.25, 2.0, V).to(dtype)
        x_, head_, bias = x.to(dtype), head.to(dtype), torch.randn(V)
        logits = F.linear(x_.double(), head_.double(), bias.to(dtype).double())
        truth = _loss_truth(logits, labels, "mean", weight=weight.double())
        found = FUSED(weight.double(), return_predicted_tokens=True)(head_, x_, labels, bias)
        assert found.loss.dtype == torch.float32
        assert (found.loss - truth).abs() < limit * truth
        predicted = logits.argmax(1).masked_fill(labels == -100, -1)
        assert (found.predicted_tokens == predicted).float().mean() > 0.9
        unweighted = CE(weight.double())(logits.float(), labels)
        assert unweighted.dtype == torch.float32
        assert (unweighted - truth).abs() < 1e-6 * truth
    norm = liger.LigerRMSNorm(E, elementwise_affine=False)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("ignored", [7, -1])  # -1 is also the prediction there
@pytest.mark.parametrize("options", OPTIONS)
def test_another_ignored_label_counts_nowhere(options, ignored):
    x, head, labels = _case(0)
    labels[[3, 5]], rest = ignored, OPTIONS[options]
    nowhere = labels == ignored
    logits, usual = F.linear(x, head), labels.masked_fill(nowhere, -100)
    extra = {"return_token_accuracy": True, "return_predicted_tokens": True}
    for reduction in ("mean", "sum", "none"):
        how = {"reduction": reduction, "ignore_index": ignored, **rest}
        weight = {"ce_weight": how.pop("weight")} if "weight" in how else {}
        one = CE(*weight.values(), **how, **extra)(logits, labels)
        other = FUSED(**weight, **how, **extra)(head, x, labels)
        truth = _loss_truth(logits, usual, reduction, **rest)
        predicted = logits.argmax(1).masked_fill(nowhere, -1)
        hits = ((predicted == labels) & ~nowhere).float()
        accuracy = hits if reduction == "none" else hits.sum() / (~nowhere).sum()
        for found in (one, other):
            torch.testing.assert_close(found.loss, truth, rtol=0, atol=TOLERANCE)
            assert torch.equal(found.predicted_tokens, predicted)
            torch.testing.assert_close(found.token_accuracy, accuracy.float())


# ---------------------------------------------------------------- rotary


@pytest.mark.parametrize("unsqueeze_dim", [1, 2])
@pytest.mark.parametrize("samples", [0, 1, 3])
def test_rotary(samples, unsqueeze_dim):
    angles = torch.randn(*([samples] if samples else []), 7, 4)  # one table without a batch
    cos, sin = (torch.cat((x, x), -1) for x in (angles.cos(), angles.sin()))
    q, k = (torch.randn(3, heads, 7, 8, requires_grad=True) for heads in (4, 2))

    def turn(x):
        half = torch.cat((-x[..., 4:], x[..., :4]), -1)
        return x * cos.unsqueeze(-3) + half * sin.unsqueeze(-3)

    def ours(q, k):
        if unsqueeze_dim == 1:
            return liger.liger_rotary_pos_emb(q, k, cos, sin)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        found = liger.liger_rotary_pos_emb(q, k, cos, sin, None, 2)
        return tuple(x.transpose(1, 2) for x in found)

    _agree(ours(q, k), (turn(q), turn(k)), [q, k])


# ---------------------------------------------------------------- errors

THREE, FOUR = torch.ones(4, 7, 8), torch.ones(2, 4, 7, 8)
CE, FUSED = liger.LigerCrossEntropyLoss, liger.LigerFusedLinearCrossEntropyLoss


def _rotary(shape, sin=None, **options):
    x = torch.ones(2, 4, 7, 8)
    return liger.liger_rotary_pos_emb(x, x, torch.ones(shape), torch.ones(sin or shape), **options)


REFUSED = {
    "casting": (lambda: liger.LigerRMSNorm(E, casting_mode="fp8"), "casting_mode must be"),
    "init": (lambda: liger.LigerLayerNorm(E, init_fn="randn"), "init_fn must be"),
    "act": (lambda: liger.LigerSwiGLUMLP(_config("gelu")), "hidden_act must be one of silu, swish"),
    "erf": (lambda: liger.LigerGEGLUMLP(_config("gelu")), "must be one of gelu_pytorch_tanh"),
    "reduction": (lambda: CE(reduction="max"), "reduction must be"),
    "smooth weights": (lambda: CE(torch.ones(V), label_smoothing=0.1),
                       "cannot be combined with label_smoothing"),
    "z weights": (lambda: FUSED(torch.ones(V), lse_square_scale=0.1),
                  "combined with lse_square_scale"),
    "softcap": (lambda: CE(softcap=0.0), "softcap must be positive"),
    "fused softcap": (lambda: FUSED(softcap=-30.0), "softcap must be positive"),
    "z-loss": (lambda: CE(return_z_loss=True), "return_z_loss = True is not supported"),
    "fused z-loss": (lambda: FUSED(return_z_loss=True), "return_z_loss = True is not supported"),
    "negative smoothing": (lambda: CE(label_smoothing=-0.1), "must be in 0..1, got -0.1"),
    "smoothing": (lambda: FUSED(label_smoothing=1.01), "label_smoothing must be in 0..1, got 1.01"),
    "flat sin": (lambda: _rotary((7, 8), (2, 7, 8)),
                 r"cos and sin must have shape .* got \[1, 7, 8\] and \[2, 7, 8\]"),
    "scaling": (lambda: FUSED(use_token_scaling=True), "use_token_scaling = True is not supp"),
    "accumulator": (lambda: FUSED(accum_dtype=torch.bfloat16), "accum_dtype = torch.bfloat16 is"),
    "bias": (lambda: FUSED()(*_case()[1::-1], _case()[2], torch.ones(V + 1)),
             f"bias must be .{V}., got"),
    "three dims": (lambda: CE()(torch.ones(2, 3, V), torch.ones(2, 3, dtype=torch.int64)),
                   "; flatten them"),
    "three q": (lambda: liger.liger_rotary_pos_emb(*[THREE, FOUR] * 2),
                "q and k must have four dims, got .4, 7, 8. and"),
    "three k": (lambda: liger.liger_rotary_pos_emb(*[FOUR, THREE] * 2),
                "q and k must have four dims, got .2, 4, 7, 8. and .4, 7, 8."),
    "flat logits": (lambda: CE()(torch.ones(V), torch.ones(V, dtype=torch.int64)), "flatten"),
    "labels": (
        lambda: FUSED()(torch.ones(V, E), torch.ones(6, E), torch.ones(2, 3, dtype=torch.int64)),
        "; flatten them",
    ),
    "weights of other classes": (
        lambda: CE(torch.ones(V + 1))(torch.ones(3, V), torch.zeros(3, dtype=torch.int64)),
        "weight must be",
    ),
    "tables of other samples": (lambda: _rotary((3, 7, 8)),
                                r"must have shape \[7, 8\], \[1, 7, 8\] or \[2, 7, 8\]"),
    "too few tokens": (lambda: _rotary((1, 6, 8)),
                       r"must have shape \[7, 8\], \[1, 7, 8\] or \[2, 7, 8\]"),
    "other labels": (lambda: CE()(torch.ones(3, V), torch.ones(2, dtype=torch.int64)),
                     r"got \[3, 31\] and \[2\]"),
    "dim": (lambda: _rotary((1, 7, 8), unsqueeze_dim=0), "unsqueeze_dim must be 1 or 2"),
    "half": (lambda: _rotary((1, 7, 4)),
             r"cos and sin must have shape \[7, 8\], \[1, 7, 8\] or \[2, 7, 8\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_in_a_line(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as refusal:
        call()
    one_line(refusal)
