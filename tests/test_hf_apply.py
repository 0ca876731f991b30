"""The arguments and report of `warpweave.hf.apply`: inputs to compare on, kinds, reasons, ranks;
and the state it leaves after an error."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import computed, make, perturbed, reported  # noqa: E402
from refused import check  # noqa: E402
from threads import on_mesh  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import attention, loss, model, norm  # noqa: E402
from warpweave.hf.changes import NAME  # noqa: E402
from warpweave.hf.patch import always_ours, ours_always  # noqa: E402
from warpweave.hf.probe import kind_of, quietly  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def llama(kind: type = transformers.LlamaForCausalLM) -> nn.Module:
    """Make a model of one layer, with weights large enough that wrong attention shows."""
    made = make("llama", num_hidden_layers=1, pad_token_id=None, initializer_range=0.3).eval()
    made.__class__ = kind
    made.set_attn_implementation("eager")
    return made


@contextmanager
def heard(module: nn.Module) -> Iterator[list[dict]]:
    """Record the calls of the module in the block."""
    calls: list[dict] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs),
                                            with_kwargs=True)  # fmt: skip
    try:
        yield calls
    finally:
        hook.remove()


# ---------------------------------------------------------------- inputs


class Dumb(transformers.LlamaForCausalLM):
    """A model without default inputs."""

    @property
    def dummy_inputs(self):
        raise AssertionError("asked for its own inputs")


def test_a_model_is_compared_on_the_example_that_is_given():
    tokens = torch.arange(15).view(3, 5)
    hidden = torch.ones_like(tokens)
    hidden[1, :3] = 0
    for kinds in (["attention"], ["loss"], ["attention", "loss"]):
        for example in ({"input_ids": tokens}, {"input_ids": tokens, "attention_mask": hidden}):
            made = llama(Dumb)
            with heard(made) as calls:
                given = {**example, "names": "no tensor"}  # padding sees other tokens in "eager"
                assert len(reported(made, only=kinds, example=given).replaced()) == len(kinds)
            assert calls
            assert all(torch.equal(each["input_ids"], tokens) for each in calls)
            masks = [each["attention_mask"] for each in calls if "attention_mask" in each]
            if "attention_mask" in example:  # that mask, and no other
                assert len(masks) == len(calls)
                assert all(torch.equal(each, hidden) for each in masks)
            elif kinds == ["loss"]:
                assert not masks
            else:  # unpadded, then with two tokens of all samples but the first hidden
                padded = torch.tensor([[1] * 5, [0, 0, 1, 1, 1], [0, 0, 1, 1, 1]])
                assert len(masks) == 2
                assert all(torch.equal(each, padded) for each in masks)


def test_of_samples_of_two_tokens_none_is_hidden():
    for length, masks in ((2, 0), (3, 2)):
        made = llama()
        with heard(made) as calls:
            ww.apply(made, only="attention", example={"input_ids": torch.ones(2, length).long()},
                     report=ww.Report())  # fmt: skip
        assert sum("attention_mask" in each for each in calls) == masks


# ---------------------------------------------------------------- kinds and reasons


@pytest.mark.parametrize("only", [[], set(), ["norm", "mlps"], "attn", ("loss", "")])
def test_kinds_that_there_are_not_or_none_are_refused_as_they_were_given(only):
    got = re.escape(repr(only))
    words = f"^`only` must be one or more of norm, mlp, attention, loss.*got {got}$"
    check(lambda: ww.apply(nn.LayerNorm(4), only=only), words)


def test_every_reason_is_given_once_where_nothing_is_replaced():
    foreign = [nn.LayerNorm(4), nn.LayerNorm(4)]
    for each in foreign:
        each.forward = lambda x: x
    scaled = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    words = (
        "^nothing to replace in ModuleList: it has several activations, or one that warpweave does "
        "not support; its forward was replaced by other code; no transformers model$"
    )
    check(lambda: ww.apply(nn.ModuleList([*foreign, scaled])), words)


@pytest.mark.parametrize("kind", ww.KINDS)
def test_a_report_is_of_the_kinds_that_were_asked_for(kind):
    """It also covers rotations, which are checked together with attention."""
    beside = {"rotary"} if kind == "attention" else set()
    assert {e.kind for e in reported(llama(), only=kind).entries} == {kind} | beside
    more = reported(llama(), only={"norm", kind})
    assert {e.kind for e in more.entries} == {"norm", kind} | beside
    assert {e.kind for e in more.replaced()} == {"norm", kind}


def test_a_model_with_a_single_parameter_that_is_not_loaded_is_refused():
    made = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4, device="meta"), nn.LayerNorm(4)])
    check(lambda: ww.apply(made), "ModuleList has parameters on the meta device; load it")


def _printed(mesh) -> None:
    ww.apply(nn.LayerNorm(4), only="norm")


def test_the_first_rank_alone_prints(capsys):
    on_mesh(Mesh(tp=3), _printed)
    words = ["1", "x", "LayerNorm", "norm", "replaced", "layer_norm"]
    assert capsys.readouterr().out.split() == words


# ---------------------------------------------------------------- errors


def test_attention_that_changes_the_output_is_reverted_and_the_rest_stays(monkeypatch):
    made = llama()
    wanted = made(torch.arange(8)[None]).logits
    monkeypatch.setattr(model, "agree", lambda *_, **__: False)
    report = reported(made, only=["norm", "attention"])
    assert [e.why for e in report.kept("attention")] == ["the model's output was different"]
    assert len(report.replaced("norm")) == 3
    assert made.config._attn_implementation == made.model.config._attn_implementation == "eager"
    found = made(torch.arange(8)[None]).logits
    assert torch.allclose(found, wanted, atol=1e-5)  # our norms round elsewhere
    ww.revert(made)
    assert made.config._attn_implementation == "eager"


class Broken(transformers.LlamaForCausalLM):
    def forward(self, input_ids=None, **rest):
        raise ValueError("not\n  me")


def without_layers() -> nn.Module:
    made = llama()
    del made.model.layers[:]
    return made


BROKEN = "it does not run on `example` (default: its dummy_inputs): not me"


@pytest.mark.parametrize(
    ("make", "why"),
    [(lambda: llama(Broken), BROKEN), (without_layers, "no module called it")],
    ids=["its forward fails", "no attention"],
)
def test_why_an_attention_stays_is_said(make, why):
    outer = nn.ModuleDict({"inner": make()})
    kept = reported(outer, only=["norm", "attention"]).kept("attention")
    assert [(e.name, e.why) for e in kept] == [("inner", why)]
    assert outer["inner"].config._attn_implementation == "eager"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_whatever_ends_apply_leaves_the_model_as_it_was(error, monkeypatch):
    made = llama()
    before = {n: dict(vars(m)) for n, m in made.named_modules()}

    def fail(*_):
        assert made.config._attn_implementation == attention.NAME
        raise error

    monkeypatch.setattr(loss, "find_loss_form", fail)
    with pytest.raises(error):
        ww.apply(made)
    assert made.config._attn_implementation == "eager"
    assert {n: vars(m) for n, m in made.named_modules()} == before


def test_every_configuration_of_a_model_of_several_is_put_back():
    """For example those of an encoder and a decoder that are separate models."""
    bert = {"vocab_size": 31, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 8, "max_position_embeddings": 32}  # fmt: skip
    configs = [transformers.BertConfig(**bert, pad_token_id=0) for _ in range(2)]
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*configs)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    made = transformers.EncoderDecoderModel(config).eval()
    made.set_attn_implementation("eager")
    parts = [m for m in made.modules() if isinstance(m, transformers.PreTrainedModel)]
    tokens = torch.arange(3, 17).view(2, 7)
    example = {"input_ids": tokens, "decoder_input_ids": tokens.roll(1, 1)}
    wanted = made(**example).logits
    report = reported(made, only="attention", example=example)
    assert len(report.replaced("attention")) == 3  # in the encoder, the decoder, and between them
    assert {part.config._attn_implementation for part in parts} == {attention.NAME}
    assert torch.allclose(made(**example).logits, wanted, atol=1e-5)
    ww.revert(made)
    assert {part.config._attn_implementation for part in parts} == {"eager"}


# ---------------------------------------------------------------- models of one kind


class Part(nn.Module):
    def __init__(self, *, number=3, word="a", function=torch.tanh, width=4, layer_idx=0) -> None:
        super().__init__()
        self.number, self.word, self.function, self.layer_idx = number, word, function, layer_idx
        self.weight = nn.Parameter(torch.ones(width))


def holder(part: nn.Module, **own) -> nn.Module:
    made = nn.Sequential(part)
    for name, value in own.items():
        setattr(made, name, value)
    return made


KINDS = {  # whether it is of one kind with `holder(Part())`
    "another": (holder(Part()), True),
    "of another layer": (holder(Part(layer_idx=7)), True),
    "a number": (holder(Part(number=4)), False),
    "a word": (holder(Part(word="b")), False),
    "a function": (holder(Part(function=torch.relu)), False),
    "a shape": (holder(Part(width=5)), False),
    "a dtype": (holder(Part()).double(), False),
    "a number above": (holder(Part(), number=1), False),
    "a part": (holder(nn.Sequential(Part())), False),
    "a truth": (holder(Part(), flag=True), False),
    "its forward": (holder(Part(), forward=len), True),
}


@pytest.mark.parametrize("name", KINDS)
def test_modules_are_of_one_kind_if_nothing_that_counts_differs(name):
    made, same = KINDS[name]
    assert (kind_of(made) == kind_of(holder(Part()))) is same
    assert hash(kind_of(made)) == hash(kind_of(copy.copy(made)))


def test_quietly_restores_modes_random_state_and_grad_mode_after_an_error():
    made = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.Linear(2, 2)))
    made[1].eval()
    modes, draws = [m.training for m in made.modules()], []

    def fail(training: bool) -> None:
        with quietly(made, training=training):
            assert {m.training for m in made.modules()} == {training}
            assert always_ours()
            assert not torch.is_grad_enabled()
            draws.append(torch.rand(3))
            with ours_always():
                pass
            assert always_ours()
            with quietly(made[1], training=not training):
                assert made[1].training is not training
                assert made.training is training
            assert made[1].training is training
            raise ZeroDivisionError

    for training in (True, False):
        torch.rand(1)  # must not affect the numbers drawn within
        state = torch.get_rng_state()
        with pytest.raises(ZeroDivisionError):
            fail(training)
        assert [m.training for m in made.modules()] == modes
        assert torch.equal(torch.get_rng_state(), state)
        assert not always_ours()
        assert torch.is_grad_enabled()
    assert torch.equal(*draws)


# ---------------------------------------------------------------- norms with several numbers


class Numbered(nn.Module):
    """An RMSNorm with small numbers other than its eps; the first looks like one."""

    def __init__(self, *, first=1e-3, eps=1e-5) -> None:
        super().__init__()
        self.momentum, self.epsilon, self.zero = first, eps, 0.0
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)


def test_of_several_small_numbers_the_one_that_is_its_eps_is_read():
    for eps in (1e-5, 3e-2, 0.0999):
        found = norm.find_norm_form(Numbered(eps=eps))
        assert (found.eps, found.layer) == ("epsilon", False)
    assert isinstance(norm.find_norm_form(Numbered(eps=0.1)), str)
    both = norm.find_norm_form(nn.LayerNorm(8, eps=0.0))
    assert both.eps == "eps"


def whole_numbers() -> nn.Module:
    made = Numbered()
    made.weight = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)
    return made


def test_a_norm_has_a_single_width_and_weights_that_are_floats():
    assert norm.find_norm_form(whole_numbers()) == "quantized weights"
    for shape in ((2, 8), ()):
        flat = Numbered()
        flat.weight, flat.normalized_shape = None, shape
        assert norm.find_norm_form(flat) == "it has no weight that shows its width"
    flat.forward = lambda x: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + flat.epsilon)
    for flat.normalized_shape in ((8,), [8], torch.Size([8])):
        assert norm.find_norm_form(flat).eps == "epsilon"


def test_torchs_norms_are_known_in_every_dtype():
    for kind in (nn.LayerNorm, nn.RMSNorm):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            theirs = kind(8, eps=1e-5).to(dtype)
            found = norm.find_norm_form(theirs)
            assert isinstance(found, norm.NormForm), (kind, dtype)
            assert str(found) == ("layer_norm" if kind is nn.LayerNorm else "rms_norm")
            for cast in (False, True):
                x = torch.randn(3, 8).to(dtype)
                with torch.autocast("cpu", torch.bfloat16, enabled=cast), ours_always():
                    assert found.forward(theirs, x).dtype == theirs(x).dtype


# ---------------------------------------------------------------- copies


def _saved_and_loaded(made: nn.Module, folder) -> nn.Module:
    torch.save(made, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=False)


COPIES = {
    "pickled": lambda made, folder: pickle.loads(pickle.dumps(made)),
    "saved": _saved_and_loaded,
    "copied": lambda made, folder: copy.deepcopy(made),
}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss"])
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_computes_the_same_by_itself_and_can_be_reverted(way, family, tmp_path):
    made = ww.apply(perturbed(family), report=ww.Report())
    wanted = computed(made)
    twin = COPIES[way](made, tmp_path)
    assert inspect.signature(twin.forward) == inspect.signature(made.forward)
    assert all(map(torch.equal, computed(twin).values(), wanted.values()))
    assert loss.is_installed(twin)
    replaced = {n for n, m in made.named_modules() if "forward" in vars(m)}
    assert {n for n, m in twin.named_modules() if "forward" in vars(m)} == replaced
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert all(map(torch.equal, computed(made).values(), wanted.values()))  # nothing is shared
    ww.revert(twin)
    assert not any({"forward", NAME} & {*vars(m)} for m in twin.modules())
    assert loss.is_installed(made)


def test_another_process_loads_what_was_saved(tmp_path):
    """That process does not import our package itself."""
    made = ww.apply(perturbed("llama").eval(), only="attention", report=ww.Report())
    torch.save(made, tmp_path / "model.pt")
    run = (
        "import sys, torch\n"
        "model = torch.load(sys.argv[1], weights_only=False)\n"
        "torch.save(model(torch.arange(8)[None]).logits, sys.argv[2])"
    )
    files = [str(tmp_path / name) for name in ("model.pt", "logits.pt")]
    subprocess.run([sys.executable, "-P", "-c", run, *files], check=True)
    with torch.no_grad():
        wanted = made(torch.arange(8)[None]).logits
    torch.testing.assert_close(torch.load(files[1]).detach(), wanted)


def test_accelerate_binds_and_unwraps_a_replaced_forward():
    """With mixed precision it uses `forward.__func__`, and later follows `__wrapped__`."""
    made = ww.apply(perturbed("gpt2").eval(), report=ww.Report())
    wanted = made(torch.arange(8)[None]).logits
    bound = MethodType(made.forward.__func__, made)
    torch.testing.assert_close(bound(torch.arange(8)[None]).logits, wanted, rtol=0, atol=0)
