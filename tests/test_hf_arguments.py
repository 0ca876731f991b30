"""Arguments that transformers passes between modules under any name: found, or rejected."""

import inspect
import itertools
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import V, perturbed  # noqa: E402
from ranks import run_ranks  # noqa: E402
from refused import check  # noqa: E402

import warpweave.hf as ww  # noqa: E402
from warpweave.hf import loss  # noqa: E402
from warpweave.hf.adapters import check_dropout, enter, is_wrapper  # noqa: E402
from warpweave.hf.arguments import cache_of, own  # noqa: E402
from warpweave.hf.attention import attention_forward  # noqa: E402
from warpweave.parallel.mesh import Mesh  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# A family, and how its layers receive the cache: as transformers passes it (GPT-2 by position), or
# by a name that no version of transformers uses.
CASES = [("llama", False), ("llama", True), ("qwen3", False), ("gpt2", False), ("gemma2", True)]
STEPS = (8, 9, 13, 16)  # one token and several, including as many as ranks can share


def rename_cache(model: nn.Module) -> None:
    """Pass the cache to each decoder layer by a new name, as a later transformers may do."""
    for layer in model.get_decoder().layers:
        theirs = type(layer)

        class Renamed(theirs):
            def __call__(self, *args, **kwargs):
                (self.name,) = (n for n, x in kwargs.items() if isinstance(x, transformers.Cache))
                kwargs["keys_of_before"] = kwargs.pop(self.name)
                return super().__call__(*args, **kwargs)

            def forward(self, *args, keys_of_before=None, **kwargs):
                return super().forward(*args, **{self.name: keys_of_before}, **kwargs)

        layer.__class__ = Renamed


def ids() -> torch.Tensor:
    return torch.randint(3, V, (2, 16), generator=torch.Generator().manual_seed(4))


def step(model: nn.Module, tokens: torch.Tensor, cache=None):
    """Return logits and cache of more tokens, for any name of the cache."""
    name = cache_name(model)
    out = model(tokens, use_cache=True, **({} if cache is None else {name: cache}))
    return out.logits, out[name]


def cache_name(model: nn.Module) -> str:
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _of_two(rank: int) -> tuple[list, list[str]]:
    mesh, found, said = Mesh(cp=2).connect(), [], []
    for family, renamed in CASES:
        model = ww.apply(perturbed(family), mesh=mesh, report=ww.Report()).eval()
        if renamed:
            rename_cache(model)
        with torch.no_grad():
            logits, cache = step(model, ids()[:, : STEPS[0]])
            parts = [logits]
            for start, stop in itertools.pairwise(STEPS):
                logits, cache = step(model, ids()[:, start:stop], cache)
                parts.append(logits)
        found.append(torch.cat(parts, 1))
    model = ww.apply(perturbed("gpt2"), mesh=mesh, report=ww.Report()).eval()
    _, part = step(model, ids()[:, :8])
    with torch.no_grad():
        _, whole = step(model, ids()[:, :8])
        said.append(refusal(lambda: step(model, ids()[:, 8:9], part)))
        other = {"prefix": object()}
        layer = model.transformer.h[0]
        said.append(refusal(lambda: layer(torch.zeros(2, 8, 32), **other)))
    said.append(refusal(lambda: step(model, ids()[:, 8:], whole)))
    heads, module = torch.randn(2, 4, 8, 8), model.transformer.h[0].attn
    said.append(refusal(lambda: attention_forward(module, heads, heads, heads, None, dropout=0.1)))
    return found, said


def refusal(run) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        run()
    return str(refused.value)


