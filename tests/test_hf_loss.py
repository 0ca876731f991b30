"""The fused loss of `warpweave.hf` one part at a time: supported heads and terms, the loss
functions of models, and the reasons why a model keeps its own."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import Lora  # noqa: E402
from refused import check  # noqa: E402
from sharded import draw  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import changes, loss, seen  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
E, V = 6, 13


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (loss.LossForm(), ""),
        (loss.LossForm(0.0625), ", logits * 0.0625"),
        (loss.LossForm(1 / 3), ", logits * 0.333333"),
        (loss.LossForm(softcap=30.0), ", softcap 30"),
        (loss.LossForm(softcap=2.5), ", softcap 2.5"),
    ],
)
def test_a_report_says_what_is_done_to_logits(form, said):
    assert str(form) == f"linear_cross_entropy{said}"


# ---------------------------------------------------------------- heads


def adapted(*active: str, bias: bool = True, base: type = nn.Linear) -> Lora:
    return Lora(base(E, V, bias), *active)


def logits_of(head: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (by the terms, by the head), each with the same draws."""
    terms = loss.head_terms(head)
    torch.manual_seed(3)
    wide, weight = terms(x)
    torch.manual_seed(3)
    return wide @ weight.T, head(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "active", [(), ("a",), ("b",), ("b", "a"), ("a", "c", "b"), ("elsewhere", "c")]
)
def test_the_terms_of_a_head_are_those_of_all_its_active_adapters(active, bias):
    torch.manual_seed(0)
    head, x = adapted(*active, bias=bias).double(), draw(0, 2, 3, E)
    for training in (True, False):
        ours, theirs = logits_of(head.train(training), x)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    ours, theirs = logits_of(nn.Linear(E, V, bias).double(), x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def named(head: Lora, **values) -> Lora:
    for name, value in values.items():
        setattr(head, name, value)
    return head


def changed(head: Lora, path: str, part: nn.Module) -> Lora:
    where, _, name = path.rpartition(".")
    head.get_submodule(where).__setattr__(name, part)
    return head


def hooked(head: nn.Module, path: str = "") -> nn.Module:
    head.get_submodule(path).register_forward_hook(lambda *_: None)
    return head


HEADS = {  # whether its terms are known
    "an adapter": (lambda: adapted("a"), True),
    "several": (lambda: adapted("a", "b", "c"), True),
    "an odd one that is not active": (lambda: named(adapted("a"), lora_variant={"b": 1}), True),
    "an odd one": (lambda: named(adapted("a", "b"), lora_variant={"b": 1}), False),
    "merged": (lambda: named(adapted("a"), merged=True), False),
    "disabled": (lambda: named(adapted("a"), disable_adapters=True), False),
    "a bias of A": (lambda: changed(adapted("a"), "lora_A.a", nn.Linear(E, 2)), False),
    "a bias of B": (lambda: changed(adapted("a", "b"), "lora_B.b", nn.Linear(3, V)), False),
    "another A": (lambda: changed(adapted("b"), "lora_A.b", Doubled(E, 3, bias=False)), False),
    "of one not active": (lambda: changed(adapted("b"), "lora_A.a", Doubled(E, 2)), True),
    "hooked": (lambda: hooked(adapted("a")), False),
    "a hooked base": (lambda: hooked(adapted("a"), "base_layer"), False),
    "a hooked B": (lambda: hooked(adapted("a"), "lora_B.a"), False),
    "a forward of its own": (lambda: named(adapted("a"), forward=len), False),
    "another base": (lambda: adapted("a", base=Doubled), False),
    "a linear layer": (lambda: nn.Linear(E, V), True),
    "a hooked one": (lambda: hooked(nn.Linear(E, V)), False),
    "a subclass": (lambda: Doubled(E, V), False),
    "something else": (nn.Tanh, False),
    "a wrapper": (lambda: nn.Sequential(nn.Linear(E, V)), False),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_fused_if_it_is_a_sum_of_products_and_nothing_more(name):
    make, known = HEADS[name]
    assert (loss.head_terms(make()) is not None) is known


# ---------------------------------------------------------------- the loss function

ORDER = ("num_items_in_batch", "ignore_index", "shift_labels")


@pytest.mark.parametrize("placed", range(4))
def test_a_loss_function_takes_its_options_by_place_and_by_name(placed):
    head, x, labels = nn.Linear(E, V, bias=False).double(), draw(0, 2, 5, E), torch.arange(10) % V
    labels = labels.view(2, 5)
    model = SimpleNamespace(get_output_embeddings=lambda: head)
    compute = functools.partial(loss._loss_function, model, loss.LossForm())
    shifted, none = labels.roll(2, 1), torch.empty(2, 5, V, device="meta")
    for items, ignored, shift in itertools.product((None, 7, torch.tensor(3)), (-100, 4), (0, 1)):
        values = (items, ignored, shifted if shift else None)
        rest = dict(zip(ORDER[placed:], values[placed:]))
        wanted = ForCausalLMLoss(head(x), labels, V, *values)  # in 32 bits
        for of in (
            ([x, head.weight], none),
            ([x, head.weight], head(x)),  # the case with some
            ([], head(x)),
        ):
            found = compute(*of, labels, V, *values[:placed], **rest)
            torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-6, atol=0)
    words = f"head has {V} rows, but the loss has vocab_size = {V + 1}"
    check(lambda: compute([x, head.weight], none, labels, V + 1), words)


# ---------------------------------------------------------------- models


SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None, "initializer_range": 0.3,
}  # fmt: skip
Llama = transformers.LlamaForCausalLM


