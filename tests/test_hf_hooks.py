"""Hooks, forwards, options and copies of a model that `apply(mesh=...)` spread over ranks: each
acts as on one device, or is rejected by name."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import assert_all_close, batch, perturbed  # noqa: E402
from ranks import run_ranks  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.layers.sharding.dtensor import whole  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SP = {"sequence_parallel": True}
LAYOUTS = {"cp": ({"cp": 2}, {}), "sp": ({"tp": 2}, SP), "tp": ({"tp": 2}, {})}


# ---------------------------------------------------------------- 1. changes
#
# Hooks return their handles. Once these are removed, the model is reused for the next case.


def block(model: nn.Module, n: int = 1) -> nn.Module:
    return model.transformer.h[n]


def mixed(model: nn.Module) -> list:
    hook = lambda _, args, y: y - y.mean(1, keepdim=True) / 2  # noqa: E731
    return [block(model, 0).register_forward_hook(hook)]


def with_input(model: nn.Module) -> list:
    """Add a layer's input to its output, in the reverse order of tokens."""
    hook = lambda _, args, y: y + args[0].flip(1) / 2  # noqa: E731
    return [block(model, 0).register_forward_hook(hook)]


def steered(model: nn.Module) -> list:
    vector = torch.linspace(-1, 1, 16 * 32, dtype=torch.float64).view(16, 32)
    hook = lambda _, args: (args[0] + vector, *args[1:])  # noqa: E731
    return [block(model).register_forward_pre_hook(hook)]


def clipped(model: nn.Module) -> list:
    """Return a layer's gradients, each divided by the largest of its row."""

    def scale(_, grads: tuple, *more: tuple) -> tuple:
        return (grads[0] / grads[0].abs().amax((1, 2), keepdim=True), *grads[1:])

    return [
        block(model, 0).register_full_backward_pre_hook(scale),
        block(model).register_full_backward_hook(scale),
    ]


def loud_head(model: nn.Module) -> list:
    return [model.lm_head.register_forward_hook(lambda _, args, y: y * 10)]


def quiet_head(model: nn.Module) -> list:
    return [model.lm_head.register_full_backward_hook(lambda _, grads, __: (grads[0] / 2,))]


def own_head(model: nn.Module) -> None:
    head = model.lm_head
    head.forward = lambda x: 3 * nn.functional.linear(x, head.weight)


def own_mlp(model: nn.Module) -> None:
    before = block(model).mlp.forward
    block(model).mlp.forward = lambda x: before(x) + x


def doubled(model: nn.Module, name: str = "mlp") -> list:
    module = block(model).get_submodule(name)
    return [module.register_forward_hook(lambda _, args, y: 2 * y)]


def halved(model: nn.Module) -> list:
    hook = lambda _, grads, __: (grads[0] / 2,)  # noqa: E731
    return [block(model).mlp.register_full_backward_hook(hook)]


def shortened(model: nn.Module) -> None:
    model.transformer.h = model.transformer.h[:1]


def cut_in_front(model: nn.Module) -> None:
    """The input of the remaining model is rejected or correct, although the first layer is gone."""
    model.transformer.h = model.transformer.h[1:]
    block(model, 0).ln_2 = nn.LayerNorm(32).double()


def renewed(model: nn.Module) -> None:
    model.transformer.h[1] = perturbed("gpt2").double().transformer.h[0]


def everywhere(model: nn.Module) -> list:
    hook = lambda module, args, y: 1.5 * y if module is block(model).ln_1 else None  # noqa: E731
    return [nn.modules.module.register_module_forward_hook(hook)]


STATES = {"output_hidden_states": True}
EQUAL = ""
TOKENS = "would see only one rank's tokens"
HEADS = "would see only one rank's heads or hidden units"
FORWARD = "its forward was replaced"
LAYERS = "but tokens stay sharded over ranks from the first to the last of the 2"
# The change, the request, and the outcome in each layout.
CASES = {
    "hidden states": (lambda m: [], STATES, (EQUAL,) * 3),
    "hidden states, recomputed": (
        lambda m: m.gradient_checkpointing_enable({"use_reentrant": False}), STATES, (EQUAL,) * 3,
    ),
    "states of a hooked layer": (mixed, STATES, (EQUAL,) * 3),
    "tokens mixed between layers": (mixed, {}, (EQUAL,) * 3),
    "a hook that reads the input": (with_input, {}, (EQUAL,) * 3),
    "a steering vector": (steered, {}, (EQUAL,) * 3),
    "backward hooks of layers": (clipped, {}, (EQUAL,) * 3),
    "a hook of the head": (loud_head, {}, (EQUAL,) * 3),
    "a backward hook of the head": (quiet_head, {}, (EQUAL,) * 3),
    "a head's forward": (own_head, {}, (EQUAL, FORWARD, FORWARD)),
    "a module's forward": (own_mlp, {}, (FORWARD,) * 3),
    "a hook of a sharded module": (doubled, {}, (TOKENS, TOKENS, EQUAL)),
    "a hook inside a sharded module": (
        functools.partial(doubled, name="attn.c_attn"), {}, (TOKENS, TOKENS, HEADS),
    ),
    "a hook of a norm": (functools.partial(doubled, name="ln_2"), {}, (TOKENS, TOKENS, EQUAL)),
    "a backward hook of a sharded module": (halved, {}, (TOKENS, TOKENS, HEADS)),
    "fewer layers": (shortened, {}, (LAYERS, LAYERS, EQUAL)),
    "a new norm behind a removed layer": (cut_in_front, {}, (LAYERS, LAYERS, EQUAL)),
    "another layer": (renewed, {}, (LAYERS, LAYERS, EQUAL)),
    "a hook of all modules": (everywhere, {}, ("a global forward hook would see only one",) * 3),
}  # fmt: skip


