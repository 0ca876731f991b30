"""Checks of hooks and forwards that users put on a spread model: correct, or refused.

On one rank, a module may compute only a part: some of the tokens, heads or hidden units. A hook on
it, or a forward that replaces its own, would see only that part. `Untouched` compares both with
those that `apply` left, whenever `entered.Watch` detects a change of the layers:

    a layer                 its hooks see whole tokens, see `Tokens.forwards`
    inside a layer          refused if tokens are sharded
    inside a sharded part   (attention, feed-forward) refused over tensor ranks
    a sharded part          its backward hooks are refused: gradients are summed before them
    embedding and head      their hooks see whole outputs

This includes modules that entered later. New forwards are refused on every module that computes a
part. Hooks that only move parameters, such as those of `fully_shard`, are allowed.

If tokens are sharded between layers, the list of layers must be the one that `apply` found. Over
tensor ranks alone, every layer receives and returns whole tokens, and the list may change.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

from warpweave.hf import seen
from warpweave.hf.arguments import own
from warpweave.hf.changes import changes_of
from warpweave.hf.options import Spread
from warpweave.hf.plan import Tokens
from warpweave.hf.structure import CutPart

_BACKWARD = ("_backward_hooks",)
_REVERT = "call warpweave.hf.revert first"


class _Own(NamedTuple):
    """A module that computes a part, as `apply` left it."""

    name: str
    hooks: tuple[str, ...]  # the kinds of hooks that would see the part
    part: str  # the name of the part, for errors
    kind: type
    of_class: Callable  # the forward of its class
    forward: Any  # its own forward, or None


class Untouched:
    """Watch the hooks and forwards of a spread model. `layers` are the model's, in order, `parts`
    its attention and feed-forward modules that are sharded, and `styled` its modules with sharded
    parameters."""

    def __init__(
        self, model: Any, layers: list[nn.Module], parts: list[CutPart],
        styled: Collection[nn.Module], tokens: Tokens, spread: Spread,
    ) -> None:  # fmt: skip
        self.model, self.layers, self.tokens = model, layers, tokens
        names = {m: n for n, m in model.named_modules()}
        sharded = [part.module for part in parts if spread.mesh.size("tp") > 1]
        found: dict[nn.Module, tuple[tuple[str, ...], str]] = {}
        found |= dict.fromkeys(styled, ((), "rows"))  # embedding and head; those of parts follow
        for part in sharded:
            inner = dict.fromkeys(part.modules(), (seen.HOOKS, "heads or hidden units"))
            found |= inner | {part: (_BACKWARD, "heads or hidden units")}
        if tokens.divisor > 1:
            for layer in layers:
                found |= dict.fromkeys(layer.modules(), (seen.HOOKS, "tokens"))
                found[layer] = (), "tokens"
        self.own = {
            m: _Own(names[m], *what, type(m), type(m).forward, m.__dict__.get("forward"))
            for m, what in found.items()
        }
        self.roots = layers if tokens.divisor > 1 else sharded  # modules may enter here later
        held = {m for layer in layers for m in layer.modules()}
        self.ends = [m for m in self.own if m not in held]  # embedding and head
        self.stack, self.list = _stack_of(model, layers)
        if tokens.divisor > 1:
            before = self.stack.register_forward_pre_hook(self._enter, with_kwargs=True)
            after = self.stack.register_forward_hook(self._leave)
            changes_of(self.stack).hooks += [before, after]

    def layers_now(self) -> list[nn.Module]:
        """The model's current layers. Raises ValueError if they changed but must not."""
        found = [*getattr(self.stack, self.list)]
        if self.tokens.divisor > 1 and found != self.layers:
            more = len(found) - len(self.layers)
            what = "added" if more > 0 else "removed" if more < 0 else "replaced or moved"
            raise ValueError(
                f"{type(self.stack).__name__}.{self.list}: layers were {what}, but tokens stay "
                f"sharded over ranks from the first to the last of the {len(self.layers)} layers "
                "that apply(mesh=...) found; call warpweave.hf.revert, change the layers, and "
                "apply again"
            )
        return found

    def check_outside(self) -> None:
        """Raise ValueError for a global hook, or a new forward of the embedding or the head."""
        everywhere = seen.hooked_everywhere()
        if everywhere is not None and self.own:
            raise ValueError(
                f"a {everywhere} would see only one rank's part of {type(self.stack).__name__}; "
                f"remove it, or {_REVERT}"
            )
        for module in self.ends:
            self._check(module, self.own[module])

    def check_layers(self) -> None:
        """Raise ValueError, naming the module, if a hook or a new forward would see a part."""
        for root in self.roots:
            for module in root.modules():
                self._check(module, self.own[root])

    def _check(self, module: nn.Module, root: _Own) -> None:
        own = self.own.get(module)
        kinds, part = (seen.HOOKS, root.part) if own is None else (own.hooks, own.part)
        hook = seen.hooked(module, kinds)
        if hook is not None:
            name = next((n for n, m in self.model.named_modules() if m is module), "")
            raise ValueError(
                f"{name}: a {hook} would see only one rank's {part}; hook the layer that holds the "
                f"module, or {_REVERT}"
            )
        if own is None:
            return
        forward = module.__dict__.get("forward")
        same = type(module) is not own.kind or own.kind.forward is own.of_class
        if not same or (forward is not own.forward and seen.is_from_outside(forward)):
            raise ValueError(
                f"{own.name}: its forward was replaced, but the replacement would compute with "
                f"only one rank's {part}; {_REVERT}"
            )

    def _enter(self, stack: Any, args: tuple, kwargs: dict) -> None:
        """Pre-hook of the module that calls the layers."""
        self.tokens.inside = False
        config, asked = getattr(stack, "config", None), kwargs.get("output_hidden_states")
        if asked is None and config is not None:
            asked = own(config, "output_hidden_states")
        self.tokens.asked = {"hidden_states"} if asked else set()

    def _leave(self, stack: nn.Module, args: tuple, out: Any) -> None:
        """Hook of the module that calls the layers."""
        inside, self.tokens.inside = self.tokens.inside, False
        if inside:
            raise ValueError(
                f"{type(stack).__name__}: its forward did not reach the last of {len(self.layers)} "
                "layers, where tokens are gathered; call warpweave.hf.revert, change the number of "
                "layers, and apply again"
            )


