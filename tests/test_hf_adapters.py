"""Adapters, hooks and other parts on layers of a model that `warpweave.hf.apply` spreads over
ranks, before or after it. The truth is plain peft, or the plain model, on one device."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

transformers = pytest.importorskip("transformers", reason="an extra of its own")
peft = pytest.importorskip("peft", reason="an extra of its own")

from hf_models import assert_all_close, batch, perturbed, reported  # noqa: E402
from ranks import run_ranks  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.layers.sharding.dtensor import whole  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

SP = {"sequence_parallel": True}
TARGETS = {
    "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head", "embed_tokens"],
    "gpt2": ["c_attn", "c_fc", "c_proj"],
}
LIVES = [
    *(("llama", *how, before) for how in (({"tp": 2}, {}), ({"tp": 2}, SP), ({"cp": 2}, {}))
      for before in (True, False)),
    ("gpt2", {"tp": 2}, {}, True), ("gpt2", {"tp": 2}, {"overlap": "chunked", **SP}, False),
]  # fmt: skip


@functools.cache  # gloo's threads of every group wake up a hundred times per second
def connected(**sizes: int):
    return Mesh(**sizes).connect()


def applied(model: nn.Module, sizes: dict, options: dict | None = None) -> nn.Module:
    ww.apply(model, mesh=connected(**sizes), report=ww.Report(), **(options or {}))
    return model


def adapted(model: nn.Module, targets: list[str], **more) -> nn.Module:
    torch.manual_seed(4)
    with warnings.catch_warnings():  # about transposed layers, those of GPT-2
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights=False, **more)
        return peft.get_peft_model(model, config)


def computed(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return logits of a training forward, and gradients of their squares: all in float64."""
    model.zero_grad()
    logits = model.train()(input_ids=batch()["input_ids"], use_cache=False).logits
    logits.square().mean().backward()
    grads = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **grads}


def lora_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in model.named_parameters() if "lora_" in n}


def lora_life(family: str, folder: str, spread=None, *, before: bool = True) -> dict:
    """Return the results of a model with LoRA, also after a step of an optimizer that was made
    before its first forward, merged and unmerged, and the files it saves."""
    reference = adapted(perturbed(family).double(), TARGETS[family])
    model = perturbed(family).double()
    if spread is not None and not before:
        spread(model)
    model = adapted(model, TARGETS[family])
    if spread is not None and before:
        spread(model)
    found = {}
    parameters = lora_parameters(model)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.1)
    with torch.no_grad():
        model.eval()(input_ids=batch()["input_ids"], use_cache=False)
        for name, p in lora_parameters(reference).items():
            assert parameters[name] is model.get_parameter(name)
            assert type(parameters[name]) is nn.Parameter
            parameters[name].copy_(p)  # keeps its shape, whatever peft made of a sharded layer
    found["trained"] = computed(model)
    optimizer.step()
    found["stepped"] = computed(model)
    model.zero_grad()
    loss = model(**batch(), num_items_in_batch=17).loss
    loss.backward()
    found["loss"] = {"loss": loss.detach()} | {n: p.grad for n, p in parameters.items()}
    with torch.no_grad():
        ids = batch()["input_ids"]
        model.merge_adapter()
        found["merged"] = {"logits": model.eval()(input_ids=ids, use_cache=False).logits}
        model.unmerge_adapter()
        found["unmerged"] = {"logits": model.eval()(input_ids=ids, use_cache=False).logits}
        with model.disable_adapter():
            found["disabled"] = {"logits": model(input_ids=ids, use_cache=False).logits}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the embedding is saved as well
        model.save_pretrained(folder)
    found["saved"] = load_file(f"{folder}/adapter_model.safetensors")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> list[dict]:
    """Return the results of each of two ranks: transformers is imported once."""
    return run_ranks(2, _of_two, str(tmp_path_factory.mktemp("adapters")))


def _of_two(rank: int, folder: str) -> dict:
    lives = []
    for n, (family, sizes, options, before) in enumerate(LIVES):
        spread = functools.partial(applied, sizes=sizes, options=options)
        lives.append(lora_life(family, f"{folder}/{n} {rank}", spread, before=before))
    return {"lives": lives, "changed": all_changed(), "refused": _refused(rank)}


LIMITS = {"llama": 1e-5, "gpt2": 1e-11}  # transformers rounds RMS norms to float32


def test_lora_over_ranks_is_plain_peft_before_and_after_apply(two, tmp_path):
    wanted = {family: lora_life(family, str(tmp_path / family)) for family in TARGETS}
    for rank in two:
        for (family, *_), found in zip(LIVES, rank["lives"], strict=True):
            for what, numbers in wanted[family].items():
                limit = 1e-5 if what == "loss" else LIMITS[family]  # theirs is float32
                assert_all_close(found[what], numbers, limit)


# ---------------------------------------------------------------- 2. other changes