def make(kind: type = Llama) -> nn.Module:
    torch.manual_seed(0)
    model = kind(transformers.LlamaConfig(**SIZES))
    model.set_attn_implementation("eager")
    return model


def ids() -> torch.Tensor:
    return torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(1))


def quiet(model: nn.Module, **options) -> nn.Module:
    return ww.apply(model, report=ww.Report(), **options)


def test_labels_are_found_wherever_they_stand():
    wanted = make().train()(ids(), labels=ids()).loss
    out = quiet(make(), only="loss").train()(ids(), None, None, None, None, ids())
    assert out.logits is None
    torch.testing.assert_close(out.loss, wanted)


class Twice(Llama):
    def forward(self, input_ids=None, labels=None, **rest):
        super().forward(input_ids, **rest)
        return super().forward(input_ids, labels=labels, **rest)


class Shifted(Llama):
    def forward(self, input_ids=None, labels=None, **rest):
        out = super().forward(input_ids, labels=labels, **rest)
        out.logits = out.logits + 1
        return out


class Unlabelled(Llama):
    def forward(self, input_ids=None, **rest):
        return super().forward(input_ids, **rest)


class Failing(Llama):
    def forward(self, input_ids=None, labels=None, **rest):
        if labels is not None:
            raise RuntimeError("no labels\nof mine")
        return super().forward(input_ids, **rest)


class Own(Llama):
    def forward(self, input_ids=None, labels=None, **rest):
        out = super().forward(input_ids, labels=labels, **rest)
        if labels is not None:
            out.loss = out.logits.square().mean()
        return out


class Reading(Llama):
    def forward(self, input_ids=None, labels=None, **rest):
        out = super().forward(input_ids, labels=labels, **rest)
        if labels is not None:
            out.loss = out.loss + 0 * out.logits.max().item()
        return out


def masked() -> nn.Module:
    model = make()
    model.loss_type = "ForMaskedLM"
    return model


def with_head(head: nn.Module | None) -> nn.Module:
    model = make()
    model.lm_head = head
    return model