def test_logits_with_a_cache_over_context_ranks_are_those_of_one_rank():
    """The cache may come by position or by an unknown name; an incomplete one is rejected."""
    (found, said), (also, _) = run_ranks(2, _of_two)
    for (family, _), logits, others in zip(CASES, found, also, strict=True):
        with torch.no_grad():
            wanted = perturbed(family).eval()(ids(), use_cache=False).logits
        for x in (logits, others):
            assert (x - wanted).abs().max() <= 1e-5 * wanted.abs().max(), family
    part, unknown, learning, dropout = said
    assert "this cache was filled while gradients were enabled" in part
    assert "GPT2Block: prefix is a object, which may be a cache" in unknown
    assert "got 8 queries and 24 keys, but a mask for 8 queries and 16 keys" in learning
    assert "GPT2Attention: attention dropout is not supported with apply(mesh=...)" in dropout


TENSOR, CACHE = torch.zeros(2), transformers.DynamicCache()


@pytest.mark.parametrize("name", ["past_key_values", "cache", "layer_past", "of_a_new_version"])
def test_a_cache_is_found_under_any_name_and_at_any_place(name):
    plain = {
        "use_cache": True, "cache_position": TENSOR, "position_embeddings": (TENSOR, TENSOR),
        "shared": {"full": [TENSOR, None]}, "past_key_values": None, "config": None, "kind": "full",
    }  # fmt: skip
    assert cache_of(nn.Tanh(), (TENSOR, None), plain) is None
    assert cache_of(nn.Tanh(), (TENSOR,), plain | {name: CACHE}) is CACHE
    assert cache_of(nn.Tanh(), (TENSOR, CACHE, None), plain) is CACHE


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [
        ((TENSOR, object()), {}, "argument 1 is a object"),
        ((), {"state": object()}, "state is a object"),
        ((), {"states": [TENSOR, object()]}, "states is a list"),
        ((), {"past_key_value": (TENSOR, TENSOR)}, "past_key_value is a tuple"),
        ((), {"kv_cache": {"k": TENSOR}, "cache": CACHE}, "kv_cache is a dict"),
    ],
)
def test_what_may_be_a_cache_of_another_kind_is_refused(args, kwargs, named):
    with pytest.raises(ValueError, match=f"^Tanh: {named}, which may be a cache but is not"):
        cache_of(nn.Tanh(), args, kwargs)


def test_a_cap_of_logits_is_seen_on_a_new_model_under_any_name():
    """Its logits are so far below the cap that rounding hides the effect."""
    model = perturbed("gemma2")
    model.config.final_logit_softcapping = 30.0
    with torch.no_grad():
        model.lm_head.weight.mul_(0.05)
    inputs = {"input_ids": ids()}
    assert model(**inputs).logits.abs().max() < 0.1
    assert loss.find_loss_form(model, inputs).softcap == 30.0
    with mock.patch.object(loss, "_softcap_of", return_value=None):
        assert loss.find_loss_form(model, inputs) == "its logits are not its head's output"


def test_an_adapter_of_a_peft_without_variants_is_refused():
    peft = pytest.importorskip("peft", reason="an extra of its own")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(perturbed("llama"), config)
    wrapper = next(filter(is_wrapper, model.modules()))
    enter(wrapper, "q", None, ())
    del wrapper.lora_variant
    words = "q: Linear has no lora_variant, which distinguishes LoRA"
    check(lambda: enter(wrapper, "q", None, ()), words)


def test_dropout_of_an_unknown_kind_is_refused():
    for harmless in (nn.Identity(), nn.Dropout(0.0)):
        check_dropout(harmless, "x")
    for module, words in (
        (nn.Dropout(0.1), r"x: .*dropout 0.1 is not supported with apply\(mesh=...\)"),
        (nn.Tanh(), r"x: .*of an unknown kind is not supported with apply\(mesh=...\)"),
    ):
        check(partial(check_dropout, module, "x"), words)


@pytest.mark.parametrize("owner", [transformers.PreTrainedModel, transformers.LlamaConfig()])
def test_a_name_that_transformers_has_not_is_refused(owner):
    assert own(owner, "__doc__") == owner.__doc__
    words = "^(PreTrainedModel|LlamaConfig) of transformers .* has no"
    check(lambda: own(owner, "_of_an_old_version"), words)