class Scaled(nn.Module):
    """A hook with a parameter, which may be registered on the model or not."""

    def __init__(self, features: int, like: torch.Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, features).to(like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Tuned(nn.Module):
    """A third-party feed-forward module."""

    def __init__(self, like: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(32, 24), nn.Linear(24, 32)
        self.to(like)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.sigmoid(self.up(x)))


def layer_of(model: nn.Module, n: int = 1) -> nn.Module:
    return model.get_decoder().layers[n]


def weight_of(model: nn.Module) -> torch.Tensor:
    return next(model.parameters())


def new_norm(model: nn.Module) -> None:
    torch.manual_seed(5)
    layer_of(model).input_layernorm = nn.LayerNorm(32).to(weight_of(model).dtype)


def new_mlp(model: nn.Module) -> None:
    layer_of(model).mlp = Tuned(weight_of(model).new_empty(0, dtype=torch.float64))


def hooked(model: nn.Module, where: str, *, owned: bool, features: int = 32) -> None:
    scaled = Scaled(features, torch.empty(0, dtype=torch.float64))
    module = layer_of(model).get_submodule(where)
    if owned:
        model.scaled = scaled
    if where == "mlp":
        module.register_forward_pre_hook(lambda _, args: (args[0] * scaled.scale, *args[1:]))
    else:
        module.register_forward_hook(lambda _, args, y: y * scaled.scale)


def between(model: nn.Module) -> None:
    """A parameter of the model itself, between two layers."""
    model.gain = nn.Parameter(torch.linspace(0.5, 1.5, 32, dtype=torch.float64))
    hook = lambda _, args: (args[0] * model.gain, *args[1:])  # noqa: E731
    layer_of(model).register_forward_pre_hook(hook, prepend=True)


def own_parameter(model: nn.Module) -> None:
    """A parameter of a layer, in a hook that sees whole tokens."""
    layer = layer_of(model)
    layer.gain = nn.Parameter(torch.linspace(0.5, 1.5, 32, dtype=torch.float64))
    layer.register_forward_hook(lambda m, args, y: y * m.gain)


def hooked_adapter(model: nn.Module) -> nn.Module:
    model = adapted(model, ["q_proj"])
    wrapper = layer_of(model.get_base_model()).self_attn.q_proj
    wrapper.lora_A.default.register_forward_hook(lambda _, args, y: y - y.mean(1, keepdim=True))
    return model


def own_forward(model: nn.Module) -> None:
    """A forward that reads the weight of a module that it does not call."""
    norm, mlp = layer_of(model).post_attention_layernorm, layer_of(model).mlp
    before = mlp.forward
    mlp.forward = lambda x: before(x) * norm.weight


def tuned_norms(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about an unknown layer
        return peft.get_peft_model(model, peft.LNTuningConfig(target_modules=["input_layernorm"]))


CHANGED = {
    "a norm": new_norm,
    "an mlp": new_mlp,
    "a hook's parameter": lambda m: hooked(m, "input_layernorm", owned=False),
    "a hook's parameter, the model's": lambda m: hooked(m, "mlp", owned=True),
    "a scalar on the heads": lambda m: hooked(m, "self_attn.q_proj", owned=True, features=1),
    "a parameter between layers": between,
    "a layer's parameter": own_parameter,
    "a hook of an adapter": hooked_adapter,
    "a forward": own_forward,
    "a parametrization": lambda m: parametrizations.weight_norm(layer_of(m).mlp.up_proj),
    "weight norm": lambda m: torch.nn.utils.weight_norm(layer_of(m).self_attn.o_proj),
    "pruning": lambda m: prune.l1_unstructured(layer_of(m).self_attn.q_proj, "weight", 0.3),
    "pruned norm": lambda m: prune.l1_unstructured(layer_of(m).input_layernorm, "weight", 0.3),
    "dora": lambda m: adapted(m, ["q_proj", "down_proj"], use_dora=True),
    "dropout": lambda m: adapted(m, ["q_proj"], lora_dropout=0.1),
    "ia3": lambda m: peft.get_peft_model(
        m, peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    ),
    "adalora": lambda m: peft.get_peft_model(
        m, peft.AdaLoraConfig(target_modules=["q_proj"], total_step=9, init_r=3)
    ),
    "norms": tuned_norms,
    "a norm saved, too":
    lambda m: adapted(m, ["embed_tokens"], modules_to_save=["input_layernorm"]),
}  # fmt: skip
# The outcome, if changed before or after `apply`: the numbers of one device, or an error.
EQUAL = ""
PART, LINEAR = "its gradient would miss some tokens", "quantized, wrapped or hooked"
GAIN = "model.layers.1.gain is used outside its own module's forward"
HEADS = "would see only one rank's heads or hidden units"
TOKENS = "would see only one rank's tokens"
FORWARD = "would compute with only one rank's tokens"
NEW, MIXED = "a parameter was added to a Llama", "got mixed torch.Tensor"
MADE = "is computed (for example, by pruning) from a parameter"
DORA, DROPOUT = "is a DoraLinearVariant", "dropout 0.1 is not supported"
OTHER = "does not compute B A x"
NEVER = None  # rejected by torch or peft, when the change is made
OUTCOMES = {
    ("cp", False): {
        "a norm": (EQUAL, EQUAL), "an mlp": (EQUAL, EQUAL), "a hook's parameter": (TOKENS, TOKENS),
        "a hook's parameter, the model's": (TOKENS, TOKENS),
        "a scalar on the heads": (LINEAR, TOKENS), "a parameter between layers": (EQUAL, EQUAL),
        "a layer's parameter": (GAIN, GAIN), "a forward": (PART, FORWARD),
        "a hook of an adapter": (TOKENS, TOKENS),
        "a parametrization": (EQUAL, EQUAL), "weight norm": (LINEAR, EQUAL),
        "pruning": (LINEAR, EQUAL), "pruned norm": (PART, EQUAL), "dora": (DORA, DORA),
        "dropout": (DROPOUT, DROPOUT), "ia3": (OTHER, OTHER), "norms": (EQUAL, EQUAL),
        "a norm saved, too": (EQUAL, EQUAL), "adalora": (OTHER, OTHER),
    },
    ("tp", False): {
        "an mlp": (EQUAL, EQUAL), "a hook's parameter": (EQUAL, EQUAL),
        "a hook's parameter, the model's": (MIXED, PART), "a scalar on the heads": (LINEAR, HEADS),
        "a hook of an adapter": (HEADS, HEADS), "a layer's parameter": (EQUAL, EQUAL),
        "a parametrization": (EQUAL, NEW), "weight norm": (LINEAR, NEW),
        "pruned norm": (MIXED, MADE), "dora": (DORA, NEVER), "norms": (EQUAL, EQUAL),
    },
    ("tp", True): {
        "a norm": (EQUAL, EQUAL), "a hook's parameter": (TOKENS, TOKENS), "ia3": (OTHER, OTHER),
        "a parameter between layers": (EQUAL, EQUAL), "a layer's parameter": (GAIN, GAIN),
        "a norm saved, too": (EQUAL, EQUAL),
    },
}  # fmt: skip


def changed(change, spread=None, *, before: bool = True) -> dict | str:
    """Return the results of a changed model, or the error."""
    model = perturbed("llama").double()
    try:
        if spread is not None and not before:
            spread(model)
            computed(model)  # a change that comes after some steps
        wrapped = change(model)
        model = wrapped if isinstance(wrapped, peft.PeftModel) else model
        if spread is not None and before:
            spread(model)
        return computed(model)
    except ValueError as error:
        return str(error)


def all_changed() -> dict[tuple, dict | str]:
    found = {}
    for (axis, sp), outcomes in OUTCOMES.items():
        for what, expected in outcomes.items():
            for before, outcome in zip((True, False), expected):
                if outcome is not NEVER:
                    spread = functools.partial(_spread, axis, sp)
                    key = (axis, sp, what, before)
                    found[key] = changed(CHANGED[what], spread, before=before)
    return found


def _spread(axis: str, sp: bool, model: nn.Module) -> nn.Module:
    return applied(model, {axis: 2}, {"sequence_parallel": sp})


def test_what_enters_layers_is_that_of_one_device_or_refused_by_name(two):
    wanted = {what: changed(change) for what, change in CHANGED.items()}
    for rank in two:
        for (axis, sp, what, before), found in rank["changed"].items():
            outcome = OUTCOMES[axis, sp][what][not before]
            if outcome is EQUAL:
                assert isinstance(found, dict), (axis, sp, what, before, found)
                assert_all_close(found, wanted[what])
            else:
                assert isinstance(found, str), (axis, sp, what, before)
                assert outcome in found, (axis, sp, what, before)
                assert "\n" not in found


def _refused(rank: int) -> list[str]:
    """Return the errors for LoRA with which ranks would compute different results."""
    said = []
    for seed, shift, reentrant in ((rank, 0, False), (4, rank, False), (4, 0, True)):
        model = applied(perturbed("llama").double(), {"cp": 2})
        torch.manual_seed(seed)
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
        if reentrant:
            model.base_model.gradient_checkpointing_enable({"use_reentrant": True})
            model.base_model.enable_input_require_grads()
        ids = batch()["input_ids"].roll(shift, 1)
        with pytest.raises(ValueError) as refusal:  # noqa: PT011 - compared below
            model.train()(input_ids=ids, use_cache=False).logits.sum().backward()
        said.append(str(refusal.value))
    return said


def test_ranks_with_other_adapters_or_tokens_are_told(two):
    for rank in two:
        alike, tokens, checkpoints = rank["refused"]
        assert "q_proj.lora_A.default.weight: the ranks hold different values" in alike
        assert "received different tokens" in tokens  # although peft calls no hook of the model
        assert "reentrant gradient checkpointing hides what was added" in checkpoints


# ---------------------------------------------------------------- 3. on one device


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_report_of_a_model_with_adapters_names_every_mlp(family):
    model = adapted(perturbed(family), TARGETS[family])
    found = [(e.replaced, e.why) for e in reported(model).entries if e.module.endswith("MLP")]
    why = {"llama": (True, "gated silu"), "gpt2": (False, "adapters on its linear layers")}
    assert found == [why[family]] * 2
    assert_all_close(computed(model), computed(adapted(perturbed(family), TARGETS[family])), 1e-5)