KEPT = {
    "two forwards": (
        lambda: make(Twice), "its forward does not compute logits from its head exactly once"
    ),
    "other logits": (lambda: make(Shifted), "its logits are not its head's output"),
    "no labels": (lambda: make(Unlabelled), "its forward has no labels"),
    "no forward": (
        lambda: make(Failing),
        "it does not run on `example` (default: its dummy_inputs): no labels of mine",
    ),
    "a loss of its own": (lambda: make(Own), "its loss does not come from its loss_function"),
    "reads logits": (lambda: make(Reading), "its forward needs the logits: "),
    "masked": (masked, "its loss is not that of a causal language model"),
    "a head": (lambda: with_head(Doubled(16, 31)), "its head is not a plain linear layer"),
    "a wrapped one": (
        lambda: with_head(nn.Sequential(nn.Linear(16, 31))), "its head is not a plain linear layer",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_model_that_keeps_its_loss_is_as_it_was_and_the_report_says_why(name):
    make_model, why = KEPT[name]
    model = make_model().eval()
    before = {n: dict(vars(m)) for n, m in model.named_modules()}
    report = ww.Report()
    ww.apply(model, only=("norm", "loss"), report=report)
    assert not loss.is_installed(model)
    (entry,) = report.kept("loss")
    assert entry.why.startswith(why)
    assert "\n" not in entry.why
    assert (entry.name, entry.module) == ("", type(model).__name__)
    assert not report.replaced("loss")
    assert not any(map(seen.has_hooks, model.modules()))
    ww.revert(model)
    assert {n: vars(m) for n, m in model.named_modules()} == before


class Minded(Llama):
    """A model that reads more fields of its configuration, and of a nested one."""

    def forward(self, input_ids=None, labels=None, **rest):
        config = self.config
        _ = config.factor, config.inner.factor, config.inner.vocab_size, config.inner.use_cache
        _ = config.vocab_size, config.output_more, config.inner.output_more, self.config.use_cache
        return super().forward(input_ids, labels=labels, **rest)


def test_numbers_a_forward_may_compute_with_are_watched_and_others_are_not():
    model = make(Minded)
    more = {"factor": 1.0, "output_more": False, "vocab_size": 31, "use_cache": True}
    model.config.inner = transformers.PretrainedConfig()
    for name, value in more.items():
        setattr(model.config, name, value)
        setattr(model.config.inner, name, value)
    numbers = {"times": 3, "ratio": 0.5, "pair": (1, 2), "flag": True}
    others = {"word": "a", "things": [1], "call": len, "_own": 5, "output_own": 1}
    for name, value in (numbers | others).items():
        setattr(model, name, value)
    form = loss.find_loss_form(model, {"input_ids": ids()})
    assert isinstance(form, loss.LossForm), form
    assert {*others, "model", "lm_head", "vocab_size"} <= {*form.live}
    assert not {*numbers} & {*form.live}
    assert {("factor",), ("inner", "factor")} <= {path for path, _ in form.fields}
    assert not {path[-1] for path, _ in form.fields} & (more.keys() - {"factor"})
    loss.install(model, form)
    config, inner = model.config, model.config.inner
    for holder, name in [*((model, n) for n in numbers), (config, "factor"), (inner, "factor")]:
        before = getattr(holder, name)
        setattr(holder, name, (7, 7))
        assert seen.changed(model), name
        setattr(holder, name, before)
    handed_on = (config, "output_more"), (inner, "use_cache"), (inner, "output_more")
    for holder, name in [*((model, n) for n in others), *handed_on]:
        setattr(holder, name, 7)
    config.use_cache = False
    assert not seen.changed(model)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("own", [None, lambda x: x + 1])
@pytest.mark.parametrize("run", [loss._patched, loss._compiled_loss])
def test_a_head_that_was_caught_is_as_it_was_also_after_an_error(run, own, fails):
    """This includes heads with their own forward, as over ranks or in a device map, and heads with
    two names in the model."""
    model, head = nn.Module(), nn.Tanh()
    model.first, model.other, model.again = head, nn.Tanh(), head
    if own is not None:
        head.forward = own
    changes.note(model, loss._Fused(loss.LossForm(), loss._StandIn()))
    before, children, x = dict(head.__dict__), dict(model._modules), torch.ones(2)
    plain, ended = head(x), []

    def inside() -> torch.Tensor:
        found = model.first(x) + 10 * model.again(x) + model.other(x)
        if fails:
            raise LookupError
        return found

    try:
        ended = [run(model, head, lambda x: 2 * x, inside)]
    except LookupError:
        assert fails
    assert len(ended) == (not fails)
    for found in ended:
        assert torch.equal(found, 2 * x + 20 * x + x.tanh())
    assert dict(head.__dict__) == before
    assert dict(model._modules) == children
    assert torch.equal(head(x), plain)
    assert changes.known(model, loss._Fused).stand_in.catch is None