def _stack_of(model: nn.Module, layers: list[nn.Module]) -> tuple[nn.Module, str]:
    """The module that holds the list of layers, and the name of that list."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and [*child] == layers:
                return module, name
    raise AssertionError("no nn.ModuleList holds exactly the layers found by apply()")


# ---------------------------------------------------------------- unsupported operations


def refuse_copies(model: Any, modules: Collection[nn.Module], spread: Spread) -> None:
    """Refuse to resize a model's embeddings, and to copy or pickle modules connected to ranks."""
    for module in modules:
        refuse = partial(_refuse_copy, type(module).__name__, str(spread.mesh.sizes))
        changes_of(module).set(module, "__reduce_ex__", refuse)
    before = model.get_input_embeddings()
    rows = before.num_embeddings if isinstance(before, nn.Embedding) else None

    def resize(model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings if the number of tokens stays the same."""
        if new_num_tokens in (None, rows) and not (args or kwargs.get("pad_to_multiple_of")):
            return model.get_input_embeddings()
        raise ValueError(
            f"{type(model).__name__} is spread over {spread.mesh.sizes}, so its {rows} embeddings "
            f"cannot be resized to {new_num_tokens}; call warpweave.hf.revert, resize, and apply "
            "again"
        )

    changes_of(model).set(model, "resize_token_embeddings", MethodType(resize, model))


def _refuse_copy(kind: str, mesh: str, protocol: int) -> Any:
    raise ValueError(
        f"{kind} is spread over {mesh} and holds connections to other ranks, which cannot be "
        "copied or pickled; use save_pretrained or state_dict, or call warpweave.hf.revert first"
    )