def computed(model: nn.Module, options: dict) -> dict | str:
    """Return loss and gradients of a changed model, with those of its
    hidden states; or the error."""
    model.zero_grad()
    try:
        out = model.train()(**batch(), use_cache=False, **options)
    except ValueError as error:
        return str(error)
    loss, found = out.loss, {}
    for n, x in enumerate(out.hidden_states or ()):
        found[f"state {n}"] = x.detach()
        weight = torch.linspace(n, 1, x.shape[1] * 32, dtype=torch.float64).sin().view(-1, 32)
        loss = loss + (x * weight).sum()
    loss.backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, **grads}


def cases(fresh) -> dict[str, dict | str]:
    """Return the outcome of each case on models made by `fresh`."""
    found, model = {}, None
    for name, (change, options, _) in CASES.items():
        model = model or fresh()
        hooks = change(model)
        found[name] = computed(model, options)
        for hook in hooks or ():
            hook.remove()
        if hooks is None:
            model = None
    return found


@functools.cache  # gloo's threads of every group wake up a hundred times per second
def connected(layout: str):
    return Mesh(**LAYOUTS[layout][0]).connect()


def spread(layout: str, family: str = "gpt2", dtype: torch.dtype = torch.float64) -> nn.Module:
    _, options = LAYOUTS[layout]
    model = perturbed(family).to(dtype)
    ww.apply(model, mesh=connected(layout), report=ww.Report(), **options)
    assert ww.loss.is_installed(model)
    return model


@pytest.fixture(scope="module")
def two() -> list[dict]:
    """Return the results of each of two ranks: transformers is imported once."""
    return run_ranks(2, _of_two)


def _of_two(rank: int) -> dict:
    return {
        "cases": {layout: cases(functools.partial(spread, layout)) for layout in LAYOUTS},
        "refused": [refused(run) for run in _copies()],
    }


def test_what_a_user_adds_acts_as_on_one_device_or_is_refused(two):
    """Loss and gradients are compared in float64, except transformers' own loss."""
    wanted = cases(lambda: perturbed("gpt2").double())
    for name, (_, _, outcomes) in CASES.items():
        for layout, outcome in zip(LAYOUTS, outcomes, strict=True):
            for rank in two:
                found = rank["cases"][layout][name]
                if outcome == EQUAL:
                    assert isinstance(found, dict), (name, layout, found)
                    assert_all_close(found, wanted[name])
                else:
                    assert isinstance(found, str), (name, layout)
                    assert outcome in found
                    assert "\n" not in found


def test_each_change_changes_the_loss_or_a_gradient_of_one_device():
    plain = computed(perturbed("gpt2").double(), {})
    changed = cases(lambda: perturbed("gpt2").double())
    for name, (_, options, outcomes) in CASES.items():
        if EQUAL in outcomes and not options:
            found = changed[name]
            assert found.keys() != plain.keys() or any(
                (found[n] - x).abs().max() > 1e-3 * x.abs().max() for n, x in plain.items()
            ), name


# ---------------------------------------------------------------- 2. copies


def refused(run) -> str:
    try:
        run()
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def _copies() -> list:
    model, llama = spread("tp"), spread("cp", "llama")
    experts = spread("cp", "gpt_oss", torch.float32)
    model.resize_token_embeddings(61)  # the same number as now
    inputs = batch()

    def stopped():
        llama.config.num_hidden_layers = 1
        return llama(inputs["input_ids"])

    class Renamed(type(llama.config)):
        @property
        def output_hidden_states(self):
            raise AttributeError

    def renamed():
        llama.config.__class__ = Renamed
        return llama(inputs["input_ids"])

    return [
        lambda: copy.deepcopy(model),
        lambda: pickle.dumps(model),
        lambda: copy.deepcopy(block(model)),
        lambda: model.resize_token_embeddings(70),
        lambda: llama.resize_token_embeddings(70),
        stopped,
        renamed,
        lambda: experts(inputs["input_ids"], output_router_logits=True),
        lambda: experts(inputs["input_ids"], output_hidden_states=True, output_attentions=True),
    ]


REFUSED = (
    "GPT2LMHeadModel is spread over Mesh(dp=1, cp=1, tp=2",
    "GPT2LMHeadModel is spread over Mesh(dp=1, cp=1, tp=2",
    "GPT2Block is spread over Mesh(dp=1, cp=1, tp=2",
    "its 61 embeddings cannot be resized to 70",
    "its 61 embeddings cannot be resized to 70",
    "LlamaModel: its forward did not reach the last of 2 layers",
    "has no output_hidden_states, which warpweave.hf reads",
    "GptOssDecoderLayer: with cp or sequence_parallel, each rank has router_",
    "with cp or sequence_parallel, each rank has attentions only for its own tokens; do not ",
)


def test_copies_other_sizes_and_other_outputs_are_refused(two):
    for rank in two:
        for message, wanted in zip(rank["refused"], REFUSED, strict=True):
            assert wanted in message
            assert "\n" not in message
