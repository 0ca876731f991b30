"""Arguments that transformers passes between modules, under whatever name: found, or refused."""

import inspect
import itertools

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="an extra of its own")

from hf_models import V, perturbed  # noqa: E402
from ranks import run_ranks  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

# A family, and how its layers receive the cache: as transformers passes it (GPT-2 by position),
# or by a name that no version of transformers has.
CASES = [("llama", False), ("llama", True), ("qwen3", False), ("gpt2", False), ("gemma2", True)]
STEPS = (8, 9, 13, 16)  # one token and several, also as many as ranks can share


def rename_cache(model: nn.Module) -> None:
    """Pass the cache to each decoder layer by a new name, as a later transformers may."""
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
    """Logits and cache of more tokens, whatever the model calls its cache."""
    name = cache_name(model)
    out = model(tokens, use_cache=True, **({} if cache is None else {name: cache}))
    return out.logits, out[name]


def cache_name(model: nn.Module) -> str:
    names = inspect.signature(type(model).forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _of_two(rank: int) -> tuple[list, list[str]]:
    import warpweave.hf as ww
    from warpweave.parallel.mesh import Mesh

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
    return found, said


def refusal(run) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        run()
    return str(refused.value)


def test_logits_with_a_cache_over_context_ranks_are_those_of_one_rank():
    """The cache may come by position or by an unknown name; one that is not whole is refused."""
    (found, said), (also, _) = run_ranks(2, _of_two)
    for (family, _), logits, others in zip(CASES, found, also, strict=True):
        with torch.no_grad():
            wanted = perturbed(family).eval()(ids(), use_cache=False).logits
        for x in (logits, others):
            assert (x - wanted).abs().max() <= 1e-5 * wanted.abs().max(), family
    part, unknown, learning = said
    assert "this cache was filled under gradients" in part
    assert "GPT2Block: prefix is a object, which may be a cache" in unknown
    assert "got 8 queries and 24 keys, but a mask of 8 and 16" in learning
