"""Check that changes made after `warpweave.hf.apply` are respected, or refused in one line.

For every family of `hf_families.py`, for the first module of every class: each attribute, child,
activation and dropout is changed, hooks are added, and each field of the configuration is changed,
one at a time, in the applied model and in the untouched one. Logits (also for few tokens), the loss
and all gradients must equal those of the untouched model (with its eager attention, or its "sdpa",
which reads `is_causal` if there is no mask). Otherwise the change must raise a one-line ValueError.
Changes that transformers itself refuses are skipped.

    python benchmarks/hf_changes.py [--only llama gpt2 ...]
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import hf_families
import torch
import transformers
from torch import nn

import warpweave.hf
from warpweave.hf.patch import ours_always

LIMITS = {"logits": 2e-5, "loss": 2e-5, "gradients": 1e-3}
NOISE = "dropout", "attn_pdrop", "attention_probs"  # in names: attention draws this differently


class Change(NamedTuple):
    """A change to a model: `make(model)` applies it and returns a function that undoes it."""

    name: str
    make: Callable[[nn.Module], Callable[[], None]]
    counts: bool = False  # a hook: compare how often it was called


# ---------------------------------------------------------------- 1. the changes


def changes(model: nn.Module) -> Iterator[Change]:
    """Yield changes to the first module of each class, and to the configuration."""
    known = set(vars(nn.Module()))
    kinds: dict[type, str] = {}
    for name, module in model.named_modules():
        kinds.setdefault(type(module), name)
    for name in kinds.values():
        module = model.get_submodule(name)
        for key, value in vars(module).items():
            for other in _others(value):
                if key not in known and not key.startswith(("_", "name_or_path", "layer_idx")):
                    yield Change(f"{name}.{key} = {_short(other)}", _setting(name, key, other))
        for key, child in module.named_children():
            for other in _other_children(child):
                yield Change(f"{name}.{key} = {_short(other)}", _placing(name, key, other))
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook"):
            yield Change(f"{name}: {kind}", _hooking(name, kind), counts=True)
    for key, value in model.config.to_dict().items():
        for other in _others(value):
            if key not in ("transformers_version", "model_type", "dtype", "_attn_implementation"):
                yield Change(f"config.{key} = {_short(other)}", _configuring(key, other))


def _short(value: Any) -> str:
    return getattr(value, "__name__", None) or " ".join(str(value).split())[:40]


def _half_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * torch.tanh(x)


class _HalfTanh(nn.Module):
    def forward(self, x):
        return _half_tanh(x)


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value + 1, value // 2]
    if isinstance(value, float):
        return [2 * value + 1, value / 2]
    if value is None:
        return [0.5]
    return [_half_tanh] if callable(value) and not isinstance(value, type) else []


def _other_children(child: nn.Module) -> list[nn.Module]:
    if isinstance(child, nn.Dropout):
        return [nn.Dropout(0.4)]
    if isinstance(child, nn.Linear):
        torch.manual_seed(5)
        other = copy.deepcopy(child)
        nn.init.normal_(other.weight, std=0.2)
        return [other]
    return [] if next(child.children(), None) or next(child.parameters(), None) is not None else [
        _HalfTanh()]  # fmt: skip


def _setting(name: str, key: str, other: Any) -> Callable:
    def make(model):
        module = model.get_submodule(name)
        before = vars(module)[key]
        setattr(module, key, other)
        return lambda: setattr(module, key, before)

    return make


def _placing(name: str, key: str, other: nn.Module) -> Callable:
    def make(model):
        module = model.get_submodule(name)
        before, new = getattr(module, key), copy.deepcopy(other).train(model.training)
        setattr(module, key, new)
        return lambda: setattr(module, key, before)

    return make


def _hooking(name: str, kind: str) -> Callable:
    """Return a change that adds a counting hook; forward hooks also change the values."""

    def make(model):
        def hook(module, args, *more):
            model.calls += 1
            if kind == "full_backward_hook":
                return None
            x = more[0] if more else args
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                return 1.25 * x
            if isinstance(x, tuple) and x and isinstance(x[0], torch.Tensor):
                return (1.25 * x[0], *x[1:]) if x[0].is_floating_point() else None
            return None

        return getattr(model.get_submodule(name), f"register_{kind}")(hook).remove

    return make


def _configuring(key: str, other: Any) -> Callable:
    def make(model):
        config = model.config
        before = getattr(config, key)
        setattr(config, key, other)
        return lambda: setattr(config, key, before)

    return make


# ---------------------------------------------------------------- 2. their effects


class Unlike(NamedTuple):
    """A change that was handled wrongly."""

    family: str
    change: str
    where: str
    what: str


def computed(model: nn.Module, inputs: dict, *, ours: bool) -> dict[str, Any]:
    """Return logits, loss, gradients and the number of hook calls, or the error instead."""
    found: dict[str, Any] = {}
    for where, always in (("logits", True), ("logits of few", False)):
        model.eval()
        with torch.no_grad(), ours_always() if ours and always else nullcontext():
            _note(found, model, where, lambda: hf_families.logits_of(model, inputs).detach())
    labels = inputs.get("decoder_input_ids", inputs["input_ids"])
    given = {k: v for k, v in inputs.items() if k != "decoder_input_ids"}

    def train():
        torch.manual_seed(3)
        model.train()
        loss = model(**given, labels=labels).loss
        gradients = hf_families.gradients_of(model, loss)
        return loss.detach(), {n: g.to_dense() for n, g in gradients.items()}

    _note(found, model, "loss", train)
    model.eval()
    return found


def _note(found: dict, model: nn.Module, where: str, run: Callable) -> None:
    model.calls = 0
    try:
        found[where] = run()
    except Exception as error:
        found[where] = error
    found[f"{where}: calls"] = model.calls


def _differs(where: str, ours: Any, theirs: Any) -> str | None:
    if where == "loss":
        loss = _differs("one", ours[0], theirs[0])
        worst = hf_families.largest_error(ours[1], theirs[1])
        return loss or (f"gradients by {worst:.1e}" if worst > LIMITS["gradients"] else None)
    if ours.shape != theirs.shape:
        return f"{[*ours.shape]} is not {[*theirs.shape]}"
    if not torch.isfinite(theirs).all():
        return None
    worst = hf_families.error(ours, theirs)
    return f"by {worst:.1e}" if worst > LIMITS["logits"] else None


@contextmanager
def changed(change: Change, *models: nn.Module) -> Iterator[None]:
    with ExitStack() as undo:
        for model in models:
            undo.callback(change.make(model))
        yield


def by_sdpa(theirs: nn.Module, change: Change, inputs: dict) -> dict[str, Any]:
    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("sdpa")
    with changed(change, theirs):
        return computed(theirs, inputs, ours=False)


def compare(family: str, only: Callable[[Change], bool] = lambda _: True) -> tuple[list, int, int]:
    """Return what was wrong in one family, how many changes had an effect, and how many were
    refused."""
    theirs = hf_families.make(family).eval()
    ours = copy.deepcopy(theirs)
    warpweave.hf.apply(ours, report=warpweave.hf.Report())
    inputs, wrong, acted, refused = hf_families.inputs_of(theirs), [], 0, 0
    before = computed(theirs, inputs, ours=False)
    for change in list(changes(theirs)):
        if not only(change):
            continue
        try:
            with changed(change, theirs, ours):
                wanted = computed(theirs, inputs, ours=False)
                found = computed(ours, inputs, ours=True)
        except Exception:  # transformers refuses it
            continue
        for where in ("logits", "logits of few", "loss"):
            x, y, was = found[where], wanted[where], before[where]
            if isinstance(y, Exception) or isinstance(was, Exception):
                continue
            acts = bool(_differs(where, was, y))
            acted += acts
            if isinstance(x, Exception):
                refused += 1
                what = None if isinstance(x, ValueError) and "\n" not in str(x) else repr(x)[:200]
            elif any(word in change.name for word in NOISE) and where == "loss" and acts:
                what = None if _differs(where, x, was) else "no effect"
            else:
                what = _differs(where, x, y)
            if what is not None and not isinstance(x, Exception):
                what = _differs(where, x, by_sdpa(theirs, change, inputs)[where])
            calls = f"{where}: calls"
            if what is None and not isinstance(x, Exception) and found[calls] != wanted[calls]:
                what = f"{found[calls]} hook calls, expected {wanted[calls]}"
            if what is not None:
                wrong.append(Unlike(family, change.name, where, what))
    return wrong, acted, refused


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", choices=hf_families.FAMILIES, help="only these")
    only = parser.parse_args().only
    transformers.logging.set_verbosity_error()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    total = {"families": 0, "acted": 0, "refused": 0, "wrong": 0}
    for family in only or hf_families.FAMILIES:
        start = time.perf_counter()
        wrong, acted, refused = compare(family)
        took = time.perf_counter() - start
        print(
            f"{family:18} {acted:4} acted, {refused:3} refused, {len(wrong)} wrong, {took:5.1f} s"
        )
        for each in wrong:
            print("   ", *each[1:], sep=" | ", flush=True)
        for name, n in zip(total, (1, acted, refused, len(wrong))):
            total[name] += n
    print(json.dumps(total))
    return 1 if total["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
